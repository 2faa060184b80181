"""Strategies that make a plan: a method of autopar for the model's own step, or for the step of a model scheduled by hand."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from jax.sharding import AbstractMesh

import autopar
from autopar.directives import Backend, ModelSchedule, build
from experiments.gpt_directives import megatron, schedule_gpt, split_attention, train_step
from experiments.models import GPT, Model
from experiments.strategy import Runnable, Shape, SimulatedStep
from simulator import Cluster

MESH_AXES = ("x", "y", "z", "w")
"""Names of the mesh axes that directives refer to."""

type Directives = Callable[[ModelSchedule, str], None]
"""What a schedule says of a model, splitting over the mesh axis of that name."""


class PlanningStrategy(ABC):
    """A step that is planned once, and the same plan run or predicted."""

    @abstractmethod
    def runs_on(self, model: Model, mesh: Shape) -> bool:
        """See `experiments.strategy.Strategy`."""

    @abstractmethod
    def step(self, model: Model, mesh: Shape) -> tuple[Callable[..., Any], autopar.PlanningMethod]:
        """What is planned, and how."""

    def plan(self, model: Model, mesh: Shape, cluster: Cluster) -> autopar.Plan:
        step, method = self.step(model, mesh)
        return autopar.plan_step(
            step, model.abstract_args(), method=method, cluster=cluster, mesh_shape=mesh
        )

    def prepare(
        self, model: Model, mesh: Shape, plan: autopar.Plan | None, args: tuple[Any, Any]
    ) -> Runnable:
        assert plan is not None
        step = autopar.parallelize(self.step(model, mesh)[0], method=autopar.PlanMethod(plan))
        executable = step.get_executable(*args)
        placed = step.preshard_dynamic_args(*args)
        memory, seconds = executable.get_total_allocation_size(), executable.compile_seconds
        return Runnable(step, placed, lambda result: result, memory, seconds)

    def predict(
        self, model: Model, mesh: Shape, plan: autopar.Plan | None, cluster: Cluster
    ) -> SimulatedStep:
        assert plan is not None
        start = time.perf_counter()
        timeline = autopar.simulate(self.step(model, mesh)[0], model.abstract_args(), plan, cluster)
        return SimulatedStep(timeline, time.perf_counter() - start)


@dataclass(frozen=True, slots=True)
class Planned(PlanningStrategy):
    """The model's own step, with a method of autopar."""

    method: Callable[[], autopar.PlanningMethod]

    def runs_on(self, model: Model, mesh: Shape) -> bool:
        return True

    def step(self, model: Model, mesh: Shape) -> tuple[Callable[..., Any], autopar.PlanningMethod]:
        return model.train_step, self.method()


@dataclass(frozen=True, slots=True)
class Pipelined(PlanningStrategy):
    """A pipeline (1F1B) of as many stages as the mesh has rows, equal in work: of one device each on (8,), of four on (2, 4).

    Stages are planned one by one, and so many microbatches taken as are predicted to be fastest.
    """

    def runs_on(self, model: Model, mesh: Shape) -> bool:
        return mesh[0] > 1

    def step(self, model: Model, mesh: Shape) -> tuple[Callable[..., Any], autopar.PlanningMethod]:
        method = autopar.PipeshardParallel(
            num_micro_batches="auto",
            layer_option=autopar.AutoLayerOption(layer_num=mesh[0]),
            stage_option=autopar.UniformStageOption(mesh[0]),
        )
        return partial(model.train_step, value_and_grad=autopar.value_and_grad), method


@dataclass(frozen=True, slots=True)
class Scheduled(PlanningStrategy):
    """GPT with directives for it, which split over the last mesh axis; the first of two has the batch.

    Attributes:
        backend: "auto" plans what the directives leave open, others leave nothing to plan.
    """

    directives: Directives
    backend: Backend

    def runs_on(self, model: Model, mesh: Shape) -> bool:
        return (
            isinstance(model, GPT)
            and not model.scan_layers
            and prod(mesh) > 1
            and model.num_heads % mesh[-1] == 0
        )

    def step(self, model: Model, mesh: Shape) -> tuple[Callable[..., Any], autopar.PlanningMethod]:
        if not isinstance(model, GPT):
            raise ValueError(
                f"schedules are written for GPT; given {type(model).__name__}, use an automatic strategy"
            )
        names = MESH_AXES[: len(mesh)]
        sch = schedule_gpt(model, AbstractMesh(mesh, names))
        self.directives(sch, names[-1])
        built = build(sch, self.backend, batch_axis=names[0] if len(names) > 1 else None)
        return train_step(model, built), built.method


SCHEDULED: dict[str, Scheduled] = {
    "schedule_megatron": Scheduled(megatron, "manual"),
    "schedule_attention": Scheduled(split_attention, "auto"),
}
"""By the names that the sweep's configuration gives them."""
