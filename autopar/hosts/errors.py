"""What can go wrong on many hosts, by what a user can do about it."""

from collections.abc import Sequence


class HostsError(RuntimeError):
    """Something is wrong with the hosts; after it the workers are gone, and what they held."""


class PortTakenError(HostsError):
    """Somebody else listens on a port that was free when it was asked for."""


class HostLostError(HostsError):
    """A worker has died, or its host.

    Attributes:
        host: its number.
        meshes: those that it has devices of, in the step that ran last.
        instruction: the one that it was at when it was heard of last; None if that is not known.
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
        super().__init__(
            f"{_named(host, address, meshes)}{f' last heard of at {instruction},' if instruction else ''} is lost: {cause}."
            f"{_meanwhile(others)} What it held is gone; restore a checkpoint, on the hosts that remain or with the host back"
        )
        self.host, self.cause, self.meshes, self.instruction = host, cause, tuple(meshes), instruction


class HostTimeoutError(HostsError):
    """A worker has not finished what it was asked for in time, or does not even say what it is doing.

    Attributes:
        host: its number.
        meshes: those that it has devices of, in the step that ran last.
        mesh, instruction: what it is at, as far as it has said; else None.
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
        super().__init__(f"{_named(host, address, meshes)} {cause}.{_meanwhile(others)} {todo}".rstrip())
        self.host, self.meshes, self.mesh, self.instruction = host, tuple(meshes), mesh, instruction


def _named(host: int, address: str, meshes: Sequence[int]) -> str:
    of = f", mesh {' and '.join(map(str, meshes))} of the step," if meshes else ""
    return f"host {host} ({address}){of}"


def _meanwhile(others: Sequence[str]) -> str:
    return f" Meanwhile {'; '.join(others)}." if others else ""


class StepFailedError(HostsError):
    """An instruction has failed on a worker.

    Attributes:
        host, mesh, instruction: where, and which one.
    """

    def __init__(self, host: int, mesh: int, instruction: str, cause: str) -> None:
        super().__init__(f"host {host}, mesh {mesh}, instruction {instruction!r}: {cause}")
        self.host, self.mesh, self.instruction = host, mesh, instruction
