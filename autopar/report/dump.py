"""Everything there is to know about an executable, as files in a folder."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from autopar.plan import Value
from autopar.report.classify import classify
from autopar.report.decisions import default_costs
from autopar.report.input_placement import input_placement_specs, output_placement_specs
from autopar.report.reasons import explain
from autopar.report.reshardings import resharding_tasks

if TYPE_CHECKING:
    from autopar.hosts.executable import RemoteStep
    from autopar.runtime.executable import Executable
    from autopar.runtime.inspected import InspectedPipeline

DEBUG_FILES = {
    "_plan.json": "the plan; `Plan.load` reads it",
    "_plan.txt": "the plan as a table",
    "_parallelism.txt": "which parallelism each parameter has on which mesh axis",
    "_strategies.txt": "what every equation chose, what that costs, and what else there was",
    "_input_placement_specs.txt": "where each input lives",
    "_output_placement_specs.txt": "where each output lives",
    "_resharding_tasks.txt": "where a value changes its sharding, with bytes and collectives",
    "_stage_0.traced.mlir": "StableHLO of the step as written",
    "_stage_0.annotated.mlir": "the same with the plan's shardings",
    "_stage_0.partitioned.hlo": "HLO of one device right after partitioning",
    "_stage_0.hlo": "HLO of one device as it runs",
    "_stage_0.mem_usage.txt": "bytes on one device",
}
"""What `dump_debug_info` writes: endings of file names, as in Alpa's dumps where those have the same, and contents.

Alpa's `.grad_sync_channel_ids.txt` has no equivalent: no gradient is synchronised before microbatches have been accumulated.
"""


def dump_debug_info(
    executable: "Executable | RemoteStep", folder: str | Path, name: str | None = None
) -> tuple[Path, ...]:
    """Write the files of `DEBUG_FILES` to `folder`, each name starting with `name`, by default the step's; returns their paths.

    Each file is there whole or not at all; files of an earlier dump are replaced.

    Raises:
        ValueError: the folder can't be made or written to, or `name` is no file name.
    """
    return _write_all(folder, executable.step.name if name is None else name, _texts(executable))


def dump_pipeline(executable: "InspectedPipeline", folder: str | Path, name: str | None = None) -> tuple[Path, ...]:
    """The same for a pipeline: `_program.txt` has its instructions, `_stage_0.hlo` the programs of a stage's tasks."""
    return _write_all(folder, executable.step.name if name is None else name, _pipeline_texts(executable))


def _pipeline_texts(executable: "InspectedPipeline") -> Iterator[tuple[str, str]]:
    plan = executable.plan
    stages = range(len(plan.stages))
    yield "_plan.json", plan.to_json()
    yield "_plan.txt", str(plan)
    yield "_program.txt", str(executable.program)
    yield "_stages.txt", "\n".join(map(str, executable.get_stage_execution_info()))
    yield "_parallelism.txt", "\n".join(f"stage {k}: {classify(executable, k)}" for k in stages)
    specs = executable.get_input_placement_specs(), executable.get_output_placement_specs()
    paths = executable.step.in_paths, [f"result/{path}".removesuffix("/") for path in executable.step.out_paths]
    for kind, names, placed in zip(("input", "output"), paths, specs, strict=True):
        lines = zip(names, jax.tree.leaves(placed), strict=True)
        yield f"_{kind}_placement_specs.txt", "\n".join(f"{path}: {spec}" for path, spec in lines)
    used = executable.get_stage_allocation_size()
    for k in stages:
        yield f"_stage_{k}.annotated.mlir", executable.get_hlo_text("annotated", k)
        yield f"_stage_{k}.partitioned.hlo", executable.get_hlo_text("partitioned", k)
        yield f"_stage_{k}.hlo", executable.get_hlo_text("optimized", k)
        tasks = [f"{task.name}: {use.total:,} bytes" for task, use in used.items() if task.stage == k]
        yield f"_stage_{k}.mem_usage.txt", "\n".join(tasks)


def _write_all(folder: str | Path, name: str, texts: Iterator[tuple[str, str]]) -> tuple[Path, ...]:
    if not name or Path(name).name != name:
        raise ValueError(f"name={name!r} can't start a file name; give one without slashes, e.g. 'train_step'")
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return tuple(_write(folder / f"{name}{ending}", text) for ending, text in texts)
    except OSError as error:
        raise ValueError(f"can't write debug info to {folder}: {error}; give a folder that can be made here") from error


def _write(path: Path, text: str) -> Path:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text if text.endswith("\n") else f"{text}\n")
    return partial.replace(path)


def _texts(executable: "Executable | RemoteStep") -> Iterator[tuple[str, str]]:
    plan, (stage,) = executable.plan, executable.plan.stages
    yield "_plan.json", plan.to_json()
    yield "_plan.txt", str(plan)
    yield "_parallelism.txt", str(classify(executable))
    yield "_strategies.txt", _strategies(executable)
    yield "_input_placement_specs.txt", _specs(stage.inputs, input_placement_specs(executable))
    yield "_output_placement_specs.txt", _specs(stage.outputs, output_placement_specs(executable))
    yield "_resharding_tasks.txt", "\n".join(map(str, resharding_tasks(executable)))
    yield "_stage_0.traced.mlir", executable.get_hlo_text("traced")
    yield "_stage_0.annotated.mlir", executable.get_hlo_text("annotated")
    yield "_stage_0.partitioned.hlo", executable.get_hlo_text("partitioned")
    yield "_stage_0.hlo", executable.get_hlo_text("optimized")
    yield "_stage_0.mem_usage.txt", _memory(executable)


def _specs(values: tuple[Value, ...], specs: object) -> str:
    """A line for each array, to be searched by path."""
    return "\n".join(f"{v.path}: {spec}" for v, spec in zip(values, jax.tree.leaves(specs), strict=True))


def _strategies(executable: "Executable | RemoteStep") -> str:
    plan = executable.plan
    try:
        return "\n".join(map(str, explain(executable, default_costs(plan), plan.options)))
    except ValueError as error:  # of a cluster or options that the plan does not carry
        return f"not known: {error}"


def _memory(executable: "Executable | RemoteStep") -> str:
    used = executable.memory
    rows = {
        "total_allocation_size": used.total,
        "arguments": used.arguments,
        "outputs": used.outputs,
        "aliased": used.aliased,
        "temporaries": used.temporaries,
    }
    return "\n".join(f"{name}: {size / 2**30:.3f} GiB ({size:,} bytes)" for name, size in rows.items())
