"""Training data: conversations to token rows, corpora written by the target, manifests, prompts to measure on."""
