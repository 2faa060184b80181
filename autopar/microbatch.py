"""Splitting a step into microbatches, without ever changing what it computes.

How a value of the whole batch comes from the values of its `n` microbatches follows from two traces of the step, one for each
batch size, read side by side. Every value is told by a `Kind`: the same for all examples, one row per example, or linear
in such rows; and by the power of `n` by which its whole-batch value is larger. A sum over examples is linear with power
one; divided by the number of examples, a literal that differs between the traces by `n`, it is linear with power zero, a
mean. Whatever does not fit is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal as OneOf

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from autopar import regions
from autopar.gradients import accumulate_p
from autopar.graph import Atom, aval_of, needed
from autopar.sharding.rules import PASS_THROUGH, op_factors

type Combine = OneOf["sum", "mean", "same", "rows"]
"""How the microbatches' values make that of the batch: added up, averaged, any of them, or put together row by row."""

type Numbered = tuple[int, JaxprEqn]


class MicrobatchError(ValueError):
    """The step can't be run in microbatches with the same result."""


@dataclass(frozen=True, slots=True)
class Microbatching:
    """How a step runs in microbatches.

    Attributes:
        count: number of microbatches.
        body: numbered equations that run for each, up to the marked values.
        tail: numbered equations that run once, on the accumulated values.
        marks: the numbered `accumulate` equations: the body ends at their operands, the tail starts at their results.
        combine: how each of their results is put together.
        powers: for values with a row per example, told by (equation, result), the power of the batch's size that they grow with.
    """

    count: int
    body: tuple[Numbered, ...]
    tail: tuple[Numbered, ...]
    marks: tuple[Numbered, ...]
    combine: tuple[Combine, ...]
    powers: Mapping[tuple[int, int], int] = field(default_factory=dict, repr=False)


def split(
    micro: Jaxpr,
    sizes: tuple[Jaxpr, Jaxpr],
    batch: frozenset[int],
    count: int,
    out_paths: Sequence[str],
    rows: bool = False,
) -> Microbatching:
    """Split a flat jaxpr traced for one microbatch.

    Args:
        sizes: the same step traced for two batch sizes above one, the second `count` times the first. (A microbatch of a
            single example won't do: tracing simplifies dims of size one away.)
        rows: whether marked values may have a row per example, in dim 0.

    Raises:
        MicrobatchError: nothing is marked, an output depends on the batch other than through marked values, or a marked value
            can't be put together from microbatches.
    """
    numbered = list(enumerate(micro.eqns))
    marks = _marks(micro)
    if not marks:
        raise MicrobatchError(
            "the step takes no gradient with autopar.grad or autopar.value_and_grad; use one of them in place of jax's, so that"
            " it is known what to accumulate over microbatches"
        )
    marked = tuple(atom for _, eqn in marks for atom in eqn.invars)
    accumulated = tuple(var for _, eqn in marks for var in eqn.outvars)
    body = needed(numbered, marked)
    if any(eqn.primitive is accumulate_p for _, eqn in body):
        raise MicrobatchError("a loss depends on the gradients of another autopar.grad; that can't run in microbatches")
    tail = needed(numbered, micro.outvars, given=accumulated)
    if count == 1:
        return Microbatching(1, tuple(body), tuple(tail), tuple(marks), ("same",) * len(marked))
    batch_vars = {micro.invars[i] for i in batch}

    def reads_batch(eqns: Sequence[Numbered], results: Sequence[Atom]) -> bool:
        read = [*results, *(operand for _, eqn in eqns for operand in eqn.invars)]
        return any(isinstance(atom, Var) and atom in batch_vars for atom in read)

    for path, atom in zip(out_paths, micro.outvars, strict=True) if reads_batch(tail, micro.outvars) else ():
        if reads_batch(needed(tail, [atom], given=accumulated), [atom]):
            raise MicrobatchError(
                f"output {path or 'of the step'} depends on the batch outside autopar.grad / value_and_grad, so it can't be put"
                " together from microbatches; return it from the loss function with has_aux=True"
            )
    kinds = _Kinds(*sizes, batch, count)
    combine: tuple[Combine, ...] = tuple(
        kinds.combine(atom, rows) for _, eqn in _marks(sizes[0]) for atom in eqn.invars
    )
    if len(combine) != len(marked):
        raise MicrobatchError(
            "the step takes other gradients when a microbatch has a single example; use fewer microbatches"
        )
    same = [eqn.primitive for eqn in micro.eqns] == [eqn.primitive for eqn in sizes[0].eqns]
    powers = kinds.powers_of_rows(sizes[0].eqns) if same else {}
    return Microbatching(count, tuple(body), tuple(tail), tuple(marks), combine, powers)


