"""The hosts of a Ray cluster, as the driver has them: a worker actor on each, started, asked, watched and ended together."""

import itertools
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from autopar.checkpoint.manifest import SavedArray, SavedPiece
from autopar.devices import Devices, cluster_of_kind
from autopar.hosts.arrays import DistributedArray, plain
from autopar.hosts.checkpoints import part_of, saved_pieces
from autopar.hosts.clocks import offset
from autopar.hosts.environment import check_versions, versions
from autopar.hosts.errors import HostLostError, HostsError, HostTimeoutError, PortTakenError, StepFailedError
from autopar.hosts.job import Array, Job, Place, groups_of
from autopar.hosts.timelines import Note, aligned
from autopar.hosts.worker import Group, InstructionError, Worker
from autopar.pipeline.resharding import tiles
from autopar.progress import tell
from autopar.runtime.reading import DataLoaderError
from simulator.cluster import Cluster
from simulator.mixed import AnyCluster, MixedCluster

_CHANGES = frozenset({"run", "put", "zeros", "free", "copy", "restore"})
"""What workers do that later calls see."""

_ANSWER_SECONDS = 5.0
"""How long a worker may take to say what it is doing."""

_MOST_AHEAD = 16
"""How many steps workers may have been asked for that they have not done: what they are given waits in memory."""

_PORTS = 5
"""How many ports to try, if others take them before they are used."""

_POLL_SECONDS = 1.0
"""How often a driver that waits looks whether a worker is gone."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What a step of a job needs of the driver: the inputs that each host reads, and how many numbers its deliveries take."""

    inputs: tuple[frozenset[int], ...]
    num_letters: int


