"""The commands of the ``palaestra`` program, one a module; ``palaestra.cli`` gives them their names and options."""
