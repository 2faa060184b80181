"""What software does beyond the products of a step: collectives, sums, casts, tiles and norms."""

from dataclasses import replace

import pytest

from simulator.hardware.cluster import Cluster
from simulator.transformer import EAGER, Execution, Machine, Transformer, memory_of, predict
from simulator.transformer.experts import Routing
from simulator.transformer.layer import layer_passes, passes_by_kind
from simulator.transformer.layer_kinds import LayerKind, Mixer
from simulator.transformer.pass_cost import accumulation_seconds

LLAMA = Transformer(
    layers=8,
    hidden=4096,
    heads=32,
    ffn=11008,
    seq=2048,
    vocab=32000,
    gated=True,
    tied=False,
    learned_positions=False,
    biases=False,
    dropout=False,
    attention="cudnn",
)
MOE = Transformer.model_validate(
    LLAMA.fields() | {"experts": {"count": 16, "top_k": 2, "ffn": 4096, "imbalance": 1.0}}
)
A100 = Machine(Cluster.load("dgx_a100_80"))
B200 = Machine(Cluster.load("dgx_b200"))


def with_(model: Transformer, **changes: object) -> Transformer:
    return Transformer.model_validate(model.fields() | changes)


def differently(execution: Execution, **changes: object) -> Execution:
    return Execution.model_validate(execution.fields() | changes)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_each_gate_of_its_own_sums_the_gradient_of_its_input(sequence_parallel: bool) -> None:
    one = Execution(tensor=4, global_batch=1, sequence_parallel=sequence_parallel)
    two = differently(one, separate_gates=True)
    before, after = layer_passes(LLAMA, one, A100), layer_passes(LLAMA, two, A100)
    stream = 2.0 * 2048 * 4096
    reduced = A100.network.seconds("all_reduce", stream, A100.network.ring(4))
    added = after.backward.communication - before.backward.communication
    assert added == pytest.approx(0.0 if sequence_parallel else reduced)
    assert after.forward.communication == before.forward.communication
    assert after.forward.flops == before.forward.flops
    assert after.forward.kernels == before.forward.kernels + 1


def test_gathered_inputs_that_are_saved_need_memory_instead_of_a_gather() -> None:
    again = Execution(tensor=4, global_batch=1, sequence_parallel=True)
    saved = differently(again, saves_gathered=True)
    before, after = layer_passes(LLAMA, again, A100), layer_passes(LLAMA, saved, A100)
    gather = A100.network.seconds("all_gather", 2.0 * 2048 * 4096, A100.network.ring(4))
    # before the projections of attention, and before the MLP
    less = before.backward.communication - after.backward.communication
    assert less == pytest.approx(2 * gather)
    more = memory_of(LLAMA, saved).activations - memory_of(LLAMA, again).activations
    assert more == pytest.approx(8 * 2 * 2.0 * 2048 * 4096 * 3 / 4)
    whole = differently(again, sequence_parallel=False)
    assert memory_of(LLAMA, differently(whole, saves_gathered=True)) == memory_of(LLAMA, whole)


def test_complete_sums_of_gradients_take_longer_than_those_of_shards() -> None:
    shards = Execution(data=8, global_batch=8, zero=1)
    complete = differently(shards, all_reduces_gradients=True)
    ring = A100.network.ring(8)
    num_bytes = 4.0 * LLAMA.parameters
    expected = A100.network.seconds("all_reduce", num_bytes, ring)
    expected -= A100.network.seconds("reduce_scatter", num_bytes, ring)
    seconds = [predict(LLAMA, plan, A100).exposed["data"] for plan in (shards, complete)]
    assert seconds[1] - seconds[0] == pytest.approx(expected, rel=1e-3)
    unsharded = differently(shards, zero=0)
    assert predict(LLAMA, differently(unsharded, all_reduces_gradients=True), A100) == predict(
        LLAMA, unsharded, A100
    )


@pytest.mark.parametrize("overlapped", [False, True])
def test_copies_of_gradients_around_their_sum_are_exposed(overlapped: bool) -> None:
    plain = Execution(data=8, global_batch=8, overlap_gradients=overlapped)
    copied = differently(plain, gradient_copy_bytes=24)
    more = predict(LLAMA, copied, A100).seconds - predict(LLAMA, plain, A100).seconds
    assert more == pytest.approx(A100.memory_seconds(24.0 * LLAMA.parameters, 2), rel=1e-3)
    alone = Execution(global_batch=1)
    assert predict(LLAMA, differently(alone, gradient_copy_bytes=24), A100) == predict(
        LLAMA, alone, A100
    )