class RayHosts:
    """Workers on the hosts of a Ray cluster that has been joined.

    Attributes:
        numbers: for each host the numbers of its devices.
        addresses: for each host its address.
        platform: "cpu" or "cuda".
        kind: what Ray calls the accelerators.
        timeout: seconds that a worker may take for what it is asked.
        load_seconds: for each host, what compiling its part of the last job took.
    """

    def __init__(self, num_nodes: int | None, num_devices_per_node: int | None, timeout: float) -> None:
        """Take the hosts and start a worker on each.

        Raises:
            HostsError: there are fewer hosts or devices than asked for, or the hosts have different versions of JAX.
        """
        self.timeout = timeout
        self.load_seconds: tuple[float, ...] = ()
        nodes = alive_nodes()
        gpus = [int(node["Resources"].get("GPU", 0)) for node in nodes]
        self.platform = "cuda" if any(gpus) else "cpu"
        self.kind = next(
            (r.split(":")[1] for n in nodes for r in n["Resources"] if r.startswith("accelerator_type:")), ""
        )
        chosen = _choose(nodes, gpus, num_nodes, num_devices_per_node)
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []
        self._last: list[Any] = []  # for each worker, its last call that changed something
        self._pending: deque[tuple[int, Any]] = deque()
        self._writes: list[Any] = []  # of the last checkpoint
        self._freed: deque[int] = deque()
        self._keys, self._jobs, self._letter = itertools.count(), itertools.count(), 0
        self._groups: frozenset[tuple[int, ...]] | None = None
        self._live: set[int] = set()
        self._loaded: dict[int, _Loaded] = {}
        starts = list(itertools.accumulate(chosen, initial=0))
        self.numbers = [tuple(range(start, start + count)) for start, count in zip(starts, chosen, strict=False)]
        self.owner = {device: host for host, devices in enumerate(self.numbers) for device in devices}
        self.addresses: list[str] = []
        try:
            self._reserve(chosen)
            self._start_workers()
        except BaseException:
            self.close()
            raise

    @property
    def num_devices(self) -> int:
        return len(self.owner)

    # -- starting and ending

    def _reserve(self, counts: Sequence[int]) -> None:
        gpu = self.platform == "cuda"
        bundles: list[dict[str, float]] = [{"CPU": 1.0, **({"GPU": float(count)} if gpu else {})} for count in counts]
        self._group = placement_group(bundles, strategy="STRICT_SPREAD")
        end = time.monotonic() + self.timeout
        while not self._group.wait(_POLL_SECONDS):
            if time.monotonic() < end and len(alive_nodes()) >= len(counts):
                continue
            raise HostsError(
                f"{len(counts)} hosts with {list(counts)} devices and a free CPU each could not be had within {self.timeout:.0f} s;"
                " end what else runs on the cluster, or ask for fewer (num_nodes, num_devices_per_node)"
            )
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        placed: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        self.addresses = [nodes[placed[host]] for host in range(len(counts))]

    def _start_workers(self) -> None:
        """New worker processes; what JAX is told in them is told with the first job."""
        self._groups = None
        actor: Any = ray.remote(concurrency_groups={"control": 1, "reading": 1, "writing": 1})(Worker)  # pyright: ignore[reportCallIssue]
        assert self._group is not None
        for host, devices in enumerate(self.numbers):
            environment = {"JAX_PLATFORMS": self.platform}
            if self.platform == "cpu":
                environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={len(devices)}"
            options: dict[str, Any] = {
                "num_cpus": 1,
                "num_gpus": len(devices) if self.platform == "cuda" else 0,
                "max_restarts": 0,
                "runtime_env": {"env_vars": environment},
                "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=host),
            }
            self._last.append(None)
            self._actors.append(actor.options(**options).remote(host, self.numbers, self.addresses[host]))
        here = versions()
        try:
            found = self._ask("environment")
        except HostLostError as lost:
            raise HostsError(
                f"host {lost.host} ({self.addresses[lost.host]}) can't run a worker: {lost.cause}; install there what the driver has, with"
                f" pip install autopar[ray]=={here['autopar']}"
            ) from None
        for host, each in enumerate(found):
            check_versions(host, self.addresses[host], here, each["versions"])
        tell(f"{len(self.numbers)} hosts with {self.num_devices} {self.platform} devices")

    def _join(self, groups: frozenset[tuple[int, ...]]) -> None:
        """Have the workers form groups. A process can do so only once, so others take the place of those that have."""
        if self._groups is not None and groups <= self._groups:
            return
        if self._groups is not None:
            if self._live:
                raise HostsError(
                    f"hosts {sorted(self._groups)} share meshes, and the new step wants {sorted(groups)} to: their processes have to"
                    f" start anew, but {len(self._live)} arrays are alive in them; delete these, or call autopar.shutdown() and init()"
                )
            self._kill()
            self._start_workers()
        mailboxes = self._start_jax(groups, _PORTS)
        self._ask("meet", [(dict(enumerate(mailboxes)),)] * len(self._actors))
        self._groups = groups

    def _start_jax(self, groups: frozenset[tuple[int, ...]], ports: int) -> list[str]:
        """Have JAX started on all workers, with up to so many ports; the addresses of their mailboxes."""
        of_worker: dict[int, Group] = {}
        for members in groups:
            group = Group(members, f"{self.addresses[members[0]]}:{self._free_port(members[0])}")
            of_worker.update(dict.fromkeys(members, group))
        try:
            return self._ask("start", [(of_worker.get(host),) for host in range(len(self._actors))])
        except PortTakenError:
            if ports == 1:
                raise
            self._start_workers()  # the other members wait already for what does not start
            return self._start_jax(groups, ports - 1)

    def _free_port(self, host: int) -> int:
        return self._get(self._call(host, "free_port"), host)

    def close(self) -> None:
        """End the workers, when they have written what they were asked to, and give the hosts back."""
        if self._writes and ray.is_initialized():
            ray.wait(self._writes, num_returns=len(self._writes))
        self._kill()
        if self._group is not None and ray.is_initialized():
            remove_placement_group(self._group)
        self._group = None

    def _kill(self) -> None:
        if ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor)
            for _, ref in self._pending:
                with suppress(RayError):
                    ray.get(ref, timeout=0)  # else Ray prints what it failed of
        self._actors, self._last, self._writes, self._groups = [], [], [], None
        self._pending.clear()
        self._live.clear()
        self._loaded.clear()

    # -- jobs

    def load(self, job: Job) -> int:
        """Compile a job on its workers; its number.

        Raises:
            ValueError: it needs hosts or devices that are not there.
        """
        self._check_devices(job.meshes)
        self.check()
        self._join(groups_of(job.meshes, self.owner))
        number = next(self._jobs)
        parts = [job.of(devices) for devices in self.numbers]
        inputs = tuple(frozenset(each.number for each in part.inputs) for part in parts)
        self._loaded[number] = _Loaded(inputs, job.num_deliveries * len(self.numbers))
        self.load_seconds = tuple(self._ask("load", [(number, part) for part in parts]))
        return number

    def _check_devices(self, meshes: Iterable[Iterable[int]]) -> None:
        needed = max(device for mesh in meshes for device in mesh) + 1
        if needed > self.num_devices:
            raise ValueError(f"the plan needs {needed} devices, the {len(self.numbers)} hosts have {self.num_devices}")

    def run(self, number: int, inputs: Sequence[Any], outputs: Mapping[int, Array]) -> dict[int, DistributedArray]:
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
        loaded = self._loaded[number]
        made = {o: DistributedArray(self, self._new_key(), array) for o, array in outputs.items()}
        kept = {i: leaf.key for i, leaf in enumerate(inputs) if isinstance(leaf, DistributedArray)}
        given = [i for i, leaf in enumerate(inputs) if i not in kept]
        arrays = [ray.put(plain(inputs[i])) for i in given]
        freed = [self._freed.popleft() for _ in range(len(self._freed))]
        for host, wanted in enumerate(loaded.inputs):
            here = [(i, ref) for i, ref in zip(given, arrays, strict=True) if i in wanted]
            ref = self._call(
                host,
                "run",
                number,
                self._letter,
                {i: key for i, key in kept.items() if i in wanted},
                {o: each.key for o, each in made.items()},
                freed,
                [i for i, _ in here],
                *(ref for _, ref in here),
            )
            self._pending.append((host, ref))
        self._letter += loaded.num_letters
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
        for host in self._hosts_of(array.place.mesh.devices):
            self._pending.append((host, self._call(host, method, handle.key, *args)))
        return handle

    def fetch(self, handles: Sequence[DistributedArray]) -> list[np.ndarray]:
        """The arrays, brought here: each part once, from one of the workers that have it."""
        asked: list[list[tuple[int, Any]]] = []
        for handle in handles:
            found, hosts = set(), []
            parts = tiles(handle.array.shape, handle.array.place.mesh.logical, handle.array.place.spec)
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

    def wait(self, devices: Iterable[int] | None = None) -> None:
        """Wait until the workers (those that have some of the devices) have done what they were asked."""
        self.ask(self.owner if devices is None else devices, "wait")
        self.check()

    def ask(self, devices: Iterable[int], method: str, *args: Any) -> list[Any]:
        """The answers of the workers that have some of the devices."""
        return self._answers([(host, self._call(host, method, *args)) for host in self._hosts_of(devices)])

    def recorded(self) -> list[list[Note]]:
        """What each worker has noted since it was asked to record, by the clock of this process."""
        found = []
        for first in (devices[0] for devices in self.numbers):
            (notes,) = self.ask([first], "recorded")
            found.append(aligned(notes, offset(lambda first=first: self.ask([first], "clock")[0])))
        return found

    # -- checkpoints

    def save(
        self, folder: Path, handles: Mapping[str, DistributedArray]
    ) -> tuple[dict[str, tuple[SavedPiece, ...]], Callable[[], None]]:
        """Have the workers copy arrays, each tile where it is and once.

        Returns:
            The pieces of each array; what has the copies written to `folder` and waits for that, in any thread.
        """
        pieces = saved_pieces(handles, self.owner)
        copies = []
        for host in range(len(self.numbers)):
            part, wanted = part_of(host), []
            for name, each in handles.items():
                if tiles := {piece.name: piece.tile for piece in pieces[name] if piece.part == part}:
                    wanted.append((each.key, tiles))
            if wanted:
                copies.append((host, folder / part, self._call(host, "copy", folder / part, wanted)))
        for host, _, ref in copies:
            self._get(ref, host)
        writes = [
            (host, self._actors[host].write.options(concurrency_group="writing").remote(ref, part))
            for host, part, ref in copies
        ]
        self._writes = [ref for _, ref in writes]

        def write() -> None:
            failures: list[Exception] = []
            for host, ref in writes:  # all of them: afterwards nobody writes any more
                try:
                    ray.get(ref)
                except RayActorError as error:
                    failures.append(HostLostError(host, self.addresses[host], str(error).splitlines()[0]))
                except RayError as error:
                    failures.append(error)
            if failures:
                raise failures[0] from None

        return pieces, write

    def restore(self, folder: Path, wanted: Sequence[tuple[SavedArray, Place]]) -> list[DistributedArray]:
        """The arrays of a checkpoint where they should be; each worker reads its parts."""
        self.check()
        self._check_devices(place.mesh.devices for _, place in wanted)
        self._join(groups_of({place.mesh.devices for _, place in wanted}, self.owner))
        handles = [
            DistributedArray(
                self, self._new_key(), Array(saved.path, saved.shape, np.dtype(saved.dtype), place, saved.key)
            )
            for saved, place in wanted
        ]
        refs = []
        for host in range(len(self.numbers)):
            mine = [
                (handle.key, saved, place)
                for handle, (saved, place) in zip(handles, wanted, strict=True)
                if host in self._hosts_of(place.mesh.devices)
            ]
            if mine:
                refs.append((host, self._call(host, "restore", folder, mine)))
        for host, ref in refs:
            self._get(ref, host)
        return handles

    def release(self, key: int) -> None:
        """Forget an array, with the next step."""
        if key in self._live:
            self._live.discard(key)
            self._freed.append(key)

    def num_arrays(self) -> list[int]:
        """How many arrays each worker keeps."""
        freed = [self._freed.popleft() for _ in range(len(self._freed))]
        self._ask("free", [(freed,)] * len(self._actors))
        return self._ask("num_arrays")

    # -- reading batches

    def check_place(self, place: Place) -> None:
        """Raise ValueError unless the workers can have arrays there by what they have been told so far."""
        devices = place.mesh.devices
        self._check_devices([devices])
        hosts = tuple(self._hosts_of(devices))
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
        if not self._actors:
            raise HostsError("the workers have ended; call autopar.init(cluster='ray') to start others")
        return self._actors[host].do.options(concurrency_group="reading").remote(None, method, *args)

    def answer(self, ref: Any, host: int) -> Any:
        """What a worker that was asked has said.

        Raises:
            DataLoaderError: it could not read.
        """
        return self._get(ref, host)

    def _hosts_of(self, devices: Iterable[int]) -> list[int]:
        return sorted({self.owner[device] for device in devices})

    def _new_key(self) -> int:
        key = next(self._keys)
        self._live.add(key)
        return key

    # -- asking and watching

    def _call(self, host: int, method: str, *args: Any) -> Any:
        """Ask a worker for something, after everything that it has been asked before.

        An actor that can be asked what it is doing meanwhile may take its calls in another order, if their arguments arrive so.
        """
        if not self._actors:
            raise HostsError("the workers have ended; call autopar.init(cluster='ray') to start others")
        ref = self._actors[host].do.remote(self._last[host], method, *args)
        if method in _CHANGES:
            self._last[host] = ref
        return ref

    def _ask(self, method: str, args: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """The answers of all workers."""
        args = [()] * len(self._actors) if args is None else args
        return self._answers([(host, self._call(host, method, *each)) for host, each in enumerate(args)])

    def _get(self, ref: Any, host: int) -> Any:
        """An answer, unless meanwhile something fails anywhere."""
        return self._answers([(host, ref)])[0]

    def _answers(self, refs: Sequence[tuple[int, Any]]) -> list[Any]:
        """The answers of hosts, unless meanwhile something fails anywhere: others may wait for ever then."""
        end, waiting, found = time.monotonic() + self.timeout, dict((ref, host) for host, ref in refs), {}
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=_POLL_SECONDS)
            for ref in done:
                host = waiting.pop(ref)
                try:
                    found[ref] = ray.get(ref)
                except RayError as error:
                    self._fail(host, error)
            if not done:
                self.check()
            if waiting and time.monotonic() > end:
                raise self._late(next(iter(waiting.values())))
        return [found[ref] for _, ref in refs]

    def check(self) -> None:
        """Raise what has gone wrong since the last time.

        Raises:
            HostLostError, StepFailedError: the workers have been ended.
        """
        if not self._pending:
            return
        refs = [ref for _, ref in self._pending]
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        done = set(done)
        for host, ref in list(self._pending):
            if ref in done:
                self._pending.remove((host, ref))
                try:
                    ray.get(ref)
                except RayError as error:
                    self._fail(host, error)

    def _fail(self, host: int, error: RayError) -> None:
        """End all workers, since others wait for what will not come, and say why."""
        cause = getattr(error, "cause", None)
        if isinstance(cause, DataLoaderError):  # before any step waits for the batch
            cause.host, cause.address = host, self.addresses[host]
            raise cause from None
        lost = self._lost()
        self._kill()
        if isinstance(cause, InstructionError) and lost is None:
            raise StepFailedError(cause.worker, cause.mesh, cause.instruction, cause.cause) from None
        if isinstance(cause, HostsError) and lost is None:
            raise cause from None
        if isinstance(error, RayActorError) or lost is not None:
            host = host if lost is None else lost
            raise HostLostError(host, self.addresses[host], _reason(error)) from None
        raise error

    def _doing(self) -> list[Any]:
        """What each worker is doing, `HostLostError` for one that is gone, None for one that does not even answer."""
        refs = [actor.doing.options(concurrency_group="control").remote() for actor in self._actors]
        ray.wait(refs, num_returns=len(refs), timeout=_ANSWER_SECONDS)
        found: list[Any] = []
        for ref in refs:
            try:
                found.append(ray.get(ref, timeout=0))
            except RayActorError:
                found.append(HostLostError)
            except RayError:
                found.append(None)
        return found

    def _lost(self) -> int | None:
        """A host whose worker is gone, which is why others fail."""
        return next((host for host, each in enumerate(self._doing()) if each is HostLostError), None)

    def _late(self, host: int) -> HostTimeoutError:
        doing = [
            f"host {number} has been at {now[1]} of mesh {now[0]} for {now[2]:.0f} s"
            for number, now in enumerate(self._doing())
            if isinstance(now, tuple)
        ]
        self._kill()
        return HostTimeoutError(
            f"host {host} ({self.addresses[host]}) has not answered within {self.timeout:.0f} s: {'; '.join(doing) or 'nothing runs'}."
            " Give autopar.init a larger timeout if this is how long it takes"
        )


