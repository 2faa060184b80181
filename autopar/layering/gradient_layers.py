"""Layers of a step that takes its gradients with JAX's own functions.

`autopar.grad` divides a loss before JAX differentiates it. After `jax.grad` there is only the
traced step, forward and backward. Its forward pass is clustered as a loss is. An equation of the
backward pass belongs to the layer that reads the same forward values: the product that gives the
gradient of a weight reads the input of its layer, and the one that gives the gradient of that input
reads the weight. A pipeline moves an equation to a later stage of the backward pass if it reads
something that is computed there, so a layer that is wrong here costs time, but changes no number.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var

from autopar.ir.array_sizes import value_bytes
from autopar.ir.control_flow import OPENING, repeats, switch_p
from autopar.ir.equation_groups import Unit, units
from autopar.ir.graph import is_outer_backward, source_line
from autopar.layering.layer_clustering import (
    NoLayersError,
    after_heavy,
    cluster_layers,
    received_bytes,
)
from autopar.layering.layer_options import AutoLayerOption, LayerError
from autopar.layering.layer_scopes import in_layer, layer_of
from autopar.layering.recomputed_layers import recompute_in_layers
from autopar.layering.scan_layers import LAYERS_IN_LOOPS
from autopar.primitives import is_product, kernel_of


def gradient_layers(jaxpr: Jaxpr, option: AutoLayerOption) -> Jaxpr:
    """Return a flat jaxpr with a backward pass, divided into layers.

    Args:
        jaxpr: the traced step. Its forward pass is in layers already if scans have been cut
            (`autopar.layering.gradient_scans`).
        option: how to divide it.

    Raises:
        LayerError: The option asks the backward pass to recompute layers.
        NoLayersError: There are too few heavy equations, or their work is too uneven.
    """
    groups = units(enumerate(jaxpr.eqns))
    labels = {unit.number: layer_of(unit.eqns[0][1]) for unit in groups}
    layer_of_unit = {number: label[0] for number, label in labels.items() if label is not None}
    is_divided = bool(layer_of_unit)
    forward = [
        unit
        for unit in (groups if is_divided else forward_pass(groups))
        if not _has_outer_backward(unit) and (unit.number in layer_of_unit or not is_divided)
    ]
    if not forward and not any(map(_has_outer_backward, groups)):
        return jaxpr
    if option.remat_layer is True:
        raise LayerError(
            "remat_layer=True needs a loss that is differentiated with autopar.grad or"
            " autopar.value_and_grad: JAX has differentiated this step already; use one of them, or"
            " jax.checkpoint in the model"
        )
    if not is_divided:
        try:
            layers = _cluster(jaxpr, forward, option)
        except NoLayersError as error:
            raise NoLayersError(f"{error}{_reasons(groups, forward)}") from None
        layer_of_unit.update(zip((unit.number for unit in forward), layers, strict=True))
    last_reader = _last_readers(forward, (layer_of_unit[unit.number] for unit in forward))
    if not is_divided:
        layer_of_var = {var: layer_of_unit[unit.number] for unit in forward for var in unit.makes}
        recomputed = recompute_in_layers(jaxpr, layer_of_var, last_reader)
        if recomputed is not jaxpr:
            jaxpr = recomputed
            groups = units(enumerate(jaxpr.eqns))
            labels = {unit.number: layer_of(unit.eqns[0][1]) for unit in groups}
            layer_of_unit = {
                unit.number: layer_of_var[unit.makes[0]]
                for unit in groups
                if unit.makes and unit.makes[0] in layer_of_var
            }
            for unit in groups:
                if (label := labels[unit.number]) is not None:
                    last_reader.update(dict.fromkeys(unit.makes, label[0]))
    for unit in groups:
        if unit.number not in layer_of_unit and _has_outer_backward(unit):
            readers = (last_reader[var] for var in unit.reads if var in last_reader)
            if (layer := min(readers, default=None)) is not None:
                layer_of_unit[unit.number] = layer
    eqns: list[JaxprEqn] = []
    for unit in groups:
        is_labelled = labels[unit.number] is not None or unit.number not in layer_of_unit
        eqns += [
            eqn if is_labelled else in_layer(eqn, layer_of_unit[unit.number])
            for _, eqn in unit.eqns
        ]
    return jaxpr.replace(eqns=eqns)


def forward_pass(groups: Sequence[Unit], recomputed: Iterable[Var] = ()) -> list[Unit]:
    """Return the units that the backward pass depends on and that are no part of it.

    Args:
        groups: the units of a step.
        recomputed: values that the backward pass computes again instead of reading them.
    """
    needed = set(recomputed)
    forward: list[Unit] = []
    for unit in reversed(groups):
        if _has_outer_backward(unit):
            needed.update(unit.reads)
        elif not needed.isdisjoint(unit.makes):
            needed.update(unit.reads)
            forward.append(unit)
    return forward[::-1]


def _has_outer_backward(unit: Unit) -> bool:
    return any(is_outer_backward(eqn) for _, eqn in unit.eqns)


def _cluster(jaxpr: Jaxpr, forward: Sequence[Unit], option: AutoLayerOption) -> list[int]:
    """Return the layer of each unit of the forward pass."""
    times = repeats(jaxpr.eqns)
    flops = np.array([_flops(unit, times) for unit in forward])
    work = flops if option.cost_criteria == "flops" else (flops > 0).astype(float)
    readers: dict[Var, list[int]] = {var: [] for unit in forward for var in unit.makes}
    for position, unit in enumerate(forward):
        for var in unit.reads:
            if var in readers:
                readers[var].append(position)
    values = [
        (position, value_bytes(var), tuple(readers[var]))
        for position, unit in enumerate(forward)
        for var in unit.makes
        if readers[var]
    ]
    received = received_bytes(len(forward), values)
    light = after_heavy(flops > 0, values)
    stops = cluster_layers(
        work,
        received,
        option.layer_num,
        option.eps,
        light=light,
        line_of=lambda position: source_line(forward[position].eqns[0][1]),
    )
    return np.searchsorted(stops, np.arange(len(forward)), side="right").tolist()


def _flops(unit: Unit, times: Sequence[float]) -> float:
    """Return the FLOP of the products and convolutions of a unit."""
    return sum(times[n] * kernel_of(eqn).flops for n, eqn in unit.eqns if is_product(eqn))


def _last_readers(forward: Iterable[Unit], layers: Iterable[int]) -> dict[Var, int]:
    """Return for each value of the forward pass the last layer that reads it, or computes it."""
    last: dict[Var, int] = {}
    for unit, layer in zip(forward, layers, strict=True):
        last.update((var, layer) for var in (*unit.reads, *unit.makes))
    return last


def _loops(groups: Iterable[Unit]) -> list[Unit]:
    return [unit for unit in groups if unit.eqns[0][1].primitive in OPENING]


def _reasons(groups: Sequence[Unit], forward: Sequence[Unit]) -> str:
    """Return why a forward pass has too few layers, for an error; "" if nothing stands out."""
    loops = _loops(groups)
    with_gradients = [
        unit.eqns[0][1]
        for unit in loops
        if _has_outer_backward(unit) and not is_outer_backward(unit.eqns[0][1])
    ]
    whole = [source_line(unit.eqns[0][1]) for unit in loops if unit in forward]
    reasons = list(dict.fromkeys(map(_reason_of_gradients, with_gradients)))
    if whole:
        lines = ", ".join(dict.fromkeys(whole))
        reasons.append(f"the loop at {lines} is in one layer: {LAYERS_IN_LOOPS}")
    if not forward and not with_gradients:
        reasons.append(
            "the backward pass reads nothing that the forward pass computes: if jax.checkpoint is"
            " around the loss, apply it to each layer instead"
        )
    return "".join(f"; {reason}" for reason in reasons)


def _reason_of_gradients(opening: JaxprEqn) -> str:
    """Return why a loop or branch that takes gradients has no layers."""
    line = source_line(opening)
    if opening.primitive is switch_p:
        return (
            f"the branch at {line} takes gradients: take them before the branch, and choose there"
            " whether to use them"
        )
    return (
        f"the loop at {line} takes gradients in each iteration: take gradients of the whole"
        " batch instead, which num_micro_batches divides, or, if the loop updates weights, make a"
        " step of each update"
    )
