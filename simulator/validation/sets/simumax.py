"""SimuMax (Moore Threads, Apache-2.0): steps and memory of Llama 3 on 8 B200."""

import re
from collections.abc import Iterator
from pathlib import Path

from simulator.transformer import Execution, Transformer, memory_of, predict
from simulator.validation.cases import Case, PublishedSet, Unpredicted
from simulator.validation.sets.published_rows import GIB, PUBLISHED, machine, records

_LLAMA = {
    "70b": (8192, 64, 8, 28672),
    "405b": (16384, 128, 16, 53248),
}
"""Hidden size, heads, heads of keys and values, and inner width of the MLP."""

_SIMUMAX_FIELD = re.compile(r"(l|tp|cp|pp|dp|seq|mbc)(\d+)")


def _simumax(
    folder: Path,
) -> Iterator[tuple[str, Transformer, Execution, float, float] | Unpredicted]:
    """Yield the name, model, execution, seconds and GiB of each row.

    Names of rows contain their sizes. Models other than Llama 3 have experts.
    """
    for row in records("simumax_b200", folder=folder):
        name, size, *fields = row.case.split("_")
        matches = [_SIMUMAX_FIELD.fullmatch(field) for field in fields]
        given = {match[1]: int(match[2]) for match in matches if match is not None}
        if name != "llama3" or size not in _LLAMA:
            yield Unpredicted(
                row.case,
                "as scenarios have no experts, nor sizes of Llama 3 other than 70b and 405b",
            )
            continue
        hidden, heads, kv_heads, ffn = _LLAMA[size]
        model = Transformer(
            layers=given["l"],
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            ffn=ffn,
            seq=given.get("seq", 4096),
            vocab=128256,
            gated=True,
            tied=False,
            learned_positions=False,
            biases=False,
            dropout=False,
            attention="flash2",
        )
        execution = Execution(
            tensor=given["tp"],
            context=given.get("cp", 1),
            data=given["dp"],
            pipeline=given["pp"],
            sequence_parallel=given["tp"] > 1,
            global_batch=given["mbc"] * given["dp"],
            zero=1,
            fused_loss=True,
        )
        yield row.case, model, execution, row.real_ms / 1e3, row.real_alloc_gib


def simumax_time(folder: Path = PUBLISHED) -> Iterator[Case | Unpredicted]:
    """Yield the seconds of steps."""
    for row in _simumax(folder):
        match row:
            case Unpredicted():
                yield row
            case name, model, execution, seconds, _:
                yield Case.of_step(name, seconds, predict(model, execution, machine("dgx_b200", 8)))


def simumax_memory(folder: Path = PUBLISHED) -> Iterator[Case | Unpredicted]:
    """Yield the peak memory of a device, in GiB."""
    for row in _simumax(folder):
        match row:
            case Unpredicted():
                yield row
            case name, model, execution, _, gib:
                yield Case(name, gib, memory_of(model, execution).total / GIB)


SIMUMAX_TIME = PublishedSet(
    name="simumax-time",
    title="SimuMax, Llama 3 on B200",
    unit="s",
    source="SimuMax (Apache-2.0), B200",
    cases=simumax_time,
    files=("simumax_b200",),
)

SIMUMAX_MEMORY = PublishedSet(
    name="simumax-memory",
    title="SimuMax, Llama 3 on B200: memory",
    unit="GiB",
    source="SimuMax (Apache-2.0), B200",
    cases=simumax_memory,
    target=0.02,
    note=(
        "temporaries beside activations were modelled on these rows; no number is fitted. "
        "Scenarios have no mixtures of experts"
    ),
    files=("simumax_b200",),
)