def _marks(jaxpr: Jaxpr) -> list[Numbered]:
    return [(number, eqn) for number, eqn in enumerate(jaxpr.eqns) if eqn.primitive is accumulate_p]


@dataclass(frozen=True, slots=True)
class Kind:
    """How the whole batch's value relates to the microbatches'.

    Attributes:
        form: "same" for all microbatches; "rows", one per example along `dim`; or "linear", the mean of the microbatches'.
        power: the whole batch's value is larger by count ** power; None for zeros, which fit any power.
    """

    form: OneOf["same", "rows", "linear"]
    power: int | None = 0
    dim: int = 0


class _Unfit(Exception):
    """Why a value has no kind."""


_PRODUCTS = {"mul", "dot_general", "conv_general_dilated", "ragged_dot_general"}
_SCATTERS = {"scatter-add", "scatter-sub"}
_ADDS = {"add", "add_any", "sub", "concatenate", "stack", *_SCATTERS, "dynamic_update_slice", "pad"}
_SCALES = {
    *("neg", "convert_element_type", "copy", "copy_p", "reshape", "transpose", "broadcast_in_dim", "squeeze", "slice"),
    *("reduce_sum", "stop_gradient", "split", "rev", "cumsum", "real", "imag", "optimization_barrier", "accumulate"),
    *("dynamic_slice", "gather", "name", "tile", "unstack", "reduce_window_sum", "select_and_scatter_add"),
}  # fmt: skip
_INDEXED = {
    "gather": 1,
    "dynamic_slice": 1,
    "dynamic_update_slice": 2,
    "select_and_scatter_add": 1,
}  # data before indices
_ORDERED = {
    "max",
    "min",
    "abs",
    "reduce_max",
    "reduce_min",
    "reduce_window_max",
    "cummax",
    "cummin",
    "sort",
    "top_k",
}  # keep a positive factor, but are not linear


