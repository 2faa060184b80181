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
        cause: what Ray says of it.
    """

    def __init__(
        self, host: int, address: str, cause: str, meshes: Sequence[int] = (), others: Sequence[str] = ()
    ) -> None:
        """`others`: what the other hosts were doing."""
        of = f", mesh {' and '.join(map(str, meshes))} of the step," if meshes else ""
        meanwhile = f" Meanwhile {'; '.join(others)}." if others else ""
        super().__init__(
            f"host {host} ({address}){of} is lost: {cause}.{meanwhile} What it held is gone; restore a checkpoint, on the hosts that"
            " remain or with the host back"
        )
        self.host, self.cause, self.meshes = host, cause, tuple(meshes)


class HostTimeoutError(HostsError):
    """A worker has not finished what it was asked for in time."""


class StepFailedError(HostsError):
    """An instruction has failed on a worker.

    Attributes:
        host, mesh, instruction: where, and which one.
    """

    def __init__(self, host: int, mesh: int, instruction: str, cause: str) -> None:
        super().__init__(f"host {host}, mesh {mesh}, instruction {instruction!r}: {cause}")
        self.host, self.mesh, self.instruction = host, mesh, instruction
