"""The published sets: what they are, what is aimed at, what was assumed. Rows are in `data/published`, sources in `data/README.md`."""

from simulator.validation.cases import PublishedSet
from simulator.validation.sets import korthikanti, megatron, others, vtrain

_MT_NLG_NOTE = (
    "no target. Predicted too fast: DeepSpeed's pipeline engine, which ran it, sends whole activations between stages and waits for them; "
    "the table doesn't say what was overlapped"
)


def published_sets() -> tuple[PublishedSet, ...]:
    """All of them, in the order of the report."""
    return (
        PublishedSet(
            "korthikanti-table5",
            "Korthikanti et al., table 5",
            "s",
            "arXiv 2205.05198, A100-80 (Selene)",
            korthikanti.korthikanti_table5,
            0.030,
            "both columns: full recomputation, and selective with sequence parallelism",
            files=("korthikanti_table5",),
        ),
        PublishedSet(
            "korthikanti-table4",
            "Korthikanti et al., table 4: one layer of 22B",
            "s",
            "arXiv 2205.05198, A100-80",
            korthikanti.korthikanti_table4,
            note="collectives of the backward pass run beside the products of weight gradients",
            files=("korthikanti_table4_layer22B",),
        ),
        PublishedSet(
            "sc21-ptd",
            "Narayanan et al. 2021, tables 1 and 2, PTD",
            "s",
            "arXiv 2104.04473, A100-80 (Selene)",
            megatron.sc21_ptd,
            0.08,
            "microbatch and interleaving are not given in table 1: the best of those that fit",
            files=(
                "megatron_sc21_table1",
                "megatron_sc21_table2",
            ),
        ),
        PublishedSet(
            "sc21-zero3",
            "Narayanan et al. 2021, table 2, ZeRO-3",
            "s",
            "arXiv 2104.04473, A100-80 (Selene)",
            megatron.sc21_zero3,
            0.15,
            "the contention of computation and collectives, which all backends share, is fitted to both rows; one network card a ring",
            files=("megatron_sc21_table2",),
        ),
        PublishedSet(
            "vtrain-multi-node",
            "vTrain, 64 to 512 A100",
            "s",
            "VIA Research, vTrain (MIT)",
            vtrain.vtrain_multi_node,
            0.09,
            "nothing fitted. Two rows (tensor 2, data 16, pipeline 16) take 10 s longer than their neighbours and one "
            "(tensor 8, microbatch 2) 3 s, which nothing here explains",
            files=("vtrain_multi_node",),
        ),
        PublishedSet(
            "vtrain-single-node",
            "vTrain, 2 to 8 A100",
            "s",
            "VIA Research, vTrain (MIT)",
            vtrain.vtrain_single_node,
            0.075,
            "the host's times of the eager backend are fitted to 40 rows, chosen by hash; gradients are sent in 16 bits, as in vTrain's model of "
            "these steps (several nodes: 32 bits); recomputation is not given: selective fits",
            files=("vtrain_single_node",),
        ),
        PublishedSet(
            "llm-foundry",
            "MosaicML llm-foundry, FSDP",
            "s",
            "llm-foundry (Apache-2.0), A100-40, A100-80, H100",
            others.llm_foundry,
            0.12,
            "fused attention of the first generation, whose speed two rows with long sequences tell; H100 is predicted 10 % too fast, likely because "
            "its products ran slower with the libraries of 2023 than in the microbenchmarks of 2026",
            files=("llm_foundry_fsdp",),
        ),
        PublishedSet(
            "megatron-core-h100",
            "Megatron-Core, weak scaling on H100",
            "s",
            "Megatron-LM README, H100",
            megatron.megatron_core,
            0.10,
            "microbatch and interleaving are not given: the best of those that fit; all communication overlapped, as its README says",
            files=("megatron_core_h100_weak",),
        ),
        PublishedSet(
            "mt-nlg",
            "MT-NLG 530B",
            "s",
            "llm-analysis README, A100-40 (Selene)",
            megatron.mt_nlg,
            None,
            _MT_NLG_NOTE,
            files=("mtnlg_530B_a100_40",),
        ),
        PublishedSet(
            "simumax-time",
            "SimuMax, Llama 3 on B200",
            "s",
            "SimuMax (Apache-2.0), B200",
            others.simumax_time,
            files=("simumax_b200",),
        ),
        PublishedSet(
            "alpa-figure7",
            "Alpa, figure 7, GPT",
            "PFLOP/s",
            "OSDI'22, V100-16, digitised",
            others.alpa_figure7,
            None,
            "its plans, unequal stages taken as equal ones; no GEMM was measured on V100. As programs, unequal stages and MoE too: "
            "python -m experiments.validation.alpa_figure7",
            files=("alpa_fig7_digitised_pflops",),
        ),
        PublishedSet(
            "korthikanti-figure1",
            "Korthikanti et al., figure 1: memory",
            "GiB",
            "arXiv 2205.05198",
            korthikanti.korthikanti_figure1,
            0.02,
            "the figure counts the matrices of the layers only, so embeddings are left out here",
            files=("korthikanti_fig1_memory_gib",),
        ),
        PublishedSet(
            "korthikanti-figure7",
            "Korthikanti et al., figure 7: activations",
            "%",
            "arXiv 2205.05198",
            korthikanti.korthikanti_figure7,
            0.02,
            files=("korthikanti_fig7_act_pct",),
        ),
        PublishedSet(
            "simumax-memory",
            "SimuMax, Llama 3 on B200: memory",
            "GiB",
            "SimuMax (Apache-2.0), B200",
            others.simumax_memory,
            0.02,
            "what is alive beside activations was found on these rows; no number is fitted. Not expressible: mixtures of experts",
            files=("simumax_b200",),
        ),
    )
