"""What the backward pass of a measured step recomputes, by what its table says.

Tables name Megatron's kinds and lists of modules, torchtitan's options, and XLA's policies of what
is saved.
"""

import re

from simulator.transformer.scenario import Recompute
from simulator.validation.step_rows import StepRow, StepRowError

_KINDS: tuple[tuple[re.Pattern[str], Recompute], ...] = (
    (re.compile(r"none|no"), "none"),
    (re.compile(r"(remat )?(full|save_nothing|nothing_saveable)"), "full"),
    (re.compile(r"selective|core_attn"), "selective"),
    # every second product of a layer is computed again (torchtitan's activation_checkpoint)
    (re.compile(r"selective[ _-]op|op"), "mlp"),
    # policies of Pax and MaxText that save what attention projects, and nothing of the MLP
    (re.compile(r"(remat )?(save_)?((qkv|out)_\w*proj|dot\w*_except_mlp)\w*"), "mlp"),
    # policies that save the result of each product, and of fused attention
    (re.compile(r"(remat )?minimal_flash"), "none"),
    (re.compile(r"(remat )?(save_dot_only|minimal\w*|save_dots?\w*)"), "elementwise"),
)
_WHOLE_MLPS = {"mlp", "moe"}
_OWN_KERNELS = {"moe_act", "mla_up_proj", "layernorm", "shared_experts"}


def recompute_of(row: StepRow) -> Recompute | None:
    """Return what a row says; None if it says nothing.

    Raises:
        StepRowError: the text is unknown.
    """
    text = row.recompute.strip().lower()
    if not text:
        return None
    for pattern, kind in _KINDS:
        if pattern.fullmatch(text):
            return kind
    modules = set(re.split(r"[ ,;+]+", text))
    if not modules <= _WHOLE_MLPS | _OWN_KERNELS | {"core_attn"}:
        raise StepRowError(
            f"column recompute: given {row.recompute!r}, expected none, selective, full, selective "
            "op, a policy of XLA such as save_qkv_proj, or modules of Megatron-Core, such as moe"
        )
    if modules & _WHOLE_MLPS:
        return "mlp"
    return "selective" if "core_attn" in modules else "none"
