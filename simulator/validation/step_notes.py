"""Facts in the notes of measured steps, for which tables have no column."""

import re
from dataclasses import dataclass, replace

from simulator.validation.step_rows import StepRow

_SHARDS = re.compile(r"FSDP over (\d+) GPUs|DP \d+ x FSDP (\d+)|\bFSDP (\d+)\b|zero1=(\d+)")
_NICS = re.compile(r"(\d+) x (\d+) Gb/s (RoCE|IB|EFA)")
_COMPILED = re.compile(r"(?<!no )(?<!without )(torch\.)?compile", re.IGNORECASE)
_CONTAINER = re.compile(r"(\d\d)\.(\d\d)[.\d]* container")
_RANK = re.compile(r"LoRA r(?:ank )?(\d+)")
_MICROBATCHES = re.compile(r"micro_num (\d+)")
_SEQ = re.compile(r"config: (\d+)\)")
_OVERLAPS_TENSOR = re.compile(r"TP comm overlap|async[ -]?TP|asynchronous TP", re.IGNORECASE)
_ONE_NIC = re.compile(r"(\d+) Gb/s IB, 1 card per host")


@dataclass(frozen=True, slots=True)
class Notes:
    """What the notes of a row say.

    Attributes:
        shards: devices over which ZeRO shards; None if the notes don't say, or say that it shards
            over all.
        nics: NICs of each host; None if not said.
        nic_gbit: Gb/s of each NIC.
        squared_relu: whether the MLP has two matrices and a squared ReLU between them.
        experts: whether the model has experts.
        balanced_gate: whether consecutive experts take the place of those that a router chooses.
        adapters: whether only adapters (LoRA) are trained.
        adapter_rank: rank of adapters; None if not said.
        overlap_tensor: whether communication of tensor parallelism overlaps with products.
        compiled: whether torch.compile fuses elementwise kernels.
        sequence_parallel: whether norms are divided along the sequence; None if not said.
        seq: tokens of a sequence, where the table doesn't say it but its configuration does.
        microbatches: microbatches of a step on a device (InternEvo's micro_num); None if not said.
        doubts_degrees: whether the table contradicts its own degree of data parallelism.
        flash_attention: whether Transformer Engine calls FlashAttention 2 instead of cuDNN's fused
            attention (NVTE_FUSED_ATTN=0).
        transformer_engine: whether layers are those of Transformer Engine.
        container: year and month of NVIDIA's container, such as (26, 4); None if not said.
    """

    shards: int | None = None
    nics: int | None = None
    nic_gbit: float | None = None
    squared_relu: bool = False
    experts: bool = False
    balanced_gate: bool = False
    adapters: bool = False
    adapter_rank: int | None = None
    overlap_tensor: bool = False
    compiled: bool = False
    sequence_parallel: bool | None = None
    seq: int | None = None
    microbatches: int | None = None
    doubts_degrees: bool = False
    flash_attention: bool = False
    transformer_engine: bool = False
    container: tuple[int, int] | None = None


def notes_of(row: StepRow) -> Notes:
    """Return what the notes and the framework of a row say."""
    text = row.notes
    notes = Notes(
        squared_relu="squared-relu" in text,
        experts="experts" in text,
        balanced_gate="balanced gate" in text,
        adapters="LoRA" in f"{row.framework} {text}",
        compiled=_COMPILED.search(text) is not None,
        overlap_tensor=_OVERLAPS_TENSOR.search(text) is not None,
        doubts_degrees="table prints DP" in text,
        flash_attention="NVTE_FUSED_ATTN=0" in text,
        transformer_engine="Transformer Engine" in text,
        seq=_number(_SEQ, text),
        microbatches=_number(_MICROBATCHES, text),
        adapter_rank=_number(_RANK, f"{row.framework} {text}"),
    )
    if match := _SHARDS.search(text):
        notes = replace(notes, shards=int(next(filter(None, match.groups()))))
    if match := _CONTAINER.search(text):
        notes = replace(notes, container=(int(match[1]), int(match[2])))
    if match := _ONE_NIC.search(text):
        notes = replace(notes, nics=1, nic_gbit=float(match[1]))
    elif match := _NICS.search(text):
        notes = replace(notes, nics=int(match[1]), nic_gbit=float(match[2]))
    if "sequence_parallel false" in text:
        notes = replace(notes, sequence_parallel=False)
    elif "sequence parallel" in text:
        notes = replace(notes, sequence_parallel=True)
    return notes


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    return int(match[1]) if match else None
