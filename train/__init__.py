"""Training: the command, its settings, dry run, report and speed measurement."""
