"""Message passing (TRW-S) on a selection problem, many decisions in each call of NumPy.

Sequential tree-reweighted message passing (Kolmogorov, PAMI 2006) moves costs between decisions and
their edges. The cost of every choice stays the same, no cost is negative, and the constant part
grows. The constant is a lower bound of all choices; an option whose cost exceeds the difference of
a known choice and that bound is dropped. The method solves the dual of the linear relaxation.
Layers that repeat form a chain, along which few sweeps propagate the bound.

The method visits decisions one by one. Decisions without a common edge do not affect one another,
so a sweep is a sequence of *levels*, each of which takes a few calls of NumPy on flat arrays. A
decision is in the level after the last of its neighbours that come before it.

Each edge has two *sides*, one for each of its decisions. A *slot* is an option of a decision on its
side of an edge. Slots whose costs are equal up to a constant are one *class*; edges store costs by
classes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.sharding.presolve import Reduction

_LARGE_EDGE = 512
"""Least number of pairs of options of an edge whose equal rows and columns are looked for."""

_ROUNDING = 1e-14
"""Difference of costs that is rounding, relative to the largest cost of an edge."""


@dataclass(frozen=True, slots=True)
class _Level:
    """Decisions that are visited together.

    Positions of options, rows, pairs and slots count from the first one of the level.

    Attributes:
        decisions: the decisions.
        options: their options.
        first_options: position of the first option of each decision.
        decision_of: position of the decision of each option.
        parts: number of parts in which the cost of each option is shared.
        costs: costs of edges by pairs of classes, row by row; a row is a class of a decision.
        first_pairs: position of the first pair of each row.
        senders: class of the neighbour of each pair.
        classes: class of each row.
        slots: slots of the decisions.
        row_of: row of each slot.
        option_of: option of each slot.
        by_row: slots in the order of their rows.
        first_by_row: position in `by_row` of the first slot of each row.
        later: slots of edges with decisions that are visited later.
        earlier: slots of edges with decisions that are visited earlier.
        earlier_pairs: first pair of the row of each of `earlier`.
        earlier_decisions: the neighbour of each of `earlier`.
        earlier_slots: first slot of the neighbour's side.
    """

    decisions: np.ndarray
    options: np.ndarray
    first_options: np.ndarray
    decision_of: np.ndarray
    parts: np.ndarray
    costs: np.ndarray
    first_pairs: np.ndarray
    senders: np.ndarray
    classes: np.ndarray
    slots: np.ndarray
    row_of: np.ndarray
    option_of: np.ndarray
    by_row: np.ndarray
    first_by_row: np.ndarray
    later: np.ndarray
    earlier: np.ndarray
    earlier_pairs: np.ndarray
    earlier_decisions: np.ndarray
    earlier_slots: np.ndarray


class MessagePassing:
    """Sweeps over the decisions that a reduction leaves.

    A choice is an array with the position of an option for each of `numbers`.

    Attributes:
        work: the reduction, which only `write_back` changes. No cost is infinite or negative.
        numbers: numbers of the decisions.
        constant: lower bound of all choices.
    """

    def __init__(self, work: Reduction) -> None:
        self.work = work
        self.constant = work.constant
        ranks = _ranks(sorted(work.costs), work.edges)
        self.numbers = sorted(work.costs, key=lambda i: (ranks[i], i))
        at = {i: position for position, i in enumerate(self.numbers)}
        self._sides = [(i, j) for i in self.numbers for j in work.edges[i]]
        side_of = {pair: side for side, pair in enumerate(self._sides)}
        self._owner = _integers(at[i] for i, _ in self._sides)
        self._other = _integers(at[j] for _, j in self._sides)
        self._opposite = _integers(side_of[j, i] for i, j in self._sides)
        self._num_sides = _integers(len(work.edges[i]) for i in self.numbers)
        self._first_side = _starts(self._num_sides)
        self._num_options = _integers(len(work.costs[i]) for i in self.numbers)
        self._first_option = _starts(self._num_options)
        self._num_slots = self._num_options[self._owner]
        self._first_slot = _starts(self._num_slots)
        self._option_of = _ranges(self._first_option[self._owner], self._num_slots)
        self._matrices, classes, offsets = self._by_class()
        self._class_of = _joined(classes, int)
        self._num_classes = _integers(map(len, self._matrices))
        self._first_class = _starts(self._num_classes)
        # What was moved from each slot to its decision, and the most among the slots of a class.
        self._moved = -_joined(offsets)
        self._most_moved = np.full(int(self._num_classes.sum()), -np.inf)
        np.maximum.at(
            self._most_moved,
            np.repeat(self._first_class, self._num_slots) + self._class_of,
            self._moved,
        )
        self._start_moved = self._moved.copy()
        # An edge costs what its matrix says, less what was moved to decisions.
        own = _joined([work.costs[i] for i in self.numbers])
        self._start_costs = own - np.bincount(self._option_of, self._moved, len(own))
        self._own_costs = self._start_costs.copy()
        back = _ranks(self.numbers[::-1], work.edges)
        forward, backward = (_integers(of[i] for i in self.numbers) for of in (ranks, back))
        self._levels = {True: self._levels_of(forward), False: self._levels_of(backward)}
        # The forward pass has decisions, sides and slots in order.
        rows = np.repeat(_starts(self._num_classes), self._num_slots) + self._class_of
        self._first_pair = _starts(np.repeat(self._num_classes[self._opposite], self._num_classes))[
            rows
        ]
        self._pair_costs = _joined([matrix.ravel() for matrix in self._matrices])

    def _by_class(self) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
        """Return for each side the costs by classes, and the class and offset of each slot."""
        matrices: list[np.ndarray] = []
        classes: list[np.ndarray] = []
        offsets: list[np.ndarray] = []
        transposed: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        for side, (i, j) in enumerate(self._sides):
            if side in transposed:
                matrix, rows, own = transposed.pop(side)
            else:
                matrix, rows, columns, own, others = _classified(self.work.edges[i][j])
                transposed[int(self._opposite[side])] = matrix.T, columns, others
            matrices.append(matrix)
            classes.append(rows)
            offsets.append(own)
        return matrices, classes, offsets

    def _levels_of(self, ranks: np.ndarray) -> list[_Level]:
        """Return the levels of a pass that visits the decisions by `ranks`."""
        is_later = ranks[self._other] > ranks[self._owner]
        num_later = np.bincount(self._owner[is_later], minlength=len(ranks))
        num_parts = np.maximum(np.maximum(num_later, self._num_sides - num_later), 1)
        levels = range(ranks.max(initial=-1) + 1)
        return [self._level(np.flatnonzero(ranks == k), is_later, num_parts) for k in levels]

    def _level(self, decisions: np.ndarray, is_later: np.ndarray, num_parts: np.ndarray) -> _Level:
        """Return a level.

        Args:
            decisions: its decisions.
            is_later: for each side of all edges, whether the neighbour is visited later.
            num_parts: number of parts in which the costs of each decision are shared.
        """
        num_sides, num_options = self._num_sides[decisions], self._num_options[decisions]
        sides = _ranges(self._first_side[decisions], num_sides)
        opposite = self._opposite[sides]
        num_slots, num_rows = self._num_slots[sides], self._num_classes[sides]
        slots = _ranges(self._first_slot[sides], num_slots)
        row_of = np.repeat(_starts(num_rows), num_slots) + self._class_of[slots]
        num_pairs = np.repeat(self._num_classes[opposite], num_rows)
        first_options, first_pairs = _starts(num_options), _starts(num_pairs)
        is_sent = np.repeat(is_later[sides], num_slots)
        earlier = np.flatnonzero(~is_sent)
        return _Level(
            decisions=decisions,
            options=_ranges(self._first_option[decisions], num_options),
            first_options=first_options,
            decision_of=np.repeat(np.arange(len(decisions)), num_options),
            parts=np.repeat(num_parts[decisions], num_options),
            costs=_joined([self._matrices[side].ravel() for side in sides]),
            first_pairs=first_pairs,
            senders=_ranges(np.repeat(self._first_class[opposite], num_rows), num_pairs),
            classes=_ranges(self._first_class[sides], num_rows),
            slots=slots,
            row_of=row_of,
            option_of=_ranges(np.repeat(first_options, num_sides), num_slots),
            by_row=np.argsort(row_of, kind="stable"),
            first_by_row=_starts(np.bincount(row_of)),
            later=np.flatnonzero(is_sent),
            earlier=earlier,
            earlier_pairs=first_pairs[row_of[earlier]],
            earlier_decisions=np.repeat(self._other[sides], num_slots)[earlier],
            earlier_slots=np.repeat(self._first_slot[opposite], num_slots)[earlier],
        )

    def sweep(self, forward: bool, best: float) -> np.ndarray:
        """Visit all decisions, and pass their costs on to the edges of later ones.

        Options that can't be part of a choice better than `best` are dropped.

        Args:
            forward: whether to visit the decisions level by level, or in the opposite order.
            best: cost of a known choice.

        Returns:
            A choice in which each decision takes its best option given the decisions before it.
        """
        choice = np.zeros(len(self.numbers), int)
        for level in self._levels[forward]:
            self._visit(level, best, choice)
        return choice

    def _visit(self, level: _Level, best: float, choice: np.ndarray) -> None:
        """Visit the decisions of a level, and add their best options to `choice`."""
        gathered = np.zeros(0)
        if len(level.slots):
            rows = np.minimum.reduceat(
                level.costs - self._most_moved[level.senders], level.first_pairs
            )
            gathered = rows[level.row_of]
        size = len(level.options)
        total = self._own_costs[level.options] + np.bincount(level.option_of, gathered, size)
        least = np.minimum.reduceat(total, level.first_options)
        self.constant += float(least.sum())
        least = least[level.decision_of]
        total -= least
        own = self._own_costs[level.options] - least
        dropped = total > best - self.constant
        if dropped.any() and best >= self.constant:
            total[dropped] = own[dropped] = np.inf
        self._own_costs[level.options] = own
        if len(level.slots):
            moved = gathered.copy()
            moved[level.later] -= (total / level.parts)[level.option_of[level.later]]
            moved[np.isinf(total)[level.option_of]] = -np.inf
            self._moved[level.slots] = moved
            self._most_moved[level.classes] = np.maximum.reduceat(
                moved[level.by_row], level.first_by_row
            )
        # Where the neighbour has chosen an option, an edge costs what that row of its matrix says.
        taken = self._class_of[level.earlier_slots + choice[level.earlier_decisions]]
        edges = level.costs[level.earlier_pairs + taken] - gathered[level.earlier]
        answers = total + np.bincount(level.option_of[level.earlier], edges, size)
        choice[level.decisions] = _first_least(answers, level.first_options, level.decision_of)

    def local_optimum(self, choice: np.ndarray) -> np.ndarray:
        """Return a local optimum: no decision has a better option, given all others.

        Among neighbours, the decision that gains most takes its best option first (iterated
        conditional modes, Besag, J. R. Stat. Soc. B 1986).
        """
        choice = choice.copy()
        decision_of = np.repeat(np.arange(len(self.numbers)), self._num_options)
        rounding = 1e-12 * abs(self.constant)
        while True:
            answers = self._start_costs + np.bincount(
                self._option_of, self._edge_costs(choice), len(self._start_costs)
            )
            now = answers[self._first_option + choice]
            gain = now - np.minimum.reduceat(answers, self._first_option)
            # Differences of rounding alone could alternate forever.
            gain[gain <= np.maximum(1e-9 * abs(now), rounding)] = 0.0
            own, others = gain[self._owner], gain[self._other]
            beaten = (others > own) | ((others == own) & (self._other < self._owner))
            waits = np.bincount(self._owner[beaten], minlength=len(gain)) > 0
            changes = (gain > 0) & ~waits
            if not changes.any():
                return choice
            best = _first_least(answers, self._first_option, decision_of)
            choice[changes] = best[changes]

    def _edge_costs(self, choice: np.ndarray) -> np.ndarray:
        """Return the matrix entry of each slot if all other decisions take their options."""
        taken = self._class_of[self._first_slot[self._opposite] + choice[self._other]]
        return self._pair_costs[self._first_pair + np.repeat(taken, self._num_slots)]

    def cost(self, choice: np.ndarray) -> float:
        """Return the cost of a choice."""
        own = self._start_costs[self._first_option + choice].sum()
        edges = self._edge_costs(choice)[self._first_slot + choice[self._owner]].sum() / 2
        return self.work.constant + float(own + edges)

    def numbered(self, choice: np.ndarray) -> dict[int, int]:
        """Return the position of the option of each decision by its number."""
        return dict(zip(self.numbers, choice.tolist(), strict=True))

    def write_back(self) -> None:
        """Drop the same options and move the same costs in the reduction. Call it once, last."""
        work = self.work
        work.constant = self.constant
        alive = np.isfinite(self._own_costs)
        moved = np.where(np.isfinite(self._moved), self._moved, 0.0)
        own = self._own_costs + np.bincount(self._option_of, moved, len(self._own_costs))
        moved -= self._start_moved
        kept: list[np.ndarray] = []
        for k, i in enumerate(self.numbers):
            options = slice(self._first_option[k], self._first_option[k] + self._num_options[k])
            kept.append(alive[options])
            if not kept[-1].all():
                work.keep(i, kept[-1])
            work.costs[i] = own[options][kept[-1]]
        for side, (i, j) in enumerate(self._sides):
            first = self._first_slot[side]
            slots = moved[first : first + self._num_slots[side]]
            work.edges[i][j] -= slots[kept[self._owner[side]]][:, None]


def _classified(
    costs: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Divide the rows and the columns of a matrix into classes that are equal up to a constant.

    Returns:
        The matrix of a row and a column of each class, less the offsets; the classes of rows and of
        columns; the offsets of rows and of columns.
    """
    height, width = costs.shape
    if costs.size >= _LARGE_EDGE:
        others = costs[0]
        own = costs[:, 0] - others[0]
        rest = costs - own[:, None] - others
        unit = _ROUNDING * (float(abs(costs).max()) or 1.0)
        first_rows, rows = _distinct(rest, unit)
        first_columns, columns = _distinct(rest.T, unit)
        classes = rest[first_rows[:, None], first_columns]
        rest -= classes[rows[:, None], columns]
        if abs(rest).max() <= unit:
            return classes, rows, columns, own, others.copy()
    return costs, np.arange(height), np.arange(width), np.zeros(height), np.zeros(width)


