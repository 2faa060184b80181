"""Batch scaling: how values of the whole batch follow from those of its microbatches.

An abstract interpretation reads two traces of a step side by side, one for each of two batch sizes.
It gives every value a `BatchScaling`: same, rows or linear, and the power of the number of
microbatches by which its value is larger for the whole batch. A sum over examples is linear with
power one. Divided by the number of examples, a literal that differs between the traces, it is
linear with power zero: a mean. A quotient by a statistic of the batch, as in a masked mean, scales
as its numerator, `per` that statistic. Other values are not separable.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import gcd
from typing import Any
from typing import Literal as OneOf

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import broadcast_in_dim_p, div_p, iota_p
from jax.lax import tile_p

from autopar.ir import control_flow
from autopar.ir.equation_groups import dependents, units
from autopar.ir.graph import Atom, Where, aval_of, constant, source_line
from autopar.ir.step_graph import MicrobatchError
from autopar.microbatch.batch_scaling_rules import BatchScaling, NotSeparable, power_of
from autopar.microbatch.created_rows import why_whole
from autopar.microbatch.inner_bodies import why_body_differs
from autopar.primitives import op_factors, record_of
from autopar.primitives.index import indexed_dims
from autopar.primitives.linearity import adds, algebra_of, data_operands, is_exact, is_linear


@dataclass(frozen=True, slots=True)
class Repair:
    """Replacements of an equation's operands that make it separable.

    Attributes:
        totals: positions of operands that are replaced by the same statistic of the whole batch.
        scaled: maps positions of operands to the power of the number of microbatches by which they
            are divided.
    """

    totals: tuple[int, ...]
    scaled: Mapping[int, int]


class BatchScalings:
    """The batch scalings of all values of a step.

    Attributes:
        kinds: scaling of each variable of the smaller trace, or why it is not separable.
        divided: numbers of the equations that divide by a statistic of the batch or by a function
            of statistics.
        functions: maps each scalar that is a function of statistics to its equation.
        repairs: replacements of operands, by the number of the equation.
        copies: maps values that repeat a block per example or group of examples to the number of
            blocks.
        carries: scalings of loop carries that differ from those of their initial values.
    """

    def __init__(
        self,
        micro: Jaxpr,
        full: Jaxpr,
        batch: frozenset[int],
        count: int,
        body: Collection[int] = (),
        totals: bool = False,
        functions: bool = True,
    ) -> None:
        """Derive the scalings from the first equation to the last.

        Args:
            micro: flat jaxpr of the step for the smaller batch.
            full: flat jaxpr of the step for a batch `count` times as large.
            batch: inputs whose first dim is the batch.
            count: number of microbatches.
            body: numbers of equations whose operands may be replaced (`Repair`).
            totals: whether operands may be replaced by statistics of the whole batch, which an
                earlier loop accumulates.
            functions: whether scalars may be functions of statistics, computed when these are
                complete.

        Raises:
            MicrobatchError: the equations or constants of the step depend on the batch size, or a
                while_loop depends on the batch.
        """
        self.count = count
        self._body = frozenset(body)
        self._totals = totals
        self._functions = functions
        self._costly = _costly(micro) if totals else set()
        self._inside = _inside_of_loops(micro.eqns)
        self.kinds: dict[Var, BatchScaling | NotSeparable] = dict.fromkeys(
            (*micro.constvars, *micro.invars), BatchScaling("same")
        )
        self.kinds.update((micro.invars[i], BatchScaling("rows")) for i in batch)
        if len(micro.consts) != len(full.consts):
            raise MicrobatchError(
                "the step has other constants for batches of different size; use"
                " num_micro_batches=1"
            )
        for var, value, whole in zip(micro.constvars, micro.consts, full.consts, strict=True):
            try:
                self.kinds[var] = self._constant(value, whole)
            except NotSeparable as unfit:
                self.kinds[var] = unfit
        self.copies: dict[Var, int] = {}
        if [eqn.primitive for eqn in micro.eqns] != [eqn.primitive for eqn in full.eqns]:
            raise MicrobatchError(
                "the step does different things for batches of different size; that can't run in"
                " microbatches"
            )
        self.carries: dict[Var, BatchScaling | NotSeparable] = {}
        # A loop whose carry scales otherwise than its initial value needs another pass.
        while not self._follow(micro.eqns, full.eqns):
            pass

    def _follow(self, eqns: Sequence[JaxprEqn], wholes: Sequence[JaxprEqn]) -> bool:
        """Derive the scalings in order; return False if a loop changes its carry's scaling."""
        self.divided: set[int] = set()
        self.functions: dict[Var, JaxprEqn] = {}
        self.repairs: dict[int, Repair] = {}
        for number, (eqn, whole) in enumerate(zip(eqns, wholes, strict=True)):
            try:
                if eqn.primitive in control_flow.MARKERS:
                    results = self._of_marker(eqn, whole)
                else:
                    repaired = self._repaired(number, eqn, whole) if number in self._body else None
                    results = repaired or self._results(eqn, whole)
                if (
                    eqn.primitive is div_p
                    and isinstance(results[0], BatchScaling)
                    and results[0].per is eqn.invars[1]
                ):
                    self.divided.add(number)
            except NotSeparable as unfit:
                results = [unfit] * len(eqn.outvars)
            self.kinds.update(zip(eqn.outvars, results, strict=True))
            if eqn.primitive is control_flow.loop_result_p:
                carry = eqn.invars[0]
                assert isinstance(carry, Var)
                if results[0] != self.kinds[carry] and not isinstance(
                    self.kinds[carry], NotSeparable
                ):
                    self.carries[carry] = results[0]
                    return False
        return True

    def _of_marker(self, eqn: JaxprEqn, whole: JaxprEqn) -> list[BatchScaling | NotSeparable]:
        """Return the scalings of the results of a marker of a loop or branch."""
        match eqn.primitive:
            case control_flow.loop_p | control_flow.switch_p:
                if eqn.params != whole.params:
                    raise NotSeparable(f"a loop at {source_line(eqn)} is longer for a larger batch")
                return [
                    self._operand(eqn.invars[0], whole.invars[0])
                    if eqn.invars
                    else BatchScaling("same")
                ]
            case control_flow.loop_carry_p:
                return [
                    self.carries.get(eqn.outvars[0])
                    or self._operand(eqn.invars[0], whole.invars[0])
                ]
            case control_flow.loop_result_p:
                return [self._joined(eqn, whole, 2)]
            case control_flow.switch_result_p:
                token = self._operand(eqn.invars[-1], whole.invars[-1])
                if token != BatchScaling("same"):
                    raise NotSeparable(
                        f"a branch at {source_line(eqn)} is taken for what is in the batch"
                    )
                return [self._joined(eqn, whole, len(eqn.invars) - 1)]
            case control_flow.loop_slice_p | control_flow.loop_stack_p:
                kind = self._operand(eqn.invars[0], whole.invars[0])
                if kind.form != "rows":
                    return [kind]
                if eqn.primitive is control_flow.loop_slice_p and kind.dim == 0:
                    raise NotSeparable(
                        f"a loop at {source_line(eqn)} goes through the examples of the batch"
                    )
                return [
                    replace(
                        kind,
                        dim=kind.dim + (1 if eqn.primitive is control_flow.loop_stack_p else -1),
                    )
                ]
            case control_flow.loop_const_p:
                return [self._operand(eqn.invars[0], whole.invars[0])]
            case control_flow.loop_test_p:
                kind = self._operand(eqn.invars[0], whole.invars[0])
                if kind.form != "same" or kind.power or kind.per:
                    raise MicrobatchError(
                        f"a while_loop at {source_line(eqn)} runs until the batch meets a"
                        " condition, so microbatches would run it for different times; use"
                        " num_micro_batches=1"
                    )
        return []

    def _joined(self, eqn: JaxprEqn, whole: JaxprEqn, count: int) -> BatchScaling:
        """Return the common scaling of the first `count` operands, one of which is the result."""
        kinds = [
            self._operand(a, b)
            for a, b in zip(eqn.invars[:count], whole.invars[:count], strict=True)
        ]
        powers = {kind.power for kind in kinds} - {None}
        forms = [kind for kind in kinds if kind.form != "same"]
        pers = {kind.per for kind in kinds if kind.power is not None}
        if len(powers) > 1 or len(pers) > 1 or len({(kind.form, kind.dim) for kind in forms}) > 1:
            raise NotSeparable(
                f"a loop or branch at {source_line(eqn)} mixes sums, means or examples of the batch"
            )
        power, per = powers.pop() if powers else None, pers.pop() if pers else None
        return replace(forms[0] if forms else kinds[0], power=power, per=per)

    def of(self, atom: Atom, whole: Atom) -> BatchScaling:
        """Return the scaling of an accumulated value.

        Args:
            atom: the value in the smaller trace.
            whole: the same value in the larger trace.

        Raises:
            MicrobatchError: the value is not separable.
        """
        try:
            return self._operand(atom, whole)
        except NotSeparable as unfit:
            raise MicrobatchError(
                f"can't accumulate over microbatches: {unfit}. Write the loss as a sum, a mean or"
                " one weighted mean over the examples of the batch; or return the sums that it is"
                " made of, with has_aux=True, and divide after autopar.value_and_grad:"
                " (total, weights), gradients = autopar.value_and_grad(sums, has_aux=True)(params),"
                " then gradients / weights; or use num_micro_batches=1"
            ) from None

    def powers_of_rows(self, eqns: Sequence[JaxprEqn]) -> dict[tuple[int, int], int]:
        """Return the powers of results with a row per example, by equation and result."""
        powers: dict[tuple[int, int], int] = {}
        for n, eqn in enumerate(eqns):
            for r, var in enumerate(eqn.outvars):
                scaling = self.kinds[var]
                if isinstance(scaling, BatchScaling) and scaling.form == "rows":
                    powers[n, r] = scaling.power or 0
        return powers

    def _operand(self, atom: Atom, whole: Atom) -> BatchScaling:
        if isinstance(atom, Var):
            kind = self.kinds[atom]
            if isinstance(kind, NotSeparable):
                raise kind
            return kind
        assert isinstance(whole, Literal)
        return self._constant(atom.val, whole.val)

    def _constant(self, value: Any, whole: Any) -> BatchScaling:
        """Return the scaling of a constant of the step, an array or a number."""
        if value is whole:
            return BatchScaling("same")
        small, full = _numbers(value), _numbers(whole)
        grown = [
            dim
            for dim, sizes in enumerate(zip(small.shape, full.shape, strict=False))
            if sizes[0] != sizes[1]
        ]
        form = BatchScaling("same")
        if small.ndim != full.ndim or len(grown) > 1:
            raise NotSeparable(
                f"a constant of the step has shape {small.shape} for a microbatch and {full.shape}"
                " for the batch"
            )
        if grown:
            form = BatchScaling("rows", dim=grown[0])
            rows, small = small, small.take([0], grown[0])
            if full.shape[grown[0]] != self.count * rows.shape[grown[0]] or not _close(rows, small):
                raise NotSeparable(
                    f"a constant of the step, of shape {rows.shape} for a microbatch and"
                    f" {full.shape} for the batch, differs between examples"
                )
        power = power_of_constant(small, full, self.count)
        if power != "none":
            return replace(form, power=power)
        raise NotSeparable(
            f"a constant of the step is {_shown(value)} for a microbatch and {_shown(whole)} for"
            " the batch"
        )

    def _results(self, eqn: JaxprEqn, whole: JaxprEqn) -> list[BatchScaling | NotSeparable]:
        operands = [self._operand(a, b) for a, b in zip(eqn.invars, whole.invars, strict=True)]
        if record_of(eqn).passes_through:
            return list(operands)
        where = Where(eqn)
        if eqn.primitive is div_p and self._is_ratio(eqn, whole):
            weight = eqn.invars[1]
            assert isinstance(weight, Var)
            return [replace(operands[0], per=weight)]
        if self._is_function(eqn, operands):
            self.functions[eqn.outvars[0]] = eqn
            return [BatchScaling("function")]
        if any(kind.form == "function" for kind in operands):
            raise NotSeparable(
                f"{where} uses a function of sums over the batch otherwise than to divide by it"
            )
        if any(kind.per for kind in operands):
            return self._of_ratios(eqn, whole, operands, where)
        return self._plain(eqn, whole, operands, where)

    def _repaired(
        self, number: int, eqn: JaxprEqn, whole: JaxprEqn
    ) -> list[BatchScaling | NotSeparable] | None:
        """Return the scalings of the results if operands are replaced; None if that doesn't help.

        A statistic is replaced by that of the whole batch. A summand that does not grow with the
        batch, added to a sum over the batch, is divided by the number of microbatches. What a
        nonlinear equation reads is scaled to its value in the whole batch.
        """
        operands = [self._operand(a, b) for a, b in zip(eqn.invars, whole.invars, strict=True)]
        where = Where(eqn)
        if any(kind.per or kind.form == "function" for kind in operands):
            return None
        with suppress(NotSeparable):
            return self._plain(eqn, whole, operands, where)
        early = tuple(
            k
            for k, (atom, kind) in enumerate(zip(eqn.invars, operands, strict=True))
            if self._totals
            and isinstance(atom, Var)
            and kind.form == "linear"
            and not aval_of(atom).shape
            if atom not in self._inside and atom not in self._costly
        )
        for chosen in ((), early):
            kinds = list(operands)
            for k in chosen:
                kinds[k] = BatchScaling("same", None if kinds[k].power is None else 0)
            scaled = self._scaled(eqn, kinds)
            with suppress(NotSeparable):
                found = self._plain(eqn, whole, kinds, where)
                self.repairs[number] = Repair(chosen, scaled)
                return found
        return None

    def _scaled(self, eqn: JaxprEqn, kinds: list[BatchScaling]) -> dict[int, int]:
        """Return the powers of `count` by which to divide operands; update `kinds`.

        The summands of a sum get the same power. The operands of a nonlinear equation get the
        values that they have in the whole batch.
        """
        if algebra_of(eqn) is None:
            grown = {k: -kind.power for k, kind in enumerate(kinds) if kind.power}
            if any(is_exact(eqn.invars[k]) for k in grown):
                return {}
            for k in grown:
                kinds[k] = replace(kinds[k], power=0)
            return grown
        if not adds(eqn) or is_exact(eqn.outvars[0]):
            return {}
        known = {k: power for k in data_operands(eqn) if (power := kinds[k].power) is not None}
        largest = max(known.values(), default=0)
        found = {k: largest - power for k, power in known.items() if power < largest}
        for k in found:
            kinds[k] = replace(kinds[k], power=largest)
        return found

    def _is_ratio(self, eqn: JaxprEqn, whole: JaxprEqn) -> bool:
        """Return whether a division is by a statistic of the batch, outside of loops."""
        by = self._operand(eqn.invars[1], whole.invars[1])
        statistic = by.form == "function" or (
            by.form == "linear" and by.power is not None and not by.per
        )
        is_statistic = statistic and not aval_of(eqn.invars[1]).shape
        return (
            is_statistic
            and eqn.invars[1] not in self._inside
            and not self._operand(eqn.invars[0], whole.invars[0]).per
        )

    def _is_function(self, eqn: JaxprEqn, operands: Sequence[BatchScaling]) -> bool:
        """Return whether a scalar is a function of statistics that can't itself be accumulated."""
        statistics = [kind for kind in operands if kind.form != "same"]
        linear = [k for k, kind in enumerate(operands) if kind.form == "linear"]
        if (
            not self._functions
            or not statistics
            or any(kind.per or kind.form == "rows" for kind in operands)
        ):
            return False
        if len(eqn.outvars) != 1 or eqn.outvars[0] in self._inside:
            return False
        if len(linear) == len(statistics) and is_linear(eqn, linear) and _adds_alike(eqn, operands):
            return False
        scalars = not any(aval_of(atom).shape for atom in (*eqn.invars, *eqn.outvars))
        others = (
            atom for atom, kind in zip(eqn.invars, operands, strict=True) if kind.form == "same"
        )
        known = all(isinstance(atom, Literal) for atom in others)
        return (
            scalars
            and known
            and all(kind.power in (0, None) for kind in operands if kind.form == "same")
        )

    def _of_ratios(
        self, eqn: JaxprEqn, whole: JaxprEqn, operands: Sequence[BatchScaling], where: Where
    ) -> list[BatchScaling | NotSeparable]:
        """Return the scalings of results that are linear in quotients by one statistic."""
        divided = [k for k, kind in enumerate(operands) if kind.per]
        together = data_operands(eqn) if adds(eqn) else divided
        pers = {operands[k].per for k in {*divided, *together} if operands[k].power is not None}
        if len(pers) > 1 or not is_linear(eqn, divided):
            raise NotSeparable(
                f"{where} puts what is divided by a sum over the batch together with something"
                " else (a masked mean and a mean?)"
            )
        per = pers.pop() if pers else operands[divided[0]].per
        plain = self._plain(eqn, whole, [replace(kind, per=None) for kind in operands], where)
        return [
            kind if isinstance(kind, NotSeparable) else replace(kind, per=per) for kind in plain
        ]

    def _plain(
        self, eqn: JaxprEqn, whole: JaxprEqn, operands: Sequence[BatchScaling], where: Where
    ) -> list[BatchScaling | NotSeparable]:
        """Return the scalings of results whose operands are not quotients by statistics."""
        power = power_of(eqn, operands, where)
        linear = [k for k, kind in enumerate(operands) if kind.form == "linear"]
        rows = [k for k, kind in enumerate(operands) if kind.form == "rows"]
        if linear and rows:
            raise NotSeparable(
                f"{where} mixes single examples with a statistic of the whole batch (batch"
                " normalisation?)"
            )
        if linear:
            if not is_linear(eqn, linear):
                raise NotSeparable(
                    f"{where} is not linear in a statistic of the batch (a masked mean? a ratio of"
                    " sums?)"
                )
            return [BatchScaling("linear", power)] * len(eqn.outvars)
        if not rows:
            return [self._created(eqn, whole, BatchScaling("same", power), where)] * len(
                eqn.outvars
            )
        factors = op_factors(eqn)
        batch = {factors.operands[k][operands[k].dim] for k in rows}
        if len(batch) != 1 or not (batch_dim := batch.pop()):
            raise NotSeparable(f"{where} pairs examples with one another")
        if reason := why_body_differs(eqn, whole):
            raise NotSeparable(f"{where} {reason}")
        if 0 in rows and operands[0].dim in indexed_dims(eqn):
            raise NotSeparable(f"{where} looks up examples by their positions in the batch")
        factor = batch_dim[0]
        match factors.kinds[factor]:
            case "sum":
                if [aval_of(var).shape for var in eqn.outvars] != [
                    aval_of(var).shape for var in whole.outvars
                ]:
                    raise NotSeparable(
                        f"{where} makes something whose shape depends on the size of the batch"
                    )
                return [BatchScaling("linear", None if power is None else power + 1)] * len(
                    eqn.outvars
                )
            case "parallel":
                dims = [
                    [d for d, of in enumerate(result) if of and of[0] == factor]
                    for result in factors.results
                ]
                # A shard_map saves values for its backward pass without a dim of examples.
                if not all(dims):
                    raise NotSeparable(f"{where} has a result without a dim of examples")
                kinds = [BatchScaling("rows", power, result_dims[0]) for result_dims in dims]
                for kind, var, big in zip(kinds, eqn.outvars, whole.outvars, strict=True):
                    self._check_rows(kind.dim, aval_of(var).shape, aval_of(big).shape, where)
                return list(kinds)
            case _:
                raise NotSeparable(f"{where} works across the examples of the batch")

    def _check_rows(
        self, dim: int, micro: tuple[int, ...], whole: tuple[int, ...], where: Where
    ) -> None:
        """Raise NotSeparable unless only `dim` is larger in `whole`, by the factor `count`."""
        if (*micro[:dim], self.count * micro[dim], *micro[dim + 1 :]) != whole:
            raise NotSeparable(
                f"{where} has a result of shape {micro} for a microbatch and of shape {whole} for"
                " the batch: the dims that grow with the batch don't have a fixed number of rows"
                " per example"
            )

    def _created(
        self, eqn: JaxprEqn, whole: JaxprEqn, kind: BatchScaling, where: Where
    ) -> BatchScaling:
        """Return the scaling of a result of operands without examples: rows if its shape grows."""
        shape, full = aval_of(eqn.outvars[0]).shape, aval_of(whole.outvars[0]).shape
        grown = [dim for dim, (a, b) in enumerate(zip(shape, full, strict=True)) if a != b]
        if not grown:
            return kind
        uniform = eqn.primitive in (broadcast_in_dim_p, tile_p) or (
            eqn.primitive is iota_p and eqn.params["dimension"] not in grown
        )
        if len(grown) > 1 or not uniform:
            raise NotSeparable(f"{where} {why_whole(eqn)}")
        self._check_rows(grown[0], shape, full, where)
        if eqn.primitive is tile_p:
            self.copies[eqn.outvars[0]] = eqn.params["reps"][grown[0]]
        return replace(kind, form="rows", dim=grown[0])

    def chunks(self, eqns: Iterable[JaxprEqn], batch: Sequence[Var]) -> int:
        """Return the number of runs of neighbouring examples in the batch of the smaller trace.

        Examples that `eqns` combine are in one run. If a row of some value holds a pair of
        neighbouring examples, there are half as many runs as examples.

        Args:
            eqns: equations of the smaller trace.
            batch: its inputs whose first dim is the batch.
        """
        sizes = [aval_of(var).shape[0] for var in batch]
        for var in (var for eqn in eqns for var in eqn.outvars):
            kind = self.kinds[var]
            if isinstance(kind, BatchScaling) and kind.form == "rows":
                sizes.append(self.copies.get(var) or aval_of(var).shape[kind.dim])
        return gcd(*sizes)


