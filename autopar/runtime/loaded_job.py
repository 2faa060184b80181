"""A job loaded where it runs: its programs compiled, its deliveries prepared, and how arguments are cut and results joined.

The same for the devices of this process and for a worker that has some of the devices of a job.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, assert_never

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from autopar.devices import Device
from autopar.lowering.job import Array, Call, Delivery, Input, Job, Output, Place
from autopar.microbatch.batch_rows import cut_rows, join_rows
from simulator.program import Free, Instruction, Recv, Run, Send

type Values = dict[str, jax.Array]
"""The values that a mesh has, by name (`autopar.lowering.instructions.Names`)."""


class Carrier(Protocol):
    """Carries the value of one delivery, once in each step."""

    def send(self, value: jax.Array, tag: int, is_used_up: bool) -> None:
        """Let the receivers have the value.

        Args:
            tag: tells it from everything else that is under way.
            is_used_up: whether the memory of the value may be used for something else before it is received.
        """
        ...

    def receive(self, tag: int) -> jax.Array:
        """Return the value on the mesh that receives it."""
        ...

    def wait(self) -> None:
        """Wait until what has been sent may be received."""
        ...


@dataclass(frozen=True, slots=True)
class CompiledCall:
    """A run instruction, ready to be dispatched.

    Attributes:
        operands: names of the values it takes.
        moves: for operands that may be elsewhere, where it wants them.
        results: names of those it gives.
        waits: whether it ends before the next begins: virtual devices wait for one another with threads that there may not be
            enough of.
    """

    compiled: Any
    operands: tuple[str, ...]
    moves: tuple[tuple[int, NamedSharding], ...]
    results: tuple[str, ...]
    waits: bool

    def run(self, values: Values) -> None:
        """Dispatch it on the values of its mesh, which get the results."""
        operands = [values[name] for name in self.operands]
        for position, sharding in self.moves:
            operands[position] = jax.device_put(operands[position], sharding)
        made = self.compiled(*operands)
        values.update(zip(self.results, made, strict=True))
        if self.waits:
            jax.block_until_ready(made)


def is_at(value: Any, sharding: NamedSharding) -> bool:
    """Return whether a value is in its place; comparing shardings takes long where they are not the same object."""
    return (present := getattr(value, "sharding", None)) is sharding or present == sharding


class LoadedJob:
    """A job, ready to run.

    Attributes:
        job: its description.
        order: the instructions with their meshes, in the order of `walk`.
        devices: the devices, by number.
        calls: what its run instructions do.
    """

    def __init__(
        self,
        job: Job,
        devices: Mapping[int, Device],
        compiled: Callable[[Run, Call], Any],
        carrier: Callable[[Delivery], Carrier],
        num_workers: int = 1,
    ) -> None:
        """Compile what runs here of it.

        Args:
            devices: those that are here, and those of other workers that share a mesh with them, by number.
            compiled: returns the compiled program of a run instruction.
            carrier: prepares a delivery.
            num_workers: how many workers run the job.
        """
        self.job, self.order, self.devices = job, job.order, devices
        places = self._places()
        self.calls = {
            run: self._call(call, compiled(run, call), places[mesh])
            for mesh, run in job.order
            if isinstance(run, Run) and (call := job.calls[run])
        }
        carriers: dict[int, Carrier] = {}
        for each in (*job.deliveries.values(), *job.spreads.values()):
            if each.number not in carriers:
                carriers[each.number] = carrier(each)
        self.carriers = {at: carriers[each.number] for at, each in job.deliveries.items()}
        self._tags = {at: each.number * num_workers for at, each in job.deliveries.items()}
        self._spreads = {
            at: (carriers[each.number], each.number * num_workers)
            for at, each in job.spreads.items()
        }
        # What is sent is fetched when its receiver can; until then a task or the next step must not use its memory.
        self._used_up = {
            call.operands[at].name for call in job.calls.values() for at in call.donated
        }
        self._used_up |= {part.name for output in job.outputs for part in output.parts}
        self._zeros = [self._make_zeros(each) for each in job.zeros]
        self._makes = {
            each.number: self._make(each)
            for each in job.outputs
            if each.is_copy or len(each.parts) > 1
        }
        self._inputs = [
            (each, self._split(each) if len(each.parts) > 1 else None) for each in job.inputs
        ]

    def start(
        self,
        kept: Mapping[int, jax.Array],
        given: Mapping[int, np.ndarray | jax.Array],
        tag: int = 0,
    ) -> list[Values]:
        """Return the values of each mesh before the first instruction.

        Args:
            kept: inputs that are where the step wants them.
            given: inputs in host memory.
            tag: the first of the numbers that deliveries of this step have.
        """
        values: list[Values] = [make() for make in self._zeros]
        for (number, _), (carrier, offset) in self._spreads.items():
            if number in kept:
                carrier.send(kept[number], tag + offset, is_used_up=True)
        for each, split in self._inputs:
            if each.number in given:
                whole: Any = given[each.number]
                count = len(each.parts)
                rows = cut_rows(whole, count, self.job.chunks) if count > 1 else [whole]
                parts = [
                    placed(row, part.place, self.devices)
                    for row, part in zip(rows, each.parts, strict=True)
                ]
            elif split is None:
                values[each.mesh][each.parts[0].name] = self._whole(each, kept, tag)
                continue
            else:
                parts = split(self._whole(each, kept, tag))
            values[each.mesh].update(
                (part.name, made) for part, made in zip(each.parts, parts, strict=True)
            )
        return values

    def _whole(self, given: Input, kept: Mapping[int, jax.Array], tag: int) -> jax.Array:
        """An input that is in place, here or at another mesh."""
        if (given.number, given.mesh) not in self._spreads:
            return kept[given.number]
        carrier, offset = self._spreads[given.number, given.mesh]
        return carrier.receive(tag + offset)

    def execute(
        self, mesh: int, instruction: Instruction, values: Sequence[Values], tag: int = 0
    ) -> None:
        """Execute one instruction."""
        match instruction:
            case Run():
                self.calls[instruction].run(values[mesh])
            case Send(name, to):
                at = name, to
                self.carriers[at].send(
                    values[mesh][name], tag + self._tags[at], name in self._used_up
                )
            case Recv(name):
                at = name, mesh
                values[mesh][name] = self.carriers[at].receive(tag + self._tags[at])
            case Free(names):
                for name in names:
                    values[mesh].pop(name, None)
            case _:
                assert_never(instruction)

    def wait_for(self, mesh: int, instruction: Instruction, values: Sequence[Values]) -> None:
        """Wait until an instruction that has been executed on a mesh is done."""
        match instruction:
            case Send(name, to):
                self.carriers[name, to].wait()
            case _:
                wait_for(values[mesh])

    def take(self, output: Output, values: Sequence[Values]) -> jax.Array:
        """Return an output, when all instructions have run."""
        parts = [values[output.mesh][part.name] for part in output.parts]
        make = self._makes.get(output.number)
        return parts[0] if make is None else make(*parts)

    def sharding(self, array: Array) -> NamedSharding:
        """Return where an array is."""
        return array.place.sharding(self.devices)

    def waits(self, call: Call) -> bool:
        """Return whether the results of a call are waited for: see `CompiledCall`."""
        return len(call.devices) > 1 and self.devices[call.devices[0]].platform == "cpu"

    def _call(self, call: Call, compiled: Any, places: Mapping[str, Set[Place]]) -> CompiledCall:
        moves = tuple(
            (position, self.sharding(each))
            for position, each in enumerate(call.operands)
            if places[each.name] != {each.place}
        )
        names = [tuple(each.name for each in arrays) for arrays in (call.operands, call.results)]
        return CompiledCall(compiled, names[0], moves, names[1], self.waits(call))

    def _places(self) -> list[dict[str, set[Place]]]:
        """Where the values of each mesh may be when something reads them."""
        places: list[dict[str, set[Place]]] = [defaultdict(set) for _ in self.job.meshes]
        for mesh, sums in enumerate(self.job.zeros):
            for each in sums:
                places[mesh][each.name].add(each.place)
        for each in self.job.inputs:
            is_there = len(each.parts) == 1 and (each.number, each.mesh) not in self.job.spreads
            for part in each.parts:
                places[each.mesh][part.name].add(each.home.place if is_there else part.place)
        for mesh, instruction in self.job.order:
            match instruction:
                case Run():
                    for each in self.job.calls[instruction].results:
                        places[mesh][each.name].add(each.place)
                case Recv(name):
                    delivery = self.job.deliveries[name, mesh]
                    places[mesh][name].add(Place(delivery.to, delivery.plan.spec))
                case _:
                    pass
        return places

    def _make(self, output: Output) -> Callable[..., jax.Array]:
        sharding = self.sharding(output.whole)
        make = jnp.copy if output.is_copy else partial(join_rows, self.job.chunks)
        return jax.jit(make, in_shardings=(sharding,) * len(output.parts), out_shardings=sharding)

    def _split(self, given: Input) -> Callable[[jax.Array], list[jax.Array]]:
        homes = [self.sharding(part) for part in given.parts]
        return jax.jit(partial(_micro_batches, len(homes), self.job.chunks), out_shardings=homes)

    def _make_zeros(self, sums: Sequence[Array]) -> Callable[[], Values]:
        if not sums:
            return dict
        shardings = [self.sharding(each) for each in sums]
        make = jax.jit(
            lambda: [jnp.zeros(each.shape, each.dtype) for each in sums], out_shardings=shardings
        )
        return lambda: dict(zip((each.name for each in sums), make(), strict=True))


def wait_for(values: Values) -> None:
    """Wait until a mesh has its values."""
    jax.block_until_ready([value for value in values.values() if not value.is_deleted()])


def placed(array: np.ndarray | jax.Array, place: Place, devices: Mapping[int, Device]) -> jax.Array:
    """Return an array of host memory where it should be; of a place that several workers have, this one's part."""
    return jax.make_array_from_callback(
        array.shape, place.sharding(devices), lambda index: array[index]
    )


def _micro_batches(count: int, chunks: int, whole: jax.Array) -> list[jax.Array]:
    return list(cut_rows(whole, count, chunks))
