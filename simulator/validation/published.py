"""The published sets: what was run, where, and with which software. Rows are in `data/published`, their sources in `data/README.md`."""

import re
import zlib
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import product

import pandas as pd

from simulator.cluster import Cluster
from simulator.formula import EAGER, ZERO_2021, Backend, Execution, Machine, Prediction, Transformer, memory_of, predict
from simulator.formula.layer import layer_phases
from simulator.validation.cases import Case, PublishedSet
from simulator.validation.measurements import DATA

GIB = 2**30


def published_sets() -> tuple[PublishedSet, ...]:
    """All of them, in the order of the report."""
    return (
        PublishedSet(
            "korthikanti-table5",
            "Korthikanti et al., table 5",
            "s",
            "arXiv 2205.05198, A100-80 (Selene)",
            _korthikanti_table5,
            0.030,
            "both columns: full recomputation, and selective with sequence parallelism",
        ),
        PublishedSet(
            "korthikanti-table4",
            "Korthikanti et al., table 4: one layer of 22B",
            "s",
            "arXiv 2205.05198, A100-80",
            _korthikanti_table4,
            note="collectives of the backward pass are hidden behind weight gradients, as in the run",
        ),
        PublishedSet(
            "sc21-ptd",
            "Narayanan et al. 2021, tables 1 and 2, PTD",
            "s",
            "arXiv 2104.04473, A100-80 (Selene)",
            _sc21_ptd,
            0.08,
            "microbatch and interleaving are not given in table 1: the best of those that fit",
        ),
        PublishedSet(
            "sc21-zero3",
            "Narayanan et al. 2021, table 2, ZeRO-3",
            "s",
            "arXiv 2104.04473, A100-80 (Selene)",
            _sc21_zero3,
            0.15,
            "one parameter, the contention of that backend, is fitted to both rows",
        ),
        PublishedSet(
            "vtrain-multi-node",
            "vTrain, 64 to 512 A100",
            "s",
            "VIA Research, vTrain (MIT)",
            _vtrain_multi_node,
            0.09,
            "nothing fitted. Two rows (tensor 2, data 16, pipeline 16) take 10 s longer than their neighbours and one "
            "(tensor 8, microbatch 2) 3 s, which nothing here explains",
        ),
        PublishedSet(
            "vtrain-single-node",
            "vTrain, 2 to 8 A100",
            "s",
            "VIA Research, vTrain (MIT)",
            _vtrain_single_node,
            0.075,
            "the host's times of the eager backend are fitted to 40 rows, chosen by hash; recomputation is not given: selective fits",
        ),
        PublishedSet(
            "llm-foundry",
            "MosaicML llm-foundry, FSDP",
            "s",
            "llm-foundry (Apache-2.0), A100-40, A100-80, H100",
            _llm_foundry,
            0.12,
            "fused attention of the first generation; on H100 its speed is set by the five sequences of 65536",
        ),
        PublishedSet(
            "megatron-core-h100",
            "Megatron-Core, weak scaling on H100",
            "s",
            "Megatron-LM README, H100",
            _megatron_core,
            0.10,
            "microbatch and interleaving are not given: the best of those that fit",
        ),
        PublishedSet(
            "mt-nlg", "MT-NLG 530B", "s", "llm-analysis README, A100-40 (Selene)", _mt_nlg, None, _MT_NLG_NOTE
        ),
        PublishedSet("simumax-time", "SimuMax, Llama 3 on B200", "s", "SimuMax (Apache-2.0), B200", _simumax_time),
        PublishedSet(
            "alpa-figure7",
            "Alpa, figure 7, GPT",
            "PFLOP/s",
            "OSDI'22, V100-16, digitised",
            _alpa_figure7,
            None,
            "its plans, unequal stages taken as equal ones; no GEMM was measured on V100",
        ),
        PublishedSet(
            "korthikanti-figure1",
            "Korthikanti et al., figure 1: memory",
            "GiB",
            "arXiv 2205.05198",
            _korthikanti_figure1,
            0.02,
            "the figure counts the matrices of the layers only, so embeddings are left out here",
        ),
        PublishedSet(
            "korthikanti-figure7",
            "Korthikanti et al., figure 7: activations",
            "%",
            "arXiv 2205.05198",
            _korthikanti_figure7,
            0.02,
        ),
        PublishedSet(
            "simumax-memory",
            "SimuMax, Llama 3 on B200: memory",
            "GiB",
            "SimuMax (Apache-2.0), B200",
            _simumax_memory,
            0.02,
            "what is alive beside activations was found on these rows; no number is fitted. Not expressible: context parallelism, MoE",
        ),
    )


