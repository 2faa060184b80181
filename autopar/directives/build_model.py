"""Models built from schedules: run on shards, by XLA's partitioner, or with the planner.

With the backend "manual" the collectives of the schedule run inside `jax.shard_map`. With "gspmd"
XLA's partitioner gets the layouts of the schedule as constraints. With "auto" they are pins, and
the planner decides what the schedule leaves open.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autopar.devices import AXIS_NAMES, device_mesh, planned_mesh
from autopar.directives.definitions import CutPipelineStage, DirectiveError, ForkRng, Shard, Sync
from autopar.directives.execution import (
    ConstrainedExecutor,
    Executor,
    NamedExecutor,
    ShardExecutor,
    check_functions,
    run_model,
)
from autopar.directives.placed_model import PlacedItem, PlacedModel, PlacedRegion, PlacedSync
from autopar.directives.scheduled_model import ModelSchedule
from autopar.ir.spec import AnyMesh, partition_spec
from autopar.layering.layer_options import ManualLayerOption
from autopar.methods import (
    Devices,
    ManualShardParallel,
    PipeshardParallel,
    PlanningMethod,
    ShardParallel,
)
from autopar.microbatch.gradients import traces_whole_arrays
from autopar.pipeline.stage_options import UniformStageOption
from autopar.sharding.options import ShardingOptions

type Backend = Literal["manual", "gspmd", "auto"]


@dataclass(frozen=True)
class BuiltModel:
    """A scheduled model, ready for a training step.

    Attributes:
        apply: the model, `apply(params, *args)`, for arguments of any batch size. It is
            differentiable, and is called in the step.
        specs: the PartitionSpec of each parameter, a pytree.
        mesh: where it runs. An abstract mesh is enough to plan and to predict, and to run with the
            devices of a plan.
        method: the method for `autopar.parallelize`, `plan_step` and `predict` that keeps the
            decisions of the schedule. Steps of the backends "manual" and "gspmd" also run under
            `jax.jit`.
        same_draws: whether random numbers are those of the model on one device. With `fork_rng` and
            the backend "manual", each device draws its own.
    """

    apply: Callable[..., Any] = field(repr=False)
    specs: Any
    mesh: AnyMesh
    method: PlanningMethod
    same_draws: bool = True

    @property
    def shardings(self) -> Any:
        """The NamedSharding of each parameter. Raises ValueError for an abstract mesh."""
        mesh = device_mesh(self.mesh)
        return jax.tree.map(
            lambda spec: NamedSharding(mesh, spec),
            self.specs,
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )

    def init(self, make: Callable[..., Any], *args: Any) -> Any:
        """Return the parameters `make(*args)`, split as they are created.

        No device ever has a whole parameter that is split. `make` is `model.init`, for example.
        """
        return jax.jit(make, out_shardings=self.shardings)(*args)


def build(
    model: ModelSchedule,
    backend: Backend = "manual",
    batch_axis: str | None = None,
    mesh: AnyMesh | None = None,
    num_micro_batches: int = 1,
    devices: Devices = None,
) -> BuiltModel:
    """Return the scheduled model as a function, and a method that keeps the schedule's decisions.

    Args:
        model: the model and its directives.
        backend: "manual" runs on shards, inside `jax.shard_map`, with the collectives that the
            directives name. "gspmd" gives the shardings of parameters and of synced values to XLA's
            partitioner. "auto" pins them, and the planner decides everything else.
        batch_axis: the mesh axis over which the first dim of the model's arguments is split;
            "auto" finds it without.
        mesh: a mesh of the same axes instead of the schedule's, with the devices of this process
            for a schedule on an abstract mesh, for example.
        num_micro_batches: the number of microbatches over which a step with `autopar.grad`
            accumulates gradients.
        devices: the devices of a pipeline. Each stage takes as many of them as the mesh has, in the
            shape of the mesh. By default the stages divide the devices of the mesh.

    Raises:
        DirectiveError: The directives do not fit together, or this backend can't build them.
    """
    if backend not in ("manual", "gspmd", "auto"):
        raise DirectiveError(f"backend {backend!r}, expected 'manual', 'gspmd' or 'auto'")
    if batch_axis is not None and batch_axis not in model.mesh.axis_names:
        raise DirectiveError(
            f"batch_axis {batch_axis!r} is no axis of the mesh, which has {model.mesh.axis_names}"
        )
    if mesh is not None:
        model = model.on_mesh(planned_mesh(mesh))
    is_pipeline = bool(model.of_kind(CutPipelineStage))
    if is_pipeline:
        _check_pipeline(model, backend)
    elif devices is not None:
        raise DirectiveError(
            "devices are those of a pipeline, and the schedule has no cut_pipeline_stage; give a"
            " mesh"
        )
    placed = model.place(batch_axis, lenient=backend == "auto")
    if backend != "manual":
        check_functions(placed.items)
    pins = _pins(model, placed, named=backend == "auto")
    if is_pipeline:
        method: PlanningMethod = _pipeline_method(model, pins, num_micro_batches, devices)
    elif backend == "auto":
        options = ShardingOptions(pins=pins)
        method = ShardParallel(model.mesh, num_micro_batches, options=options)
    else:
        method = ManualShardParallel(model.mesh, num_micro_batches, pins=pins)
    layouts = dict(zip(model.graph.invars, placed.arguments, strict=True))
    specs = [partition_spec(layouts[var].dims) for var in model.graph.params]
    return BuiltModel(
        _apply(model, backend, batch_axis),
        jax.tree.unflatten(jax.tree.structure(model.params), specs),
        model.mesh,
        method,
        same_draws=backend != "manual" or not model.of_kind(ForkRng),
    )


def _check_pipeline(model: ModelSchedule, backend: Backend) -> None:
    """Raise DirectiveError unless a schedule with pipeline stages can be built."""
    if backend != "auto":
        raise DirectiveError(
            f"cut_pipeline_stage: given backend={backend!r}; expected backend='auto', which alone"
            " builds pipelines"
        )
    used = {directive.mesh_axis for directive in (*model.of_kind(Shard), *model.of_kind(Sync))}
    unknown = used.difference(AXIS_NAMES)
    if unknown:
        raise DirectiveError(
            f"cut_pipeline_stage and mesh axis {', '.join(sorted(unknown))}: each stage has a mesh"
            f" of its own, whose axes are called {', '.join(AXIS_NAMES)}; use those names"
        )


def _pipeline_method(
    model: ModelSchedule, pins: dict[str, PartitionSpec], num_micro_batches: int, devices: Devices
) -> PipeshardParallel:
    """Return a method that keeps the stages of the schedule, and pins inside the stages."""
    sizes = tuple(model.mesh.shape.values())
    if devices is None:
        stage_option = UniformStageOption()
    else:
        stage_option = UniformStageOption(None, (1, prod(sizes)), sizes)
    return PipeshardParallel(
        model.mesh if devices is None else devices,
        num_micro_batches,
        default_auto_sharding_option=ShardingOptions(pins=pins),
        layer_option=ManualLayerOption(),
        stage_option=stage_option,
    )


def _apply(model: ModelSchedule, backend: Backend, batch_axis: str | None) -> Callable[..., Any]:
    """Return the model as a function of (params, *args) that is specialized to their shapes."""
    functions: dict[Any, Callable[..., list[Any]]] = {}

    def apply(params: Any, *args: Any) -> Any:
        tree = jax.tree.structure((params, *args))
        if tree != model.graph.in_tree:
            raise DirectiveError(
                f"the model was scheduled for {model.graph.in_tree}, and is called with {tree}"
            )
        leaves = jax.tree.leaves((params, *args))
        # A trace that analyses the dependence on single examples can't look into a shard_map. It
        # gets the same function of whole arrays.
        used_backend: Backend = "auto" if traces_whole_arrays() else backend
        shapes = ((jax.typeof(leaf).shape, jax.typeof(leaf).dtype) for leaf in leaves)
        key = (used_backend, *shapes)
        if key not in functions:
            functions[key] = _flat_function(model.for_args(args), used_backend, batch_axis)
        return jax.tree.unflatten(model.graph.out_tree, functions[key](*leaves))

    return apply


def _flat_function(
    model: ModelSchedule, backend: Backend, batch_axis: str | None
) -> Callable[..., list[Any]]:
    """Return the model as a function of its parameters and arguments, flat, to flat results."""
    placed = model.place(batch_axis, lenient=backend == "auto")

    def run_on(executor: Executor) -> Callable[..., list[Any]]:
        return lambda *leaves: run_model(placed, executor, model.functions, leaves)

    argument_specs = [partition_spec(layout.dims) for layout in placed.arguments]
    match backend:
        case "manual":
            return jax.jit(
                jax.shard_map(
                    run_on(ShardExecutor(model.logical_mesh, model.functions)),
                    mesh=model.mesh,
                    in_specs=tuple(argument_specs),
                    out_specs=[partition_spec(layout.dims) for layout in placed.results],
                )
            )
        case "gspmd":
            run = run_on(ConstrainedExecutor(model.mesh))
            shardings = [NamedSharding(model.mesh, spec) for spec in argument_specs]
            return lambda *leaves: run(*map(jax.lax.with_sharding_constraint, leaves, shardings))
        case "auto":
            return run_on(NamedExecutor())


def _pins(model: ModelSchedule, placed: PlacedModel, named: bool) -> dict[str, PartitionSpec]:
    """Return the specs that a plan must keep, by a pattern of paths or a name.

    These are split parameters, wherever they are in the step's arguments, and with `named` also
    synced values.
    """
    leaves, _ = jax.tree.flatten_with_path(model.params)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    # Parameters are the first arguments.
    layouts = zip(paths, placed.arguments, strict=False)
    pins = {f"*/{path}": partition_spec(layout.dims) for path, layout in layouts if layout.split}
    if named:
        for sync in _forward_syncs(placed.items):
            pins[sync.name] = partition_spec(sync.after.dims)
    return pins


def _forward_syncs(items: tuple[PlacedItem, ...]) -> Iterator[PlacedSync]:
    for item in items:
        if isinstance(item, PlacedSync) and item.sync.mode != "bwd_post":
            yield item
        elif isinstance(item, PlacedRegion):
            yield from _forward_syncs(item.items)
