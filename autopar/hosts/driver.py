"""Hosts of a Ray cluster seen from the driver: the steps and arrays that live there."""

import itertools
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from autopar.checkpoint.manifest import CheckpointError, SavedArray, SavedPiece
from autopar.checkpoint.parts import in_part
from autopar.devices import Devices, cluster_of_kind
from autopar.hosts.arrays import DistributedArray, plain
from autopar.hosts.checkpoints import part_of, saved_pieces
from autopar.hosts.clocks import offset
from autopar.hosts.errors import HostLostError, HostsError, HostTimeoutError
from autopar.hosts.timelines import Note, aligned
from autopar.hosts.workers import Workers, reason
from autopar.lowering.cross_mesh_resharding import tiles
from autopar.lowering.job import Array, Job, Place, worker_groups
from autopar.plan import Plan
from simulator.hardware.cluster import Cluster
from simulator.hardware.heterogeneous import AnyCluster, HeterogeneousCluster

_MOST_AHEAD = 16
"""How many steps workers may have been asked for that they have not done: what they are given waits in memory."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What a step of a job needs of the driver: inputs and meshes of each host, and how many numbers its deliveries take."""

    inputs: tuple[frozenset[int], ...]
    meshes: Mapping[int, Sequence[int]]
    num_letters: int