def power_of_constant(small: Any, large: Any, count: int) -> int | OneOf["none"] | None:
    """Return the power of `count` that is the ratio of two constants.

    Args:
        small: the constant for the smaller batch.
        large: the constant for the larger batch.
        count: ratio of the batch sizes.

    Returns:
        0, 1 or -1; None for zeros, which fit any power; "none" if no power fits.
    """
    a, b = _numbers(small), _numbers(large)
    if not a.any() and not b.any():
        return None
    for power in (0, 1, -1):
        if _close(a * float(count) ** power, b):
            return power
    return "none"


def _numbers(value: Any) -> np.ndarray:
    """Return a constant as an array of float64 or complex128; random keys as their data."""
    array = constant(value)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    return np.allclose(a, b, rtol=1e-6, atol=0, equal_nan=True)


def _shown(value: Any) -> str:
    return str(value) if not np.ndim(value) else f"an array of shape {np.shape(value)}"


def _adds_alike(eqn: JaxprEqn, operands: Sequence[BatchScaling]) -> bool:
    """Return whether all summands of an equation have the same power."""
    powers = {operands[k].power for k in data_operands(eqn)} if adds(eqn) else set()
    return len(powers - {None}) <= 1


def _is_costly(eqn: JaxprEqn) -> bool:
    """Return whether an equation takes too long to compute a second time for a statistic."""
    record = record_of(eqn)
    return record.is_contraction or record.runs_body


def _costly(jaxpr: Jaxpr) -> set[Var]:
    """Return the values that cost more than an elementwise pass over the batch."""
    numbered = list(enumerate(jaxpr.eqns))
    costly = [unit for unit in units(numbered) if any(_is_costly(eqn) for _, eqn in unit.eqns)]
    return dependents(numbered, [var for unit in costly for var in unit.makes])


def _inside_of_loops(eqns: Sequence[JaxprEqn]) -> set[Var]:
    """Return the values that exist only inside a loop or branch."""
    inside: set[Var] = set()
    depth = 0
    for eqn in eqns:
        depth -= eqn.primitive is control_flow.end_p
        if depth > (eqn.primitive in control_flow.LEAVING):
            inside.update(eqn.outvars)
        depth += eqn.primitive in control_flow.OPENING
    return inside
