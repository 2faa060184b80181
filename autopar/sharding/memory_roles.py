"""Memory roles of the values of a step: parameters, gradients, activations, ..."""

from collections.abc import Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from autopar.ir.graph import variables
from autopar.ir.step_graph import StepGraph
from autopar.microbatch.gradients import accumulate_p
from autopar.sharding.dataflow import InputRole
from simulator.hlo.provenance import pass_of
from simulator.live_ranges import Pass, role_of_value
from simulator.memory import Role

MEMORY_ROLES: Mapping[str, Role] = {
    "parameter": "parameters",
    "state": "optimizer",
    "batch": "inputs",
    "other": "inputs",
    "received": "activations",
}
"""The memory role of an input, by its role in a plan."""


class ValueRoles:
    """The memory roles of a step's values."""

    def __init__(self, step: StepGraph, inputs: Sequence[InputRole]) -> None:
        jaxpr = step.jaxpr
        self._inputs: dict[Var, Role] = {
            var: MEMORY_ROLES[role] for var, role in zip(jaxpr.invars, inputs, strict=True)
        }
        # The point after the last equation, where results are live, belongs to the update.
        self._passes: list[Pass] = [*map(_pass_of, jaxpr.eqns), "other"]
        self._makers = {var: number for number, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
        self._outputs = set(variables(jaxpr.outvars))

    def of(self, var: Var, last: int) -> Role:
        """Return the role of a value that is last read at point `last`."""
        if var in self._inputs:
            return self._inputs[var]
        writer = self._passes[self._makers.get(var, -1)]
        role = role_of_value((writer,), (self._passes[last],))
        return "outputs" if role == "temporaries" and var in self._outputs else role


def _pass_of(eqn: JaxprEqn) -> Pass:
    return "other" if eqn.primitive is accumulate_p else pass_of(str(eqn.source_info.name_stack))
