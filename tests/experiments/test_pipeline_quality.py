"""Rates count the FLOP that Alpa counts, and plans fit in memory as in the paper."""

import csv
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.models.model_sizes import gpt, moe
from experiments.validation.pipeline_quality import AlpaPlan, inter_only, step_flops

TABLE = Path(__file__).parents[2] / "results/paper/alpa_weak_scaling.csv"


def products(jaxpr) -> float:
    """Return the FLOP of all matrix products in a jaxpr and its inner jaxprs."""
    total = 0.0
    for eqn in jaxpr.eqns:
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            total += products(inner) if hasattr(inner, "eqns") else 0.0
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            inner = np.prod([eqn.invars[0].aval.shape[dim] for dim in contracted])
            total += 2.0 * eqn.outvars[0].aval.size * inner
    return total


@pytest.mark.parametrize("model", [gpt(128, 2, 2, 4), moe(64, 2, 8, 4)], ids=["gpt", "moe"])
def test_a_step_counts_each_product_forward_twice_and_backward_once(model) -> None:
    state, batch = model.abstract_args()
    forward = products(jax.make_jaxpr(state.apply_fn)(state.params, batch["tokens"]))
    head = 2.0 * 4 * 1024 * model.hidden_size * model.vocab_size
    assert step_flops(model) == pytest.approx(4 * (forward - head) + 3 * head)


def test_stages_of_one_gpu_are_as_small_as_blocks_allow() -> None:
    many = AlpaPlan("moe", (2048, 16, 48), 128, 8, ((1, (1, 4), (4, 1)),) * 8)
    assert inter_only(many) == AlpaPlan("moe", (2048, 16, 48), 256, 16, ((1, (1, 1), (1, 1)),) * 16)
    few = AlpaPlan("moe", (768, 16, 16), 32, 8, ((4, (1, 2), (2, 1)),) * 2)
    assert inter_only(few).stages == ((4, (1, 1), (1, 1)),) * 4


def test_in_the_committed_table_exactly_that_runs_out_of_memory_which_did() -> None:
    rows = list(csv.DictReader(TABLE.read_text().splitlines()))
    of_alpa = [row for row in rows if row["series"] == "Alpa's plans"]
    assert {(row["family"], row["gpus"]) for row in of_alpa} == {
        (m, n) for m in ("gpt", "moe") for n in ("4", "8", "16", "32", "64")
    }
    alone = [r for r in rows if (r["family"], r["series"]) == ("moe", "inter-operator only")]
    assert [row for row in of_alpa + alone if row["fits"] != row["published_fits"]] == []
    assert max(abs(float(row["ours"]) / float(row["published"]) - 1) for row in of_alpa) < 0.4
    for family in ("gpt", "moe"):  # more GPUs are faster, as in the figure
        rates = [float(row["ours"]) for row in of_alpa if row["family"] == family]
        assert rates == sorted(rates)
