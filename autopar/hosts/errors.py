"""What can go wrong on many hosts, by what a user can do about it."""


class HostsError(RuntimeError):
    """Something is wrong with the hosts; after it the workers are gone, and what they held."""


class PortTakenError(HostsError):
    """Somebody else listens on a port that was free when it was asked for."""


class HostLostError(HostsError):
    """A worker has died, or its host.

    Attributes:
        host: its number.
        cause: what Ray says of it.
    """

    def __init__(self, host: int, address: str, cause: str) -> None:
        super().__init__(
            f"host {host} ({address}) is lost: {cause}. What it held is gone; restore a checkpoint, on the hosts that remain or with"
            " the host back"
        )
        self.host, self.cause = host, cause


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