class RayHosts(Workers):
    """The hosts of a Ray cluster that has been joined, for steps to run on.

    Attributes:
        load_seconds: for each host, what compiling its part of the last job took.
    """

    def __init__(
        self,
        num_nodes: int | None,
        num_devices_per_node: int | Sequence[int] | None,
        timeout: float,
    ) -> None:
        self.load_seconds: tuple[float, ...] = ()
        self._keys, self._jobs, self._letter = itertools.count(), itertools.count(), 0
        self._loaded: dict[int, _Loaded] = {}
        self._dropped: deque[int] = deque()  # jobs whose executables are gone
        super().__init__(num_nodes, num_devices_per_node, timeout)

    def _kill(self) -> None:
        super()._kill()
        self._loaded.clear()

    # -- jobs

    def load(self, job: Job, executable: object = None) -> int:
        """Compile a job on its workers; its number.

        Args:
            executable: what runs the job. Once it is garbage, the workers forget the job, before they compile the next one; None:
                they keep the job.

        Raises:
            ValueError: it needs hosts or devices that are not there.
        """
        self._check_devices(job.meshes)
        self.check()
        self._unload()
        self._join(worker_groups(job.meshes, self.owner))
        number = next(self._jobs)
        parts = [job.of(devices) for devices in self.numbers]
        inputs = tuple(frozenset(each.number for each in part.inputs) for part in parts)
        meshes = {
            host: [
                mesh for mesh, members in enumerate(job.meshes) if host in self.hosts_of(members)
            ]
            for host in range(len(self.numbers))
        }
        self._loaded[number] = _Loaded(inputs, meshes, job.num_deliveries * len(self.numbers))
        self.load_seconds = tuple(self._ask("load", [(number, part) for part in parts]))
        if executable is not None:
            weakref.finalize(executable, self._dropped.append, number).atexit = False
        return number

    def _unload(self) -> None:
        """Have the workers forget the jobs that nothing runs any more, after all steps that they have been asked for."""
        while self._dropped:
            number = self._dropped.popleft()
            if self._loaded.pop(number, None) is not None:
                for host in range(len(self.numbers)):
                    self._pending.append((host, self._call(host, "unload", number)))

    def num_jobs(self) -> list[int]:
        """How many jobs each worker keeps."""
        return self._ask("num_jobs")

    def _check_devices(self, meshes: Iterable[Iterable[int]]) -> None:
        needed = max(device for mesh in meshes for device in mesh) + 1
        if needed > self.num_devices:
            raise ValueError(
                f"the plan needs {needed} devices, the {len(self.numbers)} hosts have {self.num_devices}"
            )

    def run(
        self, number: int, inputs: Sequence[Any], outputs: Mapping[int, Array]
    ) -> dict[int, DistributedArray]:
        """Have a step run; this returns before it does.

        Args:
            inputs: a handle for every input that is in place, an array for others.
            outputs: what and where the outputs are.
        """
        self.check()
        while len(self._pending) > _MOST_AHEAD * len(self.numbers):
            host, ref = self._pending[0]
            self._get(ref, host)
            self.check()
        if number not in self._loaded:
            raise HostsError(
                "the workers that the step was compiled on have ended; parallelize it again, after autopar.init(cluster='ray') if no"
                " others have started"
            )
        loaded = self._loaded[number]
        made = {o: DistributedArray(self, self._new_key(), array) for o, array in outputs.items()}
        kept = {i: leaf.key for i, leaf in enumerate(inputs) if isinstance(leaf, DistributedArray)}
        given = [i for i, leaf in enumerate(inputs) if i not in kept]
        arrays = [ray.put(plain(inputs[i])) for i in given]
        for host, wanted in enumerate(loaded.inputs):
            here = [(i, ref) for i, ref in zip(given, arrays, strict=True) if i in wanted]
            ref = self._call(
                host,
                "run",
                number,
                self._letter,
                {i: key for i, key in kept.items() if i in wanted},
                {o: each.key for o, each in made.items()},
                [i for i, _ in here],
                *(ref for _, ref in here),
            )
            self._pending.append((host, ref))
        self._letter, self._meshes = self._letter + loaded.num_letters, loaded.meshes
        return made

    # -- arrays

    def put(self, value: Any, array: Array) -> DistributedArray:
        """Send an array to where it should be."""
        return self._made(array, "put", ray.put(np.asarray(plain(value), array.dtype)), array.place)

    def zeros(self, array: Array) -> DistributedArray:
        """Have zeros made where they should be."""
        return self._made(array, "zeros", array)

    def _made(self, array: Array, method: str, *args: Any) -> DistributedArray:
        handle = DistributedArray(self, self._new_key(), array)
        for host in self.hosts_of(array.place.mesh.devices):
            self._pending.append((host, self._call(host, method, handle.key, *args)))
        return handle

    def fetch(self, handles: Sequence[DistributedArray]) -> list[np.ndarray]:
        """The arrays, brought here: each part once, from one of the workers that have it."""
        asked: list[list[tuple[int, Any]]] = []
        for handle in handles:
            found, hosts = set(), []
            parts = tiles(
                handle.array.shape, handle.array.place.mesh.logical, handle.array.place.spec
            )
            for device, part in zip(handle.array.place.mesh.devices, parts, strict=True):
                if part not in found and self.owner[device] not in hosts:
                    hosts.append(self.owner[device])
                found.add(part)
            asked.append([(host, self._call(host, "fetch", handle.key)) for host in hosts])
        whole = []
        for handle, refs in zip(handles, asked, strict=True):
            value = np.empty(handle.array.shape, handle.array.dtype)
            for host, ref in refs:
                for index, part in self._get(ref, host):
                    value[index] = part
            whole.append(value)
        self.check()
        return whole

    def recorded(self) -> list[list[Note]]:
        """What each worker has noted since it was asked to record, by the clock of this process."""
        found = []
        for first in (devices[0] for devices in self.numbers):
            (notes,) = self.ask([first], "recorded")
            found.append(aligned(notes, offset(lambda first=first: self.ask([first], "clock")[0])))
        return found

    # -- checkpoints

    def save(
        self, folder: Path, handles: Mapping[str, DistributedArray], verify: bool
    ) -> tuple[dict[str, tuple[SavedPiece, ...]], Callable[[], dict[tuple[str, str], int]]]:
        """Have the workers copy arrays, each tile where it is and once.

        Returns:
            The pieces of each array, and a function that waits in any thread until the copies are written to `folder`, and returns
            their checksums by part and name.
        """
        pieces = saved_pieces(handles, self.owner)
        copies = []
        for host in range(len(self.numbers)):
            part, wanted = part_of(host), []
            for name, each in handles.items():
                if tiles := {
                    piece.name: piece.tile for piece in pieces[name] if piece.part == part
                }:
                    wanted.append((each.key, tiles))
            if wanted:
                copies.append(
                    (host, folder / part, self._call(host, "copy", folder / part, wanted))
                )
        self._answers([(host, ref) for host, _, ref in copies])
        writes = [
            (
                host,
                self._actors[host]
                .write.options(concurrency_group="writing")
                .remote(ref, part, verify),
            )
            for host, part, ref in copies
        ]
        self._writes = [ref for _, ref in writes]

        def write() -> dict[tuple[str, str], int]:
            failures: list[Exception] = []
            found: dict[tuple[str, str], int] = {}
            for host, ref in writes:  # all of them: afterwards nobody writes any more
                try:
                    found |= in_part(part_of(host), ray.get(ref, timeout=self.timeout))
                except RayActorError as error:
                    failures.append(HostLostError(host, self.addresses[host], reason(error)))
                except GetTimeoutError:
                    said = f"has been writing a checkpoint for {self.timeout:.0f} s"
                    failures.append(HostTimeoutError(host, self.addresses[host], said))
                except RayError as error:
                    cause = getattr(error, "cause", None)
                    failures.append(cause if isinstance(cause, CheckpointError) else error)
            if failures:
                raise failures[0] from None
            return found

        return pieces, write

    def restore(
        self, folder: Path, wanted: Sequence[tuple[SavedArray, Place]], verify: bool
    ) -> list[DistributedArray]:
        """The arrays of a checkpoint where they should be; each worker reads its parts.

        Raises:
            CheckpointError: a worker can't read its parts.
        """
        self.check()
        self._check_devices(place.mesh.devices for _, place in wanted)
        self._join(worker_groups({place.mesh.devices for _, place in wanted}, self.owner))
        handles = [
            DistributedArray(
                self,
                self._new_key(),
                Array(saved.path, saved.shape, saved.jax_dtype, place, saved.key),
            )
            for saved, place in wanted
        ]
        refs = []
        for host in range(len(self.numbers)):
            mine = [
                (handle.key, saved, place)
                for handle, (saved, place) in zip(handles, wanted, strict=True)
                if host in self.hosts_of(place.mesh.devices)
            ]
            if mine:
                refs.append((host, self._call(host, "restore", folder, mine, verify)))
        for error in self._answers(refs, is_slow=True):
            if error is not None:
                raise error
        return handles

    def release(self, key: int) -> None:
        """Have an array forgotten, by each worker with the next thing that it is asked; in any thread."""
        if key in self._live:
            self._live.discard(key)
            for freed in self._freed:
                freed.append(key)

    def free(self) -> None:
        """Have the workers forget at once what is released."""
        for host, freed in enumerate(self._freed):
            if freed:
                self._pending.append((host, self._call(host, "free", ())))

    def num_arrays(self) -> list[int]:
        """How many arrays each worker keeps."""
        return self._ask("num_arrays")

    # -- reading batches

    def check_place(self, place: Place) -> None:
        """Raise ValueError unless the workers can have arrays there by what they have been told so far."""
        devices = place.mesh.devices
        self._check_devices([devices])
        hosts = tuple(self.hosts_of(devices))
        if self._groups is None or (len(hosts) > 1 and hosts not in self._groups):
            raise ValueError(
                f"a placement is on devices {list(devices)} of hosts {list(hosts)}, but no step that has them as a mesh has been compiled"
                " since these workers started; compile it first, with get_executable for instance"
            )

    def new_keys(self, count: int) -> list[int]:
        """Keys of arrays that workers are going to make."""
        return [self._new_key() for _ in range(count)]

    def is_live(self, key: int) -> bool:
        """Whether the workers that know something by this key still run, and nobody has said to forget it."""
        return key in self._live

    def ask_reader(self, host: int, method: str, *args: Any) -> Any:
        """Ask the thread of a worker that reads; it does one thing after the other, beside the steps."""
        match method:
            case "open_reader":
                self._readers.add((host, args[0]))
            case "close_reader":
                self._readers.discard((host, args[0]))
        return (
            self._actor(host)
            .do.options(concurrency_group="reading")
            .remote(None, (), method, *args)
        )

    def answer(self, ref: Any, host: int) -> Any:
        """What a worker that was asked has said.

        Raises:
            DataLoaderError: it could not read.
        """
        return self._get(ref, host)

    def _new_key(self) -> int:
        key = next(self._keys)
        self._live.add(key)
        return key


