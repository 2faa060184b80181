"""The equations of a jaxpr that computes with pieces of stacked arrays."""

from collections.abc import Callable, Mapping, Sequence
from itertools import batched
from typing import Any, Literal

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Var
from jax.extend.core import Literal as JaxLiteral

from autopar.ir.array_cuts import Cut
from autopar.ir.graph import Atom, aval_of, is_backward, renamed, variables, with_name_stack
from autopar.layering.equation_cuts import EquationCut, is_same_cut
from autopar.primitives import record_of
from autopar.primitives.factors import PARTIAL

STACK_SCOPE = "pipeline_stack"
"""The named scope of equations that cut arrays into the pieces of layers."""

_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lax.add,
    "max": lax.max,
    "min": lax.min,
}
"""How partial results of pieces are combined, by the kind of the factor that is cut."""


type Carry = Literal["passed on", "sum"] | tuple[int, int]
"""How the pieces of a scan get a carry.

"passed on": from the piece before. "sum": each piece starts with zeros, and the results of all
pieces are added. (number, position): from the pieces of the forward scan with that number, whose
carry at that position has the same values.
"""


def scan_operands(scan: JaxprEqn) -> tuple[list[Atom], list[Atom], list[Atom]]:
    """Return the constants, initial carries and sliced arrays of a scan."""
    consts, init, slices = map(list, scan.params["ft_in"].update(scan.invars).unpack())
    return consts, init, slices


class PieceWriter:
    """The equations of a jaxpr of pieces.

    Attributes:
        cuts: the cut of each original value that is cut.
        eqns: the new equations.
        layers: the layer of each new equation, which is no earlier than the layers of its operands.
        values: new values in place of original ones.
        pieces: the pieces of original values.
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
        if atom in self.pieces and is_same_cut(self.cuts[atom], cut):
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

        A barrier becomes one barrier per piece, so that no piece depends on pieces of other layers.
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

    def cut_equation(self, eqn: JaxprEqn, cut: EquationCut, layer: int) -> None:
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
                if not is_same_cut(self.cuts[var], own):
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
            number: its number.
            eqn: the scan.
            cut: the cut of its iterations.
            kinds: how the pieces get each carry.
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
        """Return the carry at the start of a piece of a scan; `last` is the last piece's carry."""
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
            fun: the function.
            operands: its operands.
            layer: the layer of its equations.
            source: the equation that it replaces; None for what cuts and joins arrays, which is in
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
            new = eqn.replace(invars=renamed(eqn.invars, env), outvars=outvars)
            if source is not None:
                new = new.replace(source_info=source.source_info)
            elif backward is not None:
                scopes = backward.source_info.name_stack.extend(STACK_SCOPE)
                new = with_name_stack(new, scopes)
            self._append(new, layer)
        return renamed(traced.jaxpr.outvars, env)

    def _append(self, eqn: JaxprEqn, layer: int) -> None:
        operand_layers = (self._layer_of.get(var, -1) for var in variables(eqn.invars))
        layer = max(layer, max(operand_layers, default=-1))
        self.eqns.append(eqn)
        self.layers.append(layer)
        self._layer_of.update(dict.fromkeys(eqn.outvars, layer))
        self._producer.update(dict.fromkeys(eqn.outvars, eqn))
