"""The software of measured steps: what each framework does that tables do not say."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from simulator.transformer import (
    EAGER,
    JITTED,
    MEGATRON_CORE,
    Backend,
)
from simulator.validation.step_names import gpu_name
from simulator.validation.step_notes import Notes
from simulator.validation.step_recompute import (
    CORE_OF_ATTENTION,
    MLPS,
    NOTHING,
    SAVES_EVERY_SECOND_PRODUCT,
    SAVES_INPUTS,
    SAVES_PRODUCTS,
    SCORES,
    WHOLE_LAYERS,
    Recomputation,
)
from simulator.validation.step_rows import BadRow, StepRow


@dataclass(frozen=True, slots=True)
class Software:
    """What a framework does that tables of its steps do not say.

    Attributes:
        backend: the backend.
        attention: the implementation of attention.
        execution: fields of `Execution`.
        unsaid: what FSDP may recompute whose table doesn't say it, in order of time.
        clusters: clusters by the name of the GPU, where they differ from `_CLUSTERS`.
        devices: fields of the device by the name of the GPU, where they differ from the cluster's.
        full: what "full" recomputes. Whole layers run again in Megatron; JAX leaves out what the
            backward pass doesn't read, and PyTorch's checkpoints stop early.
        selective: what "selective" recomputes: the scores, which fused attention doesn't save, but
            Megatron-Core computes its core again whichever kernels it has
            (_checkpointed_attention_forward in megatron/core/transformer/attention.py), and
            torchtitan's default is its option "op".
    """

    backend: Backend
    attention: str
    execution: Mapping[str, Any] = field(default_factory=dict)
    unsaid: tuple[Recomputation, ...] = (NOTHING, MLPS, WHOLE_LAYERS)
    full: Recomputation = WHOLE_LAYERS
    selective: Recomputation = SCORES
    clusters: Mapping[str, str] = field(default_factory=dict)
    devices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


_MEGATRON_CORE = Software(
    MEGATRON_CORE,
    "cudnn",
    {
        "overlap_gradients": True,
        "overlap_sends": True,
        "overlap_tensor": "all",
        "gradient_bytes": 2,
        "saves_casts": True,
        "fused_loss": True,
        "context_exchange": "ring",
    },
    selective=CORE_OF_ATTENTION,
)
"""Megatron-Core with Transformer Engine and the distributed optimizer, as NeMo and Megatron-Bridge
set it for performance: https://docs.nvidia.com/nemo-framework (performance guide). Gradients are
summed over microbatches and devices in 16 bits (grad_reduce_in_fp32 = False in
github.com/NVIDIA-NeMo/Megatron-Bridge and github.com/NVIDIA/NeMo, scripts/performance)."""

_COMPILED_LOSS = replace(
    _MEGATRON_CORE,
    execution={**_MEGATRON_CORE.execution, "fused_loss": False, "compiled_loss": True},
)
"""Megatron-Core without the loss of Transformer Engine, which NeMo's recipes have since 25.04
(cross_entropy_fusion_impl in github.com/NVIDIA/NeMo, scripts/performance/helpers.py)."""

_NEMO_2024 = replace(
    _COMPILED_LOSS,
    execution={
        **_COMPILED_LOSS.execution,
        "gradient_bytes": 4,
        "communicated_gradient_bytes": 2,
    },
)
"""NeMo before its version 2, which summed gradients over microbatches in f32."""

_BY_XLA = ("norm_by_xla", "gelu_by_xla", "dropout_by_xla", "softmax_by_xla", "padding_by_xla")

_XLA: Mapping[str, Any] = {
    "overlap_gradients": True,
    "communicated_gradient_bytes": 2,
    "overlap_tensor": "all",
    "composed": ("norm_by_xla", "gelu_by_xla"),
    "casts_parameters": True,
}
"""XLA with its latency-hiding scheduler."""

_FSDP2 = replace(EAGER, gathers_casts=True)
"""PyTorch with torchao's tensor-wise casts, which precede the gathers of parameters and inputs
(enable_fsdp_float8_all_gather, recommended in torchtitan/config/job_config.py)."""

_H100_OF_TORCHTITAN: Mapping[str, Any] = {
    "memory_gb": 101.7,
    "memory_bandwidth_gb_per_s": 2410,
    "power_limit_w": 500,
}
"""H100 with 96 GB of HBM2e and less power than other SXM modules (github.com/pytorch/torchtitan,
docs/performance.md). The bandwidth is that of such modules in arXiv 2604.11391."""

_BY_MEMORY = (NOTHING, SAVES_PRODUCTS, SAVES_INPUTS)
"""What policies of JAX recompute, from most memory to least."""

SOFTWARE: Mapping[str, Software] = {
    # Llama is that of Hugging Face, without torch.compile; recipes of models with experts fuse
    # rotary positions. Activation checkpointing is on or off (github.com/NVIDIA-NeMo/Automodel,
    # nemo_automodel/components/models and examples/llm_benchmark)
    "nemo automodel": Software(
        EAGER,
        "flash2",
        {
            "overlap_gradients": True,
            "communicated_gradient_bytes": 2,
            "composed": ("rotary", "activation"),
            "log_softmax_loss": True,
            "copies_shards": True,
        },
        # checkpoints of steps with adapters rerun all products: adapters come after them
        unsaid=(NOTHING, WHOLE_LAYERS),
    ),
    "nemo 24.03": replace(_NEMO_2024, attention="flash2"),
    "nemo 24": _NEMO_2024,
    "nemo 25.02": _COMPILED_LOSS,
    "nemo/megatron-core": _NEMO_2024,
    "nemo": _MEGATRON_CORE,
    "megatron-bridge": _MEGATRON_CORE,
    "megatron-lm": _NEMO_2024,
    # its steps are of Meta's hosts; gradients are reduced in f32; without torch.compile, which
    # notes name, activations and norms are PyTorch's elementwise kernels (rms_norm has a fused
    # kernel since PyTorch 2.8); apply_rotary_emb in torchtitan/models has complex numbers, and
    # apply_tp divides norms along the sequence
    "torchtitan": Software(
        _FSDP2,
        "flash2",
        {
            "overlap_gradients": True,
            "communicated_gradient_bytes": 4,
            "composed": ("complex_rotary", "activation", "norm"),
            "sequence_parallel": True,
            "log_softmax_loss": True,
            "copies_shards": True,
        },
        unsaid=(NOTHING, SAVES_EVERY_SECOND_PRODUCT, SAVES_INPUTS),
        full=SAVES_INPUTS,
        selective=SAVES_EVERY_SECOND_PRODUCT,
        clusters={"H100": "grand_teton_roce"},
        devices={"H100": _H100_OF_TORCHTITAN},
    ),
    # its tables of performance are of InternLM when it was installed with flash attention 1.0.5
    # (github.com/InternLM/InternLM, doc/en/install.md, doc/en/train_performance.md); its hooks
    # all-reduce gradients over the data axis with every size of zero1 (reduce_rank of
    # _attach_reduction_hook in internlm/solver/optimizer/hybrid_zero_optim.py), in buckets to and
    # from which they are copied (flatten and unflatten_and_copy of TensorBucket in store.py); two
    # of 512 Mi elements are alive (reduce_bucket_size in configs/7B_sft.py; _bucket_in_progress)
    "internevo": Software(
        EAGER,
        "flash1",
        {
            "overlap_gradients": True,
            "gradient_bytes": 2,
            "communicated_gradient_bytes": 2,
            "composed": ("norm_in_f32",),
            "broadcasts": True,
            "all_reduces_gradients": True,
            "gradient_copy_bytes": 8,
            "gradient_buffer_bytes": 2 * 2 * 512 * 2**20,
            "separate_accumulation": True,
            # beside 12 bytes of state: the gradients in one array, that array in f32, and what
            # AdamW of PyTorch computes for all parameters before it updates them (foreach)
            # (internlm/solver/optimizer/hybrid_zero_optim.py)
            "optimizer_bytes": 22,
        },
    ),
    # github.com/Aleph-Alpha/scaling: gradients in bf16, all-reduced in f32, the loss on gathered
    # logits, activation and rotary positions of PyTorch's elementwise kernels, DeepSpeed's
    # schedule, gates of their own, sequences that norms gather (src/scaling/core/nn, optimizer)
    "aleph alpha": Software(
        EAGER,
        "flash2",
        {
            "gradient_bytes": 2,
            "communicated_gradient_bytes": 4,
            "gathered_logits": True,
            "recompute_head": True,
            "spare_microbatches": 1,
            "serial_sends": True,
            "all_reduces_gradients": True,
            # to a bucket 4, divided 4, to f32 and back 12, to the gradients 4 (optimizer/allreduce)
            "gradient_copy_bytes": 24,
            "separate_accumulation": True,
            "separate_gates": True,
            "saves_gathered": True,
            "composed": ("rotary", "activation"),
        },
    ),
    # sends are actors beside those of kernels (copy_comm_net_actor.cpp in
    # github.com/Oneflow-Inc/oneflow, oneflow/core/actor)
    "oneflow": Software(
        EAGER, "naive", {"scatter_sends": True, "overlap_gradients": True, "overlap_sends": True}
    ),
    "pax": Software(JITTED, "flash2", _XLA, _BY_MEMORY, SAVES_INPUTS),
    # attention and the embedding of NVIDIA's recipes: attention=cudnn_flash_te, use_iota_embed
    # (github.com/NVIDIA/dgxc-benchmarking, maxtext/configure.sh)
    "maxtext": Software(
        JITTED, "cudnn", _XLA | {"embedding_products": True}, _BY_MEMORY, SAVES_INPUTS
    ),
    # attention without a fused kernel, and flags of XLA with which no communication overlaps
    # (github.com/google-research/t5x, t5x/contrib/gpu/scripts_gpu; github.com/NVIDIA/JAX-Toolbox,
    # rosetta/rosetta/projects/vit)
    "t5x": Software(
        JITTED,
        "naive",
        {
            "zero": 0,
            "communicated_gradient_bytes": 2,
            "combined_bytes": 136314880,
            "casts_parameters": True,
            "composed": _BY_XLA,
        },
    ),
}
"""Software by the beginning of the name of the framework, in lower case."""

_PAX_GPT = replace(
    SOFTWARE["pax"],
    execution=_XLA | {"embedding_products": True},
    unsaid=(SAVES_PRODUCTS, SAVES_INPUTS),
)
"""GPT in Pax: embeddings are looked up by products, and repeated layers save products at most
(github.com/google/paxml: EMBEDDING_LOOKUP_STYLE in paxml/tasks/lm/params/c4.py, CHECKPOINT_POLICY
in paxml/contrib/gpu/scripts_gpu/configs.py). Llama is another configuration."""

_PAX_OF_DGXC: Mapping[str, Any] = {"copies_shards": True}
"""Recipes whose XLA flags pipeline the collectives of loops over layers, but do not unroll these
loops (xla_gpu_enable_pipelined_all_gather without xla_gpu_enable_while_loop_double_buffering in
github.com/NVIDIA/dgxc-benchmarking, paxml/configure.sh). XLA then copies gathered parameters to the
next iteration: compiled for H100, jaxlib 0.11.2 moves 15 bytes per parameter more in a loop over
layers of GPT, and no more with double buffering."""

_DEFAULT_SOFTWARE = _MEGATRON_CORE

_MEGATRON_2021 = Software(EAGER, "naive", {"scatter_sends": True})
"""Megatron-LM before Transformer Engine, which has no kernels for V100."""

_WITHOUT_FUSED_ATTENTION = re.compile(r"gpt-?3.175b|nemotron-?4.340b|grok-?1")
"""Models whose recipes set NVTE_FUSED_ATTN=0 (github.com/NVIDIA/dgxc-benchmarking, configure.sh in
nemo_megatron, nemotron and grok1); those of Llama and of Nemotron-4 15B set it to 1."""

_SYNCHRONIZES_F32 = re.compile(r"nemotron-?4.15b")
"""Models whose recipes have no grad_sync_dtype, so that devices sum gradients in f32
(github.com/NVIDIA/dgxc-benchmarking, nemotron/nemotron4-15b-synth.yaml, and
setup_mcore_distributed_parallel in github.com/NVIDIA/NeMo, megatron_gpt_model.py)."""

GPT_NAME = re.compile(r"gpt-?\d|gpt2|gpt-[0-9x]+")


def software_of(row: StepRow, notes: Notes) -> Software:
    """Return the software of a row; Megatron-Core for a framework that is unknown."""
    name = row.model.lower()
    software = _known_software(row.framework) or _DEFAULT_SOFTWARE
    if software.backend is MEGATRON_CORE and gpu_name(row).startswith("V100"):
        software = _MEGATRON_2021
    if software is SOFTWARE["pax"]:
        software = _pax(row, notes)
    of_dgxc = row.framework == "NeMo/Megatron-Core"
    if of_dgxc and _SYNCHRONIZES_F32.match(name):
        execution = {**software.execution, "communicated_gradient_bytes": 4}
        software = replace(software, execution=execution)
    recipe = of_dgxc and _WITHOUT_FUSED_ATTENTION.match(name)
    if software.backend is MEGATRON_CORE and (notes.flash_attention or recipe):
        software = replace(software, attention="flash2")
    return software


def _pax(row: StepRow, notes: Notes) -> Software:
    """Return Pax as the source of a row ran it."""
    software = _PAX_GPT if GPT_NAME.match(row.model.lower()) else SOFTWARE["pax"]
    if "dgxc-benchmarking" in row.source:
        return replace(software, execution={**software.execution, **_PAX_OF_DGXC})
    if "JAX-Toolbox" in row.source and not notes.transformer_engine:
        # layers of Praxis, of whose attention XLA fuses the softmax alone
        # (xla_gpu_enable_cudnn_fmha=false in rosetta/projects/pax/xla_flags/gpt-126m.env)
        composed = (*software.execution["composed"], "softmax_by_xla")
        execution = {**software.execution, "composed": composed}
        return replace(software, attention="naive", execution=execution)
    return software


def unknown_frameworks(rows: Iterable[StepRow | BadRow]) -> list[str]:
    """Return the frameworks of rows that count as Megatron-Core because none has their name."""
    names = dict.fromkeys(row.framework for row in rows if isinstance(row, StepRow))
    return [name for name in names if name.strip() and _known_software(name) is None]


def _known_software(framework: str) -> Software | None:
    name = framework.strip().lower()
    return next((known for start, known in SOFTWARE.items() if name.startswith(start)), None)
