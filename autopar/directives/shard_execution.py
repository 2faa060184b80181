"""Equations on shards, inside `jax.shard_map`, and their derivatives.

Functions with a derivative rule of their own (`custom_jvp`, `custom_vjp`) keep it: the rule is
traced for whole arrays, and its equations run on shards.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import custom_jvp_call_p, custom_vjp_call_p
from jax.sharding import AbstractMesh

from autopar.directives.value_layouts import (
    LayoutError,
    ValueLayout,
    jaxpr_result_layouts,
    layout_of,
    propagate,
    whole_layout,
)
from autopar.ir.calls import called_jaxpr
from autopar.ir.evaluate import bind
from autopar.ir.graph import aval_of, read
from autopar.ir.spec import LogicalMesh, Spec, axes_of, local_shape
from autopar.manual.rng import fold_rng_over_axis
from autopar.manual.varying_types import vary
from autopar.primitives import bind_shards

_NO_MESH = AbstractMesh((), ())
"""The mesh under which derivative rules are traced: JAX caches the traces across meshes."""


def run_eqn(
    eqn: JaxprEqn, layouts: Sequence[ValueLayout], values: Sequence[Any], mesh: LogicalMesh
) -> list[Any]:
    """Return this device's shards of the results of `eqn`.

    Args:
        eqn: the equation, of whole arrays.
        layouts: the layout of each operand.
        values: this device's shard of each operand.
        mesh: the mesh over which operands are split.

    Raises:
        LayoutError: The equation can't run on operands of these layouts.
    """
    if eqn.primitive is custom_jvp_call_p:
        return _custom_jvp(eqn, layouts, mesh)(*values)
    if eqn.primitive is custom_vjp_call_p:
        return _custom_vjp(eqn, layouts, mesh)(*values)
    body = called_jaxpr(eqn)
    if body is not None:
        return run_jaxpr(body, layouts, values, mesh)
    propagated = propagate(eqn, layouts, mesh)
    operand_specs = [operand.dims for operand in propagated.operands]
    result_specs = [result.dims for result in propagated.results]
    shards = [
        _vary(slice_shard(value, have.dims, want.dims, mesh), want)
        for value, have, want in zip(values, layouts, propagated.operands, strict=True)
    ]
    return bind_shards(eqn, operand_specs, result_specs, shards, mesh)


def run_jaxpr(
    jaxpr: Jaxpr, layouts: Sequence[ValueLayout], values: Sequence[Any], mesh: LogicalMesh
) -> list[Any]:
    """Return this device's shards of the results of `jaxpr`; arguments as for `run_eqn`."""
    env: dict[Var, Any] = dict(zip(jaxpr.invars, values, strict=True))
    env.update(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    layout_env = dict(zip(jaxpr.invars, layouts, strict=True))
    layout_env.update((var, whole_layout(aval_of(var).ndim)) for var in jaxpr.constvars)
    for eqn in jaxpr.eqns:
        operands = [layout_of(atom, layout_env) for atom in eqn.invars]
        results = run_eqn(eqn, operands, [read(atom, env) for atom in eqn.invars], mesh)
        env.update(zip(eqn.outvars, results, strict=True))
        propagated = propagate(eqn, operands, mesh)
        layout_env.update(zip(eqn.outvars, propagated.results, strict=True))
    return [read(atom, env) for atom in jaxpr.outvars]


def slice_shard(value: Any, have: Spec, want: Spec, mesh: LogicalMesh) -> Any:
    """Return this device's part of `value`, sliced along the dims that only `want` splits."""
    for dim, (before, axes) in enumerate(zip(have, want, strict=True)):
        if axes and not before:
            size = value.shape[dim] // mesh.ways(axes)
            value = lax.dynamic_slice_in_dim(value, lax.axis_index(axes) * size, size, dim)
    return value


def _vary(value: Any, layout: ValueLayout) -> Any:
    """Return `value` typed as varying along the mesh axes of `layout`.

    JAX requires the operands of an equation to vary along the same axes.
    """
    return vary(sorted(layout.varying), value)


def draw_shards(eqn: JaxprEqn, spec: Spec, operands: Sequence[Any], mesh: LogicalMesh) -> list[Any]:
    """Return this device's shard of a draw of random numbers, drawn with a key of its own.

    Args:
        eqn: the draw of the whole array.
        spec: how the array is split.
        operands: the key.
        mesh: the mesh over which the array is split.
    """
    (key,) = operands
    axes = tuple(axis for axis in mesh.axis_names if axis in axes_of(spec))
    return bind(
        eqn,
        [fold_rng_over_axis(key, axes)],
        shape=local_shape(aval_of(eqn.outvars[0]).shape, spec, mesh),
    )


# -- functions with derivative rules


def _custom_jvp(
    eqn: JaxprEqn, layouts: Sequence[ValueLayout], mesh: LogicalMesh
) -> Callable[..., list[Any]]:
    """Return a custom_jvp as a function of shards, with its rule traced for whole arrays."""
    avals = _operand_avals(eqn)
    smooth = _smooth_operands(eqn)

    def tangents_of(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        def call(*smooth_primals: Any) -> list[Any]:
            return bind(eqn, _replaced_at(primals, smooth, smooth_primals))

        return jax.jvp(call, tuple(primals[k] for k in smooth), tuple(tangents))[1]

    @jax.custom_jvp
    def local(*values: Any) -> list[Any]:
        return run_jaxpr(eqn.params["call_jaxpr"], layouts, values, mesh)

    @local.defjvp
    def _(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            derivative = jax.make_jaxpr(tangents_of)(avals, [avals[k] for k in smooth])
        operands = [*primals, *(tangents[k] for k in smooth)]
        operand_layouts = [*layouts, *(layouts[k] for k in smooth)]
        return local(*primals), run_jaxpr(derivative, operand_layouts, operands, mesh)

    return local


def _custom_vjp(
    eqn: JaxprEqn, layouts: Sequence[ValueLayout], mesh: LogicalMesh
) -> Callable[..., list[Any]]:
    """Return a custom_vjp as a function of shards, with its rule traced for whole arrays.

    Raises:
        LayoutError: The rule can't run on operands of these layouts.
    """
    if not any(layout.split for layout in layouts):
        return lambda *values: bind(eqn, values)
    smooth = _smooth_operands(eqn)
    forward, backward = _vjp_rule(eqn, smooth)
    count = len(eqn.outvars)
    split = next(k for k, layout in enumerate(layouts) if layout.split)
    try:
        forward_layouts = jaxpr_result_layouts(forward, layouts, mesh)
        backward_layouts = [*forward_layouts[count:], *forward_layouts[:count]]
        gradient_layouts = jaxpr_result_layouts(backward, backward_layouts, mesh)
    except LayoutError as error:
        raise LayoutError(
            split, f"can't be split in the rule of a custom_vjp: something inside {error.reason}"
        ) from error
    for k, gradient in zip(smooth, gradient_layouts, strict=True):
        if not layouts[k].varying.isdisjoint(gradient.split - layouts[k].split):
            raise LayoutError(
                k,
                "is whole, but the rule of a custom_vjp makes its gradient in parts; gather that"
                " operand after it",
            )

    @jax.custom_vjp
    def local(*values: Any) -> list[Any]:
        return run_jaxpr(eqn.params["call_jaxpr"], layouts, values, mesh)

    def local_forward(*values: Any) -> tuple[list[Any], Any]:
        outputs = run_jaxpr(forward, layouts, values, mesh)
        return outputs[:count], outputs[count:]

    def local_backward(residuals: Any, gradients: Sequence[Any]) -> tuple[Any, ...]:
        partial = run_jaxpr(backward, backward_layouts, [*residuals, *gradients], mesh)
        complete = [
            _complete_gradient(gradient, have, layouts[k], mesh)
            for k, gradient, have in zip(smooth, partial, gradient_layouts, strict=True)
        ]
        return tuple(_replaced_at([None] * len(eqn.invars), smooth, complete))

    local.defvjp(local_forward, local_backward)
    return local


def _vjp_rule(eqn: JaxprEqn, smooth: Sequence[int]) -> tuple[Jaxpr, Jaxpr]:
    """Return the rule of a custom_vjp, traced for whole arrays.

    The first jaxpr maps operands to results and residuals, the second one residuals and cotangents
    to the gradients of the `smooth` operands.
    """
    trees: list[Any] = []

    def results_and_residuals(*primals: Any) -> tuple[list[Any], list[Any]]:
        def call(*smooth_primals: Any) -> list[Any]:
            return bind(eqn, _replaced_at(primals, smooth, smooth_primals))

        results, pull = jax.vjp(call, *(primals[k] for k in smooth))
        residuals, tree = jax.tree.flatten(pull)
        trees.append(tree)
        return results, residuals

    def gradients_of(residuals: list[Any], cotangents: list[Any]) -> Any:
        return jax.tree.unflatten(trees[-1], residuals)(cotangents)

    with jax.sharding.use_abstract_mesh(_NO_MESH):
        trace_forward = jax.make_jaxpr(results_and_residuals, return_shape=True)
        forward, (results, residuals) = trace_forward(*_operand_avals(eqn))
        backward = jax.make_jaxpr(gradients_of)(residuals, results)
    return forward, backward


def _operand_avals(eqn: JaxprEqn) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(aval_of(atom).shape, aval_of(atom).dtype) for atom in eqn.invars]


def _smooth_operands(eqn: JaxprEqn) -> list[int]:
    """Return the numbers of the operands that have gradients."""
    return [
        k for k, atom in enumerate(eqn.invars) if jnp.issubdtype(aval_of(atom).dtype, jnp.inexact)
    ]


def _complete_gradient(
    gradient: Any, have: ValueLayout, operand: ValueLayout, mesh: LogicalMesh
) -> Any:
    """Return the gradient of an operand as JAX requires it.

    It is summed over the axes along which the operand does not vary, and split as the operand is.
    """
    partial = tuple(sorted(have.partial - operand.varying))
    gradient = lax.psum(gradient, partial) if partial else gradient
    for dim, (axes, wanted) in enumerate(zip(have.dims, operand.dims, strict=True)):
        if axes and not wanted:
            gradient = lax.all_gather(gradient, axes, axis=dim, tiled=True, to="invarying")
    return _vary(slice_shard(gradient, have.dims, operand.dims, mesh), operand)


def _replaced_at(values: Sequence[Any], positions: Sequence[int], new: Sequence[Any]) -> list[Any]:
    """Return `values` with the `new` ones at `positions`."""
    replaced = list(values)
    for position, value in zip(positions, new, strict=True):
        replaced[position] = value
    return replaced
