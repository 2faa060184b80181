"""Scenarios of measured steps: the model, the execution and the machine that a row describes.

What a row leaves open follows from the family of its model, from its framework and from its
kernels. A row that no scenario can express raises `StepRowError` with the reason.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from simulator.hardware.cluster import Cluster
from simulator.hardware.description import validate
from simulator.hardware.device import Device
from simulator.transformer import (
    EAGER,
    JITTED,
    MEGATRON_CORE,
    MEGATRON_GRAPHS,
    Backend,
    Execution,
    Machine,
    Transformer,
    predict,
)
from simulator.transformer.precision import RECIPES
from simulator.validation.step_hybrids import hybrid_model, is_hybrid
from simulator.validation.step_models import (
    captured_parts,
    expert_execution,
    expert_model,
    has_experts,
    has_fused_experts,
)
from simulator.validation.step_names import gpu_name, precision_of
from simulator.validation.step_notes import Notes, notes_of
from simulator.validation.step_recompute import (
    NOTHING,
    SAVES_CONTEXT,
    SAVES_EVERY_SECOND_PRODUCT,
    SCORES,
    WHOLE_LAYERS,
    Recomputation,
    recomputation_of,
)
from simulator.validation.step_rows import StepRow, StepRowError
from simulator.validation.step_software import GPT_NAME, SOFTWARE, Software, software_of


@dataclass(frozen=True, slots=True)
class StepScenario:
    """What a row describes.

    Attributes:
        model: the model that is trained.
        execution: how the step is divided over devices.
        machine: the cluster and the software that drives it.
    """

    model: Transformer
    execution: Execution
    machine: Machine


_CLUSTERS = {
    "A100": "dgx_a100_80",
    "A100-80GB": "dgx_a100_80",
    "A100-40GB": "dgx_a100_40",
    "A800": "a800_roce",
    "H100": "dgx_h100",
    "H200": "dgx_h200",
    "B200": "dgx_b200",
    "GB200": "gb200_nvl72",
    "GB300": "gb300_nvl72",
    "B300": "dgx_b300",
    "V100-16GB": "p3.16xlarge",
    "GH200": "gh200_quad",
    "H100-PCIe": "h100_pcie_8",
}
"""Shipped clusters by the name of the GPU."""

_KERNELS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "torch": ("naive", ("softmax", "norm")),
    "fused": ("naive", ("norm",)),
    "flash_attentionv1.0.8": ("flash1", ("norm",)),
    "flash_attention2": ("flash2", ("norm",)),
    "flash_attention2 + RMS kernel": ("flash2", ()),
}
"""The implementation of attention, and composed operations, by the kernels of a row."""

_ENCODER_DECODER = re.compile(r"(t5|ul2)")
_IMAGES = re.compile(r"vit\S*?(\d+)")
"""Models of images; the number at the end of the name is the width of their patches."""

_T5_HEAD_SIZE = 64
_T5_TARGETS = 128
"""Tokens of the decoder where those of the encoder are 512 (TASK_FEATURE_LENGTHS in
github.com/google-research/t5x, t5x/contrib/gpu/t5/t5_1_1/examples)."""

_LINE_RATE = 0.967
"""Part of the line rate of a NIC that rings reach, as on the shipped clusters."""

_NOT_COMPILED = ("complex_rotary",)
"""Operations that torch.compile doesn't fuse."""

_MICROBATCHES = (1, 2, 4, 8)
"""Microbatches that are tried where a row doesn't say its own."""


