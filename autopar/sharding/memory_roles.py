"""What a planned step holds when it holds most, by what it is for: as `simulator.hlo.liveness` says it of compiled programs."""

from collections.abc import Collection, Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from autopar.microbatch.gradients import accumulate_p
from autopar.sharding.memory_constraint import Lifetime, Memory
from simulator.hlo.provenance import Pass, pass_of
from simulator.memory import Role, sum_roles

MEMORY_ROLES: Mapping[str, Role] = {
    "parameter": "parameters",
    "state": "optimizer",
    "batch": "inputs",
    "other": "inputs",
    "received": "activations",
}
"""What memory an input takes, by its role in a plan."""


def roles_at_peak(
    memory: Memory,
    choice: Sequence[int],
    moments: Sequence[int] = (),
    without: Collection[Var] = (),
) -> dict[Role, float]:
    """Bytes on one device under a choice, at the moment when they are most; copies that collectives make are for communication.

    Args:
        moments: those to look at; by default all.
        without: values that are not to be counted.
    """
    copies = memory.copy_bytes(choice)
    alive = memory.value_bytes(choice, without) + copies
    moment = max(moments or range(len(alive)), key=lambda moment: alive[moment])
    held: dict[Role, float] = {"communication": float(copies[moment])}
    roles = _Roles(memory)
    for life in memory.lifetimes:
        if life.start <= moment <= life.end and life.var not in without:
            held = sum_roles(held, {roles.of(life): float(life.sizes[choice[life.decision]])})
    return {role: size for role, size in held.items() if size}


class _Roles:
    def __init__(self, memory: Memory) -> None:
        jaxpr = memory.step.jaxpr
        inputs = zip(jaxpr.invars, memory.decisions.roles, strict=True)
        self._inputs: dict[Var, Role] = {var: MEMORY_ROLES[role] for var, role in inputs}
        self._passes: list[Pass] = [
            *map(_pass_of, jaxpr.eqns),
            "other",
        ]  # the last is when the results are there
        self._makers = {var: number for number, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
        self._outputs = {atom for atom in jaxpr.outvars if isinstance(atom, Var)}

    def of(self, life: Lifetime) -> Role:
        if life.var is None:
            assert life.role is not None
            return life.role
        if life.var in self._inputs:
            return self._inputs[life.var]
        maker, reader = self._passes[self._makers.get(life.var, -1)], self._passes[life.end]
        if maker == "backward" and reader == "other":
            return "gradients"
        if maker == "forward" and reader == "backward":
            return "activations"
        return "outputs" if life.var in self._outputs else "temporaries"


def _pass_of(eqn: JaxprEqn) -> Pass:
    return "other" if eqn.primitive is accumulate_p else pass_of(str(eqn.source_info.name_stack))
