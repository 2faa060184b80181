"""Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (arXiv 2205.05198): 8 to 512 A100-80 of Selene."""

from collections.abc import Iterator
from pathlib import Path

from simulator.transformer import Execution, Transformer, memory_of, predict
from simulator.transformer.layer import layer_passes
from simulator.transformer.scenario import Recompute
from simulator.transformer.training_memory import saved_activations
from simulator.validation.cases import Case
from simulator.validation.sets.published_rows import GIB, PUBLISHED, gpt, machine, records


def korthikanti_table5(folder: Path = PUBLISHED) -> Iterator[Case]:
    for row in records("korthikanti_table5", folder=folder):
        plan = {
            "tensor": row.tp,
            "pipeline": row.pp,
            "data": row.gpus // (row.tp * row.pp),
            "microbatch": row.mbs,
            "global_batch": row.gbs,
            "interleave": row.interleave,
            "scatter_sends": True,
            "overlap_tensor": "backward",
        }
        full = Execution(**plan, recompute="full")
        selective = Execution(**plan, recompute="selective", sequence_parallel=True)
        for name, execution, seconds in (
            ("full", full, row.full_recompute_s),
            ("selective", selective, row.seq_selective_s),
        ):
            yield Case.of_step(
                f"{row.model} {name}",
                seconds,
                predict(
                    gpt(row.model, precision="f16"), execution, machine("dgx_a100_80", row.gpus)
                ),
            )


def korthikanti_table4(folder: Path = PUBLISHED) -> Iterator[Case]:
    model = Transformer(layers=1, hidden=6144, heads=64, seq=2048, vocab=51200, precision="f16")
    modes: dict[str, tuple[Recompute, bool]] = {
        "baseline": ("none", False),
        "seq_parallel": ("none", True),
        "full_recompute": ("full", False),
        "selective": ("selective", False),
        "selective+seq": ("selective", True),
    }
    for row in records("korthikanti_table4_layer22B", folder=folder):
        recompute, sequence = modes[row.experiment]
        plan = Execution(
            tensor=8,
            microbatch=4,
            global_batch=4,
            recompute=recompute,
            sequence_parallel=sequence,
            overlap_tensor="backward",
        )
        phases = layer_passes(model, plan, machine("dgx_a100_80", 8))
        forward = phases.forward.compute + phases.forward.communication
        backward = sum(
            phase.compute + phase.communication for phase in (phases.backward, phases.recompute)
        )
        yield Case(f"{row.experiment} forward", row.fwd_ms / 1e3, forward)
        yield Case(f"{row.experiment} backward", row.bwd_ms / 1e3, backward)


def korthikanti_figure1(folder: Path = PUBLISHED) -> Iterator[Case]:
    shapes = {
        "22B": (1, 4, 1, 4),
        "175B": (8, 1, 3, 64),
        "530B": (35, 1, 3, 280),
        "1T": (64, 1, 1, 512),
    }
    for row in records("korthikanti_fig1_memory_gib", folder=folder):
        pipeline, micro, interleave, batch = shapes[row.model]
        sequence = row.mode == "seqsel"
        plan = Execution(
            tensor=8,
            pipeline=pipeline,
            microbatch=micro,
            global_batch=batch,
            interleave=interleave,
            sequence_parallel=sequence,
            recompute="selective" if sequence else "none",
        )
        memory = memory_of(gpt(row.model), plan)
        states = memory.states - memory.embedding
        yield Case(f"{row.model} {row.mode} states", row.param_opt_gib, states / GIB)
        yield Case(f"{row.model} {row.mode} activations", row.act_gib, memory.activations / GIB)


def korthikanti_figure7(folder: Path = PUBLISHED) -> Iterator[Case]:
    def kept(model: Transformer, recompute: str, sequence: bool) -> float:
        plan = Execution.model_validate(
            {"tensor": 8, "global_batch": 1, "recompute": recompute, "sequence_parallel": sequence}
        )
        return saved_activations(model, plan)

    modes = {
        "seq": ("none", True),
        "sel": ("selective", False),
        "seqsel": ("selective", True),
        "full": ("full", False),
    }
    for row in records("korthikanti_fig7_act_pct", folder=folder):
        model = gpt(row.model)
        for mode, (recompute, sequence) in modes.items():
            share = 100 * kept(model, recompute, sequence) / kept(model, "none", False)
            yield Case(f"{row.model} {mode}", getattr(row, mode), share)
