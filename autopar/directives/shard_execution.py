"""Running an equation on shards, inside `jax.shard_map`: what each device computes of its own, and how derivatives follow it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import custom_jvp_call_p, custom_vjp_call_p
from jax.sharding import AbstractMesh

from autopar.directives.value_layouts import (
    INNER,
    LayoutError,
    ValueLayout,
    follow,
    follow_jaxpr,
    layout_of,
    whole,
)
from autopar.ir.graph import aval_of, read
from autopar.ir.spec import LogicalMesh, Spec, axes_of, local_shape
from autopar.manual.rng import fold_rng_over_axis
from autopar.primitives import bind_shards
from autopar.primitives.local_forms import bind

_NO_MESH = AbstractMesh((), ())
"""Where rules of the user are traced: JAX keeps such traces, for other meshes, too."""


def run_eqn(
    eqn: JaxprEqn, layouts: Sequence[ValueLayout], values: Sequence[Any], mesh: LogicalMesh
) -> list[Any]:
    """The shards of the results of `eqn`, from the shards that `layouts` describe."""
    if eqn.primitive is custom_jvp_call_p:
        return _custom_jvp(eqn, layouts, mesh)(*values)
    if eqn.primitive is custom_vjp_call_p:
        return _custom_vjp(eqn, layouts, mesh)(*values)
    if eqn.primitive in INNER:
        return run_jaxpr(eqn.params[INNER[eqn.primitive]], layouts, values, mesh)
    followed = follow(eqn, layouts, mesh)
    pairs = zip(values, layouts, followed.operands, strict=True)
    shards = [_vary(shard(value, have.dims, want.dims, mesh), want) for value, have, want in pairs]
    return bind_shards(
        eqn, [o.dims for o in followed.operands], [r.dims for r in followed.results], shards, mesh
    )


def run_jaxpr(
    jaxpr: Jaxpr, layouts: Sequence[ValueLayout], values: Sequence[Any], mesh: LogicalMesh
) -> list[Any]:
    """The shards of the results of `jaxpr`."""
    env: dict[Var, Any] = dict(zip(jaxpr.invars, values, strict=True))
    env.update(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    at = dict(zip(jaxpr.invars, layouts, strict=True))
    at.update((var, whole(aval_of(var).ndim)) for var in jaxpr.constvars)
    for eqn in jaxpr.eqns:
        operands = [layout_of(atom, at) for atom in eqn.invars]
        results = run_eqn(eqn, operands, [read(atom, env) for atom in eqn.invars], mesh)
        env.update(zip(eqn.outvars, results, strict=True))
        at.update(zip(eqn.outvars, follow(eqn, operands, mesh).results, strict=True))
    return [read(atom, env) for atom in jaxpr.outvars]


def shard(value: Any, have: Spec, want: Spec, mesh: LogicalMesh) -> Any:
    """This device's part of a value along the dims in which it is whole and wanted split."""
    for dim, (before, axes) in enumerate(zip(have, want, strict=True)):
        if axes and not before:
            size = value.shape[dim] // mesh.ways(axes)
            value = lax.dynamic_slice_in_dim(value, lax.axis_index(axes) * size, size, dim)
    return value


def _vary(value: Any, layout: ValueLayout) -> Any:
    """`value`, typed as varying along every mesh axis along which another operand is: JAX mixes no others."""
    missing = tuple(sorted(layout.varying - jax.typeof(value).manual_axis_type.varying))
    return lax.pcast(value, missing, to="varying") if missing else value


def draw_shards(eqn: JaxprEqn, spec: Spec, operands: Sequence[Any], mesh: LogicalMesh) -> list[Any]:
    """This device's shard of a draw of random numbers, from a key of its own."""
    (key,), axes = operands, tuple(axis for axis in mesh.axis_names if axis in axes_of(spec))
    return bind(
        eqn,
        [fold_rng_over_axis(key, axes)],
        shape=local_shape(aval_of(eqn.outvars[0]).shape, spec, mesh),
    )


# -- what has a derivative of its own


