"""The draft process: look-up, sequential drafting, glue, outcomes, tree."""
