"""Operations of inference, one folder each: `reference` is plain torch, `cpu` is compiled."""
