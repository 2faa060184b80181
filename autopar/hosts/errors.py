"""What can go wrong on many hosts, by what a user can do about it."""

from collections.abc import Sequence


class HostsError(RuntimeError):
    """Something is wrong with the hosts; after it the workers are gone, and what they held."""


class PortTakenError(HostsError):
    """Somebody else listens on a port that was free when it was asked for."""


class HostError(HostsError):
    """Something is wrong with one host.

    Attributes:
        host: its number.
        meshes: those that it has devices of, in the step that ran last.
        instruction: the one that it is at, or was when it was heard of last; None if that is not known.
    """

    def __init__(
        self, host: int, message: str, meshes: Sequence[int] = (), instruction: str | None = None
    ) -> None:
        super().__init__(message)
        self.host, self.meshes, self.instruction = host, tuple(meshes), instruction


class HostLostError(HostError):
    """A worker has died, or its host.

    Attributes:
        cause: what Ray says of it.
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
        """`others`: what the other hosts were doing."""
        last = f" last heard of at {instruction}," if instruction else ""
        message = (
            f"{_named(host, address, meshes)}{last} is lost: {cause}.{_meanwhile(others)}"
            " What it held is gone; restore a checkpoint, on the hosts that remain or with the host back"
        )
        super().__init__(host, message, meshes, instruction)
        self.cause = cause


class HostTimeoutError(HostError):
    """A worker has not finished what it was asked for in time, or does not even say what it is doing.

    Attributes:
        mesh: that of the instruction.
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
        todo: str = "",
    ) -> None:
        """`others`: what the other hosts were doing."""
        message = f"{_named(host, address, meshes)} {cause}.{_meanwhile(others)} {todo}".rstrip()
        super().__init__(host, message, meshes, instruction)
        self.mesh = mesh


class StepFailedError(HostError):
    """An instruction has failed on a worker.

    Attributes:
        mesh: that of the instruction.
    """

    def __init__(self, host: int, mesh: int, instruction: str, cause: str) -> None:
        super().__init__(
            host,
            f"host {host}, mesh {mesh}, instruction {instruction!r}: {cause}",
            (mesh,),
            instruction,
        )
        self.mesh = mesh


def _named(host: int, address: str, meshes: Sequence[int]) -> str:
    of = f", mesh {' and '.join(map(str, meshes))} of the step," if meshes else ""
    return f"host {host} ({address}){of}"


def _meanwhile(others: Sequence[str]) -> str:
    return f" Meanwhile {'; '.join(others)}." if others else ""
