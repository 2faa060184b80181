"""Cutting of stacked arrays: a jaxpr computes with their pieces in place of the whole arrays.

The weights of layers that run in a `scan` are stacked in arrays whose first dim counts layers. A
cut of such an array follows the factors of equations (`autopar.primitives.factors`), as a sharding
does: an elementwise equation on a cut array becomes one equation per piece, and a sum over the cut
dim becomes the sum of partial sums. An equation that can't be cut reads the concatenated pieces.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import batched
from typing import Any, Literal

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core import Literal as JaxLiteral
from jax.extend.core.primitives import (
    broadcast_in_dim_p,
    concatenate_p,
)

from autopar.ir import control_flow
from autopar.ir.array_cuts import Cut
from autopar.ir.graph import Atom, aval_of, is_backward, needed, scopes, variables
from autopar.primitives import MissingRuleError, op_factors, record_of
from autopar.primitives.factors import PARTIAL, Dims, OpFactors

STACK_SCOPE = "pipeline_stack"
"""The named scope of equations that cut arrays into the pieces of layers."""

_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lax.add,
    "max": lax.max,
    "min": lax.min,
}
"""How partial results of pieces are combined, by the kind of the factor that is cut."""


@dataclass(frozen=True, slots=True)
class CutJaxpr:
    """A jaxpr that computes with pieces.

    Attributes:
        jaxpr: The jaxpr.
        layers: The layer of each equation; -1 for equations that only cut inputs.
        inputs: The cut of each input of the original jaxpr; None for an input in one piece.
        outputs: The cut of each of its outputs.
    """

    jaxpr: Jaxpr
    layers: list[int]
    inputs: tuple[Cut | None, ...]
    outputs: tuple[Cut | None, ...]


type Carry = Literal["passed on", "sum"] | tuple[int, int]
"""How the pieces of a scan get a carry.

