"""Data-parallel gradients inside `jax.shard_map`.

If each device has the same parameters and its own part of the batch, it is easy to get gradients
that are N times too large on N devices. JAX's types say that the parameters are replicated, so the
gradient of the local loss is already summed over the devices, and the `pmean` that `jax.pmap`
requires averages N equal sums. Here the mean loss over all devices is differentiated, one number
for the whole mesh. JAX's rules then give the right gradient of every parameter, replicated or
sharded.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from autopar.manual.named_collectives import AxisName
from autopar.manual.varying_types import vary, varying_axes


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    axis: AxisName,
) -> Callable[..., Any]:
    """Return `jax.value_and_grad` of the mean of `fun` over the devices along `axis`.

    Call the result inside `jax.shard_map`. It returns value and gradients of the whole batch if
    `fun` is a mean over equally many examples on each device. A replicated parameter gets the same
    gradient on every device, with one all_reduce regardless of how often it is used. For a sharded
    parameter each device gets the gradient of its shard.

    Args:
        fun: a function that returns the scalar loss of this device; with `has_aux` a pair of the
            loss and values that are returned unchanged.
        argnums: as for `jax.value_and_grad`.
        has_aux: as for `jax.value_and_grad`.
        axis: the mesh axes over which the batch is split; () for none.

    Raises:
        ValueError: The loss varies along another mesh axis, over which `fun` must sum or average;
            or shard_map has `check_vma=False`, with which JAX does not sum the gradients of
            replicated parameters.
    """
    names = (axis,) if isinstance(axis, str) else tuple(axis)

    def mean_loss(*args: Any) -> Any:
        _check_types_are_tracked(names)
        result = fun(*args)
        loss, aux = result if has_aux else (result, None)
        missing = varying_axes(loss) - set(names)
        if missing:
            raise ValueError(
                f"the loss differs along the mesh axis {', '.join(sorted(missing))}, but is to be"
                f" averaged over {', '.join(names) or 'none'} only; sum or average it inside the"
                " function (a forward all_reduce is missing), or name the axis if the batch is"
                " split over it"
            )
        differs = tuple(name for name in names if name in varying_axes(loss))
        loss = jax.lax.pmean(loss, differs) if differs else loss
        return (loss, aux) if has_aux else loss

    def call(*args: Any) -> Any:
        # The transpose of this cast is the all_reduce of the gradient. Without it, JAX inserts a
        # cast, and so an all_reduce, at every use of a parameter.
        chosen = {argnums} if isinstance(argnums, int) else set(argnums)
        cast = partial(jax.tree.map, partial(vary, names))
        return jax.value_and_grad(
            lambda *args: mean_loss(*(cast(x) if i in chosen else x for i, x in enumerate(args))),
            argnums,
            has_aux,
        )(*args)

    return call


def _check_types_are_tracked(names: tuple[str, ...]) -> None:
    if names and not varying_axes(jax.lax.axis_index(names)):
        raise ValueError(
            "value_and_grad needs jax.shard_map with check_vma=True, its default; given"
            " check_vma=False"
        )
