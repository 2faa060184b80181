"""Task bodies whose seconds follow by hand, and Hypothesis strategies for bodies and programs."""

from hypothesis import strategies as st

from simulator.engine.timeline import Timeline
from simulator.program import Free, Instruction, Program, Recv, Run, Send
from simulator.spans import Link
from simulator.work import Collective, Done, Groups, Kernel, Loop, Op, OpList, Start
from tests.toy_costs import BandwidthOnly

COSTS = BandwidthOnly(bandwidth=1.0, flop_per_s=1.0)  # a FLOP or a sent byte takes a second
PAIR = ((0, 1),)


class Slowed(BandwidthOnly):
    """`COSTS` with contention: concurrent work takes `factor` times as long."""

    def __init__(self, factor: float) -> None:
        super().__init__(bandwidth=1.0, flop_per_s=1.0)
        object.__setattr__(self, "factor", factor)

    def contention_factor(self, groups: Groups) -> float:
        return self.factor  # pyright: ignore[reportAttributeAccessIssue]


class TwoLinks(Slowed):
    """`Slowed` with a second link, used by groups whose first two devices descend."""

    def link(self, groups: Groups) -> Link:
        return "between hosts" if groups[0][0] > groups[0][1] else "within hosts"


def compute(seconds: float, name: str = "dot") -> Kernel:
    return Kernel(name, "gemm", seconds, 0)


def start(seconds: float, name: str = "gather", groups: Groups = PAIR) -> Start:
    # Each of two devices sends half of the array.
    return Start(Collective(name, "all_gather", 2 * seconds, groups))


def far(seconds: float, name: str = "far") -> Start:
    """Start a gather that `TwoLinks` sends over the second link."""
    return start(seconds, name, ((1, 0),))


def one_task(*body: Op) -> Program:
    """Return a program of one task on devices 0 and 1."""
    return Program(((0, 1),), ((Run(0, "S"),),), {"0S": body})


def unrolled(body: OpList) -> OpList:
    """Replace each loop of a body by its iterations."""
    parts = (unrolled(op.body) * op.count if isinstance(op, Loop) else (op,) for op in body)
    return tuple(op for part in parts for op in part)


seconds = st.integers(0, 20)
kernels = seconds.map(compute)
synchronous = seconds.map(lambda time: (start(time), Done("gather")))
overlapped = st.tuples(seconds, seconds).map(
    lambda times: (start(times[0]), compute(times[1]), Done("gather"))
)
both = st.tuples(seconds, seconds, seconds).map(
    lambda times: (far(times[0]), start(times[1]), compute(times[2]), Done("far"), Done("gather"))
)
flat = st.lists(
    kernels.map(lambda kernel: (kernel,)) | synchronous | overlapped | both, max_size=4
).map(lambda parts: tuple(op for part in parts for op in part))
loops = st.builds(Loop, st.integers(0, 6), flat)
nested = st.builds(
    lambda count, body, inner: Loop(count, (*body, inner)), st.integers(0, 6), flat, loops
)
bodies = st.builds(lambda body, loop: (*body, loop), flat, loops | nested)

GATHER = Collective("gather", "all_gather", 3, ((0, 1),))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Draw programs of meshes of two devices; a mesh may gather the values that it receives."""
    count = draw(st.integers(1, 4))
    tasks = draw(st.lists(bodies, min_size=1, max_size=3))
    rows: list[list[Instruction]] = [[] for _ in range(count)]
    meshes = st.integers(0, count - 1)
    for n, (mesh, to) in enumerate(draw(st.lists(st.tuples(meshes, meshes), max_size=12))):
        rows[mesh].append(Run(draw(st.integers(0, len(tasks) - 1)), "F", n))
        if to != mesh:
            rows[mesh] += [Send(f"v{n}", to, draw(st.integers(0, 9))), Free((f"v{n}",))]
            rows[to].append(Recv(f"v{n}", mesh, draw(st.sampled_from([None, GATHER]))))
    named = {f"{i}F": body for i, body in enumerate(tasks)}
    return Program(tuple((2 * i, 2 * i + 1) for i in range(count)), tuple(map(tuple, rows)), named)


def exposed_communication(timeline: Timeline, mesh: int) -> float:
    """Seconds in which the devices of a mesh do nothing but communicate."""
    own = [span for span in timeline.spans if span.mesh == mesh]
    last = {
        stream: max((span.end for span in own if span.stream == stream), default=0.0)
        for stream in ("communication", "compute")
    }
    waits = sum(span.seconds for span in own if span.category == "wait")
    return waits + max(0.0, last["communication"] - last["compute"])
