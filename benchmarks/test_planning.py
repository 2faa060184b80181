"""Seconds of tracing a training step, and of planning it on one mesh.

Targets for trace and plan on two cores, with a proven gap under 1 %: GPT-2.6B on (2, 4) 10 s,
GPT-39B 15 s, GPT-2.6B with its layers in one scan 3 s.
"""

from dataclasses import replace

import pytest

from autopar.devices import logical_mesh
from autopar.ir.step_graph import StepGraph
from autopar.planning.step_planner import make_planned
from autopar.sharding.options import AUTO
from autopar.tracing.trace import trace
from experiments.models import build_model
from experiments.models.model_sizes import gpt
from simulator.hardware.cluster import Cluster

GPT_125M = {
    "num_layers": 12,
    "hidden_size": 768,
    "num_heads": 12,
    "sequence_length": 1024,
    "vocab_size": 51200,
}
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
    benchmark.pedantic(
        make_planned, (step, logical_mesh(shape), cluster, AUTO, "ShardParallel"), rounds=3
    )


PUBLISHED = {
    "gpt 2.6B scanned (2, 4)": (
        replace(gpt(2560, 32, 32, batch_size=32), scan_layers=True),
        (2, 4),
        Cluster.load("p3.16xlarge"),
    ),
    "gpt 2.6B (2, 4)": (gpt(2560, 32, 32, batch_size=32), (2, 4), Cluster.load("p3.16xlarge")),
    "gpt 39B (2, 4)": (gpt(8192, 48, 64, batch_size=8), (2, 4), Cluster.load("dgx_a100_80")),
    "gpt 39B (8, 8)": (
        gpt(8192, 48, 64, batch_size=64),
        (8, 8),
        Cluster.load("dgx_a100_80").with_size(hosts=8),
    ),
}
"""Models of Alpa's suite (OSDI'22, section 8), unrolled unless scanned; mesh shapes; clusters."""


@pytest.mark.benchmark(group="trace and plan")
@pytest.mark.parametrize("name", PUBLISHED)
def test_trace_and_plan(benchmark, name):
    model, shape, cluster = PUBLISHED[name]
    arguments = model.abstract_args()

    def run():
        step = trace(model.train_step, arguments, (1,))
        return make_planned(step, logical_mesh(shape), cluster, AUTO, "ShardParallel").plan

    plan = benchmark.pedantic(run, rounds=1)
    assert plan.gap < 0.01
