"""Cutting of stacked arrays: a jaxpr computes with their pieces in place of the whole arrays.

The weights of layers that run in a `scan` are stacked in arrays whose first dim counts layers. A
cut of such an array follows the factors of equations (`autopar.primitives.factors`), as a sharding
does: an elementwise equation on a cut array becomes one equation per piece, and a sum over the cut
dim becomes the sum of partial sums. An equation that can't be cut reads the concatenated pieces.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import concatenate_p

from autopar.ir import control_flow
from autopar.ir.array_cuts import Cut
from autopar.ir.graph import Atom, aval_of, needed, scopes, variables
from autopar.layering.equation_cuts import EquationCut, cut_of_equation, is_same_cut
from autopar.layering.piece_writer import STACK_SCOPE, Carry, PieceWriter, scan_operands
from autopar.primitives import record_of


@dataclass(frozen=True, slots=True)
class CutJaxpr:
    """A jaxpr that computes with pieces.

    Attributes:
        jaxpr: the jaxpr.
        layers: the layer of each equation; -1 for equations that only cut inputs.
        inputs: the cut of each input of the original jaxpr; None for an input in one piece.
        outputs: the cut of each of its outputs.
    """

    jaxpr: Jaxpr
    layers: list[int]
    inputs: tuple[Cut | None, ...]
    outputs: tuple[Cut | None, ...]


@dataclass(frozen=True, slots=True)
class BackwardScans:
    """The scans of a backward pass.

    A piece of such a scan belongs to the layer of the weights or residuals that it slices. Backward
    passes visit layers in reverse, so the piece of layer l counts as layer 2 * num_layers - 1 - l.

    Attributes:
        carries: the carries of each scan, by its number.
        num_layers: the number of layers of the forward pass.
    """

    carries: Mapping[int, Sequence[Carry]]
    num_layers: int

    def cut(self, cut: Cut) -> Cut:
        """Return the cut of a scan that slices an array with a cut."""
        return Cut(0, cut.sizes, tuple(2 * self.num_layers - 1 - layer for layer in cut.layers))


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
        jaxpr: the jaxpr. Markers of control flow and what is between them stay as they are.
        seeds: values that are cut, with their cuts.
        in_pieces: inputs that the new jaxpr has as pieces if they are cut; it cuts the others
            itself.
        out_pieces: outputs that the new jaxpr returns in pieces if they are cut.
        layers: the layer of each equation, which may not be earlier than the layer of an operand.
        scans: numbers of `scan`s that become one shorter scan per piece, with the cut of their
            iterations.
        backward: the scans of a backward pass, which are cut where they slice or stack pieces.
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


def _cut_of_concatenation(eqn: JaxprEqn) -> Cut:
    dim = eqn.params["dimension"]
    return Cut(dim, tuple(aval_of(atom).shape[dim] for atom in eqn.invars))


class _StackCutter:
    """Decides which values and equations of a jaxpr are cut, and writes the new jaxpr.

    Attributes:
        cuts: the cut of each value that is cut.
        equation_cuts: the cuts of equations, by number.
        identities: numbers of equations that return their operands unchanged, some of them cut.
        joins: numbers of concatenations of pieces.
        splits: numbers of equations that split a value into its pieces.
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
        self.equation_cuts: dict[int, EquationCut] = {}
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
        """Cut the values of an equation as the operand or result at a position is cut."""
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
        if is_join and is_same_cut(_cut_of_concatenation(eqn), cut):
            self.joins.add(number)
            return
        found = cut_of_equation(eqn, (side, index), cut)
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
        writer = PieceWriter(self.cuts)
        invars: list[Var] = []
        for var in self.jaxpr.invars:
            invars += writer.input_pieces(var) if var in in_pieces and var in self.cuts else [var]
        stop_of = dict(control_flow.spans(self.jaxpr.eqns).values())
        for number, eqn in enumerate(self.jaxpr.eqns):
            # What a loop or branch reads is joined before it, not inside of it.
            for inner in self.jaxpr.eqns[number : stop_of.get(number, number)]:
                writer.join_operands(inner)
            self._write(writer, number, eqn)
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

    def _write(self, writer: PieceWriter, number: int, eqn: JaxprEqn) -> None:
        """Write an equation as it is cut."""
        layer = self.layers[number]
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