def _reason(error: RayError) -> str:
    """The line that says why a worker is gone: the first, or the last of the traceback of one that could not start."""
    lines = str(error).splitlines()
    return lines[-1] if "creation task" in lines[0] else lines[0]


def alive_nodes() -> list[dict[str, Any]]:
    """The hosts of the Ray cluster, as far as it knows: it takes seconds to notice that one is gone."""
    return [node for node in ray.nodes() if node["Alive"]]


def _choose(
    nodes: Sequence[Mapping[str, Any]], gpus: Sequence[int], num_nodes: int | None, per_node: int | None
) -> list[int]:
    """How many devices to take of each host."""
    if any(gpus):
        counts = sorted((count for count in gpus if count >= (per_node or 1)), reverse=True)
        counts = [per_node or count for count in counts]
        what = f"with {per_node or 1} GPUs or more"
    else:
        asked = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
        counts = [per_node or (int(asked[1]) if asked else 1)] * len(nodes)
        what = "(none with GPUs)"
    wanted = len(counts) if num_nodes is None else num_nodes
    if not 1 <= wanted <= len(counts):
        raise HostsError(f"{wanted} hosts asked for, but the Ray cluster has {len(counts)} {what}")
    return counts[:wanted]


def cluster_of_hosts(hosts: RayHosts) -> AnyCluster:
    """The hardware of the hosts as the cost model knows it."""
    name = "cpu-hosts" if hosts.platform == "cpu" else cluster_of_kind(hosts.kind)
    pools = []
    for count, same in itertools.groupby(map(len, hosts.numbers)):
        pools.append(Cluster.load(name).with_size(len(list(same)), count))
    if len(pools) == 1:
        return pools[0]
    return MixedCluster(name=f"{len(hosts.numbers)} hosts", description="hosts of a Ray cluster", pools=tuple(pools))


def mesh_shape(hosts: RayHosts, devices: Devices) -> tuple[int, ...]:
    """The mesh shape that the user means by `devices`, of the first devices of the hosts.

    Raises:
        ValueError: they are not so many, or are devices of this process.
    """
    if devices is None:
        return (hosts.num_devices,)
    sizes = (devices,) if isinstance(devices, int) else tuple(devices) if isinstance(devices, Sequence) else ()
    if not sizes or not all(isinstance(size, int | np.integer) and size > 0 for size in sizes):
        raise ValueError(
            f"devices={devices!r}, expected a number of devices or a mesh shape such as (2, 4): steps run on other hosts, and this"
            " process has none of their devices"
        )
    if prod(sizes) > hosts.num_devices:
        raise ValueError(f"a mesh of shape {sizes} needs {prod(sizes)} devices, the hosts have {hosts.num_devices}")
    return tuple(map(int, sizes))
