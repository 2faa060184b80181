"""Intra-operator planning: the sharding of every value of a step on a logical mesh.

`plan_shardings` runs the steps in this order; the other modules are parts of one of them:

1. `objective` lists the decisions of a step, with the seconds of their options.
2. `step_memory` gives the bytes of each program point as a function of the choice.
3. `solve_within_memory` finds the cheapest choice that fits. It adds capacity constraints to the
   `selection_problem`, and `solver` solves it.
4. `imposed_constraints` lists the shardings that make XLA's partitioner follow the choice.
"""
