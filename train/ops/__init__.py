"""Operations of training, with gradients: `reference` is plain torch, `cpu` and `triton` are compiled."""
