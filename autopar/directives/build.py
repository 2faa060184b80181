"""Scheduled models that run: by hand on shards, by XLA's partitioner, or with the planner choosing what the schedule leaves open."""

from collections.abc import Callable
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
from autopar.layering.layers import ManualLayerOption
from autopar.methods import (
    Devices,
    ManualShardParallel,
    PipeshardParallel,
    PlanningMethod,
    ShardParallel,
)
from autopar.microbatch.gradients import tells_examples
from autopar.pipeline.stage_options import UniformStageOption
from autopar.sharding.options import ShardingOptions

type Backend = Literal["manual", "gspmd", "auto"]


@dataclass(frozen=True)
class BuiltModel:
    """A scheduled model, ready for a training step.

    Attributes:
        apply: the model, `apply(params, *args)`, for arguments of any batch size; differentiable, and to be called in the step.
        specs: where parameters go, a pytree of PartitionSpecs.
        mesh: the devices; without any if abstract, which will do to plan and to predict, and to run with a plan's devices.
        method: for `autopar.parallelize`, `plan_step` and `predict`: keeps the schedule's decisions. `jax.jit` will do for a step
            of the backends "manual" and "gspmd".
        same_draws: whether random numbers are those of the model on one device: not where shards draw their own (`fork_rng`).
    """

    apply: Callable[..., Any] = field(repr=False)
    specs: Any
    mesh: AnyMesh
    method: PlanningMethod
    same_draws: bool = True

    @property
    def shardings(self) -> Any:
        """The same as `specs`, as NamedShardings. Raises ValueError if there are no devices to put parameters on."""
        mesh = device_mesh(self.mesh)
        return jax.tree.map(
            lambda spec: NamedSharding(mesh, spec),
            self.specs,
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )

    def init(self, make: Callable[..., Any], *args: Any) -> Any:
        """The parameters that `make(*args)` returns, `model.init(key, x)` say, made where they go: never whole on a device."""
        return jax.jit(make, out_shardings=self.shardings)(*args)


def build(
    model: ModelSchedule,
    backend: Backend = "manual",
    batch_axis: str | None = None,
    mesh: AnyMesh | None = None,
    num_micro_batches: int = 1,
    devices: Devices = None,
) -> BuiltModel:
    """The model, scheduled.

    Args:
        backend: "manual" runs on shards, inside `jax.shard_map`, with the collectives that the schedule names. "gspmd" tells XLA's
            partitioner where parameters and what is synchronised go. "auto" pins them, and the planner decides about the rest.
        batch_axis: the mesh axis over which the first dim of the model's arguments is split; "auto" finds that by itself.
        mesh: in place of the schedule's own, of the same axes: the devices that are here, say, for a schedule on an abstract mesh.
        num_micro_batches: parts of the batch, over which a step with `autopar.grad` accumulates gradients.
        devices: of a pipeline: each stage takes as many of them as the mesh has, as a mesh of that shape. By default the stages share
            the devices of the mesh.

    Raises:
        DirectiveError: the schedule does not fit together, or can't be built with this backend.
    """
    if backend not in ("manual", "gspmd", "auto"):
        raise DirectiveError(f"backend {backend!r}, expected 'manual', 'gspmd' or 'auto'")
    if batch_axis is not None and batch_axis not in model.mesh.axis_names:
        raise DirectiveError(
            f"batch_axis {batch_axis!r} is no axis of the mesh, which has {model.mesh.axis_names}"
        )
    model = model if mesh is None else model.on(planned_mesh(mesh))
    cuts = model.of_kind(CutPipelineStage)
    if cuts and backend != "auto":
        raise DirectiveError("cut_pipeline_stage: pipelines are built with backend='auto'")
    if devices is not None and not cuts:
        raise DirectiveError(
            "devices are those of a pipeline, and the schedule has no cut_pipeline_stage; give a mesh"
        )
    used = {each.mesh_axis for each in (*model.of_kind(Shard), *model.of_kind(Sync))}
    if cuts and (unknown := used.difference(AXIS_NAMES)):
        raise DirectiveError(
            f"cut_pipeline_stage and mesh axis {', '.join(sorted(unknown))}: each stage has a mesh of its own, whose axes are"
            f" called {', '.join(AXIS_NAMES)}; use those names"
        )
    placed = model.placed(batch_axis, lenient=backend == "auto")
    if backend != "manual":
        check_functions(placed.items)
    pins = _pins(model, placed, named=backend == "auto")
    options = ShardingOptions(pins=pins)
    if cuts:
        sizes = tuple(model.mesh.shape.values())
        method: PlanningMethod = PipeshardParallel(
            model.mesh if devices is None else devices,
            num_micro_batches,
            default_auto_sharding_option=options,
            layer_option=ManualLayerOption(),
            stage_option=UniformStageOption()
            if devices is None
            else UniformStageOption(None, (1, prod(sizes)), sizes),
        )
    elif backend == "auto":
        method = ShardParallel(model.mesh, num_micro_batches, options=options)
    else:
        method = ManualShardParallel(model.mesh, num_micro_batches, pins=pins)
    specs = dict(zip(model.graph.invars, placed.arguments, strict=True))
    specs = [partition_spec(specs[var].dims) for var in model.graph.params]
    return BuiltModel(
        _apply(model, backend, batch_axis),
        jax.tree.unflatten(jax.tree.structure(model.params), specs),
        model.mesh,
        method,
        same_draws=backend != "manual" or not model.of_kind(ForkRng),
    )


