"""Strategies that make a plan, for the model's own step or for that of a model under directives."""

import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from typing import Any, override

import jax
from jax.sharding import AbstractMesh

import autopar
from autopar.directives import Backend, ModelSchedule, build
from experiments.gpt_directives import megatron, schedule_gpt, split_attention, train_step
from experiments.models import GPT, Model
from experiments.strategy import Runnable, Shape, SimulatedStep, Strategy
from simulator import Cluster, simulate

MESH_AXES = ("x", "y", "z", "w")
"""Names of the mesh axes that directives refer to."""

type Directives = Callable[[ModelSchedule], None]
"""A function that applies directives to a schedule, which split over its last mesh axis."""


class PlanningStrategy(Strategy):
    """A strategy that plans a step once, and runs or predicts that plan."""

    @abstractmethod
    def step(self, model: Model, mesh: Shape) -> tuple[Callable[..., Any], autopar.PlanningMethod]:
        """Return the step to plan, and the method to plan it with."""

    def planned_model(self, model: Model) -> Model:
        """Return the model that is planned: this one, or one that leaves the planner more open."""
        return model

    @override
    def plan(self, model: Model, mesh: Shape, cluster: Cluster) -> autopar.Plan:
        model, step, method = _planned(self, model, mesh)
        return autopar.plan_step(
            step, model.abstract_args(), method=method, cluster=cluster, mesh_shape=mesh
        )

    @override
    def prepare(
        self, model: Model, mesh: Shape, plan: autopar.Plan | None, args: tuple[Any, Any]
    ) -> Runnable:
        assert plan is not None
        model, planned, _ = _planned(self, model, mesh)
        args = jax.tree.unflatten(jax.tree.structure(model.abstract_args()), jax.tree.leaves(args))
        step = autopar.parallelize(planned, method=autopar.PlanMethod(plan))
        executable = step.get_executable(*args)
        placed = step.preshard_dynamic_args(*args)
        memory = executable.get_total_allocation_size()
        return Runnable(step, placed, lambda result: result, memory, executable.compile_seconds)

    @override
    def predict(
        self, model: Model, mesh: Shape, plan: autopar.Plan | None, cluster: Cluster
    ) -> SimulatedStep:
        assert plan is not None
        start = time.perf_counter()
        model, step, _ = _planned(self, model, mesh)
        program = autopar.compile_step(step, model.abstract_args(), plan, cluster)
        timeline = simulate(program, cluster)
        return SimulatedStep(program, timeline, time.perf_counter() - start)


@cache
def _planned(
    strategy: PlanningStrategy, model: Model, mesh: Shape
) -> tuple[Model, Callable[..., Any], autopar.PlanningMethod]:
    """Return the model that a strategy plans, its step and the method.

    The step is the same function every time, so that `autopar.shared_traces` shares its traces.
    """
    model = strategy.planned_model(model)
    return model, *strategy.step(model, mesh)


@dataclass(frozen=True, slots=True)
class Planned(PlanningStrategy):
    """The model's own step, with a method of autopar."""

    method: Callable[[], autopar.PlanningMethod]

    @override
    def runs_on(self, model: Model, mesh: Shape) -> bool:
        return True

    @override
    def step(self, model: Model, mesh: Shape) -> tuple[Callable[..., Any], autopar.PlanningMethod]:
        return model.train_step, self.method()


@dataclass(frozen=True, slots=True)
class Pipelined(PlanningStrategy):
    """A 1F1B pipeline with a stage for each row of the mesh, of equal work.

    On a mesh of (8,) each stage has one device, on (2, 4) four. The number of microbatches is the
    one with the shortest predicted step.
    """

    @override
    def runs_on(self, model: Model, mesh: Shape) -> bool:
        return mesh[0] > 1

    @override
    def step(self, model: Model, mesh: Shape) -> tuple[Callable[..., Any], autopar.PlanningMethod]:
        method = autopar.PipeshardParallel(
            num_micro_batches="auto",
            layer_option=autopar.AutoLayerOption(layer_num=mesh[0]),
            stage_option=autopar.UniformStageOption(mesh[0]),
        )
        return partial(model.train_step, value_and_grad=autopar.value_and_grad), method


@dataclass(frozen=True, slots=True)
class Automatic(PlanningStrategy):
    """Every option open: layers, stages, their meshes, microbatches, schedule and recomputation.

    The step as one program is among the candidates.
    """

    @override
    def runs_on(self, model: Model, mesh: Shape) -> bool:
        return prod(mesh) > 1

    @override
    def planned_model(self, model: Model) -> Model:
        """Return the model without its own recomputation."""
        return replace(model, remat=False) if isinstance(model, GPT) else model

    @override
    def step(self, model: Model, mesh: Shape) -> tuple[Callable[..., Any], autopar.PlanningMethod]:
        method = autopar.PipeshardParallel(
            num_micro_batches="auto",
            pipeline_schedule="auto",
            layer_option=autopar.AutoLayerOption(8, remat_layer="auto"),
            stage_option="auto",
        )
        return partial(model.train_step, value_and_grad=autopar.value_and_grad), method


@dataclass(frozen=True, slots=True)
class Scheduled(PlanningStrategy):
    """GPT under directives that split over the last mesh axis, and the batch over the first of two.

    Attributes:
        directives: applies the directives.
        backend: how the schedule is built. "auto" plans what the directives leave open; the other
            backends leave nothing to plan.
    """

    directives: Directives
    backend: Backend

    @override
    def runs_on(self, model: Model, mesh: Shape) -> bool:
        return (
            isinstance(model, GPT)
            and not model.scan_layers
            and prod(mesh) > 1
            and model.num_heads % mesh[-1] == 0
        )

    @override
    def step(self, model: Model, mesh: Shape) -> tuple[Callable[..., Any], autopar.PlanningMethod]:
        if not isinstance(model, GPT):
            raise ValueError(
                f"schedules are written for GPT; given {type(model).__name__},"
                " use an automatic strategy"
            )
        names = MESH_AXES[: len(mesh)]
        sch = schedule_gpt(model, AbstractMesh(mesh, names))
        self.directives(sch)
        built = build(sch, self.backend, batch_axis=names[0] if len(names) > 1 else None)
        return train_step(model, built), built.method


SCHEDULED: dict[str, Scheduled] = {
    "schedule_megatron": Scheduled(megatron, "manual"),
    "schedule_attention": Scheduled(split_attention, "auto"),
}
"""The strategies by directives, by their names in the sweep's configuration."""