class _Kinds:
    def __init__(self, micro: Jaxpr, full: Jaxpr, batch: frozenset[int], count: int) -> None:
        self.count = count
        self.kinds: dict[Var, Kind | _Unfit] = dict.fromkeys((*micro.constvars, *micro.invars), Kind("same"))
        self.kinds.update((micro.invars[i], Kind("rows")) for i in batch)
        if [eqn.primitive for eqn in micro.eqns] != [eqn.primitive for eqn in full.eqns]:
            raise MicrobatchError(
                "the step does different things for batches of different size; that can't run in microbatches"
            )
        self.carries: dict[Var, Kind | _Unfit] = {}
        while not self._follow(micro.eqns, full.eqns):
            pass  # what a loop hands on was found to be something else than what it starts with

    def _follow(self, eqns: Sequence[JaxprEqn], wholes: Sequence[JaxprEqn]) -> bool:
        """Find the kinds from top to bottom; False when a loop contradicts what was assumed of its carry."""
        for eqn, whole in zip(eqns, wholes, strict=True):
            try:
                found = self._of_marker(eqn, whole) if eqn.primitive in regions.MARKERS else self._results(eqn, whole)
            except _Unfit as unfit:
                found = [unfit] * len(eqn.outvars)
            self.kinds.update(zip(eqn.outvars, found, strict=True))
            if eqn.primitive is regions.loop_result_p:
                carry = eqn.invars[0]
                assert isinstance(carry, Var)
                if found[0] != self.kinds[carry] and not isinstance(self.kinds[carry], _Unfit):
                    self.carries[carry] = found[0]
                    return False
        return True

    def _of_marker(self, eqn: JaxprEqn, whole: JaxprEqn) -> list[Kind | _Unfit]:
        """Loops and branches: what goes in, what is handed on, what comes out."""
        match eqn.primitive:
            case regions.loop_p | regions.switch_p:
                if eqn.params != whole.params:
                    raise _Unfit(f"a loop in {eqn.source_info.name_stack} is longer for a larger batch")
                return [self._operand(eqn.invars[0], whole.invars[0]) if eqn.invars else Kind("same")]
            case regions.loop_carry_p:
                return [self.carries.get(eqn.outvars[0]) or self._operand(eqn.invars[0], whole.invars[0])]
            case regions.loop_result_p:
                return [self._joined(eqn, whole, 2)]
            case regions.switch_result_p:
                token = self._operand(eqn.invars[-1], whole.invars[-1])
                if token.form != "same" or token.power:
                    raise _Unfit(f"a branch in {eqn.source_info.name_stack} is taken for what is in the batch")
                return [self._joined(eqn, whole, len(eqn.invars) - 1)]
            case regions.loop_slice_p | regions.loop_stack_p:
                kind = self._operand(eqn.invars[0], whole.invars[0])
                if kind.form != "rows":
                    return [kind]
                if eqn.primitive is regions.loop_slice_p and kind.dim == 0:
                    raise _Unfit(f"a loop in {eqn.source_info.name_stack} goes through the examples of the batch")
                return [replace(kind, dim=kind.dim + (1 if eqn.primitive is regions.loop_stack_p else -1))]
            case regions.loop_const_p:
                return [self._operand(eqn.invars[0], whole.invars[0])]
            case regions.loop_test_p:
                kind = self._operand(eqn.invars[0], whole.invars[0])
                if kind.form != "same" or kind.power:
                    raise MicrobatchError(
                        f"a while_loop in {eqn.source_info.name_stack} runs until the batch meets a condition, so microbatches would"
                        " run it for different times; use num_micro_batches=1"
                    )
        return []

    def _joined(self, eqn: JaxprEqn, whole: JaxprEqn, count: int) -> Kind:
        """The kind that the first `count` operands, of which the result is one, have in common."""
        kinds = [self._operand(a, b) for a, b in zip(eqn.invars[:count], whole.invars[:count], strict=True)]
        powers = {kind.power for kind in kinds} - {None}
        forms = [kind for kind in kinds if kind.form != "same"]
        if len(powers) > 1 or len({(kind.form, kind.dim) for kind in forms}) > 1:
            raise _Unfit(f"a loop or branch in {eqn.source_info.name_stack} mixes sums, means or examples of the batch")
        return replace(forms[0] if forms else kinds[0], power=powers.pop() if powers else None)

    def combine(self, atom: Atom, rows: bool) -> Combine:
        kind = Kind("same") if isinstance(atom, Literal) else self.kinds[atom]
        if isinstance(kind, _Unfit):
            raise MicrobatchError(
                f"can't accumulate over microbatches: {kind}. Write the loss as a sum or a mean over the examples of the batch,"
                " or use num_micro_batches=1"
            )
        if kind.form == "rows" and rows:
            if kind.dim or kind.power:
                raise MicrobatchError(
                    f"a result has a row per example in dim {kind.dim}, or rows that grow with the batch size, of shape"
                    f" {aval_of(atom).shape} for a microbatch; return it with the batch as its first dim, or use"
                    " num_micro_batches=1"
                )
            return "rows"
        if kind.form == "rows":
            raise MicrobatchError(
                f"autopar.grad returns a value with one row per example, of shape {aval_of(atom).shape} for a microbatch;"
                " return sums or means over the batch, or use num_micro_batches=1"
            )
        match kind.power:
            case 0 | None:
                return "same" if kind.form == "same" else "mean"
            case 1:
                return "sum"
            case power:
                raise MicrobatchError(
                    f"a loss or gradient that grows with the batch size to the power {power} can't be accumulated over"
                    " microbatches; write the loss as a sum or a mean over the examples"
                )

    def powers_of_rows(self, eqns: Sequence[JaxprEqn]) -> dict[tuple[int, int], int]:
        """The powers of results that have a row per example."""
        found = {(n, r): self.kinds[var] for n, eqn in enumerate(eqns) for r, var in enumerate(eqn.outvars)}
        return {at: kind.power or 0 for at, kind in found.items() if isinstance(kind, Kind) and kind.form == "rows"}

    def _operand(self, atom: Atom, whole: Atom) -> Kind:
        if isinstance(atom, Var):
            kind = self.kinds[atom]
            if isinstance(kind, _Unfit):
                raise kind
            return kind
        assert isinstance(whole, Literal)
        value, full = np.asarray(atom.val), np.asarray(whole.val)
        if not value.any() and not full.any():
            return Kind("same", None)
        for power in (0, 1, -1):
            if np.allclose(np.float64(value) * float(self.count) ** power, np.float64(full), rtol=1e-6, atol=0):
                return Kind("same", power)
        raise _Unfit(f"a constant of the step is {value} for a microbatch and {full} for the batch")

    def _results(self, eqn: JaxprEqn, whole: JaxprEqn) -> list[Kind | _Unfit]:
        name = eqn.primitive.name
        operands = [self._operand(a, b) for a, b in zip(eqn.invars, whole.invars, strict=True)]
        if name in PASS_THROUGH:
            return list(operands)
        where = f"{name} in {eqn.source_info.name_stack}"
        power = _power(name, eqn, operands, where)
        linear = [k for k, kind in enumerate(operands) if kind.form == "linear"]
        rows = [k for k, kind in enumerate(operands) if kind.form == "rows"]
        if linear and rows:
            raise _Unfit(f"{where} mixes single examples with a statistic of the whole batch (batch normalisation?)")
        if linear:
            if not _is_linear(name, linear):
                raise _Unfit(f"{where} is not linear in a statistic of the batch (a masked mean? a ratio of sums?)")
            return [Kind("linear", power)] * len(eqn.outvars)
        if not rows:
            return [self._created(eqn, whole, Kind("same", power), where)] * len(eqn.outvars)
        factors = op_factors(eqn)
        batch = {factors.operands[k][operands[k].dim] for k in rows}
        if len(batch) != 1 or not (batch_dim := batch.pop()):
            raise _Unfit(f"{where} pairs examples with one another")
        factor = batch_dim[0]
        match factors.kinds[factor]:
            case "sum":
                return [Kind("linear", None if power is None else power + 1)] * len(eqn.outvars)
            case "parallel":
                dims = [[d for d, of in enumerate(result) if of and of[0] == factor] for result in factors.results]
                return [Kind("rows", power, found[0]) for found in dims]
            case _:
                raise _Unfit(f"{where} works across the examples of the batch")

    def _created(self, eqn: JaxprEqn, whole: JaxprEqn, kind: Kind, where: str) -> Kind:
        """The kind of something made of what is the same for all: repeated per example when its shape says so."""
        shape, full = aval_of(eqn.outvars[0]).shape, aval_of(whole.outvars[0]).shape
        grown = [dim for dim, (a, b) in enumerate(zip(shape, full, strict=True)) if a != b]
        if not grown:
            return kind
        uniform = eqn.primitive.name == "broadcast_in_dim" or (
            eqn.primitive.name == "iota" and eqn.params["dimension"] not in grown
        )
        if len(grown) > 1 or not uniform:
            raise _Unfit(f"{where} depends on the size of the batch or on an example's position in it")
        return replace(kind, form="rows", dim=grown[0])


