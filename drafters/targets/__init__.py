"""Targets: from what the user names to a loaded transformers model, its taps and its chat template."""
