"""The worker processes of a session: the driver starts, calls, monitors and ends them together."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from autopar.hosts.environment import check_versions, versions
from autopar.hosts.errors import (
    HostLostError,
    HostsError,
    HostTimeoutError,
    StepFailedError,
)
from autopar.hosts.health import (
    Activity,
    HealthMonitor,
    State,
    Unresponsive,
    culprit,
    silence_seconds,
)
from autopar.hosts.process_groups import start_process_groups
from autopar.hosts.reservation import Reservation
from autopar.hosts.worker import ProcessGroup
from autopar.progress import log_progress
from autopar.runtime.batch_reading import DataLoaderError
from autopar.tracing.jax_settings import has_x64

_EFFECTS = frozenset({"run", "put", "zeros", "copy", "restore", "unload"})
"""Methods of a worker that change what later calls see."""

_SLOW = frozenset({"environment", "start", "meet", "load", "restore", "program_text"})
"""Methods that import or compile, so that a worker may be unable to report its activity."""

_ANSWER_SECONDS = 5.0
"""Seconds that a worker has to report its activity."""

_POLL_SECONDS = 1.0
"""Seconds between two looks of a waiting driver at the health of the workers."""


class Workers:
    """A worker actor on each reserved host.

    Attributes:
        reservation: the hosts.
        layout: their devices, by number.
        numbers: for each host the numbers of its devices.
        owner: for each device its host.
        addresses: for each host its address.
        platform: "cpu" or "cuda".
        timeout: seconds that a worker may take for one call.
        silence: seconds that a worker may leave queries unanswered while steps run.
    """

    def __init__(self, reservation: Reservation, timeout: float) -> None:
        """Start a worker on each host.

        Raises:
            HostsError: a host can't run a worker, or has other versions than the driver.
        """
        self.reservation = reservation
        self.timeout = timeout
        self.layout = reservation.layout
        self.numbers = self.layout.numbers
        self.owner = self.layout.owner
        self.addresses = self.layout.addresses
        self.platform = self.layout.platform
        self._actors: list[Any] = []
        self._monitor = HealthMonitor([])
        # (host, number of the reader) wherever a user's function reads batches.
        self._readers: set[tuple[int, int]] = set()
        # For each worker its last call that had an effect.
        self._last_effects: list[Any] = []
        # Calls whose answers the driver does not wait for.
        self._pending: deque[tuple[int, Any]] = deque()
        # The writes of the last checkpoint.
        self._writes: list[Any] = []
        self._groups: frozenset[tuple[int, ...]] | None = None
        # Keys of the arrays and readers that the workers store.
        self._live: set[int] = set()
        # For each worker the keys to free with its next call.
        self._freed: list[deque[int]] = []
        # For each host its meshes in the step that ran last.
        self._meshes: Mapping[int, Sequence[int]] = {}
        try:
            self.silence = silence_seconds()
            self._start_workers()
        except BaseException:
            self.close()
            raise

    @property
    def num_devices(self) -> int:
        """Number of devices of all hosts."""
        return self.layout.num_devices

    @property
    def is_running(self) -> bool:
        """Whether the workers have been started and not ended."""
        return bool(self._actors)

    def hosts_of(self, devices: Iterable[int]) -> list[int]:
        """Return the hosts that have any of the devices, in ascending order."""
        return self.layout.hosts_of(devices)

    # -- starting and ending

    def _start_workers(self) -> None:
        """Start the processes and check their versions; JAX starts in them with the first job."""
        self._groups = None
        self._actors = self.reservation.start_workers()
        self._last_effects = [None] * len(self._actors)
        self._freed = [deque() for _ in self._actors]
        self._monitor = HealthMonitor(self._actors)
        expected = versions()
        try:
            environments = self.ask_all("environment")
        except HostLostError as lost:
            raise HostsError(
                f"host {lost.host} ({self.addresses[lost.host]}) can't run a worker: {lost.cause};"
                " install the driver's version there: pip install"
                f" autopar[ray]=={expected['autopar']}"
            ) from None
        for host, environment in enumerate(environments):
            check_versions(host, self.addresses[host], expected, environment["versions"])
        log_progress(f"{len(self.numbers)} hosts with {self.num_devices} {self.platform} devices")

    def form_groups(self, groups: frozenset[tuple[int, ...]]) -> None:
        """Make the given groups of workers share a distributed JAX each.

        A process can join only one group in its life, so other groups need new processes.

        Raises:
            HostsError: the workers would have to be replaced, but store arrays.
        """
        if self._groups is not None and groups <= self._groups:
            return
        if self._groups is not None:
            if self._live:
                shared = ", ".join(map(str, sorted(self._groups))) or "none"
                raise HostsError(
                    f"the hosts that share meshes are {shared}, but the new step has meshes over"
                    f" hosts {', '.join(map(str, sorted(groups)))}. The workers have to start"
                    f" again, but {len(self._live)} arrays are in their memory; delete the arrays,"
                    " or call autopar.shutdown() and autopar.init()"
                )
            self.restart()
        addresses = start_process_groups(self, groups)
        self.ask_all("meet", [(dict(enumerate(addresses)),)] * len(addresses))
        self._groups = groups

    def start_jax(self, groups: Sequence[ProcessGroup | None]) -> list[str]:
        """Start JAX on every worker, in its process group, and return their transfer addresses.

        Raises:
            PortTakenError: another program listens on a coordinator's port.
        """
        return self.ask_all("start", [(group,) for group in groups])

    def free_port(self, host: int) -> int:
        """Return a port of a host that is free."""
        return self.answer(self.call(host, "free_port"), host)

    def restart(self) -> None:
        """Replace the worker processes by new ones."""
        self._kill()
        self._start_workers()

    def close(self) -> None:
        """End the workers and return the hosts.

        Checkpoints that are being written get `timeout` seconds to finish.
        """
        if self._writes and ray.is_initialized():
            ray.wait(self._writes, num_returns=len(self._writes), timeout=self.timeout)
        self._kill()
        self.reservation.release()

    def _kill(self) -> None:
        if ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor)
            self._failures()  # otherwise Ray prints them
        self._actors = []
        self._last_effects = []
        self._freed = []
        self._writes = []
        self._groups = None
        self._monitor = HealthMonitor([])
        self._readers.clear()
        self._pending.clear()
        self._live.clear()

    # -- calls

    def wait(self, devices: Iterable[int] | None = None) -> None:
        """Wait until the workers have executed all calls.

        Args:
            devices: wait only for the workers that have any of these devices.
        """
        self.ask(self.owner if devices is None else devices, "wait")
        self.check()

    def ask(self, devices: Iterable[int], method: str, *args: Any) -> list[Any]:
        """Call a method on the workers that have any of the devices and return the answers."""
        refs = [(host, self.call(host, method, *args)) for host in self.hosts_of(devices)]
        return self.answers(refs, is_slow=method in _SLOW)

    def ask_all(self, method: str, args: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Call a method on all workers and return the answers; `args` has an item per worker."""
        args = [()] * len(self._actors) if args is None else args
        refs = [(host, self.call(host, method, *given)) for host, given in enumerate(args)]
        return self.answers(refs, is_slow=method in _SLOW)

    def send(self, host: int, method: str, *args: Any) -> None:
        """Call a method on a worker without waiting; `check` raises its error later."""
        self._pending.append((host, self.call(host, method, *args)))

    def call(self, host: int, method: str, *args: Any) -> Any:
        """Call a method on a worker, to run after the calls before it; return Ray's reference.

        The last call that had an effect is an argument of this one: an actor with several
        concurrency groups may otherwise start calls in another order, as their arguments arrive.
        """
        actor = self._actor(host)
        freed = self._freed[host]
        keys = [freed.popleft() for _ in range(len(freed))]
        ref = actor.do.remote(self._last_effects[host], keys, has_x64(), method, *args)
        if method in _EFFECTS:
            self._last_effects[host] = ref
        return ref

    def call_reader(self, host: int, method: str, *args: Any) -> Any:
        """Call a method in the thread of a worker that reads batches; return Ray's reference.

        The thread executes its calls one after another, beside the steps.
        """
        match method:
            case "open_reader":
                self._readers.add((host, args[0]))
            case "close_reader":
                self._readers.discard((host, args[0]))
        reader = self._actor(host).do.options(concurrency_group="reading")
        return reader.remote(None, (), has_x64(), method, *args)

    def call_writer(self, host: int, *args: Any) -> Any:
        """Call `write` in a worker's thread for checkpoints; return Ray's reference."""
        return self._actor(host).write.options(concurrency_group="writing").remote(*args)

    def on_worker[T](self, host: int, function: Callable[[Any], T]) -> T:
        """Return `function(worker)`, evaluated on a worker after the calls that are pending.

        For tests: unlike `call` it passes on no keys to free.
        """
        refs = [ref for _, ref in self._pending]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=self.timeout)
        return ray.get(self._actor(host).__ray_call__.remote(function))

    def _actor(self, host: int) -> Any:
        if not self._actors:
            raise HostsError(
                "the workers have ended; call autopar.init(cluster='ray') to start others"
            )
        return self._actors[host]

    # -- answers and failures

    def answer(self, ref: Any, host: int) -> Any:
        """Return the answer of a call, unless a worker fails meanwhile.

        Raises:
            DataLoaderError: the worker could not read a batch.
        """
        return self.answers([(host, ref)])[0]

    def answers(self, refs: Sequence[tuple[int, Any]], is_slow: bool = False) -> list[Any]:
        """Return the answers of calls, unless a worker fails meanwhile.

        The others might wait for a failed worker for ever, so any failure ends the wait.

        Args:
            refs: hosts and references of their calls.
            is_slow: whether the calls may keep workers from reporting their activity.
        """
        end = time.monotonic() + self.timeout
        waiting = {ref: host for host, ref in refs}
        answers: dict[Any, Any] = {}
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=_POLL_SECONDS)
            for ref in done:
                host = waiting.pop(ref)
                try:
                    answers[ref] = ray.get(ref)
                except RayError as error:
                    self._fail(host, error)
            if not done:
                self.check()
                self._check_health(is_slow)
            if waiting and time.monotonic() > end:
                states = self._monitor.states(_ANSWER_SECONDS)
                raise self._late(
                    culprit(states, list(waiting.values())),
                    states,
                    f"has not done what it should within {self.timeout:.0f} s",
                    "Give autopar.init a larger timeout if this is how long it takes",
                )
        return [answers[ref] for _, ref in refs]

    def limit_pending(self, count: int) -> None:
        """Wait until at most `count` calls are pending, and raise the errors of the others."""
        while len(self._pending) > count:
            host, ref = self._pending[0]
            self.answer(ref, host)
            self.check()

    def check(self) -> None:
        """Raise the first error of the pending calls that have ended.

        Raises:
            HostLostError, StepFailedError: after all workers have been ended.
        """
        if not self._pending:
            return
        refs = [ref for _, ref in self._pending]
        done = set(ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[0])
        for host, ref in list(self._pending):
            if ref in done:
                self._pending.remove((host, ref))
                try:
                    ray.get(ref)
                except RayError as error:
                    self._fail(host, error)

    def _check_health(self, is_slow: bool) -> None:
        """Poll the workers' activity.

        Raises:
            HostTimeoutError: a worker is silent for too long; all workers have been ended.
        """
        self._monitor.poll(is_slow)
        # A user's function that reads batches may keep everything else in its process waiting.
        reading = {host for host, _ in self._readers}
        for host, seconds in enumerate(self._monitor.silence()):
            if seconds <= self.silence or is_slow or host in reading:
                continue
            states = self._monitor.states(_POLL_SECONDS)
            if states[host] is Unresponsive.MUTE:
                raise self._late(
                    host,
                    states,
                    f"has not reported its activity for {seconds:.0f} s",
                    "If it is only slow, increase AUTOPAR_SILENCE_SECONDS",
                )

    def _fail(self, host: int, error: RayError) -> None:
        """End all workers, which may wait for the one that failed, and raise the cause."""
        cause = getattr(error, "cause", None)
        if isinstance(cause, DataLoaderError):  # raised before any step waits for the batch
            cause.host = host
            cause.address = self.addresses[host]
            raise cause from None
        monitor = self._monitor
        states = monitor.states(_ANSWER_SECONDS)
        gone = (number for number, state in enumerate(states) if state is Unresponsive.GONE)
        lost = next(gone, None)
        causes = [cause, *self._failures()]
        self._kill()
        if isinstance(cause, HostsError) and lost is None:
            raise cause from None
        if not isinstance(error, RayActorError) and lost is None:
            raise error
        host = host if lost is None else lost
        last = monitor.last(host)
        failed = [str(failure) for failure in causes if isinstance(failure, StepFailedError)]
        raise HostLostError(
            host,
            self.addresses[host],
            reason(error) if isinstance(error, RayActorError) else "its worker has ended",
            self._meshes.get(host, ()),
            [*_activities(states, host), *failed],
            None if last is None else last.instruction,
        ) from None

    def _failures(self) -> list[Any]:
        """Return the causes of the pending calls that have failed."""
        causes = []
        for _, ref in self._pending:
            try:
                ray.get(ref, timeout=0)
            except RayError as error:
                causes.append(getattr(error, "cause", None))
        return causes

    def _late(
        self, host: int, states: Sequence[State], cause: str, remedy: str
    ) -> HostTimeoutError:
        """End all workers because one hangs, and return the error to raise."""
        state = states[host]
        if isinstance(state, Activity):
            activity: Activity | None = state
            cause += f": it {state}"
        else:
            activity = self._monitor.last(host)
            if activity is not None:
                cause += f", and was at {activity.instruction} before"
        self._kill()
        return HostTimeoutError(
            host,
            self.addresses[host],
            cause,
            self._meshes.get(host, ()),
            _activities(states, host),
            None if activity is None else activity.mesh,
            None if activity is None else activity.instruction,
            remedy,
        )


def _activities(states: Sequence[State], excluded: int) -> list[str]:
    """Describe the other hosts that are busy or do not answer."""
    return [
        f"host {host} {state.value if isinstance(state, Unresponsive) else state}"
        for host, state in enumerate(states)
        if host != excluded and state is not None
    ]


def reason(error: RayError) -> str:
    """Return the line of Ray's error that says why a worker is gone.

    This is the first line, or the last line of the traceback if the worker could not start.
    """
    lines = str(error).splitlines()
    return lines[-1] if "creation task" in lines[0] else lines[0]
