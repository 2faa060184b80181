"""Pieces of values on their way from worker to worker: from device memory to device memory, with JAX's transfer servers.

Who sends only says what may be fetched; who receives fetches it. So nobody waits for a receiver, and the driver sees nothing of it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import transfer

from autopar.devices import Device


class Mailbox:
    """A worker's end of the transfers.

    Attributes:
        address: where others connect to.
    """

    def __init__(self, device: Device, host: str) -> None:
        client = device.client
        ports = [f"{host}:0"] * 4  # sockets that large arrays are spread over
        self._server: Any = transfer.start_transfer_server(client, f"{host}:0", ports)
        self.address = str(self._server.address())
        self._peers: Mapping[int, str] = {}
        self._connections: dict[int, Any] = {}

    def meet(self, peers: Mapping[int, str]) -> None:
        """Learn the addresses of the other workers."""
        self._peers, self._connections = dict(peers), {}

    def offer(self, letter: int, arrays: Sequence[jax.Array]) -> None:
        """Let the receiver fetch arrays of single devices; `letter` tells them from everything else that is sent."""
        self._server.await_pull(letter, list(arrays))

    def fetch(
        self, sender: int, letter: int, avals: Sequence[jax.ShapeDtypeStruct]
    ) -> list[jax.Array]:
        """The arrays that a worker offers, each on the device that its sharding says; they may be still on their way."""
        if sender not in self._connections:
            self._connections[sender] = self._server.connect(self._peers[sender])
        return self._connections[sender].pull(letter, list(avals))
