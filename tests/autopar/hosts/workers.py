"""Helpers for tests on workers: joining hosts, delaying instructions, watching processes."""

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import autopar
from autopar.hosts import session

if TYPE_CHECKING:
    from autopar.hosts.driver import RayHosts


def join_hosts(hosts: int, devices: int) -> "RayHosts":
    """Return this many hosts with this many devices each, reusing running workers that fit."""
    current = session.hosts()
    if (
        current is None
        or not current.is_running
        or list(map(len, current.numbers)) != [devices] * hosts
    ):
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
    return [environment["pid"] for environment in joined_hosts().ask_all("environment")]


def call_before_instruction(
    hosts: "RayHosts", host: int, instruction_text: str, action: Callable[[], None]
) -> None:
    """Make a worker call `action` before each execution of an instruction."""

    def insert(worker: Any) -> None:
        for job in worker.jobs.values():
            execute = job.execute

            def execute_after_call(
                mesh: int, instruction: Any, values: Any, tag: int, execute: Any = execute
            ) -> None:
                if str(instruction) == instruction_text:
                    action()
                execute(mesh, instruction, values, tag)

            job.execute = execute_after_call

    hosts.on_worker(host, insert)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def until(condition: Callable[[], bool], seconds: float = 20) -> bool:
    """Return whether the condition becomes true within `seconds`."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()
