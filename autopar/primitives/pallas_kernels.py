"""Pallas kernels: the grid of a `pallas_call` says how its arrays may be sharded.

A step of the grid computes one block of each result. Where the index maps of all arrays send an
axis of the grid to a dim of blocks, the steps along it are independent of each other, as those over
the batch and the heads of an attention kernel. Each device then runs the part of the grid that its
shards hold. The other axes are whole: those that the kernel asks for its position in, those along
which steps add to the same block or pass scratch memory on, and those with any other index map.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun, jaxprs_in_params

from autopar.ir.array_sizes import array_bytes, hlo_dtype
from autopar.ir.evaluate import bind
from autopar.ir.graph import all_eqns, aval_of, variables
from autopar.ir.spec import Spec
from autopar.primitives.equation_work import Shapes
from autopar.primitives.factors import Dims, FactorBuilder, OpFactors
from autopar.primitives.registry import PrimitiveRecord, record_of
from autopar.primitives.rule_helpers import replicated, shape_of
from simulator.work import Kernel


@dataclass(frozen=True, slots=True)
class _BlockDim:
    """A dim of an array, blocks of which follow an axis of the grid.

    Attributes:
        axis: the axis of the grid.
        steps_per_block: consecutive steps along the axis that have the same block, as the query
            heads that share a head of keys.
    """

    axis: int
    steps_per_block: int


type _ArrayBlocks = tuple[_BlockDim | None, ...]
"""For each dim of an array how its blocks follow the grid; None: not as a `_BlockDim`."""


def _factors(eqn: JaxprEqn) -> OpFactors:
    """Give each independent axis of the grid a factor, and one to the steps that share a block."""
    blocks, axes = _sharable(eqn)
    if not axes:
        return replicated(eqn)
    grid = eqn.params["grid_mapping"].grid
    build = FactorBuilder()
    outer = {axis: build.new(grid[axis] // steps) for axis, steps in axes.items()}
    inner = {axis: build.new(steps, "whole") for axis, steps in axes.items()}

    def dims(shape: tuple[int, ...], array: _ArrayBlocks) -> Dims:
        return tuple(map(dim_factors, shape, array))

    def dim_factors(size: int, block: _BlockDim | None) -> tuple[int, ...]:
        if block is None or block.axis not in axes:
            return build.new(size, "whole")
        shared = inner[block.axis] if block.steps_per_block == 1 else ()
        num_blocks = grid[block.axis] // block.steps_per_block
        return (*outer[block.axis], *shared, *build.new(size // num_blocks, "whole"))

    num_scalars = _num_scalars(eqn)
    operands = [
        *(build.dims(shape_of(atom), "whole") for atom in eqn.invars[:num_scalars]),
        *map(dims, map(shape_of, eqn.invars[num_scalars:]), blocks),
    ]
    results = map(dims, map(shape_of, eqn.outvars), blocks[-len(eqn.outvars) :])
    return build.build(operands, list(results), decides=True)


@lru_cache(maxsize=256)
def _sharable(eqn: JaxprEqn) -> tuple[list[_ArrayBlocks], dict[int, int]]:
    """Return the blocks of each array, and the sharable axes of the grid.

    An axis is mapped to the number of its consecutive steps that stay on one device.
    """
    mapping = eqn.params["grid_mapping"]
    if not all(isinstance(size, int) for size in mapping.grid) or mapping.grid_names is not None:
        return [], {}
    if eqn.params["mesh"] is not None or eqn.effects:
        return [], {}
    blocks = [_array_blocks(block, mapping.grid) for block in mapping.block_mappings]
    axes: dict[int, int] = {}
    for axis in range(len(mapping.grid)):
        steps = _steps_together(mapping.block_mappings, blocks, axis, mapping.num_outputs)
        if steps and not _positional(eqn, axis) and not _passes_scratch(eqn, axis):
            axes[axis] = steps
    return blocks, axes


def _steps_together(
    mappings: Sequence[Any], blocks: Sequence[_ArrayBlocks], axis: int, num_results: int
) -> int | None:
    """Return the number of consecutive steps along an axis that need to run on one device.

    None stands for an axis that is whole: an array has no `_BlockDim`, or several, where its blocks
    depend on the axis, or a result has the same blocks in all steps.
    """
    steps = set()
    for position, (mapping, array) in enumerate(zip(mappings, blocks, strict=True)):
        along = [block for block in array if block is not None and block.axis == axis]
        dependent = sum(axis in reads for reads in _axes_of_dims(mapping.index_map_jaxpr))
        is_result = position >= len(mappings) - num_results
        if len(along) != dependent or len(along) > 1 or (is_result and not along):
            return None
        steps.update(block.steps_per_block for block in along)
    together = max(steps)
    return together if steps <= {1, together} else None


def _array_blocks(mapping: Any, grid: Sequence[int]) -> _ArrayBlocks:
    """Return how the blocks of an array follow the grid."""
    shape = mapping.array_aval.shape
    index_map = mapping.index_map_jaxpr
    if mapping.transforms or len(index_map.outvars) != len(shape):
        return (None,) * len(shape)
    dims = []
    for dim, (size, block) in enumerate(zip(shape, mapping.block_shape, strict=True)):
        dims.append(None)
        axes = _axes_of_dims(index_map)[dim]
        block_size = {"Blocked": getattr(block, "block_size", None), "Squeezed": 1}.get(
            type(block).__name__
        )
        if block_size is None or len(axes) != 1:
            continue
        (axis,) = axes
        num_blocks, rest = divmod(size, block_size)
        if axis < len(grid) and not rest and grid[axis] % num_blocks == 0:
            steps = grid[axis] // num_blocks
            if _visits_in_order(index_map, dim, axis, grid[axis], steps):
                dims[-1] = _BlockDim(axis, steps)
    return tuple(dims)


@lru_cache(maxsize=1024)
def _axes_of_dims(index_map: Jaxpr) -> list[set[int]]:
    """Return for each result of an index map the positions of the operands that it depends on."""
    reads: dict[Var, set[int]] = {var: {k} for k, var in enumerate(index_map.invars)}
    for eqn in index_map.eqns:
        operands = [reads.get(var, set()) for var in variables(eqn.invars)]
        reads.update((var, set().union(*operands)) for var in eqn.outvars)
    return [
        set() if isinstance(atom, Literal) else reads.get(atom, set()) for atom in index_map.outvars
    ]


@lru_cache(maxsize=1024)
def _visits_in_order(index_map: Jaxpr, dim: int, axis: int, num_steps: int, steps: int) -> bool:
    """Return whether step i along `axis` has block i // `steps`, where dim depends on it alone."""
    if index_map.outvars[dim] is index_map.invars[axis]:
        return steps == 1
    if any(map(_is_reference, index_map.invars)):
        return False  # reads scalars that only a run has
    operands = [np.int32(0)] * len(index_map.invars)

    def block_of(step: Any) -> Any:
        return jaxpr_as_fun(index_map)(*operands[:axis], step, *operands[axis + 1 :])[dim]

    positions = np.arange(num_steps, dtype=np.int32)
    with jax.ensure_compile_time_eval():
        return np.array_equal(jax.vmap(block_of)(positions), positions // steps)


def _positional(eqn: JaxprEqn, axis: int) -> bool:
    """Return whether the kernel asks for its position along an axis, or for the axis's size.

    A kernel does not see the axes that `jax.vmap` adds to its grid.
    """
    mapping = eqn.params["grid_mapping"]
    seen = [other for other in range(len(mapping.grid)) if other not in mapping.vmapped_dims]
    return axis in seen and any(
        inner.primitive.name in ("program_id", "num_programs")
        and inner.params["axis"] == seen.index(axis)
        for inner in all_eqns(eqn.params["jaxpr"])
    )


def _passes_scratch(eqn: JaxprEqn, axis: int) -> bool:
    """Return whether a step may read scratch memory that an earlier step along the axis wrote."""
    mapping = eqn.params["grid_mapping"]
    semantics = getattr(eqn.params["compiler_params"], "dimension_semantics", None)
    if not mapping.scratch_avals or axis in mapping.vmapped_dims:
        return False
    return semantics is None or "parallel" not in str(semantics[axis]).lower()


def _local(
    eqn: JaxprEqn,
    _in: Sequence[Spec],
    _out: Sequence[Spec],
    shapes: Shapes,
    shards: Sequence[Any],
) -> list[Any]:
    """Run the part of the grid that computes this device's shards."""
    mapping = eqn.params["grid_mapping"]
    arrays = [*(shard.shape for shard in shards[_num_scalars(eqn) :]), *shapes]
    local = mapping.replace(
        grid=_local_grid(eqn, arrays),
        block_mappings=tuple(
            block.replace(array_aval=block.array_aval.update(shape=tuple(shape)))
            for block, shape in zip(mapping.block_mappings, arrays, strict=True)
        ),
    )
    avals = zip(eqn.params["out_avals"], shapes, strict=True)
    out_avals = tuple(aval.update(shape=tuple(shape)) for aval, shape in avals)
    return bind(eqn, shards, grid_mapping=local, out_avals=out_avals)


def _local_grid(eqn: JaxprEqn, arrays: Shapes) -> tuple[int, ...]:
    """Return the part of the grid that one device runs.

    Args:
        eqn: the `pallas_call`.
        arrays: shapes of the shards of its operands, without scalars, and of its results.
    """
    mapping = eqn.params["grid_mapping"]
    grid = list(mapping.grid)
    blocks, axes = _sharable(eqn)
    for array, whole, shape in zip(blocks, mapping.block_mappings, arrays, strict=bool(blocks)):
        for block, size, part in zip(array, whole.array_aval.shape, shape, strict=True):
            if block is not None and block.axis in axes and part:
                grid[block.axis] = mapping.grid[block.axis] * part // size
    return tuple(grid)


def _num_scalars(eqn: JaxprEqn) -> int:
    """Return the number of operands before those with blocks: scalars that are prefetched."""
    mapping = eqn.params["grid_mapping"]
    return len(eqn.invars) - mapping.num_inputs


def _kernel(eqn: JaxprEqn, operands: Shapes, results: Shapes, moved_bytes: float) -> Kernel:
    """Return the kernel with the FLOP of one step times the steps of the grid on one device."""
    dtype = hlo_dtype(aval_of(eqn.outvars[0]).dtype)
    if not _has_static_grid(eqn.params):
        name = name_of(eqn.params)
        return Kernel(name, "memory", 0.0, moved_bytes, dtype, unmodelled=name)
    arrays = [*operands[_num_scalars(eqn) :], *results]
    kernel = _grid_kernel(eqn.params, _local_grid(eqn, arrays), arrays, dtype)
    return replace(kernel, bytes=min(kernel.bytes, moved_bytes))


def describe_call(params: Mapping[str, Any], dtype: Any) -> dict[str, str | float]:
    """Return the name of a `pallas_call` with its cost, if its grid is known.

    Args:
        params: its parameters, with the grid and the arrays of one device.
        dtype: the dtype of its first result.
    """
    name = name_of(params)
    if not _has_static_grid(params):
        return {"name": name}
    mapping = params["grid_mapping"]
    arrays = [block.array_aval.shape for block in mapping.block_mappings]
    kernel = _grid_kernel(params, mapping.grid, arrays, hlo_dtype(dtype))
    cost = {"flops": kernel.flops, "bytes": kernel.bytes, "kind": kernel.kind}
    return {"name": name, **cost, "dtype": kernel.dtype}


def name_of(params: Mapping[str, Any]) -> str:
    """Return the name of a `pallas_call`, or of its function if it has none."""
    return params["name"] or params["jaxpr"].debug_info.func_name


def _has_static_grid(params: Mapping[str, Any]) -> bool:
    return all(isinstance(size, int) for size in params["grid_mapping"].grid)


def _grid_kernel(
    params: Mapping[str, Any], grid: Sequence[int], arrays: Shapes, dtype: str
) -> Kernel:
    """Return the kernel with the FLOP of one step times the steps, and the bytes of its blocks.

    Args:
        params: parameters of the `pallas_call`.
        grid: the part of the grid that one device runs.
        arrays: shapes of the shards of operands, without scalars, and of results.
        dtype: HLO's name of the dtype.
    """
    mapping, body, estimate = (params[k] for k in ("grid_mapping", "jaxpr", "cost_estimate"))
    part = prod(grid) / max(1, prod(mapping.grid))
    flops = part * estimate.flops if estimate else prod(grid) * _flops(body)
    moved = part * estimate.bytes_accessed if estimate else 0.0
    if not moved:
        blocks = zip(mapping.block_mappings, arrays, strict=True)
        moved = float(sum(_bytes_of_blocks(block, shape, grid) for block, shape in blocks))
    contracts = any(record_of(inner).is_contraction for inner in all_eqns(body))
    return Kernel(name_of(params), "gemm" if contracts else "memory", flops, moved, dtype)


def _bytes_of_blocks(mapping: Any, shape: Sequence[int], grid: Sequence[int]) -> int:
    """Return the bytes of the blocks of an array that the grid visits.

    A block that several steps read counts once: the L2 cache keeps it.
    """
    sizes = [getattr(block, "block_size", 1) or 1 for block in mapping.block_shape]
    whole = array_bytes(tuple(shape), mapping.array_aval.dtype)
    if len(sizes) != len(shape) or mapping.transforms:
        return whole
    axes = set().union(*_axes_of_dims(mapping.index_map_jaxpr))
    reads_scalars = any(axis >= len(grid) for axis in axes)
    steps = prod(grid if reads_scalars else [grid[axis] for axis in axes])
    return min(whole, steps * array_bytes(tuple(sizes), mapping.array_aval.dtype))


@lru_cache(maxsize=256)
def _flops(body: Jaxpr) -> float:
    """Return the FLOP of a kernel's body: of all branches the most, of loops every iteration."""
    total = 0.0
    for eqn in body.eqns:
        inner = [_flops(jaxpr) for jaxpr in jaxprs_in_params(eqn.params)]
        match eqn.primitive.name:
            case "scan":
                total += eqn.params["length"] * sum(inner)
            case "while":
                total += _iterations(eqn) * sum(inner)
            case _ if inner:
                total += max(inner)
            case _ if eqn.outvars and not any(map(_is_reference, eqn.invars)):
                operands, results = map(shape_of, eqn.invars), map(shape_of, eqn.outvars)
                total += record_of(eqn).work(eqn, list(operands), list(results), 0.0).flops
    return total


def _iterations(loop: JaxprEqn) -> float:
    """Return the most iterations of a while_loop that reads its references part by part."""
    parts = [
        prod(_reference_shape(eqn.invars[0])) / max(prod(aval_of(eqn.outvars[0]).shape), 1)
        for jaxpr in jaxprs_in_params(loop.params)
        for eqn in all_eqns(jaxpr)
        if eqn.invars and eqn.outvars and _is_reference(eqn.invars[0])
    ]
    return max(parts, default=1.0)


def _is_reference(atom: Any) -> bool:
    return hasattr(atom.aval, "inner_aval")


def _reference_shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


RECORDS = {
    "pallas_call": PrimitiveRecord(
        factors=_factors,
        local=_local,
        work=_kernel,
        runs_body=True,
        runs_on_shards=lambda eqn: bool(_sharable(eqn)[1]),
    )
}
