"""What hosts that die do to training: nothing, but that the steps since the last checkpoint run again.

    python -m experiments.chaos train                   # 200 steps of a small GPT, workers killed at 10 random moments
    python -m experiments.chaos train --victim host     # the first to go is a host, and the step is planned again for the others
    python -m experiments.chaos cycles                  # autopar.init, a step, shutdown; 50 times

Hosts are raylets on this machine, each with virtual CPU devices. `train` fails unless the parameters are those of a run that nobody
disturbed: bit for bit, or to rounding when the plan had to change. Both fail if processes, listening ports or placement groups are left.
"""

import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from experiments.models import GPT
from experiments.raylets import raylets

app = typer.Typer(add_completion=False, help=__doc__)

MODEL = GPT(
    num_layers=4, hidden_size=32, num_heads=4, sequence_length=16, vocab_size=64, batch_size=16
)


class Victim(StrEnum):
    WORKER = "worker"
    HOST = "host"


@app.command()
def train(
    steps: Annotated[int, typer.Option(help="Steps of training.")] = 200,
    kills: Annotated[int, typer.Option(help="How often something is killed.")] = 10,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 10,
    hosts: Annotated[int, typer.Option(help="Raylets on this machine.")] = 2,
    devices: Annotated[int, typer.Option(help="Virtual devices of each.")] = 4,
    victim: Annotated[
        Victim, typer.Option(help="What is killed first; afterwards it is workers.")
    ] = Victim.WORKER,
    seed: Annotated[int, typer.Option(help="Of the moments.")] = 0,
) -> None:
    """Train a GPT while workers are killed, and compare."""
    with _hosts(hosts) as cluster:
        start = time.monotonic()
        expected, _ = _trained(steps, save_every, hosts, devices)
        undisturbed = time.monotonic() - start
        moments = range(1, steps - steps // 8)  # what is killed after the last step nobody notices
        killer = _Killer(cluster, victim, sorted(random.Random(seed).sample(moments, kills)), seed)
        start = time.monotonic()
        found, told = _trained(steps, save_every, hosts, devices, killer.told)
        print(
            f"{steps} steps, {killer.count} of {kills} kills ({', '.join(killer.done)}): {len(told)} steps run, {len(told) - steps} of"
            f" them again; {time.monotonic() - start:.0f} s, undisturbed {undisturbed:.0f} s"
        )
        worst = max(
            float(np.max(np.abs(one - other))) for one, other in zip(expected, found, strict=True)
        )
        print(f"largest difference of a parameter: {worst:g}")
        # on fewer devices sums are rounded otherwise, and Adam's first steps are as large for gradients that are rounding
        tolerance = 0.0 if victim is Victim.WORKER else 5e-3
        if worst > tolerance or killer.count < kills or len(told) > steps + kills * 2 * save_every:
            sys.exit("training did not survive")


@app.command()
def cycles(
    count: Annotated[int, typer.Option(help="How often.")] = 50,
    hosts: Annotated[int, typer.Option(help="Raylets on this machine.")] = 2,
    devices: Annotated[int, typer.Option(help="Virtual devices of each.")] = 2,
) -> None:
    """Join, run a step, leave; what grows?"""
    with _hosts(hosts):
        args = MODEL.init_state(jax.random.key(0)), MODEL.make_batch(jax.random.key(0))
        rows = []
        for cycle in range(1, count + 1):
            autopar.init(cluster="ray", num_nodes=hosts, num_devices_per_node=devices)
            function = autopar.parallelize(step, method=_method())
            autopar.prefetch(function(*args)[1])
            autopar.shutdown()
            _wait(lambda: not _workers(), "workers after shutdown")
            rows.append(
                (
                    psutil.Process().memory_info().rss / 2**20,
                    len(_family()),
                    psutil.Process().num_fds(),
                )
            )
            if cycle in (1, 2, 5) or cycle % 10 == 0:
                print(
                    f"after {cycle:3}: {rows[-1][0]:5.0f} MiB in the driver, {rows[-1][1]} processes, {rows[-1][2]} files open"
                )
        settled, last = rows[min(4, count - 1)], rows[-1]
        if last[0] > settled[0] * 1.1 + 50 or last[1] > settled[1] + 2 or last[2] > settled[2] + 10:
            sys.exit("something grows from cycle to cycle")


def step(state: Any, batch: Any) -> Any:
    return MODEL.train_step(state, batch, autopar.value_and_grad)


def _method() -> autopar.PipeshardParallel:
    """Two stages, on whatever devices there are."""
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
    steps: int, save_every: int, hosts: int, devices: int, told: Callable[[int], None] | None = None
) -> tuple[list[np.ndarray], list[int]]:
    """The parameters after training on hosts, and the steps that were run, in their order."""
    run: list[int] = []

    def on_step(done: int, results: Any) -> None:
        run.append(done)
        if told is not None:
            told(done)
            autopar.prefetch(
                results[1]
            )  # else the driver has asked for everything before the first kill

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
    left = [
        each["state"] for each in placement_group_table().values() if each["state"] != "REMOVED"
    ]
    if left:
        sys.exit(f"placement groups are left: {left}")
    return params, run


class _Killer:
    """Kills something soon after certain steps have been asked for."""

    def __init__(self, cluster: Cluster, victim: Victim, steps: list[int], seed: int) -> None:
        self._cluster, self._victim, self._steps, self._random = (
            cluster,
            victim,
            steps,
            random.Random(seed),
        )
        self.done: list[str] = []

    @property
    def count(self) -> int:
        return len(self.done)

    def told(self, step: int) -> None:
        """A step has been asked for."""
        if self._steps and step >= self._steps[0]:
            threading.Timer(self._random.random() * 0.2, self._kill, [self._steps.pop(0)]).start()

    def _kill(self, step: int) -> None:
        if self._victim is Victim.HOST and not self.done:
            _family()  # the workers of that host are nobody's children afterwards
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
    """Raylets on this machine; afterwards nothing of them may be left."""
    ports = _ports()
    with raylets(count) as cluster:
        try:
            yield cluster
        finally:
            _family()
    _wait(lambda: not _family(), "processes")
    if _ports() - ports:
        sys.exit(f"ports are still listened on: {_ports() - ports}")


_seen: set[psutil.Process] = set()


def _family() -> list[psutil.Process]:
    """The processes that this one has started, those that they have, and of these also those whose parents are gone by now."""
    _seen.update(psutil.Process().children(recursive=True))
    return [each for each in _seen if _runs(each)]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _workers() -> list[psutil.Process]:
    found = []
    for each in _family():
        try:
            if "".join(each.cmdline()).startswith("ray::Worker"):
                found.append(each)
        except psutil.Error:
            pass  # it has just ended
    return found


def _ports() -> set[int]:
    """What this process listens on."""
    return {
        each.laddr.port
        for each in psutil.Process().net_connections()
        if each.status == psutil.CONN_LISTEN
    }


def _wait(is_so: Callable[[], bool], what: str, *, is_wanted: bool = False) -> None:
    end = time.monotonic() + 30
    while not is_so():
        if time.monotonic() > end:
            sys.exit(f"{what} {'do not come' if is_wanted else 'are left'}")
        time.sleep(0.1)


if __name__ == "__main__":
    app()
