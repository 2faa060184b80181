"""Workers of the tests' cluster: had, killed, looked at."""

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import autopar
from autopar.hosts import session

if TYPE_CHECKING:
    from autopar.hosts.driver import RayHosts


def joined(hosts: int, devices: int) -> "RayHosts":
    """As many hosts with so many devices each; those that there are, if they are that many and alive."""
    here = session.hosts()
    if here is None or not here.is_running or list(map(len, here.numbers)) != [devices] * hosts:
        autopar.init(cluster="ray", num_nodes=hosts, num_devices_per_node=devices, timeout=120)
    return joined_hosts()


def joined_hosts() -> "RayHosts":
    """The hosts that have been joined."""
    hosts = session.hosts()
    assert hosts is not None
    return hosts


def pipeline(stages: int, **options: Any) -> autopar.PipeshardParallel:
    """As many stages, of equal size, and four microbatches."""
    return autopar.PipeshardParallel(
        num_micro_batches=4, stage_option=autopar.UniformStageOption(stages), **options
    )


def pids() -> list[int]:
    """The processes of the workers."""
    return [each["pid"] for each in joined_hosts().ask_all("environment")]


def disturbed(hosts: "RayHosts", host: int, name: str, disturb: Callable[[], None]) -> None:
    """From now on the worker does something else before an instruction."""

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
    """Whether it comes true in time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()
