"""Recomputation: which values the backward pass computes again instead of keeping them."""
