"""Compiled HLO text becomes task bodies: collectives, kernels, loops and phases."""

from dataclasses import replace
from pathlib import Path

import pytest

from simulator.hlo import HloError, parse_hlo
from simulator.work import Collective, Done, Gemm, Kernel, Loop, Start, work_of

DATA = Path(__file__).parent / "data"

ADD = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""


def module(*lines: str, computations: str = ADD, num_partitions: int = 8) -> str:
    """Return HLO text whose entry computation is `lines`."""
    header = f"HloModule m, is_scheduled=true, num_partitions={num_partitions}\n"
    return (
        f"{header}{computations}\nENTRY %main (p: f32[4]) -> f32[4] {{\n"
        + "".join(f"  {x}\n" for x in lines)
        + "}\n"
    )


def parse(*lines: str, **options) -> tuple:
    return parse_hlo(module(*lines, **options))


def sample(name: str) -> tuple:
    return parse_hlo((DATA / f"{name}.hlo.txt").read_text())


# Collectives

ALL = (tuple(range(8)),)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", ALL),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['x'=8] {'x'}", ALL),
        ("mesh['d'=2,'m'=4] {'m'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['d'=2,'m'=4] {'d'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['d'=2,'m'=4] {'d','m'}", ALL),
        ("mesh['a'=2,'b'=2,'c'=2] {'c','a'}", ((0, 4, 1, 5), (2, 6, 3, 7))),
        # halves of an axis: coordinate = 2 * major + minor
        ("mesh['d'=2,'m'=4] {'m':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['d'=2,'m'=4] {'m':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        # the mesh lists its devices in another order
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=2,'b'=2], device_ids=([0,2,1,3]) {'b'}", ((0, 2), (1, 3))),
    ],
)
def test_every_notation_of_device_groups_is_parsed(text, groups):
    start, _ = parse(
        "%p = f32[4]{0} parameter(0)",
        f"ROOT %r = f32[4]{{0}} all-reduce(%p), channel_id=1, replica_groups={text}, to_apply=%add",
    )
    assert start.collective.groups == groups


@pytest.mark.parametrize(
    ("line", "kind", "num_bytes"),
    [  # an operand of 4 floats, groups of 8
        ("f32[4]{0} all-reduce(%p), replica_groups={}, to_apply=%add", "all_reduce", 16),
        ("f32[32]{0} all-gather(%p), replica_groups=[1,8]<=[8], dimensions={0}", "all_gather", 128),
        (
            "f32[2]{0} reduce-scatter(%p), replica_groups=[4,2]<=[8], dimensions={0}, to_apply=%add",
            "reduce_scatter",
            16,
        ),
        (
            "f32[4]{0} all-to-all(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}",
            "all_to_all",
            16,
        ),
        ("f32[4]{0} collective-broadcast(%p), replica_groups={{0,1,2,3}}", "all_gather", 16),
    ],
)
def test_a_synchronous_collective_blocks_and_counts_the_whole_array(line, kind, num_bytes):
    start, done = parse("%p = f32[4]{0} parameter(0)", f"ROOT %r = {line}")
    assert (start.collective.kind, start.collective.num_bytes) == (kind, num_bytes)
    assert done == Done("r")


def test_a_combined_collective_counts_all_its_operands():
    start, _ = parse(
        "%p = f32[4]{0} parameter(0)",
        "%q = bf16[6,2]{1,0} parameter(1)",
        "ROOT %r = (f32[4]{0}, /*index=1*/bf16[6,2]{1,0}) all-reduce(%p, /*index=1*/%q), replica_groups={}, to_apply=%add",
    )
    assert start.collective == Collective("r", "all_reduce", 4 * 4 + 12 * 2, ALL)


def test_a_permute_keeps_its_pairs():
    start, _ = parse(
        "%p = f32[4]{0} parameter(0)",
        "ROOT %r = f32[4]{0} collective-permute(%p), channel_id=1, source_target_pairs={{0,1},{1,0}}",
    )
    assert start.collective == Collective("r", "collective_permute", 16, ((0, 1), (1, 0)))


