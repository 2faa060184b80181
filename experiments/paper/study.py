"""The figures of the paper, in its order. A figure is a row here and a module in `figures`."""

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

type Size = Literal["full", "smoke"]

type Table = Any
"""A `pandas.DataFrame`, for which pandas ships no types."""


@dataclass(frozen=True, slots=True)
class PaperFigure:
    """A figure of the paper.

    Attributes:
        name: name of its module and of its files.
        section: the section of the paper that shows it.
        document: the document whose numbers stand beside ours; empty for a study of our own.
        difference: why our numbers differ from the published ones, or that it is not known.
        packages: the packages whose code its rows depend on, beside `experiments/paper`.
        published: files of published numbers that it reads, from the root of the project.
        parts: parts whose rows are computed by a job each.
        smoke_parts: the parts of the smoke configuration; all by default.
        minutes: minutes of the slowest part on one core, at most.
        memory_mb: megabytes that a part needs, at most.
        gpus: GPUs that a part runs on; 0 for predictions.
    """

    name: str
    section: str
    document: str = ""
    difference: str = ""
    packages: tuple[str, ...] = ("simulator",)
    published: tuple[str, ...] = ()
    parts: tuple[str, ...] = ("all",)
    smoke_parts: tuple[str, ...] = field(default=())
    minutes: float = 0.5
    memory_mb: int = 1000
    gpus: int = 0

    @property
    def resources(self) -> dict[str, int]:
        """What a part asks of a cluster: minutes, megabytes and GPUs, by Snakemake's names.

        A job has three times its minutes, as hosts differ. `gpu` is left out where there is none:
        executors would reserve a host with GPUs for 0 of them, too.
        """
        needs = {"runtime": 1 + round(3 * self.minutes), "mem_mb": self.memory_mb}
        return needs | ({"gpu": self.gpus} if self.gpus else {})

    def parts_of(self, size: Size) -> tuple[str, ...]:
        """Return the parts of a configuration."""
        return self.smoke_parts or self.parts if size == "smoke" else self.parts

    @property
    def module(self) -> Any:
        """The module that computes and draws it."""
        return import_module(f"experiments.paper.figures.{self.name}")


_SHIPPED = "simulator/validation/data/published"
_OWN = "experiments/paper/published"
_PLANNED = "experiments/models", "experiments/validation"
_PACKAGES = "simulator", "autopar", *_PLANNED, "experiments/paper/wide_resnet_steps.py"
_FACTORS = f"{_OWN}/alpa_factors.csv"
_RESNETS = f"{_OWN}/alpa_wide_resnet_plans.csv"

