"""Megatron-LM and its relatives: Narayanan et al. 2021 (arXiv 2104.04473), Megatron-Core on H100, MT-NLG."""

from collections.abc import Iterator
from pathlib import Path

from simulator.transformer import ZERO_2021, Execution, Transformer, predict
from simulator.validation.cases import Case, Unpredicted
from simulator.validation.sets.published_rows import PUBLISHED, fastest_case, gpt, machine, records


def sc21_ptd(folder: Path = PUBLISHED) -> Iterator[Case | Unpredicted]:
    for row in records("megatron_sc21_table1", folder=folder):
        model = Transformer(
            layers=row.layers, hidden=row.hidden, heads=row.heads, seq=row.seq, vocab=row.vocab
        )
        plan = {"tensor": row.tp, "pipeline": row.pp, "data": row.dp, "global_batch": row.gbs}
        plan |= {"recompute": "full", "scatter_sends": True}
        yield fastest_case(
            f"{row.params_B}B on {row.gpus}",
            lambda _, seconds=row.derived_iter_s: seconds,
            model,
            machine("dgx_a100_80", row.gpus),
            plan,
            {"microbatch": (1, 2, 4, 8), "interleave": range(1, 9)},
        )
    for row in records("megatron_sc21_table2", folder=folder):
        if row.scheme != "PTD-P":
            continue
        model = gpt("175B" if row.params_B < 200 else "530B")
        plan = {
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
            plan,
            {"interleave": range(1, 9)},
        )


def sc21_zero3(folder: Path = PUBLISHED) -> Iterator[Case]:
    shipped = records("megatron_sc21_table2")
    for row in records("megatron_sc21_table2", folder=folder):
        if row.scheme != "ZeRO-3":
            continue
        model = gpt("175B" if row.params_B < 200 else "530B")
        plan = Execution(
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
            predict(model, plan, where),
            fitted=row in shipped,
        )


def megatron_core(folder: Path = PUBLISHED) -> Iterator[Case | Unpredicted]:
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
        plan = {
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
            plan,
            {"microbatch": (1, 2, 4), "interleave": range(1, 15)},
        )


def mt_nlg(folder: Path = PUBLISHED) -> Iterator[Case]:
    for row in records("mtnlg_530B_a100_40", folder=folder):
        plan = Execution(
            tensor=8,
            pipeline=35,
            data=row.gpus // 280,
            microbatch=1,
            global_batch=row.gbs,
            recompute="full",
        )
        where = machine("dgx_a100_40", row.gpus)
        yield Case.of_step(f"530B on {row.gpus}", row.iter_s, predict(gpt("530B"), plan, where))
