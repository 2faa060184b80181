"""The fit of hosts that share a CPU recovers planted parameters."""

import pytest

from simulator.calibration.fit_shared_cpu import MeasuredStep, fit_links, fit_processes
from simulator.costs.cost_model import costs_of
from simulator.hardware.cluster import Cluster, Processes
from simulator.program import Program, Recv, Run, Send

BASE = Cluster.load("cpu-hosts")
PLANTED = Processes(step_us=2000, task_us=300, concurrent_instructions=1.4)


def step(micro_batches: int, seconds: float) -> MeasuredStep:
    """Return a forward pipeline of two meshes on a host each, and its seconds on `PLANTED`."""
    numbers = range(micro_batches)
    first = tuple(
        instruction for k in numbers for instruction in (Run(0, "F", k), Send(f"x{k}", 1, 1000))
    )
    second = tuple(
        instruction for k in numbers for instruction in (Recv(f"x{k}", 0), Run(1, "F", k))
    )
    program = Program(((0,), (1,)), (first, second))
    measured = MeasuredStep(program, (2, 1), {"0F": seconds, "1F": seconds}, 0.0)
    seconds_on_planted = measured.predicted(BASE.model_copy(update={"processes": PLANTED}))
    return MeasuredStep(program, (2, 1), measured.task_seconds, seconds_on_planted)


def test_costs_of_processes_are_recovered():
    steps = [step(count, seconds) for count in (1, 4, 16) for seconds in (1e-4, 1e-3, 1e-2)]
    fitted = fit_processes(BASE, steps)
    assert fitted.processes is not None
    assert fitted.processes.model_dump() == pytest.approx(PLANTED.model_dump(), rel=0.02)
    with pytest.raises(ValueError, match="2 steps; expected 3 at least"):
        fit_processes(BASE, steps[:2])


def test_links_are_recovered():
    def seconds_by_size(launch: float, bandwidth: float) -> list[tuple[float, float]]:
        return [(size, launch + size / bandwidth) for size in (1e3, 1e5, 1e7)]

    cluster = fit_links(BASE, seconds_by_size(1e-4, 4e9), seconds_by_size(1e-3, 5e8)).with_size(
        2, 2
    )
    costs = costs_of(cluster)
    assert costs.collective("collective_permute", 1e6, ((0, 1),)) == pytest.approx(1e-4 + 1e6 / 4e9)
    assert costs.collective("collective_permute", 1e6, ((0, 2),)) == pytest.approx(1e-3 + 1e6 / 5e8)
    before = costs_of(BASE.with_size(2, 2))
    assert costs.collective("all_reduce", 1e6, ((0, 1),)) == before.collective(
        "all_reduce", 1e6, ((0, 1),)
    )
