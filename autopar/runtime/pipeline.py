"""A pipeline on the devices of this process: the program's instructions, dispatched one after the other, run as they can."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Var
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar import graph, inspect
from autopar.pipeline.cut import Task
from autopar.pipeline.lowering import StageLowering
from autopar.pipeline.memory import MeshMemory
from autopar.pipeline.planned import PlannedPipeline
from autopar.pipeline.program import task_of
from autopar.plan import Plan
from autopar.progress import ranges, tell
from autopar.runtime.timing import dummy_inputs, executed_timeline
from autopar.target import memory_of
from autopar.trace import StepGraph
from autopar.util import benchmark_func
from simulator.memory import MemoryUse
from simulator.program import Free, Instruction, Program, Recv, Run, Send, walk
from simulator.timeline import Timeline

type Values = dict[str, jax.Array]


@dataclass(frozen=True, slots=True)
class _Output:
    """How an output is made when all instructions have run.

    Attributes:
        names: the values of the mesh that it is made of.
        sharding: where it is.
        make: makes it of them; None: it is one of them.
        value: a constant, which is made of nothing.
    """

    mesh: int
    names: tuple[str, ...]
    sharding: NamedSharding
    make: Callable[..., jax.Array] | None = None
    value: jax.Array | None = None

    def take(self, values: Values) -> jax.Array:
        if self.value is not None:
            return self.value
        parts = [values[name] for name in self.names]
        return parts[0] if self.make is None else self.make(*parts)


@dataclass(frozen=True, slots=True)
class _Call:
    """A run instruction, ready to be dispatched.

    Attributes:
        operands: names of the values it takes, and where it wants them.
        results: names of those it gives.
        waits: whether it ends before the next begins: virtual devices wait for one another with threads that there may not be
            enough of.
    """

    compiled: Any
    operands: tuple[tuple[str, NamedSharding], ...]
    results: tuple[str, ...]
    waits: bool


class PipelineExecutable:
    """One step, for arguments of one structure, shape and dtype, as a pipeline.

    Attributes:
        step: what was traced.
        plan: how it runs.
        program: the instructions.
        meshes: the devices of each stage.
        plan_seconds, compile_seconds: what tracing and planning, and compiling took.
    """

    def __init__(
        self,
        planned: PlannedPipeline,
        meshes: Sequence[Mesh],
        donated: frozenset[int] = frozenset(),
        plan_seconds: float = 0.0,
    ) -> None:
        self.planned, self.meshes, self.plan_seconds = planned, tuple(meshes), plan_seconds
        self.step: StepGraph = planned.cut.step
        self.plan: Plan = planned.plan
        self.program: Program = planned.program
        self._order = tuple(walk(self.program))
        self._mesh_of = planned.schedule.pipeline.mesh_of
        start = time.perf_counter()
        self._lowered = [
            StageLowering(found, planned.plan.stages, meshes[found.stage], donated) for found in planned.graphs
        ]
        functions = [each for lowered in self._lowered for each in lowered.functions()]
        self._functions = {each.task: each for each in functions}
        self._compiled = self._compile()
        self._zeros = [self._make_zeros(mesh) for mesh in range(len(self.program.meshes))]
        self._arrivals = self._places()
        self._calls = {run: self._call(run) for _, run in self._order if isinstance(run, Run)}
        self._outputs = list(map(self._output, self.step.jaxpr.outvars))
        self._splits = {i: self._make_split(i) for i in self.step.batch}
        self._homes = [self._home(i) for i in range(len(self.step.jaxpr.invars))]
        self.in_shardings: Any = jax.tree.unflatten(self.step.in_tree, self._homes)
        self.out_shardings: Any = jax.tree.unflatten(self.step.out_tree, [each.sharding for each in self._outputs])
        self.compile_seconds = time.perf_counter() - start

    # -- what is prepared once

    def _compile(self) -> dict[Task, jax.stages.Compiled]:
        """The tasks; those of one mesh that are the same program, as identical layers are, share an executable."""
        known: dict[tuple[Mesh, str], jax.stages.Compiled] = {}
        found: dict[Task, jax.stages.Compiled] = {}
        for lowered, stage in zip(self._lowered, self.plan.stages, strict=True):
            start = time.perf_counter()
            tasks = [task for task in self._functions if task.stage == lowered.number]
            for task in tasks:
                program = self._functions[task].jitted.lower(*self._functions[task].in_avals)
                key = lowered.mesh, program.as_text()
                if key not in known:
                    known[key] = program.compile()
                found[task] = known[key]
            tell(
                f"stage {lowered.number}: layers {ranges(stage.layers)} on devices {ranges(stage.devices)}, mesh"
                f" {' x '.join(map(str, stage.mesh_shape))}; {len(tasks)} tasks compiled in {time.perf_counter() - start:.2f} s"
            )
        return found

    def _home(self, i: int) -> NamedSharding:
        """Where input `i` is before the step."""
        stage = self.planned.cut.input_stages[i][0]
        return self._lowered[stage].sharding(self.step.jaxpr.invars[i])

    def _make_zeros(self, mesh: int) -> Callable[[], Values]:
        """What makes the sums of a mesh, before the first microbatch."""
        names, arrays, shardings = [], [], []
        for task, totals in self.planned.cut.totals.items():
            if self._mesh_of(task.stage) == mesh:
                for each in totals:
                    lowered = self._lowered[task.stage]
                    names.append(self.planned.names.of(each.sum, 0))
                    arrays.append((lowered.shape(each.sum), graph.aval_of(each.sum).dtype))
                    shardings.append(lowered.sharding(each.sum))
        if not names:
            return dict
        make = jax.jit(lambda: [jnp.zeros(shape, dtype) for shape, dtype in arrays], out_shardings=shardings)
        compiled = make.lower().compile()
        return lambda: dict(zip(names, compiled(), strict=True))

    def _make_split(self, i: int) -> Callable[[jax.Array], list[jax.Array]]:
        """What cuts a batch input into microbatches, with examples k, k + count ... in microbatch k: each device has some of each."""
        count = self.step.num_micro_batches

        def split(whole: jax.Array) -> list[jax.Array]:
            rows = whole.reshape(-1, count, *whole.shape[1:])
            return [rows[:, k] for k in range(count)]

        sharding = self._home(i)
        return jax.jit(split, in_shardings=sharding, out_shardings=[sharding] * count)

    def _places(self) -> dict[tuple[int, str], NamedSharding]:
        """For each mesh, where values that come from elsewhere go."""
        found: dict[tuple[int, str], NamedSharding] = {}
        for mesh, row in enumerate(self.program.instructions):
            for run in row:
                if isinstance(run, Run):
                    function = self._functions[task_of(run)]
                    for var, sharding in zip(function.reads, function.in_shardings, strict=False):
                        found.setdefault((mesh, self.planned.names.of(var, run.micro_batch)), sharding)
        return found

    def _output(self, atom: Var | Literal) -> "_Output":
        cut, names = self.planned.cut, self.planned.names
        if isinstance(atom, Literal) or atom in self.step.jaxpr.constvars:
            value = (
                atom.val if isinstance(atom, Literal) else self.step.jaxpr.consts[self.step.jaxpr.constvars.index(atom)]
            )
            here = NamedSharding(self.meshes[0], PartitionSpec())
            return _Output(0, (), here, value=jax.device_put(np.asarray(value, graph.aval_of(atom).dtype), here))
        if atom in cut.joined:
            part = cut.joined[atom]
            stage, count = cut.made_by[part].stage, self.step.num_micro_batches
            sharding = self._lowered[stage].sharding(part)
            join = jax.jit(_join, in_shardings=(sharding,) * count, out_shardings=sharding)
            return _Output(self._mesh_of(stage), tuple(names.of(part, k) for k in range(count)), sharding, join)
        if atom in cut.made_by:
            stage = cut.made_by[atom].stage
            return _Output(self._mesh_of(stage), (names.of(atom, 0),), self._lowered[stage].sharding(atom))
        i = self.step.jaxpr.invars.index(atom)
        return _Output(self._mesh_of(cut.input_stages[i][0]), (f"in{i}",), self._home(i))

    def _call(self, run: Run) -> "_Call":
        function, names = self._functions[task_of(run)], self.planned.names
        operands = [names.of(var, run.micro_batch) for var in (*function.reads, *function.sums)]
        results = tuple(names.of(var, run.micro_batch) for var in (*function.results, *function.sums))
        devices = self.meshes[run.stage].devices
        waits = devices.size > 1 and devices.flat[0].platform == "cpu"
        return _Call(
            self._compiled[function.task], tuple(zip(operands, function.in_shardings, strict=True)), results, waits
        )

    # -- running

    def shard_args(self, *args: Any) -> tuple[Any, ...]:
        """`args` on the devices, as the plan wants them; what is in place already is not copied."""
        return tuple(jax.device_put(arg, shardings) for arg, shardings in zip(args, self.in_shardings, strict=True))

    def __call__(self, *args: Any) -> Any:
        """Run the step on arguments that are where `in_shardings` wants them.

        Raises:
            ValueError: they are elsewhere, or of another structure.
        """
        leaves, tree = jax.tree.flatten(args)
        if tree != self.step.in_tree:
            raise ValueError(f"arguments of structure {tree}, expected {self.step.in_tree}")
        for leaf, home in zip(leaves, self._homes, strict=True):
            if getattr(leaf, "sharding", None) != home:
                raise ValueError("an argument is not where the plan wants it; see shard_args")
        values = self.start(leaves)
        for mesh, instruction in self._order:
            self.execute(mesh, instruction, values)
        return jax.tree.unflatten(self.step.out_tree, [each.take(values[each.mesh]) for each in self._outputs])

    def execute(self, mesh: int, instruction: Instruction, values: list[Values]) -> None:
        """Dispatch one instruction; `values` are those of each mesh."""
        match instruction:
            case Run():
                self._run(instruction, values[mesh])
            case Send(name, to):
                values[to][name] = jax.device_put(values[mesh][name], self._arrivals[to, name])
            case Recv():
                pass  # the send put it there; who uses it waits for it
            case Free(names):
                for name in names:
                    values[mesh].pop(name, None)
            case _:
                assert_never(instruction)

    def start(self, leaves: Sequence[jax.Array]) -> list[Values]:
        """The values of each mesh before the first instruction: its inputs, in microbatches, and totals of zero."""
        values = [zeros() for zeros in self._zeros]
        for i, leaf in enumerate(leaves):
            sent = i in self.step.carried.values()
            if i in self.step.batch:
                named = {f"in{i}.{k}": part for k, part in enumerate(self._splits[i](leaf))}
            else:
                named = {f"in{i}": leaf}
            stages = self.planned.cut.input_stages[i]
            for mesh in dict.fromkeys(map(self._mesh_of, stages[:1] if sent else stages)):
                for name, value in named.items():
                    place = self._arrivals.get((mesh, name))
                    values[mesh][name] = (
                        value if place is None or place == value.sharding else jax.device_put(value, place)
                    )
        return values

    def _run(self, run: Run, values: Values) -> None:
        call = self._calls[run]
        operands = [
            value if (value := values[name]).sharding == sharding else jax.device_put(value, sharding)
            for name, sharding in call.operands
        ]
        made = call.compiled(*operands)
        values.update(zip(call.results, made, strict=True))
        if call.waits:
            jax.block_until_ready(made)

    # -- what it is

    def get_input_placement_specs(self) -> Any:
        """A tuple like the arguments, with a `PlacementSpec` for every array."""
        avals = jax.tree.leaves(self.step.in_avals)
        meshes = [self._mesh_of(self.planned.cut.input_stages[i][0]) for i in range(len(avals))]
        return jax.tree.unflatten(self.step.in_tree, map(inspect.placed, avals, self._homes, meshes))

    def get_output_placement_specs(self) -> Any:
        """A pytree like the result, with a `PlacementSpec` for every array."""
        specs = []
        for atom, output in zip(self.step.jaxpr.outvars, self._outputs, strict=True):
            aval = graph.aval_of(atom)
            if atom in self.planned.cut.joined:
                aval = aval.update(shape=(aval.shape[0] * self.step.num_micro_batches, *aval.shape[1:]))
            specs.append(inspect.placed(aval, output.sharding, output.mesh))
        return jax.tree.unflatten(self.step.out_tree, specs)

    # -- what it needs

    @property
    def devices(self) -> list[Any]:
        """The devices of all stages, each once."""
        return list(dict.fromkeys(device for mesh in self.meshes for device in mesh.devices.flat))

    @property
    def memory(self) -> tuple[MemoryUse, ...]:
        """For each mesh the bytes on one device when it is fullest, by the compiler's buffer assignment for each task."""
        memory = MeshMemory(self.planned)
        for lowered in self._lowered:
            memory.add_stage(lowered)
        for task, used in self.get_stage_allocation_size().items():
            memory.add_task(task, used)
        return memory.peaks(self.program)

    def get_total_allocation_size(self) -> int:
        """Bytes that the fullest device needs to run the step."""
        return max(used.total for used in self.memory)

    def get_stage_allocation_size(self) -> dict[Task, MemoryUse]:
        """Bytes on one device for each task, by the compiler's buffer assignment."""
        return {task: memory_of(compiled) for task, compiled in self._compiled.items()}

    def get_stage_execution_info(self) -> list[inspect.StageInfo]:
        """For every stage its layers, devices and tasks, with the work of each."""
        return inspect.stage_infos(self.planned)

    def get_hlo_text(self, status: inspect.Status = "optimized", stage: int | None = None) -> str:
        """The programs of the tasks, each under a line `// task 0F`: "annotated", "partitioned" or "optimized".

        Args:
            stage: only those of one stage.

        Raises:
            ValueError: there is no such stage or status.
        """
        if stage is not None and not 0 <= stage < len(self._lowered):
            raise ValueError(f"there is no stage {stage}, expected 0 to {len(self._lowered) - 1}")
        return "\n".join(
            f"// task {inspect.task_name(task)}\n{self._text(task, status)}"
            for task in self._functions
            if stage in (None, task.stage) and (self.planned.cut.eqns[task] or self.planned.cut.totals.get(task))
        )

    def _text(self, task: Task, status: inspect.Status) -> str:
        function = self._functions[task]
        match status:
            case "optimized":
                return self._compiled[task].as_text() or ""
            case "annotated":
                return function.jitted.lower(*function.in_avals).as_text()
            case "partitioned":
                lowered = function.jitted.lower(*function.in_avals)
                return inspect.partitioned(lowered, self.meshes[task.stage].devices.size)
            case _:
                raise ValueError(
                    f"status {status!r} for a pipeline, expected 'annotated', 'partitioned' or 'optimized'; its tasks are made"
                    " from the traced step"
                )

    def dump_debug_info(self, folder: str | Path, name: str | None = None) -> tuple[Path, ...]:
        """Write plan, program, placements, the programs of every stage and their memory to `folder`."""
        return inspect.dump_pipeline(self, folder, name)

    # -- how long it takes

    def profile_with_dummy_inputs(self, warmup: int = 1, number: int = 3, repeat: int = 3) -> np.ndarray:
        """Seconds of a step on zeros, `repeat` times the mean over `number` steps; shape (repeat,)."""
        leaves = dummy_inputs(self)

        def run() -> None:
            results = jax.tree.leaves(self(*jax.tree.unflatten(self.step.in_tree, leaves)))
            for output, i in self.step.carried.items():
                leaves[i] = results[output]

        return benchmark_func(run, self.sync, warmup, repeat, number)

    def dump_stage_execution_trace(self, file: str | Path) -> Timeline:
        """Run a step on zeros with every instruction timed; write it for Perfetto, in the form of a simulated step, and return it."""
        executed_timeline(self, dummy_inputs(self))  # the first time is slower
        timeline = executed_timeline(self, dummy_inputs(self))
        timeline.save_chrome_trace(file)
        return timeline

    def sync(self) -> None:
        """Wait until the devices have nothing left to do."""
        for device in self.devices:
            jax.device_put(0, device).block_until_ready()


def _join(*parts: jax.Array) -> jax.Array:
    """What microbatches have made, example by example: the inverse of cutting them."""
    return jnp.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:])
