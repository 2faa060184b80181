"""Recomputation of Megatron-Core's modules: their kernels, their memory, and their recipes."""

from typing import Any

import pytest

from simulator.hardware.cluster import Cluster
from simulator.hardware.description import ClusterError, validate
from simulator.transformer import Execution, Machine, Transformer
from simulator.transformer.experts import Routing
from simulator.transformer.layer import layer_passes, passes_by_kind
from simulator.transformer.layer_kinds import LayerKind
from simulator.transformer.pass_cost import PassCost, linear_passes
from simulator.transformer.scenario_files import EXAMPLES, Scenario
from simulator.transformer.training_memory import layer_activations, saved_activations
from simulator.validation.step_recipes import recomputed_modules
from simulator.validation.step_rows import StepRow
from simulator.validation.step_scenarios import scenario_of

H100 = Machine(Cluster.load("dgx_h100"))
DEEPSEEK = Scenario.load(EXAMPLES / "deepseek_v3.yaml").model
GPT_OSS = Scenario.load(EXAMPLES / "gpt_oss_120b.yaml").model
DENSE, EXPERTS = LayerKind(), LayerKind(mlp="experts")
TOKENS = 4096


def execution(*modules: str, **fields: Any) -> Execution:
    given = {"recompute": "modules", "recomputed": list(modules)} if modules else {}
    sizes = {"expert": 8, "data": 8, "global_batch": 8}
    return validate(Execution, sizes | given | fields, "execution")


def recomputed(module: str, model: Transformer, kind: LayerKind) -> PassCost:
    return layer_passes(model, execution(module), H100, kind).recompute


def saved(model: Transformer, kind: LayerKind, *modules: str) -> float:
    return saved_activations(model, execution(*modules), kind)


def freed(model: Transformer, kind: LayerKind, module: str) -> float:
    assert saved(model, kind) == layer_activations(model, execution(), kind)
    return saved(model, kind) - saved(model, kind, module)


def test_the_core_of_attention_is_computed_again_although_it_is_fused() -> None:
    flops = 2.0 * 128 * TOKENS**2 * (192 + 128) / 2
    again = recomputed("core_attn", DEEPSEEK, DENSE)
    assert again.compute == pytest.approx(
        flops / H100.flash("flash2").forward + H100.launch_seconds
    )
    assert freed(DEEPSEEK, DENSE, "core_attn") == 0


def test_projections_to_heads_are_two_products_and_the_rotary_positions() -> None:
    again = recomputed("mla_up_proj", DEEPSEEK, DENSE)
    shapes = ((128 * (128 + 128), 512), (128 * 192, 1536))
    products = linear_passes(shapes, DEEPSEEK, execution(), H100)[0]
    heads = 128 * (192 + 192 + 128)  # queries, keys and values
    assert again.flops == 2.0 * TOKENS * (128 * 256 * 512 + 128 * 192 * 1536)
    assert again.compute == pytest.approx(
        products.compute + H100.memory_seconds(2 * 2.0 * TOKENS * heads, 1)
    )
    assert freed(DEEPSEEK, DENSE, "mla_up_proj") == 2.0 * TOKENS * heads


def test_norms_are_repeated_only_where_they_are_no_part_of_a_linear_layer() -> None:
    one = H100.memory_seconds(4.0 * TOKENS * 7168, 1)
    assert recomputed("layernorm", DEEPSEEK, DENSE).compute == pytest.approx(one)
    assert recomputed("layernorm", DEEPSEEK, EXPERTS).compute == pytest.approx(2 * one)
    assert freed(DEEPSEEK, EXPERTS, "layernorm") == 2 * 2.0 * TOKENS * 7168
    one = H100.memory_seconds(4.0 * TOKENS * 2880, 1)
    assert recomputed("layernorm", GPT_OSS, EXPERTS).compute == pytest.approx(one)
    assert recomputed("layernorm", GPT_OSS, DENSE).compute == 0


def test_the_activation_of_experts_is_its_kernels_without_products() -> None:
    rows = Routing.of(GPT_OSS, execution()).rows
    again = recomputed("moe_act", GPT_OSS, EXPERTS)
    # two reads and a write; two clamps and the concatenation of their results
    assert again.compute == pytest.approx(
        H100.memory_seconds(6.0 * rows * 2880, 1) + H100.memory_seconds(16.0 * rows * 2880, 3)
    )
    assert again.flops == again.dispatch == 0
    # the input of the second product, and clamped copies of both inputs
    assert freed(GPT_OSS, EXPERTS, "moe_act") == (2.0 + 4.0) * rows * 2880


