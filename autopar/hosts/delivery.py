"""Deliveries on one worker: the pieces of values that it cuts and sends, or receives and joins."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, SingleDeviceSharding

from autopar.devices import Device
from autopar.hosts.mailbox import Mailbox
from autopar.lowering.cross_mesh_resharding import Piece, tiles
from autopar.lowering.job import Delivery, Place
from autopar.runtime.pieces import cutting, joining


class PieceCarrier:
    """One delivery on a worker that has devices of the sending mesh, the receiving mesh, or both.

    Each piece is transferred from worker to worker once; all pieces between two workers form one
    message. Shards that need more than their pieces are gathered inside the receiving mesh.
    """

    def __init__(
        self,
        delivery: Delivery,
        worker: int,
        owner: Mapping[int, int],
        devices: Mapping[int, Device],
        mailbox: Mailbox | None,
    ) -> None:
        """Compile the programs that cut, join and gather.

        Args:
            delivery: the delivery.
            worker: number of this worker.
            owner: for each device its worker.
            devices: devices by number, of this worker and of those that it shares a mesh with.
            mailbox: this worker's end of the transfers.
        """
        self._mailbox = mailbox
        self._worker = worker
        self._plan = delivery.plan
        self._sources = delivery.source.devices
        self._targets = delivery.to.devices
        # Pieces that this worker sends to itself, by tag.
        self._local: dict[int, list[jax.Array]] = {}
        # (sender, receiver): numbers of the pieces in their message.
        self._messages: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, piece in enumerate(self._plan.pieces):
            sender = owner[self._sources[piece.source]]
            receiver = owner[self._targets[piece.destination]]
            self._messages[sender, receiver].append(number)
        self._compile_cuts(delivery, owner, devices)
        self._compile_joins(delivery, owner, devices)
        local = self._messages.get((worker, worker), ())
        self._places = [self._target(self._plan.pieces[n], devices) for n in local]
        self._avals = {
            sender: [self._aval(delivery, number, devices) for number in numbers]
            for (sender, receiver), numbers in self._messages.items()
            if receiver == worker
        }

    def _target(self, piece: Piece, devices: Mapping[int, Device]) -> SingleDeviceSharding:
        return SingleDeviceSharding(devices[self._targets[piece.destination]])

    def _aval(
        self, delivery: Delivery, number: int, devices: Mapping[int, Device]
    ) -> jax.ShapeDtypeStruct:
        piece = self._plan.pieces[number]
        shape = tuple(stop - start for start, stop in piece.tile)
        return jax.ShapeDtypeStruct(shape, delivery.dtype, sharding=self._target(piece, devices))

    def _compile_cuts(
        self, delivery: Delivery, owner: Mapping[int, int], devices: Mapping[int, Device]
    ) -> None:
        """Compile for each sending device of this worker the program that cuts its shard."""
        plan = self._plan
        shards = tiles(plan.shape, *plan.source)
        self._cuts: list[tuple[Device, list[int], Callable[..., list]]] = []
        for position, number in enumerate(self._sources):
            pieces = [n for n, piece in enumerate(plan.pieces) if piece.source == position]
            if owner[number] == self._worker and pieces:
                wanted = [plan.pieces[n].tile for n in pieces]
                cut = cutting(wanted, shards[position], delivery.dtype, devices[number])
                self._cuts.append((devices[number], pieces, cut))

    def _compile_joins(
        self, delivery: Delivery, owner: Mapping[int, int], devices: Mapping[int, Device]
    ) -> None:
        """Compile the programs that join pieces to shards, and gather what shards lack."""
        plan = self._plan
        self._joins: list[tuple[list[int], Callable[[list], jax.Array]]] = []
        self._landing: NamedSharding | None = None
        self._complete: jax.stages.Compiled | None = None
        for position, number in enumerate(self._targets):
            if owner[number] == self._worker:
                pieces = [n for n, piece in enumerate(plan.pieces) if piece.destination == position]
                parts = [plan.pieces[n].tile for n in pieces]
                self._joins.append((pieces, joining(parts, delivery.dtype, devices[number])))
        if not self._joins:
            return
        self._landing = Place(delivery.to, plan.landing).sharding(devices)
        if plan.gathers:
            wanted = Place(delivery.to, plan.spec).sharding(devices)
            landed = jax.ShapeDtypeStruct(plan.shape, delivery.dtype, sharding=self._landing)
            gather = jax.jit(lambda landed: landed, out_shardings=wanted)
            self._complete = gather.lower(landed).compile()

    def send(self, value: jax.Array, tag: int, is_used_up: bool) -> None:
        """Cut this worker's shards of a value and offer every receiver its pieces.

        Args:
            value: the value on the sending mesh.
            tag: first of the delivery's tags; the message to worker k has `tag + k`.
            is_used_up: whether the memory of the value may be reused before its pieces are
                fetched.
        """
        shards = {shard.device: shard.data for shard in value.addressable_shards}
        pieces: dict[int, jax.Array] = {}
        for device, numbers, cut in self._cuts:
            shard = jnp.copy(shards[device]) if is_used_up else shards[device]
            pieces.update(zip(numbers, cut(shard), strict=True))
        for (sender, receiver), numbers in self._messages.items():
            if sender != self._worker:
                continue
            arrays = [pieces[n] for n in numbers]
            if receiver == self._worker:
                self._local[tag] = jax.device_put(arrays, self._places)
            else:
                assert self._mailbox is not None
                self._mailbox.offer(tag + receiver, arrays)

    def wait(self) -> None:
        """Return at once: pieces may be fetched as soon as they are offered."""

    def receive(self, tag: int) -> jax.Array:
        """Fetch the pieces for this worker and return the value when it is complete."""
        pieces: dict[int, jax.Array] = {}
        for sender in self._avals:
            arrays = self._local.pop(tag) if sender == self._worker else self._fetch(sender, tag)
            pieces.update(zip(self._messages[sender, self._worker], arrays, strict=True))
        parts = [join([pieces[n] for n in numbers]) for numbers, join in self._joins]
        assert self._landing is not None
        landed = jax.make_array_from_single_device_arrays(self._plan.shape, self._landing, parts)
        return jax.block_until_ready(landed if self._complete is None else self._complete(landed))

    def _fetch(self, sender: int, tag: int) -> Sequence[jax.Array]:
        assert self._mailbox is not None
        return self._mailbox.fetch(sender, tag + self._worker, self._avals[sender])
