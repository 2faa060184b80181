"""Liveness: which values of a step are written to device memory, and from when to when they live.

A value that is not written stays in the registers of a fusion. The model describes
XLA:GPU; `experiments.validation.fidelity` compares it with XLA's buffer assignment. It leaves out
values that XLA computes twice because of shardings.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Set

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var
from jax.extend.core.primitives import scatter_add_p, select_and_scatter_add_p

from autopar.ir import control_flow
from autopar.ir.graph import Atom, aval_of, variables
from autopar.ir.host_memory import to_device_p, to_host_p
from autopar.ir.memo import memoized_on_step
from autopar.ir.step_graph import StepGraph
from autopar.primitives import record_of
from autopar.xla_fusion.epilogues import epilogues
from autopar.xla_fusion.views import is_view


@memoized_on_step
def stored_values(step: StepGraph) -> frozenset[Var]:
    """Return the values that are written to device memory.

    These are inputs, outputs, values that cross tasks of a stage, the operands and results of
    kernels that are no fusions, and costly values that more than one kernel reads.
    """
    eqns, outputs = step.jaxpr.eqns, set(variables(step.jaxpr.outvars))
    outputs.update(step.cross_task_values)
    inputs = set(step.jaxpr.invars)
    readers = Counter(atom for eqn in eqns for atom in set(variables(eqn.invars)))
    makers = {var: eqn for eqn in eqns for var in eqn.outvars}
    stored, in_place = {*step.jaxpr.invars, *step.jaxpr.constvars, *outputs}, set()
    kernels: dict[Var, set[int]] = defaultdict(set)  # those that read or compute each value
    for number, eqn in reversed(list(enumerate(eqns))):
        record, operands = record_of(eqn), variables(eqn.invars)
        if eqn.primitive in control_flow.MARKERS or _is_offload(eqn, inputs, outputs):
            stored.update((*eqn.outvars, *operands))
        elif is_view(eqn):
            stored.update(operands if not stored.isdisjoint(eqn.outvars) else ())
        elif not record.is_recomputed:
            stored.update(var for var in eqn.outvars if len(kernels[var]) > 1)
        elif record_of(eqn).is_addition and (
            scattered := {a for a in operands if _is_sum(makers.get(a), readers)}
        ):
            stored.update(eqn.outvars)
            in_place.update(scattered)
        elif not record.is_inlined:
            stored.update(eqn.outvars)
            if record.fusion not in ("input", "reduction"):
                stored.update(operands)
        inside = {number}
        if is_view(eqn) or (record.is_inlined and stored.isdisjoint(eqn.outvars)):
            inside = set[int]().union(*(kernels[var] for var in eqn.outvars))
        for var in operands:
            kernels[var] |= inside
    return frozenset(stored - (in_place - outputs))


@memoized_on_step
def lifetimes(
    step: StepGraph, exponentials: frozenset[Var] = frozenset()
) -> Mapping[Var, tuple[int, int]]:
    """Return the first and last program point at which each stored value is live.

    A program point is the number of an equation. Views have no lifetime of their own. A value that
    is not stored is computed again by every fusion that reads it, so its sources live until the
    last of these fusions: an activation lives as long as anything that the backward pass derives
    from it. The epilogue of a product has the memory of its result. Values that a loop reads or
    collects live through the whole loop. Inputs and outputs live until the point after the last
    equation.

    Values that a stage of a pipeline receives are live from their first reader on. They, and values
    that cross its tasks, live until the program of the last task that reads them ends.

    Args:
        step: the step.
        exponentials: see `autopar.xla_fusion.Traffic`; stored, too.
    """
    eqns = step.jaxpr.eqns
    stored, end, loops = stored_values(step) | exponentials, len(eqns), control_flow.spans(eqns)
    outputs = set(variables(step.jaxpr.outvars))
    own_memory = outputs.union(step.cross_task_values)
    first: dict[Var, int] = dict.fromkeys((*step.jaxpr.invars, *step.jaxpr.constvars), 0)
    received = {step.jaxpr.invars[i] for i in step.received_inputs}
    last: dict[Var, int] = dict.fromkeys(first.keys() - received, end)
    last.update(dict.fromkeys(outputs, end))
    views: set[Var] = set()
    added_to = {number: eqns[product].outvars[0] for number, product in epilogues(step).items()}
    for number, eqn in reversed(list(enumerate(eqns))):
        made, read = number, number
        if eqn.primitive is control_flow.loop_stack_p:
            made = loops[control_flow.token_of(eqn)][0]
        elif eqn.primitive in control_flow.ENTERING:
            read = loops[control_flow.token_of(eqn)][1]
        first.update(dict.fromkeys(eqn.outvars, made))
        last.update((atom, max(read, last.get(atom, 0))) for atom in variables(eqn.invars))
        first.update((atom, number) for atom in variables(eqn.invars) if atom in received)
        product = added_to.get(number)
        if is_view(eqn) or product is not None:
            pairs = zip(eqn.invars, eqn.outvars, strict=False)
            if product is not None:  # it adds to the result in place
                pairs = [(product, eqn.outvars[0])]
            through = [(a, var) for a, var in pairs if var not in own_memory]
            views.update(var for _, var in through)
        else:
            through = [
                (atom, var) for atom in eqn.invars for var in eqn.outvars if var not in stored
            ]
        for atom, var in through:
            if isinstance(atom, Var):
                last[atom] = max(last.get(atom, 0), last.get(var, 0))
    for result, (made, _) in pooling_zeros(step).items():
        first[result] = made
    if step.cross_task_values:
        for var in last.keys() & {*step.cross_task_values, *received}:
            ends = step.task_ends[bisect_left(step.task_ends, last[var]) :]
            last[var] = ends[0] if ends else last[var]
    return {var: (first[var], last.get(var, first[var])) for var in stored - views}


@memoized_on_step
def pooling_zeros(step: StepGraph) -> Mapping[Var, tuple[int, int]]:
    """Return where XLA first and last reads the zeros onto which a gradient of pooling is added.

    They are those that rectified the pooled operand, or another array of its shape, so that they
    are made with the first of these.
    """
    spans: dict[Var, tuple[int, int]] = {}
    for number, eqn in enumerate(step.jaxpr.eqns):
        if eqn.primitive is select_and_scatter_add_p:
            result = eqn.outvars[0]
            of_shape = [
                reader
                for reader, other in enumerate(step.jaxpr.eqns)
                if any(_is_zero(atom) for atom in other.invars)
                and any(aval_of(out).shape == aval_of(result).shape for out in other.outvars)
            ]
            spans[result] = min((*of_shape, number)), max((*of_shape, number))
    return spans


@memoized_on_step
def readings(step: StepGraph) -> Mapping[Var, tuple[int, int]]:
    """Return the first and last equation whose kernel reads each value, or a view of it."""
    stored = stored_values(step)
    spans: dict[Var, tuple[int, int]] = {}
    for number, eqn in reversed(list(enumerate(step.jaxpr.eqns))):
        of_results = [spans[var] for var in eqn.outvars if var in spans]
        first, last = number, number
        if of_results and (is_view(eqn) or stored.isdisjoint(eqn.outvars)):
            first = min(first for first, _ in of_results)
            last = max(last for _, last in of_results)
        for atom in variables(eqn.invars):
            span = spans.get(atom, (first, last))
            spans[atom] = min(first, span[0]), max(last, span[1])
    return spans


def _is_offload(eqn: JaxprEqn, inputs: Set[Var], outputs: Set[Var]) -> bool:
    """Return whether an equation moves a forward value to host memory or back.

    State that is in host memory between steps is moved array by array, in the kernels that update
    it.
    """
    if eqn.primitive not in (to_device_p, to_host_p):
        return False
    return inputs.isdisjoint(variables(eqn.invars)) and outputs.isdisjoint(eqn.outvars)


def _is_sum(maker: JaxprEqn | None, readers: Counter[Var]) -> bool:
    """Return whether `maker` is a scatter with one reader.

    If that adds the result to another value, XLA scatters onto the other value in place.
    """
    return maker is not None and maker.primitive is scatter_add_p and readers[maker.outvars[0]] == 1


def _is_zero(atom: Atom) -> bool:
    return isinstance(atom, Literal) and np.ndim(atom.val) == 0 and bool(atom.val == 0)
