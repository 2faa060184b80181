"""Placement of the update: the stage that runs each of its equations.

Sums and parameters are where their stages are. Each other unit of the update goes to its largest
operand, so that only smaller values cross between stages.
"""

from collections.abc import Mapping, Sequence, Set

from jax.extend.core import Var

from autopar.ir.array_sizes import value_bytes
from autopar.ir.equation_groups import Unit


def update_stages(
    tail: Sequence[Unit],
    producer: Mapping[Var, Unit],
    inputs: Set[Var],
    stage_with: Mapping[Var, int],
) -> dict[int, int]:
    """Return the stage of each unit of the update, by unit number.

    It is the stage of the largest value that the unit reads. A unit that reads only inputs that no
    stage has goes to the stage of its first reader, or else to stage 0.

    Args:
        tail: units of the update, in order.
        producer: unit that computes each value.
        inputs: inputs of the step.
        stage_with: stage of each value that has one: sums, and inputs that the body reads.
    """
    placement = _UpdatePlacement(tail, producer, inputs, stage_with)
    while placement.place_by_operands() + placement.place_by_readers():
        pass
    return {unit.number: placement.stage_of.get(unit.number, 0) for unit in tail}


class _UpdatePlacement:
    """Stages of the units of the update, which grow pass by pass.

    Attributes:
        stage_of: stage of each unit that has one, by unit number.
        stage_with: stage of each value that has one.
    """

    def __init__(
        self,
        tail: Sequence[Unit],
        producer: Mapping[Var, Unit],
        inputs: Set[Var],
        stage_with: Mapping[Var, int],
    ) -> None:
        self._tail = tail
        self._numbers = {unit.number for unit in tail}
        self._producer = producer
        self._inputs = inputs
        self.stage_of: dict[int, int] = {}
        self.stage_with = dict(stage_with)

    def place_by_operands(self) -> int:
        """Place units where their largest operand is, and return how many were placed."""
        num_placed = len(self.stage_of)
        for unit in self._tail:
            placed = [var for var in unit.reads if var in self.stage_with]
            if unit.number not in self.stage_of and placed:
                largest = max(placed, key=lambda var: (value_bytes(var), -self.stage_with[var]))
                self.stage_of[unit.number] = self.stage_with[largest]
            if unit.number in self.stage_of:
                stage = self.stage_of[unit.number]
                self.stage_with.update(dict.fromkeys(unit.makes, stage))
        return len(self.stage_of) - num_placed

    def place_by_readers(self) -> int:
        """Place units and inputs where a unit reads them, and return how many units were placed."""
        num_placed = len(self.stage_of)
        for unit in reversed(self._tail):
            if unit.number not in self.stage_of:
                continue
            stage = self.stage_of[unit.number]
            for var in unit.reads:
                source = self._producer.get(var)
                if source is not None and self._is_pending(source):
                    self.stage_of[source.number] = stage
                elif var in self._inputs and not is_small(var):
                    self.stage_with.setdefault(var, stage)
        return len(self.stage_of) - num_placed

    def _is_pending(self, unit: Unit) -> bool:
        return unit.number in self._numbers and unit.number not in self.stage_of


def is_small(var: Var) -> bool:
    """Return whether a value may be computed twice: scalars and random keys."""
    return value_bytes(var) <= 16