def test_work_between_start_and_done_overlaps_with_the_collective():
    body = parse(
        "%p = f32[4]{0} parameter(0)",
        "%s = ((f32[4]{0}), f32[32]{0}) all-gather-start(%p), replica_groups=[1,8]<=[8], dimensions={0}",
        "%n = f32[4]{0} negate(%p)",
        "ROOT %d = f32[32]{0} all-gather-done(%s)",
    )
    assert body == (
        Start(Collective("s", "all_gather", 128, ALL)),
        Kernel("n", "memory", 0, 32),
        Done("s"),
    )


def test_a_start_that_is_marked_synchronous_blocks():
    body = parse(
        "%p = f32[4]{0} parameter(0)",
        "%s = f32[4]{0} all-reduce-start(%p), replica_groups={}, to_apply=%add, "
        'backend_config={"collective_backend_config":{"is_sync":true}}',
        "%n = f32[4]{0} negate(%p)",
        "ROOT %d = f32[4]{0} all-reduce-done(%s)",
    )
    assert [type(op) for op in body] == [Start, Done, Kernel]


def test_a_wrapped_asynchronous_collective_is_unwrapped():
    wrapped = """
%wrapped (p: f32[8]) -> f32[1] {
  %p = f32[8]{0} parameter(0)
  ROOT %scatter = f32[1]{0} reduce-scatter(%p), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
}
"""
    body = parse(
        "%p = f32[8]{0} parameter(0)",
        "%s = ((f32[8]{0}), f32[1]{0}, u32[]) async-start(%p), calls=%wrapped",
        "%u = ((f32[8]{0}), f32[1]{0}, u32[]) async-update(%s)",
        "ROOT %d = f32[1]{0} async-done(%u)",
        computations=ADD + wrapped,
    )
    assert body == (Start(Collective("s", "reduce_scatter", 32, ALL)), Done("s"))


def test_a_collective_fused_with_slices_is_found():
    fused = """
%offset (p: f32[8]) -> f32[1] {
  %p = f32[8]{0} parameter(0)
  ROOT %scatter = f32[1]{0} reduce-scatter(%p), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
}
"""
    body = parse(
        "%p = f32[8]{0} parameter(0)",
        "ROOT %f = f32[1]{0} fusion(%p), kind=kCustom, calls=%offset",
        computations=ADD + fused,
    )
    assert body == (Start(Collective("f", "reduce_scatter", 32, ALL)), Done("f"))


# Kernels

DIMENSIONS = (
    '"dot_dimension_numbers":{"lhs_contracting_dimensions":["%s"],"rhs_contracting_dimensions":["%s"],'
    '"lhs_batch_dimensions":[%s],"rhs_batch_dimensions":[%s]}'
)


def cublas(
    lhs: str, rhs: str, numbers: tuple[str, str, str, str], operands: str = "%a, %b"
) -> Kernel:
    (kernel,) = parse(
        f"%a = {lhs} parameter(0)",
        f"%b = {rhs} parameter(1)",
        "%bias = f32[16]{0} parameter(2)",
        f"%g = (f32[8,16]{{1,0}}, s8[4194304]{{0}}) custom-call({operands}), "
        f'custom_call_target="__cublas$lt$matmul", backend_config={{"gemm_backend_config":{{{DIMENSIONS % numbers}}}}}',
        "ROOT %r = f32[8,16]{1,0} get-tuple-element(%g), index=0",
    )
    return kernel


def test_a_cublas_call_is_sized_by_its_dimension_numbers_and_its_workspace_is_not_traffic():
    kernel = cublas("f32[8,32]{1,0}", "f32[32,16]{1,0}", ("1", "0", "", ""))
    assert kernel == Kernel(
        "g", "gemm", 2 * 8 * 16 * 32, 4 * (8 * 32 + 32 * 16 + 8 * 16), "f32", Gemm(8, 16, 32)
    )


def test_a_cublas_call_of_transposed_operands_is_sized_the_same():
    assert cublas("f32[32,8]{1,0}", "f32[16,32]{1,0}", ("0", "1", "", "")).gemm == Gemm(8, 16, 32)


def test_a_batched_cublas_call_counts_its_batch():
    gemm = cublas(
        "f32[2,3,8,32]{3,2,1,0}", "f32[2,3,32,16]{3,2,1,0}", ("3", "2", '"0","1"', '"0","1"')
    ).gemm
    assert gemm == Gemm(8, 16, 32, batch=6)


