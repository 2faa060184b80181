"""Values that a loop only adds up, such as the gradients of weights that each iteration reads.

XLA:GPU moves an all_reduce of such a value behind the loop, so its seconds count once.
"""

from collections.abc import Mapping, Sequence

from jax.extend.core import JaxprEqn, Var
from jax.extend.core.primitives import add_jaxvals_p, add_p, reduce_sum_p

from autopar.ir import control_flow
from autopar.ir.graph import Atom, aval_of, variables
from autopar.primitives import record_of


def summed_iterations(eqns: Sequence[JaxprEqn], outputs: Sequence[Atom]) -> Mapping[Atom, float]:
    """Return over how many iterations each value is only added up, if over any.

    XLA moves an all_reduce of such a value behind the loop (`WhileLoopAllReduceCodeMotion`), where
    it runs once for all these iterations. A reduce_scatter runs in each iteration.

    Args:
        eqns: the equations of a flat jaxpr (`autopar.ir.control_flow`).
        outputs: its outputs.

    Returns:
        For each value that loops only add up, the product of their lengths.
    """
    if not any(eqn.primitive is control_flow.loop_p for eqn in eqns):
        return {}
    readers: dict[Atom, list[int]] = {}
    lengths: dict[Var, int] = {}
    carries: set[Atom] = set()
    for number, eqn in enumerate(eqns):
        for atom in set(variables(eqn.invars)):
            readers.setdefault(atom, []).append(number)
        if eqn.primitive is control_flow.loop_p:
            lengths[control_flow.token_of(eqn)] = eqn.params["length"] or 1
        if eqn.primitive is control_flow.loop_carry_p:
            carries.update(eqn.outvars)
    found: dict[Atom, float] = {}

    def iterations_by(reader: int, atom: Atom) -> float:
        """Return over how many iterations a value is only added up, as far as one reader goes."""
        eqn = eqns[reader]
        if _is_move(eqn):
            return min(found.get(result, 1.0) for result in eqn.outvars)
        if eqn.primitive not in (add_p, add_jaxvals_p):
            return 1.0
        carry = next((other for other in eqn.invars if other is not atom), atom)
        last = readers.get(eqn.outvars[0], [])
        if (
            not isinstance(carry, Var)
            or carry not in carries
            or len(last) != 1
            or readers[carry] != [reader, *last]
        ):
            return 1.0
        final = eqns[last[0]]
        if final.primitive is not control_flow.loop_result_p:
            return 1.0
        return lengths[control_flow.token_of(final)] * found.get(final.outvars[0], 1.0)

    for eqn in reversed(eqns):
        for var in eqn.outvars:
            times = [iterations_by(reader, var) for reader in readers.get(var, ())]
            if times and min(times) > 1 and var not in outputs:
                found[var] = min(times)
    return found


def _is_move(eqn: JaxprEqn) -> bool:
    """Return whether an equation does no arithmetic; a sum over dims of size 1 does none."""
    if eqn.primitive is reduce_sum_p:
        return all(aval_of(eqn.invars[0]).shape[axis] == 1 for axis in eqn.params["axes"])
    return record_of(eqn).movement is not None
