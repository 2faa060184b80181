"""llm-foundry (MosaicML), SimuMax (Moore Threads) and Alpa."""

import re
from collections.abc import Iterator
from pathlib import Path

from simulator.transformer import JITTED, Execution, Transformer, memory_of, predict
from simulator.validation.cases import Case, Unpredicted
from simulator.validation.sets.published_rows import GIB, PUBLISHED, chosen, machine, records

_MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}


def llm_foundry(folder: Path = PUBLISHED) -> Iterator[Case]:
    clusters = {"h100_80gb": "dgx_h100", "a100_80gb": "dgx_a100_80", "a100_40gb": "dgx_a100_40"}
    shipped = records("llm_foundry_fsdp")
    for row in records("llm_foundry_fsdp", folder=folder):
        layers, hidden, heads = chosen(row.model, _MPT, "model")
        model = Transformer(
            layers=layers,
            hidden=hidden,
            heads=heads,
            seq=row.seqlen,
            vocab=50368,
            attention="flash",
            dropout=False,
            biases=False,
            precision="f8" if row.precision == "amp_fp8" else "bf16",
        )
        plan = Execution(
            data=row.gpus,
            microbatch=row.mbs,
            global_batch=row.gbs,
            zero=3 if row.sharding == "FULL_SHARD" else 2,
            recompute="full" if row.act_ckpt else "none",
            gradient_bytes=2 if row.mp_mode == "PURE" else 4,
            communicated_gradient_bytes=2,
            overlap_gradients=True,
        )
        where = machine(chosen(row.gpu, clusters, "GPU"), row.gpus)
        yield Case.of_step(
            f"{row.model} seq {row.seqlen} on {row.gpus} {row.gpu} {row.precision}",
            row.gbs * row.seqlen / row.tok_s,
            predict(model, plan, where),
            fitted=(row.gpu, row.model, row.seqlen) in _ATTENTION_ROWS and row in shipped,
        )


_ATTENTION_ROWS = {
    ("a100_80gb", "125m", 32768),
    ("h100_80gb", "1b", 65536),
}  # tell the speed of fused attention

_LLAMA = {
    "70b": (8192, 64, 8, 28672),
    "405b": (16384, 128, 16, 53248),
}  # hidden, heads, kv_heads, ffn


_SIMUMAX_FIELD = re.compile(r"(l|tp|cp|pp|dp|seq|mbc)(\d+)")


def _simumax(
    folder: Path,
) -> Iterator[tuple[str, Transformer, Execution, float, float] | Unpredicted]:
    """Cases are named by their sizes; those of other models than Llama have experts."""
    for row in records("simumax_b200", folder=folder):
        name, size, *fields = row.case.split("_")
        found = [_SIMUMAX_FIELD.fullmatch(field) for field in fields]
        given = {match[1]: int(match[2]) for match in found if match is not None}
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
        plan = Execution(
            tensor=given["tp"],
            context=given.get("cp", 1),
            data=given["dp"],
            pipeline=given["pp"],
            sequence_parallel=given["tp"] > 1,
            global_batch=given["mbc"] * given["dp"],
            zero=1,
            fused_loss=True,
        )
        yield row.case, model, plan, row.real_ms / 1e3, row.real_alloc_gib


def simumax_time(folder: Path = PUBLISHED) -> Iterator[Case | Unpredicted]:
    for row in _simumax(folder):
        match row:
            case Unpredicted():
                yield row
            case name, model, plan, seconds, _:
                yield Case.of_step(name, seconds, predict(model, plan, machine("dgx_b200", 8)))


def simumax_memory(folder: Path = PUBLISHED) -> Iterator[Case | Unpredicted]:
    for row in _simumax(folder):
        match row:
            case Unpredicted():
                yield row
            case name, model, plan, _, gib:
                yield Case(name, gib, memory_of(model, plan).total / GIB)


_ALPA_PLANS = {  # devices: layers, hidden, heads, tensor, pipeline, data, microbatches
    4: (24, 2048, 32, 1, 2, 2, 128),
    8: (32, 2560, 32, 1, 4, 2, 128),
    16: (32, 4096, 32, 4, 2, 2, 64),
    32: (48, 5120, 40, 4, 4, 2, 128),
    64: (48, 8192, 64, 4, 16, 1, 1024),
}


def alpa_figure7(folder: Path = PUBLISHED) -> Iterator[Case | Unpredicted]:
    for row in records("alpa_fig7_digitised_pflops", folder=folder):
        if row.model != "GPT":
            continue
        if row.gpus not in _ALPA_PLANS:
            yield Unpredicted(f"GPT on {row.gpus}", "as Alpa's plan is not known")
            continue
        layers, hidden, heads, tensor, pipeline, data, microbatches = _ALPA_PLANS[row.gpus]
        model = Transformer(
            layers=layers, hidden=hidden, heads=heads, seq=1024, vocab=51200, precision="f16"
        )
        plan = Execution(
            tensor=tensor,
            pipeline=pipeline,
            data=data,
            microbatch=1024 // (microbatches * data),
            global_batch=1024,
            recompute="full",
            zero=2,
            scatter_sends=True,  # its resharding between meshes sends parts and gathers them there
        )
        prediction = predict(model, plan, machine("p3.16xlarge", row.gpus, JITTED, nics=1))
        slowest, usual, fastest = (
            prediction.hardware_flops / seconds / 1e15
            for seconds in (prediction.quantile(0.9), prediction.seconds, prediction.quantile(0.1))
        )
        yield Case(f"GPT on {row.gpus}", float(row.alpa), usual, interval=(slowest, fastest))
