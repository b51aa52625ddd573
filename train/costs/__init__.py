"""What a run takes: FLOPs, bytes, hours, from shapes alone."""
