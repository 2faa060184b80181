"""The workers on the hosts of a Ray cluster, as the driver has them: started, asked, watched and ended together."""

import itertools
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from autopar.hosts.environment import (
    check_versions,
    leave_gpus,
    variables_of_worker,
    versions,
    virtual_devices,
)
from autopar.hosts.errors import (
    HostLostError,
    HostsError,
    HostTimeoutError,
    PortTakenError,
    StepFailedError,
)
from autopar.hosts.health import Doing, Silent, State, Watch, culprit, silence_seconds
from autopar.hosts.ray_private import python_of_workers
from autopar.hosts.worker import Group, InstructionError, Worker
from autopar.progress import log_progress
from autopar.runtime.batch_reading import DataLoaderError

_CHANGES = frozenset({"run", "put", "zeros", "copy", "restore", "unload"})
"""What workers do that later calls see."""

_SLOW = frozenset({"environment", "start", "meet", "load", "restore", "program_text"})
"""Where they import or compile, so that they can perhaps not say what they are doing."""

_ANSWER_SECONDS = 5.0
"""How long a worker may take to say what it is doing."""

_PORTS = 5
"""How many ports to try, if others take them before they are used."""

_POLL_SECONDS = 1.0
"""How often a driver that waits looks whether a worker is gone."""


