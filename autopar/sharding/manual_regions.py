"""Regions of `jax.shard_map`: their axes on a logical mesh, and their seconds."""

from jax.extend.core import JaxprEqn
from jax.sharding import AbstractMesh, Mesh

from autopar.ir import control_flow
from autopar.ir.array_sizes import array_bytes
from autopar.ir.flatten import flatten
from autopar.ir.graph import aval_of
from autopar.ir.spec import AnyMesh, LogicalMesh, mesh_text
from autopar.primitives import kernel_of, op_factors, record_of
from autopar.primitives.factors import Assignment
from autopar.primitives.shard_map import SHARD_MAP, region_axes
from autopar.sharding.mesh_costs import MeshCosts
from autopar.sharding.pins import ShardingError


def assignment(eqn: JaxprEqn, mesh: LogicalMesh) -> Assignment:
    """Return the only assignment under which a `shard_map` runs on `mesh`.

    Raises:
        ShardingError: the axes of its own mesh are not axes, or runs of axes, of `mesh`.
    """
    axes_of = _planned_axes(eqn, mesh)
    grouped = [tuple(axis for own in axes for axis in axes_of[own]) for axes in region_axes(eqn)]
    return (*grouped, *((),) * (len(op_factors(eqn).sizes) - len(grouped)))


def seconds(eqn: JaxprEqn, costs: MeshCosts) -> tuple[float, float]:
    """Return the seconds of a region's kernels and of its collectives."""
    axes_of = _planned_axes(eqn, costs.mesh)
    kernels = collectives = 0.0
    body = flatten(eqn.params["jaxpr"])
    for inner, times in zip(body.eqns, control_flow.repeats(body.eqns), strict=True):
        record = record_of(inner)
        is_kernel = not (record.is_inlined or record.passes_through)
        if inner.primitive in control_flow.MARKERS or not is_kernel or not inner.outvars:
            continue
        avals = [aval_of(atom) for atom in (*inner.invars, *inner.outvars)]
        sizes = [array_bytes(aval.shape, aval.dtype) for aval in avals]
        if kind := record.collective:
            along = inner.params["axes"] if "axes" in inner.params else inner.params["axis_name"]
            own = along if isinstance(along, tuple) else (along,)
            axes = tuple(axis for name in own if isinstance(name, str) for axis in axes_of[name])
            moved = sum(
                sizes[len(inner.invars) :] if kind == "all_gather" else sizes[: len(inner.invars)]
            )
            collectives += times * costs.collective(kind, moved, axes)
        else:
            kernels += times * costs.model.kernel(kernel_of(inner, sum(sizes)))
    return kernels, collectives


def on_devices(eqn: JaxprEqn, mesh: AnyMesh) -> JaxprEqn:
    """Return `eqn` on the devices of `mesh`, if it is a `shard_map` on a concrete mesh.

    Its own axes are laid over the devices in order. A region on an abstract mesh is unchanged: it
    was traced for that, and runs on the devices of the step.
    """
    if eqn.primitive.name != SHARD_MAP or isinstance(own := eqn.params["mesh"], AbstractMesh):
        return eqn
    devices: AnyMesh = own.abstract_mesh
    if isinstance(mesh, Mesh):
        devices = Mesh(
            mesh.devices.reshape(own.axis_sizes), own.axis_names, axis_types=own.axis_types
        )
    return eqn.replace(params=eqn.params | {"mesh": devices})


def _planned_axes(eqn: JaxprEqn, mesh: LogicalMesh) -> dict[str, tuple[str, ...]]:
    """Return the axes of `mesh` that make up each axis of the region's own mesh."""
    own: dict[str, int] = dict(eqn.params["mesh"].shape)
    left = [(axis, size) for axis, size in mesh.sizes.items() if size > 1]
    planned: dict[str, tuple[str, ...]] = {}
    for axis, size in own.items():
        taken, ways = [], 1
        while ways < size and left:
            name, more = left.pop(0)
            taken.append(name)
            ways *= more
        planned[axis] = tuple(taken)
        if ways != size:
            break
    else:
        if not left:
            return planned
    raise ShardingError(
        f"a shard_map of the step runs on a mesh {mesh_text(own)}, which can't be laid over the"
        f" planned mesh {mesh}: each of its axes must be an axis, or a run of axes,"
        f" of the planned one; plan on a mesh of shape {tuple(own.values())}"
    )
