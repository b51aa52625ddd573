"""Operations that only training uses, with gradients: `reference` is plain torch, `cpu` and `triton` are compiled."""
