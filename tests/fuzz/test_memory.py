"""Plans within a budget need no more than that when XLA compiles them for GPUs.

XLA orders kernels otherwise than the planner expects in a few programs, and its heap has gaps. So
one program in twenty may need up to 5 % more, as in `results/tables/memory_budgets.csv`.
"""

import random
import warnings
from dataclasses import replace
from functools import partial

import pytest

import autopar
from autopar.planning.stage_problem import NoStagesError
from experiments.models import GPT, LSTM, MLP
from tests.fuzz.outcomes import Outcomes

pytestmark = pytest.mark.fuzz

CLUSTER = "dgx_a100_80"
LAYERS = autopar.AutoLayerOption(2)


def random_model(draw):
    dtype = draw.choice(("float32", "bfloat16"))
    match draw.randrange(3):
        case 0:
            return MLP(
                dim=draw.choice((256, 512, 1024)),
                num_layers=draw.choice((2, 4)),
                batch_size=draw.choice((256, 1024)),
                compute_dtype=dtype,
            )
        case 1:
            return GPT(
                num_layers=2,
                hidden_size=draw.choice((128, 256)),
                num_heads=4,
                sequence_length=draw.choice((64, 128)),
                vocab_size=draw.choice((1024, 4096)),
                batch_size=32,
                compute_dtype=dtype,
                remat=draw.random() < 0.5,
            )
        case _:
            return LSTM(
                num_layers=2, hidden_size=256, sequence_length=16, vocab_size=1024, batch_size=64
            )


def random_method(draw):
    count = draw.choice((1, 1, 2))
    return draw.choice((
        autopar.ShardParallel(8, count),
        autopar.ShardParallel((2, 4), count),
        autopar.DataParallel(8, count),
        autopar.Zero2Parallel(8, count),
        autopar.Zero3Parallel(8, count),
        autopar.PipeshardParallel(8, 2, layer_option=LAYERS),
        autopar.PipeshardParallel(8, 4, pipeline_schedule="gpipe", layer_option=LAYERS),
    ))  # fmt: skip


@pytest.mark.parametrize("part", range(2))
def test_what_is_compiled_is_within_the_budget_of_the_plan(part, record_property):
    outcomes = Outcomes()
    for seed in range(30 * part, 30 * (part + 1)):
        draw = random.Random(seed)
        model, method = random_model(draw), random_method(draw)
        step, args = (
            partial(model.train_step, value_and_grad=autopar.value_and_grad),
            model.abstract_args(),
        )

        share = draw.uniform(1.0, 1.3)

        def attempt(model=model, step=step, args=args, method=method, share=share):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                free = autopar.plan_step(step, args, cluster=CLUSTER, method=method)
                budget = share * free.predicted_bytes
                plan = autopar.plan_step(
                    step, args, cluster=CLUSTER, method=replace(method, memory_budget=budget)
                )
                used = max(
                    memory.total for memory in autopar.simulate(step, args, plan, CLUSTER).memory
                )
            if used <= budget:
                return "within"
            if used <= 1.05 * budget:
                return "slightly over"
            return f"OVER by {used / budget - 1:.1%}: {method} of {model}"

        outcomes.add(f"seed {seed}", attempt, (autopar.MemoryBudgetError, NoStagesError), 300)
    record_property(f"outcomes of budgets, part {part}", dict(outcomes.counts))
    assert not outcomes.faults, "\n".join(outcomes.faults)
    assert outcomes.counts["within"] > 10
    assert outcomes.counts["slightly over"] <= 0.05 * outcomes.counts.total()
