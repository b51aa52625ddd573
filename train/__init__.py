"""Training: from conversations to a drafter. Reads the pivot `drafters.eagle3_ssd`, never `infer`."""