def _custom_jvp(
    eqn: JaxprEqn, layouts: Sequence[ValueLayout], mesh: LogicalMesh
) -> Callable[..., list[Any]]:
    """The function and its own derivative, both on shards: the derivative is traced as a function of the whole arrays."""
    avals = [jax.ShapeDtypeStruct(aval_of(atom).shape, aval_of(atom).dtype) for atom in eqn.invars]
    smooth = [k for k, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.inexact)]

    def tangents_of(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        def of_smooth(*given: Any) -> list[Any]:
            return bind(eqn, _placed(primals, smooth, given))

        return jax.jvp(of_smooth, tuple(primals[k] for k in smooth), tuple(tangents))[1]

    @jax.custom_jvp
    def local(*values: Any) -> list[Any]:
        return run_jaxpr(eqn.params["call_jaxpr"], layouts, values, mesh)

    @local.defjvp
    def _(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            derivative = jax.make_jaxpr(tangents_of)(avals, [avals[k] for k in smooth])
        given = [*primals, *(tangents[k] for k in smooth)]
        at = [*layouts, *(layouts[k] for k in smooth)]
        return local(*primals), run_jaxpr(derivative, at, given, mesh)

    return local


def _custom_vjp(
    eqn: JaxprEqn, layouts: Sequence[ValueLayout], mesh: LogicalMesh
) -> Callable[..., list[Any]]:
    """The function and its own rule, both on shards: what the rule keeps, and what it makes of that, are traced for whole arrays."""
    if not any(layout.split for layout in layouts):
        return lambda *values: bind(eqn, values)
    avals = [jax.ShapeDtypeStruct(aval_of(atom).shape, aval_of(atom).dtype) for atom in eqn.invars]
    smooth = [k for k, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.inexact)]
    trees: list[Any] = []

    def kept(*primals: Any) -> tuple[list[Any], list[Any]]:
        def of_smooth(*given: Any) -> list[Any]:
            return bind(eqn, _placed(primals, smooth, given))

        results, pull = jax.vjp(of_smooth, *(primals[k] for k in smooth))
        residuals, tree = jax.tree.flatten(pull)
        trees.append(tree)
        return results, residuals

    with jax.sharding.use_abstract_mesh(_NO_MESH):
        forward, (results, residuals) = jax.make_jaxpr(kept, return_shape=True)(*avals)
        backward = jax.make_jaxpr(lambda kept, given: jax.tree.unflatten(trees[-1], kept)(given))(
            residuals, results
        )
    count = len(eqn.outvars)
    split = next(k for k, layout in enumerate(layouts) if layout.split)
    try:
        after = follow_jaxpr(forward, layouts, mesh)
        before = [*after[count:], *after[:count]]
        made = follow_jaxpr(backward, before, mesh)
    except LayoutError as error:
        raise LayoutError(
            split, f"can't be split in the rule of a custom_vjp: something inside {error.reason}"
        ) from error
    for k, gradient in zip(smooth, made, strict=True):
        if not layouts[k].varying.isdisjoint(gradient.split - layouts[k].split):
            raise LayoutError(
                k,
                "is whole, but the rule of a custom_vjp makes its gradient in parts; gather that operand after it",
            )

    @jax.custom_vjp
    def local(*values: Any) -> list[Any]:
        return run_jaxpr(eqn.params["call_jaxpr"], layouts, values, mesh)

    def local_forward(*values: Any) -> tuple[list[Any], Any]:
        found = run_jaxpr(forward, layouts, values, mesh)
        return found[:count], found[count:]

    def local_backward(residuals: Any, gradients: Sequence[Any]) -> tuple[Any, ...]:
        found = run_jaxpr(backward, before, [*residuals, *gradients], mesh)
        complete = [
            _as_operand(g, at, layouts[k], mesh)
            for k, g, at in zip(smooth, found, made, strict=True)
        ]
        return tuple(_placed([None] * len(avals), smooth, complete))

    local.defvjp(local_forward, local_backward)
    return local


def _as_operand(gradient: Any, have: ValueLayout, operand: ValueLayout, mesh: LogicalMesh) -> Any:
    """A gradient as JAX wants that of an operand: added up where the operand is the same on all devices, split as it is."""
    partial = tuple(sorted(have.partial - operand.varying))
    gradient = lax.psum(gradient, partial) if partial else gradient
    for dim, (axes, wanted) in enumerate(zip(have.dims, operand.dims, strict=True)):
        if axes and not wanted:
            gradient = lax.all_gather(gradient, axes, axis=dim, tiled=True, to="invarying")
    return _vary(shard(gradient, have.dims, operand.dims, mesh), operand)


def _placed(values: Sequence[Any], positions: Sequence[int], given: Sequence[Any]) -> list[Any]:
    """`values`, with those `given` at some positions."""
    return [
        dict(zip(positions, given, strict=True)).get(k, value) for k, value in enumerate(values)
    ]