def test_whole_experts_are_dispatched_again_and_dense_mlps_are_not_experts() -> None:
    forward = layer_passes(DEEPSEEK, execution(), H100, LayerKind(None, "experts")).forward
    again = recomputed("moe", DEEPSEEK, EXPERTS)
    assert again.dispatch == forward.dispatch > 0
    assert again.compute == pytest.approx(forward.compute)
    assert recomputed("mlp", DEEPSEEK, EXPERTS).compute == 0
    assert recomputed("moe", DEEPSEEK, DENSE).compute == 0
    dense = layer_passes(DEEPSEEK, execution(), H100, LayerKind(None, "dense")).forward
    assert recomputed("mlp", DEEPSEEK, DENSE).compute == pytest.approx(dense.compute)
    # the inputs of the second product and of the activation; the norm's input remains
    assert freed(DEEPSEEK, DENSE, "mlp") == 2.0 * TOKENS * (7168 + 3 * 18432)


def test_shared_experts_are_two_products_and_their_activation() -> None:
    again = recomputed("shared_experts", DEEPSEEK, EXPERTS)
    assert again.flops == 2.0 * TOKENS * 3 * 7168 * 2048
    assert freed(DEEPSEEK, EXPERTS, "shared_experts") == 3 * 2.0 * TOKENS * 2048


def test_modules_add_up_and_mamba_has_none() -> None:
    modules = ("core_attn", "layernorm", "mla_up_proj", "moe_act", "shared_experts")
    together = layer_passes(DEEPSEEK, execution(*modules), H100, EXPERTS).recompute
    parts = [recomputed(module, DEEPSEEK, EXPERTS).compute for module in modules]
    assert together.compute == pytest.approx(sum(parts))
    hybrid = Scenario.load(EXAMPLES / "nemotron_3_nano.yaml").model
    passes = passes_by_kind(hybrid, execution("moe", "layernorm", "core_attn"), H100)
    assert passes[LayerKind("mamba", None)].recompute.compute == 0
    assert passes[LayerKind(None, "experts")].recompute.compute > 0


@pytest.mark.parametrize(
    "fields",
    [
        {"recompute": "modules"},
        {"recompute": "full", "recomputed": ["moe"]},
        {"recompute": "modules", "recomputed": ["router"]},
    ],
)
def test_modules_and_their_kind_are_given_together(fields: dict[str, Any]) -> None:
    with pytest.raises(ClusterError, match="recomputed"):
        execution(**fields)


def row(model: str, gpu: str, precision: str, **changes: Any) -> StepRow:
    fields: dict[str, Any] = {"gpus": 256, "global_batch": 4096, "micro_batch": 1}
    fields |= {"framework": "Megatron-Bridge", "precision": precision}
    return StepRow(1, model, gpu, **fields | changes)


HEADS = ("mla_up_proj",)


@pytest.mark.parametrize(
    ("model", "gpu", "precision", "changes", "modules"),
    [
        ("gpt-oss-120b", "GB200", "BF16", {}, ("layernorm", "moe_act")),
        ("gpt-oss-120b", "GB300", "BF16", {}, ()),
        ("deepseek-v3", "GB300", "BF16", {}, ("moe_act",)),
        ("deepseek-v3", "GB200", "MXFP8", {}, HEADS),
        ("deepseek-v3", "H100", "FP8-SC", {}, (*HEADS, "mlp")),
        ("deepseek-v3", "B200", "MXFP8", {"pp": 16}, HEADS),
        ("deepseek-v3", "B200", "MXFP8", {"pp": 8}, (*HEADS, "mlp")),
        ("kimi-k2", "GB300", "MXFP8", {}, HEADS),
        ("Nemotron_3_Super", "GB200", "NVFP4", {"tp": 2}, ()),
        ("Nemotron_3_Super", "B300", "NVFP4", {}, ("layernorm", "moe_act")),
        ("Nemotron_3_Nano", "H100", "BF16", {}, ("moe", "layernorm")),
        ("qwen3-235b-a22b", "GB200", "MXFP8", {}, ()),
    ],
)
def test_recipes_recompute_modules_by_model_gpu_and_precision(
    model: str, gpu: str, precision: str, changes: dict[str, Any], modules: tuple[str, ...]
) -> None:
    assert recomputed_modules(row(model, gpu, precision, **changes), fused=False) == modules


def test_recipes_with_fused_experts_recompute_nothing_on_gb300() -> None:
    assert recomputed_modules(row("deepseek-v3", "GB300", "MXFP8"), fused=True) == ()
    assert recomputed_modules(row("deepseek-v3", "GB200", "MXFP8"), fused=True) == HEADS


def test_what_megatron_calls_selective_is_the_core_of_attention() -> None:
    sizes: dict[str, Any] = {
        "layers": 2,
        "hidden": 4096,
        "heads": 32,
        "vocab": 32000,
        "seq": 4096,
        "tp": 4,
    }
    step = row("llama", "H100", "BF16", recompute="selective", **sizes)
    assert scenario_of(step).execution.recomputed == ("core_attn",)
    titan = row("llama", "H100", "BF16", recompute="selective", **sizes | {"framework": "Pax"})
    assert scenario_of(titan).execution.recompute == "selective"
