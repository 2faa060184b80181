"""State that stays in host memory between the updates of a step (ZeRO-Offload, arXiv 2101.06840).

Only the update reads the state of an optimizer. In host memory it takes none of the device while
the forward and backward pass run. The step moves each array to the device right before the update
reads it, and its next value back right after it is computed. Both are equations like others, with
time and memory of their own. The numbers are the same; the device computes the update.
"""

from collections import Counter
from collections.abc import Collection

from jax.extend.core import Var

from autopar.ir import control_flow
from autopar.ir.array_sizes import value_bytes
from autopar.ir.graph import Atom, aval_of, is_backward, variables
from autopar.ir.host_memory import is_on_host, move_beside, on_host, to_device_p, to_host_p
from autopar.ir.keys import is_key
from autopar.ir.memo import memoized_on_step
from autopar.ir.rebuilding import Placed, rebuilt, retraced_alike
from autopar.ir.step_graph import StepGraph
from autopar.sharding.dataflow import analyze

_NEGLIGIBLE = 1e-3
"""Share of the bytes of all state below which an array stays on the device."""


class OffloadError(ValueError):
    """An input can't stay in host memory."""


@memoized_on_step
def offloadable(step: StepGraph) -> tuple[int, ...]:
    """Return the numbers of the inputs that may stay in host memory, the largest first.

    They are the state that only the update reads, without arrays that are small beside the rest.
    """
    found = [i for i in _states(step) if not is_key(aval_of(step.jaxpr.invars[i]).dtype)]
    sizes = {i: value_bytes(step.jaxpr.invars[i]) for i in found}
    least = _NEGLIGIBLE * sum(sizes.values())
    return tuple(sorted((i for i in found if sizes[i] >= least), key=lambda i: (-sizes[i], i)))


def _states(step: StepGraph) -> list[int]:
    """Return the inputs that an equation of the update reads and another one computes anew."""
    jaxpr, micro = step.jaxpr, step.microbatching
    early = {number for number, eqn in enumerate(jaxpr.eqns) if is_backward(eqn)}
    if micro is not None:
        early.update(number for number, _ in (*micro.body, *micro.marks))
    for start, end in control_flow.spans(jaxpr.eqns).values():
        early.update(range(start, end + 1))
    made: set[Atom] = {
        var for number, eqn in enumerate(jaxpr.eqns) if number not in early for var in eqn.outvars
    }
    blocked = {a for number in early for a in jaxpr.eqns[number].invars if isinstance(a, Var)}
    read = {a for eqn in jaxpr.eqns for a in eqn.invars if isinstance(a, Var)}
    outputs = Counter(variables(jaxpr.outvars))
    blocked.update(var for var, times in outputs.items() if times > 1)
    blocked.update(outputs.keys() & set(jaxpr.invars))
    read -= blocked
    made -= blocked
    roles = analyze(step).roles
    return [
        i
        for o, i in step.carried.items()
        if roles[i] == "state" and jaxpr.invars[i] in read and jaxpr.outvars[o] in made
    ]


def offload(step: StepGraph, inputs: Collection[int]) -> StepGraph:
    """Return the step with inputs, and their next values, in host memory.

    Args:
        step: the step.
        inputs: the numbers of the inputs.

    Raises:
        OffloadError: One of them is not `offloadable`.
    """
    if not inputs:
        return step
    if unknown := set(inputs).difference(offloadable(step)):
        raise OffloadError(
            f"inputs {sorted(unknown)} of {step.name} can't stay in host memory: that takes state"
            " that only the update reads"
        )
    jaxpr = step.jaxpr
    invars, outvars = list(jaxpr.invars), list(jaxpr.outvars)
    fetched: dict[Var, Var] = {}
    stored: dict[Var, Var] = {}
    for o, i in step.carried.items():
        if i in inputs:
            var, result = jaxpr.invars[i], jaxpr.outvars[o]
            assert isinstance(result, Var)
            invars[i], fetched[var] = Var(on_host(aval_of(var))), Var(var.aval)
            outvars[o] = stored[result] = Var(on_host(aval_of(result)))
    sources = {jaxpr.invars[i]: invars[i] for i in inputs}
    eqns: list[Placed] = []
    for number, eqn in enumerate(jaxpr.eqns):
        for var in dict.fromkeys(a for a in eqn.invars if isinstance(a, Var) and a in sources):
            move = move_beside(eqn, to_device_p, sources.pop(var), fetched[var])
            eqns.append(Placed(number, move))
        read: list[Atom] = [
            fetched.get(atom, atom) if isinstance(atom, Var) else atom for atom in eqn.invars
        ]
        eqns.append(Placed(number, eqn.replace(invars=read), number))
        for var in eqn.outvars:
            if var in stored:
                eqns.append(Placed(number, move_beside(eqn, to_host_p, var, stored[var])))
    rewritten = rebuilt(step, eqns, outvars, invars)
    return retraced_alike(rewritten, step, lambda parts: offload(parts, inputs))


def offloaded_inputs(step: StepGraph) -> tuple[int, ...]:
    """Return the numbers of the inputs that are in host memory."""
    return tuple(i for i, var in enumerate(step.jaxpr.invars) if is_on_host(var))
