"""A worker: the devices of one host, the arrays in their memory, and the jobs that run there.

The worker depends neither on Ray nor on plans.
"""

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
from autopar.hosts.errors import HostsError, StepFailedError
from autopar.hosts.timelines import Execute, ExecutedInstruction, Stopwatch
from autopar.hosts.worker_job import WorkerJob
from autopar.lowering.cross_mesh_resharding import Tile
from autopar.lowering.job import Array, Job, Place
from autopar.report.program_text import TaskStatus
from autopar.runtime.batch_reading import Reader
from autopar.runtime.loaded_job import placed
from autopar.runtime.mailbox import Mailbox
from autopar.util import memory_of, zeros
from simulator.memory import MemoryUse
from simulator.program import Run


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """Workers whose devices form one distributed JAX.

    Attributes:
        workers: numbers of the workers, in the order of their JAX process numbers.
        address: address of the coordinator, which runs on the host of the first worker.
    """

    workers: tuple[int, ...]
    address: str


class Worker:
    """Runs jobs on the devices of its process.

    Attributes:
        number: number of this worker and of its host.
        jobs: the loaded jobs by number.
    """

    def __init__(self, number: int, devices: Sequence[Sequence[int]], host: str) -> None:
        """Create a worker without starting JAX.

        `start` does that, because `jax.distributed.initialize` can run only once in a process.

        Args:
            number: number of this worker.
            devices: for each worker the numbers of its devices.
            host: address of this host.
        """
        self.number = number
        self.jobs: dict[int, WorkerJob] = {}
        self._numbers = [tuple(numbers) for numbers in devices]
        self._host = host
        self._owner = {
            device: worker for worker, numbers in enumerate(self._numbers) for device in numbers
        }
        self._devices: dict[int, Device] = {}
        self._mailbox: Mailbox | None = None
        self._arrays: dict[int, jax.Array] = {}
        self._copies: dict[Path, dict[str, np.ndarray]] = {}
        self._readers: dict[int, Reader] = {}
        # (mesh, instruction, when it began) of what this worker is doing.
        self._activity: tuple[int | None, str, float] | None = None
        self._jobs_to_record = 0
        self._recorded: list[ExecutedInstruction] = []

    def do(self, after: None, freed: Sequence[int], x64: bool, method: str, *args: Any) -> Any:
        """Free arrays, then call a method.

        Args:
            after: result of an earlier call. Ray starts this call when that one has ended.
            freed: keys of the arrays.
            x64: whether JAX has arrays of 64 bits in the process that calls.
            method: name of the method.
            args: arguments of the method.
        """
        self.free(freed)
        with jax.enable_x64(x64):
            return getattr(self, method)(*args)

    def start(self, group: ProcessGroup | None = None) -> str:
        """Start JAX, alone or as a member of a group; return the address of the mailbox.

        Raises:
            HostsError: the host has too few devices, or its address or a port is unusable.
        """
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
                f"host {self.number} can't listen for transfers on its address {self._host}:"
                f" {error}"
            ) from None
        return self._mailbox.address

    def meet(self, addresses: Mapping[int, str]) -> None:
        """Set the addresses of the other workers' mailboxes."""
        assert self._mailbox is not None
        self._mailbox.meet(addresses)

    # -- arrays

    def put(self, key: int, array: np.ndarray, place: Place) -> None:
        """Store this worker's shards of an array under `key`."""
        self._arrays[key] = placed(array, place, self._devices)

    def zeros(self, key: int, array: Array) -> None:
        """Store this worker's shards of an array of zeros under `key`."""
        self._arrays[key] = zeros([array.raw], [array.place.sharding(self._devices)])[0]

    def fetch(self, key: int) -> list[tuple[tuple[slice, ...], np.ndarray]]:
        """Return the distinct shards of an array, each with its index in the whole array."""
        shards: dict[Any, tuple[tuple[slice, ...], np.ndarray]] = {}
        for shard in self._arrays[key].addressable_shards:
            bounds = tuple((part.start, part.stop) for part in shard.index)
            if bounds not in shards:
                shards[bounds] = shard.index, np.asarray(shard.data)
        return list(shards.values())

    def free(self, keys: Sequence[int]) -> None:
        """Delete arrays."""
        for key in keys:
            self._arrays.pop(key, None)

    def array_keys(self) -> frozenset[int]:
        """Return the keys of the stored arrays, for tests."""
        return frozenset(self._arrays)

    def wait(self) -> None:
        """Wait until the devices are idle."""
        jax.block_until_ready(list(self._arrays.values()))

    # -- checkpoints

    def copy(self, folder: Path, wanted: Sequence[tuple[int, Mapping[str, Tile]]]) -> None:
        """Copy tiles of arrays to host memory, for `write`.

        Args:
            folder: the folder that `write` will write to.
            wanted: key of each array, and its tiles by name.
        """
        self._copies[folder] = {
            name: value
            for key, tiles in wanted
            for name, value in zip(tiles, copied(self._arrays[key], tiles.values()), strict=True)
        }

    def write(self, after: None, folder: Path, verify: bool) -> dict[str, int]:
        """Write the copied tiles to their folder and return their checksums by name.

        Args:
            after: result of the call of `copy`. Ray starts this call when that one has ended.
            folder: the folder.
            verify: whether to read back what is written.
        """
        return write(folder, self._copies.pop(folder), verify)

    def restore(
        self, folder: Path, wanted: Sequence[tuple[int, SavedArray, Place]], verify: bool
    ) -> CheckpointError | None:
        """Store this worker's shards of the arrays of a checkpoint.

        Args:
            folder: the folder of the checkpoint.
            wanted: key, array and place.
            verify: whether to compare checksums.

        Returns:
            The error, if the checkpoint can't be read. Raising it would make the later calls fail
            that take this call's result as an argument.
        """
        places = [Wanted(saved, place.sharding(self._devices)) for _, saved, place in wanted]
        try:
            arrays = restore(folder, places, verify)
        except CheckpointError as error:
            return error
        self._arrays.update(zip((key for key, _, _ in wanted), arrays, strict=True))
        return None

    # -- batches, read in a thread beside the one that runs steps

    def open_reader(self, number: int, batches: bytes, places: Mapping[int, Place]) -> None:
        """Prepare to read this worker's part of batches.

        Args:
            number: number of the reader.
            batches: a pickled `Batches`.
            places: places of the arrays that have shards on this worker.
        """
        self._readers[number] = open_reader(batches, places, self._devices)

    def read(self, number: int, step: int, keys: Mapping[int, int]) -> None:
        """Read the batch of a step and store its arrays under `keys`."""
        for i, array in self._readers[number].read(step).items():
            self._arrays[keys[i]] = array

    def close_reader(self, number: int, keys: Sequence[int]) -> None:
        """Delete a reader and the arrays that it read in vain."""
        self._readers.pop(number, None)
        self.free(keys)

    # -- jobs

    def load(self, number: int, job: Job) -> float:
        """Compile this worker's part of a job and return the seconds that this took."""
        start = time.perf_counter()
        self._activity = None, "compiling", time.time()
        try:
            self.jobs[number] = WorkerJob(
                job, self.number, self._owner, self._devices, self._mailbox
            )
        finally:
            self._activity = None
        return time.perf_counter() - start

    def unload(self, number: int) -> None:
        """Delete a job."""
        self.jobs.pop(number, None)

    def run(
        self,
        number: int,
        tag: int,
        kept: Mapping[int, int],
        results: Mapping[int, int],
        given: Sequence[int],
        *arrays: np.ndarray,
    ) -> None:
        """Run a step: the instructions of this worker's meshes, in the order of the job.

        `LoadedJob.execute` (`autopar.runtime.loaded_job`) executes each of them.

        Args:
            number: number of the job.
            tag: first of the tags of the step's deliveries.
            kept: keys of the inputs that are in place, on this worker or on others.
            results: for each output the key to store it under.
            given: numbers of the inputs that `arrays` are.
            arrays: the other inputs.

        Raises:
            StepFailedError: an instruction failed.
        """
        loaded = self.jobs[number]
        try:
            local = {i: self._arrays[key] for i, key in kept.items() if key in self._arrays}
            values = loaded.start(local, dict(zip(given, arrays, strict=True)), tag)
            execute = self._stopwatch(loaded.execute) if self._jobs_to_record else loaded.execute
            for mesh, instruction in loaded.job.order:
                self._activity = mesh, str(instruction), time.time()
                execute(mesh, instruction, values, tag)
            for i, array in local.items():
                if array.is_deleted():  # donated
                    del self._arrays[kept[i]]
            for output in loaded.job.outputs:
                if output.number in results:
                    self._arrays[results[output.number]] = loaded.take(output, values)
        except Exception as error:
            mesh, instruction, _ = self._activity or (None, "the arguments", 0.0)
            raise StepFailedError(
                self.number,
                -1 if mesh is None else mesh,
                instruction,
                f"{type(error).__name__}: {error}",
            ) from None
        finally:
            self._activity = None

    # -- inspection

    def record(self, count: int) -> None:
        """Record when the instructions of the next `count` jobs run."""
        self._jobs_to_record, self._recorded = count, []

    def _stopwatch(self, execute: Execute) -> Execute:
        self._jobs_to_record -= 1
        return Stopwatch(execute, self._recorded).execute

    def recorded(self) -> list[ExecutedInstruction]:
        """Return the recorded instructions, on this worker's clock, and clear the record."""
        recorded, self._recorded = self._recorded, []
        return recorded

    def clock(self) -> float:
        """Return the seconds that this worker's clock shows."""
        return time.perf_counter()

    def program_text(self, number: int, run: Run, status: TaskStatus) -> str:
        """Return the program of an instruction, "partitioned" or "optimized"."""
        return self.jobs[number].text(run, status)

    def allocations(self, number: int) -> dict[str, MemoryUse]:
        """Return for each task of a job its bytes on one device, by XLA's buffer assignment."""
        calls = self.jobs[number].calls
        return {run.task: memory_of(call.compiled) for run, call in calls.items()}

    def doing(self) -> tuple[int | None, str, float] | None:
        """Return the mesh and name of the present activity and its seconds so far, or None."""
        activity = self._activity
        if activity is None:
            return None
        mesh, name, begin = activity
        return mesh, name, time.time() - begin

    def free_port(self) -> int:
        """Return a port of this host that is free."""
        return free_port()

    def environment(self) -> dict[str, Any]:
        """Return the versions that must agree on all hosts, and what identifies this process."""
        return {"versions": versions(), "pid": os.getpid(), "host": self._host}
