"""Models with experts among measured steps: their sizes, and what frameworks do with them.

The sizes are those of the shipped scenarios; a row's own columns take precedence.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from math import gcd
from typing import Any

from simulator.backend import CapturedPart
from simulator.hardware.description import validate
from simulator.transformer import Transformer
from simulator.transformer.scenario_files import EXAMPLES, Scenario
from simulator.validation.step_hybrids import is_hybrid
from simulator.validation.step_names import recipe_name
from simulator.validation.step_notes import notes_of
from simulator.validation.step_recipes import recomputed_modules
from simulator.validation.step_rows import StepRow, StepRowError


@dataclass(frozen=True, slots=True)
class Family:
    """A public model with experts.

    Attributes:
        name: expression that its names match, in lower case.
        example: name of the shipped scenario.
        model: fields of `Transformer` that differ from the scenario's.
    """

    name: re.Pattern[str]
    example: str
    model: Mapping[str, Any] = field(default_factory=dict)


FAMILIES = (
    Family(
        re.compile(r"deepseek.?v2.?lite|deepseek.?v3.?16b"),
        "deepseek_v3",
        {
            "layers": 27,
            "hidden": 2048,
            "heads": 16,
            "ffn": 10944,
            "vocab": 102400,
            "prediction_layers": 0,
            "latent_attention": {"key_rank": 512, "rotary_size": 64, "value_size": 128},
            "experts": {"count": 64, "top_k": 6, "ffn": 1408, "shared_ffn": 2816, "first_dense": 1}
            | {"max_hosts": None},
        },
    ),
    Family(re.compile(r"deepseek.?(v3|r1)"), "deepseek_v3"),
    Family(re.compile(r"kimi.?k2"), "kimi_k2"),
    Family(re.compile(r"qwen3.?(moe.?)?30b"), "qwen3_30b_a3b"),
    Family(re.compile(r"qwen3.?(moe.?)?235b"), "qwen3_235b_a22b"),
    Family(re.compile(r"gpt.?oss.?120b"), "gpt_oss_120b"),
    Family(
        re.compile(r"gpt.?oss.?20b"),
        "gpt_oss_120b",
        {
            "layers": 24,
            "experts": {"count": 32, "top_k": 4, "ffn": 2880, "biases": True} | {"clamped": True},
        },
    ),
    Family(re.compile(r"mixtral.?8x7b"), "mixtral_8x7b"),
    Family(
        re.compile(r"mixtral.?8x22b"),
        "mixtral_8x7b",
        {
            "layers": 56,
            "hidden": 6144,
            "heads": 48,
            "ffn": 16384,
            "vocab": 32768,
            "experts": {"count": 8, "top_k": 2, "ffn": 16384},
        },
    ),
    # Sizes as the developers state them. A test compares the parameters with the published totals.
    Family(
        re.compile(r"deepseek.?v2$|deepseek.?v2.?236b"),
        "deepseek_v3",
        {
            "layers": 60,
            "hidden": 5120,
            "ffn": 12288,
            "vocab": 102400,
            "prediction_layers": 0,
            "experts": {"count": 160, "top_k": 6, "ffn": 1536, "shared_ffn": 3072, "first_dense": 1}
            | {"max_hosts": 3},
        },
    ),
    # Attention is to 128 tokens and to compressed ones: in every second layer to at most 512 of
    # seq / 4, in the others to seq / 128, together as many as in a window of 340 at 4096 tokens
    # (config.json of deepseek-ai/DeepSeek-V4-Flash).
    Family(
        re.compile(r"deepseek.?v4.?flash"),
        "deepseek_v3",
        {
            "layers": 43,
            "hidden": 4096,
            "heads": 64,
            "kv_heads": 1,
            "head_size": 448,
            "ffn": 2048,
            "window": 340,
            "residual_streams": 4,
            "latent_attention": {"key_rank": 448, "query_rank": 1024, "rotary_size": 64}
            | {"value_size": 512, "shared": True, "output_groups": 8, "output_rank": 1024},
            "experts": {"count": 256, "top_k": 6, "ffn": 2048, "shared_ffn": 2048, "first_dense": 0}
            | {"max_hosts": None},
        },
    ),
    # At 4096 tokens every second layer attends to all compressed ones, together as in a window of
    # 412 (config.json of deepseek-ai/DeepSeek-V4-Pro).
    Family(
        re.compile(r"deepseek.?v4.?pro"),
        "deepseek_v3",
        {
            "layers": 61,
            "hidden": 7168,
            "heads": 128,
            "kv_heads": 1,
            "head_size": 448,
            "ffn": 3072,
            "window": 412,
            "residual_streams": 4,
            "latent_attention": {"key_rank": 448, "query_rank": 1536, "rotary_size": 64}
            | {"value_size": 512, "shared": True, "output_groups": 16, "output_rank": 1024},
            "experts": {"count": 384, "top_k": 6, "ffn": 3072, "shared_ffn": 3072, "first_dense": 0}
            | {"max_hosts": None},
        },
    ),
    Family(
        re.compile(r"moonlight.?16b"),
        "deepseek_v3",
        {
            "layers": 27,
            "hidden": 2048,
            "heads": 16,
            "ffn": 11264,
            "vocab": 163840,
            "prediction_layers": 0,
            "latent_attention": {"key_rank": 512, "rotary_size": 64, "value_size": 128},
            "experts": {"count": 64, "top_k": 6, "ffn": 1408, "shared_ffn": 2816, "first_dense": 1}
            | {"max_hosts": None},
        },
    ),
    Family(
        re.compile(r"llama.?4.*(maverick|400b|e128|128e)"),
        "qwen3_30b_a3b",
        {
            "layers": 48,
            "hidden": 5120,
            "heads": 40,
            "kv_heads": 8,
            "head_size": 128,
            "ffn": 16384,
            "vocab": 202048,
            "head_norms": False,
            "experts": {"count": 128, "top_k": 1, "ffn": 8192, "shared_ffn": 8192, "every": 2},
        },
    ),
    Family(
        re.compile(r"llama.?4.*(scout|109b|e16|16e)"),
        "qwen3_30b_a3b",
        {
            "layers": 48,
            "hidden": 5120,
            "heads": 40,
            "kv_heads": 8,
            "head_size": 128,
            "ffn": 16384,
            "vocab": 202048,
            "head_norms": False,
            "experts": {"count": 16, "top_k": 1, "ffn": 8192, "shared_ffn": 8192},
        },
    ),
    Family(
        re.compile(r"glm.?4\.5.?air"),
        "qwen3_30b_a3b",
        {
            "layers": 46,
            "hidden": 4096,
            "heads": 96,
            "kv_heads": 8,
            "head_size": 128,
            "ffn": 10944,
            "vocab": 151552,
            "head_norms": False,
            "experts": {"count": 128, "top_k": 8, "ffn": 1408, "shared_ffn": 1408}
            | {"first_dense": 1},
        },
    ),
    Family(
        re.compile(r"glm.?4\.[567](.?355b)?$"),
        "qwen3_30b_a3b",
        {
            "layers": 92,
            "hidden": 5120,
            "heads": 96,
            "kv_heads": 8,
            "head_size": 128,
            "ffn": 12288,
            "vocab": 151552,
            "experts": {"count": 160, "top_k": 8, "ffn": 1536, "shared_ffn": 1536}
            | {"first_dense": 3},
        },
    ),
    Family(re.compile(r"grok"), "grok1_314b"),
    Family(re.compile(r"nemotron.?v?3.?nano|nemotron.?nano.?v?3"), "nemotron_3_nano"),
    Family(re.compile(r"nemotron.?v?3.?super|nemotron.?super.?v?3"), "nemotron_3_super"),
    Family(re.compile(r"nemotron.?v?3.?ultra|nemotron.?ultra.?v?3"), "nemotron_3_ultra"),
)

_NAMES_EXPERTS = re.compile(r"moe|\d+x\d+b|\d+b.?a\d+(\.\d+)?b|\d+b.?\d+e\b")
"""Names that state experts, or how many parameters of all a token uses."""

_SIZES = ("layers", "hidden", "heads", "kv_heads", "seq", "vocab")
"""Columns that take precedence over the sizes of the scenario."""


def has_experts(row: StepRow) -> bool:
    """Return whether a row has expert parallelism, or a model with experts by its name."""
    named = _NAMES_EXPERTS.search(row.model.lower()) is not None
    return row.ep > 1 or named or _family(row) is not None


def expert_model(row: StepRow, precision: str, attention: str) -> Transformer:
    """Return the model of a row with experts.

    Benchmarks of these tables force an even balance of experts, or have a capacity.

    Raises:
        StepRowError: the model is unknown.
    """
    family = _family(row)
    if family is None:
        known = ", ".join(sorted({entry.example for entry in FAMILIES} | {"deepseek_v4"}))
        raise StepRowError(
            f"column model: given {row.model!r} with experts; sizes of experts are known of {known}"
        )
    sizes = dict(family.model)
    base = _example(family.example)
    experts = {**base.experts_section.fields(), "imbalance": 1.0, **sizes.pop("experts", {})}
    if notes_of(row).balanced_gate and row.framework.lower().startswith(_AUTOMODEL):
        experts |= {"consecutive": True, "max_hosts": None}
    given = {name: getattr(row, name) for name in _SIZES if getattr(row, name) is not None}
    if base.pattern is not None:
        given.pop("layers", None)
    if base.latent_attention is not None:
        given.pop("kv_heads", None)
    if precision != "bf16":  # fused with the grouped products (cutedsl_fused_grouped_mlp)
        experts |= {"biases": False, "clamped": False}
    if not row.framework.lower().startswith("megatron-bridge"):
        experts["clamped"] = False  # the kernels of its own are those of Megatron-Core
    if has_fused_experts(row) and _F8_ATTENTION.search(recipe_name(row)):
        attention = "cudnn_f8"
    if row.layers is not None and row.layers <= experts["first_dense"]:
        experts["first_dense"] = 0
    fields = base.fields() | sizes | given
    fields |= {"experts": experts, "precision": precision, "attention": attention}
    if not _trains_further_tokens(row):
        fields["prediction_layers"] = 0
    if precision == "nvfp4" and family.example == "nemotron_3_super":
        fields["layers_in_16_bits"] = _SUPER_LAYERS_IN_16_BITS
    return validate(Transformer, fields, "model")


def expert_execution(row: StepRow, model: Transformer) -> dict[str, Any]:
    """Return the fields of the execution that experts add to a row, whose model is given.

    Megatron-Bridge's scripts/performance/configs name the dispatcher of each model and GPU: DeepEP
    or HybridEP, but all_to_all for Qwen3 235B on HGX systems and for gpt-oss in 16 bits. Experts
    are whole on a device there; NeMo 2.0 divides them as it divides attention.
    """
    devices = row.tp * row.cp * (row.dp or 1)
    if row.dp is None:
        devices = row.gpus // row.pp
    bridge = row.framework.lower().startswith("megatron-bridge")
    expert, shards = _expert_degree(row), row.tp
    if bridge or devices % (expert * row.tp):
        shards = 1
    exchanged = "all_to_all" if _ALL_TO_ALL.search(recipe_name(row)) and bridge else "deduplicated"
    if row.framework.lower().startswith("nemo/") or row.framework.startswith("NeMo 2"):
        exchanged = "all_to_all"
    fields: dict[str, Any] = {
        "expert": expert,
        "expert_tensor": shards,
        "dispatch": exchanged,
        "sequence_parallel": row.tp > 1,
    }
    if bridge:
        fused = has_fused_experts(row)
        fields["overlap_dispatch"] = fused or _OVERLAPS.search(recipe_name(row)) is not None
        if _SCALES_POSITIONS.search(recipe_name(row)):
            fields["composed"] = ("rotary",)
        if not row.recompute and (modules := recomputed_modules(row, fused)):
            fields |= {"recompute": "modules", "recomputed": modules}
        fields |= _stages_before_predictions(row, model)
    if row.framework.lower().startswith(_AUTOMODEL):
        fields["loss_in_16_bits"] = True
        if not row.recompute and not _SAVES_ACTIVATIONS.search(row.model.lower()):
            fields["recompute"] = "full"
    return fields


def _stages_before_predictions(row: StepRow, model: Transformer) -> dict[str, Any]:
    """Return the stages of models that predict further tokens.

    All stages have as many layers but the last, which has fewer beside the layers that predict, as
    in the recipes of DeepSeek-V3 and Kimi K2 (pp_layout "Et*4|(t*4|)*14tmL").
    """
    stages = row.pp * (row.vp if row.pp > 1 else 1)
    if stages == 1 or not model.prediction_layers:
        return {}
    layers = -(-(model.layers + model.prediction_layers + 2) // stages)
    last = model.layers - layers * (stages - 1)
    return {"stage_layers": (layers,) * (stages - 1) + (last,)} if last >= 0 else {}


_AUTOMODEL = "nemo automodel"

_SAVES_ACTIVATIONS = re.compile(r"moonlight|gpt.?oss.?20b")
"""Models whose recipes in AutoModel have no activation_checkpointing. All recipes of models with
experts compute the loss without fp32_upcast (github.com/NVIDIA-NeMo/Automodel,
examples/llm_benchmark), and "balanced gate" is fake_balanced_gate: consecutive experts
(FakeBalancedGate in nemo_automodel/components/moe/layers.py)."""

_ALL_TO_ALL = re.compile(r"235b\S* (h100|h200|b200|b300)|gpt.?oss\S* \S+ bf16")
"""Models, GPUs and precisions whose recipes have no moe_flex_dispatcher_backend."""

_OVERLAPS = re.compile(r"235b\S* h100|deepseek.?v3\S* b200 mxfp8|gpt.?oss\S* gb200")
"""Models, GPUs and precisions with moe_a2a_overlap in Megatron-Bridge's performance recipes."""

