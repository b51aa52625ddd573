"""The pieces of a decoder layer between two matrix products."""