def test_buffers_of_gradients_are_in_memory_up_to_the_size_of_all() -> None:
    plan = Execution(global_batch=1, gradient_bytes=2)
    gradients = memory_of(LLAMA, plan).gradients
    few, many = (differently(plan, gradient_buffer_bytes=size) for size in (10**9, 10**12))
    assert memory_of(LLAMA, few).gradients == gradients + 1e9
    assert memory_of(LLAMA, many).gradients == 2 * gradients


def test_autocast_casts_parameters_and_the_residual_stream_in_each_pass() -> None:
    plan = Execution(data=8, global_batch=8, zero=3)
    cast = differently(plan, autocast=True)
    stream, h = 2048 * 4096, 4096
    attention, mlp = (LLAMA.qkv_width + LLAMA.attention_width) * h, 3 * LLAMA.ffn_width * h
    seconds = A100.memory_seconds
    before, after = layer_passes(LLAMA, plan, A100), layer_passes(LLAMA, cast, A100)
    # norms r4 w2 and sums r4 w4 for r2 w2; parameters r4 w2
    forward = 2 * seconds(10.0 * stream, 2) + seconds(6.0 * attention, 2) + seconds(6.0 * mlp, 2)
    assert after.forward.compute - before.forward.compute == pytest.approx(forward)
    # gradients of outputs r4 w2, of the norm's input r2 w4, their sum r8 w4 for r4 w2;
    # gradients of parameters to f32 and to 16 bits for their sum
    backward = 2 * seconds(18.0 * stream, 3) + seconds(12.0 * attention, 4)
    backward += seconds(12.0 * mlp, 4)
    assert after.backward.compute - before.backward.compute == pytest.approx(backward)


def test_autocast_gathers_parameters_of_32_bits() -> None:
    plan = Execution(data=8, global_batch=8, zero=3)
    moved = [
        predict(LLAMA, execution, A100).communication["data"]
        for execution in (plan, differently(plan, autocast=True))
    ]
    ring, table = A100.network.ring(8), LLAMA.vocab * LLAMA.hidden
    layer = (LLAMA.parameters - 2 * table - LLAMA.hidden) / LLAMA.layers

    def more(elements: float, width: int) -> float:
        return A100.network.seconds("all_gather", width * elements, ring)

    expected = 2 * LLAMA.layers * (more(layer, 4) - more(layer, 2))
    expected += 2 * (more(table, 4) - more(table, 2))
    assert moved[1] - moved[0] == pytest.approx(expected, rel=1e-3)


def test_gradients_that_another_kernel_adds_are_read_once_more() -> None:
    plan = Execution(global_batch=4, gradient_bytes=2, separate_accumulation=True)
    # the gradient r2, and the sum r2 w2
    assert accumulation_seconds(1e9, plan, A100) == A100.memory_seconds(6e9, 1)
    alone = differently(plan, global_batch=1)
    assert accumulation_seconds(1e9, alone, A100) == 0
    added = differently(plan, separate_accumulation=False)
    assert predict(LLAMA, added, A100).seconds < predict(LLAMA, plan, A100).seconds


def forward_seconds(model: Transformer, machine: Machine, mixer: Mixer = "attention") -> float:
    """Return the seconds of the forward pass over attention without an MLP."""
    passes = layer_passes(model, Execution(global_batch=1), machine, LayerKind(mixer, None))
    return passes.forward.compute


def test_scores_of_small_heads_take_as_long_as_those_of_larger_ones() -> None:
    sizes = {128: 32, 64: 64, 256: 16}
    seconds = {
        size: forward_seconds(with_(LLAMA, heads=heads, head_size=size, seq=16384), B200)
        for size, heads in sizes.items()
    }
    flops = 2.0 * 32 * 16384**2 * 128 * 2 / 2
    core = flops / (B200.gemms.peak * 0.58)
    assert seconds[64] - seconds[128] == pytest.approx(core, rel=1e-6)
    assert seconds[256] == pytest.approx(seconds[128])
    old = {
        size: forward_seconds(with_(LLAMA, heads=heads, head_size=size, seq=16384), A100)
        for size, heads in sizes.items()
    }
    assert old[64] == pytest.approx(old[128])


