"""Automatic pipelines compared with those that Alpa found: predicted step times.

    python -m experiments.validation.pipeline_quality [--only PATTERN] [--output FILE]

Both are planned with the same layers, cost model and memory, on p3.16xlarge hosts as in the paper.
A row is named after its model and its number of GPUs, by which rows are sorted; `--only gpt-8`
computes one of them.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import autopar
from experiments.growing_tables import table_options, written
from experiments.models import GPT, Model, MoE
from experiments.models.model_sizes import gpt, moe
from simulator import Cluster

type SubmeshShape = tuple[int, int]
type StageOption = autopar.AutoStageOption | autopar.ManualStageOption | autopar.UniformStageOption
type LayerWork = Literal["flops", "count"]
"""The work that layers share evenly: FLOP, or the number of matrix products and convolutions."""

GLOBAL_BATCH = 1024

EPS = {"gpt": 0.6, "moe": 1.5}
"""How uneven layers may be.

Layers of an MoE are less even: every second block has experts, and the vocabulary is large.
"""

COUNT_EPS = 0.35
"""How uneven the numbers of matrix products and convolutions of layers may be.

It is the smallest number that leaves layers for the models of Alpa's paper, where recomputed blocks
count once.
"""


@dataclass(frozen=True, slots=True)
class AlpaPlan:
    """A plan that Alpa found.

    Attributes:
        family: "gpt" or "moe".
        sizes: hidden size, number of blocks, and number of heads (GPT) or experts (MoE).
        micro_batches: number of microbatches.
        num_layers: number of layers, groups of blocks that stages consist of.
        stages: for each stage its number of layers, its submesh (hosts, devices), and the shape of
            its logical mesh.
    """

    family: str
    sizes: tuple[int, int, int]
    micro_batches: int
    num_layers: int
    stages: tuple[tuple[int, SubmeshShape, SubmeshShape], ...]

    @property
    def num_devices(self) -> int:
        """Number of devices of all stages."""
        return sum(hosts * devices for _, (hosts, devices), _ in self.stages)

    @property
    def name(self) -> str:
        """Name of the row: the family and the number of devices."""
        return f"{self.family}-{self.num_devices}"

    def model(self) -> Model:
        """Return the model."""
        if self.family == "gpt":
            return gpt(*self.sizes, batch_size=GLOBAL_BATCH)
        return replace(moe(*self.sizes, batch_size=GLOBAL_BATCH), optimizer="adafactor")

    def option(self) -> autopar.ManualStageOption:
        """Return the option that forms these stages."""
        layers = iter(range(self.num_layers))
        ids = [[next(layers) for _ in range(count)] for count, _, _ in self.stages]
        shapes = [tuple(size for size in shape if size > 1) or (1,) for _, _, shape in self.stages]
        return autopar.ManualStageOption(ids, [physical for _, physical, _ in self.stages], shapes)


def _even(
    family: str,
    sizes: tuple[int, int, int],
    micro: int,
    layers: int,
    count: int,
    physical: SubmeshShape,
    logical: SubmeshShape,
) -> AlpaPlan:
    """Return a plan of `count` equal stages."""
    return AlpaPlan(family, sizes, micro, layers, ((layers // count, physical, logical),) * count)


PUBLISHED = (
    _even("gpt", (1024, 24, 16), 512, 1, 1, (1, 1), (1, 1)),
    _even("gpt", (1536, 24, 16), 128, 6, 2, (1, 1), (1, 1)),
    _even("gpt", (2048, 24, 32), 128, 6, 2, (1, 2), (2, 1)),
    AlpaPlan(
        "gpt",
        (2560, 32, 32),
        128,
        8,
        ((2, (1, 2), (2, 1)), (2, (1, 2), (2, 1)), (4, (1, 4), (4, 1))),
    ),
    _even("gpt", (4096, 32, 32), 64, 8, 2, (1, 8), (2, 4)),
    _even("gpt", (5120, 48, 40), 128, 16, 4, (1, 8), (2, 4)),
    _even("gpt", (8192, 48, 64), 1024, 16, 16, (1, 4), (1, 4)),
    _even("moe", (768, 8, 8), 256, 8, 1, (1, 1), (1, 1)),
    _even("moe", (768, 8, 16), 32, 8, 1, (1, 2), (2, 1)),
    _even("moe", (768, 16, 16), 32, 8, 2, (1, 2), (2, 1)),
    _even("moe", (1024, 16, 16), 32, 8, 2, (1, 4), (4, 1)),
    _even("moe", (1536, 16, 32), 16, 8, 2, (1, 8), (8, 1)),
    _even("moe", (2048, 16, 48), 128, 8, 8, (1, 4), (4, 1)),
    _even("moe", (2048, 32, 64), 64, 8, 8, (1, 8), (8, 1)),
)
"""The plans that Alpa found for GPT and MoE on 1 to 64 V100s.

