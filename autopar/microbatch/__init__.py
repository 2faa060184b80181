"""Microbatches: how values scale with the batch, and the accumulation of gradients and losses."""
