"""The layer of an equation, which is a named scope.

JAX records the scopes around an equation in its name stack, and in the name stacks of the equations
that differentiation derives from it. So `layer_of` can tell the layer of every equation of a traced
step, forward or backward, and layers do not change what a function computes.
"""

import re
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from autopar.ir.graph import is_outer_backward, scopes, with_name_stack
from autopar.primitives import is_product

_SCOPE = "pipeline_layer_"
_LAYER = re.compile(rf"{_SCOPE}(\d+)")


def layer_of(eqn: JaxprEqn) -> tuple[int, bool] | None:
    """Return the layer of an equation, if any, and whether it is in the backward pass."""
    match = _LAYER.search(scopes(eqn))
    return (int(match[1]), is_outer_backward(eqn)) if match else None


def layer_scope(layer: int) -> AbstractContextManager[Any]:
    """Return a context in which the equations that JAX traces belong to a layer."""
    return jax.named_scope(f"{_SCOPE}{layer}")


def in_layer(eqn: JaxprEqn, layer: int) -> JaxprEqn:
    """Return an equation without a layer as one of that layer."""
    return with_name_stack(eqn, eqn.source_info.name_stack.extend(f"{_SCOPE}{layer}"))


def num_layers(jaxpr: Jaxpr) -> int:
    """Return the number of layers that a traced step has; 0 if it has none."""
    layers = (layer_of(eqn) for eqn in jaxpr.eqns)
    return max((layer[0] for layer in layers if layer is not None), default=-1) + 1


def has_light_layers(jaxpr: Jaxpr) -> bool:
    """Return whether a layer of a traced step has no matrix product or convolution."""
    heavy = {
        layer[0] for eqn in jaxpr.eqns if (layer := layer_of(eqn)) is not None if is_product(eqn)
    }
    return len(heavy) < num_layers(jaxpr)
