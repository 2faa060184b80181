"""The harness of public models compares with one device, and a crash or a hang becomes a row."""

import json
import sys
from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import autopar
from autopar.pipeline.pipeline_schedules import schedule_kind, schedule_names
from experiments.reach.__main__ import app, read_table, write_table
from experiments.reach.public_step import PublicStep
from experiments.reach.reach_cells import (
    ReachCell,
    ReachRun,
    array_difference,
    brief_text,
    is_refusal,
    line_of,
)
from experiments.reach.reach_methods import METHODS, SCHEDULES
from experiments.reach.reach_pool import run_cells
from experiments.reach.reach_worker import MARK

ZEROS = np.zeros(4, np.float32)
ONES = np.ones(4, np.float32)


def test_the_tolerance_is_relative_to_the_change_of_an_array() -> None:
    assert array_difference(ONES + 1e-5, ONES, [ONES]) == ""
    assert "off by" in array_difference(ONES + 1e-3, ONES, [ONES])
    before = ONES - 1e-3
    assert "off by" in array_difference(ONES + 1e-5, ONES, [ONES], before)
    assert array_difference(ONES + 1e-7, ONES, [ONES], before) == ""


def test_a_number_that_changes_by_rounding_on_one_device_may_change_as_much() -> None:
    assert array_difference(ONES * 1e-3, ZEROS, [ONES * 5e-4]) == ""
    assert "off by" in array_difference(ONES * 1e-2, ZEROS, [ONES * 5e-4])
    squares = ONES * 1e-25
    assert array_difference(20 * squares, squares, [2 * squares]) == ""
    assert "off by" in array_difference(200 * squares, squares, [2 * squares])
    assert "off by" in array_difference(-20 * squares, -squares, [-2 * squares])


def test_integers_shapes_dtypes_and_infinities_are_compared() -> None:
    whole = np.arange(4)
    assert array_difference(whole, whole, [whole]) == ""
    assert "off by 1" in array_difference(whole + 1, whole, [whole])
    assert "expected" in array_difference(ONES[:2], ONES, [ONES])
    assert "expected" in array_difference(ONES.astype(np.float16), ONES, [ONES])
    assert "finite" in array_difference(ONES * np.nan, ONES, [ONES])
    assert "infinite" in array_difference(-ONES * np.inf, ONES * np.inf, [ONES * np.inf])


def linear_step(scale: float = 1.0):
    def step(params, batch):
        def loss_fn(params):
            return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * scale * g, params, grads), loss

    return step


def linear_public(**options) -> PublicStep:
    rng = np.random.default_rng(0)
    batch = {
        "x": jnp.asarray(rng.normal(size=(8, 4)), jnp.float32),
        "y": jnp.asarray(rng.normal(size=(8, 2)), jnp.float32),
    }
    params = {"w": jnp.asarray(rng.normal(size=(4, 2)), jnp.float32)}
    return PublicStep(linear_step(), (params, batch), **options)


def test_a_cell_is_equal_wrong_or_refused() -> None:
    run = ReachRun("tests/linear", linear_public())
    cell = run.cell("shard_2x4")
    assert (cell.outcome, cell.reason) == ("equal", "")
    assert cell.planning_s is not None
    wrong = linear_public(jit=lambda _: jax.jit(linear_step(1.01)))
    cell = ReachRun("tests/linear", wrong).cell("shard_2x4")
    assert cell.outcome == "wrong"
    assert "off by" in cell.reason
    refused = linear_public(options={"batch_argnums": 5})
    cell = ReachRun("tests/linear", refused).cell("shard_2x4")
    assert cell.outcome == "refused"
    assert cell.reason.startswith("OptionError: batch_argnums is (5,)")