class Workers:
    """A worker actor on each host.

    Attributes:
        numbers: for each host the numbers of its devices.
        owner: for each device its host.
        addresses: for each host its address.
        platform: "cpu" or "cuda".
        kinds: for each host what Ray calls its accelerators, "" where it has none.
        timeout: seconds that a worker may take for what it is asked.
        silence: seconds that one may not even say what it is doing, while steps run.
    """

    def __init__(
        self,
        num_nodes: int | None,
        num_devices_per_node: int | Sequence[int] | None,
        timeout: float,
    ) -> None:
        """Take the hosts and start a worker on each.

        Raises:
            HostsError: there are fewer hosts or devices than asked for, or the hosts have other versions than this one.
        """
        self.timeout, self.silence = timeout, silence_seconds()
        nodes = alive_nodes()
        gpus = [int(node["Resources"].get("GPU", 0)) for node in nodes]
        self.platform = "cuda" if any(gpus) else "cpu"
        chosen = _choose(nodes, gpus, num_nodes, num_devices_per_node)
        if self.platform != "cpu":
            leave_gpus()
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []
        self._watch = Watch([])
        self._readers: set[tuple[int, int]] = (
            set()
        )  # hosts where users' functions read, and their numbers
        self._last: list[Any] = []  # for each worker, its last call that changed something
        self._pending: deque[tuple[int, Any]] = deque()  # calls that nobody waits for
        self._writes: list[Any] = []  # of the last checkpoint
        self._groups: frozenset[tuple[int, ...]] | None = None
        self._live: set[int] = set()  # keys of what they keep
        self._freed: list[
            deque[int]
        ] = []  # for each worker, keys that it is told to forget with its next call
        self._meshes: Mapping[
            int, Sequence[int]
        ] = {}  # for each host, its meshes in the step that ran last
        starts = list(itertools.accumulate(chosen, initial=0))
        self.numbers = [
            tuple(range(start, start + count)) for start, count in zip(starts, chosen, strict=False)
        ]
        self.owner = {
            device: host for host, devices in enumerate(self.numbers) for device in devices
        }
        self.addresses: list[str] = []
        self.kinds: list[str] = []
        try:
            self._reserve(chosen)
            self._start_workers()
        except BaseException:
            self.close()
            raise

    @property
    def num_devices(self) -> int:
        return len(self.owner)

    def hosts_of(self, devices: Iterable[int]) -> list[int]:
        """The hosts that have some of the devices."""
        return sorted({self.owner[device] for device in devices})

    # -- starting and ending

    def _reserve(self, counts: Sequence[int]) -> None:
        gpu = self.platform == "cuda"
        bundles: list[dict[str, float]] = [
            {"CPU": 1.0, **({"GPU": float(count)} if gpu else {})} for count in counts
        ]
        self._group = placement_group(bundles, strategy="STRICT_SPREAD")
        end = time.monotonic() + self.timeout
        while not self._group.wait(_POLL_SECONDS):
            if time.monotonic() < end and len(alive_nodes()) >= len(counts):
                continue
            raise HostsError(
                f"{len(counts)} hosts with {list(counts)} devices and a free CPU each could not be had within {self.timeout:.0f} s;"
                " end what else runs on the cluster, or ask for fewer (num_nodes, num_devices_per_node)"
            )
        nodes = {node["NodeID"]: node for node in ray.nodes()}
        placed: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        chosen = [nodes[placed[host]] for host in range(len(counts))]
        self.addresses = [node["NodeManagerAddress"] for node in chosen]
        self.kinds = [_kind(node) for node in chosen]

    def _start_workers(self) -> None:
        """New worker processes; what JAX is told in them is told with the first job."""
        self._groups = None
        groups = {"control": 1, "reading": 1, "writing": 1}
        actor: Any = ray.remote(concurrency_groups=groups)(Worker)  # pyright: ignore[reportCallIssue]
        assert self._group is not None
        python = python_of_workers(ray.get_runtime_context().runtime_env)
        for host, devices in enumerate(self.numbers):
            environment = variables_of_worker(self.platform, len(devices))
            options: dict[str, Any] = {
                "num_cpus": 1,
                "num_gpus": len(devices) if self.platform == "cuda" else 0,
                "max_restarts": 0,
                "runtime_env": {"env_vars": environment, **python},
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=host
                ),
            }
            self._last.append(None)
            self._freed.append(deque())
            self._actors.append(
                actor.options(**options).remote(host, self.numbers, self.addresses[host])
            )
        self._watch = Watch(self._actors)
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
        log_progress(f"{len(self.numbers)} hosts with {self.num_devices} {self.platform} devices")

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
        """End the workers, when they have written what they were asked to or take too long, and give the hosts back."""
        if self._writes and ray.is_initialized():
            ray.wait(self._writes, num_returns=len(self._writes), timeout=self.timeout)
        self._kill()
        if self._group is not None and ray.is_initialized():
            remove_placement_group(self._group)
        self._group = None

    def _kill(self) -> None:
        if ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor)
            self._failures()  # else Ray prints them
        self._actors, self._last, self._freed, self._writes, self._groups = [], [], [], [], None
        self._watch = Watch([])
        self._readers.clear()
        self._pending.clear()
        self._live.clear()

    # -- asking and watching

    def wait(self, devices: Iterable[int] | None = None) -> None:
        """Wait until the workers (those that have some of the devices) have done what they were asked."""
        self.ask(self.owner if devices is None else devices, "wait")
        self.check()

    def ask(self, devices: Iterable[int], method: str, *args: Any) -> list[Any]:
        """The answers of the workers that have some of the devices."""
        refs = [(host, self._call(host, method, *args)) for host in self.hosts_of(devices)]
        return self._answers(refs, is_slow=method in _SLOW)

    def _call(self, host: int, method: str, *args: Any) -> Any:
        """Ask a worker for something, after everything that it has been asked before.

        An actor that can be asked what it is doing meanwhile may take its calls in another order, if their arguments arrive so.
        """
        actor, freed = self._actor(host), self._freed[host]
        ref = actor.do.remote(
            self._last[host], [freed.popleft() for _ in range(len(freed))], method, *args
        )
        if method in _CHANGES:
            self._last[host] = ref
        return ref

    def _actor(self, host: int) -> Any:
        if not self._actors:
            raise HostsError(
                "the workers have ended; call autopar.init(cluster='ray') to start others"
            )
        return self._actors[host]

    def _ask(self, method: str, args: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """The answers of all workers."""
        args = [()] * len(self._actors) if args is None else args
        refs = [(host, self._call(host, method, *each)) for host, each in enumerate(args)]
        return self._answers(refs, is_slow=method in _SLOW)

    def _get(self, ref: Any, host: int) -> Any:
        """An answer, unless meanwhile something fails anywhere."""
        return self._answers([(host, ref)])[0]

    def _answers(self, refs: Sequence[tuple[int, Any]], is_slow: bool = False) -> list[Any]:
        """The answers of hosts, unless meanwhile something fails anywhere: others may wait for ever then."""
        end, waiting, found = (
            time.monotonic() + self.timeout,
            dict((ref, host) for host, ref in refs),
            {},
        )
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
                self._listen(is_slow)
            if waiting and time.monotonic() > end:
                states = self._watch.states(_ANSWER_SECONDS)
                host = culprit(states, list(waiting.values()))
                said = f"has not done what it should within {self.timeout:.0f} s"
                raise self._late(
                    host,
                    states,
                    said,
                    "Give autopar.init a larger timeout if this is how long it takes",
                )
        return [found[ref] for _, ref in refs]

    def _listen(self, is_slow: bool) -> None:
        """Hear what the workers are doing. One that should answer and does not is taken for hung.

        Raises:
            HostTimeoutError: the workers have been ended.
        """
        self._watch.poll(is_slow)
        for host, seconds in enumerate(self._watch.silence()):
            # one that reads does so by a user's function, which may keep everything else waiting
            reads = any(host == reader for reader, _ in self._readers)
            if seconds > self.silence and not is_slow and not reads:
                states = self._watch.states(_POLL_SECONDS)
                if states[host] is Silent.MUTE:
                    said = f"has not said for {seconds:.0f} s what it is doing"
                    raise self._late(
                        host,
                        states,
                        said,
                        "If it is only slow, let AUTOPAR_SILENCE_SECONDS be more",
                    )

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
        watch, states = self._watch, self._watch.states(_ANSWER_SECONDS)
        lost = next((number for number, each in enumerate(states) if each is Silent.GONE), None)
        failed = [cause, *self._failures()]
        self._kill()
        if isinstance(cause, InstructionError) and lost is None:
            raise StepFailedError(
                cause.worker, cause.mesh, cause.instruction, cause.cause
            ) from None
        if isinstance(cause, HostsError) and lost is None:
            raise cause from None
        if isinstance(error, RayActorError) or lost is not None:
            host = host if lost is None else lost
            why = reason(error) if isinstance(error, RayActorError) else "its worker has ended"
            others = [
                *_texts(states, host),
                *(str(each) for each in failed if isinstance(each, InstructionError)),
            ]
            last = watch.last(host)
            at = None if last is None else last.instruction
            raise HostLostError(
                host, self.addresses[host], why, self._meshes.get(host, ()), others, at
            ) from None
        raise error

    def _failures(self) -> list[Any]:
        """What calls have failed of that nobody has looked at."""
        found = []
        for _, ref in self._pending:
            try:
                ray.get(ref, timeout=0)
            except RayError as error:
                found.append(getattr(error, "cause", None))
        return found

    def _late(self, host: int, states: Sequence[State], said: str, todo: str) -> HostTimeoutError:
        """End all workers, since one hangs: what to raise."""
        state = states[host]
        at = state if isinstance(state, Doing) else self._watch.last(host)
        if at is not None:
            said += f": it {at}" if at is state else f", and was at {at.instruction} before"
        self._kill()
        return HostTimeoutError(
            host,
            self.addresses[host],
            said,
            self._meshes.get(host, ()),
            _texts(states, host),
            None if at is None else at.mesh,
            None if at is None else at.instruction,
            todo,
        )


def _texts(states: Sequence[State], but: int) -> list[str]:
    """What the other hosts are doing that are doing something, or don't say."""
    found = []
    for host, state in enumerate(states):
        if host != but and state is not None:
            found.append(f"host {host} {state.value if isinstance(state, Silent) else state}")
    return found


def reason(error: RayError) -> str:
    """The line that says why a worker is gone: the first, or the last of the traceback of one that could not start."""
    lines = str(error).splitlines()
    return lines[-1] if "creation task" in lines[0] else lines[0]


def alive_nodes() -> list[dict[str, Any]]:
    """The hosts of the Ray cluster, as far as it knows: it takes seconds to notice that one is gone."""
    return [node for node in ray.nodes() if node["Alive"]]


def _kind(node: Mapping[str, Any]) -> str:
    """What Ray calls the accelerators of a host."""
    return next(
        (each.split(":")[1] for each in node["Resources"] if each.startswith("accelerator_type:")),
        "",
    )


def _choose(
    nodes: Sequence[Mapping[str, Any]],
    gpus: Sequence[int],
    num_nodes: int | None,
    per_node: int | Sequence[int] | None,
) -> list[int]:
    """How many devices to take of each host."""
    if isinstance(per_node, Sequence):
        return _choose_unequal(nodes, gpus, num_nodes, per_node)
    if any(gpus):
        counts = sorted((count for count in gpus if count >= (per_node or 1)), reverse=True)
        counts = [per_node or count for count in counts]
        what = f"with {per_node or 1} GPUs or more"
    else:
        counts = [per_node or virtual_devices() or 1] * len(nodes)
        what = "(none with GPUs)"
    wanted = len(counts) if num_nodes is None else num_nodes
    if not 1 <= wanted <= len(counts):
        raise HostsError(f"{wanted} hosts asked for, but the Ray cluster has {len(counts)} {what}")
    return counts[:wanted]


def _choose_unequal(
    nodes: Sequence[Mapping[str, Any]],
    gpus: Sequence[int],
    num_nodes: int | None,
    counts: Sequence[int],
) -> list[int]:
    """As many of each as is asked for, if the cluster has such hosts."""
    if not counts or any(not isinstance(count, int) or count < 1 for count in counts):
        raise ValueError(
            f"num_devices_per_node={counts!r}, expected a number of devices, or one for each host"
        )
    if num_nodes not in (None, len(counts)):
        raise ValueError(
            f"num_devices_per_node={counts!r} is for {len(counts)} hosts, but num_nodes={num_nodes}"
        )
    there = sorted(gpus if any(gpus) else [max(counts)] * len(nodes), reverse=True)
    wanted = sorted(counts, reverse=True)
    if len(wanted) > len(there) or any(
        count > most for count, most in zip(wanted, there, strict=False)
    ):
        what = f"have {there} GPUs" if any(gpus) else f"are {len(there)} (none with GPUs)"
        raise HostsError(
            f"hosts with {list(counts)} devices asked for, but those of the Ray cluster {what}"
        )
    return list(counts)