_SCALES_POSITIONS = re.compile(r"gpt.?oss")
"""Models whose rotary positions have the attention factor of YaRN (1.35 for gpt-oss), which the
fused kernel lacks (github.com/NVIDIA/Megatron-LM, megatron/core/models/common/embeddings:
apply_rotary_pos_emb in rope_utils.py, _yarn_get_concentration_factor in
yarn_rotary_pos_embedding.py)."""

_SUPER_CAPTURED = r"super\S* (gb[23]00|b300|b200 (bf16|nvfp4))"
_MIXERS_CAPTURED = re.compile(
    r"235b\S* gb[23]00|30b\S* (gb200 (bf16|fp8)|b200)|gpt.?oss\S* g?b300 bf16"
    r"|deepseek.?v3\S* (gb200|gb300 bf16)|nano|ultra|nemotron.?h|" + _SUPER_CAPTURED
)
_ROUTERS_CAPTURED = re.compile(
    r"235b\S* gb[23]00|30b\S* (g?b[23]00|h100 bf16)|gpt.?oss\S* g?b300 bf16"
    r"|deepseek.?v3\S* (gb200|gb300 bf16)|kimi\S* gb200|nano\S* g?b[23]00|ultra|" + _SUPER_CAPTURED
)
"""Models, GPUs and precisions whose recipes have cuda_graph_impl transformer_engine, with "attn"
and "mamba", or "moe_router", in cuda_graph_scope (github.com/NVIDIA-NeMo/Megatron-Bridge,
scripts/performance/configs, before container 26.06)."""

