"""Debug dumps: plan, program, shardings, costs, HLO and memory of an executable as files."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax

from autopar.analysis.reasons import explain
from autopar.analysis.reshardings import resharding_tasks
from autopar.lowering.planned import Planned, single_stage
from autopar.pipeline.partition import Task
from autopar.report.classify import classify
from autopar.report.decisions import default_costs
from autopar.report.program_text import Status
from autopar.report.stage_reports import StageInfo
from simulator.files import write_text
from simulator.memory import MemoryUse
from simulator.program import Program


class Dumped(Planned, Protocol):
    """The interface of an executable that `dump_debug_info` needs: see `autopar.Executable`."""

    @property
    def program(self) -> Program:
        """The instructions of each mesh."""
        ...

    def get_stage_execution_info(self) -> Sequence[StageInfo]:
        """Return the stages with their tasks."""
        ...

    def get_input_placement_specs(self) -> Any:
        """Return the placement of each input, as a pytree like the inputs."""
        ...

    def get_output_placement_specs(self) -> Any:
        """Return the placement of each output, as a pytree like the outputs."""
        ...

    def get_hlo_text(self, status: Status = "optimized", stage: int | None = None) -> str:
        """Return the program of a stage at a point of its compilation."""
        ...

    def get_stage_allocation_size(self) -> dict[Task, MemoryUse]:
        """Return the memory of each task on one device."""
        ...


def dump_debug_info(
    executable: Dumped, folder: str | Path, name: str | None = None
) -> tuple[Path, ...]:
    """Write debug information about an executable to files.

    Each file is written atomically, and replaces the file of an earlier dump. Files that Alpa
    dumps, too, have its suffixes. Its `.grad_sync_channel_ids.txt` has no equivalent: no gradient
    is synchronized before all microbatches have been accumulated.

    | suffix | contents |
    | --- | --- |
    | `_plan.json` | the plan; `Plan.load` reads it |
    | `_plan.txt` | the plan as a table |
    | `_program.txt` | the instructions of each mesh |
    | `_stages.txt` | layers, devices and tasks of each stage, with their FLOP and bytes |
    | `_input_placement_specs.txt` | the placement of each input |
    | `_output_placement_specs.txt` | the placement of each output |
    | `_traced.mlir` | StableHLO of the step as traced; missing for a pipeline |

    For each stage, such as `_stage_0`:

    | suffix | contents |
    | --- | --- |
    | `_stage_0.parallelism.txt` | the kind of parallelism of each parameter on each mesh axis |
    | `_stage_0.strategies.txt` | sharding, cost and other candidates of each equation |
    | `_stage_0.resharding_tasks.txt` | the reshardings, with bytes and collectives |
    | `_stage_0.annotated.mlir` | StableHLO of the stage's tasks with the plan's shardings |
    | `_stage_0.partitioned.hlo` | HLO of one device right after partitioning |
    | `_stage_0.hlo` | optimized HLO of one device |
    | `_stage_0.mem_usage.txt` | bytes on one device for each task |

    Args:
        executable: the executable.
        folder: the folder of the files; it is created if needed.
        name: the common prefix of the file names; by default the name of the step.

    Returns:
        The paths of the files.

    Raises:
        ValueError: the folder cannot be created or written to, or `name` is not a file name.
    """
    name = executable.step.name if name is None else name
    if not name or Path(name).name != name:
        raise ValueError(
            f"name={name!r} can't start a file name; give one without slashes, e.g. 'train_step'"
        )
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return tuple(
            _write(folder / f"{name}{ending}", text) for ending, text in _texts(executable)
        )
    except OSError as error:
        raise ValueError(
            f"can't write debug info to {folder}: {error}; give a folder that can be made here"
        ) from error


def _write(path: Path, text: str) -> Path:
    write_text(path, text if text.endswith("\n") else f"{text}\n")
    return path


def _texts(executable: Dumped) -> Iterator[tuple[str, str]]:
    """Yield the suffix and the text of each file."""
    plan = executable.plan
    step = executable.step
    yield "_plan.json", plan.to_json()
    yield "_plan.txt", str(plan)
    yield "_program.txt", str(executable.program)
    yield "_stages.txt", "\n".join(map(str, executable.get_stage_execution_info()))
    yield (
        "_input_placement_specs.txt",
        _specs(step.arguments.paths, executable.get_input_placement_specs()),
    )
    results = [f"result/{path}".removesuffix("/") for path in step.result.paths]
    yield "_output_placement_specs.txt", _specs(results, executable.get_output_placement_specs())
    if plan.schedule.is_whole_step:
        yield "_traced.mlir", executable.get_hlo_text("traced")
    used = executable.get_stage_allocation_size()
    for k in range(len(plan.stages)):
        stage = f"_stage_{k}"
        yield f"{stage}.parallelism.txt", str(classify(executable, k))
        yield f"{stage}.strategies.txt", _strategies(executable, k)
        yield (
            f"{stage}.resharding_tasks.txt",
            "\n".join(map(str, resharding_tasks(single_stage(executable, k)))),
        )
        yield f"{stage}.annotated.mlir", executable.get_hlo_text("annotated", k)
        yield f"{stage}.partitioned.hlo", executable.get_hlo_text("partitioned", k)
        yield f"{stage}.hlo", executable.get_hlo_text("optimized", k)
        tasks = (
            f"task {task.name}\n{_memory(use)}" for task, use in used.items() if task.stage == k
        )
        yield f"{stage}.mem_usage.txt", "\n".join(tasks)


def _specs(paths: Sequence[str], specs: object) -> str:
    """Return a line for each array, which starts with its path."""
    return "\n".join(
        f"{path}: {spec}" for path, spec in zip(paths, jax.tree.leaves(specs), strict=True)
    )


def _strategies(executable: Dumped, stage: int) -> str:
    single = single_stage(executable, stage)
    try:
        reasons = explain(single, default_costs(single.plan), single.plan.options)
    except ValueError as error:  # the plan does not store its cluster or options
        return f"not known: {error}"
    return "\n".join(map(str, reasons))


def _memory(use: MemoryUse) -> str:
    rows = {
        "total_allocation_size": use.total,
        "arguments": use.arguments,
        "outputs": use.outputs,
        "aliased": use.aliased,
        "temporaries": use.temporaries,
    }
    return "\n".join(
        f"{name}: {size / 2**30:.3f} GiB ({size:,} bytes)" for name, size in rows.items()
    )
