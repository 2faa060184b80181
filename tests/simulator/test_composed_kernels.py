"""Operations composed of elementwise kernels: traffic, launches and saved bytes by hand."""

from dataclasses import replace

import pytest

from simulator.hardware.cluster import Cluster
from simulator.transformer import EAGER, Execution, Machine, Transformer, memory_of, predict
from simulator.transformer.composed_kernels import COMPOSED, composed_passes
from simulator.transformer.layer import embedding_passes, head_passes, layer_passes
from simulator.transformer.pass_cost import PassCost
from simulator.transformer.ring_attention import ring_passes
from simulator.transformer.scenario import ComposedOperation

LLAMA = Transformer(
    layers=4,
    hidden=4096,
    heads=32,
    ffn=11008,
    seq=2048,
    vocab=128000,
    gated=True,
    tied=False,
    learned_positions=False,
    biases=False,
    dropout=False,
)
FUSED = Execution(tensor=2, global_batch=4, microbatch=2)
SCORES = 2 * 16 * 2048**2
STREAM = 2 * 2048 * 4096


def a100() -> Machine:
    return Machine(Cluster.load("dgx_a100_80"))


def test_a_norm_in_f32_is_repeated_unless_its_layer_is() -> None:
    machine = a100()
    for recompute, num_bytes, kernels in (("none", 18 + 26, 6), ("full", 18, 2)):
        fused = FUSED.model_copy(update={"recompute": recompute})
        composed = fused.model_copy(update={"composed": ("norm_in_f32",)})
        before = layer_passes(LLAMA, fused, machine)
        after = layer_passes(LLAMA, composed, machine)
        assert after.forward.kernels - before.forward.kernels == 2 * 2
        assert after.backward.kernels - before.backward.kernels == 2 * kernels
        added = after.backward.compute - before.backward.compute
        slope = machine.memory_seconds(2.0 * num_bytes * STREAM, 1) - machine.memory_seconds(0, 1)
        assert added == pytest.approx(slope, rel=0.2)
        assert memory_of(LLAMA, composed) == memory_of(LLAMA, fused)


@pytest.mark.parametrize(
    ("operation", "elements", "count", "saved"),
    [
        ("norm", STREAM, 2, 2 * 6 * STREAM),
        ("rotary", STREAM, 1, 0),
        ("complex_rotary", STREAM, 1, 0),
        ("activation", 2 * 2048 * 11008 / 2, 1, 2 * 2 * 2048 * 11008 / 2),
        ("softmax", SCORES, 1, 4 * SCORES),
    ],
)
def test_a_composed_operation_adds_its_traffic_launches_and_saved_bytes(
    operation: ComposedOperation, elements: float, count: int, saved: float
) -> None:
    machine = a100()
    composed = FUSED.model_copy(update={"composed": (operation,)})
    fused = layer_passes(LLAMA, FUSED, machine)
    slower = layer_passes(LLAMA, composed, machine)
    kernels = COMPOSED[operation]
    added = machine.memory_seconds(kernels.forward_bytes * elements, kernels.forward_kernels)
    assert slower.forward.compute - fused.forward.compute == pytest.approx(count * added)
    assert slower.forward.kernels - fused.forward.kernels == count * kernels.forward_kernels
    added = machine.memory_seconds(kernels.backward_bytes * elements, kernels.backward_kernels)
    assert slower.backward.compute - fused.backward.compute == pytest.approx(count * added)
    bytes_added = memory_of(LLAMA, composed).activations - memory_of(LLAMA, FUSED).activations
    assert bytes_added == pytest.approx(LLAMA.layers * saved)
    assert composed_passes(operation, elements, FUSED, machine)[0].compute == 0


def test_gathered_logits_cost_the_whole_vocabulary_and_an_all_gather() -> None:
    machine = a100()
    divided = head_passes(LLAMA, FUSED, machine)
    gathered = head_passes(LLAMA, FUSED.model_copy(update={"gathered_logits": True}), machine)
    tokens = 2 * 2048
    whole = machine.memory_seconds(38.0 * tokens * 128000, 7)
    half = machine.memory_seconds(38.0 * tokens * 64000, 7)
    assert gathered[0].compute - divided[0].compute == pytest.approx(whole - half)
    ring = machine.network.ring(2)
    moved = machine.network.seconds("all_gather", 2.0 * tokens * 128000, ring)
    assert gathered[0].communication == pytest.approx(moved)


