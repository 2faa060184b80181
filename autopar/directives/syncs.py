"""Synchronisations: where they apply, what they make of a value's layout, and how a device takes part in them."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax import lax

from autopar.directives.definitions import DirectiveError, Sync
from autopar.directives.shard_execution import shard
from autopar.directives.value_layouts import ValueLayout
from autopar.ir.spec import LogicalMesh

OPS = ("all_reduce", "all_gather", "reduce_scatter", "scatter")
_RESHARD = re.compile(r"([RS]+)->([RS]+)")


class NotApplicable(Exception):
    """The value is not of the kind that the sync is for; the message says what it is."""


def check_sync(sync: Sync, functions: Mapping[str, Any]) -> None:
    """Raise DirectiveError for a sync that can't be meant."""
    if sync.mode not in ("fwd_pre", "fwd_post", "bwd_post"):
        raise DirectiveError(
            f"sync mode {sync.mode!r}, expected 'fwd_pre', 'fwd_post' or 'bwd_post'"
        )
    if sync.mode == "bwd_post" and sync.op != "all_reduce" and sync.op not in functions:
        raise DirectiveError(
            f"sync {sync.op!r} of gradients: expected 'all_reduce', or a function; how gradients of what is gathered or scattered go is"
            " said where that is done (backward=)"
        )
    if sync.mode == "fwd_pre" and sync.op in ("all_reduce", "reduce_scatter"):
        raise DirectiveError(
            f"sync {sync.op!r} before a module: put it after the module that makes the partial sum"
        )
    if sync.op in ("reduce_scatter", "scatter") and sync.axis is None:
        raise DirectiveError(f"sync {sync.op!r} needs axis=, the array dim to scatter along")
    if sync.op not in OPS and not _RESHARD.fullmatch(sync.op) and sync.op not in functions:
        raise DirectiveError(
            f"sync op {sync.op!r}: expected one of {', '.join(OPS)}, a change of layout such as 'RS->SR', or a function"
            " (one that is replayed is given by functions=)"
        )
    if _RESHARD.fullmatch(sync.op):
        _resharded(sync.op)


def after(sync: Sync, layout: ValueLayout) -> ValueLayout:
    """Where a value is after the sync. Raises NotApplicable."""
    axis, dims, varying = sync.mesh_axis, list(layout.dims), layout.varying
    found = next((dim for dim, axes in enumerate(dims) if axis in axes), None)
    if sync.mode == "bwd_post":
        if axis in varying:
            raise NotApplicable(
                f"its gradients are no partial sums over {axis!r}, as it is {layout}"
            )
        return replace(layout, varying=varying | {axis})
    if layout.largest:
        if sync.op != "all_reduce" or axis not in layout.largest:
            raise NotApplicable(f"it is {layout}")
        return replace(layout, largest=layout.largest - {axis}, varying=varying - {axis})
    match sync.op:
        case "all_reduce" | "reduce_scatter":
            if axis not in layout.partial:
                raise NotApplicable(f"it is {layout}, not a partial sum over {axis!r}")
            if sync.op == "all_reduce":
                return replace(layout, partial=layout.partial - {axis}, varying=varying - {axis})
            return ValueLayout(_split(layout, sync), layout.partial - {axis}, varying)
        case "all_gather":
            if found is None or sync.axis not in (None, found, found - len(dims)):
                raise NotApplicable(
                    f"it is {layout}, not split over {axis!r}"
                    + ("" if found is None else f" along dim {sync.axis}")
                )
            dims[found] = ()
            return ValueLayout(
                tuple(dims),
                layout.partial,
                varying - {axis} if _gradients_are_whole(sync) else varying,
            )
        case "scatter":
            if found is not None or axis in layout.partial:
                raise NotApplicable(f"it is {layout}, not whole over {axis!r}")
            return ValueLayout(_split(layout, sync), layout.partial, varying | {axis})
        case op if _RESHARD.fullmatch(op):
            return _after_reshard(sync, layout, found)
        case _:
            if axis not in layout.partial and found is None:
                raise NotApplicable(
                    f"it is {layout}: there is nothing to put together over {axis!r}"
                )
            whole = tuple(() if dim == found else axes for dim, axes in enumerate(dims))
            return ValueLayout(whole, layout.partial - {axis}, varying - {axis})


def apply(
    sync: Sync,
    before: ValueLayout,
    value: Any,
    mesh: LogicalMesh,
    functions: Mapping[str, Callable[..., Any]],
) -> Any:
    """The sync of this device's `value`, inside `jax.shard_map`."""
    axis, wanted = sync.mesh_axis, after(sync, before)
    if sync.mode == "bwd_post":
        hook = functions.get(sync.op)
        return (
            lax.pcast(value, axis, to="varying")
            if hook is None
            else _with_gradient(value, sync, hook)
        )
    gathered = next(
        (dim for dim, axes in enumerate(before.dims) if axis in axes and not wanted.dims[dim]), None
    )
    scattered = next(
        (dim for dim, axes in enumerate(wanted.dims) if axis in axes and not before.dims[dim]), None
    )
    match sync.op:
        case "all_reduce":
            return largest(value, axis) if axis in before.largest else lax.psum(value, axis)
        case "reduce_scatter":
            return lax.psum_scatter(value, axis, scatter_dimension=scattered or 0, tiled=True)
        case op if op in functions:
            made = functions[op](value)
            _check_whole(sync, made, wanted.varying)
            return made
    if gathered is not None and scattered is not None:
        return lax.all_to_all(value, axis, split_axis=scattered, concat_axis=gathered, tiled=True)
    if gathered is not None:
        to = "invarying" if _gradients_are_whole(sync) else "varying"
        return lax.all_gather(value, axis, axis=gathered, tiled=True, to=to)
    assert scattered is not None
    if (
        axis in before.varying
    ):  # gradients are partial sums, whose own part is all that a device adds
        return shard(value, before.dims, wanted.dims, mesh)
    return _scatter(value, axis, scattered)