def test_a_window_costs_the_tiles_that_it_touches() -> None:
    narrow = with_(LLAMA, seq=16384, window=128, full_attention_every=2)
    seconds = {mixer: forward_seconds(narrow, B200, mixer) for mixer in ("attention", "window")}
    per_key = 2.0 * 32 * 16384 * 256 / (B200.gemms.peak * 0.58)
    keys = narrow.visible_keys("window") / 2 + 384
    assert seconds["attention"] - seconds["window"] == pytest.approx(per_key * (8192 - keys))
    wide = with_(narrow, window=16000)
    assert forward_seconds(wide, B200, "window") == pytest.approx(seconds["attention"])


def test_attention_in_8_bits_is_faster_but_not_the_backward_pass_of_windows() -> None:
    plan = Execution(global_batch=1)
    model = with_(LLAMA, seq=16384, window=128, full_attention_every=2)
    few = with_(model, attention="cudnn_f8")
    full, windows = LayerKind("attention", None), LayerKind("window", None)
    for kind, faster in ((full, True), (windows, False)):
        before, after = (layer_passes(each, plan, B200, kind) for each in (model, few))
        assert after.forward.compute < before.forward.compute
        assert (after.backward.compute < before.backward.compute) == faster
    # a GPU without such fractions computes as in 16 bits
    few, model = with_(LLAMA, attention="cudnn_f8"), LLAMA
    assert predict(few, plan, A100) == predict(model, plan, A100)


def test_biases_of_experts_are_added_expert_by_expert_unless_they_are_fused() -> None:
    biased = with_(MOE, experts=MOE.experts_section.fields() | {"biases": True})
    execution = Execution(data=8, expert=4, global_batch=8)
    routing = Routing.of(MOE, execution)
    experts, rows, kind = 16 // 4, 2048 * 2, MOE.kinds[0]
    assert (routing.rows, routing.experts) == (rows, experts)
    for kernels, groups in (("looped", experts), ("grouped", 1), ("fused", 0)):
        machine = Machine(A100.cluster, replace(EAGER, expert_kernels=kernels))
        before, after = (layer_passes(model, execution, machine, kind) for model in (MOE, biased))
        added = after.forward.compute - before.forward.compute
        expected = machine.memory_seconds(12.0 * rows * 4096, 3) if groups else 0
        assert added == pytest.approx(expected, abs=1e-12)
        launches = after.forward.kernels - before.forward.kernels
        assert launches == (2 * groups + 1 if groups else 0)
        launches = after.backward.kernels - before.backward.kernels
        assert launches == 7 * groups
    # 16 experts with biases of 4096 outputs, and of 4096 for gate and value each
    assert biased.parameters - MOE.parameters == 8 * 16 * 3 * 4096


def test_clamps_before_the_activation_of_experts_are_kernels_of_their_own() -> None:
    clamped = with_(MOE, experts=MOE.experts_section.fields() | {"clamped": True})
    execution, kind = Execution(data=8, expert=4, global_batch=8), MOE.kinds[0]
    routing = Routing.of(MOE, execution)
    elements = routing.rows * routing.inner
    for kernels, factor in (("looped", 1), ("grouped", 1), ("fused", 0)):
        machine = Machine(A100.cluster, replace(EAGER, expert_kernels=kernels))
        before, after = (layer_passes(model, execution, machine, kind) for model in (MOE, clamped))
        forward = after.forward.compute - before.forward.compute
        assert forward == pytest.approx(factor * machine.memory_seconds(16.0 * elements, 3))
        backward = after.backward.compute - before.backward.compute
        assert backward == pytest.approx(factor * machine.memory_seconds(20.0 * elements, 3))
        assert after.forward.kernels - before.forward.kernels == 3 * factor
    saved = [memory_of(model, execution).activations for model in (MOE, clamped)]
    assert saved[1] - saved[0] == pytest.approx(MOE.layers * 4.0 * elements)


def test_clamps_are_true_or_false() -> None:
    with pytest.raises(ValueError, match="clamped"):
        with_(MOE, experts=MOE.experts_section.fields() | {"clamped": "often"})


