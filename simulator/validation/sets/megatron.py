"""Megatron-LM: Narayanan et al. 2021 (arXiv 2104.04473), Megatron-Core on H100, MT-NLG."""

from collections.abc import Iterator
from pathlib import Path

from simulator.transformer import ZERO_2021, Execution, Transformer, predict
from simulator.validation.cases import Case, PublishedSet, Unpredicted
from simulator.validation.sets.published_rows import PUBLISHED, fastest_case, gpt, machine, records


def sc21_ptd(folder: Path = PUBLISHED) -> Iterator[Case | Unpredicted]:
    """Yield the steps of Narayanan et al. with pipeline, tensor and data parallelism."""
    for row in records("megatron_sc21_table1", folder=folder):
        model = Transformer(
            layers=row.layers, hidden=row.hidden, heads=row.heads, seq=row.seq, vocab=row.vocab
        )
        fields = {"tensor": row.tp, "pipeline": row.pp, "data": row.dp, "global_batch": row.gbs}
        fields |= {"recompute": "full", "scatter_sends": True}
        yield fastest_case(
            f"{row.params_B}B on {row.gpus}",
            lambda _, seconds=row.derived_iter_s: seconds,
            model,
            machine("dgx_a100_80", row.gpus),
            fields,
            {"microbatch": (1, 2, 4, 8), "interleave": range(1, 9)},
        )
    for row in records("megatron_sc21_table2", folder=folder):
        if row.scheme != "PTD-P":
            continue
        model = gpt("175B" if row.params_B < 200 else "530B")
        fields = {
            "tensor": 8,
            "pipeline": row.model_parallel // 8,
            "data": row.gpus // row.model_parallel,
            "microbatch": row.mbs,
            "global_batch": row.gbs,
            "recompute": "full",
            "scatter_sends": True,
        }
        yield fastest_case(
            f"{row.params_B}B on {row.gpus}, table 2",
            lambda _, seconds=row.derived_iter_s: seconds,
            model,
            machine("dgx_a100_80", row.gpus),
            fields,
            {"interleave": range(1, 9)},
        )


def sc21_zero3(folder: Path = PUBLISHED) -> Iterator[Case]:
    """Yield the steps of Narayanan et al. with ZeRO-3."""
    shipped = records("megatron_sc21_table2")
    for row in records("megatron_sc21_table2", folder=folder):
        if row.scheme != "ZeRO-3":
            continue
        model = gpt("175B" if row.params_B < 200 else "530B")
        execution = Execution(
            data=row.gpus,
            microbatch=row.mbs,
            global_batch=row.gbs,
            zero=3,
            recompute="full",
            communicated_gradient_bytes=2,
        )
        where = machine("dgx_a100_80", row.gpus, ZERO_2021)
        yield Case.of_step(
            f"{row.params_B}B on {row.gpus}",
            row.derived_iter_s,
            predict(model, execution, where),
            fitted=row in shipped,
        )


def megatron_core(folder: Path = PUBLISHED) -> Iterator[Case | Unpredicted]:
    """Yield the steps of Megatron-Core's weak scaling on H100."""
    for row in records("megatron_core_h100_weak", folder=folder):
        model = Transformer(
            layers=row.layers,
            hidden=row.hidden,
            heads=row.heads,
            seq=4096,
            vocab=131072,
            attention="flash2",
            dropout=False,
        )
        fields = {
            "tensor": row.tp,
            "pipeline": row.pp,
            "data": row.dp,
            "global_batch": row.gbs,
            "sequence_parallel": row.tp > 1,
            "overlap_tensor": "all",
            "overlap_sends": True,
            "overlap_gradients": True,
            "zero": 1,
            "communicated_gradient_bytes": 2,
        }
        where = machine("dgx_h100", row.gpus)
        speed = row.tflops_per_gpu * 1e12 * row.gpus
        yield fastest_case(
            f"{row.params_B}B on {row.gpus}",
            lambda best, speed=speed: best.model_flops / speed,
            model,
            where,
            fields,
            {"microbatch": (1, 2, 4), "interleave": range(1, 15)},
        )


def mt_nlg(folder: Path = PUBLISHED) -> Iterator[Case]:
    """Yield the steps of MT-NLG 530B."""
    for row in records("mtnlg_530B_a100_40", folder=folder):
        execution = Execution(
            tensor=8,
            pipeline=35,
            data=row.gpus // 280,
            microbatch=1,
            global_batch=row.gbs,
            recompute="full",
            serial_sends=True,
        )
        where = machine("dgx_a100_40", row.gpus)
        yield Case.of_step(
            f"530B on {row.gpus}", row.iter_s, predict(gpt("530B"), execution, where)
        )


SC21_PTD = PublishedSet(
    name="sc21-ptd",
    title="Narayanan et al. 2021, tables 1 and 2, PTD",
    unit="s",
    source="arXiv 2104.04473, A100-80 (Selene)",
    cases=sc21_ptd,
    target=0.08,
    note="microbatch and interleaving are not given in table 1: the best of those that fit",
    files=("megatron_sc21_table1", "megatron_sc21_table2"),
)

SC21_ZERO3 = PublishedSet(
    name="sc21-zero3",
    title="Narayanan et al. 2021, table 2, ZeRO-3",
    unit="s",
    source="arXiv 2104.04473, A100-80 (Selene)",
    cases=sc21_zero3,
    target=0.15,
    note=(
        "the contention of computation and collectives, which all backends share, is fitted to "
        "both rows; one NIC a ring"
    ),
    files=("megatron_sc21_table2",),
)

MEGATRON_CORE = PublishedSet(
    name="megatron-core-h100",
    title="Megatron-Core, weak scaling on H100",
    unit="s",
    source="Megatron-LM README, H100",
    cases=megatron_core,
    target=0.10,
    note=(
        "microbatch and interleaving are not given: the best of those that fit; all communication "
        "overlaps, as its README says"
    ),
    files=("megatron_core_h100_weak",),
)

MT_NLG = PublishedSet(
    name="mt-nlg",
    title="MT-NLG 530B",
    unit="s",
    source="llm-analysis README, A100-40 (Selene)",
    cases=mt_nlg,
    note=(
        "no target. DeepSpeed's pipeline engine, which ran it, sends whole activations one after "
        "the other; predicted too fast all the same, and the table doesn't say what else waited"
    ),
    files=("mtnlg_530B_a100_40",),
)
