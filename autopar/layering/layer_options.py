"""Options that say which layer each equation of a function belongs to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Primitive, Var

from autopar.checks import FLAG, NONE, check, integer, items, one_of, real, satisfying
from autopar.ir.control_flow import repeats
from autopar.ir.flatten import flatten
from autopar.ir.graph import source_line, variables
from autopar.layering.layer_clustering import (
    MIN_HEAVY,
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
        remat_parts: the number of parts of all layers together that the backward pass recomputes
            one by one; each ends at the end of its layer at the latest. The more parts, the less
            memory one takes while it runs, and the more is kept between them. "auto" stands for the
            equal blocks that a model repeats, such as those of a transformer. By default each layer
            is one part, or "auto" if `remat_layer` is.
    """

    layer_num: int
    remat_layer: bool | Literal["auto"] = False
    eps: float | None = None
    cost_criteria: Literal["flops", "count"] = "flops"
    remat_parts: int | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        check(
            self,
            LayerError,
            layer_num=integer(),
            remat_layer=FLAG | one_of("auto"),
            eps=NONE | real(),
            cost_criteria=one_of("flops", "count"),
            remat_parts=NONE | integer() | one_of("auto"),
        )

    def assign(self, iterations: Iterations) -> list[int]:
        """Return the layer of each equation, and of each iteration of a scan over layers.

        Raises:
            NoLayersError: There are too few heavy equations, or their work is too uneven.
        """
        return self._assigned(iterations, self.layer_num, _flops(iterations))

    def assign_parts(self, iterations: Iterations, layers: Sequence[int]) -> list[int]:
        """Return the recomputed part of each equation and iteration; see `remat_parts`.

        Args:
            iterations: the equations and iterations.
            layers: the layer of each of them.

        Raises:
            NoLayersError: See `assign`.
        """
        flops = _flops(iterations)
        if self.remat_parts != "auto":
            try:
                parts = self._assigned(iterations, self.remat_parts or 1, flops)
            except NoLayersError as error:
                raise NoLayersError(f"remat_parts is {self.remat_parts}: {error}") from None
        else:
            blocks = equal_blocks(flops, 1 if iterations.scans else MIN_HEAVY)
            if not blocks.size:
                return list(layers)
            work = np.zeros_like(flops)
            work[blocks] = flops[blocks]
            parts = self._assigned(iterations, len(blocks), work)
            stop = blocks.max() + 1
            if flops[stop:].any():
                parts[stop:] = [len(blocks)] * (iterations.total - stop)
        both = list(zip(layers, parts, strict=True))
        numbers = {pair: number for number, pair in enumerate(dict.fromkeys(both))}
        return [numbers[pair] for pair in both]

    def _assigned(self, iterations: Iterations, layer_num: int, flops: np.ndarray) -> list[int]:
        """Return the layer of each equation and iteration, by the given FLOP of each."""
        jaxpr = iterations.jaxpr
        work = flops if self.cost_criteria == "flops" else (flops > 0).astype(float)
        values = iterations.values()
        received = received_bytes(iterations.total, values)
        light = after_heavy(flops > 0, values)
        numbers = np.repeat(np.arange(len(jaxpr.eqns)), iterations.counts)
        try:
            stops = cluster_layers(
                work,
                received,
                layer_num,
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


def _flops(iterations: Iterations) -> np.ndarray:
    """Return the FLOP of the matrix products and convolutions of each equation and iteration."""
    jaxpr = iterations.jaxpr
    debug_info = jaxpr.debug_info.with_unknown_names()
    return np.array(iterations.spread([flops_of(eqn, debug_info) for eqn in jaxpr.eqns]))


_EQUAL = 0.8
"""Least share of the heavy equations of equal blocks with one of the same FLOP a period later."""


def equal_blocks(flops: np.ndarray, shortest: int = MIN_HEAVY) -> np.ndarray:
    """Return the heavy equations of the equal blocks that a function repeats, such as transformers.

    Blocks are the periods of the FLOP of its heavy equations. Those before the first block and
    after the last one, such as embeddings, belong to none.

    Args:
        flops: the FLOP of each equation, [equations].
        shortest: the least number of heavy equations of a block.

    Returns:
        The numbers of the equations, [blocks, heavy equations of a block]; empty if none repeat.
    """
    heavy = np.flatnonzero(flops)
    for period in range(shortest, len(heavy) // 2 + 1):
        is_equal = flops[heavy[period:]] == flops[heavy[:-period]]
        if is_equal.mean() >= _EQUAL:
            first, last = np.flatnonzero(is_equal)[[0, -1]]
            heavy = heavy[first : last + period + 1]
            return heavy[: len(heavy) // period * period].reshape(-1, period)
    return np.zeros((0, shortest), int)


def flops_of(eqn: JaxprEqn, debug_info: Any) -> float:
    """Return the FLOP of all matrix products and convolutions in an equation and its calls."""
    invars = list(dict.fromkeys(variables(eqn.invars)))
    flat = flatten(Jaxpr([], invars, eqn.outvars, [eqn], debug_info=debug_info))
    counted = zip(flat.eqns, repeats(flat.eqns), strict=True)
    return sum(times * kernel_of(inner).flops for inner, times in counted if is_product(inner))