def test_norms_of_heads_read_and_write_queries_and_keys() -> None:
    normed = with_(LLAMA, kv_heads=8, head_norms=True)
    plain = with_(LLAMA, kv_heads=8)
    plan = Execution(tensor=2, global_batch=1)
    before, after = (layer_passes(model, plan, A100) for model in (plain, normed))
    elements = 2048 * (32 + 8) * 128 / 2
    added = after.forward.compute - before.forward.compute
    assert added == pytest.approx(A100.memory_seconds(4.0 * elements, 2))
    assert after.forward.kernels - before.forward.kernels == 2
    assert normed.parameters - plain.parameters == 8 * 2 * 128


def test_layers_in_16_bits_are_between_none_and_all_of_them() -> None:
    execution, kind = Execution(global_batch=1), MOE.kinds[0]
    passes = [
        passes_by_kind(with_(MOE, precision=precision, layers_in_16_bits=layers), execution, B200)[
            kind
        ]
        for precision, layers in (("nvfp4", 0), ("nvfp4", 2), ("nvfp4", 8), ("bf16", 0))
    ]
    few, some, every, sixteen = (each.forward.compute for each in passes)
    assert some - few == pytest.approx((sixteen - few) / 4)
    assert every == pytest.approx(sixteen)
    assert passes[1].forward.flops == pytest.approx(passes[0].forward.flops)


def test_messages_between_hosts_occupy_the_cores_of_two_channels_each_way() -> None:
    hosts = Machine(Cluster.load("dgx_a100_80").with_size(4))
    far = hosts.exposed_send(1.0, 10.0, between_hosts=True)
    assert far == pytest.approx(4 / hosts.cluster.device.cores)
    within = hosts.exposed_send(1.0, 10.0, between_hosts=False)
    assert within == hosts.exposed_seconds(1.0, 10.0, between_hosts=False)
    assert far < within
    # what doesn't fit beside the computation is exposed whole
    assert hosts.exposed_send(10.0, 1.0, between_hosts=True) == pytest.approx(9.0, rel=0.01)


def test_parameters_of_32_bits_are_cast_in_both_passes_unless_shards_are() -> None:
    whole = Execution(global_batch=8, data=8)
    for stored, casts in ((whole, 1), (differently(whole, zero=3), 0)):
        passes = [
            layer_passes(LLAMA, differently(stored, casts_parameters=cast), A100)
            for cast in (False, True)
        ]
        h, ffn = LLAMA.hidden, LLAMA.ffn_width
        # queries, keys and values; the output; gate and up; down
        moved = A100.memory_seconds(6.0 * h * 4 * h, 2) + A100.memory_seconds(18.0 * h * ffn, 2)
        for name in ("forward", "backward"):
            plain, cast = (getattr(each, name).compute for each in passes)
            assert cast - plain == pytest.approx(casts * moved)


