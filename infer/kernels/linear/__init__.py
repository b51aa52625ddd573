"""Linear layers of inference: packed for the machine, projections of one input fused."""
