"""Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models.

arXiv 2205.05198; 8 to 512 A100-80 of Selene.
"""

from collections.abc import Iterator
from pathlib import Path

from simulator.transformer import Execution, Transformer, memory_of, predict
from simulator.transformer.layer import layer_passes
from simulator.transformer.scenario import Recompute
from simulator.transformer.training_memory import saved_activations
from simulator.validation.cases import Case, PublishedSet
from simulator.validation.sets.published_rows import GIB, PUBLISHED, gpt, machine, records


def korthikanti_table5(folder: Path = PUBLISHED) -> Iterator[Case]:
    """Yield the steps of table 5, with full recomputation and with selective recomputation."""
    for row in records("korthikanti_table5", folder=folder):
        fields = {
            "tensor": row.tp,
            "pipeline": row.pp,
            "data": row.gpus // (row.tp * row.pp),
            "microbatch": row.mbs,
            "global_batch": row.gbs,
            "interleave": row.interleave,
            "scatter_sends": True,
            "overlap_tensor": "backward",
        }
        full = Execution(**fields, recompute="full")
        selective = Execution(**fields, recompute="selective", sequence_parallel=True)
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
    """Yield the forward and the backward pass of one layer, for each mode of table 4."""
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
        execution = Execution(
            tensor=8,
            microbatch=4,
            global_batch=4,
            recompute=recompute,
            sequence_parallel=sequence,
            overlap_tensor="backward",
        )
        passes = layer_passes(model, execution, machine("dgx_a100_80", 8))
        forward = passes.forward.compute + passes.forward.communication
        backward = sum(
            cost.compute + cost.communication for cost in (passes.backward, passes.recompute)
        )
        yield Case(f"{row.experiment} forward", row.fwd_ms / 1e3, forward)
        yield Case(f"{row.experiment} backward", row.bwd_ms / 1e3, backward)


def korthikanti_figure1(folder: Path = PUBLISHED) -> Iterator[Case]:
    """Yield the memory of states and of activations in figure 1, in GiB."""
    shapes = {
        "22B": (1, 4, 1, 4),
        "175B": (8, 1, 3, 64),
        "530B": (35, 1, 3, 280),
        "1T": (64, 1, 1, 512),
    }
    for row in records("korthikanti_fig1_memory_gib", folder=folder):
        pipeline, micro, interleave, batch = shapes[row.model]
        sequence = row.mode == "seqsel"
        execution = Execution(
            tensor=8,
            pipeline=pipeline,
            microbatch=micro,
            global_batch=batch,
            interleave=interleave,
            sequence_parallel=sequence,
            recompute="selective" if sequence else "none",
        )
        memory = memory_of(gpt(row.model), execution)
        states = memory.states - memory.embedding
        yield Case(f"{row.model} {row.mode} states", row.param_opt_gib, states / GIB)
        yield Case(f"{row.model} {row.mode} activations", row.act_gib, memory.activations / GIB)


def korthikanti_figure7(folder: Path = PUBLISHED) -> Iterator[Case]:
    """Yield the activations of each mode in figure 7, in % of those without recomputation."""

    def activations(model: Transformer, recompute: str, sequence: bool) -> float:
        execution = Execution.model_validate(
            {"tensor": 8, "global_batch": 1, "recompute": recompute, "sequence_parallel": sequence}
        )
        return saved_activations(model, execution)

    modes = {
        "seq": ("none", True),
        "sel": ("selective", False),
        "seqsel": ("selective", True),
        "full": ("full", False),
    }
    for row in records("korthikanti_fig7_act_pct", folder=folder):
        model = gpt(row.model)
        for mode, (recompute, sequence) in modes.items():
            share = (
                100 * activations(model, recompute, sequence) / activations(model, "none", False)
            )
            yield Case(f"{row.model} {mode}", getattr(row, mode), share)


KORTHIKANTI_TABLE_5 = PublishedSet(
    name="korthikanti-table5",
    title="Korthikanti et al., table 5",
    unit="s",
    source="arXiv 2205.05198, A100-80 (Selene)",
    cases=korthikanti_table5,
    target=0.030,
    note="both columns: full recomputation, and selective with sequence parallelism",
    files=("korthikanti_table5",),
)

KORTHIKANTI_TABLE_4 = PublishedSet(
    name="korthikanti-table4",
    title="Korthikanti et al., table 4: one layer of 22B",
    unit="s",
    source="arXiv 2205.05198, A100-80",
    cases=korthikanti_table4,
    note="collectives of the backward pass overlap with the products of weight gradients",
    files=("korthikanti_table4_layer22B",),
)

KORTHIKANTI_FIGURE_1 = PublishedSet(
    name="korthikanti-figure1",
    title="Korthikanti et al., figure 1: memory",
    unit="GiB",
    source="arXiv 2205.05198",
    cases=korthikanti_figure1,
    target=0.02,
    note="the figure counts the matrices of the layers only, so embeddings are left out",
    files=("korthikanti_fig1_memory_gib",),
)

KORTHIKANTI_FIGURE_7 = PublishedSet(
    name="korthikanti-figure7",
    title="Korthikanti et al., figure 7: activations",
    unit="%",
    source="arXiv 2205.05198",
    cases=korthikanti_figure7,
    target=0.02,
    files=("korthikanti_fig7_act_pct",),
)
