"""Everything that is known of an executable, as files in a folder."""

import os
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
from simulator.memory import MemoryUse
from simulator.program import Program


class Dumped(Planned, Protocol):
    """An executable, as `dump_debug_info` needs it: see `autopar.Executable`."""

    @property
    def program(self) -> Program: ...
    def get_stage_execution_info(self) -> Sequence[StageInfo]: ...
    def get_input_placement_specs(self) -> Any: ...
    def get_output_placement_specs(self) -> Any: ...
    def get_hlo_text(self, status: Status = "optimized", stage: int | None = None) -> str: ...
    def get_stage_allocation_size(self) -> dict[Task, MemoryUse]: ...


DEBUG_FILES = {
    "_plan.json": "the plan; `Plan.load` reads it",
    "_plan.txt": "the plan as a table",
    "_program.txt": "the instructions of each mesh",
    "_stages.txt": "layers, devices and tasks of each stage, with their FLOP and bytes",
    "_input_placement_specs.txt": "where each input lives",
    "_output_placement_specs.txt": "where each output lives",
    "_traced.mlir": "StableHLO of the step as written; not of a pipeline",
    "_stage_{}.parallelism.txt": "which parallelism each parameter has on which mesh axis",
    "_stage_{}.strategies.txt": "what every equation chose, what that costs, and what else there was",
    "_stage_{}.resharding_tasks.txt": "where a value changes its sharding inside, with bytes and collectives",
    "_stage_{}.annotated.mlir": "StableHLO of the stage's tasks with the plan's shardings",
    "_stage_{}.partitioned.hlo": "HLO of one device right after partitioning",
    "_stage_{}.hlo": "HLO of one device as it runs",
    "_stage_{}.mem_usage.txt": "bytes on one device for each task",
}
"""What `dump_debug_info` writes: endings of file names, as in Alpa's dumps where those have the same, and contents. `{}` is the
number of a stage.

Alpa's `.grad_sync_channel_ids.txt` has no equivalent: no gradient is synchronised before microbatches have been accumulated.
"""


def dump_debug_info(
    executable: Dumped, folder: str | Path, name: str | None = None
) -> tuple[Path, ...]:
    """Write the files of `DEBUG_FILES` to `folder`, each name starting with `name`, by default the step's; return their paths.

    Each file is there whole or not at all; files of an earlier dump are replaced.

    Raises:
        ValueError: the folder can't be made or written to, or `name` is no file name.
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
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text if text.endswith("\n") else f"{text}\n")
    return partial.replace(path)


def _texts(executable: Dumped) -> Iterator[tuple[str, str]]:
    plan, step = executable.plan, executable.step
    yield "_plan.json", plan.to_json()
    yield "_plan.txt", str(plan)
    yield "_program.txt", str(executable.program)
    yield "_stages.txt", "\n".join(map(str, executable.get_stage_execution_info()))
    yield (
        "_input_placement_specs.txt",
        _specs(step.in_paths, executable.get_input_placement_specs()),
    )
    results = [f"result/{path}".removesuffix("/") for path in step.out_paths]
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


def _specs(paths: "tuple[str, ...] | list[str]", specs: object) -> str:
    """A line for each array, to be searched by path."""
    return "\n".join(
        f"{path}: {spec}" for path, spec in zip(paths, jax.tree.leaves(specs), strict=True)
    )


def _strategies(executable: Dumped, stage: int) -> str:
    one = single_stage(executable, stage)
    try:
        return "\n".join(map(str, explain(one, default_costs(one.plan), one.plan.options)))
    except ValueError as error:  # of a cluster or options that the plan does not carry
        return f"not known: {error}"


def _memory(used: MemoryUse) -> str:
    rows = {
        "total_allocation_size": used.total,
        "arguments": used.arguments,
        "outputs": used.outputs,
        "aliased": used.aliased,
        "temporaries": used.temporaries,
    }
    return "\n".join(
        f"{name}: {size / 2**30:.3f} GiB ({size:,} bytes)" for name, size in rows.items()
    )
