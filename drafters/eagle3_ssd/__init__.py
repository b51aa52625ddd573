"""What training and serving agree on: the EAGLE-3 model, slot alignment, draft vocabulary, outcomes, checkpoint."""
