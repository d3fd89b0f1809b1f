"""The parts of ``sandboxes.py``: each measures one thing and returns its figures under the names of the report."""
