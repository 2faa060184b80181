"""The driver's view of the hosts of a Ray cluster: the jobs, arrays and checkpoints there."""

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from autopar.checkpoint.manifest import CheckpointError, SavedArray, SavedPiece
from autopar.checkpoint.parts import in_part
from autopar.hosts.arrays import DistributedArray, plain
from autopar.hosts.checkpoints import part_of, saved_pieces
from autopar.hosts.clocks import offset
from autopar.hosts.errors import HostLostError, HostsError, HostTimeoutError
from autopar.hosts.reservation import Reservation
from autopar.hosts.timelines import ExecutedInstruction, aligned
from autopar.hosts.worker_processes import Workers, reason
from autopar.lowering.cross_mesh_resharding import tiles
from autopar.lowering.job import Array, Job, Place, worker_groups

_MOST_AHEAD = 16
"""Number of steps that the driver may be ahead of the workers, whose arguments wait in memory."""


@dataclass(frozen=True, slots=True)
class _LoadedJob:
    """What the driver needs to run a job that the workers have compiled.

    Attributes:
        inputs: for each host the numbers of the inputs that it reads.
        meshes: for each host its meshes.
        num_tags: number of tags that the deliveries of one step take.
    """

    inputs: tuple[frozenset[int], ...]
    meshes: Mapping[int, Sequence[int]]
    num_tags: int


