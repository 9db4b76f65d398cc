"""What a notebook has beside the Python API: the ``%tensorplay`` magics."""
