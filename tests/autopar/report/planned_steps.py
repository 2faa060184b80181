"""Small steps with their plans, cached."""

from functools import cache

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import autopar
from autopar.analysis.axis_uses import with_axis_uses
from autopar.ir.spec import LogicalMesh, Spec, replicated
from autopar.ir.step_graph import StepGraph
from autopar.planning.step_planner import make_planned
from autopar.report import PlannedStep
from autopar.sharding.options import AUTO, DATA_PARALLEL, ZERO2, ZERO3
from autopar.tracing.trace import trace
from simulator.hardware.cluster import Cluster
from tests.models import Decoder
from tests.steps import mlp_args, mlp_step
from tests.toy_costs import BandwidthOnly

OPTIONS = {
    "ShardParallel": AUTO,
    "DataParallel": DATA_PARALLEL,
    "Zero2Parallel": ZERO2,
    "Zero3Parallel": ZERO3,
}
SLOW = BandwidthOnly(bandwidth=1e9, flop_per_s=1e10)
"""Compute is expensive relative to communication, as for models that are worth splitting."""


def decoder_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, jax.Array]:
    def loss(params):
        logits = state.apply_fn(params, batch["tokens"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    value, gradients = autopar.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradients), value


def _mlp(hidden: int, layers: int, microbatches: int = 1) -> StepGraph:
    return trace(mlp_step, mlp_args((hidden,) * layers, 32, hidden), (1,), microbatches)


def _decoder() -> StepGraph:
    tokens = jnp.zeros((8, 8), jnp.int32)
    model = Decoder()
    params = model.init(jax.random.key(0), tokens)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))
    return trace(decoder_step, (state, {"tokens": tokens, "labels": tokens}), (1,))


STEPS = {
    "mlp": lambda: _mlp(64, 2),
    "wide mlp": lambda: _mlp(256, 6),
    "mlp in microbatches": lambda: _mlp(64, 2, 2),
    "decoder": _decoder,
}


@cache
def step_graph(name: str) -> StepGraph:
    return STEPS[name]()


@cache
def planned(
    step: str,
    method: str = "ShardParallel",
    shape: tuple[int, ...] = (4,),
    costs: BandwidthOnly | None = SLOW,
) -> PlannedStep:
    """Return a step with a plan of a method; `costs` None is the cost model of the cluster."""
    graph = step_graph(step)
    mesh = LogicalMesh(shape, ("x", "y")[: len(shape)])
    cluster = Cluster.load("dgx_a100_80")
    return make_planned(graph, mesh, cluster, OPTIONS[method], method, costs)


def respecced(planned: PlannedStep, specs: dict[str, Spec]) -> PlannedStep:
    """Return a step without constraints, whose inputs have `specs` or are replicated."""
    (stage,) = planned.plan.stages
    inputs = [
        v.model_copy(update={"spec": specs.get(v.path, replicated(len(v.shape)))})
        for v in stage.inputs
    ]
    bare = stage.model_copy(update={"inputs": tuple(inputs), "constraints": ()})
    plan = planned.plan.model_copy(update={"stages": (bare,)})
    return PlannedStep(planned.step, with_axis_uses(planned.step, plan))
