"""Transfers between workers, from device memory to device memory, with JAX's transfer servers.

The sender offers arrays and the receiver pulls them. So senders do not wait for receivers, and the
data bypasses the driver.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import transfer

from autopar.devices import Device

_SOCKETS = 4
"""Number of sockets that a large array is spread over."""


class Mailbox:
    """One worker's end of the transfers.

    Attributes:
        address: the address that other workers connect to.
    """

    def __init__(self, device: Device, host: str) -> None:
        """Start a transfer server for the client of a device, on the address `host`."""
        address = f"{host}:0"
        self._server: Any = transfer.start_transfer_server(
            device.client, address, [address] * _SOCKETS
        )
        self.address = str(self._server.address())
        self._peers: Mapping[int, str] = {}
        self._connections: dict[int, Any] = {}

    def meet(self, peers: Mapping[int, str]) -> None:
        """Set the addresses of the other workers."""
        self._peers = dict(peers)
        self._connections = {}

    def offer(self, tag: int, arrays: Sequence[jax.Array]) -> None:
        """Offer single-device arrays to the worker that will ask for `tag`."""
        self._server.await_pull(tag, list(arrays))

    def fetch(
        self, sender: int, tag: int, avals: Sequence[jax.ShapeDtypeStruct]
    ) -> list[jax.Array]:
        """Return the arrays that a worker offers under `tag`; they may still be in flight.

        Args:
            sender: number of the worker.
            tag: identifies the offer.
            avals: types of the arrays, with the sharding that places each on one device.
        """
        if sender not in self._connections:
            self._connections[sender] = self._server.connect(self._peers[sender])
        return self._connections[sender].pull(tag, list(avals))
