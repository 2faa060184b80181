"""Seconds from a training step to its jaxpr, and from there to a plan."""

import pytest

from autopar.devices import logical_mesh
from autopar.planning import make_plan
from autopar.sharding.options import AUTO
from autopar.trace import StepGraph, trace
from experiments.models import build_model
from simulator.cluster import Cluster

GPT_125M = {"num_layers": 12, "hidden_size": 768, "num_heads": 12, "sequence_length": 1024, "vocab_size": 51200}
MODELS = {
    "mlp 2048": build_model("mlp", {"dim": 2048, "num_layers": 10, "batch_size": 2048}),
    "gpt 125M": build_model("gpt", GPT_125M | {"batch_size": 8}),
}


@pytest.fixture(scope="module", params=MODELS)
def step(request) -> StepGraph:
    model = MODELS[request.param]
    return trace(model.train_step, model.abstract_args(), (1,))


@pytest.mark.benchmark(group="trace")
@pytest.mark.parametrize("name", MODELS)
def test_trace(benchmark, name):
    model = MODELS[name]
    benchmark.pedantic(trace, (model.train_step, model.abstract_args(), (1,)), rounds=3)


@pytest.mark.benchmark(group="plan")
@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=str)
def test_plan(benchmark, step, shape):
    cluster = Cluster.load("p3.16xlarge")
    benchmark.pedantic(make_plan, (step, logical_mesh(shape), cluster, AUTO, "ShardParallel"), rounds=3)
