"""What a run takes, from shapes alone: FLOPs, bytes, hours."""
