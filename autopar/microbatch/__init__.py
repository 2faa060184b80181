"""Microbatches: how values scale with the batch, and the accumulation of gradients and losses.

Modules in the order in which to read them:

1. `splitting` splits a traced step into what runs for each microbatch and what runs once.
2. `batch_scaling` decides whether values of microbatches are added, averaged, joined or the same.
   `batch_scaling_rules` and `batch_scaling_constants` have its rules, for which `example_blocks`
   and `inner_bodies` find the rows of the examples. `loop_scalings` and `row_loops` have the rules
   of loops, and `batch_statistics` those of statistics that are used before they are complete.
3. `body_boundary` selects the values that are accumulated; `gradients` marks those of the user's
   gradient functions.
4. `accumulation` runs the loop over microbatches, whose rows `batch_rows` cuts and joins.

The other modules let more steps split. Each rewrites a step, or admits a kind of value:

- `whole_batch`: equations after the gradient, which contain the size of the whole batch.
- `deferred_division`: means with weights, such as masked means.
- `own_statistics`: batch normalization, with statistics of each microbatch.
- `prepared_inputs`: values that need the whole batch before the first microbatch.
- `created_rows`, `row_positions`: random bits and counters of examples.
- `row_lookups`: lookups in an example's own row.

`exactness` reports where microbatches differ from the whole batch.
"""
