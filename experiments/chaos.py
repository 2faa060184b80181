"""Fault injection: training on Ray hosts survives the death of workers and of a host.

    python -m experiments.chaos train                 # kills workers at 10 random moments
    python -m experiments.chaos train --victim host   # kills a host first, and plans again
    python -m experiments.chaos cycles                # autopar.init, a step, shutdown; 50 times

Hosts are raylets on this machine, each with virtual CPU devices. `train` fails unless the
parameters equal those of an undisturbed run: bit for bit, or to rounding if the plan had to change.
Both commands fail if they leave processes, listening ports or placement groups behind.
"""

import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import jax
import numpy as np
import psutil
import typer
from ray.cluster_utils import Cluster
from ray.util import placement_group_table
from rich import print

import autopar
from autopar.testing import raylets
from experiments.models import GPT

app = typer.Typer(add_completion=False, help=__doc__)

MODEL = GPT(
    num_layers=4, hidden_size=32, num_heads=4, sequence_length=16, vocab_size=64, batch_size=16
)


class Victim(StrEnum):
    """The kind of process that is killed first."""

    WORKER = "worker"
    HOST = "host"


@app.command()
def train(
    steps: Annotated[int, typer.Option(help="Steps of training.")] = 200,
    kills: Annotated[int, typer.Option(help="How many processes are killed.")] = 10,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 10,
    hosts: Annotated[int, typer.Option(help="Raylets on this machine.")] = 2,
    devices: Annotated[int, typer.Option(help="Virtual devices of each.")] = 4,
    victim: Annotated[
        Victim, typer.Option(help="What is killed first; all others are workers.")
    ] = Victim.WORKER,
    seed: Annotated[int, typer.Option(help="Seed of the moments.")] = 0,
) -> None:
    """Train a GPT while workers are killed, and compare with an undisturbed run."""
    result = survived(steps, kills, save_every, hosts, devices, victim, seed)
    print(
        f"{steps} steps, {result.kills} of {kills} kills ({', '.join(result.moments)}):"
        f" {steps + result.steps_again} steps run, {result.steps_again} of them again;"
        f" {result.seconds:.0f} s, undisturbed {result.undisturbed_seconds:.0f} s"
    )
    print(f"largest difference of a parameter: {result.largest_difference:g}")
    # On fewer devices sums are rounded differently, and Adam's first steps are as large for
    # gradients that are nothing but rounding.
    tolerance = 0.0 if victim is Victim.WORKER else 5e-3
    too_many = result.steps_again > kills * 2 * save_every
    if result.largest_difference > tolerance or result.kills < kills or too_many:
        sys.exit("training did not survive")


@dataclass(frozen=True, slots=True)
class Survival:
    """A training whose processes were killed, beside an undisturbed one.

    Attributes:
        kills: how many processes were killed.
        moments: when, in words.
        steps_again: steps that ran again, after the last checkpoint.
        seconds: seconds of the training.
        undisturbed_seconds: seconds of the undisturbed one.
        largest_difference: largest difference of a parameter between both.
    """

    kills: int
    moments: tuple[str, ...]
    steps_again: int
    seconds: float
    undisturbed_seconds: float
    largest_difference: float


