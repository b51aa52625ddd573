"""From logits to tokens: processing, keyed draws, acceptance, Saguaro."""
