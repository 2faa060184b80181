"""Helpers for tests on workers: joining hosts, disturbing workers, watching their processes."""

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import autopar
from autopar.hosts import session

if TYPE_CHECKING:
    from autopar.hosts.driver import RayHosts


def joined(hosts: int, devices: int) -> "RayHosts":
    """Return this many hosts with this many devices each, reusing running workers that fit."""
    here = session.hosts()
    if here is None or not here.is_running or list(map(len, here.numbers)) != [devices] * hosts:
        autopar.init(cluster="ray", num_nodes=hosts, num_devices_per_node=devices, timeout=120)
    return joined_hosts()


def joined_hosts() -> "RayHosts":
    """Return the hosts of the current session."""
    hosts = session.hosts()
    assert hosts is not None
    return hosts


def pipeline(stages: int, **options: Any) -> autopar.PipeshardParallel:
    """Return a pipeline with equal stages and four microbatches."""
    return autopar.PipeshardParallel(
        num_micro_batches=4, stage_option=autopar.UniformStageOption(stages), **options
    )


def pids() -> list[int]:
    """Return the process ids of the workers."""
    return [each["pid"] for each in joined_hosts().ask_all("environment")]


def disturbed(hosts: "RayHosts", host: int, name: str, disturb: Callable[[], None]) -> None:
    """Make a worker call `disturb` before an instruction from now on."""

    def insert(worker: Any) -> None:
        for loaded in worker.jobs.values():
            execute = loaded.execute

            def instead(
                mesh: int, instruction: Any, values: Any, tag: int, execute: Any = execute
            ) -> None:
                if str(instruction) == name:
                    disturb()
                execute(mesh, instruction, values, tag)

            loaded.execute = instead

    hosts.on_worker(host, insert)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def until(condition: Callable[[], bool], seconds: float = 20) -> bool:
    """Return whether the condition becomes true in time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()
