"""The draft process's side of a round: look-up, drafting in sequence, glue, choice of outcomes, tree."""
