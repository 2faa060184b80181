"""Every strategy computes the serial step, and is predicted for clusters."""

from dataclasses import asdict
from functools import cache, wraps
from typing import Any

import jax
import pytest

import autopar
from experiments.by_hand import BY_HAND
from experiments.cells import read_cell, write_job
from experiments.local_steps import initial_args, largest_difference, next_state
from experiments.models import GPT, MLP
from experiments.scripts import simulate_cells
from experiments.strategies import STRATEGIES
from experiments.strategy import SimulatedStep
from experiments.sweep_job import Job
from simulator.engine.timeline import Timeline
from simulator.hardware.cluster import Cluster
from simulator.memory import MemoryUse
from simulator.program import Program

MODELS = {
    "mlp": MLP(dim=16, num_layers=2, batch_size=16),
    "gpt": GPT(
        num_layers=1,
        hidden_size=16,
        num_heads=8,
        sequence_length=8,
        vocab_size=32,
        batch_size=8,
        remat=True,
    ),
}
MESHES = {"mlp": [(2,), (4,), (8,), (2, 4)], "gpt": [(8,), (2, 4)]}
CELLS = [(model, "serial", (1,)) for model in MODELS] + [
    (model, name, mesh)
    for model, meshes in MESHES.items()
    for mesh in meshes
    for name, strategy in STRATEGIES.items()
    if strategy.runs_on(MODELS[model], mesh)
    and name not in BY_HAND  # tested in test_by_hand.py
    and not (name == "pipeline" and mesh[0] > 2)  # more stages than layers
]


@cache
def serial_steps(model: str) -> Any:
    """Return the arguments of a model's step, and the results of two serial steps."""
    state, batch = initial_args(MODELS[model])
    step = jax.jit(MODELS[model].train_step)
    first = step(state, batch)
    return (state, batch), first, step(next_state(first), batch)


QUICK_CELLS = [
    ("mlp", name, mesh)
    for name, mesh in [
        ("serial", (1,)),
        ("pmap", (2,)),
        ("data", (4,)),
        ("zero2", (8,)),
        ("zero3", (2, 4)),
        ("shard", (2, 4)),
        ("heuristic", (4,)),
        ("pipeline", (2, 4)),
    ]
]
"""Tests of the fast tier; `test_gpt_directives` trains with directives."""


@pytest.mark.parametrize(
    ("model_name", "name", "mesh"),
    [
        pytest.param(*cell, marks=() if cell in QUICK_CELLS else (pytest.mark.slow,))
        for cell in CELLS
    ],
)
def test_every_strategy_equals_the_serial_step(
    model_name: str, name: str, mesh: tuple[int, ...]
) -> None:
    model = MODELS[model_name]
    args, first, second = serial_steps(model_name)
    strategy = STRATEGIES[name]
    plan = strategy.plan(model, mesh, Cluster.load("cpu-virtual"))
    runnable = strategy.prepare(model, mesh, plan, args)
    state, batch = runnable.args
    result = runnable.step(state, batch)
    # Adam divides by the root of the mean square gradient. Where that is almost 0, rounding becomes
    # a part of the step of 1e-3.
    assert largest_difference(runnable.gather(result), first) < 1e-3
    result = runnable.step(next_state(result), batch)
    assert largest_difference(runnable.gather(result), second) < 2e-3
    assert runnable.memory_bytes > 0


def test_pmap_refuses_a_batch_that_its_devices_cannot_share() -> None:
    model = MLP(dim=16, num_layers=2, batch_size=15)
    for use in (
        lambda: STRATEGIES["pmap"].prepare(model, (2,), None, initial_args(model)),
        lambda: STRATEGIES["pmap"].predict(model, (2,), None, Cluster.load("p3.16xlarge")),
    ):
        with pytest.raises(
            ValueError, match="a batch of 15 can't be split over 2 devices; use a multiple of 2"
        ):
            use()


def test_predictions_donate_the_state_in_serial_but_not_in_pmap() -> None:
    model, cluster = MODELS["mlp"], Cluster.load("p3.16xlarge")
    state, _ = model.abstract_args()
    state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    serial, pmap = (
        STRATEGIES[name].predict(model, (1,), None, cluster).timeline for name in ("serial", "pmap")
    )
    assert serial.memory[0].aliased == state_bytes
    assert pmap.memory[0].aliased == 0
    assert serial.makespan > 0
    assert pmap.makespan > 0


def test_a_predicted_step_needs_what_its_fullest_device_needs(tmp_path, monkeypatch) -> None:
    class Staged:
        def plan(self, *_: Any) -> None:
            pass

        def predict(self, *_: Any) -> SimulatedStep:
            return SimulatedStep(
                Program(((0,), (1,)), ((), ())),
                Timeline((), ((0,), (1,)), (MemoryUse(arguments=1), MemoryUse(arguments=2))),
                0.0,
            )

    monkeypatch.setitem(simulate_cells.STRATEGIES, "staged", Staged())
    job = Job("simulated", "mlp", "tiny", asdict(MODELS["mlp"]), "p3.16xlarge", (2,), ("staged",))
    write_job(tmp_path, job)
    simulate_cells.main(job.to_json(), str(tmp_path))
    assert read_cell(tmp_path, "staged").memory_bytes_per_device == 2


def test_a_step_for_which_no_plan_fits_does_not_fit(tmp_path, monkeypatch) -> None:
    class TooLarge:
        def plan(self, *_: Any) -> None:
            raise autopar.MemoryBudgetError(1e9, 2e9)

    monkeypatch.setitem(simulate_cells.STRATEGIES, "too_large", TooLarge())
    sizes = asdict(MODELS["mlp"])
    job = Job("simulated", "mlp", "tiny", sizes, "p3.16xlarge", (2,), ("too_large",))
    write_job(tmp_path, job)
    simulate_cells.main(job.to_json(), str(tmp_path))
    cell = read_cell(tmp_path, "too_large")
    assert cell.status == "out_of_memory"
    assert cell.reason == str(autopar.MemoryBudgetError(1e9, 2e9))


def test_strategies_of_a_job_share_the_traces_of_its_step(monkeypatch):
    cluster, model = Cluster.load("p3.16xlarge"), MODELS["mlp"]
    train_step, traces = MLP.train_step, []

    @wraps(train_step)
    def traced(*args, **kwargs):
        traces.append(args)
        return train_step(*args, **kwargs)

    monkeypatch.setattr(MLP, "train_step", traced)
    with autopar.shared_traces():
        for name in ("data", "zero2"):
            plan = STRATEGIES[name].plan(model, (2,), cluster)
            STRATEGIES[name].predict(model, (2,), plan, cluster)
        assert len(traces) == 1
        plan = STRATEGIES["pipeline"].plan(model, (2,), cluster)
        planned = len(traces)
        STRATEGIES["pipeline"].predict(model, (2,), plan, cluster)
        assert len(traces) == planned