def _distinct(rows: np.ndarray, unit: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the first row of each class of about equal rows, and the class of each row."""
    keys = np.rint(rows @ np.arange(1.0, 1.0 + rows.shape[1]) / (1e3 * unit))
    order = keys.argsort(kind="stable")
    keys = keys[order]
    is_first = np.append(True, keys[1:] != keys[:-1])
    classes = np.empty(len(rows), int)
    classes[order] = np.cumsum(is_first) - 1
    return order[is_first], classes


def _ranks(order: Sequence[int], edges: Mapping[int, Mapping[int, np.ndarray]]) -> dict[int, int]:
    """Return the level of each decision, if they are visited in `order`."""
    ranks: dict[int, int] = {}
    for i in order:
        ranks[i] = 1 + max((ranks[j] for j in edges[i] if j in ranks), default=-1)
    return ranks


def _first_least(
    costs: np.ndarray, first_options: np.ndarray, decision_of: np.ndarray
) -> np.ndarray:
    """Return the position of the first cheapest option of each decision."""
    least = np.minimum.reduceat(costs, first_options)
    hits = np.flatnonzero(costs == least[decision_of])
    return hits[np.searchsorted(hits, first_options)] - first_options


def _integers(numbers: Iterable[int]) -> np.ndarray:
    return np.fromiter(numbers, int)


def _joined(arrays: Sequence[np.ndarray], dtype: type = float) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def _starts(lengths: np.ndarray) -> np.ndarray:
    """Return where each of several ranges starts if they are joined."""
    return np.cumsum(lengths) - lengths


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return ranges of integers, joined."""
    return np.repeat(starts - _starts(lengths), lengths) + np.arange(lengths.sum())