_MT_NLG_NOTE = (
    "no target. Predicted too fast: DeepSpeed's pipeline engine, which ran it, sends whole activations between stages and waits for them; "
    "the table doesn't say what was overlapped"
)

_GPT = {  # layers, hidden, heads
    "22B": (48, 6144, 64),
    "175B": (96, 12288, 96),
    "530B": (105, 20480, 128),
    "1T": (128, 25600, 160),
}
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


@cache
def machine(cluster: str, devices: int, backend: Backend = EAGER, nics: int = 8) -> Machine:
    """Whole hosts of a shipped cluster, at least as many as hold `devices`."""
    hosts = Cluster.load(cluster).with_size(-(-devices // 8))
    return Machine.of(hosts.model_copy(update={"nics_per_host": nics}), backend)


def rows(name: str, **options: object) -> pd.DataFrame:
    """One published table."""
    return pd.read_csv(DATA / "published" / f"{name}.csv", **options)  # pyright: ignore[reportCallIssue, reportArgumentType]


def _gpt(size: str, **changes: object) -> Transformer:
    layers, hidden, heads = _GPT[size]
    return Transformer.model_validate(
        {"layers": layers, "hidden": hidden, "heads": heads, "seq": 2048, "vocab": 51200} | changes
    )


def fastest(
    model: Transformer, where: Machine, plan: dict[str, object], choices: dict[str, Iterable[object]]
) -> Prediction | None:
    """The fastest of all combinations of `choices` that divide the model and fit in memory."""
    found: list[Prediction] = []
    for values in product(*choices.values()):
        try:
            candidate = predict(model, Execution.model_validate(plan | dict(zip(choices, values, strict=True))), where)
        except ValueError:
            continue
        if candidate.memory.total <= where.cluster.device.usable_bytes:
            found.append(candidate)
    return min(found, key=lambda prediction: prediction.seconds, default=None)


def _korthikanti_table5() -> Iterator[Case]:
    for row in rows("korthikanti_table5").itertuples():
        plan = {
            "tensor": row.tp,
            "pipeline": row.pp,
            "data": row.gpus // (row.tp * row.pp),
            "microbatch": row.mbs,
            "global_batch": row.gbs,
            "interleave": row.interleave,
            "scatter_sends": True,
            "overlap_tensor": True,
        }
        full = Execution(**plan, recompute="full")
        selective = Execution(**plan, recompute="selective", sequence_parallel=True)
        for name, execution, seconds in (
            ("full", full, row.full_recompute_s),
            ("selective", selective, row.seq_selective_s),
        ):
            yield Case(
                f"{row.model} {name}",
                seconds,
                predict(_gpt(row.model, precision="f16"), execution, machine("dgx_a100_80", row.gpus)).seconds,
            )


def _korthikanti_table4() -> Iterator[Case]:
    model = Transformer(layers=1, hidden=6144, heads=64, seq=2048, vocab=51200, precision="f16")
    modes = {
        "baseline": ("none", False),
        "seq_parallel": ("none", True),
        "full_recompute": ("full", False),
        "selective": ("selective", False),
        "selective+seq": ("selective", True),
    }
    for row in rows("korthikanti_table4_layer22B").itertuples():
        recompute, sequence = modes[row.experiment]
        plan = Execution(
            tensor=8,
            microbatch=4,
            global_batch=4,
            recompute=recompute,
            sequence_parallel=sequence,
            overlap_tensor=True,
        )
        phases = layer_phases(model, plan, machine("dgx_a100_80", 8))
        forward = phases.forward.compute + phases.forward.communication
        backward = sum(phase.compute + phase.communication for phase in (phases.backward, phases.recompute))
        yield Case(f"{row.experiment} forward", row.fwd_ms / 1e3, forward)
        yield Case(f"{row.experiment} backward", row.bwd_ms / 1e3, backward)


def _sc21_ptd() -> Iterator[Case]:
    for row in rows("megatron_sc21_table1").itertuples():
        model = Transformer(layers=row.layers, hidden=row.hidden, heads=row.heads, seq=row.seq, vocab=row.vocab)
        plan = {"tensor": row.tp, "pipeline": row.pp, "data": row.dp, "global_batch": row.gbs}
        plan |= {"recompute": "full", "scatter_sends": True}
        best = fastest(
            model, machine("dgx_a100_80", row.gpus), plan, {"microbatch": (1, 2, 4, 8), "interleave": range(1, 9)}
        )
        if best is not None:
            yield Case(f"{row.params_B}B on {row.gpus}", row.derived_iter_s, best.seconds)
    for row in rows("megatron_sc21_table2").itertuples():
        if row.scheme != "PTD-P":
            continue
        model = _gpt("175B" if row.params_B < 200 else "530B")
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
            yield Case(f"{row.params_B}B on {row.gpus}, table 2", row.derived_iter_s, best.seconds)


def _sc21_zero3() -> Iterator[Case]:
    for row in rows("megatron_sc21_table2").itertuples():
        if row.scheme != "ZeRO-3":
            continue
        model = _gpt("175B" if row.params_B < 200 else "530B")
        plan = Execution(
            data=row.gpus,
            microbatch=row.mbs,
            global_batch=row.gbs,
            zero=3,
            recompute="full",
            communicated_gradient_bytes=2,
        )
        where = machine("dgx_a100_80", row.gpus, ZERO_2021)
        yield Case(
            f"{row.params_B}B on {row.gpus}", row.derived_iter_s, predict(model, plan, where).seconds, fitted=True
        )


def _vtrain_multi_node() -> Iterator[Case]:
    columns = ["params", "gpus", "batch", "micro", "hidden", "heads", "layers", "seq", "t", "d", "p", "ms"]
    for row in rows("vtrain_multi_node", names=columns, header=0).itertuples():
        model = Transformer(layers=row.layers, hidden=row.hidden, heads=row.heads, seq=row.seq, vocab=51200)
        plan = Execution(
            tensor=row.t,
            pipeline=row.p,
            data=row.d,
            microbatch=row.micro,
            global_batch=row.batch,
            recompute="full",
            scatter_sends=True,
            overlap_tensor=True,
        )
        where = machine("dgx_a100_80", row.gpus, nics=4)
        yield Case(
            f"{row.params}B t{row.t} d{row.d} p{row.p} b{row.micro}",
            row.ms / 1e3,
            predict(model, plan, where).seconds,
            f"{row.params}B on {row.gpus}",
        )


def vtrain_single_node_rows() -> pd.DataFrame:
    """The table, with a column that says which 40 rows are for fitting: those with the smallest CRC of their plan."""
    columns = ["gpus", "batch", "micro", "hidden", "heads", "layers", "seq", "t", "d", "p", "ms"]
    table = rows("vtrain_single_node", names=columns, header=0)
    plans = table[columns[:-1]].astype(str).agg(",".join, axis=1)
    order = plans.map(lambda plan: zlib.crc32(plan.encode())).rank(method="first")
    return table.assign(fitted=order <= 40)


def vtrain_single_node_case(row, backend: Backend) -> Case:
    """One row of `vtrain_single_node_rows`."""
    model = Transformer(layers=row.layers, hidden=row.hidden, heads=row.heads, seq=row.seq, vocab=51200)
    plan = Execution(
        tensor=row.t,
        pipeline=row.p,
        data=row.d,
        microbatch=row.micro,
        global_batch=row.batch,
        recompute="selective",
        scatter_sends=True,
        overlap_tensor=True,
    )
    return Case(
        f"h{row.hidden} l{row.layers} t{row.t} d{row.d} p{row.p} b{row.micro} of {row.batch}",
        row.ms / 1e3,
        predict(model, plan, machine("dgx_a100_80", 8, backend)).seconds,
        f"h{row.hidden} l{row.layers} on {row.gpus}, batch {row.batch}",
        bool(row.fitted),
    )


def _vtrain_single_node() -> Iterator[Case]:
    for row in vtrain_single_node_rows().itertuples():
        yield vtrain_single_node_case(row, EAGER)


def _llm_foundry() -> Iterator[Case]:
    clusters = {"h100_80gb": "dgx_h100", "a100_80gb": "dgx_a100_80", "a100_40gb": "dgx_a100_40"}
    for row in rows("llm_foundry_fsdp").itertuples():
        layers, hidden, heads = _MPT[row.model]
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
        where = machine(clusters[row.gpu], row.gpus)
        yield Case(
            f"{row.model} seq {row.seqlen} on {row.gpus} {row.gpu} {row.precision}",
            row.gbs * row.seqlen / row.tok_s,
            predict(model, plan, where).seconds,
            fitted=row.gpu == "h100_80gb" and row.seqlen == 65536,
        )


def _megatron_core() -> Iterator[Case]:
    for row in rows("megatron_core_h100_weak").itertuples():
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
            "overlap_tensor": True,
            "overlap_gradients": True,
            "zero": 1,
            "communicated_gradient_bytes": 2,
        }
        where = machine("dgx_h100", row.gpus)
        best = fastest(model, where, plan, {"microbatch": (1, 2, 4), "interleave": range(1, 15)})
        if best is not None:
            seconds = best.model_flops / (row.tflops_per_gpu * 1e12 * row.gpus)
            yield Case(f"{row.params_B}B on {row.gpus}", seconds, best.seconds)


def _mt_nlg() -> Iterator[Case]:
    for row in rows("mtnlg_530B_a100_40").itertuples():
        plan = Execution(
            tensor=8,
            pipeline=35,
            data=row.gpus // 280,
            microbatch=1,
            global_batch=row.gbs,
            recompute="full",
        )
        where = machine("dgx_a100_40", row.gpus)
        yield Case(f"530B on {row.gpus}", row.iter_s, predict(_gpt("530B"), plan, where).seconds)


_LLAMA = {"70b": (8192, 64, 8, 28672), "405b": (16384, 128, 16, 53248)}  # hidden, heads, kv_heads, ffn
_SIMUMAX_CASE = re.compile(r"llama3_(\d+b)_l(\d+)_tp(\d+)_pp(\d+)_dp(\d+)_mbc(\d+)_cef")


def _simumax() -> Iterator[tuple[str, Transformer, Execution, float, float]]:
    for row in rows("simumax_b200").itertuples():
        found = _SIMUMAX_CASE.fullmatch(row.case)
        if found is None:
            continue
        layers, tensor, pipeline, data, microbatches = map(int, found.groups()[1:])
        hidden, heads, kv_heads, ffn = _LLAMA[found.group(1)]
        model = Transformer(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            ffn=ffn,
            seq=4096,
            vocab=128256,
            gated=True,
            tied=False,
            learned_positions=False,
            biases=False,
            dropout=False,
            attention="flash2",
        )
        plan = Execution(
            tensor=tensor,
            pipeline=pipeline,
            data=data,
            sequence_parallel=tensor > 1,
            global_batch=microbatches * data,
            zero=1,
            fused_loss=True,
        )
        yield row.case, model, plan, row.real_ms / 1e3, row.real_alloc_gib


def _simumax_time() -> Iterator[Case]:
    for name, model, plan, seconds, _ in _simumax():
        yield Case(name, seconds, predict(model, plan, machine("dgx_b200", 8)).seconds)


def _simumax_memory() -> Iterator[Case]:
    for name, model, plan, _, gib in _simumax():
        yield Case(name, gib, memory_of(model, plan).total / GIB)


_ALPA_PLANS = {  # devices: layers, hidden, heads, tensor, pipeline, data, microbatches
    4: (24, 2048, 32, 1, 2, 2, 128),
    8: (32, 2560, 32, 1, 4, 2, 128),
    16: (32, 4096, 32, 4, 2, 2, 64),
    32: (48, 5120, 40, 4, 4, 2, 128),
    64: (48, 8192, 64, 4, 16, 1, 1024),
}


def _alpa_figure7() -> Iterator[Case]:
    for row in rows("alpa_fig7_digitised_pflops").itertuples():
        if row.model != "GPT" or row.gpus not in _ALPA_PLANS:
            continue
        layers, hidden, heads, tensor, pipeline, data, microbatches = _ALPA_PLANS[row.gpus]
        model = Transformer(layers=layers, hidden=hidden, heads=heads, seq=1024, vocab=51200, precision="f16")
        plan = Execution(
            tensor=tensor,
            pipeline=pipeline,
            data=data,
            microbatch=1024 // (microbatches * data),
            global_batch=1024,
            recompute="full",
            zero=2,
        )
        prediction = predict(model, plan, machine("p3.16xlarge", row.gpus, nics=1))
        yield Case(f"GPT on {row.gpus}", float(row.alpa), prediction.hardware_flops / prediction.seconds / 1e15)


def _korthikanti_figure1() -> Iterator[Case]:
    shapes = {"22B": (1, 4, 1, 4), "175B": (8, 1, 3, 64), "530B": (35, 1, 3, 280), "1T": (64, 1, 1, 512)}
    for row in rows("korthikanti_fig1_memory_gib").itertuples():
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
        memory = memory_of(_gpt(row.model), plan)
        states = memory.states - memory.embedding
        yield Case(f"{row.model} {row.mode} states", row.param_opt_gib, states / GIB)
        yield Case(f"{row.model} {row.mode} activations", row.act_gib, memory.activations / GIB)


def _korthikanti_figure7() -> Iterator[Case]:
    from simulator.formula.memory import kept_activations

    def kept(model: Transformer, recompute: str, sequence: bool) -> float:
        plan = Execution.model_validate(
            {"tensor": 8, "global_batch": 1, "recompute": recompute, "sequence_parallel": sequence}
        )
        return kept_activations(model, plan)

    modes = {"seq": ("none", True), "sel": ("selective", False), "seqsel": ("selective", True), "full": ("full", False)}
    for row in rows("korthikanti_fig7_act_pct").itertuples():
        model = _gpt(row.model)
        for mode, (recompute, sequence) in modes.items():
            share = 100 * kept(model, recompute, sequence) / kept(model, "none", False)
            yield Case(f"{row.model} {mode}", getattr(row, mode), share)
