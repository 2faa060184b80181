"""A job loaded on devices: compiled programs, prepared deliveries, and inputs and outputs.

The same class serves the devices of this process and a worker that has some of a job's devices.
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
from autopar.microbatch.batch_rows import cut_rows
from simulator.program import Free, Instruction, Recv, Run, Send

type Values = dict[str, jax.Array]
"""The values on a mesh by name (`autopar.lowering.instructions.Names`)."""


class Carrier(Protocol):
    """Transfers the value of one delivery from mesh to mesh, once in each step."""

    def send(self, value: jax.Array, tag: int, is_used_up: bool) -> None:
        """Make the value available to the receivers.

        Args:
            value: the value on the sending mesh.
            tag: distinguishes the transfer from all others that are in flight.
            is_used_up: whether the memory of the value may be reused before it is received.
        """
        ...

    def receive(self, tag: int) -> jax.Array:
        """Return the value on the receiving mesh."""
        ...

    def wait(self) -> None:
        """Wait until the values that were sent may be received."""
        ...


@dataclass(frozen=True, slots=True)
class CompiledCall:
    """A run instruction that is ready for dispatch.

    Attributes:
        compiled: the program.
        operands: names of its operands.
        moves: positions of operands that may have another sharding, and the sharding to move to.
        results: names of its results.
        waits: whether the results must be ready before the next instruction begins. Virtual
            devices block a thread each in a collective, and several programs in flight could
            block all threads.
    """

    compiled: Any
    operands: tuple[str, ...]
    moves: tuple[tuple[int, NamedSharding], ...]
    results: tuple[str, ...]
    waits: bool

    def run(self, values: Values) -> None:
        """Dispatch the program on the values of its mesh, and add the results to them."""
        operands = [values[name] for name in self.operands]
        for position, sharding in self.moves:
            operands[position] = jax.device_put(operands[position], sharding)
        results = self.compiled(*operands)
        values.update(zip(self.results, results, strict=True))
        if self.waits:
            jax.block_until_ready(results)


def is_at(value: Any, sharding: NamedSharding) -> bool:
    """Return whether a value has a sharding; comparing identical objects first saves time."""
    present = getattr(value, "sharding", None)
    return present is sharding or present == sharding


class LoadedJob:
    """A job that is ready to run.

    Attributes:
        job: the job.
        order: the instructions with their meshes, in the order of `walk`.
        devices: the devices by number.
        calls: the compiled run instructions.
        carriers: for each value and receiving mesh the carrier of the delivery.
    """

    def __init__(
        self,
        job: Job,
        devices: Mapping[int, Device],
        compiled: Callable[[Run, Call], Any],
        carrier: Callable[[Delivery], Carrier],
        num_workers: int = 1,
    ) -> None:
        """Compile the job's programs and prepare its deliveries.

        Args:
            job: the job, or the part of it that runs on these devices.
            devices: by number, the devices of this process and of the processes that share a mesh
                with it.
            compiled: returns the compiled program of a run instruction.
            carrier: returns the carrier of a delivery.
            num_workers: number of workers that run the job; a delivery has a tag for each.
        """
        self.job = job
        self.order = job.order
        self.devices = devices
        places = self._places()
        self.calls = {
            run: self._call(job.calls[run], compiled(run, job.calls[run]), places[mesh])
            for mesh, run in job.order
            if isinstance(run, Run)
        }
        by_number: dict[int, Carrier] = {}
        for delivery in (*job.deliveries.values(), *job.spreads.values()):
            if delivery.number not in by_number:
                by_number[delivery.number] = carrier(delivery)
        self.carriers = {at: by_number[delivery.number] for at, delivery in job.deliveries.items()}
        self._tags = {at: delivery.number * num_workers for at, delivery in job.deliveries.items()}
        self._spreads = {
            at: (by_number[delivery.number], delivery.number * num_workers)
            for at, delivery in job.spreads.items()
        }
        # The receiver fetches a value when it can. Until then no task and no later step may
        # reuse the value's memory.
        self._used_up = {
            call.operands[at].name for call in job.calls.values() for at in call.donated
        }
        self._used_up |= {output.value.name for output in job.outputs}
        self._zeros = [self._make_zeros(sums) for sums in job.zeros]
        self._copies = {
            output.number: self._copier(output) for output in job.outputs if output.is_copy
        }
        self._inputs = [
            (
                given,
                given.parts[0].name if self._is_in_place(given) else None,
                self._splitter(given) if len(given.parts) > 1 else None,
            )
            for given in job.inputs
        ]
        self._positions = {
            given.mesh: self._given_parts(given, np.arange(*given.home.shape, dtype=np.int32))
            for given in job.inputs
            if given.number == job.positions
        }

    def start(
        self,
        kept: Mapping[int, jax.Array],
        given: Mapping[int, np.ndarray | jax.Array],
        tag: int = 0,
    ) -> list[Values]:
        """Return the values of each mesh before the first instruction.

        Args:
            kept: inputs that are sharded as the plan says, by number.
            given: inputs elsewhere, for example in host memory, by number.
            tag: first of the tags of the step's deliveries.
        """
        values: list[Values] = [make() for make in self._zeros]
        for (number, _), (carrier, offset) in self._spreads.items():
            if number in kept:
                carrier.send(kept[number], tag + offset, is_used_up=True)
        for job_input, name, split in self._inputs:
            if name is not None and job_input.number in kept:  # a step may have hundreds of these
                values[job_input.mesh][name] = kept[job_input.number]
                continue
            if job_input.number == self.job.positions:
                parts = self._positions[job_input.mesh]
            elif job_input.number in given:
                parts = self._given_parts(job_input, given[job_input.number])
            elif split is None:
                parts = [self._whole(job_input, kept, tag)]
            else:
                parts = split(self._whole(job_input, kept, tag))
            names = (part.name for part in job_input.parts)
            values[job_input.mesh].update(zip(names, parts, strict=True))
        return values

    def _is_in_place(self, job_input: Input) -> bool:
        """Return whether a mesh reads an input as it is, if it is sharded as the plan says."""
        at = job_input.number, job_input.mesh
        return (
            len(job_input.parts) == 1
            and at not in self.job.spreads
            and job_input.number != self.job.positions
        )

    def _given_parts(self, job_input: Input, whole: Any) -> list[jax.Array]:
        """Return the parts of an input from elsewhere on their mesh."""
        count = len(job_input.parts)
        rows = cut_rows(whole, count, self.job.chunks) if count > 1 else [whole]
        return [
            placed(row, part.place, self.devices)
            for row, part in zip(rows, job_input.parts, strict=True)
        ]

    def _whole(self, job_input: Input, kept: Mapping[int, jax.Array], tag: int) -> jax.Array:
        """Return an input that is in place on its own mesh or on another one."""
        at = job_input.number, job_input.mesh
        if at not in self._spreads:
            return kept[job_input.number]
        carrier, offset = self._spreads[at]
        return carrier.receive(tag + offset)

    def run(
        self, kept: Mapping[int, jax.Array], given: Mapping[int, np.ndarray | jax.Array]
    ) -> list[Values]:
        """Execute all instructions, and return the values of each mesh after the last one.

        Args:
            kept: inputs that are sharded as the plan says, by number.
            given: inputs elsewhere, by number.
        """
        values = self.start(kept, given)
        for mesh, instruction in self.order:
            self.execute(mesh, instruction, values)
        return values

    def execute(
        self, mesh: int, instruction: Instruction, values: Sequence[Values], tag: int = 0
    ) -> None:
        """Execute one instruction of a mesh.

        Args:
            mesh: number of the mesh.
            instruction: the instruction.
            values: the values of all meshes, which are updated.
            tag: first of the tags of the step's deliveries.
        """
        match instruction:
            case Run():
                self.calls[instruction].run(values[mesh])
            case Send(name, to):
                at = name, to
                is_used_up = name in self._used_up
                self.carriers[at].send(values[mesh][name], tag + self._tags[at], is_used_up)
            case Recv(name):
                at = name, mesh
                values[mesh][name] = self.carriers[at].receive(tag + self._tags[at])
            case Free(names):
                for name in names:
                    values[mesh].pop(name, None)
            case _:
                assert_never(instruction)

    def wait_for(self, mesh: int, instruction: Instruction, values: Sequence[Values]) -> None:
        """Wait until an instruction that has been executed is complete."""
        match instruction:
            case Send(name, to):
                self.carriers[name, to].wait()
            case _:
                wait_for(values[mesh])

    def take(self, output: Output, values: Sequence[Values]) -> jax.Array:
        """Return an output after the last instruction."""
        value = values[output.mesh][output.value.name]
        copy = self._copies.get(output.number)
        return value if copy is None else copy(value)

    def sharding(self, array: Array) -> NamedSharding:
        """Return the sharding of an array on the devices."""
        return array.place.sharding(self.devices)

    def waits(self, call: Call) -> bool:
        """Return whether the results of a call must be ready before the next instruction begins."""
        return len(call.devices) > 1 and self.devices[call.devices[0]].platform == "cpu"

    def _call(self, call: Call, compiled: Any, places: Mapping[str, Set[Place]]) -> CompiledCall:
        moves = tuple(
            (position, self.sharding(operand))
            for position, operand in enumerate(call.operands)
            if places[operand.name] != {operand.place}
        )
        operands = tuple(operand.name for operand in call.operands)
        results = tuple(result.name for result in call.results)
        return CompiledCall(compiled, operands, moves, results, self.waits(call))

    def _places(self) -> list[dict[str, set[Place]]]:
        """Return for each mesh the places that a value may have when an instruction reads it."""
        places: list[dict[str, set[Place]]] = [defaultdict(set) for _ in self.job.meshes]
        for mesh, sums in enumerate(self.job.zeros):
            for array in sums:
                places[mesh][array.name].add(array.place)
        for job_input in self.job.inputs:
            is_spread = (job_input.number, job_input.mesh) in self.job.spreads
            is_unchanged = len(job_input.parts) == 1 and not is_spread
            for part in job_input.parts:
                place = job_input.home.place if is_unchanged else part.place
                places[job_input.mesh][part.name].add(place)
        for mesh, instruction in self.job.order:
            match instruction:
                case Run():
                    for result in self.job.calls[instruction].results:
                        places[mesh][result.name].add(result.place)
                case Recv(name):
                    delivery = self.job.deliveries[name, mesh]
                    places[mesh][name].add(Place(delivery.to, delivery.plan.spec))
                case _:
                    pass
        return places

    def _copier(self, output: Output) -> Callable[[jax.Array], jax.Array]:
        """Compile the function that copies an output."""
        sharding = self.sharding(output.value)
        return jax.jit(jnp.copy, in_shardings=sharding, out_shardings=sharding)

    def _splitter(self, job_input: Input) -> Callable[[jax.Array], list[jax.Array]]:
        """Compile the function that cuts an input into microbatches."""
        shardings = [self.sharding(part) for part in job_input.parts]
        return jax.jit(
            partial(_micro_batches, len(shardings), self.job.chunks), out_shardings=shardings
        )

    def _make_zeros(self, sums: Sequence[Array]) -> Callable[[], Values]:
        """Compile the function that returns the initial sums of a mesh."""
        if not sums:
            return dict
        names = [array.name for array in sums]
        make = jax.jit(
            lambda: [jnp.zeros(array.shape, array.dtype) for array in sums],
            out_shardings=[self.sharding(array) for array in sums],
        )
        return lambda: dict(zip(names, make(), strict=True))


def wait_for(values: Values) -> None:
    """Wait until the values of a mesh are ready."""
    jax.block_until_ready([value for value in values.values() if not value.is_deleted()])


def placed(array: np.ndarray | jax.Array, place: Place, devices: Mapping[int, Device]) -> jax.Array:
    """Return an array at its place.

    If several processes share the place, this one gets its own shards.

    Args:
        array: the whole array.
        place: the place.
        devices: the devices by number.
    """
    return jax.make_array_from_callback(
        array.shape, place.sharding(devices), lambda index: array[index]
    )


def _micro_batches(count: int, chunks: int, whole: jax.Array) -> list[jax.Array]:
    return list(cut_rows(whole, count, chunks))
