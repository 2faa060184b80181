"""Encoders before a decoder, transformers without a causal mask, and kernels of XLA."""

from typing import Any

import pytest

from simulator import Cluster
from simulator.transformer import JITTED, Execution, Machine, Transformer, memory_of, predict
from simulator.transformer.composed_kernels import composed_softmax
from simulator.transformer.layer import embedding_passes

T5_XL: dict[str, Any] = {
    "layers": 24,
    "hidden": 2048,
    "heads": 32,
    "head_size": 64,
    "ffn": 5120,
    "seq": 128,
    "vocab": 32128,
    "gated": True,
    "tied": False,
    "biases": False,
    "dropout": False,
    "encoder": {"layers": 24, "seq": 512},
}
VIT_G: dict[str, Any] = {
    "layers": 48,
    "hidden": 1664,
    "heads": 16,
    "ffn": 8192,
    "seq": 257,
    "vocab": 588,
    "causal": False,
}
MACHINE = Machine(Cluster.load("dgx_a100_80").with_size(1), JITTED)


def one_device(**fields: Any) -> Execution:
    return Execution(**({"microbatch": 8, "global_batch": 8} | fields))


@pytest.mark.parametrize(("sizes", "published"), [(T5_XL, 2.85e9), (VIT_G, 1.85e9)])
def test_encoders_have_the_published_parameters(sizes: dict[str, Any], published: float) -> None:
    assert Transformer(**sizes).parameters == pytest.approx(published, rel=0.01)


def test_flops_count_the_tokens_of_each_stack() -> None:
    model = Transformer(**T5_XL)
    h, f, projection = 2048, 5120, 2048 * 2048
    encoder = 512 * (4 * projection + 3 * h * f)
    decoder = 128 * (6 * projection + 3 * h * f) + 512 * 2 * projection
    head = 128 * h * 32128
    # scores and their product with the values, of attention to as many keys
    mixing = 2 * h * (512 * 512 + 128 * 128 + 128 * 512)
    assert model.flops(1) == 6 * (24 * (encoder + decoder + mixing) + head)
    step = predict(model, one_device(), MACHINE)
    assert step.tokens == 8 * (128 + 512)


def test_cross_attention_saves_the_keys_of_the_encoder() -> None:
    long, short = (
        Transformer(**(T5_XL | {"encoder": {"layers": 24, "seq": seq}, "attention": "flash2"}))
        for seq in (512, 256)
    )
    saved = [memory_of(model, one_device()).activations for model in (long, short)]
    keys = 2 * 8 * 256 * 2 * 2048
    assert saved[0] - saved[1] > 24 * keys
    assert saved[0] < 2 * saved[1]


def test_an_encoder_in_a_pipeline_or_with_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="encoder: given with pipeline 2 and context 1"):
        predict(Transformer(**T5_XL), one_device(pipeline=2), MACHINE)
    with pytest.raises(ValueError, match="encoder: given together with window, expected without"):
        Transformer(**(T5_XL | {"window": 64}))


def test_fused_attention_without_a_causal_mask_computes_twice_as_much() -> None:
    sizes = VIT_G | {"seq": 8192, "heads": 13, "attention": "flash2"}
    causal, full = (Transformer(**(sizes | {"causal": causal})) for causal in (True, False))
    seconds = [
        predict(model, one_device(microbatch=1, global_batch=1), MACHINE).forward
        for model in (causal, full)
    ]
    heads, seq, width = 13, 8192, 128
    halved = 48 * 4 * heads * seq**2 * width / 2 / MACHINE.flash("flash2")[0]
    slowest = MACHINE.slowest_of(1)
    assert seconds[1] - seconds[0] == pytest.approx(slowest * halved)


def test_recomputing_all_but_products_is_between_nothing_and_everything() -> None:
    model = Transformer(**(VIT_G | {"attention": "flash2"}))
    saved = {"recompute": "unsaved", "saved": ("queries", "keys", "values", "output", "up")}
    kinds = ({"recompute": "none"}, saved, {"recompute": "full"})
    steps = [predict(model, one_device(**kind), MACHINE) for kind in kinds]
    assert steps[0].recompute == 0 < steps[1].recompute < steps[2].recompute / 2
    memory = [step.memory.parts["activations"] for step in steps]
    assert memory[0] > memory[1] > memory[2]


def test_an_embedding_by_products_computes_the_products_of_its_table() -> None:
    model = Transformer(**(VIT_G | {"vocab": 51200, "learned_positions": False}))
    gathered, computed = (
        embedding_passes(model, one_device(embedding_products=products), MACHINE)
        for products in (False, True)
    )
    flops = 2 * 8 * 257 * 51200 * 1664
    assert [cost.flops for cost in gathered] == [0, 0]
    assert [cost.flops for cost in computed] == [flops, flops]
    assert computed[0].compute > gathered[0].compute


def test_scores_are_padded_where_a_side_is_no_multiple_of_eight() -> None:
    execution = one_device(composed=("padding_by_xla",))
    square, whole, oblong = (
        composed_softmax(1e6, sides, execution, MACHINE)[0].kernels
        for sides in ((197, 197), (200, 200), (200, 197))
    )
    assert square == oblong > whole == 0
