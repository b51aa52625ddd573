"""Corpora written by the target itself: prompts, answers, resumable work files, merging."""
