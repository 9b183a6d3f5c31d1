"""One module a verb; what the command line and the Python API call."""
