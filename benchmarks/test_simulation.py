"""Seconds from compiled HLO to a timeline."""

import pytest

import autopar
from autopar.lower import compile_program
from autopar.trace import trace
from experiments.models import build_model
from simulator.cluster import Cluster
from simulator.engine import simulate

CLUSTER = Cluster.load("p3.16xlarge")


@pytest.fixture(scope="module")
def program():
    model = build_model("mlp", {"dim": 2048, "num_layers": 10, "batch_size": 2048})
    args = model.abstract_args()
    plan = autopar.plan_step(model.train_step, args, cluster=CLUSTER, mesh_shape=(8,))
    return compile_program(trace(model.train_step, args, (1,)), plan, CLUSTER)[0]


@pytest.mark.benchmark(group="simulate")
def test_simulate(benchmark, program):
    benchmark(simulate, program, CLUSTER)
