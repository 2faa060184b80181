"""A worker: the devices of one host, what they hold, and the instructions that run there. It knows nothing of Ray, nor of plans."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, assert_never

import jax
import jax.numpy as jnp
import numpy as np

from autopar.checkpoint.manifest import SavedArray
from autopar.checkpoint.parts import Wanted, copied, restore, write
from autopar.devices import Device
from autopar.hosts.carrier import Carrier
from autopar.hosts.environment import check_port, devices_of, free_port, versions
from autopar.hosts.errors import HostsError
from autopar.hosts.job import Array, Call, Input, Job, Output, Place
from autopar.hosts.mailbox import Mailbox
from autopar.hosts.reading import open_reader
from autopar.hosts.timelines import Execute, Note, Stopwatch
from autopar.inspect.hlo import Status, partitioned
from autopar.pipeline.resharding import Tile
from autopar.runtime import dispatch
from autopar.runtime.arguments import Values, joined_parts, micro_batches
from autopar.runtime.reading import Reader
from autopar.target import memory_of
from autopar.util import zeros
from simulator.memory import MemoryUse
from simulator.program import Free, Instruction, Recv, Run, Send


class InstructionError(RuntimeError):
    """An instruction has failed on a worker.

    Attributes:
        worker, mesh, instruction: where, and which one.
    """

    def __init__(self, worker: int, mesh: int, instruction: str, cause: str) -> None:
        super().__init__(worker, mesh, instruction, cause)
        self.worker, self.mesh, self.instruction, self.cause = worker, mesh, instruction, cause

    def __str__(self) -> str:
        return f"host {self.worker}, mesh {self.mesh}, instruction {self.instruction}: {self.cause}"


@dataclass(frozen=True, slots=True)
class Group:
    """Workers whose devices form one distributed JAX.

    Attributes:
        workers: in the order of their process numbers.
        address: of the coordinator, on the first one's host.
    """

    workers: tuple[int, ...]
    address: str


class Worker:
    """Runs jobs on the devices of its process.

    Attributes:
        number: of this worker, and of its host.
    """

    def __init__(self, number: int, devices: Sequence[Sequence[int]], host: str) -> None:
        """Nothing is started yet: JAX can be told only once what it is part of.

        Args:
            devices: the numbers of every worker's devices.
            host: the address of this host.
        """
        self.number, self._numbers, self._host = number, [tuple(each) for each in devices], host
        self._owner = {device: worker for worker, mine in enumerate(self._numbers) for device in mine}
        self._devices: dict[int, Device] = {}
        self._mailbox: Mailbox | None = None
        self._arrays: dict[int, jax.Array] = {}
        self._jobs: dict[int, _Loaded] = {}
        self._copies: dict[Path, dict[str, np.ndarray]] = {}
        self._now: tuple[int, str, float] | None = None
        self._records, self._notes = False, list[Note]()
        self._readers: dict[int, Reader] = {}

    def do(self, after: None, method: str, *args: Any) -> Any:
        """Call a method, `after` another call has ended."""
        return getattr(self, method)(*args)

    def start(self, group: Group | None = None) -> str:
        """Start JAX, by itself or as a part of a group; the address of the mailbox."""
        members = (self.number,) if group is None else group.workers
        if group is not None:
            if members[0] == self.number:
                check_port(self.number, group.address)
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(group.address, len(members), members.index(self.number))
        self._devices = devices_of(members, self._numbers, self.number, self._host)
        try:
            self._mailbox = Mailbox(jax.local_devices()[0], self._host)
        except RuntimeError as error:
            raise HostsError(
                f"host {self.number} can't listen for transfers on its address {self._host}: {error}"
            ) from None
        return self._mailbox.address

    def meet(self, addresses: Mapping[int, str]) -> None:
        """Learn where the other workers' mailboxes are."""
        assert self._mailbox is not None
        self._mailbox.meet(addresses)

    # -- arrays

    def put(self, key: int, array: np.ndarray, place: Place) -> None:
        """Keep this worker's part of an array under `key`."""
        self._arrays[key] = self._placed(array, place)

    def zeros(self, key: int, array: Array) -> None:
        """Keep this worker's part of an array of zeros."""
        self._arrays[key] = zeros([array.raw], [array.place.sharding(self._devices)])[0]

    def fetch(self, key: int) -> list[tuple[tuple[slice, ...], np.ndarray]]:
        """This worker's parts of an array, each once, with what they are of the whole."""
        found: dict[Any, tuple[tuple[slice, ...], np.ndarray]] = {}
        for shard in self._arrays[key].addressable_shards:
            bounds = tuple((each.start, each.stop) for each in shard.index)
            if bounds not in found:
                found[bounds] = tuple(slice(*each) for each in bounds), np.asarray(shard.data)
        return list(found.values())

    def free(self, keys: Sequence[int]) -> None:
        """Forget arrays."""
        for key in keys:
            self._arrays.pop(key, None)

    def num_arrays(self) -> int:
        """How many arrays are kept for the driver."""
        return len(self._arrays)

    def wait(self) -> None:
        """Wait until the devices have nothing left to do."""
        jax.block_until_ready(list(self._arrays.values()))

    def _placed(self, array: np.ndarray, place: Place) -> jax.Array:
        return jax.make_array_from_callback(array.shape, place.sharding(self._devices), lambda index: array[index])

    # -- checkpoints

    def copy(self, folder: Path, wanted: Sequence[tuple[int, Mapping[str, Tile]]]) -> None:
        """Copy named tiles of arrays, given by key, for `write`."""
        self._copies[folder] = {
            name: value
            for key, tiles in wanted
            for name, value in zip(tiles, copied(self._arrays[key], tiles.values()), strict=True)
        }

    def write(self, after: None, folder: Path) -> None:
        """Write what was copied for a folder, `after` that."""
        write(folder, self._copies.pop(folder))

    def restore(self, folder: Path, wanted: Sequence[tuple[int, SavedArray, Place]]) -> None:
        """Keep this worker's parts of the arrays of a checkpoint under their keys."""
        places = [Wanted(saved, place.sharding(self._devices)) for _, saved, place in wanted]
        self._arrays.update(zip((key for key, _, _ in wanted), restore(folder, places), strict=True))

    # -- reading batches, in a thread beside the one that runs steps

    def open_reader(self, number: int, batches: bytes, places: Mapping[int, Place]) -> None:
        """Get ready to read what this worker takes of batches: arrays in these places. `batches` is a pickled `Batches`."""
        self._readers[number] = open_reader(batches, places, self._devices)

    def read(self, number: int, step: int, keys: Mapping[int, int]) -> None:
        """Read batch `step` and keep its arrays under `keys`."""
        for i, array in self._readers[number].read(step).items():
            self._arrays[keys[i]] = array

    def close_reader(self, number: int, keys: Sequence[int]) -> None:
        """Read no more, and forget arrays that nobody has asked for."""
        self._readers.pop(number, None)
        self.free(keys)

    # -- jobs

    def load(self, number: int, job: Job) -> float:
        """Compile what this worker runs of a job; the seconds that took."""
        start = time.perf_counter()
        self._jobs[number] = _Loaded(job, self)
        return time.perf_counter() - start

    def run(
        self,
        number: int,
        letter: int,
        kept: Mapping[int, int],
        results: Mapping[int, int],
        freed: Sequence[int],
        given: Sequence[int],
        *arrays: np.ndarray,
    ) -> None:
        """Run a step.

        Args:
            letter: the first of the numbers that its deliveries have.
            kept: inputs that are in place already, on this worker or on others, with their keys.
            results: for each output the key that it gets.
            freed: keys of arrays that nobody needs any more.
            given: inputs that are not, which `arrays` are.

        Raises:
            InstructionError: an instruction failed.
        """
        self.free(freed)
        loaded = self._jobs[number]
        try:
            here = {i: self._arrays[key] for i, key in kept.items() if key in self._arrays}
            values = loaded.start(here, dict(zip(given, arrays, strict=True)), letter)
            execute = self._stopwatch(loaded.execute) if self._records else loaded.execute
            for mesh, instruction in loaded.job.order:
                self._now = mesh, str(instruction), time.time()
                execute(mesh, instruction, values, letter)
            for i, array in here.items():
                if array.is_deleted():  # donated
                    del self._arrays[kept[i]]
            for output in loaded.job.outputs:
                if output.number in results:
                    self._arrays[results[output.number]] = loaded.take(output, values)
        except Exception as error:
            mesh, instruction, _ = self._now or (-1, "the arguments", 0.0)
            raise InstructionError(self.number, mesh, instruction, f"{type(error).__name__}: {error}") from None
        finally:
            self._now = None

    # -- looking at them

    def record(self) -> None:
        """Note when the instructions of the next step run."""
        self._records = True

    def _stopwatch(self, execute: Execute) -> Execute:
        stopwatch = Stopwatch(execute)
        self._records, self._notes = False, stopwatch.notes
        return stopwatch.execute

    def recorded(self) -> list[Note]:
        """What has been noted, by `clock`."""
        notes, self._notes = self._notes, []
        return notes

    def clock(self) -> float:
        """Seconds by the clock of this host."""
        return time.perf_counter()

    def program_text(self, number: int, run: Run, status: Status) -> str:
        """The program of an instruction: "partitioned", or "optimized" as it runs."""
        return self._jobs[number].text(run, status)

    def allocations(self, number: int) -> dict[str, MemoryUse]:
        """Bytes on one device for each task of a job, by the compiler's buffer assignment."""
        return {run.task: memory_of(call.compiled) for run, call in self._jobs[number].calls.items()}

    def doing(self) -> tuple[int, str, float] | None:
        """The mesh and the instruction that is being carried out, and for how many seconds."""
        now = self._now
        return None if now is None else (now[0], now[1], time.time() - now[2])

    def free_port(self) -> int:
        """A port of this host that nobody listens on."""
        return free_port()

    def environment(self) -> dict[str, Any]:
        """What must be the same on all hosts, and what tells this process from others."""
        return {"versions": versions(), "pid": os.getpid(), "host": self._host}


