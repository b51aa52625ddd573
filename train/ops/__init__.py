"""Operations that only training uses, with their gradients."""