_FUSED = re.compile(r"(deepseek.?v3|qwen3)\S* g?b[23]00 mxfp8|deepseek.?v4.?pro\S* gb300 mxfp8")
"""Those with MEGATRON_GRAPHS since container 26.06. Recipes of DeepSeek-V3 name its options; steps
of Qwen3 became a third faster with that container; those of DeepSeek-V4-Pro have it by the notes of
Megatron-Bridge's release 0.5.1."""

_FUSED_SINCE = (26, 6)

_F8_ATTENTION = re.compile(r"deepseek.?v3\S* g?b300|qwen3")
"""Those of them with fp8_dot_product_attention."""

_SUPER_LAYERS_IN_16_BITS = 15
"""The first layer and the last 14 (nemotron_3_super_bf16_with_nvfp4_mixed in
github.com/NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/training/mixed_precision.py)."""


def has_fused_experts(row: StepRow) -> bool:
    """Return whether a row is of a recipe with MEGATRON_GRAPHS."""
    container = notes_of(row).container
    return (
        container is not None
        and container >= _FUSED_SINCE
        and _FUSED.search(recipe_name(row)) is not None
    )


def captured_parts(row: StepRow) -> tuple[CapturedPart, ...]:
    """Return the parts of a layer that are a CUDA graph in the recipe of a row."""
    known = _family(row) is not None or is_hybrid(row)
    if not row.framework.lower().startswith("megatron-bridge") or not known:
        return ()
    recipe = recipe_name(row)
    parts: tuple[tuple[CapturedPart, re.Pattern[str]], ...] = (
        ("mixer", _MIXERS_CAPTURED),
        ("router", _ROUTERS_CAPTURED),
    )
    return tuple(part for part, recipes in parts if recipes.search(recipe))


def _expert_degree(row: StepRow) -> int:
    """Return the degree of expert parallelism; DeepEP has one even where a table leaves it out."""
    family = _family(row)
    if row.ep > 1 or family is None or "DeepEP" not in row.notes:
        return row.ep
    count = dict(family.model).get("experts", {}).get("count")
    return gcd(count or _example(family.example).experts_section.count, row.gpus // row.pp)


def _trains_further_tokens(row: StepRow) -> bool:
    """Return whether a recipe trains further tokens.

    AutoModel's recipe of Nemotron 3 Ultra does (github.com/NVIDIA-NeMo/Automodel,
    examples/llm_benchmark/nemotron).
    """
    framework = row.framework.lower()
    if framework.startswith(_AUTOMODEL):
        return re.search("nemotron.?3.?ultra", row.model.lower()) is not None
    return framework.startswith("megatron-bridge")


def _family(row: StepRow) -> Family | None:
    name = row.model.lower()
    return next((family for family in FAMILIES if family.name.search(name)), None)


@cache
def _example(name: str) -> Transformer:
    return Scenario.load(EXAMPLES / f"{name}.yaml").model
