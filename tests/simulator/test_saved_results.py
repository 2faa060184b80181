"""Recomputation of all but saved results: its products, its memory, and wrong input."""

from typing import Any

import pytest

from simulator.hardware.cluster import Cluster
from simulator.hardware.description import ClusterError, validate
from simulator.transformer import Execution, Machine, Transformer, predict, search_layouts
from simulator.transformer.layer import layer_passes
from simulator.transformer.pass_cost import linear_passes
from simulator.transformer.training_memory import saved_activations

H100 = Machine(Cluster.load("dgx_h100"))
LLAMA = Transformer(
    layers=8,
    hidden=4096,
    heads=32,
    kv_heads=8,
    ffn=14336,
    seq=4096,
    vocab=32000,
    gated=True,
    tied=False,
    learned_positions=False,
    biases=False,
    dropout=False,
    attention="flash2",
)
ALL = ("queries", "keys", "values", "context", "output", "gate", "up")


def execution(*saved: str, **fields: Any) -> Execution:
    return validate(
        Execution,
        {"global_batch": 1, "recompute": "unsaved", "saved": list(saved)} | fields,
        "execution",
    )


def recomputed_seconds(plan: Execution, model: Transformer = LLAMA) -> float:
    return layer_passes(model, plan, H100).recompute.compute


def product_seconds(out: int, inner: int, plan: Execution, model: Transformer = LLAMA) -> float:
    return linear_passes(((out, inner),), model, plan, H100)[0].compute


@pytest.mark.parametrize(
    ("result", "out", "inner"), [("output", 4096, 4096), ("keys", 1024, 4096), ("up", 14336, 4096)]
)
def test_a_result_that_is_not_saved_costs_its_product(result: str, out: int, inner: int) -> None:
    saved, unsaved = execution(*ALL), execution(*(name for name in ALL if name != result))
    more = recomputed_seconds(unsaved) - recomputed_seconds(saved)
    assert more == pytest.approx(product_seconds(out, inner, saved))


def test_a_context_that_is_not_saved_costs_fused_attention_but_no_product() -> None:
    saved, unsaved = execution(*ALL), execution(*(name for name in ALL if name != "context"))
    more = recomputed_seconds(unsaved) - recomputed_seconds(saved)
    flops = 2.0 * 32 * 4096**2 * (128 + 128) / 2
    assert more == pytest.approx(flops / H100.flash("flash2").forward + H100.launch_seconds)


def test_a_policy_that_saves_nothing_leaves_out_the_last_product() -> None:
    whole = layer_passes(LLAMA, execution(recompute="full"), H100).recompute
    nothing = layer_passes(LLAMA, execution(), H100).recompute
    assert whole.compute - nothing.compute == pytest.approx(
        product_seconds(4096, 14336, execution())
    )
    assert whole.flops - nothing.flops == pytest.approx(2.0 * 4096 * 4096 * 14336)
    every = layer_passes(LLAMA, execution(*ALL), H100).recompute
    assert 0 < every.compute < nothing.compute / 5
    assert every.flops == 0


def test_the_sum_of_outputs_over_the_tensor_axis_is_repeated_with_their_product() -> None:
    saved, unsaved = execution(*ALL, tensor=4), execution(tensor=4)
    passes = [layer_passes(LLAMA, plan, H100).recompute for plan in (saved, unsaved)]
    ring = H100.network.ring(4)
    summed = H100.network.seconds("all_reduce", 2.0 * 4096 * 4096, ring)
    assert [each.communication for each in passes] == [0, pytest.approx(summed)]


def test_saved_results_take_their_bytes() -> None:
    tokens, inputs = 4096, 2.0 * 4096 * 4096
    assert saved_activations(LLAMA, execution()) == inputs
    widths = {"queries": 4096, "keys": 1024, "values": 1024, "output": 4096}
    widths |= {"gate": 14336, "up": 14336, "context": 4096 + 2 * 32}
    for result, width in widths.items():
        more = saved_activations(LLAMA, execution(result)) - inputs
        assert more == pytest.approx(2.0 * tokens * width)


def test_mamba_and_experts_save_their_products_together() -> None:
    mamba = {"heads": 64, "head_size": 64, "state": 128, "groups": 8}
    experts = {"count": 8, "top_k": 2, "ffn": 4096}
    changes = {"pattern": "ME*-ME*-", "mamba": mamba, "experts": experts}
    hybrid = validate(Transformer, LLAMA.fields() | changes, "model")
    together = ("queries", "keys", "values", "output"), ("up", "gate")
    for kind, saved in zip(hybrid.kinds[:2], together, strict=True):
        for results, less in ((saved, True), (saved[1:], False)):
            plans = execution(*results), execution()
            seconds = [layer_passes(hybrid, plan, H100, kind).recompute.compute for plan in plans]
            num_bytes = [saved_activations(hybrid, plan, kind) for plan in plans]
            assert (seconds[0] < seconds[1]) == less
            assert (num_bytes[0] > num_bytes[1]) == less


def test_a_layer_that_saves_all_products_saves_its_input_once() -> None:
    mamba = {"heads": 64, "head_size": 64, "state": 128, "groups": 8}
    experts = {"count": 8, "top_k": 2, "ffn": 4096}
    changes = {"pattern": "ME*-ME*-", "mamba": mamba, "experts": experts}
    hybrid = validate(Transformer, LLAMA.fields() | changes, "model")
    for kind in hybrid.kinds[:2]:
        everything = saved_activations(hybrid, execution(recompute="none"), kind)
        assert saved_activations(hybrid, execution(*ALL), kind) == everything


def test_steps_are_faster_and_larger_the_more_is_saved() -> None:
    policies = ((), ("queries", "keys", "values"), ("queries", "keys", "values", "output"), ALL)
    steps = [predict(LLAMA, execution(*saved), H100) for saved in policies]
    seconds = [step.seconds for step in steps]
    assert seconds == sorted(seconds, reverse=True)
    activations = [step.memory.parts["activations"] for step in steps]
    assert activations == sorted(activations)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"saved": ["down"]}, r"saved.*down.*'queries', 'keys', 'values', 'context'"),
        (
            {"recompute": "full", "saved": ["up"]},
            "saved: given up with recompute full, expected together with recompute unsaved",
        ),
    ],
)
def test_saved_results_that_cannot_be_are_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ClusterError, match=why):
        validate(Execution, {"global_batch": 1, "recompute": "unsaved"} | fields, "execution")


def test_a_search_keeps_a_policy_or_replaces_it() -> None:
    plan = execution(*ALL, global_batch=8)
    kept = search_layouts(LLAMA, plan, Machine(H100.cluster.with_size(1)), kept=("recompute",))
    assert {layout.execution.saved for layout in kept.fitting} == {ALL}
    free = search_layouts(LLAMA, plan, Machine(H100.cluster.with_size(1)))
    assert {layout.execution.saved for layout in free.fitting} == {()}