def _power(name: str, eqn: JaxprEqn, operands: Sequence[Kind], where: str) -> int | None:
    """The power of the result, from those of the operands."""
    powers = [kind.power for kind in operands]
    if name in _PRODUCTS:
        return None if None in powers else sum(p for p in powers if p is not None)
    if name == "div":
        return None if powers[0] is None else powers[0] - (powers[1] or 0)
    if name in ("integer_pow", "square"):
        return None if powers[0] is None else powers[0] * eqn.params.get("y", 2)
    data = powers
    if name == "select_n":
        data = powers[1:]
    elif name in _SCATTERS:
        data = [powers[0], powers[2]]
        if operands[2].form == "rows" and operands[0].form != "rows" and powers[0] is not None:
            raise _Unfit(f"{where} adds a sum over examples to something else in place")
    elif name in _INDEXED:
        data = powers[: _INDEXED[name]]
    if name in _ADDS | _SCALES | _ORDERED | {"select_n"}:
        known = {p for p in data if p is not None}
        if len(known) > 1:
            raise _Unfit(f"{where} adds a sum over examples to a mean over examples")
        return known.pop() if known else None
    if any(powers):
        raise _Unfit(f"{where} is not linear in the size of the batch")
    return 0


def _is_linear(name: str, linear: Sequence[int]) -> bool:
    """Whether the primitive is linear in the operands at the positions `linear`, taken together."""
    if name in _PRODUCTS:
        return len(linear) == 1
    if name == "div":
        return linear == [0]
    if name == "select_n":
        return 0 not in linear
    if name in _INDEXED:
        return all(k < _INDEXED[name] for k in linear)
    return name in _ADDS | _SCALES
