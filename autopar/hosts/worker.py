"""A worker: the devices of one host, what they hold, and the jobs that run there. It knows nothing of Ray, nor of plans."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autopar.checkpoint.manifest import CheckpointError, SavedArray
from autopar.checkpoint.parts import Wanted, copied, restore, write
from autopar.devices import Device
from autopar.hosts.batch_threads import open_reader
from autopar.hosts.environment import check_port, devices_of, free_port, versions
from autopar.hosts.errors import HostsError
from autopar.hosts.mailbox import Mailbox
from autopar.hosts.timelines import Execute, Note, Stopwatch
from autopar.hosts.worker_job import WorkerJob
from autopar.lowering.cross_mesh_resharding import Tile
from autopar.lowering.job import Array, Job, Place
from autopar.report.program_text import TaskStatus
from autopar.runtime.batch_reading import Reader
from autopar.runtime.loaded_job import placed
from autopar.util import memory_of, zeros
from simulator.memory import MemoryUse
from simulator.program import Run


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
        self._owner = {
            device: worker for worker, mine in enumerate(self._numbers) for device in mine
        }
        self._devices: dict[int, Device] = {}
        self._mailbox: Mailbox | None = None
        self._arrays: dict[int, jax.Array] = {}
        self._jobs: dict[int, WorkerJob] = {}
        self._copies: dict[Path, dict[str, np.ndarray]] = {}
        self._now: tuple[int | None, str, float] | None = None
        self._records, self._notes = False, list[Note]()
        self._readers: dict[int, Reader] = {}

    def do(self, after: None, freed: Sequence[int], method: str, *args: Any) -> Any:
        """Call a method, `after` another call has ended and arrays that nobody needs any more are forgotten."""
        self.free(freed)
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
        self._arrays[key] = placed(array, place, self._devices)

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

    # -- checkpoints

    def copy(self, folder: Path, wanted: Sequence[tuple[int, Mapping[str, Tile]]]) -> None:
        """Copy named tiles of arrays, given by key, for `write`."""
        self._copies[folder] = {
            name: value
            for key, tiles in wanted
            for name, value in zip(tiles, copied(self._arrays[key], tiles.values()), strict=True)
        }

    def write(self, after: None, folder: Path, verify: bool) -> dict[str, int]:
        """Write what was copied for a folder, `after` that, and return its checksums by name."""
        return write(folder, self._copies.pop(folder), verify)

    def restore(
        self, folder: Path, wanted: Sequence[tuple[int, SavedArray, Place]], verify: bool
    ) -> CheckpointError | None:
        """Keep this worker's parts of the arrays of a checkpoint under their keys.

        Returns:
            What is wrong with the checkpoint. It is not raised, because later calls wait for this one and would fail of it.
        """
        places = [Wanted(saved, place.sharding(self._devices)) for _, saved, place in wanted]
        try:
            self._arrays.update(
                zip((key for key, _, _ in wanted), restore(folder, places, verify), strict=True)
            )
        except CheckpointError as error:
            return error
        return None

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
        self._now = None, "compiling", time.time()
        try:
            self._jobs[number] = WorkerJob(
                job, self.number, self._owner, self._devices, self._mailbox
            )
        finally:
            self._now = None
        return time.perf_counter() - start

    def unload(self, number: int) -> None:
        """Forget a job."""
        self._jobs.pop(number, None)

    def num_jobs(self) -> int:
        """How many jobs are kept for the driver."""
        return len(self._jobs)

    def run(
        self,
        number: int,
        letter: int,
        kept: Mapping[int, int],
        results: Mapping[int, int],
        given: Sequence[int],
        *arrays: np.ndarray,
    ) -> None:
        """Run a step.

        Args:
            letter: the first of the numbers that its deliveries have.
            kept: inputs that are in place already, on this worker or on others, with their keys.
            results: for each output the key that it gets.
            given: inputs that are not, which `arrays` are.

        Raises:
            InstructionError: an instruction failed.
        """
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
            mesh, instruction, _ = self._now or (None, "the arguments", 0.0)
            raise InstructionError(
                self.number,
                -1 if mesh is None else mesh,
                instruction,
                f"{type(error).__name__}: {error}",
            ) from None
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

    def program_text(self, number: int, run: Run, status: TaskStatus) -> str:
        """The program of an instruction: "partitioned", or "optimized" as it runs."""
        return self._jobs[number].text(run, status)

    def allocations(self, number: int) -> dict[str, MemoryUse]:
        """Bytes on one device for each task of a job, by the compiler's buffer assignment."""
        return {
            run.task: memory_of(call.compiled) for run, call in self._jobs[number].calls.items()
        }

    def doing(self) -> tuple[int | None, str, float] | None:
        """The mesh and the instruction that is being carried out, or what else, and for how many seconds."""
        now = self._now
        return None if now is None else (now[0], now[1], time.time() - now[2])

    def free_port(self) -> int:
        """A port of this host that nobody listens on."""
        return free_port()

    def environment(self) -> dict[str, Any]:
        """What must be the same on all hosts, and what tells this process from others."""
        return {"versions": versions(), "pid": os.getpid(), "host": self._host}
