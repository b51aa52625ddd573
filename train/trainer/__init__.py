"""The training run: preparation, loop, step, state."""