def test_microbatches_with_statistics_of_their_own_are_compared_with_their_mean() -> None:
    def step(params, batch):
        def loss_fn(params):
            rows = batch["x"] @ params["w"]
            rows = jnp.tanh(rows - rows.mean(0)) @ params["w"].T @ params["w"]
            return jnp.mean((rows - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    public = replace(linear_public(), step=step)
    assert ReachRun("tests/centred", public).cell("shard_2x4_micro_4").outcome == "refused"
    public = replace(public, uses_batch_statistics=True)
    cell = ReachRun("tests/centred", public).cell("shard_2x4_micro_4")
    assert (cell.outcome, cell.reason) == ("equal", "")
    assert "batch_statistics='microbatch'" in cell.warnings


def test_errors_of_autopar_are_refusals_and_others_failures() -> None:
    assert is_refusal(autopar.MicrobatchError("x"))
    with pytest.raises(TypeError) as raised:
        jnp.dot(ONES, "x")
    assert not is_refusal(raised.value)
    with pytest.raises(TypeError) as raised:
        autopar.parallelize(lambda x: x)({1})
    assert is_refusal(raised.value)


def test_texts_have_no_folders_of_this_machine() -> None:
    message = f"dot at {autopar.__file__}:12\n  and {jax.__file__}:1"
    assert brief_text(message) == "dot at autopar/__init__.py:12 and jax/__init__.py:1"
    assert line_of(message) == "autopar/__init__.py:12"
    assert line_of("no line") == ""


WORKER = f"""
import os, sys, time
for line in sys.argv[1:]:
    if line == "hang":
        time.sleep(60)
    elif line == "abort":
        os.abort()
    print({MARK!r} + line, flush=True)
"""


def test_a_crash_and_a_hang_are_rows_and_the_others_run_on() -> None:
    def command(model, methods):
        lines = [
            name
            if name in ("hang", "abort")
            else json.dumps(asdict(ReachCell(model, name, "equal")))
            for name in methods
        ]
        return [sys.executable, "-c", WORKER, *lines]

    cells = list(run_cells({"a": ["x", "hang", "y", "abort", "z"], "b": ["x"]}, 2, 2.0, command))
    assert {(cell.model, cell.method): cell.outcome for cell in cells} == {
        ("a", "x"): "equal",
        ("a", "hang"): "failed",
        ("a", "y"): "equal",
        ("a", "abort"): "failed",
        ("a", "z"): "equal",
        ("b", "x"): "equal",
    }
    reasons = {cell.method: cell.reason for cell in cells}
    assert reasons["hang"] == "no result after 2 s"
    assert reasons["abort"].startswith("killed by SIGABRT")


def test_a_table_comes_back_in_the_order_of_methods(tmp_path) -> None:
    path = tmp_path / "reach.csv"
    cells = [
        ReachCell("m", "zero3_8", "refused", 'a, "b"', "x.py:1"),
        ReachCell("m", "shard_2x4", "equal"),
    ]
    rows = {
        (c.model, c.method): {k: "" if v is None else str(v) for k, v in asdict(c).items()}
        for c in cells
    }
    write_table(path, rows)
    assert read_table(path) == rows
    assert [method for _, method in read_table(path)] == ["shard_2x4", "zero3_8"]
    assert read_table(tmp_path / "none.csv") == {}


def test_every_schedule_of_training_is_a_method() -> None:
    training = [name for name in schedule_names() if not name.startswith("inference")]
    assert {*SCHEDULES} == {*training}
    for name, chunks in SCHEDULES.items():
        assert schedule_kind(name).num_chunks in (None, chunks)
        sizes = (2,) if name == "dualpipe_v" else (2, 4)
        assert {f"{name}_{size}" for size in sizes} <= {*METHODS}


def test_an_unknown_method_is_refused_with_the_valid_ones() -> None:
    result = CliRunner().invoke(app, ["--models", "optax/lion", "--methods", "nope"])
    assert result.exit_code == 2
    assert "shard_2x4" in result.output


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize(
    "model", ["optax/adafactor", "flax/linen_lm1b", "transformers/gpt2", "equinox/gru"]
)
def test_public_models_equal_one_device(model) -> None:
    from experiments.reach.public_models import build_public_step

    if model.partition("/")[0] not in ("optax", "flax"):
        pytest.importorskip(model.partition("/")[0])
    run = ReachRun(model, build_public_step(model))
    for method in ("shard_2x4", "zero3_8"):
        cell = run.cell(method)
        assert (cell.outcome, cell.reason) == ("equal", "")
