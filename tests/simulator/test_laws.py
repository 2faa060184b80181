"""Faster hardware is never slower, even where computation and collectives contend."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from simulator.costs.cost_model import CostModel
from simulator.engine.simulation import simulate
from simulator.hardware.cluster import Cluster, Link
from simulator.program import Program, Recv, Run, Send
from simulator.spans import Link as LinkClass
from simulator.work import Collective, Done, Groups, Kernel, KernelKind, Op, OpList, Start
from tests.simulator.bodies import compute, programs, start

CLUSTER = Cluster.load("cpu-virtual")
NEAR, FAR = ((0, 1),), ((1, 0),)
KINDS: tuple[KernelKind, KernelKind] = ("gemm", "memory")


@dataclass(frozen=True)
class Hardware:
    """Seconds per FLOP by kind of kernel, seconds per byte and slowdown by groups."""

    flop: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 1.0))
    byte: Mapping[Groups, float] = field(default_factory=dict)
    factor: Mapping[Groups, float] = field(default_factory=dict)

    def kernel(self, kernel: Kernel, /, device: int = 0) -> float:
        return kernel.flops * self.flop[kernel.kind]

    def collective(self, kind: str, num_bytes: float, groups: Groups) -> float:
        return num_bytes * self.byte.get(groups, self.byte.get(NEAR, 1.0))

    def contention_factor(self, groups: Groups) -> float:
        return self.factor.get(groups, self.factor.get(NEAR, 1.0))

    def link(self, groups: Groups) -> LinkClass:
        return "within hosts"

    def nics(self, pairs: Groups) -> Mapping[Hashable, float]:
        return {}


@st.composite
def upgrades(draw: st.DrawFn) -> tuple[Hardware, Hardware]:
    """Draw hardware, and an upgrade with no slower part and no stronger contention."""
    speed, less = st.floats(1, 2), st.sampled_from([0.0, 0.5, 1.0])
    slow = Hardware(
        *({key: draw(speed) for key in keys} for keys in (KINDS, (NEAR, FAR), (NEAR, FAR)))
    )
    flop, byte = (
        {key: draw(less) * value for key, value in kind.items()} for kind in (slow.flop, slow.byte)
    )
    return slow, Hardware(
        flop, byte, {key: 1 + draw(less) * (value - 1) for key, value in slow.factor.items()}
    )


@st.composite
def overlapping(draw: st.DrawFn) -> OpList:
    """Draw kernels and collectives; the body waits for each at any later time or never."""
    body: list[Op] = []
    running: list[str] = []
    sizes = st.integers(0, 9)
    for n, choice in enumerate(
        draw(st.lists(st.sampled_from(["kernel", "start", "start", "done"]), max_size=9))
    ):
        if choice == "kernel":
            body.append(Kernel("k", draw(st.sampled_from(KINDS)), draw(sizes), 0))
        elif choice == "start":
            running.append(f"g{n}")
            body.append(
                Start(
                    Collective(
                        f"g{n}", "all_gather", draw(sizes), draw(st.sampled_from([NEAR, FAR]))
                    )
                )
            )
        elif running:
            body.append(Done(running.pop(draw(st.integers(0, len(running) - 1)))))
    return tuple(body)


def makespan(program: Program, costs: CostModel, dispatch: float = 0.0) -> float:
    return simulate(program, CLUSTER, costs, dispatch).makespan


@given(st.lists(overlapping(), min_size=1, max_size=4), upgrades())
def test_a_mesh_is_never_slower_on_faster_hardware(
    tasks: list[OpList], hardware: tuple[Hardware, Hardware]
) -> None:
    named = {f"{i}F": body for i, body in enumerate(tasks)}
    program = Program(((0, 1),), (tuple(Run(i, "F") for i in range(len(tasks))),), named)
    slow, fast = (makespan(program, costs) for costs in hardware)
    assert fast <= slow * (1 + 1e-9)


@given(programs(), upgrades(), st.sampled_from([0.0, 0.5]))
def test_pipelines_whose_tasks_wait_for_their_collectives_are_never_slower_on_faster_hardware(
    program: Program, hardware: tuple[Hardware, Hardware], dispatch: float
) -> None:
    slow, fast = (makespan(program, costs, dispatch) for costs in hardware)
    assert fast <= slow * (1 + 1e-6)


@given(programs(), st.lists(overlapping(), min_size=3, max_size=3), upgrades())
def test_other_pipelines_are_slower_by_at_most_the_contention_factor(
    program: Program, tasks: list[OpList], hardware: tuple[Hardware, Hardware]
) -> None:
    program = replace(program, bodies={f"{i}F": body for i, body in enumerate(tasks)})
    slow, fast = (makespan(program, costs) for costs in hardware)
    assert fast <= slow * max(hardware[1].factor.values()) * (1 + 1e-9)


def test_a_faster_network_can_be_slower_if_a_send_precedes_the_end_of_a_gather() -> None:
    """A slower network starts the second gather after the second send.

    Then the gather does not overlap with the product, and does not slow it.
    """
    tasks = {"0F": (start(10, "a"),), "1F": (start(5, "b"), compute(11)), "2F": (compute(100),)}
    row = (Run(0, "F"), Send("x", 1, 2), Run(1, "F"), Send("y", 1, 2), Run(2, "F"))
    program = Program(((0, 1), (2, 3)), (row, (Recv("x", 0), Recv("y", 0))), tasks)
    half = dict.fromkeys((NEAR, FAR), 0.5)
    slow = Hardware(factor=dict.fromkeys((NEAR, FAR), 2.0))
    assert (
        makespan(program, slow)
        < makespan(program, replace(slow, byte=half))
        <= 2 * makespan(program, slow)
    )


def test_a_contention_factor_above_two_is_refused_because_laws_do_not_hold() -> None:
    """Concurrency is then slower than serial execution, and anything that adds concurrency, too."""
    near, far = (
        Start(Collective(name, "all_gather", 5, groups))
        for name, groups in (("n", NEAR), ("f", FAR))
    )
    program = Program(
        ((0, 1),), ((Run(0, "F"),),), {"0F": (near, far, compute(5), Done("n"), Done("f"))}
    )
    slow = Hardware(factor={NEAR: 1.0, FAR: 3.0})
    assert makespan(program, slow) == 10
    assert makespan(program, replace(slow, byte={NEAR: 0.0, FAR: 1.0})) == 15
    with pytest.raises(ValidationError, match="less than or equal to 2"):
        Link.model_validate(CLUSTER.intra_host.model_dump() | {"contention_factor": 2.5})
