"""The small operations of a decoder layer, with gradients."""
