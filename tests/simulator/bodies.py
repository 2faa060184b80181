"""Bodies of tasks whose seconds are plain to see, and Hypothesis strategies for them."""

from hypothesis import strategies as st

from simulator.costs import BandwidthOnly
from simulator.work import Collective, Done, Kernel, Loop, Start

COSTS = BandwidthOnly(bandwidth=1.0, flop_per_s=1.0)  # a FLOP or a sent byte takes a second
PAIR = ((0, 1),)


def compute(seconds: float, name: str = "dot") -> Kernel:
    return Kernel(name, "gemm", seconds, 0)


def start(seconds: float, name: str = "gather") -> Start:
    return Start(Collective(name, "all_gather", 2 * seconds, PAIR))  # each of two devices sends half


seconds = st.integers(0, 20)
kernels = seconds.map(compute)
synchronous = seconds.map(lambda time: (start(time), Done("gather")))
overlapped = st.tuples(seconds, seconds).map(lambda times: (start(times[0]), compute(times[1]), Done("gather")))
flat = st.lists(kernels.map(lambda kernel: (kernel,)) | synchronous | overlapped, max_size=4).map(
    lambda parts: tuple(op for part in parts for op in part)
)
loops = st.builds(Loop, st.integers(0, 6), flat)
nested = st.builds(lambda count, body, inner: Loop(count, (*body, inner)), st.integers(0, 6), flat, loops)
bodies = st.builds(lambda body, loop: (*body, loop), flat, loops | nested)
