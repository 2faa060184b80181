"""Syncs: when they apply to a value, the layout after them, and their collectives on shards."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax import lax

from autopar.directives.definitions import DirectiveError, Sync
from autopar.directives.shard_execution import slice_shard
from autopar.directives.value_layouts import ValueLayout
from autopar.ir.spec import LogicalMesh, Spec
from autopar.manual.varying_types import varying_axes

OPS = ("all_reduce", "all_gather", "reduce_scatter", "scatter")
_RESHARD = re.compile(r"([RS]+)->([RS]+)")


class NotApplicableError(Exception):
    """The sync does not apply to a value of this layout; the message says what the layout is."""


def check_sync(sync: Sync, functions: Mapping[str, Any]) -> None:
    """Raise DirectiveError for a sync that can never apply."""
    if sync.mode not in ("fwd_pre", "fwd_post", "bwd_post"):
        raise DirectiveError(
            f"sync mode {sync.mode!r}, expected 'fwd_pre', 'fwd_post' or 'bwd_post'"
        )
    if sync.mode == "bwd_post" and sync.op != "all_reduce" and sync.op not in functions:
        raise DirectiveError(
            f"sync {sync.op!r} of gradients: expected 'all_reduce', or a function; the sync that"
            " gathers or scatters a value also says what happens to its gradients (backward=)"
        )
    if sync.mode == "fwd_pre" and sync.op in ("all_reduce", "reduce_scatter"):
        raise DirectiveError(
            f"sync {sync.op!r} before a module: put it after the module that makes the partial sum"
        )
    if sync.op in ("reduce_scatter", "scatter") and sync.axis is None:
        raise DirectiveError(f"sync {sync.op!r} needs axis=, the array dim to scatter along")
    if sync.op not in OPS and not _RESHARD.fullmatch(sync.op) and sync.op not in functions:
        raise DirectiveError(
            f"sync op {sync.op!r}: expected one of {', '.join(OPS)}, a change of layout such as"
            " 'RS->SR', or a function (one that is replayed is given by functions=)"
        )
    if _RESHARD.fullmatch(sync.op):
        _reshard_dims(sync.op)
    if sync.backward not in (None, "reduce_scatter", "scatter"):
        raise DirectiveError(
            f"sync backward {sync.backward!r}, expected 'reduce_scatter' or 'scatter'"
        )
    if sync.axis is not None and (isinstance(sync.axis, bool) or not isinstance(sync.axis, int)):
        raise DirectiveError(f"sync axis {sync.axis!r}, expected the number of an array dim")


def layout_after(sync: Sync, layout: ValueLayout) -> ValueLayout:
    """Return the layout of a value after a sync, given the one before.

    Raises:
        NotApplicableError: The sync does not apply to values of this layout.
    """
    axis = sync.mesh_axis
    varying = layout.varying
    split_dim = next((dim for dim, axes in enumerate(layout.dims) if axis in axes), None)
    if sync.mode == "bwd_post":
        if axis in varying:
            raise NotApplicableError(
                f"its gradients are no partial sums over {axis!r}, as it is {layout}"
            )
        return replace(layout, varying=varying | {axis})
    if layout.partial_max:
        if sync.op != "all_reduce" or axis not in layout.partial_max:
            raise NotApplicableError(f"it is {layout}")
        return replace(layout, partial_max=layout.partial_max - {axis}, varying=varying - {axis})
    match sync.op:
        case "all_reduce" | "reduce_scatter":
            if axis not in layout.partial:
                raise NotApplicableError(f"it is {layout}, not a partial sum over {axis!r}")
            if sync.op == "all_reduce":
                return replace(layout, partial=layout.partial - {axis}, varying=varying - {axis})
            return ValueLayout(_split_dims(layout, sync), layout.partial - {axis}, varying)
        case "all_gather":
            rank = len(layout.dims)
            if split_dim is None or sync.axis not in (None, split_dim, split_dim - rank):
                raise NotApplicableError(
                    f"it is {layout}, not split over {axis!r}"
                    + ("" if split_dim is None else f" along dim {sync.axis}")
                )
            return _gathered(sync, layout, split_dim)
        case "scatter":
            if split_dim is not None or axis in layout.partial:
                raise NotApplicableError(f"it is {layout}, not whole over {axis!r}")
            return ValueLayout(_split_dims(layout, sync), layout.partial, varying | {axis})
        case op if _RESHARD.fullmatch(op):
            return _layout_after_reshard(sync, layout, split_dim)
        case _:
            if axis not in layout.partial and split_dim is None:
                raise NotApplicableError(
                    f"it is {layout}, neither a partial sum nor split over {axis!r}"
                )
            dims = _without_dim(layout, split_dim)
            return ValueLayout(dims, layout.partial - {axis}, varying - {axis})


def apply_sync(
    sync: Sync,
    before: ValueLayout,
    value: Any,
    mesh: LogicalMesh,
    functions: Mapping[str, Callable[..., Any]],
) -> Any:
    """Return this device's shard of a value after a sync. Call it inside `jax.shard_map`.

    Args:
        sync: the sync.
        before: the layout of the value before it.
        value: this device's shard before it.
        mesh: the mesh over which the value is split.
        functions: the user's functions by name.

    Raises:
        DirectiveError: A function of the user returns values that still differ between devices.
    """
    axis = sync.mesh_axis
    after = layout_after(sync, before)
    if sync.mode == "bwd_post":
        if sync.op in functions:
            return _with_gradient(value, sync, functions[sync.op])
        return lax.pcast(value, axis, to="varying")
    gathered = _newly_whole_dim(before, after, axis)
    scattered = _newly_whole_dim(after, before, axis)
    match sync.op:
        case "all_reduce":
            return (
                max_over_axis(value, axis) if axis in before.partial_max else lax.psum(value, axis)
            )
        case "reduce_scatter":
            return lax.psum_scatter(value, axis, scatter_dimension=scattered or 0, tiled=True)
        case op if op in functions:
            result = functions[op](value)
            shape = _whole_shape(value.shape, gathered, mesh.sizes[axis])
            if (result.shape, result.dtype) != (shape, value.dtype):
                raise DirectiveError(
                    f"{sync.op}, the sync function of {sync.path!r}, makes"
                    f" {result.dtype}{list(result.shape)} of {value.dtype}{list(value.shape)}; the"
                    f" whole value over {axis!r} is {value.dtype}{list(shape)}"
                )
            _check_whole(sync, result, after.varying)
            return result
    if gathered is not None and scattered is not None:
        return lax.all_to_all(value, axis, split_axis=scattered, concat_axis=gathered, tiled=True)
    if gathered is not None:
        to = "invarying" if _gradients_are_whole(sync) else "varying"
        return lax.all_gather(value, axis, axis=gathered, tiled=True, to=to)
    assert scattered is not None
    # Gradients of a varying value are partial sums: each device adds the gradient of its slice.
    if axis in before.varying:
        return slice_shard(value, before.dims, after.dims, mesh)
    return _scatter(value, axis, scattered)


def _newly_whole_dim(before: ValueLayout, after: ValueLayout, axis: str) -> int | None:
    """Return the dim that is split over `axis` before, and whole after."""
    pairs = enumerate(zip(before.dims, after.dims, strict=True))
    return next((dim for dim, (split, axes) in pairs if axis in split and not axes), None)


def _whole_shape(shape: tuple[int, ...], gathered: int | None, ways: int) -> tuple[int, ...]:
    """Return the shape of a shard after dim `gathered`, which is split over `ways`, is whole."""
    return tuple(size * ways if dim == gathered else size for dim, size in enumerate(shape))


def _check_whole(sync: Sync, result: Any, allowed: frozenset[str]) -> None:
    if not varying_axes(result) <= allowed:
        raise DirectiveError(
            f"{sync.op}, the sync function of {sync.path!r}, returns values that still differ"
            f" between the devices of {sync.mesh_axis!r}"
        )


def _with_gradient(value: Any, sync: Sync, function: Callable[..., Any]) -> Any:
    """Return `value`, whose gradient is `function` of each device's part of the gradient."""
    allowed = varying_axes(value)

    @jax.custom_vjp
    def identity(value: Any) -> Any:
        return lax.pcast(value, sync.mesh_axis, to="varying")

    def backward(_: None, gradient: Any) -> tuple[Any]:
        result = function(gradient)
        if (result.shape, result.dtype) != (gradient.shape, gradient.dtype):
            raise DirectiveError(
                f"{sync.op}, the sync function of {sync.path!r}, makes"
                f" {result.dtype}{list(result.shape)} of a gradient that is"
                f" {gradient.dtype}{list(gradient.shape)}"
            )
        _check_whole(sync, result, allowed)
        return (result,)

    identity.defvjp(lambda value: (identity(value), None), backward)
    return identity(value)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _scatter(value: Any, axis: str, dim: int) -> Any:
    """Return this device's slice of a value that is equal on all devices.

    The gradient is an all_gather. Without this rule, JAX would sum over devices the gradients of
    the slice, padded with zeros.
    """
    size = value.shape[dim] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(value, lax.axis_index(axis) * size, size, dim)