def test_a_bias_epilogue_is_read():
    plain = cublas("f32[8,32]{1,0}", "f32[32,16]{1,0}", ("1", "0", "", ""))
    bias = cublas("f32[8,32]{1,0}", "f32[32,16]{1,0}", ("1", "0", "", ""), "%a, %b, %bias")
    assert bias.bytes - plain.bytes == 64


def fused(*lines: str, operands: str = "%p, %i", result: str = "f32[4]{0}") -> Kernel:
    computation = (
        "%fused (a: f32[100,4], i: s32[]) -> f32[4] {\n"
        + "".join(f"  {line}\n" for line in lines)
        + "}\n"
    )
    (kernel,) = parse(
        "%p = f32[100,4]{1,0} parameter(0)",
        "%i = s32[] parameter(1)",
        f"ROOT %f = {result} fusion({operands}), kind=kLoop, calls=%fused",
        computations=ADD + computation,
    )
    return kernel


ARRAY, INDEX = "%a = f32[100,4]{1,0} parameter(0)", "%i = s32[] parameter(1)"
ZERO = "%zero = s32[] constant(0)"


def test_a_fusion_reads_its_operands_and_writes_its_result():
    kernel = fused(
        ARRAY, "ROOT %n = f32[100,4]{1,0} negate(%a)", operands="%p", result="f32[100,4]{1,0}"
    )
    assert kernel == Kernel("f", "memory", 0, 2 * 1600)


def test_a_fusion_that_reduces_reads_all_and_writes_little():
    kernel = fused(
        ARRAY,
        "%c = f32[] constant(0)",
        "ROOT %s = f32[4]{0} reduce(%a, %c), dimensions={0}, to_apply=%add",
    )
    assert kernel.bytes == 1600 + 16


def test_a_fusion_that_slices_reads_the_slice():
    kernel = fused(
        ARRAY, INDEX, ZERO, "%e = f32[100,4]{1,0} exponential(%a)",
        "%s = f32[1,4]{1,0} dynamic-slice(%e, %i, %zero), dynamic_slice_sizes={1,4}", "ROOT %b = f32[4]{0} bitcast(%s)",
    )  # fmt: skip
    assert kernel.bytes == 16 + 16 + 4  # slice, result and index


def test_a_fusion_that_updates_in_place_moves_only_the_update():
    kernel = fused(
        ARRAY, INDEX, ZERO, "%c = f32[] constant(1)", "%u = f32[1,4]{1,0} broadcast(%c), dimensions={}",
        "ROOT %d = f32[100,4]{1,0} dynamic-update-slice(%a, %u, %i, %zero)", result="f32[100,4]{1,0}",
    )  # fmt: skip
    assert kernel.bytes == 16 + 4


def test_a_fusion_that_updates_its_own_result_writes_the_whole_array():
    kernel = fused(
        ARRAY, INDEX, ZERO, "%n = f32[100,4]{1,0} negate(%a)", "%c = f32[] constant(1)",
        "%u = f32[1,4]{1,0} broadcast(%c), dimensions={}",
        "ROOT %d = f32[100,4]{1,0} dynamic-update-slice(%n, %u, %i, %zero)", result="f32[100,4]{1,0}",
    )  # fmt: skip
    assert kernel.bytes == 99 * 16 + 1600 + 4


def test_a_fusion_that_scatters_reads_and_writes_only_the_updated_rows():
    kernel = fused(
        ARRAY, "%i = s32[3,1]{1,0} parameter(1)", "%c = f32[] constant(1)",
        "%u = f32[3,1,4]{2,1,0} broadcast(%c), dimensions={}",
        "ROOT %d = f32[100,4]{1,0} scatter(%a, %i, %u), update_window_dims={1,2}, inserted_window_dims={}, "
        "scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=%add", result="f32[100,4]{1,0}",
    )  # fmt: skip
    assert kernel.bytes == 48 + 48 + 12


