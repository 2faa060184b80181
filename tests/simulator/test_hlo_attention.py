"""Fused attention in compiled programs: cuDNN's calls in the form that JAX emits."""

import json

import pytest

from simulator.costs.kernel_model import KernelModel
from simulator.hardware.cluster import Cluster
from simulator.hlo import HloError
from simulator.transformer import Execution, Machine, Transformer
from simulator.transformer.layer import layer_passes
from simulator.work import Kernel
from tests.simulator.test_hlo import parse

BATCH, HEADS, QUERIES, KEYS, SIZE = 2, 3, 8, 16, 4
Q = f"bf16[{BATCH},{QUERIES},{HEADS},{SIZE}]"
K = f"bf16[{BATCH},{KEYS},{HEADS},{SIZE}]"
STATISTICS = f"f32[{BATCH},{HEADS},{QUERIES}]"
SCORES = [str(size) for size in (BATCH, HEADS, QUERIES, KEYS)]


def config(mask: str = "NO_MASK", **fields: object) -> str:
    shape = {
        "element_type": "BF16",
        "dimensions": SCORES,
        "layout": {"minor_to_major": ["3", "2", "1", "0"]},
    }
    inner = {
        "algorithm": {"algo_id": "0"},
        "intermediate_tensor_shape": shape,
        "mask_type": mask,
        **fields,
    }
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": inner})


def call(target: str, backend_config: str) -> Kernel:
    backward = "Backward" in target
    operands, results = (
        ("%q, %k, %v, %s, %o, %o", f"{Q}, {K}, {K}")
        if backward
        else ("%q, %k, %v", f"{Q}, {STATISTICS}")
    )
    (kernel,) = parse(
        f"%q = {Q} parameter(0)",
        f"%k = {K} parameter(1)",
        f"%v = {K} parameter(2)",
        f"%o = {Q} parameter(3)",
        f"%s = {STATISTICS} parameter(4)",
        f'%f = ({results}, u8[4096]{{0}}) custom-call({operands}), custom_call_target="{target}", '
        f"backend_config={backend_config}",
    )
    return kernel


QUERY_BYTES, KEY_BYTES = 2 * BATCH * QUERIES * HEADS * SIZE, 2 * BATCH * KEYS * HEADS * SIZE
STATISTICS_BYTES = 4 * BATCH * HEADS * QUERIES


@pytest.mark.parametrize("target", ["__cudnn$fmhaSoftmax", "__cudnn$fmhaScaleBiasSoftmaxDropout"])
def test_the_forward_pass_has_the_flop_of_two_products(target: str) -> None:
    flops = 2 * 2 * BATCH * HEADS * QUERIES * KEYS * SIZE
    # queries, results, keys, values and statistics, without scratch memory
    moved = 2 * QUERY_BYTES + 2 * KEY_BYTES + STATISTICS_BYTES
    assert call(target, config()) == Kernel("f", "attention", flops, moved, "bf16")


def test_the_backward_pass_has_the_flop_of_five_products() -> None:
    flops = 5 * 2 * BATCH * HEADS * QUERIES * KEYS * SIZE
    moved = 4 * QUERY_BYTES + 4 * KEY_BYTES + STATISTICS_BYTES
    assert call("__cudnn$fmhaSoftmaxBackward", config()) == Kernel(
        "f", "attention backward", flops, moved, "bf16"
    )


@pytest.mark.parametrize(
    ("mask", "window", "pairs"),
    [
        ("NO_MASK", 0, QUERIES * KEYS),
        ("PADDING", 0, QUERIES * KEYS),
        ("CAUSAL", 0, 1 + 2 + 3 + 4 + 5 + 6 + 7 + 8),
        ("PADDING_CAUSAL", 0, 36),
        ("CAUSAL", 3, 1 + 2 + 3 + 3 + 3 + 3 + 3 + 3),
        ("CAUSAL", 100, 36),
    ],
)
def test_masked_pairs_have_no_flop(mask: str, window: int, pairs: int) -> None:
    kernel = call("__cudnn$fmhaSoftmax", config(mask, sliding_window_length=window))
    assert kernel.flops == 2 * 2 * BATCH * HEADS * pairs * SIZE


@pytest.mark.parametrize(
    ("backend_config", "message"),
    [
        ("{", "backend_config is '{'; expected a JSON object"),
        ("[]", r"backend_config is '\[\]'; expected a JSON object"),
        (
            '{"cudnn_fmha_backend_config": 3}',
            "no 'intermediate_tensor_shape' of 4 dims in its backend_config",
        ),
        (
            '{"cudnn_fmha_backend_config": {}}',
            "no 'intermediate_tensor_shape' of 4 dims in its backend_config",
        ),
        (config().replace('"2", "3", "8"', '"2", "3"'), "no 'intermediate_tensor_shape' of 4 dims"),
        (
            config().replace('"3", "8"', '"3", "eight"'),
            "its operands or attributes do not fit its kind",
        ),
    ],
)
def test_the_error_of_a_configuration_without_sizes_shows_the_call(
    backend_config: str, message: str
) -> None:
    with pytest.raises(HloError, match=f"^HLO line 15, %f = custom-call.*{message}"):
        call("__cudnn$fmhaSoftmax", backend_config)


@pytest.mark.parametrize("name", ["dgx_a100_80", "dgx_h100"])
def test_seconds_of_fused_attention_equal_those_of_the_closed_form(name: str) -> None:
    batch, heads, length, size = 2, 16, 4096, 128
    pairs = batch * heads * length * (length + 1) // 2
    arrays = 2 * batch * heads * length * size
    machine = Machine(Cluster.load(name))
    device = KernelModel(machine.cluster.device)
    forward = device.seconds(Kernel("f", "attention", 4.0 * size * pairs, 4 * arrays, "bf16"))
    backward = device.seconds(
        Kernel("b", "attention backward", 10.0 * size * pairs, 8 * arrays, "bf16")
    )
    # The generations differ only in this kernel; the ratio of its times is that of the parts of the
    # peak that they reach.
    first, second = (
        layer_passes(
            Transformer(
                layers=1,
                hidden=heads * size,
                heads=heads,
                seq=length,
                vocab=512,
                attention=attention,
            ),
            Execution(tensor=1, pipeline=1, data=1, microbatch=batch, global_batch=batch),
            machine,
        )
        for attention in ("flash", "flash2")
    )
    flash, flash2 = (
        machine.cluster.device.kernels.attention.flash,
        machine.cluster.device.kernels.attention.flash2,
    )
    longer = (
        first.forward.compute - second.forward.compute,
        first.backward.compute - second.backward.compute,
    )
    ratios = flash2.forward / flash.forward, flash2.backward / flash.backward
    assert longer == pytest.approx(
        ((ratios[0] - 1) * forward, (ratios[1] - 1) * backward), rel=2e-2
    )