def test_gathered_logits_are_in_memory_with_their_copies() -> None:
    logits = 2 * 2048 * 128000
    weight = 4.0 * 128000 * 4096  # gradient of the output embedding, which tensor divides
    assert memory_of(LLAMA, FUSED).temporaries == 10.0 * logits / 2 + weight / 2
    gathered = FUSED.model_copy(update={"gathered_logits": True})
    parts = 2.0 + 2.0 / 2
    assert memory_of(LLAMA, gathered).temporaries == (18.0 + parts) * logits + weight / 2
    alone = gathered.model_copy(update={"tensor": 1})
    assert memory_of(LLAMA, alone).temporaries == 18.0 * logits + weight


def test_gradients_of_scores_are_in_memory_where_kernels_are_composed() -> None:
    model = LLAMA.model_copy(update={"seq": 16384, "vocab": 32, "attention": "naive"})
    execution = Execution(tensor=8, global_batch=1, microbatch=1)
    composed = execution.model_copy(update={"composed": ("softmax",)})
    scores = 4 * 16384**2
    added = memory_of(model, composed).temporaries - memory_of(model, execution).temporaries
    assert added == pytest.approx(8.0 * scores, rel=0.15)


def test_a_spare_microbatch_adds_its_activations_to_each_device_of_a_pipeline() -> None:
    execution = Execution(pipeline=2, global_batch=8, microbatch=1)
    spare = execution.model_copy(update={"spare_microbatches": 1})
    model = LLAMA.model_copy(update={"vocab": 128})
    activations = memory_of(model, execution).activations
    assert memory_of(model, spare).activations == pytest.approx(1.5 * activations)
    alone = Execution(global_batch=8, microbatch=1)
    spared = alone.model_copy(update={"spare_microbatches": 1})
    assert memory_of(model, spared) == memory_of(model, alone)


def test_fragmentation_takes_a_part_of_activations_and_temporaries() -> None:
    cluster = Cluster.load("dgx_a100_80")
    whole = predict(LLAMA, FUSED, Machine(cluster, replace(EAGER, fragmentation=0.0))).memory
    less = predict(LLAMA, FUSED, Machine(cluster, replace(EAGER, fragmentation=0.1))).memory
    dynamic = whole.parts["activations"] + whole.parts["temporaries"]
    assert less.reserved - whole.reserved == pytest.approx(0.1 * dynamic)
    assert less.total == whole.total


def test_the_recomputed_head_is_a_further_forward_pass() -> None:
    machine = a100()
    full = FUSED.model_copy(update={"recompute": "full"})
    forward, backward = head_passes(LLAMA, full, machine)
    again = full.model_copy(update={"recompute_head": True})
    assert head_passes(LLAMA, again, machine) == (
        forward,
        backward + forward._replace(flops=0.0),
    )
    more = (
        predict(LLAMA, again, machine).hardware_flops - predict(LLAMA, full, machine).hardware_flops
    )
    assert more == 2 * FUSED.global_batch * LLAMA.seq * LLAMA.hidden * LLAMA.vocab
    without = FUSED.model_copy(update={"recompute_head": True})
    assert head_passes(LLAMA, without, machine) == head_passes(LLAMA, FUSED, machine)


@pytest.mark.parametrize("embedding_products", [False, True])
def test_a_vocabulary_is_padded_to_divide_over_devices(embedding_products: bool) -> None:
    machine = a100()
    execution = FUSED.model_copy(update={"embedding_products": embedding_products})
    odd, even = (LLAMA.model_copy(update={"vocab": vocab}) for vocab in (50257, 50258))
    assert embedding_passes(odd, execution, machine) == embedding_passes(even, execution, machine)
    assert head_passes(odd, execution, machine) == head_passes(even, execution, machine)


