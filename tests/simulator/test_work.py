"""Work in FLOP and bytes: sums of kernels, collectives and loops."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from simulator.work import Collective, Done, Gemm, Kernel, Loop, Start, Work, with_axes, work_of

ADD = Kernel("add", "memory", flops=3, bytes=12)
DOT = Kernel("dot", "gemm", flops=2 * 4 * 5 * 6, bytes=100, dtype="bf16", gemm=Gemm(4, 5, 6))
SUM = Collective("sum", "all_reduce", 64, ((0, 1),))


def test_a_batched_product_counts_a_multiply_add_as_two() -> None:
    assert Gemm(4, 5, 6, batch=7).flops == 2 * 7 * 4 * 5 * 6


def test_the_work_of_a_body_multiplies_loops_by_their_count() -> None:
    body = (ADD, Start(SUM), Done("sum"), Loop(10, (DOT, Loop(2, (ADD, Start(SUM), Done("sum"))))))
    assert work_of(body) == Work(
        {"f32": 3 + 60, "bf16": 2400}, 12 + 240 + 1000, {"all_reduce": 64 + 1280}
    )


def test_collectives_get_their_axes_in_loops_too() -> None:
    body = (ADD, Start(SUM), Loop(2, (Start(SUM), Done("sum"))), Done("sum"))
    start_with_axis = Start(replace(SUM, axis="x"))
    expected = (ADD, start_with_axis, Loop(2, (start_with_axis, Done("sum"))), Done("sum"))
    assert with_axes(body, {SUM.groups: "x"}.__getitem__) == expected


def test_a_kernel_without_arithmetic_adds_no_dtype() -> None:
    assert work_of((Kernel("copy", "memory", 0, 8),)) == Work({}, 8)


works = st.builds(
    Work,
    st.dictionaries(st.sampled_from(["f32", "bf16"]), st.integers(0, 10**9)),
    st.integers(0, 10**9),
    st.dictionaries(st.sampled_from(["all_reduce", "collective_permute"]), st.integers(0, 10**9)),
)


@given(works, works, works)
def test_work_adds_in_any_order(one: Work, two: Work, three: Work) -> None:
    assert one + two == two + one
    assert (one + two) + three == one + (two + three)
    assert one + Work() == one


@given(works)
def test_twice_a_work_is_its_sum_with_itself(work: Work) -> None:
    assert work * 2 == work + work