They are from Zheng et al., OSDI'22, and `benchmark/alpa/suite_auto_*.py` of Alpa's repository
(Apache-2.0). MoE trains with Adafactor. For MoE on one GPU the suite has 512 microbatches; here it
is 256, since the two sequences of a microbatch would be a single group of tokens, which traces
differently from several.
"""


def inter_only(published: AlpaPlan) -> AlpaPlan:
    """Return the plan of the same model with one GPU per stage, and at least one block."""
    blocks = published.sizes[1]
    count = min(blocks, published.num_devices)
    stages = ((blocks // count, (1, 1), (1, 1)),) * count
    return AlpaPlan(published.family, published.sizes, GLOBAL_BATCH // 4, blocks, stages)


def step_flops(model: GPT | MoE) -> float:
    """Return the FLOP of a step whose blocks are recomputed, as Alpa counts them (`alpa/util.py`).

    Each block counts two forward passes and a backward pass, which has twice the FLOP of a forward
    pass; only matrix products and attention count.
    """
    hidden, seq = model.hidden_size, model.sequence_length
    tokens = model.batch_size * seq
    attention = tokens * (8.0 * hidden**2 + 4.0 * seq * hidden)
    head = 6.0 * tokens * hidden * model.vocab_size
    if isinstance(model, GPT):
        return 4 * model.num_layers * (attention + 16.0 * tokens * hidden**2) + head
    dense = 4.0 * model.widening * tokens * hidden**2
    gates = 2.0 * tokens * hidden * model.num_experts
    # Tokens are dispatched to the experts and combined again by products with masks.
    dispatch = 2 * 2.0 * tokens * (2 * model.group_size) * hidden
    return 4 * model.num_layers / 2 * (2 * attention + dense + 2 * dense + gates + dispatch) + head


def p3(count: int) -> Cluster:
    """Return hosts as in the paper with `count` GPUs: a part of one, or whole ones."""
    cluster = Cluster.load("p3.16xlarge")
    return cluster.first_devices(count) if count <= 8 else cluster.with_size(hosts=count // 8)


@cache
def step_of(model: Model) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """Return a model's step in microbatches, and the shapes of its arguments.

    Both are the same objects for the same model, so that `autopar.shared_traces` shares traces.
    """

    def train_step(state: Any, batch: Any) -> Any:
        return model.train_step(state, batch, autopar.value_and_grad)

    return train_step, model.abstract_args()


@dataclass(frozen=True, slots=True)
class PipelineComparison:
    """Both plans for one model.

    Attributes:
        model: name of the row.
        devices: number of GPUs.
        micro_batches: number of microbatches.
        found_seconds: predicted step time of the automatic plan; None if no plan fits in memory.
        found_gb: predicted memory of its fullest device.
        alpa_seconds: predicted step time with Alpa's stages; None if they do not fit in memory.
        alpa_gb: predicted memory of its fullest device.
        ahead: the part of the step time that the automatic plan saves.
        planning_seconds: seconds of planning automatically, without tracing.
        stages: layers, hosts x devices and logical shape of each automatic stage.
        status: "ok", or why a plan is missing.
    """

    model: str
    devices: int
    micro_batches: int
    found_seconds: float | None
    found_gb: float | None
    alpa_seconds: float | None
    alpa_gb: float | None
    ahead: float | None
    planning_seconds: float | None
    stages: str
    status: str


def compare(published: AlpaPlan) -> PipelineComparison:
    """Plan a model automatically, and with Alpa's stages."""
    count = published.num_devices
    automatic, missing = _plan(
        published, autopar.AutoStageOption(submesh_logical_shape_space="all")
    )
    stages = _stages() if automatic else ""
    alpa, unfit = _plan(published, published.option())
    problems = [
        f"{whose}: {error}"
        for whose, error in (("found", missing), ("Alpa's stages", unfit))
        if error
    ]
    return PipelineComparison(
        model=published.name,
        devices=count,
        micro_batches=published.micro_batches,
        found_seconds=automatic.predicted_seconds if automatic else None,
        found_gb=automatic.predicted_bytes / 1e9 if automatic else None,
        alpa_seconds=alpa.predicted_seconds if alpa else None,
        alpa_gb=alpa.predicted_bytes / 1e9 if alpa else None,
        ahead=(
            1 - automatic.predicted_seconds / alpa.predicted_seconds if automatic and alpa else None
        ),
        planning_seconds=automatic.planning_seconds if automatic else None,
        stages=stages,
        status="; ".join(problems) or "ok",
    )