FIGURES: tuple[PaperFigure, ...] = (
    PaperFigure(
        "predicted_measured",
        section="fidelity",
        document="all public rows",
        difference=(
            "Sets that are predicted too fast ran on software whose overheads were not published;"
            " results/validation/summary.csv has what is known for each set."
        ),
        minutes=1,
    ),
    PaperFigure(
        "plan_fidelity",
        section="fidelity",
        packages=("simulator", "autopar", *_PLANNED),
        parts=("mlp", "gpt", "moe", "wide_resnet"),
        smoke_parts=("mlp",),
        minutes=1,
        memory_mb=3000,
    ),
    PaperFigure(
        "korthikanti_step_times",
        section="megatron",
        document="Korthikanti et al. (arXiv 2205.05198), tables 4 and 5",
        difference=(
            "We do not know which part of the remaining difference is measurement: the tables have"
            " two or three digits."
        ),
        published=(
            f"{_SHIPPED}/korthikanti_table4_layer22B.csv",
            f"{_SHIPPED}/korthikanti_table5.csv",
        ),
    ),
    PaperFigure(
        "korthikanti_memory",
        section="megatron",
        document="Korthikanti et al. (arXiv 2205.05198), figures 1 and 7",
        difference="The figures are formulas of memory, and so are ours; there is no difference.",
        published=(
            f"{_SHIPPED}/korthikanti_fig1_memory_gib.csv",
            f"{_SHIPPED}/korthikanti_fig7_act_pct.csv",
        ),
    ),
    PaperFigure(
        "sc21_weak_scaling",
        section="megatron",
        document="Narayanan et al. (arXiv 2104.04473), tables 1 and 2",
        difference=(
            "Table 1 leaves out the microbatch and the interleaving; part of the difference may be"
            " that ours are others."
        ),
        published=(f"{_SHIPPED}/megatron_sc21_table1.csv", f"{_SHIPPED}/megatron_sc21_table2.csv"),
    ),
    PaperFigure(
        "sc21_degrees",
        section="megatron",
        document="Narayanan et al. (arXiv 2104.04473), figures 13 to 15, in words",
    ),
    PaperFigure(
        "sc21_interleaving",
        section="megatron",
        document="Narayanan et al. (arXiv 2104.04473), figures 12 and 18, in words",
    ),
    PaperFigure(
        "sc21_microbatch",
        section="megatron",
        document="Narayanan et al. (arXiv 2104.04473), figures 16 and 17, in words",
        difference=(
            "We predict that every batch fits without recomputation, because 1F1B bounds the"
            " microbatches whose activations are saved; why large batches ran out of memory is not"
            " known to us."
        ),
    ),
    PaperFigure(
        "alpa_weak_scaling",
        section="alpa",
        document="Zheng et al. (OSDI'22), figure 7, digitised",
        difference=(
            "No kernel of a V100 was measured for us. Why MoE is predicted too fast up to sixteen"
            " GPUs we do not know: its FLOP are counted as in Alpa's code. A GPU has 8 or 16"
            " sequences of a microbatch there, and 2 on more GPUs; our rates grow with their"
            " number, the published ones do not. Of DeepSpeed the degrees and the microbatches were"
            " not published; ours are the fastest."
            " Without stages Alpa ran the largest GPT on a mesh whose sums cross hosts, with two"
            " sequences a microbatch; the fastest layout would be several times as fast."
            " Our stages are whole blocks, of which the largest GPT has fewer than GPUs, so its"
            " inter-operator plan does not fit; Alpa cut blocks there."
        ),
        packages=("simulator", "autopar", *_PLANNED),
        published=(
            f"{_SHIPPED}/alpa_fig7_digitised_pflops.csv",
            f"{_OWN}/alpa_intra_only.csv",
            _FACTORS,
        ),
        parts=tuple(f"{family}-{gpus}" for family in ("gpt", "moe") for gpus in (4, 8, 16, 32, 64)),
        smoke_parts=("gpt-4",),
        minutes=1,
        memory_mb=3000,
    ),
    PaperFigure(
        "alpa_wide_resnet",
        section="alpa",
        document="Zheng et al. (OSDI'22), figure 7, in words",
        difference="Why four hosts are less efficient than published we do not know.",
        packages=_PACKAGES,
        published=(_RESNETS, _FACTORS),
        parts=("1", "4", "8", "16", "32"),
        smoke_parts=("4",),
        minutes=2,
        memory_mb=3000,
    ),
    PaperFigure(
        "alpa_intra_operator",
        section="alpa",
        document="Zheng et al. (OSDI'22), figure 8, in words",
        packages=_PACKAGES,
        parts=("gpt", "moe", "wide_resnet"),
        smoke_parts=("gpt",),
        minutes=2,
        memory_mb=2000,
    ),
    PaperFigure(
        "alpa_inter_operator",
        section="alpa",
        document="Zheng et al. (OSDI'22), figure 9, in words and two factors",
        difference=(
            "Layers with equal numbers of operators are cut where least data crosses, as those of"
            " equal FLOP are; the paper does not say whether Alpa's were. On Wide-ResNet our"
            " dynamic program finds nothing faster than equal layers, and Alpa's own stages are"
            " predicted to be slower; why equal layers were slower on Alpa's GPUs we do not know."
        ),
        packages=_PACKAGES,
        published=(_RESNETS, _FACTORS),
        parts=("gpt-8", "gpt-16", "wide_resnet-16", "wide_resnet-32"),
        smoke_parts=("wide_resnet-16",),
        minutes=7,
        memory_mb=3000,
    ),
    PaperFigure(
        "alpa_resharding",
        section="alpa",
        document="Zheng et al. (OSDI'22), figure 11, in words",
        packages=_PACKAGES,
        published=(_RESNETS, _FACTORS),
        parts=("16", "32"),
        smoke_parts=("16",),
        minutes=1,
        memory_mb=3000,
    ),
    PaperFigure(
        "resnet_plans",
        section="alpa",
        document="Zheng et al. (OSDI'22), figure 12, in words",
        packages=_PACKAGES,
        published=(_RESNETS,),
        parts=("16",),
        minutes=2,
        memory_mb=3000,
    ),
    PaperFigure(
        "slapo_schedules",
        section="slapo",
        document="Chen et al. (ASPLOS'24), in words",
        difference=(
            "Our attention kernel is a loop over blocks that XLA compiles, which saves memory but"
            " no time; Slapo's kernels are fused ones."
        ),
        packages=(
            "simulator",
            "autopar",
            "experiments/models",
            "experiments/gpt_directives.py",
        ),
        parts=("1", "8"),
        smoke_parts=("1",),
        minutes=3,
        memory_mb=3000,
    ),
    PaperFigure(
        "jax_strategies",
        section="jax",
        document="JAX's introduction to parallelism, in words",
        packages=("simulator", "autopar", "experiments/by_hand", "experiments/models"),
        parts=(
            "manual_data",
            "manual_fsdp",
            "manual_megatron",
            "manual_tensor_2d",
            "manual_pipeline",
        ),
        minutes=0.3,
        memory_mb=2000,
    ),
    PaperFigure(
        "plans_found",
        section="plans",
        document="Narayanan et al., table 1; Megatron-LM's README, weak scaling on H100",
        published=(
            f"{_SHIPPED}/megatron_sc21_table1.csv",
            f"{_SHIPPED}/megatron_core_h100_weak.csv",
        ),
        parts=("sc21", "core"),
        smoke_parts=("sc21",),
    ),
    PaperFigure(
        "planning_cost",
        section="plans",
        document="Zheng et al. (OSDI'22), table 5",
        difference="Ours predicts the costs of stages, and so compiles and profiles nothing.",
        packages=("simulator", "autopar", *_PLANNED),
        published=(f"{_OWN}/alpa_planning_seconds.csv",),
        parts=("search", "alpa", "gpt-8", "gpt-16", "gpt-32", "gpt-64"),
        smoke_parts=("search", "alpa", "gpt-8"),
        minutes=1.5,
        memory_mb=3000,
    ),
    PaperFigure(
        "planning_parts",
        section="plans",
        document="Zheng et al. (OSDI'22), table 5",
        difference=(
            "We predict the costs of stages instead of compiling and profiling stages, so that they"
            " take less time than tracing does."
        ),
        packages=("simulator", "autopar", *_PLANNED),
        published=(f"{_OWN}/alpa_planning_seconds.csv",),
        parts=("gpt-64",),
        minutes=1.5,
        memory_mb=3000,
    ),
    PaperFigure(
        "memory_budget",
        section="plans",
        packages=("simulator", "autopar", *_PLANNED),
        parts=("planned", "every_block", "none"),
        smoke_parts=("every_block",),
        minutes=1,
        memory_mb=3000,
    ),
    PaperFigure("absent_clusters", section="scale", parts=("A100", "H100", "B200", "GB200")),
    PaperFigure(
        "heterogeneous_pools",
        section="scale",
        packages=("simulator", "autopar", *_PLANNED),
        parts=("p3_beside_p4d",),
        minutes=2,
        memory_mb=3000,
    ),
    PaperFigure(
        "lost_host",
        section="scale",
        packages=("simulator", "autopar", "experiments/models", "experiments/chaos.py"),
        parts=("predicted", "measured"),
        smoke_parts=("predicted",),
        minutes=1.5,
        memory_mb=3000,
    ),
    PaperFigure("public_reach", section="reach", published=("results/tables/reach.csv",)),
)
"""All figures."""


def figure_named(name: str) -> PaperFigure:
    """Return the figure with a name.

    Raises:
        ValueError: there is no such figure.
    """
    figures = {figure.name: figure for figure in FIGURES}
    if name not in figures:
        raise ValueError(f"no figure {name!r}; expected one of {', '.join(figures)}")
    return figures[name]