def test_a_product_inside_a_fusion_is_a_gemm():
    kernel = fused(
        ARRAY, "%b = f32[4,8]{1,0} parameter(1)",
        "ROOT %d = f32[100,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        result="f32[100,8]{1,0}",
    )  # fmt: skip
    assert (kernel.kind, kernel.gemm, kernel.bytes) == ("gemm", Gemm(100, 8, 4), 1600 + 128 + 3200)


def test_a_product_that_is_not_fused_is_a_gemm():
    (kernel,) = parse(
        "%a = bf16[5,3,4]{2,1,0} parameter(0)",
        "%b = bf16[5,4,7]{2,1,0} parameter(1)",
        "ROOT %d = bf16[5,3,7]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, "
        "rhs_contracting_dims={1}",
    )
    assert kernel == Kernel(
        "d", "gemm", 2 * 5 * 3 * 7 * 4, 2 * 5 * (12 + 28 + 21), "bf16", Gemm(3, 7, 4, batch=5)
    )


@pytest.mark.parametrize(("dtype", "products"), [("f32", 1), ("c64", 4)])
def test_a_product_of_complex_numbers_takes_four_of_real_ones(dtype: str, products: int) -> None:
    (kernel,) = parse(
        f"%p = {dtype}[4,8]{{1,0}} parameter(0)",
        f"ROOT %r = {dtype}[4,4]{{1,0}} dot(%p, %p),"
        " lhs_contracting_dims={1}, rhs_contracting_dims={1}",
    )
    assert kernel.flops == products * 2 * 4 * 4 * 8


def test_a_product_in_a_fusion_of_triton_is_a_gemm() -> None:
    fused = """
%halves (a: bf16[64,2,32], b: bf16[2,32,16]) -> f32[2,64,16] {
  %a = bf16[64,2,32]{2,1,0} parameter(0)
  %b = bf16[2,32,16]{2,1,0} parameter(1)
  ROOT %d = f32[2,64,16]{2,1,0} dot(%a, %b), lhs_batch_dims={1}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}
}
"""
    (kernel,) = parse(
        "%a = bf16[64,2,32]{2,1,0} parameter(0)",
        "%b = bf16[2,32,16]{2,1,0} parameter(1)",
        "ROOT %f = f32[2,64,16]{2,1,0} fusion(%a, %b), kind=kCustom, calls=%halves, "
        'backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}',
        computations=fused,
    )
    moved = 2 * (64 * 64 + 64 * 16) + 4 * 2 * 64 * 16
    assert kernel == Kernel("f", "gemm", 2 * 64 * 64 * 16, moved, "bf16", Gemm(64, 16, 32, batch=2))


RAGGED = "lhs_contracting_dims={%s}, rhs_contracting_dims={%s}, lhs_ragged_dims={%s}, rhs_group_dims={%s}"


def test_a_ragged_product_counts_the_group_of_each_row() -> None:
    operands = "%a = bf16[64,32]{1,0} parameter(0)", "%n = s32[4]{0} parameter(1)"
    rows = RAGGED % (1, 1, 0, 0)
    expert = (
        "%b = bf16[4,32,16]{2,1,0} parameter(2)",
        f"%r = bf16[64,16]{{1,0}} ragged-dot(%a, %b, %n), {rows}",
    )
    moved = 2 * (64 * 32 + 4 * 32 * 16 + 64 * 16) + 4 * 4
    assert parse(*operands, *expert) == (Kernel("r", "gemm", 2 * 64 * 32 * 16, moved, "bf16"),)
    # in the gradient of the experts, each row is added to one of four results
    inner = RAGGED % (0, 0, 0, "")
    gradient = (
        "%b = bf16[64,16]{1,0} parameter(2)",
        f"%r = bf16[4,32,16]{{2,1,0}} ragged-dot(%a, %b, %n), {inner}",
    )
    (kernel,) = parse(*operands, *gradient)
    assert kernel.flops == 2 * 64 * 32 * 16


