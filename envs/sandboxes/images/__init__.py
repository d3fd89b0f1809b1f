"""Container images: this machine's Python as one, images by name, what is kept, and a Python for those without."""
