"""Running a step in microbatches: how values scale with the batch, and accumulating gradients and losses over microbatches."""