def test_a_ragged_product_in_a_fusion_or_by_cublas_is_the_same_gemm() -> None:
    shapes = (
        "%a = bf16[64,32]{1,0} parameter(0)",
        "%b = bf16[4,32,16]{2,1,0} parameter(1)",
        "%n = s32[4]{0} parameter(2)",
    )
    lines = "".join(
        f"  {x}\n"
        for x in (
            *shapes,
            f"ROOT %r = bf16[64,16]{{1,0}} ragged-dot(%a, %b, %n), {RAGGED % (1, 1, 0, 0)}",
        )
    )
    (fused,) = parse(
        *shapes,
        "ROOT %k = bf16[64,16]{1,0} fusion(%a, %b, %n), kind=kCustom, calls=%experts",
        computations=f"%experts (a: bf16[64,32], b: bf16[4,32,16], n: s32[4]) -> bf16[64,16] {{\n{lines}}}\n",
    )
    config = DIMENSIONS % ("1", "1", "", "")
    (called,) = parse(
        *shapes,
        '%k = (bf16[64,16]{1,0}, s8[784]{0}) custom-call(%a, %b, %n), custom_call_target="__cublas$lt$groupedMatmul", '
        f'backend_config={{"grouped_gemm_backend_config":{{"gemm_backend_config":{{{config}}},"ragged_dot_dimension_numbers":{{{config},'
        '"lhs_ragged_dimensions":["0"],"rhs_group_dimensions":["0"]}}}',
    )
    moved = 2 * (64 * 32 + 4 * 32 * 16 + 64 * 16) + 4 * 4
    assert fused == called == Kernel("k", "gemm", 2 * 64 * 32 * 16, moved, "bf16")


def test_a_kernel_written_in_triton_is_unmodelled_with_its_bytes() -> None:
    line = 'ROOT %r = f32[4]{0} custom-call(%p), custom_call_target="__gpu$xla.gpu.triton", backend_config="{grid_x = 1}"'
    assert parse("%p = f32[4]{0} parameter(0)", line) == (
        Kernel("r", "memory", 0.0, 32, unmodelled="custom-call __gpu$xla.gpu.triton"),
    )


def test_an_asynchronous_copy_is_one_kernel():
    assert parse(
        "%p = f32[4]{0} parameter(0)",
        "%s = (f32[4]{0}, f32[4]{0}, u32[]) copy-start(%p)",
        "ROOT %d = f32[4]{0} copy-done(%s)",
    ) == (Kernel("s", "memory", 0, 32),)


def test_an_asynchronous_fusion_is_one_kernel():
    fusion = """
%slices (x: f32[8,4], i: s32[]) -> f32[1,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %last = s32[] constant(7)
  %from_end = s32[] subtract(%last, %i)
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,4]{1,0} dynamic-slice(%x, %from_end, %zero), dynamic_slice_sizes={1,4}
}
"""
    (kernel,) = parse(
        "%p = f32[8,4]{1,0} parameter(0)",
        "%i = s32[] parameter(1)",
        "%s = ((f32[8,4]{1,0}, s32[]), f32[1,4]{1,0}, u32[])"
        " fusion-start(%p, %i), kind=kLoop, calls=%slices",
        "ROOT %d = f32[1,4]{1,0} fusion-done(%s)",
        computations=fusion,
    )
    assert kernel == Kernel("s", "memory", 0.0, 16 + 16 + 4)


@pytest.mark.parametrize(("copy", "source"), [("{0:S(5)}", "{0}"), ("{0}", "{0:S(5)}")])
def test_a_copy_between_device_and_host_passes_their_link(copy, source):
    assert parse(
        f"%p = f32[4]{source} parameter(0)",
        f"%s = (f32[4]{copy}, f32[4]{source}, u32[]) copy-start(%p)",
        f"ROOT %d = f32[4]{copy} copy-done(%s)",
    ) == (Kernel("s", "host copy", 0, 16),)


def test_a_copy_within_host_memory_is_bound_by_memory():
    assert parse(
        "%p = f32[4]{0:S(5)} parameter(0)",
        "%s = (f32[4]{0:S(5)}, f32[4]{0:S(5)}, u32[]) copy-start(%p)",
        "ROOT %d = f32[4]{0:S(5)} copy-done(%s)",
    ) == (Kernel("s", "memory", 0, 32),)


