"""Layers inside of a `scan`: its iterations are layers if each multiplies by its own weights.

Layer construction sees such a scan as one equation per iteration. The iterations of one layer then
run in one shorter scan (`autopar.layering.stack_cutting`).
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, groupby

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import remat_p, scan_p, while_p

from autopar.ir.array_cuts import Cut
from autopar.ir.array_sizes import value_bytes
from autopar.ir.flatten import flatten
from autopar.ir.graph import Atom, aval_of, source_line
from autopar.layering.equation_cuts import roots
from autopar.layering.layer_clustering import SizedValue
from autopar.layering.piece_writer import scan_operands


def layer_scans(jaxpr: Jaxpr, weights: Collection[Var]) -> frozenset[int]:
    """Return the numbers of the scans whose iterations are layers.

    An iteration is a layer if it reads slices of weights. A scan over time reads slices of
    activations or of the batch.

    Args:
        jaxpr: the loss function.
        weights: the inputs that are weights.
    """
    return frozenset(
        number
        for number, eqn in enumerate(jaxpr.eqns)
        if eqn.primitive is scan_p
        and eqn.params["length"] > 1
        and _reads_weights(jaxpr, eqn, weights)
    )


def _reads_weights(jaxpr: Jaxpr, eqn: JaxprEqn, weights: Collection[Var]) -> bool:
    _, _, slices = scan_operands(eqn)
    return any(
        isinstance(atom, Var) and _is_weight(jaxpr, atom, weights)
        for atom in slices
        if aval_of(atom).ndim > 1
    )


def _is_weight(jaxpr: Jaxpr, var: Var, weights: Collection[Var]) -> bool:
    """Whether the slices of a value are computed from slices of weights alone."""
    return roots(jaxpr, var, 0) <= set(weights)


class Iterations:
    """The equations of a function with the iterations of its layers as equations of their own.

    Attributes:
        jaxpr: the function.
        scans: numbers of the scans whose iterations are layers.
        counts: for each equation the number of equations that it counts as.
        starts: for each equation the number of the first of these.
        total: the number of equations, with iterations counted as such.
    """

    def __init__(self, jaxpr: Jaxpr, weights: Collection[Var]) -> None:
        self.jaxpr = jaxpr
        self.weights = weights
        self.scans = layer_scans(jaxpr, weights)
        self.counts = [
            eqn.params["length"] if number in self.scans else 1
            for number, eqn in enumerate(jaxpr.eqns)
        ]
        stops = list(accumulate(self.counts))
        self.starts = [stop - count for count, stop in zip(self.counts, stops, strict=True)]
        self.total = sum(self.counts)

    def spread(self, per_equation: Sequence[float]) -> list[float]:
        """Return a number of each equation, divided evenly among its iterations."""
        return [
            amount / count
            for amount, count in zip(per_equation, self.counts, strict=True)
            for _ in range(count)
        ]

    def values(self) -> list[SizedValue]:
        """Return the values that equations and iterations pass on.

        Arrays of an entry per layer, such as random keys and auxiliary losses, are small and sent
        once. They count as used by the first iteration and computed by the last one, so that they
        do not decide between which iterations a scan is cut.
        """
        values: list[SizedValue] = []
        users = self._users()
        for number, eqn in enumerate(self.jaxpr.eqns):
            start = self.starts[number]
            last = start + self.counts[number] - 1
            if number not in self.scans:
                values += [
                    (start, value_bytes(var), tuple(users[var]))
                    for var in eqn.outvars
                    if users[var]
                ]
                continue
            num_carried = len(scan_operands(eqn)[1])
            num_bytes = sum(map(value_bytes, eqn.outvars[:num_carried]))
            values += [(k, num_bytes, (k + 1,)) for k in range(start, last)]
            values += [
                (last, value_bytes(var), tuple(users[var])) for var in eqn.outvars if users[var]
            ]
        return values

    def _users(self) -> dict[Atom, dict[int, None]]:
        """Return the equations and iterations that use each value, in order."""
        users: dict[Atom, dict[int, None]] = {
            var: {} for eqn in self.jaxpr.eqns for var in eqn.outvars
        }
        for number, eqn in enumerate(self.jaxpr.eqns):
            start = self.starts[number]
            constants = scan_operands(eqn)[0] if number in self.scans else []
            slices = scan_operands(eqn)[2] if number in self.scans else []
            for atom in eqn.invars:
                if isinstance(atom, Literal) or atom not in users:
                    continue
                if atom in slices and _is_weight(self.jaxpr, atom, self.weights):
                    continue
                last = start + self.counts[number] if atom in constants else start + 1
                users[atom].update(dict.fromkeys(range(start, last)))
        return users

    def cuts(self, layers: Sequence[int]) -> tuple[list[int], dict[int, Cut]]:
        """Return the layer of each equation, and the cuts of the scans that several layers share.

        Args:
            layers: the layer of each equation and iteration.
        """
        of_equation = [layers[start] for start in self.starts]
        cuts: dict[int, Cut] = {}
        for number in sorted(self.scans):
            start = self.starts[number]
            own = layers[start : start + self.counts[number]]
            if self.jaxpr.eqns[number].params["reverse"]:
                own = own[::-1]
            runs = [(layer, len(list(run))) for layer, run in groupby(own)]
            if len(runs) > 1:
                sizes = tuple(size for _, size in runs)
                cuts[number] = Cut(0, sizes, tuple(layer for layer, _ in runs))
        return of_equation, cuts


def seeds_of(jaxpr: Jaxpr, cuts: Mapping[int, Cut]) -> dict[Var, Cut]:
    """Return the values that the cut scans slice and stack, with their cuts."""
    seeds: dict[Var, Cut] = {}
    for number, cut in cuts.items():
        eqn = jaxpr.eqns[number]
        _, init, slices = scan_operands(eqn)
        for atom in (*slices, *eqn.outvars[len(init) :]):
            if isinstance(atom, Var):
                seeds.setdefault(atom, cut)
    return seeds


LAYERS_IN_LOOPS = (
    "layers in a loop are found if the loop is jax.lax.scan(body, x, weights) over an argument that"
    " is differentiated, stacked with one entry per layer; write a loop over examples, as of"
    " jax.lax.map, by jax.vmap"
)
"""What a loop must be for its iterations to be layers, for errors."""


def _inner_scans(eqn: JaxprEqn) -> list[JaxprEqn]:
    """Return the scans in the jaxprs of an equation that is no loop."""
    jaxprs = [param for param in eqn.params.values() if isinstance(param, Jaxpr)]
    inner = [member for jaxpr in jaxprs for member in jaxpr.eqns]
    return [
        scan
        for member in inner
        for scan in ([member] if member.primitive is scan_p else _inner_scans(member))
    ]


def recomputed_scans(jaxpr: Jaxpr, weights: Sequence[Var]) -> list[JaxprEqn]:
    """Return the scans inside of `jax.checkpoint`, if the iterations of one could be layers.

    Args:
        jaxpr: the loss function.
        weights: the inputs that are weights.
    """
    inner = [scan for eqn in jaxpr.eqns if eqn.primitive is remat_p for scan in _inner_scans(eqn)]
    if not inner:
        return []
    flat = flatten(jaxpr, loops=False)
    numbers = map(jaxpr.invars.index, weights)
    num_scans = len(layer_scans(flat, {flat.invars[number] for number in numbers}))
    return inner if num_scans > len(layer_scans(jaxpr, weights)) else []


def uncut_loops(jaxpr: Jaxpr, scans: Collection[int]) -> str:
    """Return why the loops of a function are no layers, for an error; "" without such loops."""
    reasons = []
    for number, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive is while_p:
            reasons.append(f"the while loop at {source_line(eqn)} has no fixed length")
        elif eqn.primitive is scan_p and number not in scans:
            reasons.append(
                f"the scan at {source_line(eqn)} over {eqn.params['length']} iterations slices no"
                " weights"
            )
        else:
            reasons += [
                f"the scan at {source_line(inner)} is inside of {eqn.primitive.name}"
                for inner in _inner_scans(eqn)
            ]
    return f"; {'; '.join(reasons)}: {LAYERS_IN_LOOPS}" if reasons else ""