def _apply(model: ModelSchedule, backend: Backend, batch_axis: str | None) -> Callable[..., Any]:
    known: dict[Any, Callable[..., list[Any]]] = {}

    def apply(params: Any, *args: Any) -> Any:
        if (tree := jax.tree.structure((params, *args))) != model.graph.in_tree:
            raise DirectiveError(
                f"the model was scheduled for {model.graph.in_tree}, and is called with {tree}"
            )
        leaves = jax.tree.leaves((params, *args))
        how: Backend = "auto" if tells_examples() else backend  # the same function, of whole arrays
        key = (how, *((jax.typeof(leaf).shape, jax.typeof(leaf).dtype) for leaf in leaves))
        if key not in known:
            known[key] = _runner(model.for_args(args), how, batch_axis)
        return jax.tree.unflatten(model.graph.out_tree, known[key](*leaves))

    return apply


def _runner(
    model: ModelSchedule, backend: Backend, batch_axis: str | None
) -> Callable[..., list[Any]]:
    """The model as a function of its parameters and arguments as a flat list."""
    placed = model.placed(batch_axis, lenient=backend == "auto")

    def on(machine: Executor) -> Callable[..., list[Any]]:
        return lambda *leaves: run_model(placed, machine, model.functions, leaves)

    match backend:
        case "manual":
            return jax.jit(
                jax.shard_map(
                    on(ShardExecutor(model.logical_mesh, model.functions)),
                    mesh=model.mesh,
                    in_specs=tuple(partition_spec(each.dims) for each in placed.arguments),
                    out_specs=[partition_spec(each.dims) for each in placed.results],
                )
            )
        case "gspmd":
            run, specs = (
                on(ConstrainedExecutor(model.mesh)),
                [partition_spec(each.dims) for each in placed.arguments],
            )
            shardings = [NamedSharding(model.mesh, spec) for spec in specs]
            return lambda *leaves: run(*map(jax.lax.with_sharding_constraint, leaves, shardings))
        case "auto":
            return on(NamedExecutor())


def _pins(model: ModelSchedule, placed: PlacedModel, named: bool) -> dict[str, PartitionSpec]:
    """What a plan must keep: parameters that are split, wherever the step has them, and named values that are synchronised."""
    leaves, _ = jax.tree.flatten_with_path(model.params)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    layouts = zip(paths, placed.arguments, strict=False)  # parameters come first
    pins = {f"*/{path}": partition_spec(layout.dims) for path, layout in layouts if layout.split}
    if named:
        pins.update((each.name, partition_spec(each.after.dims)) for each in _synced(placed.items))
    return pins


def _synced(items: tuple[PlacedItem, ...]) -> list[PlacedSync]:
    found: list[PlacedSync] = []
    for item in items:
        if isinstance(item, PlacedSync) and item.sync.mode != "bwd_post":
            found.append(item)
        elif isinstance(item, PlacedRegion):
            found += _synced(item.items)
    return found