def survived(
    steps: int, kills: int, save_every: int, hosts: int, devices: int, victim: Victim, seed: int
) -> Survival:
    """Train a GPT undisturbed, and again while processes are killed; see `train`.

    Args:
        steps: steps of training.
        kills: how many processes are killed.
        save_every: steps between checkpoints.
        hosts: raylets on this machine.
        devices: virtual devices of each.
        victim: what is killed first; all others are workers.
        seed: seed of the moments.
    """
    with _hosts(hosts) as cluster:
        start = time.monotonic()
        expected, _ = _trained(steps, save_every, hosts, devices)
        undisturbed = time.monotonic() - start
        # A kill after the last step would have no effect, so the last eighth of the steps is safe.
        moments = range(1, steps - steps // 8)
        killer = _Killer(cluster, victim, sorted(random.Random(seed).sample(moments, kills)), seed)
        start = time.monotonic()
        actual, executed = _trained(steps, save_every, hosts, devices, killer.after_step)
        seconds = time.monotonic() - start
    worst = max(
        float(np.max(np.abs(one - other))) for one, other in zip(expected, actual, strict=True)
    )
    again = len(executed) - steps
    return Survival(killer.count, tuple(killer.done), again, seconds, undisturbed, worst)


@app.command()
def cycles(
    count: Annotated[int, typer.Option(help="Number of cycles.")] = 50,
    hosts: Annotated[int, typer.Option(help="Raylets on this machine.")] = 2,
    devices: Annotated[int, typer.Option(help="Virtual devices of each.")] = 2,
) -> None:
    """Join, run a step and leave, repeatedly; fail if memory, processes or open files grow."""
    with _hosts(hosts):
        args = MODEL.init_state(jax.random.key(0)), MODEL.make_batch(jax.random.key(0))
        rows = []
        for cycle in range(1, count + 1):
            autopar.init(cluster="ray", num_nodes=hosts, num_devices_per_node=devices)
            function = autopar.parallelize(step, method=_method())
            autopar.prefetch(function(*args)[1])
            autopar.shutdown()
            _wait(lambda: not _workers(), "workers after shutdown")
            driver = psutil.Process()
            rows.append((driver.memory_info().rss / 2**20, len(_descendants()), driver.num_fds()))
            if cycle in (1, 2, 5) or cycle % 10 == 0:
                memory, processes, files = rows[-1]
                print(
                    f"after {cycle:3}: {memory:5.0f} MiB in the driver, {processes} processes,"
                    f" {files} files open"
                )
        settled, last = rows[min(4, count - 1)], rows[-1]
        if last[0] > settled[0] * 1.1 + 50 or last[1] > settled[1] + 2 or last[2] > settled[2] + 10:
            sys.exit("something grows from cycle to cycle")


def step(state: Any, batch: Any) -> Any:
    """Run a training step whose gradients are accumulated over microbatches."""
    return MODEL.train_step(state, batch, autopar.value_and_grad)


def _method() -> autopar.PipeshardParallel:
    """Return a method with two stages, for any devices."""
    return autopar.PipeshardParallel(
        num_micro_batches=2,
        layer_option=autopar.AutoLayerOption(2),
        stage_option=autopar.UniformStageOption(2),
    )


def _batches(first: int) -> Iterator[Any]:
    while True:
        yield MODEL.make_batch(jax.random.key(first))
        first += 1


def _trained(
    steps: int,
    save_every: int,
    hosts: int,
    devices: int,
    after_step: Callable[[int], None] | None = None,
) -> tuple[list[np.ndarray], list[int]]:
    """Train on hosts, and return the parameters and the numbers of the steps in the order they ran.

    Args:
        steps: number of steps.
        save_every: steps between checkpoints.
        hosts: number of hosts.
        devices: devices of each host.
        after_step: called with the number of each step that has been dispatched.
    """
    executed: list[int] = []

    def on_step(done: int, results: Any) -> None:
        executed.append(done)
        if after_step is not None:
            after_step(done)
            # Without blocking, the driver would dispatch all steps before the first kill.
            autopar.prefetch(results[1])

    autopar.init(cluster="ray", num_nodes=hosts, num_devices_per_node=devices, timeout=120)
    function = autopar.parallelize(step, method=_method())
    state = MODEL.init_state(jax.random.key(0))
    with tempfile.TemporaryDirectory() as folder:
        state = autopar.train(
            function, state, _batches, steps, folder, save_every=save_every, on_step=on_step
        )
        autopar.prefetch(state.params)
    params = [np.array(leaf) for leaf in jax.tree.leaves(state.params)]
    del state
    autopar.shutdown()
    groups = [group["state"] for group in placement_group_table().values()]
    left = [status for status in groups if status != "REMOVED"]
    if left:
        sys.exit(f"placement groups are left: {left}")
    return params, executed


class _Killer:
    """Kills a process soon after each of certain steps has been dispatched."""

    def __init__(self, cluster: Cluster, victim: Victim, steps: list[int], seed: int) -> None:
        self._cluster = cluster
        self._victim = victim
        self._steps = steps
        self._random = random.Random(seed)
        self.done: list[str] = []

    @property
    def count(self) -> int:
        """Number of kills so far."""
        return len(self.done)

    def after_step(self, step: int) -> None:
        """Start the timer of the next kill, if it is due after this step."""
        if self._steps and step >= self._steps[0]:
            threading.Timer(self._random.random() * 0.2, self._kill, [self._steps.pop(0)]).start()

    def _kill(self, step: int) -> None:
        if self._victim is Victim.HOST and not self.done:
            _descendants()  # records the workers of that host, which lose their parent
            self._cluster.remove_node(
                self._random.choice(sorted(self._cluster.worker_nodes, key=id)),
                allow_graceful=False,
            )
            self.done.append(f"a host after step {step}")
            return
        _wait(lambda: bool(_workers()), "workers to kill", is_wanted=True)
        self._random.choice(_workers()).kill()
        self.done.append(f"after step {step}")


@contextmanager
def _hosts(count: int) -> Iterator[Cluster]:
    """Start raylets on this machine, and exit with an error if they leave processes or ports."""
    ports = _ports()
    with raylets(count) as cluster:
        try:
            yield cluster
        finally:
            _descendants()
    _wait(lambda: not _descendants(), "processes")
    if _ports() - ports:
        sys.exit(f"ports are still listened on: {_ports() - ports}")


_seen: set[psutil.Process] = set()


def _descendants() -> list[psutil.Process]:
    """Return the running descendants of this process, also orphans that were seen before."""
    _seen.update(psutil.Process().children(recursive=True))
    return [process for process in _seen if _runs(process)]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _workers() -> list[psutil.Process]:
    workers = []
    for process in _descendants():
        try:
            if "".join(process.cmdline()).startswith("ray::Worker"):
                workers.append(process)
        except psutil.Error:
            pass  # it has just ended
    return workers


def _ports() -> set[int]:
    """Return the ports that this process listens on."""
    return {
        connection.laddr.port
        for connection in psutil.Process().net_connections()
        if connection.status == psutil.CONN_LISTEN
    }


def _wait(is_so: Callable[[], bool], what: str, *, is_wanted: bool = False) -> None:
    """Wait until a condition holds; exit with an error after 30 seconds."""
    end = time.monotonic() + 30
    while not is_so():
        if time.monotonic() > end:
            sys.exit(f"{what} {'do not come' if is_wanted else 'are left'}")
        time.sleep(0.1)


if __name__ == "__main__":
    app()
