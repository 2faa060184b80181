"""Gradients inside `jax.shard_map` that can't come out N times too large.

The trap: each device has the same parameters and its own part of the batch. JAX sees that the parameters are the same everywhere,
so the gradient of the device's own loss is already summed over the N devices, and the `pmean` that everyone knows from `jax.pmap`
averages N equal sums: N times the gradient, and nothing complains. Here what is differentiated is the mean loss of all devices,
one number for the whole mesh, and then JAX's rules give the gradient of every parameter, whether replicated or sharded.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from autopar.manual.named_collectives import AxisName


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    axis: AxisName,
) -> Callable[..., Any]:
    """As `jax.value_and_grad`, of the mean of `fun` over the devices along `axis`. To be called inside `jax.shard_map`.

    Value and gradients are those of the whole batch if `fun` is a mean over as many examples on each device. A parameter that is
    replicated gets the same gradient on every device, synchronised once however often it is used; of one that is sharded, each
    device gets the gradient of its shard.

    Args:
        fun: gives the loss of this device, a scalar; with `has_aux` also values that are passed on as they are.
        axis: the mesh axes over which the batch is split, () for none.

    Raises:
        ValueError: the loss differs along another mesh axis: a sum or mean over it is missing in `fun`; or shard_map was told
            `check_vma=False`, without which gradients of replicated parameters would lack their sum.
    """
    names = (axis,) if isinstance(axis, str) else tuple(axis)

    def mean_loss(*args: Any) -> Any:
        _check_types_are_tracked(names)
        result = fun(*args)
        loss, aux = result if has_aux else (result, None)
        if missing := _varying(loss) - set(names):
            raise ValueError(
                f"the loss differs along the mesh axis {', '.join(sorted(missing))}, but is to be averaged over "
                f"{', '.join(names) or 'none'} only; sum or average it inside the function (a forward all_reduce is missing), "
                "or name the axis if the batch is split over it"
            )
        differs = tuple(name for name in names if name in _varying(loss))
        loss = jax.lax.pmean(loss, differs) if differs else loss
        return (loss, aux) if has_aux else loss

    def call(*args: Any) -> Any:
        # One cast at the start is one all_reduce per parameter at the end; without it there is one per use.
        chosen = {argnums} if isinstance(argnums, int) else set(argnums)
        cast = partial(jax.tree.map, partial(_vary, names))
        return jax.value_and_grad(
            lambda *args: mean_loss(*(cast(x) if i in chosen else x for i, x in enumerate(args))),
            argnums,
            has_aux,
        )(*args)

    return call


def _vary(names: tuple[str, ...], x: jax.Array) -> jax.Array:
    """`x`, from here on free to differ along `names`."""
    missing = tuple(name for name in names if name not in _varying(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _varying(x: Any) -> frozenset[str]:
    """The mesh axes along which `x` may differ (the attributes have no public name; seen in JAX 0.11.2)."""
    return jax.typeof(x).mat.varying


def _check_types_are_tracked(names: tuple[str, ...]) -> None:
    if names and not _varying(jax.lax.axis_index(names)):
        raise ValueError(
            "value_and_grad needs jax.shard_map with check_vma=True, its default; given check_vma=False"
        )