A piece may pass it on to the next one. A "sum" is added up from what each piece adds to zero. A
carry that a forward scan has computed before, as (number of that scan, position), is read from its
pieces.
"""


@dataclass(frozen=True, slots=True)
class BackwardScans:
    """The scans of a backward pass.

    A piece of such a scan belongs to the layer of the weights or residuals that it slices. Backward
    passes visit layers in reverse, so the piece of layer l counts as layer 2 * num_layers - 1 - l.

    Attributes:
        carries: The carries of each scan, by its number.
        num_layers: The number of layers of the forward pass.
    """

    carries: Mapping[int, Sequence[Carry]]
    num_layers: int

    def cut(self, cut: Cut) -> Cut:
        """Return the cut of a scan that slices an array with a cut."""
        return Cut(0, cut.sizes, tuple(2 * self.num_layers - 1 - layer for layer in cut.layers))


@dataclass(frozen=True, slots=True)
class _EquationCut:
    """The factor along which an equation is cut.

    Attributes:
        factors: The factors of the equation.
        factor: The number of the factor that is cut.
        sizes: The trip count of the factor in each piece.
        layers: The layer of each piece, or nothing.
    """

    factors: OpFactors
    factor: int
    sizes: tuple[int, ...]
    layers: tuple[int, ...]

    def cut(self, dims: Dims) -> Cut | None:
        """Return the cut of an operand or result with these factors."""
        for dim, factors in enumerate(dims):
            if self.factor in factors:
                inner = _inner_size(self.factors, factors)
                return Cut(dim, tuple(size * inner for size in self.sizes), self.layers)
        return None


def stack_seeds(jaxpr: Jaxpr) -> dict[Var, Cut]:
    """Return the values of a flat step that the equations of `STACK_SCOPE` cut or join."""
    seeds: dict[Var, Cut] = {}
    for eqn in jaxpr.eqns:
        if STACK_SCOPE not in scopes(eqn):
            continue
        if eqn.primitive is lax.split_p and isinstance(eqn.invars[0], Var):
            cut = Cut(eqn.params["axis"], tuple(map(int, eqn.params["sizes"])))
            seeds.setdefault(eqn.invars[0], cut)
        elif eqn.primitive is concatenate_p:
            seeds.setdefault(eqn.outvars[0], _cut_of_concatenation(eqn))
    return seeds


def cut_stacks(
    jaxpr: Jaxpr,
    seeds: Mapping[Var, Cut],
    *,
    in_pieces: Iterable[Atom] = (),
    out_pieces: Iterable[Atom] = (),
    layers: Sequence[int] | None = None,
    scans: Mapping[int, Cut] | None = None,
    backward: BackwardScans | None = None,
) -> CutJaxpr:
    """Return `jaxpr`, computing with pieces of `seeds` and of what is computed from them.

    Args:
        jaxpr: The jaxpr. Markers of control flow and what is between them stay as they are.
        seeds: Values that are cut, with their cuts.
        in_pieces: Inputs that the new jaxpr has as pieces if they are cut; it cuts the others
            itself.
        out_pieces: Outputs that the new jaxpr returns in pieces if they are cut.
        layers: The layer of each equation, which no equation may have before that of an operand.
        scans: Numbers of `scan`s that become one shorter scan per piece, with the cut of their
            iterations.
        backward: The scans of a backward pass, which are cut where they slice or stack pieces.
    """
    layers = layers or [0] * len(jaxpr.eqns)
    if not seeds and not scans:
        return _uncut(jaxpr, layers)
    cutter = _StackCutter(jaxpr, scans or {}, layers, backward or BackwardScans({}, 0))
    cutter.propagate(seeds)
    return cutter.emit(set(variables(in_pieces)), set(variables(out_pieces)))


def _uncut(jaxpr: Jaxpr, layers: Sequence[int]) -> CutJaxpr:
    """Return `jaxpr` without the equations that nothing depends on, computing with no pieces."""
    kept = needed(enumerate(jaxpr.eqns), jaxpr.outvars)
    return CutJaxpr(
        jaxpr.replace(eqns=[eqn for _, eqn in kept]),
        [layers[k] for k, _ in kept],
        (None,) * len(jaxpr.invars),
        (None,) * len(jaxpr.outvars),
    )


def scan_operands(scan: JaxprEqn) -> tuple[list[Atom], list[Atom], list[Atom]]:
    """Return the constants, initial carries and sliced arrays of a scan."""
    consts, init, slices = map(list, scan.params["ft_in"].update(scan.invars).unpack())
    return consts, init, slices


def roots(jaxpr: Jaxpr, value: Atom, dim: int) -> set[Atom]:
    """Return the inputs of `jaxpr` whose slices a slice of `value` along `dim` is computed from.

    The set also has values that no slice of an operand suffices for. So `value` is computed
    from slices of inputs only if all roots are inputs.
    """
    producer: dict[Atom, JaxprEqn] = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    found: set[Atom] = set()
    visited: set[tuple[Atom, int]] = set()
    pending = [(value, dim)]
    while pending:
        atom, dim = pending.pop()
        if (atom, dim) in visited:
            continue
        visited.add((atom, dim))
        eqn = producer.get(atom)
        sliced = None if eqn is None else _sliced_operands(eqn, atom, dim)
        if sliced is None:
            found.add(atom)
        else:
            pending += sliced
    return found


def _sliced_operands(eqn: JaxprEqn, result: Atom, dim: int) -> list[tuple[Atom, int]] | None:
    """Return the operands and dims that a slice of a result is computed from; None: all of them."""
    size = aval_of(result).shape[dim]
    position = next(r for r, var in enumerate(eqn.outvars) if var is result)
    cut = _equation_cut(eqn, ("out", position), Cut(dim, (1,) * size))
    if cut is None:
        return None
    operands: list[tuple[Atom, int]] = []
    for atom, dims in zip(eqn.invars, cut.factors.operands, strict=True):
        own = cut.cut(dims)
        if isinstance(atom, Var) and own is not None:
            operands.append((atom, own.dim))
        elif isinstance(atom, Var) and aval_of(atom).ndim > 0:
            return None
    return operands


def _inner_size(factors: OpFactors, dim: Sequence[int]) -> int:
    """Return the number of elements of a dim for each iteration of its outermost factor."""
    inner = 1
    for factor in dim[1:]:
        inner *= factors.sizes[factor]
    return inner


def _equation_cut(eqn: JaxprEqn, position: tuple[str, int], cut: Cut) -> _EquationCut | None:
    """Return how an equation is cut if one of its values is; None if it can't be.

    Args:
        eqn: The equation.
        position: "in" or "out", and the position of the value among the operands or results.
        cut: The cut of that value.
    """
    record = record_of(eqn)
    if (
        eqn.effects
        or record.collective is not None
        or record.runs_body
        or record.is_replicated_only
        or not record.ignores_place
    ):
        return None
    try:
        factors = op_factors(eqn)
    except MissingRuleError:
        return None
    side, index = position
    dims = (factors.operands if side == "in" else factors.results)[index][cut.dim]
    if not dims or factors.once:
        return None
    factor = dims[0]
    inner = _inner_size(factors, dims)
    kind = factors.kinds[factor]
    if kind == "whole" or any(size % inner for size in cut.sizes):
        return None
    has_factor = [
        sum(factor in group for group in value) for value in (*factors.operands, *factors.results)
    ]
    outermost = all(
        group[0] == factor
        for value in (*factors.operands, *factors.results)
        for group in value
        if factor in group
    )
    num_operands = len(factors.operands)
    in_results = all(has_factor[num_operands:])
    created = not any(has_factor[:num_operands])
    if (
        not outermost
        or max(has_factor) > 1
        or (kind == "parallel" and not in_results)
        or (kind in PARTIAL and any(has_factor[num_operands:]))
        or (created and eqn.primitive is not broadcast_in_dim_p)
    ):
        return None
    return _EquationCut(factors, factor, tuple(size // inner for size in cut.sizes), cut.layers)


def _cut_of_concatenation(eqn: JaxprEqn) -> Cut:
    dim = eqn.params["dimension"]
    return Cut(dim, tuple(aval_of(atom).shape[dim] for atom in eqn.invars))


def _is_same(cut: Cut, other: Cut) -> bool:
    """Whether two cuts have the same pieces, whatever their layers."""
    return (cut.dim, cut.sizes) == (other.dim, other.sizes)


class _StackCutter:
    """Decides which values and equations of a jaxpr are cut, and writes the new jaxpr.

    Attributes:
        cuts: The cut of each value that is cut.
        equation_cuts: The cuts of equations, by number.
        identities: Numbers of equations whose result i is operand i, some of which are cut.
        joins: Numbers of concatenations of pieces.
        splits: Numbers of equations that split a value into its pieces.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        scans: Mapping[int, Cut],
        layers: Sequence[int],
        backward: BackwardScans,
    ) -> None:
        self.jaxpr = jaxpr
        self.scans = dict(scans)
        self.layers = layers
        self.backward = backward
        self.cuts: dict[Var, Cut] = {}
        self.equation_cuts: dict[int, _EquationCut] = {}
        self.identities: set[int] = set()
        self.joins: set[int] = set()
        self.splits: set[int] = set()
        self._pending: deque[Var] = deque()
        self._places: dict[Var, list[tuple[int, str, int]]] = defaultdict(list)
        depth = 0
        for number, eqn in enumerate(jaxpr.eqns):
            depth += eqn.primitive in control_flow.OPENING
            if depth == 0 and number not in scans:
                for side, atoms in (("in", eqn.invars), ("out", eqn.outvars)):
                    for index, atom in enumerate(atoms):
                        if isinstance(atom, Var):
                            self._places[atom].append((number, side, index))
            depth -= eqn.primitive is control_flow.end_p

    # -- which values are cut

    def propagate(self, seeds: Mapping[Var, Cut]) -> None:
        """Cut `seeds` and the values that are computed from them, or combined with them."""
        for var, cut in seeds.items():
            self._cut(var, cut)
        while self._pending:
            var = self._pending.popleft()
            for number, side, index in self._places[var]:
                self._cut_equation(number, side, index, self.cuts[var])

    def _cut(self, var: Atom, cut: Cut | None) -> None:
        if cut is not None and isinstance(var, Var) and var not in self.cuts:
            self.cuts[var] = cut
            self._pending.append(var)

    def _cut_equation(self, number: int, side: str, index: int, cut: Cut) -> None:
        eqn = self.jaxpr.eqns[number]
        if number in self.equation_cuts or number in self.scans:
            return
        if number in self.backward.carries:
            self._cut_scan(number, eqn, side, index, cut)
            return
        if record_of(eqn).passes_through:
            self.identities.add(number)
            self._cut((eqn.outvars if side == "in" else eqn.invars)[index], cut)
            return
        if eqn.primitive is lax.split_p and side == "in" and eqn.params["axis"] == cut.dim:
            if tuple(map(int, eqn.params["sizes"])) == cut.sizes:
                self.splits.add(number)
            return
        is_join = eqn.primitive is concatenate_p and side == "out"
        if is_join and _is_same(_cut_of_concatenation(eqn), cut):
            self.joins.add(number)
            return
        found = _equation_cut(eqn, (side, index), cut)
        if found is None:
            return
        self.equation_cuts[number] = found
        for atom, dims in zip(eqn.invars, found.factors.operands, strict=True):
            self._cut(atom, found.cut(dims))
        for atom, dims in zip(eqn.outvars, found.factors.results, strict=True):
            self._cut(atom, found.cut(dims))

    def _cut_scan(self, number: int, eqn: JaxprEqn, side: str, index: int, cut: Cut) -> None:
        """Cut a scan if the value at a position is one that it slices or stacks."""
        consts, init, _ = scan_operands(eqn)
        first = {"in": len(consts) + len(init), "out": len(init)}
        if cut.dim != 0 or index < first[side] or not cut.layers:
            return
        self.scans[number] = self.backward.cut(cut)
        for atom in (*eqn.invars[first["in"] :], *eqn.outvars[first["out"] :]):
            self._cut(atom, cut)

    # -- the new jaxpr

    def emit(self, in_pieces: Set[Var], out_pieces: Set[Var]) -> CutJaxpr:
        """Return the new jaxpr; see `cut_stacks` for the arguments."""
        writer = _Writer(self.cuts)
        invars: list[Var] = []
        for var in self.jaxpr.invars:
            invars += writer.input_pieces(var) if var in in_pieces and var in self.cuts else [var]
        stop_of = dict(control_flow.spans(self.jaxpr.eqns).values())
        for number, eqn in enumerate(self.jaxpr.eqns):
            layer = self.layers[number]
            # What a loop or branch reads is joined before it, not inside of it.
            for inner in self.jaxpr.eqns[number : stop_of.get(number, number)]:
                writer.join_operands(inner)
            if number in self.scans:
                kinds = self.backward.carries.get(number, ("passed on",) * len(eqn.outvars))
                writer.scan(number, eqn, self.scans[number], kinds)
            elif number in self.equation_cuts:
                writer.cut_equation(eqn, self.equation_cuts[number], layer)
            elif number in self.identities:
                writer.identity(eqn, layer)
            elif number in self.joins:
                writer.pieces[eqn.outvars[0]] = [writer.whole(atom) for atom in eqn.invars]
            elif number in self.splits:
                (atom,) = eqn.invars
                assert isinstance(atom, Var)
                pieces = writer.pieces_of(atom, self.cuts[atom])
                writer.values.update(zip(eqn.outvars, pieces, strict=True))
            else:
                writer.equation(eqn, layer)
        inputs = tuple(
            self.cuts.get(var) if var in in_pieces else None for var in self.jaxpr.invars
        )
        outputs: list[Cut | None] = []
        outvars: list[Atom] = []
        for atom in self.jaxpr.outvars:
            cut = self.cuts.get(atom) if isinstance(atom, Var) and atom in out_pieces else None
            outvars += [writer.whole(atom)] if cut is None else writer.pieces_of(atom, cut)
            outputs.append(cut)
        kept = needed(enumerate(writer.eqns), outvars)
        jaxpr = Jaxpr(
            self.jaxpr.constvars,
            invars,
            outvars,
            [eqn for _, eqn in kept],
            consts=self.jaxpr.consts,
            debug_info=self.jaxpr.debug_info.with_unknown_names(),
        )
        return CutJaxpr(jaxpr, [writer.layers[k] for k, _ in kept], inputs, tuple(outputs))