def cluster_of_hosts(hosts: RayHosts) -> AnyCluster:
    """The hardware of the hosts as the cost model knows it."""
    name_of = {
        kind: "cpu-hosts" if hosts.platform == "cpu" else cluster_of_kind(kind)
        for kind in hosts.kinds
    }
    pools = []
    for (name, count), same in itertools.groupby(
        (name_of[k], len(n)) for k, n in zip(hosts.kinds, hosts.numbers, strict=True)
    ):
        pools.append(Cluster.load(name).with_size(len(list(same)), count))
    if len(pools) == 1:
        return pools[0]
    return HeterogeneousCluster(
        name=f"{len(hosts.numbers)} hosts", description="hosts of a Ray cluster", pools=tuple(pools)
    )


def mesh_shape(hosts: RayHosts, devices: Devices) -> tuple[int, ...]:
    """The mesh shape that the user means by `devices`, of the first devices of the hosts.

    Raises:
        ValueError: they are not so many, or are devices of this process.
    """
    if devices is None:
        return (hosts.num_devices,)
    sizes = (
        (devices,)
        if isinstance(devices, int)
        else tuple(devices)
        if isinstance(devices, Sequence)
        else ()
    )
    if not sizes or not all(isinstance(size, int | np.integer) and size > 0 for size in sizes):
        raise ValueError(
            f"devices={devices!r}, expected a number of devices or a mesh shape such as (2, 4): steps run on other hosts, and this"
            " process has none of their devices"
        )
    if prod(sizes) > hosts.num_devices:
        raise ValueError(
            f"a mesh of shape {sizes} needs {prod(sizes)} devices, the hosts have {hosts.num_devices}"
        )
    return tuple(map(int, sizes))


def check_plan(hosts: RayHosts, plan: Plan, devices: Devices) -> None:
    """Look whether a plan that was made elsewhere suits the hosts; a stage that they tear apart is warned of.

    Raises:
        ValueError: `devices` are not as many as the plan has.
    """
    stages = [stage.devices for stage in plan.stages]
    needed = max(device for members in stages for device in members) + 1
    if devices is not None and prod(mesh_shape(hosts, devices)) != needed:
        raise ValueError(
            f"devices={devices!r}, but the plan has {needed}; leave them out, it runs on the first of the hosts'"
        )
    if needed > hosts.num_devices:
        return  # an error when it is compiled
    most = max(map(len, hosts.numbers))
    torn = [
        number
        for number, members in enumerate(stages)
        if len(members) <= most and len(hosts.hosts_of(members)) > 1
    ]
    if torn:
        warnings.warn(
            f"the plan was made for other hosts: on these, stage {' and '.join(map(str, torn))} spans several although one would hold it,"
            " so its collectives go between hosts; plan again for these",
            stacklevel=2,
        )
