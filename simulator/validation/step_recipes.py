"""Modules that recipes of Megatron-Bridge recompute, which tables of its steps do not say."""

import re
from collections.abc import Mapping

from simulator.transformer.scenario import RecomputedModule
from simulator.validation.step_names import recipe_name
from simulator.validation.step_rows import StepRow

Modules = tuple[RecomputedModule, ...]

_EXPERTS: Modules = ("moe", "layernorm")
_ALL: Modules = (*_EXPERTS, "core_attn", "moe_act")
_ACTIVATIONS: Modules = ("layernorm", "moe_act")
_HEADS: Modules = ("mla_up_proj",)

_RECIPES: Mapping[str, Modules] = {
    r"gpt.?oss\S* (gb200|b200|h100)": _ACTIVATIONS,
    r"nano\S* h100 f8": _ALL,
    r"nano\S* h100": _EXPERTS,
    r"super\S* (gb200 (bf16|mxfp8) tp1 |b200 bf16)": _ALL,
    r"super\S* (b200 mxfp8|b300 (bf16|nvfp4))": _ACTIVATIONS,
    r"ultra\S* gb300": ("moe_act",),
    r"deepseek.?v3\S* gb300 bf16": ("moe_act",),
    r"(deepseek.?v3|kimi)\S* h100": (*_HEADS, "mlp"),
    r"deepseek.?v3\S* b200 mxfp8 tp1 pp8": (*_HEADS, "mlp"),
    r"deepseek.?v3\S* b200 nvfp4 tp1 pp8": (*_HEADS, *_ACTIVATIONS),
    r"deepseek.?v3|deepseek.?v4.?pro|kimi": _HEADS,
}
"""Modules by the recipe's model, GPU, precision and degrees; the first match counts
(recompute_modules in github.com/NVIDIA-NeMo/Megatron-Bridge, scripts/performance/configs and
src/megatron/bridge/perf_recipes). Recipes of Nemotron 3 Super on GB200 recompute nothing since
attention and Mamba are divided over two GPUs."""

_NOTHING_IF_FUSED = re.compile(r"gpt.?oss|(deepseek.?v3|kimi)\S* gb300")
"""Recipes that recompute nothing where experts are one kernel."""


def recomputed_modules(row: StepRow, fused: bool) -> Modules:
    """Return the modules that the recipe of a row of Megatron-Bridge recomputes.

    Args:
        row: the row.
        fused: whether experts are one kernel.
    """
    name = f"{recipe_name(row)} tp{row.tp} pp{row.pp} "
    if fused and _NOTHING_IF_FUSED.search(name):
        return ()
    return next((modules for recipe, modules in _RECIPES.items() if re.search(recipe, name)), ())
