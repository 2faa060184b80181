"""Tables of measured training steps, whose columns `simulator.validation.step_rows` defines."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from simulator.calibration.measured_samples import DATA
from simulator.engine.prediction import Prediction
from simulator.hardware.description import ClusterError
from simulator.transformer import predict
from simulator.validation.cases import Case, Outcome, PublishedSet, Unpredicted
from simulator.validation.step_models import has_experts, has_fused_experts
from simulator.validation.step_rows import (
    COLUMNS,
    BadRow,
    StepRow,
    StepRowError,
    read_step_table,
)
from simulator.validation.step_scenarios import StepScenario, scenario_of

STEPS = DATA / "steps"
"""Folder of the shipped tables of steps."""

Predicate = Callable[[StepRow], bool]


def step_cases(
    name: str, wanted: Predicate, folder: Path = STEPS
) -> Iterator[Case | Outcome | Unpredicted]:
    """Yield the seconds of steps, and whether they fit in memory where a row says that.

    Args:
        name: name of the file, without .csv.
        wanted: predicate of the rows that belong to the set.
        folder: folder of the file.
    """
    path = folder / f"{name}.csv"
    if folder == STEPS or path.exists():
        fitted = partial(is_fitted, name) if folder == STEPS else None
        yield from _cases_of_rows(read_step_table(path).rows, wanted, fitted)


def is_fitted(name: str, row: StepRow) -> bool:
    """Return whether a number of the model is fitted to a row of a shipped table.

    Such numbers are the speed of 8-bit products on H100 (NeMo's steps), the throttling of GB300
    (dense Llamas on 32 or more of them), the speed of Mamba's scan (Nemotron 3), and the host's
    launches per pass over experts (models with experts in Megatron-Bridge, if their steps are not
    one CUDA graph).

    Args:
        name: name of the table, without .csv.
        row: the row.
    """
    model = row.model.lower()
    if name == "megatron_bridge_25.09-26.08":
        dense = model.startswith("llama") and row.gpu == "GB300" and row.gpus >= 32
        return dense or (has_experts(row) and not has_fused_experts(row))
    eight_bits = row.precision.lower().startswith("fp8") and row.gpu == "H100"
    return eight_bits and row.framework.startswith("NeMo") and "MLPerf" not in row.framework


def step_memory(name: str, wanted: Predicate, folder: Path = STEPS) -> Iterator[Case | Unpredicted]:
    """Yield the peak memory of a device, in GB, of rows that state it.

    Arguments as for `step_cases`.
    """
    path = folder / f"{name}.csv"
    if folder != STEPS and not path.exists():
        return
    rows = [row for row in read_step_table(path).rows if isinstance(row, StepRow)]
    yield from _memory_of_rows([row for row in rows if row.memory_gb is not None and wanted(row)])


def sets_of_rows(
    path: Path, table: Sequence[StepRow | BadRow], by: Sequence[str] = ()
) -> tuple[PublishedSet, ...]:
    """Return the sets of a user's table: seconds, and memory where rows state it.

    Args:
        path: the file.
        table: its rows.
        by: columns; rows that differ in one of them belong to different sets.

    Raises:
        ValueError: there is no such column.
    """
    if unknown := [column for column in by if column not in COLUMNS]:
        raise ValueError(f"unknown column {unknown[0]!r}; expected some of {', '.join(COLUMNS)}")
    groups: dict[str, list[StepRow | BadRow]] = {}
    for row in table:
        values = [str(getattr(row, column)) for column in by if isinstance(row, StepRow)]
        name = " ".join([path.stem, *values]) if values or not by else f"{path.stem} unreadable"
        groups.setdefault(name, []).append(row)
    sets = []
    for name, rows in groups.items():
        sets.append(_set_of_rows(name, "s", str(path), partial(_cases_of_rows, rows)))
        weighed = [row for row in rows if isinstance(row, StepRow) and row.memory_gb is not None]
        if weighed:
            memory = partial(_memory_of_rows, weighed)
            sets.append(_set_of_rows(f"{name} memory", "GB", str(path), memory))
    return tuple(sets)


def _set_of_rows(
    name: str, unit: str, source: str, cases: Callable[[], Iterator[Case | Outcome | Unpredicted]]
) -> PublishedSet:
    return PublishedSet(name=name, title=name, unit=unit, source=source, cases=cases)


def _cases_of_rows(
    rows: Sequence[StepRow | BadRow],
    wanted: Predicate | None = None,
    fitted: Predicate | None = None,
) -> Iterator[Case | Outcome | Unpredicted]:
    for row in rows:
        if isinstance(row, BadRow):
            yield Unpredicted(row.name, row.why)
        elif (wanted is None or wanted(row)) and not _states_memory_alone(row):
            yield from _cases(row, fitted is not None and fitted(row))


def _states_memory_alone(row: StepRow) -> bool:
    """Return whether a row states the memory of a step, but neither its time nor its outcome."""
    times = (row.step_s, row.tokens_per_s_per_gpu, row.tflops_per_gpu)
    return row.memory_gb is not None and not row.outcome and not any(times)


def _memory_of_rows(rows: Sequence[StepRow]) -> Iterator[Case | Unpredicted]:
    for row in rows:
        yield _memory_case(row)


def _cases(row: StepRow, fitted: bool) -> Iterator[Case | Outcome | Unpredicted]:
    out_of_memory = "oom" in row.outcome.lower()
    try:
        scenario = scenario_of(row)
        prediction = predict(scenario.model, scenario.execution, scenario.machine)
        measured = None if out_of_memory else _seconds(row, scenario, prediction)
    except (StepRowError, ClusterError, ValueError) as error:
        yield Unpredicted(row.name, str(error))
        return
    group = _alternatives(row)
    if measured is not None:
        yield Case.of_step(row.name, measured, prediction, group, fitted)
    if row.outcome:
        yield Outcome(
            row.name, not out_of_memory, prediction.memory.fits, prediction.seconds, measured, group
        )


def _memory_case(row: StepRow) -> Case | Unpredicted:
    try:
        scenario = scenario_of(row)
        memory = predict(scenario.model, scenario.execution, scenario.machine).memory
    except (StepRowError, ClusterError, ValueError) as error:
        return Unpredicted(row.name, str(error))
    assert row.memory_gb is not None
    if row.memory_gb > memory.capacity / 1e9:
        return Unpredicted(
            row.name,
            f"column memory_gb: given {row.memory_gb:g}, expected at most the"
            f" {memory.capacity / 1e9:.0f} GB of a {row.gpu}",
        )
    return Case(row.name, row.memory_gb, memory.reserved / 1e9)


def _seconds(row: StepRow, scenario: StepScenario, prediction: Prediction) -> float:
    """Return the measured seconds of a step.

    Raises:
        StepRowError: the row has no measurement of time.
    """
    if row.step_s is not None:
        return row.step_s
    if row.tokens_per_s_per_gpu is not None:
        return prediction.tokens / (row.tokens_per_s_per_gpu * row.gpus)
    if row.tflops_per_gpu is not None:
        return prediction.model_flops / (row.tflops_per_gpu * 1e12 * row.gpus)
    raise StepRowError("columns step_s, tokens_per_s_per_gpu and tflops_per_gpu: empty")


def _alternatives(row: StepRow) -> str:
    """Return the group of layouts of the same model, devices, batch and kernels."""
    fields = (row.framework, row.model, row.seq, row.gpu, row.gpus, row.global_batch)
    return " ".join(str(value) for value in (*fields, row.precision, row.kernel))


def _all(row: StepRow) -> bool:
    return True


def _of_kernel(kernel: str, row: StepRow) -> bool:
    return row.kernel == kernel


def _of_precision(precision: str, row: StepRow) -> bool:
    return row.precision.lower().startswith(precision)


def _published(
    name: str,
    title: str,
    file: str,
    source: str,
    wanted: Predicate = _all,
) -> PublishedSet:
    return PublishedSet(
        name=name,
        title=title,
        unit="s",
        source=source,
        cases=partial(step_cases, file, wanted),
        files=(file,),
    )


_LAYOUTS = "Aleph Alpha, NeurIPS-WANT layouts (arXiv 2311.05610), A100-80"
_DGXC = "NVIDIA dgxc-benchmarking, READMEs, H100"

STEP_SETS: tuple[PublishedSet, ...] = (
    *(
        _published(
            f"layouts-{name}",
            f"Layouts of Llama on A100, {title}",
            "layouts_a100_oom",
            _LAYOUTS,
            partial(_of_kernel, kernel),
        )
        for name, title, kernel in (
            ("flash2-rms", "flash attention 2, fused RMSNorm", "flash_attention2 + RMS kernel"),
            ("flash2", "flash attention 2", "flash_attention2"),
            ("flash1", "flash attention 1", "flash_attentionv1.0.8"),
            ("fused", "fused softmax", "fused"),
            ("torch", "plain attention", "torch"),
        )
    ),
    _published(
        "dgxc-bf16",
        "NeMo on H100, bf16",
        "dgxc_megatron_h100_gb200",
        _DGXC,
        partial(_of_precision, "bf16"),
    ),
    _published(
        "dgxc-fp8",
        "NeMo on H100, fp8",
        "dgxc_megatron_h100_gb200",
        _DGXC,
        partial(_of_precision, "fp8"),
    ),
    _published(
        "nemo", "NeMo 24.07 to 25.07", "nemo_24.07-25.07", "NVIDIA NeMo, performance summaries"
    ),
    _published(
        "long-sequence",
        "NeMo, long sequences",
        "nemo_long_sequence",
        "NVIDIA NeMo, performance of long sequences",
    ),
    _published(
        "megatron-bridge",
        "Megatron-Bridge 25.09 to 26.08",
        "megatron_bridge_25.09-26.08",
        "NVIDIA Megatron-Bridge, performance summary",
    ),
    _published(
        "mlperf", "MLPerf training 5.0, Llama", "mlperf_v5.0_llama", "MLCommons, results of 5.0"
    ),
    _published(
        "automodel",
        "NeMo AutoModel, FSDP2",
        "nemo_automodel_h100",
        "NVIDIA NeMo AutoModel, performance summary",
    ),
    _published(
        "jax",
        "MaxText, Pax and T5X",
        "jax_maxtext_pax_t5x_vit",
        "NVIDIA JAX-Toolbox and dgxc-benchmarking",
    ),
    _published(
        "internevo",
        "InternEvo on A100, RoCE",
        "internevo_a100_roce",
        "InternLM InternEvo, training performance",
    ),
    _published(
        "dlperf",
        "GPT on V100, one NIC a host",
        "dlperf_gpt_v100",
        "OneFlow DLPerf, GPT",
    ),
    *(
        PublishedSet(
            name=f"{name}-memory",
            title=f"{title}: memory",
            unit="GB",
            source=source,
            cases=partial(step_memory, file, _all),
            files=(file,),
        )
        for name, title, file, source in (
            ("dlperf", "GPT on V100", "dlperf_gpt_v100", "OneFlow DLPerf, GPT"),
            ("internevo", "InternEvo", "internevo_a100_roce", "InternLM InternEvo"),
        )
    ),
)
"""Sets of the shipped tables of steps."""
