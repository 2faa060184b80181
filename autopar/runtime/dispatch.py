"""The instructions of a planned step, dispatched one after the other; the devices run them as they can."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import jax
from jax.sharding import NamedSharding

from autopar.graph import aval_of
from autopar.pipeline.instructions import Crossing, micro_batch_of, task_of
from autopar.pipeline.partition import Task
from autopar.runtime.argument_placement import Values
from autopar.runtime.tasks import CompiledTask
from autopar.runtime.transports import Move, Transport, default_transport
from autopar.runtime.value_placement import Places
from simulator.program import Free, Instruction, Recv, Run, Send, walk


@dataclass(frozen=True, slots=True)
class Call:
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

    def run(self, values: Values) -> None:
        """Dispatch it on the values of its mesh, which get the results."""
        operands = [
            value if _is_at(value := values[name], sharding) else jax.device_put(value, sharding)
            for name, sharding in self.operands
        ]
        made = self.compiled(*operands)
        values.update(zip(self.results, made, strict=True))
        if self.waits:
            jax.block_until_ready(made)


def _is_at(value: jax.Array, sharding: NamedSharding) -> bool:
    """Return whether a value is in its place; comparing shardings takes long where they are not the same object."""
    return (present := value.sharding) is sharding or present == sharding


class Dispatcher:
    """Executes instructions; what each needs is looked up beforehand.

    Attributes:
        order: the instructions with their meshes, in the order of `walk`.
        calls, moves: what runs and sends do.
    """

    def __init__(
        self, places: Places, tasks: Mapping[Task, CompiledTask], transport: Transport = default_transport
    ) -> None:
        self._places, self._tasks, self._transport = places, tasks, transport
        self.order: tuple[tuple[int, Instruction], ...] = tuple(walk(places.planned.program))
        self.calls = {run: self._call(run) for _, run in self.order if isinstance(run, Run)}
        crossings = places.planned.instructions.crossings
        known = {crossing: self._move(crossing) for crossing in dict.fromkeys(crossings.values())}
        self.moves = {at: known[crossing] for at, crossing in crossings.items()}

    def run(self, values: Sequence[Values]) -> None:
        """All instructions; `values` are those of each mesh."""
        for mesh, instruction in self.order:
            self.execute(mesh, instruction, values)

    def execute(self, mesh: int, instruction: Instruction, values: Sequence[Values]) -> None:
        """One instruction."""
        match instruction:
            case Run():
                self.calls[instruction].run(values[mesh])
            case Send(name, to):
                values[to][name] = self.moves[name, to].send(values[mesh][name])
            case Recv(name):
                complete = self.moves[name, mesh].complete
                if complete is not None:  # else the send put it there; who uses it waits for it
                    values[mesh][name] = self._ended(complete(values[mesh][name]), mesh)
            case Free(names):
                for name in names:
                    values[mesh].pop(name, None)
            case _:
                assert_never(instruction)

    def _ended(self, value: jax.Array, mesh: int) -> jax.Array:
        return jax.block_until_ready(value) if self._waits(mesh) else value

    def _waits(self, stage: int) -> bool:
        devices = self._places.meshes[stage].devices
        return devices.size > 1 and devices.flat[0].platform == "cpu"

    def _call(self, run: Run) -> Call:
        task, names = self._tasks[task_of(run)], self._places.planned.names
        function = task.function
        operands = [names.of(var, micro_batch_of(run)) for var in (*function.reads, *function.sums)]
        results = tuple(names.of(var, micro_batch_of(run)) for var in (*function.results, *function.sums))
        wanted = tuple(zip(operands, function.in_shardings, strict=True))
        return Call(task.compiled, wanted, results, self._waits(run.stage))

    def _move(self, crossing: Crossing) -> Move:
        planned, meshes = self._places.planned, self._places.meshes
        shape = planned.values[crossing.source].shape(crossing.var)
        value = jax.ShapeDtypeStruct(shape, aval_of(crossing.var).dtype)
        return self._transport(planned.transfer(crossing), value, meshes[crossing.source], meshes[crossing.to])