class _Loaded:
    """A job, ready to run on a worker."""

    def __init__(self, job: Job, worker: Worker) -> None:
        self.job = job
        self._devices, self._place = worker._devices, worker._placed
        self._mine = frozenset(worker._numbers[worker.number])
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
                carriers[each.number] = Carrier(each, worker.number, worker._owner, self._devices, worker._mailbox)
        self._carriers = {at: carriers[each.number] for at, each in job.deliveries.items()}
        self._letters = {at: each.number * len(worker._numbers) for at, each in job.deliveries.items()}
        self._spreads = {
            at: (carriers[each.number], each.number * len(worker._numbers)) for at, each in job.spreads.items()
        }
        # Who receives fetches when it can; until then memory must not be used up by a task or by the next step.
        self._used_up = {call.operands[at].name for call in job.calls.values() for at in call.donated}
        self._used_up |= {part.name for output in job.outputs for part in output.parts}
        self._zeros = [self._make_zeros(each) for each in job.zeros]
        self._joins = {each: self._join(each) for each in job.outputs if len(each.parts) > 1}
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
                rows = (given[each.number][k::count] if count > 1 else given[each.number] for k in range(count))
                parts = [self._place(row, part.place) for row, part in zip(rows, each.parts, strict=True)]
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
        return self._joins[output](*parts) if output in self._joins else parts[0]

    def _join(self, output: Output) -> Callable[..., jax.Array]:
        sharding = self._sharding(output.whole)
        return jax.jit(joined_parts, in_shardings=(sharding,) * len(output.parts), out_shardings=sharding)

    def _split(self, given: Input) -> Callable[[jax.Array], list[jax.Array]]:
        homes = [self._sharding(part) for part in given.parts]
        return jax.jit(partial(micro_batches, len(homes)), out_shardings=homes)

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
        jitted = jax.jit(
            partial(_call_exported, self._exported[call.program]),
            in_shardings=tuple(map(self._sharding, call.operands)),
            out_shardings=list(map(self._sharding, call.results)),
            donate_argnums=call.donated,
            keep_unused=True,
        )
        return jitted.lower(*(each.raw for each in call.operands))


def _call_exported(exported: Any, *operands: Any) -> list[Any]:
    return list(exported.call(*operands))
