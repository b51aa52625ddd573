"""From features to a loss: unroll, supervision, losses, how often serving visits a depth."""
