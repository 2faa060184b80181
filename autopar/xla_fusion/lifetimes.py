"""Lifetimes of a step's values: which are written to device memory, which stay in registers of a fusion, and for how long the former live.

A model of what XLA:GPU does, checked against its buffer assignment by `experiments.validation.fidelity`. Left out: the padding of
half-precision products to multiples of eight, workspaces of cuBLAS (4 MB), and what other shardings make XLA compute twice.
"""

from collections import Counter
from collections.abc import Mapping

from jax.extend.core import JaxprEqn, Var
from jax.extend.core.primitives import (
    add_jaxvals_p,
    add_p,
    conv_general_dilated_p,
    scatter_add_p,
    select_and_scatter_add_p,
    transpose_p,
)

from autopar.ir import control_flow
from autopar.ir.graph import aval_of
from autopar.ir.memo import memoized_on_step
from autopar.ir.step_graph import StepGraph
from autopar.primitives import record_of

ADDITIONS = frozenset({add_p, add_jaxvals_p})


@memoized_on_step
def stored_values(step: StepGraph) -> frozenset[Var]:
    """The values that are written to memory: inputs, outputs, what the tasks of a stage hand on to one another, and what a kernel other
    than a fusion writes or reads."""
    eqns, outputs = step.jaxpr.eqns, {atom for atom in step.jaxpr.outvars if isinstance(atom, Var)}
    outputs.update(step.cross_task_values)
    readers = Counter(atom for eqn in eqns for atom in _operands(eqn))
    makers = {var: eqn for eqn in eqns for var in eqn.outvars}
    stored, in_place = {*step.jaxpr.invars, *step.jaxpr.constvars, *outputs}, set()
    for eqn in reversed(eqns):
        record, operands = record_of(eqn), _operands(eqn)
        if eqn.primitive in control_flow.MARKERS:
            stored.update((*eqn.outvars, *operands))
        elif is_view(eqn):
            stored.update(operands if not stored.isdisjoint(eqn.outvars) else ())
        elif not record.is_recomputed:
            stored.update(var for var in eqn.outvars if readers[var] > 1)
        elif eqn.primitive in ADDITIONS and (
            scattered := {a for a in operands if _is_sum(makers.get(a), readers)}
        ):
            stored.update(eqn.outvars)
            in_place.update(scattered)
        elif not record.is_inlined:
            stored.update(eqn.outvars)
            if record.fusion not in ("input", "reduction"):
                stored.update(operands)
    return frozenset(stored - (in_place - outputs))


def is_view(eqn: JaxprEqn) -> bool:
    """Whether the result of `eqn` is its first operand in memory, seen otherwise: a product reads a matrix either way."""
    return record_of(eqn).is_view or (
        eqn.primitive is transpose_p and aval_of(eqn.outvars[0]).ndim == 2
    )


def is_relaid(eqn: JaxprEqn, operand: int) -> bool:
    """Whether an equation reads its operand in a layout of its own: a convolution's kernel, all but pointwise ones."""
    if eqn.primitive is not conv_general_dilated_p or operand != 1:
        return False
    window = [
        aval_of(eqn.invars[1]).shape[dim] for dim in eqn.params["dimension_numbers"].rhs_spec[2:]
    ]
    return any(
        size > 1 for size in (*window, *eqn.params["window_strides"], *eqn.params["lhs_dilation"])
    )


@memoized_on_step
def lifetimes(step: StepGraph) -> Mapping[Var, tuple[int, int]]:
    """The first and the last moment (number of an equation) at which each stored value that is no view must be in memory.

    A value that is not stored is computed again by every fusion that reads it, so what it is computed from lives until the
    last of those: what a backward pass derives from an activation keeps the activation, however early it was derived. What a
    loop reads or collects lives through all of it.
    Inputs and outputs live until the moment after the last equation. What a stage of a pipeline receives comes when it is read first.
    That, and what its tasks hand on, stays until the program that reads it is done: the backward pass, at the end of the body.
    """
    eqns = step.jaxpr.eqns
    stored, end, loops = stored_values(step), len(eqns), control_flow.spans(eqns)
    outputs = {atom for atom in step.jaxpr.outvars if isinstance(atom, Var)}
    apart = outputs.union(step.cross_task_values)  # stored in a place of their own
    first: dict[Var, int] = dict.fromkeys((*step.jaxpr.invars, *step.jaxpr.constvars), 0)
    received = {step.jaxpr.invars[i] for i in step.received_inputs}
    last: dict[Var, int] = dict.fromkeys(first.keys() - received, end)
    last.update(dict.fromkeys(outputs, end))
    views: set[Var] = set()
    for number, eqn in reversed(list(enumerate(eqns))):
        made, read = number, number
        if eqn.primitive is control_flow.loop_stack_p:
            made = loops[control_flow.token_of(eqn)][0]
        elif eqn.primitive in control_flow.ENTERING:
            read = loops[control_flow.token_of(eqn)][1]
        first.update(dict.fromkeys(eqn.outvars, made))
        last.update((atom, max(read, last.get(atom, 0))) for atom in _operands(eqn))
        first.update((atom, number) for atom in _operands(eqn) if atom in received)
        if is_view(eqn):
            through = [
                (a, var)
                for a, var in zip(eqn.invars, eqn.outvars, strict=False)
                if var not in apart
            ]
            views.update(var for _, var in through)
        else:
            through = [
                (atom, var) for atom in eqn.invars for var in eqn.outvars if var not in stored
            ]
        for atom, var in through:
            if isinstance(atom, Var):
                last[atom] = max(last[atom], last.get(var, 0))
    for eqn in eqns:
        if (
            eqn.primitive is select_and_scatter_add_p
        ):  # onto zeros that are made together with what was pooled
            pooled = eqn.invars[1]
            first[eqn.outvars[0]] = first[pooled] if isinstance(pooled, Var) else 0
    if step.microbatching and step.cross_task_values:
        done = max((number for number, _ in step.microbatching.body), default=0)
        through = (
            var for var in (*step.cross_task_values, *received) if first.get(var, done) < done
        )
        last.update((var, max(done, last.get(var, 0))) for var in through)
    return {var: (first[var], last.get(var, first[var])) for var in stored - views}


@memoized_on_step
def readings(step: StepGraph) -> Mapping[Var, tuple[int, int]]:
    """The first and the last equation whose kernel reads each value from memory, itself or a view of it."""
    stored, found = stored_values(step), {}
    for number, eqn in reversed(list(enumerate(step.jaxpr.eqns))):
        known = [found[var] for var in eqn.outvars if var in found]
        first, last = number, number
        if known and (is_view(eqn) or stored.isdisjoint(eqn.outvars)):
            first, last = min(first for first, _ in known), max(last for _, last in known)
        for atom in _operands(eqn):
            before = found.get(atom, (first, last))
            found[atom] = min(first, before[0]), max(last, before[1])
    return found


def _is_sum(maker: JaxprEqn | None, readers: Counter[Var]) -> bool:
    """Whether this is a scatter that one equation reads: adding it to something scatters onto that, in place."""
    return maker is not None and maker.primitive is scatter_add_p and readers[maker.outvars[0]] == 1


def _operands(eqn: JaxprEqn) -> set[Var]:
    return {atom for atom in eqn.invars if isinstance(atom, Var)}
