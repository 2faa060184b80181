"""Seconds of formula predictions. Aimed at: GPT-175B on 1024 GPUs under 5 ms, 1000 predictions a second, whatever the data parallelism."""

from itertools import product

import pytest

from simulator.cluster import Cluster
from simulator.formula import Execution, Machine, Transformer, predict
from simulator.prediction import Prediction

GPT = Transformer(layers=96, hidden=12288, heads=96, seq=2048, vocab=51200)


@pytest.mark.benchmark(group="formula")
@pytest.mark.parametrize("data", [16, 1500])
def test_gpt_175b(benchmark, data: int) -> None:
    plan = Execution(tensor=8, pipeline=8, data=data, global_batch=96 * data, interleave=3, recompute="full")
    machine = Machine(Cluster.load("dgx_a100_80").with_size(8 * data))
    assert benchmark(predict, GPT, plan, machine).seconds > 0


@pytest.mark.benchmark(group="formula")
def test_a_search_of_plans(benchmark) -> None:
    """All 96 ways that are tried of running GPT-175B on 512 GPUs; the machine's caches start empty each time."""
    degrees = [(t, p, 512 // (t * p)) for t, p in product((1, 2, 4, 8), (2, 4, 8, 16))]
    plans = [
        Execution(tensor=t, pipeline=p, data=d, microbatch=b, global_batch=2048, recompute=recompute)
        for (t, p, d), b, recompute in product(degrees, (1, 2, 4), ("selective", "full"))
        if 2048 % (b * d) == 0
    ]
    assert len(plans) > 90

    def search() -> list[Prediction]:
        machine = Machine(Cluster.load("dgx_a100_80").with_size(64))
        return [predict(GPT, plan, machine) for plan in plans]

    assert len(benchmark(search)) == len(plans)