def _check_whole(sync: Sync, made: Any, allowed: frozenset[str]) -> None:
    if not jax.typeof(made).manual_axis_type.varying <= allowed:
        raise DirectiveError(
            f"{sync.op}, the sync function of {sync.path!r}, returns values that still differ between the devices of {sync.mesh_axis!r}"
        )


def _with_gradient(value: Any, sync: Sync, function: Callable[..., Any]) -> Any:
    """`value`; `function` makes its gradient of what each device has of it."""
    allowed = jax.typeof(value).manual_axis_type.varying

    @jax.custom_vjp
    def same(value: Any) -> Any:
        return lax.pcast(value, sync.mesh_axis, to="varying")

    def backward(_: None, gradient: Any) -> tuple[Any]:
        made = function(gradient)
        if (made.shape, made.dtype) != (gradient.shape, gradient.dtype):
            raise DirectiveError(
                f"{sync.op}, the sync function of {sync.path!r}, makes {made.dtype}{list(made.shape)} of a gradient that is"
                f" {gradient.dtype}{list(gradient.shape)}"
            )
        _check_whole(sync, made, allowed)
        return (made,)

    same.defvjp(lambda value: (same(value), None), backward)
    return same(value)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _scatter(value: Any, axis: str, dim: int) -> Any:
    """This device's part of what is the same on all; gradients are gathered, where those of a slice would be added up, zeros and all."""
    size = value.shape[dim] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(value, lax.axis_index(axis) * size, size, dim)


def _scatter_forward(value: Any, axis: str, dim: int) -> tuple[Any, None]:
    return _scatter(value, axis, dim), None


def _scatter_backward(axis: str, dim: int, _: None, gradient: Any) -> tuple[Any]:
    return (lax.all_gather(gradient, axis, axis=dim, tiled=True, to="invarying"),)


_scatter.defvjp(_scatter_forward, _scatter_backward)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def largest(value: Any, axis: str) -> Any:
    """The largest of the devices' values along a mesh axis; its gradient goes to those that have it, in equal parts."""
    return lax.pmax(value, axis)


@largest.defjvp
def _(axis: str, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    (value,), (tangent,) = primals, tangents
    top = largest(value, axis)
    is_top = (value == top).astype(tangent.dtype)
    return top, lax.psum(is_top * tangent, axis) / lax.psum(is_top, axis)


def _gradients_are_whole(sync: Sync) -> bool:
    """Before a module that computes on shards gradients of what was gathered are partial sums; after one they are equal."""
    return (
        sync.backward or ("reduce_scatter" if sync.mode == "fwd_pre" else "scatter")
    ) == "scatter"


def _split(layout: ValueLayout, sync: Sync) -> tuple[tuple[str, ...], ...]:
    """The dims of `layout`, with the sync's split over its mesh axis, too."""
    rank, axis = len(layout.dims), sync.axis or 0
    if not -rank <= axis < rank or layout.dims[axis]:
        raise NotApplicable(
            f"it is {layout}: dim {axis} can't be split over {sync.mesh_axis!r}, too"
        )
    return tuple(
        (sync.mesh_axis,) if d == axis % rank else axes for d, axes in enumerate(layout.dims)
    )


def _resharded(op: str) -> tuple[int | None, int | None]:
    """The dims, counted from the last, that are gathered and scattered. Raises DirectiveError."""
    left, right = op.split("->")
    if len(left) != len(right) or max(left.count("S"), right.count("S")) > 1 or left == right:
        raise DirectiveError(
            f"sync op {op!r}: expected the same dims on both sides, at most one of them S, as in 'RS->SR'"
        )
    gathered = next((d - len(left) for d, letter in enumerate(left) if letter == "S"), None)
    scattered = next((d - len(left) for d, letter in enumerate(right) if letter == "S"), None)
    return gathered, scattered


def _after_reshard(sync: Sync, layout: ValueLayout, found: int | None) -> ValueLayout:
    gathered, scattered = _resharded(sync.op)
    rank = len(layout.dims)
    if sync.mesh_axis in layout.partial or found != (None if gathered is None else gathered + rank):
        raise NotApplicable(f"it is {layout}, not {sync.op.split('->')[0]} over {sync.mesh_axis!r}")
    dims = [() if dim == found else axes for dim, axes in enumerate(layout.dims)]
    varying = layout.varying | {sync.mesh_axis}
    if scattered is None:
        return ValueLayout(
            tuple(dims),
            layout.partial,
            varying - {sync.mesh_axis} if _gradients_are_whole(sync) else varying,
        )
    return ValueLayout(
        _split(replace(layout, dims=tuple(dims)), replace(sync, axis=scattered)),
        layout.partial,
        varying,
    )
