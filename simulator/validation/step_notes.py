"""Facts in the notes of measured steps, for which tables have no column."""

import re
from dataclasses import dataclass, replace

from simulator.validation.step_rows import StepRow

_SHARDS = re.compile(r"FSDP over (\d+) GPUs|DP \d+ x FSDP (\d+)|\bFSDP (\d+)\b")
_NICS = re.compile(r"(\d+) x (\d+) Gb/s (RoCE|IB|EFA)")
_COMPILED = re.compile(r"(?<!no )(?<!without )(torch\.)?compile", re.IGNORECASE)
_CONTAINER = re.compile(r"(\d\d)\.(\d\d)[.\d]* container")
_ONE_NIC = re.compile(r"(\d+) Gb/s IB, 1 card per host")


@dataclass(frozen=True, slots=True)
class Notes:
    """What the notes of a row say.

    Attributes:
        shards: devices over which parameters are sharded; None if the notes don't say.
        nics: NICs of each host; None if not said.
        nic_gbit: Gb/s of each NIC.
        squared_relu: whether the MLP has two matrices and a squared ReLU between them.
        experts: whether the model has experts.
        adapters: whether only adapters (LoRA) are trained.
        overlap_tensor: whether communication of tensor parallelism overlaps with products.
        compiled: whether torch.compile fuses elementwise kernels.
        sequence_parallel: whether norms are divided along the sequence; None if not said.
        container: year and month of NVIDIA's container, such as (26, 4); None if not said.
    """

    shards: int | None = None
    nics: int | None = None
    nic_gbit: float | None = None
    squared_relu: bool = False
    experts: bool = False
    adapters: bool = False
    overlap_tensor: bool = False
    compiled: bool = False
    sequence_parallel: bool | None = None
    container: tuple[int, int] | None = None


def notes_of(row: StepRow) -> Notes:
    """Return what the notes and the framework of a row say."""
    text = row.notes
    notes = Notes(
        squared_relu="squared-relu" in text,
        experts="experts" in text,
        adapters="LoRA" in f"{row.framework} {text}",
        compiled=_COMPILED.search(text) is not None,
        overlap_tensor="TP comm overlap" in text,
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