def test_a_call_is_replaced_by_the_called_computation():
    called = "%twice (a: f32[4]) -> f32[4] {\n  %a = f32[4]{0} parameter(0)\n  ROOT %n = f32[4]{0} negate(%a)\n}\n"
    body = parse(
        "%p = f32[4]{0} parameter(0)",
        "ROOT %c = f32[4]{0} call(%p), to_apply=%twice",
        computations=called,
    )
    assert body == (Kernel("n", "memory", 0, 32),)


def test_bitcasts_tuples_and_constants_cost_nothing():
    assert parse(
        "%p = f32[4]{0} parameter(0)", "%c = f32[] constant(1)", "%b = f32[2,2]{1,0} bitcast(%p)",
        "%t = (f32[4]{0}, f32[2,2]{1,0}) tuple(%p, %b)", "ROOT %g = f32[4]{0} get-tuple-element(%t), index=0",
    ) == ()  # fmt: skip


def test_a_convolution_and_its_two_gradients_have_the_same_flops():
    convolutions = [op for op in sample("convolution") if op.kind == "conv"]
    # y is (8, 32, 16, 16), each element a sum over 3 x 3 taps of 16 channels.
    assert [op.flops for op in convolutions] == [2 * (8 * 32 * 16 * 16) * (3 * 3 * 16)] * 3
    # x padded to (8, 16, 33, 33), w (32, 16, 3, 3) and y are read or written once each.
    assert {op.bytes for op in convolutions} == {
        4 * (8 * 16 * 33 * 33 + 32 * 16 * 3 * 3 + 8 * 32 * 16 * 16)
    }


# Control flow, in compiled samples


def test_a_loop_repeats_its_body_and_overlaps_inside_it():
    (loop,) = (op for op in sample("ring") if isinstance(op, Loop))
    assert loop.count == 7
    kinds = [type(op).__name__ if not isinstance(op, Kernel) else op.kind for op in loop.body]
    assert kinds == ["memory", "memory", "Start", "gemm", "memory", "Done"]
    assert work_of((loop,)).collectives == {"collective_permute": 7 * 64 * 64 * 4}


def test_products_fused_with_slices_in_a_scan_are_counted():
    # The forward pass has x @ w in 3 layers of (32, 64) by (64, 64), the backward pass two products
    # for each, whether or not the first is needed.
    assert work_of(sample("scan")).flops == {"f32": 3 * 3 * 2 * 32 * 64 * 64}


def test_a_scan_reads_one_layer_at_a_time():
    loops = [op for op in sample("scan") if isinstance(op, Loop)]
    products = [
        op for loop in loops for op in loop.body if isinstance(op, Kernel) and op.kind == "gemm"
    ]
    assert {op.bytes for op in products} == {4 * (32 * 64 + 64 * 64 + 32 * 64)}


def test_a_conditional_takes_its_longer_branch():
    body = sample("conditional")  # tanh(x @ x) @ x against 2 * x, x (128, 128)
    assert work_of(body).flops == {"f32": 2 * 2 * 128**3}


def test_a_trip_count_is_read_from_the_condition_when_it_is_not_annotated():
    text = (DATA / "ring.hlo.txt").read_text()
    without = text.replace('"known_trip_count":{"n":"7"},', "")
    assert without != text
    assert parse_hlo(without) == parse_hlo(text)


def test_zero2_scatters_the_gradients_and_gathers_the_parameters():
    parameters = 4 * (64 * 128 + 128 * 64)
    assert work_of(sample("zero2")).collectives == {
        "reduce_scatter": parameters,
        "all_gather": parameters,
    }


# Errors


def test_an_unknown_opcode_is_named_and_priced_by_its_bytes():
    parsed = parse("%p = f32[4]{0} parameter(0)", "ROOT %r = f32[4]{0} frobnicate(%p)")
    assert parsed == (Kernel("r", "memory", 0.0, 16 + 16, "f32", unmodelled="frobnicate"),)


def test_an_unknown_custom_call_is_named_and_priced_by_its_bytes():
    line = 'ROOT %r = f32[4]{0} custom-call(%p), custom_call_target="mystery"'
    (kernel,) = parse("%p = f32[4]{0} parameter(0)", line)
    assert (kernel.unmodelled, kernel.bytes) == ("custom-call mystery", 32)


