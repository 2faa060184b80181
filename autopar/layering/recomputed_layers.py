"""A `jax.checkpoint` around several layers of a step that JAX has differentiated.

The backward pass then begins with the recomputation of all of them, behind one
`optimization_barrier`. A pipeline would run it in one stage. Each layer is recomputed in its own
stage instead, from the values that the forward pass has sent there.
"""

from collections.abc import Mapping, Sequence

from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from autopar.ir.equation_groups import Unit, units
from autopar.ir.graph import Atom, is_outer_backward, renamed, scopes, variables
from autopar.layering.equal_values import EqualValues
from autopar.layering.layer_scopes import in_layer


def recompute_in_layers(
    jaxpr: Jaxpr, layer_of: Mapping[Var, int], last_reader: Mapping[Var, int]
) -> Jaxpr:
    """Return a flat step whose backward pass recomputes each layer from the forward pass.

    Steps are returned as they are if each `jax.checkpoint` is in one layer, or if a layer would
    need a recomputed value of an earlier one that is not known to equal one of the forward pass,
    such as that of a loop.

    Args:
        jaxpr: the step.
        layer_of: the layers of the values that the forward pass computes.
        last_reader: the last layer of the forward pass that reads each value, or computes it.
    """
    groups = units(enumerate(jaxpr.eqns))
    if not any(begins_recomputation(unit.eqns[0][1]) for unit in groups):
        return jaxpr
    values = EqualValues()
    for unit in groups:
        if len(unit.eqns) == 1:
            values.add(unit.eqns[0][1])
    layers: dict[Var, int] = {}
    checkpoint_of: dict[Var, int] = {}
    layers_of_checkpoint: dict[int, set[int]] = {}
    for unit in groups:
        if begins_recomputation(unit.eqns[0][1]):
            checkpoint_of.update(dict.fromkeys(unit.makes, unit.number))
        if not _is_recomputed(unit):
            continue
        firsts = variables(values.first(var) for var in unit.makes)
        equal = {layer_of[var] for var in firsts if var in layer_of}
        read = {
            layers.get(var, last_reader.get(first, 0))
            for var in unit.reads
            for first in variables([values.first(var)])
        }
        layer = max(equal or read, default=max(layer_of.values(), default=0))
        for var in unit.reads:
            if layers.get(var, layer) < layer and values.first(var) not in layer_of:
                return jaxpr
        layers.update(dict.fromkeys(unit.makes, layer))
        checkpoint = max((checkpoint_of.get(var, -1) for var in unit.reads), default=-1)
        checkpoint_of.update(dict.fromkeys(unit.makes, checkpoint))
        layers_of_checkpoint.setdefault(checkpoint, set()).add(layer)
    if all(len(own) == 1 for own in layers_of_checkpoint.values()):
        return jaxpr
    return jaxpr.replace(eqns=_Recomputation(groups, values, layers, last_reader).eqns)


def begins_recomputation(eqn: JaxprEqn) -> bool:
    """Return whether an equation begins the recomputation of a `jax.checkpoint`."""
    return eqn.primitive is lax.optimization_barrier_p and is_outer_backward(eqn)


def _is_recomputed(unit: Unit) -> bool:
    """Return whether the backward pass recomputes a unit of the forward pass."""
    eqn = unit.eqns[0][1]
    is_behind = is_outer_backward(eqn) and "rematted_computation" in scopes(eqn)
    return is_behind and not begins_recomputation(eqn)


class _Recomputation:
    """The equations of a step whose layers are recomputed each by itself.

    Attributes:
        eqns: the new equations.
    """

    def __init__(
        self,
        groups: Sequence[Unit],
        values: EqualValues,
        layers: Mapping[Var, int],
        last_reader: Mapping[Var, int],
    ) -> None:
        self.eqns: list[JaxprEqn] = []
        self._values = values
        self._layers = layers
        self._behind: dict[Var, Atom] = {}  # values behind a barrier, and before it
        self._barriers: dict[tuple[int, Atom], Var] = {}
        barrier: JaxprEqn | None = None
        for unit in groups:
            eqn = unit.eqns[0][1]
            if begins_recomputation(eqn):
                barrier = eqn
                invars = renamed(eqn.invars, self._behind)
                self._behind.update(zip(eqn.outvars, invars, strict=True))
            elif barrier is not None and unit.makes and unit.makes[0] in layers:
                self._recompute(unit, layers[unit.makes[0]], barrier)
            else:
                firsts = variables(values.first(var) for var in unit.reads)
                layer = min((last_reader[var] for var in firsts if var in last_reader), default=0)
                earlier = {
                    var: values.first(var) for var in unit.reads if layers.get(var, layer) < layer
                }
                names = self._behind | earlier
                self.eqns += [
                    own.replace(invars=renamed(own.invars, names)) for _, own in unit.eqns
                ]

    def _recompute(self, unit: Unit, layer: int, barrier: JaxprEqn) -> None:
        """Add a unit. It reads results of other layers as the forward pass computed them."""
        names: dict[Var, Atom] = {}
        for var in unit.reads:
            if var not in self._behind and self._layers.get(var, layer) == layer:
                continue
            source = self._behind[var] if var in self._behind else self._values.first(var)
            if isinstance(source, Var) and (layer, source) not in self._barriers:
                behind = Var(var.aval)
                own = barrier.replace(invars=[source], outvars=[behind])
                self.eqns.append(in_layer(own, layer))
                self._barriers[layer, source] = behind
            names[var] = self._barriers.get((layer, source), source)
        for _, eqn in unit.eqns:
            self.eqns.append(in_layer(eqn.replace(invars=renamed(eqn.invars, names)), layer))
