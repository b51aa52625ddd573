"""From logits to tokens: processing, keyed random numbers, acceptance, Saguaro sampling."""
