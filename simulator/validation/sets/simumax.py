"""SimuMax (Moore Threads, Apache-2.0): steps and memory of Llama 3 and DeepSeek on 8 B200."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from simulator.hardware.description import validate
from simulator.transformer import (
    EAGER,
    Execution,
    Machine,
    Transformer,
    memory_of,
    predict,
)
from simulator.validation.cases import Case, PublishedSet, Unpredicted
from simulator.validation.sets.published_rows import GIB, PUBLISHED, machine, records
from simulator.validation.step_models import expert_model
from simulator.validation.step_rows import StepRow

_LLAMA = {
    "70b": (8192, 64, 8, 28672),
    "405b": (16384, 128, 16, 53248),
}
"""Hidden size, heads, heads of keys and values, and inner width of the MLP."""

_DEEPSEEK = {"deepseekv2": "deepseek-v2", "deepseekv3": "deepseek-v3"}
"""Models with experts by the beginning of the name of a row."""

_SIMUMAX_FIELD = re.compile(r"(l|tp|cp|pp|dp|ep|seq|mbc)(\d+)")


def _simumax(
    folder: Path,
) -> Iterator[tuple[str, Transformer, Execution, float, float] | Unpredicted]:
    """Yield the name, model, execution, seconds and GiB of each row.

    Names of rows contain their sizes. Megatron-LM has run them, with experts padded to their
    capacity and exchanged by all_to_all (github.com/MooreThreads/SimuMax, configs and simu_tools).
    """
    for row in records("simumax_b200", folder=folder):
        family, *fields = row.case.split("_")
        matches = [_SIMUMAX_FIELD.fullmatch(field) for field in fields]
        given = {match[1]: int(match[2]) for match in matches if match is not None}
        seq = given.get("seq", 4096)
        if family in _DEEPSEEK:
            model = _deepseek(_DEEPSEEK[family], given["l"], seq)
        elif family == "llama3" and fields[0] in _LLAMA:
            model = _llama(fields[0], given["l"], seq)
        else:
            known = ", ".join([f"llama3_{size}" for size in _LLAMA] + list(_DEEPSEEK))
            yield Unpredicted(row.case, f"sizes are known of {known}")
            continue
        execution = Execution(
            tensor=given["tp"],
            context=given.get("cp", 1),
            data=given["dp"],
            pipeline=given["pp"],
            expert=given.get("ep", 1),
            sequence_parallel=given["tp"] > 1,
            global_batch=given["mbc"] * given["dp"],
            zero=1,
            fused_loss=True,
        )
        yield row.case, model, execution, row.real_ms / 1e3, row.real_alloc_gib


def _llama(size: str, layers: int, seq: int) -> Transformer:
    hidden, heads, kv_heads, ffn = _LLAMA[size]
    return Transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        seq=seq,
        vocab=128256,
        gated=True,
        tied=False,
        learned_positions=False,
        biases=False,
        dropout=False,
        attention="flash2",
    )


def _deepseek(name: str, layers: int, seq: int) -> Transformer:
    """Return a DeepSeek of few layers. The first one is dense, as measured memory shows."""
    model = expert_model(StepRow(1, name, "B200", 8, layers=layers, seq=seq), "bf16", "flash2")
    experts = model.experts_section.fields() | {"first_dense": 1, "capacity_factor": 1.0}
    return validate(Transformer, model.fields() | {"experts": experts}, "model")


def _machine() -> Machine:
    """Return 8 B200 that Megatron-LM drives, a product of cuBLAS for each expert."""
    return machine("dgx_b200", 8, replace(EAGER, expert_kernels="looped"))


def simumax_time(folder: Path = PUBLISHED) -> Iterator[Case | Unpredicted]:
    """Yield the seconds of steps."""
    for row in _simumax(folder):
        match row:
            case Unpredicted():
                yield row
            case name, model, execution, seconds, _:
                yield Case.of_step(name, seconds, predict(model, execution, _machine()))


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
    title="SimuMax on B200",
    unit="s",
    source="SimuMax (Apache-2.0), B200",
    cases=simumax_time,
    files=("simumax_b200",),
)

SIMUMAX_MEMORY = PublishedSet(
    name="simumax-memory",
    title="SimuMax on B200: memory",
    unit="GiB",
    source="SimuMax (Apache-2.0), B200",
    cases=simumax_memory,
    target=0.02,
    note=(
        "temporaries beside activations were modelled on the rows of Llama; no number is fitted. "
        "That the first layer of DeepSeek is dense follows from its rows"
    ),
    files=("simumax_b200",),
)