def test_sums_of_gradients_in_pieces_pay_the_latency_of_each() -> None:
    whole = Execution(global_batch=8, data=8)
    pieces = differently(whole, combined_bytes=1 << 27)
    seconds = [predict(LLAMA, each, A100).communication["data"] for each in (whole, pieces)]
    gradients = 4.0 * LLAMA.parameters
    ring, count = A100.data_ring(8, 1), -(-gradients // (1 << 27))
    assert seconds[0] == pytest.approx(
        A100.network.seconds("all_reduce", gradients, ring), rel=1e-3
    )
    each = A100.network.seconds("all_reduce", gradients / count, ring)
    assert seconds[1] == pytest.approx(count * each, rel=1e-3)
    assert seconds[1] > seconds[0]


def test_a_compiled_loss_moves_most_of_the_bytes_of_one_that_is_not_fused() -> None:
    eager = Execution(global_batch=8, microbatch=8)
    compiled, fused = (
        differently(eager, compiled_loss=True),
        differently(eager, fused_loss=True),
    )
    model, logits = with_(LLAMA, vocab=96000), 8 * 2048 * 96000
    seconds = [predict(model, execution, A100).seconds for execution in (fused, compiled, eager)]
    moved = A100.memory_seconds(30.0 * logits, 4) + A100.memory_seconds(18.0 * logits, 2)
    moved -= A100.memory_seconds(4.0 * logits, 1) + A100.memory_seconds(2.0 * logits, 1)
    assert seconds[1] - seconds[0] == pytest.approx(moved, rel=1e-3)
    assert seconds[2] > seconds[1]
    assert memory_of(model, compiled) == memory_of(model, eager)


def test_the_loss_of_pytorch_has_its_log_softmax_and_both_gradients_in_memory() -> None:
    megatron = Execution(global_batch=8, microbatch=8, recompute="full")
    torch = differently(megatron, log_softmax_loss=True)
    model, logits = with_(LLAMA, vocab=96000), 8 * 2048 * 96000
    more = memory_of(model, torch).temporaries - memory_of(model, megatron).temporaries
    assert more == pytest.approx((12.0 - 10.0) * logits)
    less = predict(model, megatron, A100).seconds - predict(model, torch, A100).seconds
    moved = A100.memory_seconds(38.0 * logits, 7) + A100.memory_seconds(22.0 * logits, 4)
    moved -= A100.memory_seconds(22.0 * logits, 3) + A100.memory_seconds(26.0 * logits, 4)
    assert less == pytest.approx(moved, rel=1e-3)


def test_a_loss_in_16_bits_moves_and_keeps_less_than_one_in_32_bits() -> None:
    long = Execution(global_batch=8, microbatch=8, recompute="full")
    short = differently(long, loss_in_16_bits=True)
    fused = differently(long, fused_loss=True)
    model, logits = with_(LLAMA, vocab=96000), 8 * 2048 * 96000
    sizes = [memory_of(model, execution).temporaries for execution in (long, short, fused)]
    assert sizes[0] - sizes[1] == pytest.approx(4.0 * logits)
    seconds = [predict(model, execution, A100).seconds for execution in (fused, short, long)]
    assert seconds == sorted(seconds)
    moved = A100.memory_seconds(12.0 * logits, 4) - A100.memory_seconds(2.0 * logits, 1)
    assert seconds[1] - seconds[0] == pytest.approx(moved, rel=1e-3)
    torch = differently(short, log_softmax_loss=True)
    assert memory_of(model, torch).temporaries == sizes[1]
    added = predict(model, torch, A100).seconds - seconds[0]
    moved = A100.memory_seconds(8.0 * logits, 1) + A100.memory_seconds(10.0 * logits, 3)
    moved -= A100.memory_seconds(4.0 * logits, 1) + A100.memory_seconds(2.0 * logits, 1)
    assert added == pytest.approx(moved, rel=1e-3)


def test_inputs_of_products_are_saved_in_few_bits_where_nothing_else_saves_them() -> None:
    whole = Execution(global_batch=1)
    casts = differently(whole, saves_casts=True)

    def less(model: Transformer) -> float:
        return memory_of(model, whole).activations - memory_of(model, casts).activations

    # a byte of the inputs of both mixer and MLP, and of the second product of the MLP
    inputs = 8 * 2048 * (2 * 4096 + 11008)
    assert less(LLAMA) == 0
    assert less(with_(LLAMA, precision="f8")) == inputs
    assert less(with_(LLAMA, precision="nvfp4")) == (2.0 - 0.5625) * inputs
    half = with_(LLAMA, precision="nvfp4", layers_in_16_bits=4)
    assert less(half) == pytest.approx((2.0 - 0.5625) * inputs / 2)
    # rows of experts are cast, but their router reads 16 bits
    experts = {"count": 8, "top_k": 2, "ffn": 1024, "imbalance": 1.0}
    rows = 8 * 2048 * (4096 + 2 * (4096 + 1024))
    assert less(with_(LLAMA, precision="f8", experts=experts)) == rows


def test_jax_keeps_parameters_once_and_no_logits_in_32_bits() -> None:
    # compiled for H100, a loss of optax has 6 bytes per logit (jaxlib 0.11.2)
    plain = Execution(global_batch=8, microbatch=8, recompute="full")
    jax = differently(plain, casts_parameters=True)
    model, logits = with_(LLAMA, vocab=96000), 8 * 2048 * 96000
    torch_memory, jax_memory = memory_of(model, plain), memory_of(model, jax)
    assert jax_memory.parameters == 0
    assert jax_memory.optimizer == torch_memory.optimizer == 6 * torch_memory.parameters
    less = torch_memory.temporaries - jax_memory.temporaries
    assert less == pytest.approx(4.0 * logits + 2.0 * 96000 * 4096)
    frozen = with_(model, adapters={"rank": 16, "of": "all"})
    assert memory_of(frozen, jax).parameters == memory_of(frozen, plain).parameters