def _scatter_forward(value: Any, axis: str, dim: int) -> tuple[Any, None]:
    return _scatter(value, axis, dim), None


def _scatter_backward(axis: str, dim: int, _: None, gradient: Any) -> tuple[Any]:
    return (lax.all_gather(gradient, axis, axis=dim, tiled=True, to="invarying"),)


_scatter.defvjp(_scatter_forward, _scatter_backward)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def max_over_axis(value: Any, axis: str) -> Any:
    """Return the maximum of the devices' values along a mesh axis.

    The gradient is divided equally among the devices whose value is the maximum.
    """
    return lax.pmax(value, axis)


@max_over_axis.defjvp
def _(axis: str, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    (value,) = primals
    (tangent,) = tangents
    top = max_over_axis(value, axis)
    is_top = (value == top).astype(tangent.dtype)
    return top, lax.psum(is_top * tangent, axis) / lax.psum(is_top, axis)


def _gradients_are_whole(sync: Sync) -> bool:
    """Return whether the gradients of what `sync` gathers are equal on all devices.

    By default they are after a module, and are partial sums before a module, which computes on
    shards.
    """
    default = "reduce_scatter" if sync.mode == "fwd_pre" else "scatter"
    return (sync.backward or default) == "scatter"


def _gathered(sync: Sync, layout: ValueLayout, dim: int | None) -> ValueLayout:
    """Return `layout` with `dim` whole."""
    varying = layout.varying
    if _gradients_are_whole(sync):
        varying -= {sync.mesh_axis}
    return ValueLayout(_without_dim(layout, dim), layout.partial, varying)


def _without_dim(layout: ValueLayout, whole: int | None) -> Spec:
    """Return the dims of `layout`, with that of number `whole` split over no axis."""
    return tuple(() if dim == whole else axes for dim, axes in enumerate(layout.dims))


def _split_dims(layout: ValueLayout, sync: Sync) -> Spec:
    """Return the dims of `layout`, with dim `sync.axis` split over `sync.mesh_axis`."""
    rank = len(layout.dims)
    axis = sync.axis or 0
    if not -rank <= axis < rank or layout.dims[axis]:
        raise NotApplicableError(
            f"it is {layout}: dim {axis} can't be split over {sync.mesh_axis!r}, too"
        )
    return tuple(
        (sync.mesh_axis,) if d == axis % rank else axes for d, axes in enumerate(layout.dims)
    )


def _reshard_dims(op: str) -> tuple[int | None, int | None]:
    """Return the dims, counted from the last, that "RS->SR" gathers and scatters.

    Raises:
        DirectiveError: `op` is no valid change of layout.
    """
    left, right = op.split("->")
    if len(left) != len(right) or max(left.count("S"), right.count("S")) > 1 or left == right:
        raise DirectiveError(
            f"sync op {op!r}: expected the same dims on both sides, at most one of them S, as in"
            " 'RS->SR'"
        )
    gathered = next((d - len(left) for d, letter in enumerate(left) if letter == "S"), None)
    scattered = next((d - len(left) for d, letter in enumerate(right) if letter == "S"), None)
    return gathered, scattered


def _layout_after_reshard(sync: Sync, layout: ValueLayout, split_dim: int | None) -> ValueLayout:
    gathered, scattered = _reshard_dims(sync.op)
    expected_dim = None if gathered is None else gathered + len(layout.dims)
    if sync.mesh_axis in layout.partial or split_dim != expected_dim:
        raise NotApplicableError(
            f"it is {layout}, not {sync.op.split('->')[0]} over {sync.mesh_axis!r}"
        )
    if scattered is None:
        return _gathered(sync, layout, split_dim)
    gathered_layout = replace(layout, dims=_without_dim(layout, split_dim))
    dims = _split_dims(gathered_layout, replace(sync, axis=scattered))
    return ValueLayout(dims, layout.partial, layout.varying | {sync.mesh_axis})