class RayHosts(Workers):
    """The hosts of a Ray cluster as one machine that runs jobs and stores arrays.

    Attributes:
        load_seconds: for each host the seconds of compiling its part of the last job.
    """

    def __init__(self, reservation: Reservation, timeout: float) -> None:
        """Start a worker on each reserved host; see `Workers`."""
        self.load_seconds: tuple[float, ...] = ()
        self._keys = itertools.count()
        self._job_numbers = itertools.count()
        self._next_tag = 0
        self._loaded: dict[int, _LoadedJob] = {}
        # Jobs whose executables are garbage.
        self._dropped: deque[int] = deque()
        super().__init__(reservation, timeout)

    def _kill(self) -> None:
        super()._kill()
        self._loaded.clear()

    # -- jobs

    def load(self, job: Job, executable: object = None) -> int:
        """Compile a job on its workers and return its number.

        Args:
            job: the job.
            executable: the object that runs the job. Once it is garbage, the workers unload the
                job, before they compile the next one. None: they keep the job.

        Raises:
            ValueError: the job needs hosts or devices that do not exist.
        """
        self.layout.check_devices(job.meshes)
        self.check()
        self._unload()
        self.form_groups(worker_groups(job.meshes, self.owner))
        number = next(self._job_numbers)
        parts = [job.of(devices) for devices in self.numbers]
        hosts_of_mesh = [set(self.hosts_of(members)) for members in job.meshes]
        self._loaded[number] = _LoadedJob(
            inputs=tuple(frozenset(given.number for given in part.inputs) for part in parts),
            meshes={
                host: [mesh for mesh, hosts in enumerate(hosts_of_mesh) if host in hosts]
                for host in range(len(self.numbers))
            },
            num_tags=job.num_deliveries * len(self.numbers),
        )
        self.load_seconds = tuple(self.ask_all("load", [(number, part) for part in parts]))
        if executable is not None:
            weakref.finalize(executable, self._dropped.append, number).atexit = False
        return number

    def _unload(self) -> None:
        """Unload the jobs whose executables are garbage, after the steps that are pending."""
        while self._dropped:
            number = self._dropped.popleft()
            if self._loaded.pop(number, None) is not None:
                for host in range(len(self.numbers)):
                    self.send(host, "unload", number)

    def run(
        self, number: int, inputs: Sequence[Any], outputs: Mapping[int, Array]
    ) -> dict[int, DistributedArray]:
        """Start a step of a job and return handles of its outputs before it has run.

        Args:
            number: the job.
            inputs: for each input a handle, if it is in place, or an array.
            outputs: type and place of each output.

        Raises:
            HostsError: an earlier step failed, or the workers have ended.
        """
        self.check()
        self.limit_pending(_MOST_AHEAD * len(self.numbers))
        if number not in self._loaded:
            raise HostsError(
                "the workers that the step was compiled on have ended; parallelize it again, after"
                " autopar.init(cluster='ray') if no others have started"
            )
        loaded = self._loaded[number]
        results = {
            o: DistributedArray(self, self._new_key(), array) for o, array in outputs.items()
        }
        kept = {i: leaf.key for i, leaf in enumerate(inputs) if isinstance(leaf, DistributedArray)}
        given = {i: ray.put(plain(leaf)) for i, leaf in enumerate(inputs) if i not in kept}
        for host, wanted in enumerate(loaded.inputs):
            sent = {i: ref for i, ref in given.items() if i in wanted}
            self.send(
                host,
                "run",
                number,
                self._next_tag,
                {i: key for i, key in kept.items() if i in wanted},
                {o: handle.key for o, handle in results.items()},
                list(sent),
                *sent.values(),
            )
        self._next_tag += loaded.num_tags
        self._meshes = loaded.meshes
        return results

    # -- arrays

    def put(self, value: Any, array: Array) -> DistributedArray:
        """Send an array to its place."""
        sent = ray.put(np.asarray(plain(value), array.dtype))
        return self._created(array, "put", sent, array.place)

    def zeros(self, array: Array) -> DistributedArray:
        """Create an array of zeros at its place."""
        return self._created(array, "zeros", array)

    def _created(self, array: Array, method: str, *args: Any) -> DistributedArray:
        handle = DistributedArray(self, self._new_key(), array)
        for host in self.hosts_of(array.place.mesh.devices):
            self.send(host, method, handle.key, *args)
        return handle

    def fetch(self, handles: Sequence[DistributedArray]) -> list[np.ndarray]:
        """Return the arrays in this process; each shard comes from one worker that has it."""
        refs = [
            [(host, self.call(host, "fetch", handle.key)) for host in self._sources(handle.array)]
            for handle in handles
        ]
        arrays = []
        for handle, parts in zip(handles, refs, strict=True):
            value = np.empty(handle.array.shape, handle.array.dtype)
            for host, ref in parts:
                for index, part in self.answer(ref, host):
                    value[index] = part
            arrays.append(value)
        self.check()
        return arrays

    def _sources(self, array: Array) -> list[int]:
        """Return hosts that together have all shards of an array."""
        mesh = array.place.mesh
        seen = set()
        hosts: list[int] = []
        shards = tiles(array.shape, mesh.logical, array.place.spec)
        for device, shard in zip(mesh.devices, shards, strict=True):
            host = self.owner[device]
            if shard not in seen and host not in hosts:
                hosts.append(host)
            seen.add(shard)
        return hosts

    def release(self, key: int) -> None:
        """Mark an array as garbage, in any thread; each worker frees it with its next call."""
        if key in self._live:
            self._live.discard(key)
            for freed in self._freed:
                freed.append(key)

    def free(self) -> None:
        """Make the workers free released arrays now."""
        for host, freed in enumerate(self._freed):
            if freed:
                self.send(host, "free", ())

    def new_keys(self, count: int) -> list[int]:
        """Return keys of arrays that the workers will create."""
        return [self._new_key() for _ in range(count)]

    def is_live(self, key: int) -> bool:
        """Whether the workers still store what has this key."""
        return key in self._live

    def check_place(self, place: Place) -> None:
        """Raise ValueError unless the workers have formed the group that a place needs."""
        devices = place.mesh.devices
        self.layout.check_devices([devices])
        hosts = tuple(self.hosts_of(devices))
        if self._groups is None or (len(hosts) > 1 and hosts not in self._groups):
            raise ValueError(
                f"a placement is on devices {list(devices)} of hosts {list(hosts)}, but no step"
                " that has them as a mesh has been compiled since these workers started; compile"
                " it first, with get_executable for instance"
            )

    def _new_key(self) -> int:
        key = next(self._keys)
        self._live.add(key)
        return key

    # -- recordings

    def recorded(self) -> list[list[ExecutedInstruction]]:
        """Return the instructions that each worker has recorded, on the clock of this process."""
        recordings = []
        for devices in self.numbers:
            first = devices[:1]
            (instructions,) = self.ask(first, "recorded")
            shift = offset(lambda first=first: self.ask(first, "clock")[0])
            recordings.append(aligned(instructions, shift))
        return recordings

    # -- checkpoints

    def save(
        self, folder: Path, handles: Mapping[str, DistributedArray], verify: bool
    ) -> tuple[dict[str, tuple[SavedPiece, ...]], Callable[[], dict[tuple[str, str], int]]]:
        """Copy arrays in the workers' memory; each tile is copied once, by a worker that has it.

        Args:
            folder: the folder of the checkpoint, which all hosts see.
            handles: the arrays by path.
            verify: whether to read back what is written.

        Returns:
            The pieces of each array, and a function that waits, in any thread, until the copies
            are written to `folder`, and returns their checksums by part and name.
        """
        pieces = saved_pieces(handles, self.owner)
        copies: list[tuple[int, Path, Any]] = []
        for host in range(len(self.numbers)):
            part = part_of(host)
            wanted = []
            for path, handle in handles.items():
                own = {piece.name: piece.tile for piece in pieces[path] if piece.part == part}
                if own:
                    wanted.append((handle.key, own))
            if wanted:
                ref = self.call(host, "copy", folder / part, wanted)
                copies.append((host, folder / part, ref))
        self.answers([(host, ref) for host, _, ref in copies])
        writes = [(host, self.call_writer(host, ref, part, verify)) for host, part, ref in copies]
        self._writes = [ref for _, ref in writes]
        return pieces, lambda: self._written(writes)

    def _written(self, writes: Sequence[tuple[int, Any]]) -> dict[tuple[str, str], int]:
        """Return the checksums of written parts.

        All workers have ended their writes before the first error is raised.
        """
        failures: list[Exception] = []
        checksums: dict[tuple[str, str], int] = {}
        for host, ref in writes:
            try:
                checksums |= in_part(part_of(host), ray.get(ref, timeout=self.timeout))
            except RayActorError as error:
                failures.append(HostLostError(host, self.addresses[host], reason(error)))
            except GetTimeoutError:
                cause = f"has been writing a checkpoint for {self.timeout:.0f} s"
                failures.append(HostTimeoutError(host, self.addresses[host], cause))
            except RayError as error:
                cause = getattr(error, "cause", None)
                failures.append(cause if isinstance(cause, CheckpointError) else error)
        if failures:
            raise failures[0] from None
        return checksums

    def restore(
        self, folder: Path, wanted: Sequence[tuple[SavedArray, Place]], verify: bool
    ) -> list[DistributedArray]:
        """Restore the arrays of a checkpoint; each worker reads its shards.

        Args:
            folder: the folder of the checkpoint, which all hosts see.
            wanted: arrays and their places.
            verify: whether to compare checksums.

        Raises:
            CheckpointError: a worker can't read its shards.
        """
        self.check()
        meshes = {place.mesh.devices for _, place in wanted}
        self.layout.check_devices(meshes)
        self.form_groups(worker_groups(meshes, self.owner))
        handles = []
        for saved, place in wanted:
            array = Array(saved.path, saved.shape, saved.jax_dtype, place, saved.key)
            handles.append(DistributedArray(self, self._new_key(), array))
        refs = []
        for host in range(len(self.numbers)):
            own = [
                (handle.key, saved, place)
                for handle, (saved, place) in zip(handles, wanted, strict=True)
                if host in self.hosts_of(place.mesh.devices)
            ]
            if own:
                refs.append((host, self.call(host, "restore", folder, own, verify)))
        for error in self.answers(refs, is_slow=True):
            if error is not None:
                raise error
        return handles
