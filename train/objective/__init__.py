"""From features to a loss: unroll, supervision, losses, visited depths."""
