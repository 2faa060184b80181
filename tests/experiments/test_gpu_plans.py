"""Plans are timed and weighed on a device, each in a process, whatever fails or is left out."""

import json

import jax
import numpy as np
import pandas as pd
import pytest

from experiments.validation import gpu_plans
from experiments.validation.gpu_plans import BudgetCase


def test_a_plan_within_a_budget_computes_what_the_fastest_plan_does(tmp_path):
    lock = tmp_path / "lock"
    fastest, small = (
        gpu_plans.measure(BudgetCase("gpt", *options), "tiny", lock, repeat=1, least=1e-3)
        for options in ((), (0.9, "auto"))
    )
    assert small.loss == pytest.approx(fastest.loss, rel=1e-5)
    assert small.budget == pytest.approx(0.9 * fastest.planned_bytes, rel=0.02)
    assert small.planned_bytes <= small.budget
    assert small.recomputed > 0 == fastest.recomputed
    for row in (fastest, small):
        assert row.planned_bytes == pytest.approx(row.compiled_bytes, rel=0.1)
        assert min(row.planned_seconds, row.compiled_seconds, row.measured) > 0


def test_weights_are_random_and_moments_and_counters_are_zero():
    _, (state, batch) = gpu_plans.step_of("gpt", "tiny")
    first, second = gpu_plans.arguments((state, batch)), gpu_plans.arguments((state, batch))
    assert jax.tree.all(jax.tree.map(np.array_equal, first, second))
    assert jax.tree.map(jax.typeof, first) == jax.tree.map(jax.typeof, (state, batch))
    values, tokens = first
    assert values.step == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(values.opt_state))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(values.params))
    assert tokens["tokens"].max() < 64


@pytest.mark.slow
def test_a_case_that_fails_or_has_no_time_does_not_take_the_others_with_it(tmp_path):
    cases = BudgetCase("gpt"), BudgetCase("mlp", 0.1, "auto"), BudgetCase("no such model")
    cpu = {"JAX_PLATFORMS": "cpu"}
    table = gpu_plans.run(tmp_path, "tiny", cases, 1, 600.0, workers=2, environment=cpu)
    assert table["model"].tolist() == ["gpt"]
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "plans.csv")[["model"]], table[["model"]])
    failed = json.loads((tmp_path / "plans.json").read_text())["failed"]
    assert "MemoryBudgetError" in failed[str(cases[1])]
    assert "no such model" in failed[str(cases[2])]
    none = gpu_plans.run(tmp_path, "tiny", cases[:1], 1, 0.0, workers=1, environment=cpu)
    assert none.empty
