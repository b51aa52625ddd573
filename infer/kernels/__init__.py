"""Pure functions of tensors, each with a plain twin: attention, sampling, acceptance. Imports nothing else of the
project.
"""
