"""The losses of the drafter's head, logits and gradient in one pass over chunks of rows."""
