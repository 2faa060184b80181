"""What the backward pass of a measured step recomputes, by what its table says.

Tables name Megatron's kinds and lists of modules, torchtitan's options, and policies of JAX: those
of MaxText (github.com/AI-Hypercomputer/maxtext, remat_policy in MaxText/layers/decoders.py) and of
Pax (github.com/google/praxis, praxis/layers/checkpoint_policy.py).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from simulator.transformer.scenario import Recompute, RecomputedModule, SavedResult
from simulator.validation.step_rows import StepRow, StepRowError


@dataclass(frozen=True, slots=True)
class Recomputation:
    """What the backward pass recomputes.

    Attributes:
        kind: the kind.
        saved: results that are saved, of the kind "unsaved".
        modules: modules that are recomputed, of the kind "modules".
    """

    kind: Recompute
    saved: tuple[SavedResult, ...] = ()
    modules: tuple[RecomputedModule, ...] = ()

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of an execution."""
        return {"recompute": self.kind, "saved": self.saved, "recomputed": self.modules}


NOTHING = Recomputation("none")
WHOLE_LAYERS = Recomputation("full")
MLPS = Recomputation("mlp")
SCORES = Recomputation("selective")
CORE_OF_ATTENTION = Recomputation("modules", modules=("core_attn",))

SAVES_INPUTS = Recomputation("unsaved")
"""Whole layers but for what the backward pass doesn't read."""

_QKV: tuple[SavedResult, ...] = ("queries", "keys", "values")
_ATTENTION: tuple[SavedResult, ...] = (*_QKV, "output")
_PRODUCTS: tuple[SavedResult, ...] = (*_ATTENTION, "gate", "up")

SAVES_PRODUCTS = Recomputation("unsaved", _PRODUCTS)
"""All but the products of linear layers; fused attention is no product to JAX."""

SAVES_EVERY_SECOND_PRODUCT = Recomputation("unsaved", ("queries", "values", "context", "gate"))
"""torchtitan's selective option "op": of the products of a layer in their order (queries, keys,
values, output, gate, up, down) it saves every second one from the first, and the context
(github.com/pytorch/torchtitan, torchtitan/distributed/activation_checkpoint.py)."""

SAVES_CONTEXT = Recomputation("unsaved", ("context",))
"""That option with products of few bits, which its list of results to save doesn't name."""

_POLICIES: Mapping[str, Recomputation] = {
    "nothing_saveable": SAVES_INPUTS,
    "save_nothing": SAVES_INPUTS,
    "save_iteration_input": SAVES_INPUTS,
    "save_transformer_layer_output": SAVES_INPUTS,
    "everything_saveable": NOTHING,
    "save_everything": NOTHING,
    "save_qkv_proj": Recomputation("unsaved", _QKV),
    "save_out_proj": Recomputation("unsaved", ("output",)),
    "save_context": SAVES_CONTEXT,
    "save_encoded_and_out_proj": Recomputation("unsaved", ("context", "output")),
    "save_qkv_out_proj": Recomputation("unsaved", _ATTENTION),
    "save_qkv_out_proj_separate": Recomputation("unsaved", _ATTENTION),
    "save_dot_except_mlp": Recomputation("unsaved", _ATTENTION),
    # the result of the last product of an MLP, which it saves, isn't read
    "save_dot_except_mlpwi": Recomputation("unsaved", _ATTENTION),
    "save_dot_with_context_except_mlp": Recomputation("unsaved", (*_ATTENTION, "context")),
    "save_dot_for_mlperf_200b": Recomputation("unsaved", (*_ATTENTION, "context")),
    "save_dot_except_logits_ffn1": Recomputation("unsaved", (*_ATTENTION, "context")),
    "save_dot_except_logits": Recomputation("unsaved", (*_PRODUCTS, "context")),
    "save_dot_only": SAVES_PRODUCTS,
    "save_dots": SAVES_PRODUCTS,
    "save_dot_with_no_batch_dim": SAVES_PRODUCTS,
    "save_dot_with_no_batch_dims": SAVES_PRODUCTS,
    "save_dots_with_no_batch_dims": SAVES_PRODUCTS,
    "dots_saveable": SAVES_PRODUCTS,
    "dots_with_no_batch_dims_saveable": SAVES_PRODUCTS,
    "checkpoint_dots": SAVES_PRODUCTS,
    "checkpoint_dots_with_no_batch_dims": SAVES_PRODUCTS,
    "minimal": SAVES_PRODUCTS,
    "minimal_flash": Recomputation("unsaved", (*_PRODUCTS, "context")),
    "minimal_with_context": Recomputation("unsaved", (*_PRODUCTS, "context")),
    # results in the memory of the host are not recomputed, either
    "minimal_offloaded": SAVES_PRODUCTS,
    "save_qkv_proj_offloaded": Recomputation("unsaved", _QKV),
}
"""Policies of JAX by name."""

_PREFIX = re.compile(r"remat(?P<policy>_policy)?\s*[ =:]\s*")
_SELECTIVE_OP = re.compile(r"(selective[ _-])?\(?op\)?")

_NO_MEANING = re.compile(
    r"[\[\]()'\"]|\b(activations?|checkpoint(ing|s)?|recompute|recomputation|ac)\b"
)
"""What names around a kind or modules add nothing to them."""

_KINDS: Mapping[str, Recomputation] = {
    "none": NOTHING,
    "no": NOTHING,
    "off": NOTHING,
    "false": NOTHING,
    "full": WHOLE_LAYERS,
    "on": WHOLE_LAYERS,
    "yes": WHOLE_LAYERS,
    "true": WHOLE_LAYERS,
    "selective": SCORES,
}
_RECOMPUTED: Mapping[str, Recomputation] = {
    "everything": WHOLE_LAYERS,
    "all": WHOLE_LAYERS,
    "nothing": NOTHING,
}
"""What the column says is recomputed. Policies with these names say what is saved instead."""


def recomputation_of(row: StepRow) -> Recomputation | None:
    """Return what a row says; None if it says nothing.

    Raises:
        StepRowError: the text is unknown.
    """
    given = row.recompute.strip().lower()
    prefix, text = _PREFIX.match(given), _PREFIX.sub("", given)
    if not text:
        return None
    if text in _RECOMPUTED and not (prefix and prefix["policy"]):
        return _RECOMPUTED[text]
    if _SELECTIVE_OP.fullmatch(text):
        return SAVES_EVERY_SECOND_PRODUCT
    for name in (text, f"save_{text}"):
        if (kind := _KINDS.get(name) or _POLICIES.get(name)) is not None:
            return kind
    text = " ".join(_NO_MEANING.sub(" ", text).split())
    if (kind := _KINDS.get(text)) is not None:
        return kind
    named = set(re.split(r"[ ,;+]+", text)) - {"selective", ""}
    modules = tuple(module for module in get_args(RecomputedModule) if module in named)
    if not modules or len(modules) < len(named):
        raise StepRowError(
            f"column recompute: given {row.recompute!r}, expected none, selective, full, selective "
            f"op, modules of Megatron-Core such as moe, or a policy of JAX: {', '.join(_POLICIES)}"
        )
    return Recomputation("modules", modules=modules)
