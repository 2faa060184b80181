"""Megatron-LM and its relatives: Narayanan et al. 2021 (arXiv 2104.04473), Megatron-Core on H100, MT-NLG."""

from collections.abc import Iterator

from simulator.formula import ZERO_2021, Execution, Transformer, predict
from simulator.validation.cases import Case
from simulator.validation.sets.common import fastest, gpt, machine, records


def sc21_ptd() -> Iterator[Case]:
    for row in records("megatron_sc21_table1"):
        model = Transformer(layers=row.layers, hidden=row.hidden, heads=row.heads, seq=row.seq, vocab=row.vocab)
        plan = {"tensor": row.tp, "pipeline": row.pp, "data": row.dp, "global_batch": row.gbs}
        plan |= {"recompute": "full", "scatter_sends": True}
        best = fastest(
            model, machine("dgx_a100_80", row.gpus), plan, {"microbatch": (1, 2, 4, 8), "interleave": range(1, 9)}
        )
        if best is not None:
            yield Case.of_step(f"{row.params_B}B on {row.gpus}", row.derived_iter_s, best)
    for row in records("megatron_sc21_table2"):
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
        best = fastest(model, machine("dgx_a100_80", row.gpus), plan, {"interleave": range(1, 9)})
        if best is not None:
            yield Case.of_step(f"{row.params_B}B on {row.gpus}, table 2", row.derived_iter_s, best)


def sc21_zero3() -> Iterator[Case]:
    for row in records("megatron_sc21_table2"):
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
            f"{row.params_B}B on {row.gpus}", row.derived_iter_s, predict(model, plan, where), fitted=True
        )


def megatron_core() -> Iterator[Case]:
    for row in records("megatron_core_h100_weak"):
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
        best = fastest(model, where, plan, {"microbatch": (1, 2, 4), "interleave": range(1, 15)})
        if best is not None:
            seconds = best.model_flops / (row.tflops_per_gpu * 1e12 * row.gpus)
            yield Case.of_step(f"{row.params_B}B on {row.gpus}", seconds, best)


def mt_nlg() -> Iterator[Case]:
    for row in records("mtnlg_530B_a100_40"):
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