def scenario_of(row: StepRow) -> StepScenario:
    """Return the scenario of a row.

    Raises:
        StepRowError: a column is empty that a prediction needs, or scenarios can't express the row.
        ValueError: the degrees don't divide the sizes.
    """
    notes = notes_of(row)
    row = _completed(row, notes)
    software = software_of(row, notes)
    model = _model(row, notes, software)
    machine = _machine(row, notes, software)
    fields = _execution_fields(row, notes, software)
    fields |= _uneven_stages(row, model, software)
    if model.experts is not None:
        fields |= {"composed": ()} | expert_execution(row, model)
    if row.micro_batch is not None:
        micros: Iterable[int] = (row.micro_batch,)
    else:
        per_replica = max(1, fields["global_batch"] // fields["data"])
        micros = [size for size in _MICROBATCHES if per_replica % size == 0]
    # FSDP that doesn't fit without recomputation has a policy that its table doesn't say
    dense = software.backend is JITTED or (software.backend is EAGER and model.experts is None)
    said = recomputation_of(row)
    recomputations = (said or NOTHING,)
    if said is None and row.zero == 3 and dense:
        recomputations = software.unsaid
    few_bits = RECIPES[model.precision].dtype is not None
    recomputations = [_of_software(kind, software, few_bits) for kind in recomputations]
    candidates = [
        {"microbatch": micro} | recomputation.fields | fields
        for micro in micros
        for recomputation in recomputations
    ]
    return _fastest(model, candidates, machine)


def _of_software(recomputation: Recomputation, software: Software, few_bits: bool) -> Recomputation:
    """Return what a recomputation is in some software.

    Args:
        recomputation: what the table says.
        software: the software.
        few_bits: whether products have 8 or 4 bits.
    """
    if recomputation is WHOLE_LAYERS:
        return software.full
    if recomputation is SCORES:
        recomputation = software.selective
    if recomputation is SAVES_EVERY_SECOND_PRODUCT and few_bits:
        return SAVES_CONTEXT
    return recomputation


def _completed(row: StepRow, notes: Notes) -> StepRow:
    """Return a row with what its notes say of empty cells, and of degrees that can't be.

    Where a table contradicts itself and the batch is smaller than the degree of data parallelism,
    the other devices divide sequences.
    """
    row = replace(row, seq=row.seq or notes.seq)
    if row.global_batch is None and notes.microbatches and row.micro_batch:
        batch = notes.microbatches * row.micro_batch * row.replicas
        return replace(row, global_batch=batch)
    batch = row.global_batch or row.replicas
    if notes.doubts_degrees and row.replicas > batch and row.replicas % batch == 0:
        return replace(row, cp=row.cp * (row.replicas // batch), dp=batch)
    return row


def _model(row: StepRow, notes: Notes, software: Software) -> Transformer:
    """Return the model of a row."""
    name = row.model.lower()
    if _ENCODER_DECODER.match(name):
        return _encoder_decoder(row, software)
    if match := _IMAGES.match(name):
        return _image_encoder(row, int(match[1]), software)
    if is_hybrid(row):
        return hybrid_model(row, precision_of(row), software.attention)
    if notes.experts or has_experts(row):
        precision = precision_of(row)
        return expert_model(row, precision, software.attention)
    hidden, heads = row.required("hidden"), row.required("heads")
    gpt = GPT_NAME.match(name) is not None
    fields = {
        "layers": row.required("layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": row.kv_heads,
        "ffn": row.ffn,
        "seq": row.required("seq"),
        "vocab": row.required("vocab"),
        "gated": not gpt and not notes.squared_relu and "nemotron" not in name,
        "tied": gpt,
        "learned_positions": gpt,
        "biases": gpt,
        # recipes of Pax have none
        "dropout": gpt and software.attention == "naive" and software.backend is not JITTED,
        "attention": _kernels(row)[0] if row.kernel else software.attention,
        "precision": precision_of(row),
        "adapters": _adapters(row, notes),
    }
    return validate(Transformer, fields, "model")


def _encoder_decoder(row: StepRow, software: Software) -> Transformer:
    """Return a T5 version 1.1, whose encoder and decoder have as many layers.

    The table has the layers of both, and the tokens of the encoder.
    """
    layers, seq = row.required("layers") // 2, row.required("seq")
    fields = {
        "layers": layers,
        "hidden": row.required("hidden"),
        "heads": row.required("heads"),
        "head_size": _T5_HEAD_SIZE,
        "ffn": row.ffn,
        "seq": _T5_TARGETS * seq // 512,
        "encoder": {"layers": layers, "seq": seq},
        "vocab": row.required("vocab"),
        "gated": True,
        "tied": False,
        "biases": False,
        "dropout": False,
        "attention": software.attention,
        "precision": precision_of(row),
    }
    return validate(Transformer, fields, "model")


def _image_encoder(row: StepRow, patch: int, software: Software) -> Transformer:
    """Return a vision transformer.

    Its projection of patches has the parameters and the products of the embedding of a decoder with
    a word for each colour of each pixel of a patch. Its head sees one token of an image.
    """
    fields = {
        "layers": row.required("layers"),
        "hidden": row.required("hidden"),
        "heads": row.required("heads"),
        "ffn": row.ffn,
        "seq": row.required("seq"),
        "vocab": 3 * patch**2,
        "causal": False,
        "attention_dropout": False,
        "inner_dropout": True,
        "attention": software.attention,
        "precision": precision_of(row),
    }
    return validate(Transformer, fields, "model")


_ADAPTED: Mapping[re.Pattern[str], str] = {
    re.compile(r"nemo automodel"): "all",
    re.compile(r"nemo mlperf|pax|maxtext"): "attention",
}
"""Layers with adapters by framework; recipes of NeMo and Megatron-Bridge adapt linear_qkv alone."""

_DEFAULT_RANK = 32
"""Rank of adapters in recipes of NeMo and Megatron-Bridge, for rows that don't say it."""


def _adapters(row: StepRow, notes: Notes) -> dict[str, Any] | None:
    if not notes.adapters:
        return None
    name = row.framework.lower()
    layers = next((where for pattern, where in _ADAPTED.items() if pattern.match(name)), "qkv")
    return {"rank": notes.adapter_rank or _DEFAULT_RANK, "of": layers}


def _execution_fields(row: StepRow, notes: Notes, software: Software) -> dict[str, Any]:
    """Return the fields of the execution of a row."""
    zero = row.zero
    if zero is None:
        zero = software.execution.get("zero", 1)
    sequence_parallel = row.sequence_parallel
    if sequence_parallel is None:
        sequence_parallel = notes.sequence_parallel
    if sequence_parallel is None:
        overlapped = software.execution.get("overlap_tensor") == "all"
        sequence_parallel = software.execution.get("sequence_parallel", overlapped)
    overlap = {"overlap_tensor": "all"} if notes.overlap_tensor else {}
    composed = software.execution.get("composed", ())
    if notes.compiled:
        composed = tuple(kind for kind in composed if kind in _NOT_COMPILED)
    if row.kernel:
        composed = (*composed, *_kernels(row)[1])
    by_degrees = _by_degrees_of_oneflow(row) if software is SOFTWARE["oneflow"] else {}
    return {
        **software.execution,
        **by_degrees,
        **overlap,
        "composed": composed,
        "tensor": row.tp,
        "context": row.cp,
        "data": row.replicas,
        "pipeline": row.pp,
        "interleave": row.vp if row.pp > 1 else 1,
        "sequence_parallel": sequence_parallel and row.tp > 1,
        "global_batch": row.required("global_batch"),
        # parameters stay gathered between the microbatches of a pipeline (reshard_after_forward)
        "zero": min(zero, 2) if row.pp > 1 else zero,
        "sharding_group": _sharding_group(row, notes),
    }


def _by_degrees_of_oneflow(row: StepRow) -> dict[str, Any]:
    """Return the fields of OneFlow that depend on degrees of parallelism.

    Mixed precision lets sparse_softmax_cross_entropy have 16 bits, but not the one that tensor
    parallelism needs; a pipeline has buffers for twice as many microbatches as it has stages
    (github.com/Oneflow-Inc/oneflow, auto_mixed_precision_lists.cpp and pipeline_buffer_pass.cpp in
    oneflow/core/job_rewriter). With tensor parallelism all collectives wait for the kernels before
    them (nccl_use_compute_stream in github.com/Oneflow-Inc/OneFlow-Benchmark, LanguageModeling/GPT,
    oneflow_gpt/training.py).
    """
    return {
        "loss_in_16_bits": row.tp == 1,
        "spare_microbatches": row.pp,
        "overlap_gradients": row.tp == 1,
    }


def _sharding_group(row: StepRow, notes: Notes) -> int | None:
    """Return the devices over which ZeRO shards; None for all that have copies.

    Raises:
        StepRowError: the devices that have copies are not divided into groups of that size.
    """
    replicas = row.replicas * row.cp
    if notes.shards is not None and (notes.shards < 1 or replicas % notes.shards):
        raise StepRowError(
            f"column notes: sharding over {notes.shards} GPUs, expected a divisor of"
            f" gpus / (tp * pp), which is {replicas}"
        )
    return notes.shards


def _uneven_stages(row: StepRow, model: Transformer, software: Software) -> dict[str, Any]:
    """Return the fields of pipelines in which embedding and loss count as layers.

    NVIDIA's recipes do so where the layers don't divide otherwise (Llama 3.1 405B, Qwen3 235B).
    Aleph Alpha's stages always count them, and the first stages get one more where they don't
    divide (pipe_partition_uniform in src/scaling/core/nn/parallel_module/pipeline_partitioning.py).
    InternEvo's last stages do (partition_uniform in internlm/solver/pipeline_utils.py).
    """
    if row.pp == 1 and software in (SOFTWARE["aleph alpha"], SOFTWARE["internevo"]):
        return {}
    if software is SOFTWARE["internevo"] and row.vp == 1:
        least, more = divmod(model.layers, row.pp)
        return {"stage_layers": tuple(least + (stage >= row.pp - more) for stage in range(row.pp))}
    if software is SOFTWARE["aleph alpha"] and row.vp == 1:
        least, more = divmod(model.layers + 2, row.pp)
        parts = [least + (stage < more) for stage in range(row.pp)]
        parts[0] -= 1
        parts[-1] -= 1
        return {"stage_layers": tuple(parts)}
    stages = row.pp * (row.vp if row.pp > 1 else 1)
    counted = model.layers % stages > 0 and (model.layers + 2) % stages == 0
    return {"embedding_as_layer": counted, "loss_as_layer": counted}


def _kernels(row: StepRow) -> tuple[str, tuple[str, ...]]:
    if row.kernel not in _KERNELS:
        raise StepRowError(
            f"column kernel: given {row.kernel!r}, expected one of {', '.join(_KERNELS)}"
        )
    return _KERNELS[row.kernel]


def _machine(row: StepRow, notes: Notes, software: Software) -> Machine:
    name = gpu_name(row)
    gpu = next((known for known in _CLUSTERS if known.upper() == name), None)
    if gpu is None:
        raise StepRowError(f"column gpu: given {row.gpu!r}, expected one of {', '.join(_CLUSTERS)}")
    backend = software.backend
    if backend is MEGATRON_CORE:
        captured = replace(MEGATRON_CORE, captured=captured_parts(row))
        backend = MEGATRON_GRAPHS if has_fused_experts(row) else captured
    machine = _cached_machine(
        software.clusters.get(gpu, _CLUSTERS[gpu]), row.gpus, notes.nics, notes.nic_gbit, backend
    )
    if gpu not in software.devices:
        return machine
    cluster = machine.cluster
    device = validate(Device, cluster.device.fields() | dict(software.devices[gpu]), "device")
    return Machine(cluster.model_copy(update={"device": device}), backend)


@cache
def _cached_machine(
    name: str, devices: int, nics: int | None, nic_gbit: float | None, backend: Backend
) -> Machine:
    """Return complete hosts of a shipped cluster, with other NICs where the notes say so."""
    cluster = Cluster.load(name)
    local = cluster.devices_per_host
    if local == 72 and devices > local:
        local = 64  # as jobs of more than a rack use it
    cluster = cluster.with_size(-(-devices // local), local)
    if nics is not None and cluster.inter_host is not None:
        update: dict[str, Any] = {"nics_per_host": nics}
        if nic_gbit is not None:
            bandwidth = _LINE_RATE * nic_gbit / 8
            update["inter_host"] = cluster.inter_host.model_copy(
                update={"bandwidth_gb_per_s": bandwidth}
            )
        cluster = cluster.model_copy(update=update)
    return Machine(cluster, backend)


def _fastest(
    model: Transformer, executions: list[dict[str, Any]], machine: Machine
) -> StepScenario:
    """Return the scenario with the fastest of several executions that fits, or that has least.

    Raises:
        ValueError: none divides the sizes of the model.
    """
    if len(executions) == 1:
        return StepScenario(model, validate(Execution, executions[0], "execution"), machine)
    scenarios = []
    problem: ValueError = StepRowError("column micro_batch: empty, and no size divides the batch")
    for fields in executions:
        try:
            execution = validate(Execution, fields, "execution")
            prediction = predict(model, execution, machine)
        except ValueError as error:
            problem = error
            continue
        key = (not prediction.memory.fits, prediction.seconds)
        scenarios.append((key, StepScenario(model, execution, machine)))
    if not scenarios:
        raise problem
    return min(scenarios, key=lambda pair: pair[0])[1]
