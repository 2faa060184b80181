"""A scheduled GPT is tuned; on predicted CPUs by the plans' estimates, without compiling."""

from itertools import combinations

import pytest
from typer.testing import CliRunner

import autopar
from autopar.tuning import SearchSpace
from experiments.models import GPT
from experiments.tutorials.tune_gpt import app, candidate_of, knobs_of

MODEL = GPT(
    num_layers=2, hidden_size=32, num_heads=4, sequence_length=8, vocab_size=64, batch_size=4
)


def test_knobs_share_out_the_devices_and_the_batch() -> None:
    space = SearchSpace(knobs_of(MODEL, 4))
    candidates = list(space)
    assert {c["tensor"] * c["stages"] * c["data"] for c in candidates} == {4}
    assert {(c["tensor"], c["stages"]) for c in candidates} == {
        (1, 1),
        (1, 2),
        (2, 1),
        (2, 2),
        (4, 1),
    }
    assert max(c["microbatches"] * c["data"] for c in candidates) == MODEL.batch_size
    assert not any(c["sequence"] for c in candidates if c["tensor"] == 1)


@pytest.mark.slow
def test_the_knobs_of_a_schedule_are_tuned_and_the_best_two_measured() -> None:
    space = {
        "tensor": [1, 2],
        "stages": [1, 2],
        "data": lambda chosen: [4 // chosen["tensor"] // chosen["stages"]],
        "microbatches": [1, 2],
        "checkpoint": [0.0, 1.0],
        "sequence": [False],
        "flash": [False],
    }
    tuned = autopar.tune(candidate_of(MODEL), space, "cpu-virtual", "coordinate", measure=2)
    assert {trial.status for trial in tuned.trials} == {"fits"}, tuned.table
    for name in ("tensor", "stages", "microbatches", "checkpoint"):
        assert len({trial.candidate[name] for trial in tuned.trials}) == 2, name
    recomputed = [
        (kept, again)
        for kept, again in combinations(tuned.trials, 2)
        if {**kept.candidate, "checkpoint": 1.0} == again.candidate
    ]
    assert recomputed
    for kept, again in recomputed:
        assert kept.predicted_seconds < again.predicted_seconds
        assert kept.predicted_bytes > again.predicted_bytes
    by_prediction = sorted(tuned.trials, key=lambda trial: trial.predicted_seconds)
    measured = [trial for trial in by_prediction if trial.measured_seconds is not None]
    assert measured == by_prediction[:2]
    assert tuned.best == min(measured, key=lambda trial: trial.measured_seconds).candidate


@pytest.mark.slow
def test_the_tutorial_prints_what_it_tried_and_the_best() -> None:
    arguments = "--model gpt-350M --layers 1 --batch-size 1 --cluster cpu-virtual --devices 1"
    run = CliRunner().invoke(app, [*arguments.split(), "--search-by", "exhaustive"])
    assert run.exit_code == 0, run.output
    assert (
        "gpt-350M, 1 layers, batch of 1, on 1 devices of cpu-virtual: 6 of 6 candidates tried"
        in run.stdout
    )
    assert (
        "best: {'tensor': 1, 'stages': 1, 'data': 1, 'microbatches': 1, 'checkpoint': "
        in run.stdout
    )


@pytest.mark.parametrize("name", ["bert", "mlp-1B"])
def test_only_gpts_are_tuned(name: str) -> None:
    run = CliRunner().invoke(app, ["--model", name], env={"COLUMNS": "200"})
    assert run.exit_code == 2
    assert f"no GPT is called '{name}'; expected one of gpt-" in run.output