def plan_pipeline(
    published: AlpaPlan,
    stages: StageOption,
    memory_budget: float | None = None,
    work: LayerWork = "flops",
) -> autopar.Plan:
    """Plan the model of a published plan as a 1F1B pipeline with the same layers and microbatches.

    Args:
        published: the published plan.
        stages: how stages are formed.
        memory_budget: bytes of one device; by default what the cluster file leaves for a step.
        work: what is even among layers.

    Raises:
        NoStagesError, InfeasibleError: no plan fits in the memory.
    """
    train_step, args = step_of(published.model())
    eps = EPS[published.family] if work == "flops" else COUNT_EPS
    method = autopar.PipeshardParallel(
        num_micro_batches=published.micro_batches,
        layer_option=autopar.AutoLayerOption(published.num_layers, eps=eps, cost_criteria=work),
        stage_option=stages,
        memory_budget=memory_budget,
    )
    return autopar.plan_step(train_step, args, method=method, cluster=p3(published.num_devices))


def _plan(published: AlpaPlan, stages: StageOption) -> tuple[autopar.Plan | None, Exception | None]:
    """Return the plan, or the error that says why none fits."""
    try:
        return plan_pipeline(published, stages), None
    except (autopar.NoStagesError, autopar.InfeasibleError) as error:
        return None, error


def _stages() -> str:
    """Return the stages that were constructed last as text."""
    result = autopar.get_last_dp_result()
    assert result is not None
    parts = zip(
        result.forward_stage_layer_ids,
        result.submesh_shapes,
        result.logical_mesh_shapes,
        strict=True,
    )
    return "; ".join(
        f"{ids[0]}-{ids[-1]} {hosts}x{devices} as {logical}"
        for ids, (hosts, devices), logical in parts
    )


def rows(only: str) -> Iterator[PipelineComparison]:
    """Compare the plans whose names match a pattern, those for few GPUs first."""
    for published in sorted(PUBLISHED, key=lambda plan: plan.num_devices):
        if re.search(only, published.name):
            yield compare(published)


def main() -> None:
    """Write the table, and print it."""
    args = table_options(__doc__, "pipeline_quality", only="e.g. gpt-8").parse_args()
    for row in written(rows(args.only), args.output):
        print(_text(row), flush=True)


def _text(row: PipelineComparison) -> str:
    def text(seconds: float | None, size: float | None) -> str:
        return "does not fit" if seconds is None else f"{seconds:8.3f} s {size:6.2f} GB"

    found = text(row.found_seconds, row.found_gb)
    alpa = text(row.alpa_seconds, row.alpa_gb)
    ahead = "" if row.ahead is None else f"{row.ahead:+7.1%}"
    return f"{row.model:8} found {found}, Alpa's {alpa} {ahead} ({row.stages})"


if __name__ == "__main__":
    main()