class _Writer:
    """The equations of a jaxpr of pieces.

    Attributes:
        cuts: The cut of each original value that is cut.
        eqns: The new equations.
        layers: The layer of each of them, which is at least that of its operands.
        values: New values in place of original ones.
        pieces: The pieces of original values.
    """

    def __init__(self, cuts: Mapping[Var, Cut]) -> None:
        self.cuts = cuts
        self.eqns: list[JaxprEqn] = []
        self.layers: list[int] = []
        self.values: dict[Var, Atom] = {}
        self.pieces: dict[Var, list[Atom]] = {}
        self._split: dict[tuple[Var, int, tuple[int, ...]], list[Atom]] = {}
        self._layer_of: dict[Var, int] = {}
        self._producer: dict[Var, JaxprEqn] = {}
        self._carries: dict[tuple[int, int], list[Atom]] = {}

    def input_pieces(self, var: Var) -> list[Var]:
        """Return the inputs that replace an input which the caller passes in pieces."""
        aval = aval_of(var)
        pieces = [Var(aval.update(shape=shape)) for shape in self.cuts[var].shapes(aval.shape)]
        self.pieces[var] = list(pieces)
        return pieces

    # -- values

    def whole(self, atom: Atom) -> Atom:
        """Return a value in one piece."""
        if isinstance(atom, JaxLiteral):
            return atom
        if atom in self.pieces and atom not in self.values:
            dim = self.cuts[atom].dim
            (self.values[atom],) = self._function(
                lambda *pieces: lax.concatenate(pieces, dim), self.pieces[atom]
            )
        return self.values.get(atom, atom)

    def pieces_of(self, atom: Atom, cut: Cut) -> list[Atom]:
        """Return the pieces of a value."""
        assert isinstance(atom, Var)
        if atom in self.pieces and _is_same(self.cuts[atom], cut):
            return self.pieces[atom]
        key = atom, cut.dim, cut.sizes
        if key not in self._split:
            self._split[key] = self._function(
                lambda value: lax.split(value, cut.sizes, axis=cut.dim), [self.whole(atom)]
            )
        return self._split[key]

    def join_operands(self, eqn: JaxprEqn) -> None:
        """Write what joins the pieces of an equation's operands."""
        for atom in eqn.invars:
            if isinstance(atom, Var) and atom in self.pieces:
                self.whole(atom)

    # -- equations

    def equation(self, eqn: JaxprEqn, layer: int) -> None:
        """Write an equation that is not cut."""
        self._append(eqn.replace(invars=[self.whole(atom) for atom in eqn.invars]), layer)

    def identity(self, eqn: JaxprEqn, layer: int) -> None:
        """Write an equation whose result i is operand i, with pieces as operands of their own.

        A barrier becomes one barrier per piece, so that no piece depends on those of other layers.
        """
        invars: list[Atom] = []
        outvars: list[Var] = []
        for atom, var in zip(eqn.invars, eqn.outvars, strict=True):
            cut = self.cuts.get(var)
            if cut is None or isinstance(atom, JaxLiteral):
                invars.append(self.whole(atom))
                outvars.append(var)
                continue
            pieces = self.pieces_of(atom, cut)
            results = [Var(piece.aval) for piece in pieces]
            self.pieces[var] = list(results)
            invars += pieces
            outvars += results
        size = 1 if eqn.primitive is lax.optimization_barrier_p else len(invars)
        for group in zip(batched(invars, size), batched(outvars, size), strict=True):
            self._append(eqn.replace(invars=list(group[0]), outvars=list(group[1])), layer)

    def cut_equation(self, eqn: JaxprEqn, cut: _EquationCut, layer: int) -> None:
        """Write one equation per piece, and the combination of partial results."""
        operand_cuts = [cut.cut(dims) for dims in cut.factors.operands]
        result_cuts = [cut.cut(dims) for dims in cut.factors.results]
        operands = [
            self.pieces_of(atom, own) if own is not None else [self.whole(atom)] * len(cut.sizes)
            for atom, own in zip(eqn.invars, operand_cuts, strict=True)
        ]
        results: list[list[Atom]] = []
        for k in range(len(cut.sizes)):
            invars = [pieces[k] for pieces in operands]
            shapes = [
                aval_of(var).shape if own is None else own.shapes(aval_of(var).shape)[k]
                for var, own in zip(eqn.outvars, result_cuts, strict=True)
            ]
            piece_layer = max(layer, cut.layers[k]) if cut.layers else layer
            results.append(
                self._piece(eqn, invars, shapes, (operand_cuts, result_cuts), piece_layer)
            )
        kind = cut.factors.kinds[cut.factor]
        for r, var in enumerate(eqn.outvars):
            pieces = [result[r] for result in results]
            if kind in PARTIAL:
                self.values[var] = self._combined(_COMBINE[kind], pieces)
            else:
                self.pieces[var] = pieces
                own = result_cuts[r]
                assert own is not None
                if not _is_same(self.cuts[var], own):
                    self.values[var] = self._concatenated(pieces, own.dim)
                    del self.pieces[var]

    def _piece(
        self,
        eqn: JaxprEqn,
        invars: Sequence[Atom],
        shapes: Sequence[tuple[int, ...]],
        cuts: tuple[Sequence[Cut | None], Sequence[Cut | None]],
        layer: int,
    ) -> list[Atom]:
        """Write an equation on one piece of its operands, and return its results."""
        local = record_of(eqn).local
        if local is None:
            outvars = [
                Var(aval_of(var).update(shape=shape))
                for var, shape in zip(eqn.outvars, shapes, strict=True)
            ]
            self._append(eqn.replace(invars=list(invars), outvars=outvars), layer)
            return list(outvars)
        reads, makes = (
            [
                tuple(
                    ("piece",) if own is not None and dim == own.dim else ()
                    for dim in range(aval_of(atom).ndim)
                )
                for atom, own in zip(atoms, own_cuts, strict=True)
            ]
            for atoms, own_cuts in zip((eqn.invars, eqn.outvars), cuts, strict=True)
        )
        return self._function(
            lambda *shards: local(eqn, reads, makes, shapes, shards), invars, layer, eqn
        )

    def scan(self, number: int, eqn: JaxprEqn, cut: Cut, kinds: Sequence[Carry]) -> None:
        """Write a scan as one shorter scan per piece of its iterations.

        Args:
            number: Its number.
            eqn: The scan.
            cut: The cut of its iterations.
            kinds: How the pieces get each carry.
        """
        consts, init, xs = scan_operands(eqn)
        num_carried = len(init)
        constants = [self.whole(atom) for atom in consts]
        slices = [self.pieces_of(atom, cut) for atom in xs]
        carry = [self.whole(atom) for atom in init]
        finals: list[list[Atom]] = []
        pieces = range(len(cut.sizes))
        ys: dict[int, list[Var]] = {}
        for k in reversed(pieces) if eqn.params["reverse"] else pieces:
            if finals:
                carry = [
                    self._carry(kind, last, k, eqn)
                    for kind, last in zip(kinds, finals[-1], strict=False)
                ]
            self._carries[number, k] = carry
            avals = [aval_of(var) for var in eqn.outvars]
            avals[num_carried:] = [
                aval.update(shape=cut.shapes(aval.shape)[k]) for aval in avals[num_carried:]
            ]
            outvars = [Var(aval) for aval in avals]
            size = cut.sizes[k]
            params = {**eqn.params, "length": size, "unroll": min(eqn.params["unroll"], size)}
            invars = [*constants, *carry, *(sliced[k] for sliced in slices)]
            self._append(eqn.replace(invars=invars, outvars=outvars, params=params), cut.layers[k])
            finals.append(list(outvars[:num_carried]))
            ys[k] = outvars[num_carried:]
        for position, var in enumerate(eqn.outvars[:num_carried]):
            results = [final[position] for final in finals]
            self.values[var] = (
                self._combined(lax.add, results) if kinds[position] == "sum" else results[-1]
            )
        for r, var in enumerate(eqn.outvars[num_carried:]):
            self.pieces[var] = [ys[k][r] for k in pieces]

    def _carry(self, kind: Carry, last: Atom, piece: int, eqn: JaxprEqn) -> Atom:
        """Return the carry with which a piece of a scan begins; `last` is that of the last one."""
        match kind:
            case "passed on":
                return last
            case "sum":
                aval = aval_of(last)
                (zeros,) = self._function(lambda: lax.full(aval.shape, 0, aval.dtype), [])
                return zeros
            case (forward, position):
                atom = self._carries[forward, piece][position]
                var = Var(aval_of(atom))
                barrier = eqn.replace(
                    primitive=lax.optimization_barrier_p, invars=[atom], outvars=[var], params={}
                )
                self._append(barrier, -1)
                return var

    def _concatenated(self, pieces: Sequence[Atom], dim: int) -> Atom:
        (whole,) = self._function(lambda *values: lax.concatenate(values, dim), pieces)
        return whole

    def _combined(self, combine: Callable[[Any, Any], Any], partials: Sequence[Atom]) -> Atom:
        """Write the combination of partial results, and return it."""
        result = partials[0]
        for partial in partials[1:]:
            (result,) = self._function(combine, [result, partial], source=None)
        return result

    def _function(
        self,
        fun: Callable[..., Any],
        operands: Sequence[Atom],
        layer: int = -1,
        source: JaxprEqn | None = None,
    ) -> list[Atom]:
        """Write the equations of a function, and return its results.

        Args:
            fun: The function.
            operands: Its operands.
            layer: The layer of its equations.
            source: The equation that it replaces; None for what cuts and joins arrays, which is in
                the backward pass if what computes its operands is.
        """
        avals = [
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
            for aval in map(aval_of, operands)
        ]
        traced = jax.make_jaxpr(jax.named_scope(STACK_SCOPE)(fun))(*avals)
        producers = (self._producer[v] for v in variables(operands) if v in self._producer)
        backward = next(filter(is_backward, producers), None)
        env: dict[Var, Atom] = dict(zip(traced.jaxpr.invars, operands, strict=True))
        for eqn in traced.jaxpr.eqns:
            outvars = [Var(var.aval) for var in eqn.outvars]
            env.update(zip(eqn.outvars, outvars, strict=True))
            invars = [atom if isinstance(atom, JaxLiteral) else env[atom] for atom in eqn.invars]
            new = eqn.replace(invars=invars, outvars=outvars)
            if source is not None:
                new = new.replace(source_info=source.source_info)
            elif backward is not None:
                scopes = backward.source_info.name_stack.extend(STACK_SCOPE)
                new = new.replace(source_info=new.source_info.replace(name_stack=scopes))
            self._append(new, layer)
        return [
            atom if isinstance(atom, JaxLiteral) else env[atom] for atom in traced.jaxpr.outvars
        ]

    def _append(self, eqn: JaxprEqn, layer: int) -> None:
        operand_layers = (self._layer_of.get(var, -1) for var in variables(eqn.invars))
        layer = max(layer, max(operand_layers, default=-1))
        self.eqns.append(eqn)
        self.layers.append(layer)
        self._layer_of.update(dict.fromkeys(eqn.outvars, layer))
        self._producer.update(dict.fromkeys(eqn.outvars, eqn))
