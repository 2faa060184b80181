"""A job loaded on a worker: compiled programs, prepared deliveries, and how arguments are cut and results joined."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, assert_never

import jax
import jax.numpy as jnp
import numpy as np

from autopar.devices import Device
from autopar.evaluate import FFT_OPTIONS
from autopar.hosts.delivery import Carrier
from autopar.hosts.job import Array, Call, Input, Job, Output, Place
from autopar.hosts.mailbox import Mailbox
from autopar.microbatch.batch_rows import cut_rows, join_rows
from autopar.report.program_text import Status, partitioned
from autopar.runtime import dispatch
from autopar.runtime.argument_placement import Values, micro_batches
from simulator.program import Free, Instruction, Recv, Run, Send


class Loaded:
    """A job, ready to run on a worker.

    Attributes:
        calls: what its run instructions do.
    """

    def __init__(
        self, job: Job, worker: int, owner: Mapping[int, int], devices: Mapping[int, Device], mailbox: Mailbox | None
    ) -> None:
        """Compile what the worker runs of it.

        Args:
            owner: the worker that has each device.
            devices: those of this worker, and of those it shares a mesh with, by number.
        """
        self.job, self._devices, num_workers = job, devices, len(set(owner.values()))
        self._exported = {key: jax.export.deserialize(bytearray(blob)) for key, blob in job.programs.items()}
        compiled: dict[Any, Any] = {}
        self.calls: dict[Run, dispatch.Call] = {}
        for run, call in job.calls.items():
            wanted = [self._sharding(each) for each in call.operands]
            made = [self._sharding(each) for each in call.results]
            key = call.program, tuple(wanted), tuple(made), call.donated
            if key not in compiled:
                compiled[key] = self._lowered(call).compile()
            operands = tuple((each.name, sharding) for each, sharding in zip(call.operands, wanted, strict=True))
            results = tuple(each.name for each in call.results)
            self.calls[run] = dispatch.Call(compiled[key], operands, results, self._waits(call))
        carriers: dict[int, Carrier] = {}
        for each in (*job.deliveries.values(), *job.spreads.values()):
            if each.number not in carriers:
                carriers[each.number] = Carrier(each, worker, owner, devices, mailbox)
        self._carriers = {at: carriers[each.number] for at, each in job.deliveries.items()}
        self._letters = {at: each.number * num_workers for at, each in job.deliveries.items()}
        self._spreads = {at: (carriers[each.number], each.number * num_workers) for at, each in job.spreads.items()}
        # Who receives fetches when it can; until then memory must not be used up by a task or by the next step.
        self._used_up = {call.operands[at].name for call in job.calls.values() for at in call.donated}
        self._used_up |= {part.name for output in job.outputs for part in output.parts}
        self._zeros = [self._make_zeros(each) for each in job.zeros]
        self._makes = {each: self._make(each) for each in job.outputs if each.is_copy or len(each.parts) > 1}
        self._splits = {each: self._split(each) for each in job.inputs if len(each.parts) > 1}

    def start(self, kept: Mapping[int, jax.Array], given: Mapping[int, np.ndarray], letter: int) -> list[Values]:
        """The values of each mesh before the first instruction, of inputs that are in place and of ones that are not."""
        values: list[Values] = [make() for make in self._zeros]
        for (number, _), (carrier, offset) in self._spreads.items():
            if number in kept:
                carrier.send(kept[number], letter + offset, is_used_up=True)
        for each in self.job.inputs:
            count = len(each.parts)
            if each.number in given:
                whole = given[each.number]
                rows = cut_rows(whole, count, self.job.chunks) if count > 1 else [whole]
                parts = [placed(row, part.place, self._devices) for row, part in zip(rows, each.parts, strict=True)]
            else:
                whole = self._whole(each, kept, letter)
                parts = self._splits[each](whole) if count > 1 else [whole]
            values[each.mesh].update((part.name, made) for part, made in zip(each.parts, parts, strict=True))
        return values

    def _whole(self, given: Input, kept: Mapping[int, jax.Array], letter: int) -> jax.Array:
        """An input that is in place, here or at another mesh."""
        if (given.number, given.mesh) not in self._spreads:
            return kept[given.number]
        carrier, offset = self._spreads[given.number, given.mesh]
        return jax.block_until_ready(carrier.receive(letter + offset))

    def execute(self, mesh: int, instruction: Instruction, values: list[Values], letter: int) -> None:
        """One instruction."""
        match instruction:
            case Run():
                self.calls[instruction].run(values[mesh])
            case Send(name, to):
                at = name, to
                self._carriers[at].send(values[mesh][name], letter + self._letters[at], name in self._used_up)
            case Recv(name):
                at = name, mesh
                values[mesh][name] = jax.block_until_ready(self._carriers[at].receive(letter + self._letters[at]))
            case Free(names):
                for name in names:
                    values[mesh].pop(name, None)
            case _:
                assert_never(instruction)

    def take(self, output: Output, values: list[Values]) -> jax.Array:
        """An output, when all instructions have run."""
        parts = [values[output.mesh][part.name] for part in output.parts]
        return self._makes[output](*parts) if output in self._makes else parts[0]

    def _make(self, output: Output) -> Callable[..., jax.Array]:
        sharding = self._sharding(output.whole)
        make = jnp.copy if output.is_copy else partial(join_rows, self.job.chunks)
        return jax.jit(make, in_shardings=(sharding,) * len(output.parts), out_shardings=sharding)

    def _split(self, given: Input) -> Callable[[jax.Array], list[jax.Array]]:
        homes = [self._sharding(part) for part in given.parts]
        return jax.jit(partial(micro_batches, len(homes), self.job.chunks), out_shardings=homes)

    def _make_zeros(self, sums: Sequence[Array]) -> Callable[[], Values]:
        if not sums:
            return dict
        make = jax.jit(
            lambda: [jnp.zeros(each.shape, each.dtype) for each in sums], out_shardings=list(map(self._sharding, sums))
        )
        return lambda: dict(zip((each.name for each in sums), make(), strict=True))

    def _sharding(self, array: Array) -> jax.sharding.NamedSharding:
        return array.place.sharding(self._devices)

    def _waits(self, call: Call) -> bool:
        return len(call.devices) > 1 and self._devices[call.devices[0]].platform == "cpu"

    def text(self, run: Run, status: Status) -> str:
        """The program of an instruction, after a stage of its compilation."""
        if status == "optimized":
            return self.calls[run].compiled.as_text() or ""
        call = self.job.calls[run]
        return partitioned(self._lowered(call), len(call.devices))

    def _lowered(self, call: Call) -> jax.stages.Lowered:
        exported = self._exported[call.program]
        is_fft = self._waits(call) and "stablehlo.fft" in exported.mlir_module()
        jitted = jax.jit(
            partial(_call_exported, exported),
            in_shardings=tuple(map(self._sharding, call.operands)),
            out_shardings=list(map(self._sharding, call.results)),
            donate_argnums=call.donated,
            keep_unused=True,
            compiler_options=FFT_OPTIONS if is_fft else None,
        )
        return jitted.lower(*(each.raw for each in call.operands))


def placed(array: np.ndarray, place: Place, devices: Mapping[int, Device]) -> jax.Array:
    """An array of host memory, where it should be; of a place that several workers have, this one's part."""
    return jax.make_array_from_callback(array.shape, place.sharding(devices), lambda index: array[index])


def _call_exported(exported: Any, *operands: Any) -> list[Any]:
    return list(exported.call(*operands))
