"""Traces of the rounds of both processes, for Perfetto or as a picture."""
