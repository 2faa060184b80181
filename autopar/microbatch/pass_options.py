"""The options of a pass over the microbatches of a step."""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PassOptions:
    """How a pass over the microbatches of a step may compute.

    Attributes:
        count: the number of microbatches.
        batch: the inputs whose first dim is the batch, with the positions of the examples.
        positions: the input with the positions of the examples
            (`autopar.microbatch.row_positions`); None if the pass needs none.
        completed: the inputs that an earlier pass completes, and which depend on the batch.
        stages: whether the step is cut into pipeline stages, which run each microbatch only once.
        gradient_free: whether the pass may take no gradient.
        own_statistics: whether microbatches may use statistics of their own
            (`autopar.microbatch.own_statistics`).
        own_loops: whether each microbatch runs loops until the last of its own examples is done.
        is_first_pass: whether a later pass reads the results (`autopar.microbatch.first_pass`).
    """

    count: int
    batch: frozenset[int]
    positions: int | None = None
    completed: Collection[int] = ()
    stages: bool = False
    gradient_free: bool = False
    own_statistics: bool = False
    own_loops: bool = False
    is_first_pass: bool = False

    @property
    def examples(self) -> frozenset[int]:
        """The inputs whose first dim is the batch, without the positions of the examples."""
        return self.batch - {self.positions}
