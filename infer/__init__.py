"""Serving: the commands, the Python API, and how an engine is launched."""