def test_a_triangular_solve_of_cublas_is_no_product():
    line = (
        "ROOT %r = (f32[4]{0}, s8[64]{0}) custom-call(%p, %p),"
        ' custom_call_target="__cublas$triangularSolve"'
    )
    (kernel,) = parse("%p = f32[4]{0} parameter(0)", line)
    unmodelled = "custom-call __cublas$triangularSolve"
    assert kernel == Kernel("r", "memory", 0.0, 3 * 16, "f32", unmodelled=unmodelled)


def test_an_unknown_element_type_is_named():
    with pytest.raises(HloError, match="'f7'"):
        parse("%p = f7[4]{0} parameter(0)", "ROOT %r = f7[4]{0} negate(%p)")


def test_a_loop_of_unknown_length_is_refused_or_counts_once():
    text = (DATA / "ring.hlo.txt").read_text()
    endless = text.replace('"known_trip_count":{"n":"7"},', "").replace(
        "direction=LT", "direction=NE"
    )
    with pytest.raises(HloError, match="without a known trip count"):
        parse_hlo(endless)
    once = [
        replace(op, count=1) if isinstance(op, Loop) and op.count == 7 else op
        for op in parse_hlo(text)
    ]
    assert list(parse_hlo(endless, endless_once=True)) == once


COUNTING = """
%body (carried: (s32[], s32[])) -> (s32[], s32[]) {{
  %carried = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%carried), index=0
  %by = s32[] get-tuple-element(%carried), index=1
  %step = s32[] constant({step})
  %next = s32[] add(%i, {added})
  ROOT %result = (s32[], s32[]) tuple(%next, %by)
}}

%condition (tested: (s32[], s32[])) -> pred[] {{
  %tested = (s32[], s32[]) parameter(0)
  %counter = s32[] get-tuple-element(%tested), index=0
  %bound = s32[] constant(10)
  ROOT %less = pred[] compare(%counter, %bound), direction=LT
}}
"""


def counting_loop(start: str, step: int = 1, added: str = "%step") -> tuple:
    """Return the ops of `while i < 10: i += added`, without a known trip count."""
    return parse(
        "%p = s32[] parameter(0)",
        "%start = s32[] constant(2)",
        f"%init = (s32[], s32[]) tuple({start}, %p)",
        "ROOT %w = (s32[], s32[]) while(%init), condition=%condition, body=%body",
        computations=COUNTING.format(step=step, added=added),
    )


@pytest.mark.parametrize(("step", "count"), [(1, 8), (3, 3), (100, 1)])
def test_a_trip_count_follows_from_the_start_and_the_step_of_the_counter(step, count):
    (loop,) = counting_loop("%start", step)
    assert loop.count == count


@pytest.mark.parametrize(
    "options",
    [{"start": "%p"}, {"start": "%start", "added": "%by"}, {"start": "%start", "step": 0}],
)
def test_a_counter_that_depends_on_data_gives_no_trip_count(options):
    with pytest.raises(HloError, match="without a known trip count"):
        counting_loop(**options)


@pytest.mark.parametrize(("text", "message"), [("", "HloModule"), ("HloModule m\n", "ENTRY")])
def test_text_without_a_module_is_refused(text, message):
    with pytest.raises(HloError, match=message):
        parse_hlo(text)


def test_the_error_of_an_invalid_line_shows_it():
    with pytest.raises(HloError, match=r"line 10 is not understood: '%p = nonsense'"):
        parse("%p = nonsense")


# Parts of a training step


def test_the_op_name_of_a_kernel_gives_its_training_phase() -> None:
    names = [
        "jit(step)/jvp(Net)/mul",
        "jit(step)/transpose(jvp(Net))/jvp(Net)/rematted_computation/mul",
        "jit(step)/transpose(jvp(Net))/mul",
        "jit(step)/mul",
    ]
    lines = [
        f'%k{i} = f32[4]{{0}} multiply(%p, %p), metadata={{op_name="{name}"}}'
        for i, name in enumerate(names)
    ]
    lines.insert(2, "%copy = f32[4]{0} copy(%k1)")
    ops = parse("%p = f32[4]{0} parameter(0)", *lines)
    assert [op.phase for op in ops] == ["forward", "recompute", "recompute", "backward", "update"]
