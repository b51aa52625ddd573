"""A target writes its own corpus: prompts, answers, the work directory, merging."""
