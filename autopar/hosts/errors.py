"""Errors of hosts, by what a user can do about them."""

from collections.abc import Sequence
from typing import Any


class HostsError(RuntimeError):
    """The hosts can't be used. Workers that were running have ended, and their arrays are lost."""


class PortTakenError(HostsError):
    """A program listens on a port that was free a moment before."""


class HostError(HostsError):
    """One host failed.

    Attributes:
        host: number of the host.
        meshes: the host's meshes in the step that ran last.
        instruction: the instruction that the host last reported; None if unknown.
    """

    def __init__(
        self, host: int, message: str, meshes: Sequence[int] = (), instruction: str | None = None
    ) -> None:
        super().__init__(message)
        self.host = host
        self.meshes = tuple(meshes)
        self.instruction = instruction


class HostLostError(HostError):
    """A worker or its host died.

    Attributes:
        cause: Ray's explanation.
    """

    def __init__(
        self,
        host: int,
        address: str,
        cause: str,
        meshes: Sequence[int] = (),
        others: Sequence[str] = (),
        instruction: str | None = None,
    ) -> None:
        """Compose the message; `others` are the activities of the other hosts."""
        last = f" last heard of at {instruction}," if instruction else ""
        message = (
            f"{_named(host, address, meshes)}{last} is lost: {cause}.{_meanwhile(others)}"
            " Its arrays are gone; restore a checkpoint, on the hosts that remain or with the host"
            " back"
        )
        super().__init__(host, message, meshes, instruction)
        self.cause = cause


class HostTimeoutError(HostError):
    """A worker did not finish a call in time, or does not report its activity.

    Attributes:
        mesh: the mesh of the instruction.
    """

    def __init__(
        self,
        host: int,
        address: str,
        cause: str,
        meshes: Sequence[int] = (),
        others: Sequence[str] = (),
        mesh: int | None = None,
        instruction: str | None = None,
        remedy: str = "",
    ) -> None:
        """Compose the message; `others` are the activities of the other hosts."""
        message = f"{_named(host, address, meshes)} {cause}.{_meanwhile(others)} {remedy}".rstrip()
        super().__init__(host, message, meshes, instruction)
        self.mesh = mesh


class StepFailedError(HostError):
    """An instruction of a step failed on a worker.

    Attributes:
        mesh: the mesh of the instruction, or -1 if the arguments were at fault.
        cause: type and message of the exception.
    """

    def __init__(self, host: int, mesh: int, instruction: str, cause: str) -> None:
        message = f"host {host}, mesh {mesh}, instruction {instruction!r}: {cause}"
        super().__init__(host, message, (mesh,), instruction)
        self.mesh = mesh
        self.cause = cause

    def __reduce__(self) -> tuple[Any, ...]:
        """Let Ray send the error from the worker to the driver."""
        return StepFailedError, (self.host, self.mesh, self.instruction, self.cause)


def _named(host: int, address: str, meshes: Sequence[int]) -> str:
    mesh = f", mesh {' and '.join(map(str, meshes))} of the step," if meshes else ""
    return f"host {host} ({address}){mesh}"


def _meanwhile(others: Sequence[str]) -> str:
    return f" Meanwhile {'; '.join(others)}." if others else ""
