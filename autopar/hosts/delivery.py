"""Deliveries seen from one worker: the pieces it cuts and offers, and those it fetches and joins."""

from collections import defaultdict
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from autopar.devices import Device
from autopar.hosts.mailbox import Mailbox
from autopar.lowering.cross_mesh_resharding import Piece, tiles
from autopar.lowering.job import Delivery, Place
from autopar.runtime.pieces import cutting, joining


class PieceCarrier:
    """One delivery, on a worker that has devices of the mesh that sends, of the one that receives, or of both.

    Each piece goes from worker to worker once, all those between two workers as one letter. What copies lack is gathered inside the
    mesh that receives.
    """

    def __init__(
        self,
        delivery: Delivery,
        worker: int,
        owner: Mapping[int, int],
        devices: Mapping[int, Device],
        mailbox: Mailbox | None,
    ) -> None:
        """Compile it.

        Args:
            owner: the worker that has each device.
            devices: those of this worker, and of those it shares a mesh with.
        """
        self._mailbox, self._worker, plan = mailbox, worker, delivery.plan
        sources, targets = delivery.source.devices, delivery.to.devices
        self._here: dict[int, list[jax.Array]] = {}
        self._letters: dict[tuple[int, int], list[int]] = defaultdict(
            list
        )  # (sender, receiver): pieces
        for number, piece in enumerate(plan.pieces):
            self._letters[owner[sources[piece.source]], owner[targets[piece.destination]]].append(
                number
            )

        def target(piece: Piece) -> SingleDeviceSharding:
            return SingleDeviceSharding(devices[targets[piece.destination]])

        held = tiles(plan.shape, *plan.source)
        self._cuts = []
        for position, number in enumerate(sources):
            mine = [n for n, piece in enumerate(plan.pieces) if piece.source == position]
            if owner[number] == worker and mine:
                cut = cutting(
                    [plan.pieces[n].tile for n in mine],
                    held[position],
                    delivery.dtype,
                    devices[number],
                )
                self._cuts.append((devices[number], mine, cut))
        self._places = [target(plan.pieces[n]) for n in self._letters.get((worker, worker), ())]
        self._avals = {
            sender: [
                jax.ShapeDtypeStruct(
                    _extent(plan.pieces[n]), delivery.dtype, sharding=target(plan.pieces[n])
                )
                for n in numbers
            ]
            for (sender, receiver), numbers in self._letters.items()
            if receiver == worker
        }
        self._joins = []
        for position, number in enumerate(targets):
            if owner[number] == worker:
                mine = [n for n, piece in enumerate(plan.pieces) if piece.destination == position]
                join = joining([plan.pieces[n].tile for n in mine], delivery.dtype, devices[number])
                self._joins.append((mine, join))
        if self._joins:
            self._shape, self._landing = (
                plan.shape,
                Place(delivery.to, plan.landing).sharding(devices),
            )
            self._complete = None
            if plan.gathers:
                wanted = Place(delivery.to, plan.spec).sharding(devices)
                landed = jax.ShapeDtypeStruct(plan.shape, delivery.dtype, sharding=self._landing)
                self._complete = (
                    jax.jit(lambda landed: landed, out_shardings=wanted).lower(landed).compile()
                )

    def send(self, value: jax.Array, letter: int, is_used_up: bool) -> None:
        """Cut what is here of the value and let every receiver have its pieces. Letters are numbered up from `letter`.

        Args:
            is_used_up: whether the memory of the value may be used for something else before its pieces are fetched.
        """
        shards = {shard.device: shard.data for shard in value.addressable_shards}
        pieces: dict[int, jax.Array] = {}
        for device, numbers, cut in self._cuts:
            shard = jnp.copy(shards[device]) if is_used_up else shards[device]
            pieces.update(zip(numbers, cut(shard), strict=True))
        for (sender, receiver), numbers in self._letters.items():
            if sender != self._worker:
                continue
            arrays = [pieces[n] for n in numbers]
            if receiver == self._worker:
                self._here[letter] = jax.device_put(arrays, self._places)
            else:
                assert self._mailbox is not None
                self._mailbox.offer(letter + receiver, arrays)

    def wait(self) -> None:
        """Wait for nothing: what is sent may be received at once."""

    def receive(self, letter: int) -> jax.Array:
        """Return the value, of everything that was sent to this worker, when it is there."""
        pieces: dict[int, jax.Array] = {}
        for sender, avals in self._avals.items():
            if sender == self._worker:
                arrays = self._here.pop(letter)
            else:
                assert self._mailbox is not None
                arrays = self._mailbox.fetch(sender, letter + self._worker, avals)
            pieces.update(zip(self._letters[sender, self._worker], arrays, strict=True))
        parts = [join([pieces[n] for n in numbers]) for numbers, join in self._joins]
        landed = jax.make_array_from_single_device_arrays(self._shape, self._landing, parts)
        return jax.block_until_ready(landed if self._complete is None else self._complete(landed))


def _extent(piece: Piece) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in piece.tile)
