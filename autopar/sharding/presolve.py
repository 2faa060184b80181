"""Presolve: exact reductions of a selection problem, each of which can be undone.

Dead-end elimination drops an option if another one is better whatever the neighbours select
(Goldstein 1994). Folding eliminates a decision with at most two neighbours.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import prod

import numpy as np

from autopar.sharding.selection_problem import CapacityConstraint, InfeasibleError, SelectionProblem

_AFFORDABLE = 1 << 22
"""Size of a comparison above which a decision is left to sweeps, which drop most of its options."""


@dataclass
class Reduction:
    """The remaining decisions and options of a problem, and how to undo each reduction.

    Attributes:
        problem: the whole problem.
        constant: cost of every choice beside `costs` and `edges`.
        costs: for each remaining decision, the cost of its options.
        options: their numbers in `problem`.
        edges: cost of pairs of options, in both directions, which are views of one array.
        uses: what options use of each capacity constraint, shape (constraints, options).
        pairs: what pairs of options use of each constraint.
        bounds: the remaining bound of each constraint.
    """

    problem: SelectionProblem
    constant: float = field(init=False, default=0.0)
    costs: dict[int, np.ndarray] = field(init=False)
    options: dict[int, np.ndarray] = field(init=False)
    edges: dict[int, dict[int, np.ndarray]] = field(init=False)
    uses: dict[int, np.ndarray] = field(init=False)
    pairs: dict[int, dict[int, np.ndarray]] = field(init=False, default_factory=dict)
    bounds: np.ndarray = field(init=False)
    _settled: dict[int, int] = field(init=False, default_factory=dict)
    _folded: list[Callable[[dict[int, int]], None]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.costs = {i: np.array(cost, float) for i, cost in enumerate(self.problem.nodes)}
        self.options = {i: np.arange(len(cost)) for i, cost in self.costs.items()}
        self.edges = {i: {} for i in self.costs}
        self.bounds = np.array([limit.bound for limit in self.problem.limits], float)
        self.uses = {i: np.zeros((len(self.bounds), len(cost))) for i, cost in self.costs.items()}
        for row, limit in enumerate(self.problem.limits):
            for i, use in limit.uses.items():
                self.uses[i][row] = use
            for (i, j), use in limit.pairs.items():
                both = np.zeros((len(self.bounds), *use.shape))
                both[row] = use
                self.pairs.setdefault(i, {})[j] = self.pairs.get(i, {}).get(j, 0) + both
                self.pairs.setdefault(j, {})[i] = self.pairs[i][j].swapaxes(1, 2)
        for (i, j), cost in self.problem.edges.items():
            self.join(i, j, np.array(cost, float))

    @property
    def size(self) -> int:
        """Number of remaining pairs of options."""
        return sum(cost.size for others in self.edges.values() for cost in others.values()) // 2

    def complete(self, core: Mapping[int, int]) -> tuple[int, ...]:
        """Return the choice of the whole problem, given a position in `options` per decision."""
        choice = self._settled | {i: int(self.options[i][k]) for i, k in core.items()}
        for unfold in reversed(self._folded):
            unfold(choice)
        return tuple(choice[i] for i in range(len(self.problem.nodes)))

    def rest(self) -> SelectionProblem:
        """Return the problem of the remaining decisions, numbered by position."""
        at = {i: position for position, i in enumerate(self.costs)}
        edges = {
            (at[i], at[j]): cost for i in self.costs for j, cost in self.edges[i].items() if i < j
        }
        limits = []
        for row, bound in enumerate(self.bounds):
            uses = {at[i]: self.uses[i][row] for i in self.costs if self.uses[i][row].any()}
            pairs = {
                (at[i], at[j]): use[row]
                for i, others in self.pairs.items()
                for j, use in others.items()
                if i < j and use[row].any()
            }
            limits.append(CapacityConstraint(uses, bound, pairs))
        return SelectionProblem(list(self.costs.values()), edges, limits)

    def join(self, i: int, j: int, cost: np.ndarray) -> None:
        """Add an edge, or add to the costs of an existing one."""
        if j in self.edges[i]:
            cost = cost + self.edges[i][j]
        self.edges[i][j], self.edges[j][i] = cost, cost.T

    def keep(self, i: int, alive: np.ndarray) -> None:
        """Drop the options of `i` that are not `alive`."""
        self.costs[i], self.options[i] = self.costs[i][alive], self.options[i][alive]
        self.uses[i] = self.uses[i][:, alive]
        for j in self.pairs.get(i, ()):
            self.pairs[i][j] = self.pairs[i][j][:, alive]
            self.pairs[j][i] = self.pairs[i][j].swapaxes(1, 2)
        for j in self.edges[i]:
            kept = self.edges[i][j][alive]
            self.edges[i][j], self.edges[j][i] = kept, kept.T

    def reduce(self, dead_ends: bool = True) -> None:
        """Settle decisions with one option, fold others, and drop dead ends until nothing changes.

        Args:
            dead_ends: whether to drop dead ends, which takes most of the time.
        """
        pending = [(*self._size(i), i) for i in self.costs]
        heapify(pending)
        known: dict[tuple[bytes, ...], np.ndarray] = {}
        while pending:
            *size, i = heappop(pending)
            if i not in self.costs or tuple(size) != self._size(i):
                continue
            dropped = dead_ends and self._drop_dead_ends(i, known)
            neighbours = list(self.edges[i])
            if len(self.costs[i]) == 1:
                self._settle(i)
            elif self._foldable(i):
                self._fold(i)
            elif not dropped:
                continue
            for j in neighbours:
                heappush(pending, (*self._size(j), j))

    def _size(self, i: int) -> tuple[int, int]:
        return len(self.edges[i]), len(self.costs[i])

    def _foldable(self, i: int) -> bool:
        """Return whether `i` has at most two neighbours and is in no capacity constraint."""
        others = [len(self.costs[j]) for j in self.edges[i]]
        if len(others) > 2 or i in self.pairs or len(self.costs[i]) * prod(others) > _AFFORDABLE:
            return False
        return bool((self.uses[i] == self.uses[i][:, :1]).all())

    def _drop_dead_ends(self, i: int, known: dict[tuple[bytes, ...], np.ndarray]) -> bool:
        """Drop the dead ends of `i`.

        `known` memoizes dead ends by content: layers repeat, so most are known.
        """
        if (
            len(self.costs[i]) ** 2 * sum(cost.shape[1] for cost in self.edges[i].values())
            > _AFFORDABLE
        ):
            return False
        mine = (
            self.costs[i],
            self.uses[i],
            *self.edges[i].values(),
            *self.pairs.get(i, {}).values(),
        )
        content = tuple(array.tobytes() for array in mine)
        if content not in known:
            known[content] = self._alive(i)
        if known[content].all():
            return False
        self.keep(i, known[content])
        return True

    def _alive(self, i: int) -> np.ndarray:
        """Return a mask of the options of `i` that no other option beats for all neighbours."""
        alive = np.isfinite(self.costs[i])
        for cost in self.edges[i].values():
            alive &= np.isfinite(cost).any(axis=1)
        if not alive.any():
            raise InfeasibleError("no choice of shardings satisfies every requirement")
        margin = np.subtract.outer(_finite(self.costs[i]), _finite(self.costs[i]))
        for cost in self.edges[i].values():
            cost = np.ascontiguousarray(_finite(cost).T)
            # NumPy takes twice as long along the last axis.
            margin += (cost[:, :, None] - cost[:, None, :]).min(axis=0)
        # margin[a, b] >= 0: b is never worse than a. Ties are broken towards the lower index. With
        # capacity constraints, b must not use more either.
        beaten = (margin > 0) | ((margin == 0) & np.tri(len(alive), k=-1, dtype=bool))
        if self.bounds.size:
            # The most by which b may use more than a.
            more = self.uses[i][:, None, :] - self.uses[i][:, :, None]
            for use in self.pairs.get(i, {}).values():
                more = more + (use[:, None, :, :] - use[:, :, None, :]).max(axis=3)
            beaten &= (more <= 0).all(axis=0)
        beaten[:, ~alive] = False
        for a in range(len(alive) - 1, -1, -1):
            alive[a] &= not (beaten[a] & alive).any()
        return alive

    def _settle(self, i: int) -> None:
        """Select the only option of a decision: its edges become costs of its neighbours."""
        for j, cost in self.edges.pop(i).items():
            self.costs[j] = self.costs[j] + cost[0]
            del self.edges[j][i]
        for j, use in self.pairs.pop(i, {}).items():
            self.uses[j] = self.uses[j] + use[:, 0]
            del self.pairs[j][i]
            if not self.pairs[j]:
                del self.pairs[j]
        self._settled[i] = int(self.options.pop(i)[0])
        self.bounds -= self.uses.pop(i)[:, 0]
        self.constant += float(self.costs.pop(i)[0])

    def _fold(self, i: int) -> None:
        """Eliminate a decision with at most two neighbours.

        The costs of the neighbours take over the cost of its best option for each of their options.
        """
        neighbours = list(self.edges[i].items())
        total = self.costs.pop(i).reshape(-1, *(1,) * len(neighbours))
        for axis, (_, cost) in enumerate(neighbours):
            shape = [len(cost), *(1,) * len(neighbours)]
            shape[axis + 1] = cost.shape[1]
            total = total + cost.reshape(shape)
        best = total.argmin(axis=0)
        least = total.min(axis=0)
        names = [j for j, _ in neighbours]
        self.bounds -= self.uses.pop(i)[:, 0]  # the same for all its options
        options, theirs = self.options.pop(i), {j: self.options[j] for j in names}
        del self.edges[i]
        for j in names:
            del self.edges[j][i]
        if len(names) == 1:
            self.costs[names[0]] = self.costs[names[0]] + least
        elif len(names) == 2:
            self.join(names[0], names[1], least)
        elif np.isfinite(least):
            self.constant += float(least)
        else:
            raise InfeasibleError("no choice of shardings satisfies every requirement")

        def unfold(choice: dict[int, int]) -> None:
            position = tuple(int(np.searchsorted(theirs[j], choice[j])) for j in names)
            choice[i] = int(options[best[position]])

        self._folded.append(unfold)


def _finite(cost: np.ndarray) -> np.ndarray:
    """Return costs with a large number for infinity, so that differences are finite."""
    return np.where(np.isfinite(cost), cost, 1e12)
