"""Packing of buffers into a heap: no two that are live together overlap, and gaps count."""

from hypothesis import given
from hypothesis import strategies as st

from simulator.buffer_packing import packed_bytes
from simulator.live_ranges import live_bytes

POINTS = 12


@st.composite
def buffers(draw: st.DrawFn) -> tuple[int, int, int]:
    first = draw(st.integers(0, POINTS - 1))
    return first, draw(st.integers(first, POINTS - 1)), draw(st.integers(1, 9))


@given(st.lists(buffers(), max_size=12))
def test_a_heap_is_at_least_the_peak_and_at_most_all_buffers(ranges) -> None:
    peak = live_bytes(ranges, POINTS).max(initial=0)
    assert peak <= packed_bytes(ranges) <= sum(size for *_, size in ranges)


def test_buffers_that_are_not_live_together_share_memory() -> None:
    assert packed_bytes([(0, 1, 8), (2, 3, 8), (4, 5, 6)]) == 8
    assert packed_bytes([]) == 0


def test_the_heap_of_a_compiled_program_is_the_one_that_xla_reserves() -> None:
    # The large buffers of a step of a multilayer perceptron, in MiB, and XLA's heap of 96 MiB.
    ranges = [
        *((32, 63, 8), (32, 32, 4), (33, 61, 8), (34, 35, 16), (34, 34, 4), (35, 57, 16)),
        *((36, 51, 16), (37, 50, 8), (37, 37, 4), (38, 48, 8), (39, 40, 16), (39, 39, 4)),
        *((40, 41, 2), (41, 47, 2), (43, 49, 16), (48, 54, 8), (48, 48, 4), (49, 50, 8)),
        *((49, 49, 4), (50, 55, 8), (51, 68, 8), (51, 51, 4), (55, 56, 16), (55, 55, 4)),
        *((56, 57, 16), (57, 62, 16), (61, 67, 8), (61, 61, 4), (62, 63, 8), (62, 62, 4)),
        *((63, 66, 8), (66, 69, 8), (66, 66, 4)),
    ]
    assert live_bytes(ranges, 70).max() == 92
    assert packed_bytes(ranges) == 96
