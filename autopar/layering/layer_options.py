"""Options that say which layer each equation of a function belongs to."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Primitive, Var

from autopar.checks import FLAG, NONE, check, integer, items, one_of, real, satisfying
from autopar.ir.control_flow import repeats
from autopar.ir.flatten import flatten
from autopar.ir.graph import source_line, variables
from autopar.layering.layer_clustering import (
    NoLayersError,
    after_heavy,
    cluster_layers,
    received_bytes,
)
from autopar.layering.scan_layers import Iterations, uncut_loops
from autopar.primitives import is_product, kernel_of

boundary_p = Primitive("pipeline_boundary")
boundary_p.multiple_results = True
boundary_p.def_impl(lambda: [])
boundary_p.def_abstract_eval(lambda: [])


class LayerError(ValueError):
    """A function can't be divided into layers as the option says."""


def mark_pipeline_boundary() -> None:
    """End a layer and start the next one.

    For functions under `manual_layer_construction` or a `ManualLayerOption`.
    """
    boundary_p.bind()


@dataclass(frozen=True, slots=True)
class ManualLayerOption:
    """Layers that end where the loss function calls `mark_pipeline_boundary`.

    Attributes:
        remat_layer: whether the backward pass recomputes each layer. With "auto", PipeshardParallel
            takes what it predicts to be faster.
    """

    remat_layer: bool | Literal["auto"] = False

    def __post_init__(self) -> None:
        check(self, LayerError, remat_layer=FLAG | one_of("auto"))

    def assign(self, jaxpr: Jaxpr) -> list[int]:
        """Return the layer of each equation."""
        layers = []
        layer = 0
        for eqn in jaxpr.eqns:
            layers.append(layer)
            layer += eqn.primitive is boundary_p
        return layers


@dataclass(frozen=True, slots=True)
class AutoLayerOption:
    """Layers of similar work with as little data between them as possible (Alpa, OSDI'22, eq. 6).

    Attributes:
        layer_num: the number of layers. If it is larger than the number of matrix products and
            convolutions, some layers have none.
        remat_layer: whether the backward pass recomputes each layer. With "auto", PipeshardParallel
            takes what it predicts to be faster.
        eps: the work of a layer is at most 1 + eps times the average. By default 0.6, or the
            smallest number that leaves layers if work is too uneven for it.
        cost_criteria: the measure of work: "flops", or the "count" of matrix products and
            convolutions.
    """

    layer_num: int
    remat_layer: bool | Literal["auto"] = False
    eps: float | None = None
    cost_criteria: Literal["flops", "count"] = "flops"

    def __post_init__(self) -> None:
        check(
            self,
            LayerError,
            layer_num=integer(),
            remat_layer=FLAG | one_of("auto"),
            eps=NONE | real(),
            cost_criteria=one_of("flops", "count"),
        )

    def assign(self, iterations: Iterations) -> list[int]:
        """Return the layer of each equation, and of each iteration of a scan over layers.

        Raises:
            NoLayersError: There are too few heavy equations, or their work is too uneven.
        """
        jaxpr = iterations.jaxpr
        debug_info = jaxpr.debug_info.with_unknown_names()
        flops = np.array(iterations.spread([flops_of(eqn, debug_info) for eqn in jaxpr.eqns]))
        work = flops if self.cost_criteria == "flops" else (flops > 0).astype(float)
        values = iterations.values()
        received = received_bytes(iterations.total, values)
        light = after_heavy(flops > 0, values)
        numbers = np.repeat(np.arange(len(jaxpr.eqns)), iterations.counts)
        try:
            stops = cluster_layers(
                work,
                received,
                self.layer_num,
                self.eps,
                light=light,
                line_of=lambda position: source_line(jaxpr.eqns[numbers[position]]),
            )
        except NoLayersError as error:
            raise NoLayersError(f"{error}{uncut_loops(jaxpr, iterations.scans)}") from None
        return np.searchsorted(stops, np.arange(iterations.total), side="right").tolist()


@dataclass(frozen=True, slots=True)
class FollowLayerOption:
    """Layers of a step without gradients that follow the layers of its parameters.

    An equation belongs to the last layer of the parameters that it depends on.

    Attributes:
        inputs: the layer of each array among the arguments; None for arrays without one, which the
            first layer that needs them reads.
        num_layers: the number of layers; some may be empty.
        remat_layer: always False, because there is no backward pass.
    """

    inputs: tuple[int | None, ...]
    num_layers: int
    remat_layer: Literal[False] = False

    def __post_init__(self) -> None:
        layers = items(integer(0) | NONE, "a sequence of layers, or None, for each input")
        check(
            self,
            LayerError,
            inputs=layers,
            num_layers=integer(),
            remat_layer=satisfying("False", lambda value: value is False),
        )

    @property
    def layer_of_input(self) -> dict[int, int]:
        """The layer of each input that has one."""
        return {i: layer for i, layer in enumerate(self.inputs) if layer is not None}

    def assign(self, jaxpr: Jaxpr) -> list[int]:
        """Return the layer of each equation.

        Raises:
            LayerError: The step has another number of inputs.
        """
        if len(jaxpr.invars) != len(self.inputs):
            raise LayerError(
                f"{len(self.inputs)} layers of inputs for a step with {len(jaxpr.invars)} of them;"
                " one each"
            )
        layer_of_var = {
            var: layer
            for var, layer in zip(jaxpr.invars, self.inputs, strict=True)
            if layer is not None
        }
        layers: list[int | None] = []
        for eqn in jaxpr.eqns:
            operands = variables(eqn.invars)
            operand_layers = [layer_of_var[var] for var in operands if var in layer_of_var]
            layers.append(max(operand_layers, default=None))
            if operand_layers:
                layer_of_var.update(dict.fromkeys(eqn.outvars, max(operand_layers)))
        # Equations that depend on no parameter run in the first layer that uses their results.
        first_use: dict[Var, int] = {}
        for k, eqn in reversed(list(enumerate(jaxpr.eqns))):
            layer = layers[k]
            if layer is None:
                uses = (first_use[var] for var in eqn.outvars if var in first_use)
                layer = min(uses, default=0)
                layers[k] = layer
            for atom in eqn.invars:
                if isinstance(atom, Var):
                    first_use[atom] = min(layer, first_use.get(atom, layer))
        return [layer or 0 for layer in layers]


LayerOption = AutoLayerOption | ManualLayerOption | FollowLayerOption


def flops_of(eqn: JaxprEqn, debug_info: Any) -> float:
    """Return the FLOP of all matrix products and convolutions in an equation and its calls."""
    invars = list(dict.fromkeys(variables(eqn.invars)))
    flat = flatten(Jaxpr([], invars, eqn.outvars, [eqn], debug_info=debug_info))
    counted = zip(flat.eqns, repeats(flat.eqns), strict=True)
    return sum(times * kernel_of(inner).flops for inner, times in counted if is_product(inner))