def test_flash_attention_gets_faster_with_its_generation() -> None:
    machine = a100()
    seconds = [
        predict(LLAMA.model_copy(update={"attention": attention}), FUSED, machine).seconds
        for attention in ("naive", "flash1", "flash", "flash2")
    ]
    assert seconds == sorted(seconds, reverse=True)


def test_fused_casts_to_8_bits_are_those_of_the_last_product_and_of_weights_once_a_step() -> None:
    model = LLAMA.model_copy(update={"precision": "f8"})
    cluster = Cluster.load("dgx_h100")
    execution = Execution(tensor=1, global_batch=8, microbatch=1)
    plain = layer_passes(model, execution, Machine(cluster))
    fused = layer_passes(model, execution, Machine(cluster, replace(EAGER, fused_casts=True)))
    machine = Machine(cluster)
    h, tokens = 4096, 2048
    parts = (((3 * h, h), (h, h)), ((2 * 11008, h), (h, 11008)))
    for pass_name, whole, remaining in (
        (
            "forward",
            [(sum(4.0 * tokens * i + 4.0 * o * i for o, i in part), 4) for part in parts],
            [
                (4.0 * tokens * part[-1][1] + sum(4.0 * o * i for o, i in part) / 8, 3)
                for part in parts
            ],
        ),
        (
            "backward",
            [(sum(4.0 * tokens * o for o, _ in part), 2) for part in parts],
            [(4.0 * tokens * part[-1][0], 1) for part in parts],
        ),
    ):
        saved = sum(machine.memory_seconds(*cast) for cast in whole)
        saved -= sum(machine.memory_seconds(*cast) for cast in remaining)
        difference = getattr(plain, pass_name).compute - getattr(fused, pass_name).compute
        assert difference == pytest.approx(saved)


def test_the_contention_of_a_backend_replaces_that_of_links_within_a_host() -> None:
    machine = Machine(Cluster.load("dgx_h100").with_size(2), replace(EAGER, tensor_contention=1.2))
    assert machine.tensor_contention(False) == 1.2
    assert machine.tensor_contention(True) == pytest.approx(1.47)
    assert Machine(machine.cluster).tensor_contention(False) == pytest.approx(1.47)


def test_a_ring_adds_sends_that_attention_does_not_hide_and_kernels_that_join_results() -> None:
    machine = Machine(Cluster.load("dgx_h100"))
    model = LLAMA.model_copy(update={"attention": "flash2", "kv_heads": 8, "seq": 8192})
    execution = Execution(context=4, data=2, global_batch=2, context_exchange="ring")
    core = (PassCost(compute=4e-3), PassCost(compute=8e-3))
    forward, backward = ring_passes(model, execution, machine, core)
    tokens, steps = 8192 // 4, 3
    send = machine.network.send_seconds(2.0 * tokens * 2 * 8 * 128, 1)
    assert send < 1e-3  # hidden by a step of attention, up to contention
    assert forward.communication == pytest.approx(steps * 0.47 * send)
    assert forward.communication + forward.hidden == pytest.approx(steps * send)
    back = machine.network.send_seconds(4.0 * tokens * 2 * 8 * 128, 1)
    assert backward.communication == pytest.approx(steps * 0.47 * back)
    joins = machine.memory_seconds(steps * 10.0 * tokens * 4096, steps)
    assert forward.compute == pytest.approx(joins)
    # heads need not divide over the ring, and exchanged heads must
    many = execution.model_copy(update={"context": 8, "data": 1})
    predict(model.model_copy(update={"heads": 4, "kv_heads": 4}), many, machine)
    exchanged = many.model_copy(update={"context_exchange": "all_to_all"})
    with pytest.raises(ValueError, match="divides heads"):
        predict(model.model_copy(update={"heads": 4, "kv_heads": 4}), exchanged, machine)


def test_a_list_of_operations_in_a_file_is_read_and_an_unknown_one_refused() -> None:
    fields = {"global_batch": 1, "composed": ["norm", "rotary"]}
    assert Execution.model_validate(fields).composed == ("norm", "rotary")
    with pytest.raises(ValueError, match="composed"):
        Execution.model_validate(fields | {"composed": ["norms"]})
