"""From what the user names to a loaded transformers model, its identity, its taps and its chat template."""
