"""Cross-mesh resharding: two ways to carry out a delivery, as `autopar.runtime.loaded_job.Carrier`.

`WholeCarrier` calls `jax.device_put`. This copies shards from device to device if every target
shard is a source shard, and otherwise goes through host memory and blocks until the value is ready.
`PieceCarrier` follows the plan: it cuts the source shards, sends each piece once, joins the pieces,
and gathers the rest inside the target mesh, without blocking the host. Virtual devices share the
host's memory, where pieces take 1.3 to 5 times as long (`benchmarks/test_pipeline_dispatch.py`
measures both). Workers on several hosts always use pieces.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, SingleDeviceSharding

from autopar.devices import Device
from autopar.lowering.cross_mesh_resharding import Piece, tile_shape, tiles
from autopar.lowering.job import Delivery, Place
from autopar.runtime.loaded_job import Carrier
from autopar.runtime.mailbox import Mailbox
from autopar.runtime.pieces import cutting, joining


def default_carrier(delivery: Delivery, devices: Mapping[int, Device]) -> Carrier:
    """Choose pieces if devices have their own memory and target shards are not source shards.

    Random keys, which can't be cut, and plans without pieces are transferred whole as well.

    Args:
        delivery: a delivery between meshes of this process.
        devices: the devices of the two meshes by number.
    """
    plan = delivery.plan
    present = set(tiles(plan.shape, *plan.source))
    has_shards = present.issuperset(tiles(plan.shape, plan.mesh, plan.spec))
    is_key = jnp.issubdtype(delivery.dtype, jax.dtypes.extended)
    shares_memory = devices[delivery.source.devices[0]].platform == "cpu"
    is_whole = has_shards or is_key or shares_memory or not plan.pieces
    return (WholeCarrier if is_whole else PieceCarrier)(delivery, devices)


class WholeCarrier:
    """A delivery between meshes of this process with `jax.device_put`."""

    def __init__(self, delivery: Delivery, devices: Mapping[int, Device]) -> None:
        """Prepare the transfer.

        Args:
            delivery: the delivery.
            devices: the devices of the two meshes by number.
        """
        self._target = Place(delivery.to, delivery.plan.spec).sharding(devices)
        self._sent: dict[int, jax.Array] = {}

    def send(self, value: jax.Array, tag: int, is_used_up: bool) -> None:
        """Send the value; JAX copies it before its memory is reused."""
        self._sent[tag] = jax.device_put(value, self._target)

    def receive(self, tag: int) -> jax.Array:
        """Return the value on the target mesh."""
        return self._sent.pop(tag)

    def wait(self) -> None:
        """Wait until the values that were sent have landed."""
        jax.block_until_ready(list(self._sent.values()))


class PieceCarrier:
    """One delivery on a worker that has devices of the sending mesh, the receiving mesh, or both.

    Each piece is transferred from worker to worker once; all pieces between two workers form one
    message. Shards that need more than their pieces are gathered inside the receiving mesh.
    """

    def __init__(
        self,
        delivery: Delivery,
        devices: Mapping[int, Device],
        worker: int = 0,
        owner: Mapping[int, int] | None = None,
        mailbox: Mailbox | None = None,
    ) -> None:
        """Compile the programs that cut, join and gather.

        Args:
            delivery: the delivery.
            devices: devices by number, of this worker and of those that it shares a mesh with.
            worker: number of this worker.
            owner: for each device its worker; by default all devices are this worker's.
            mailbox: this worker's end of the transfers; None if it has all devices.
        """
        owner = dict.fromkeys(devices, worker) if owner is None else owner
        self._mailbox = mailbox
        self._worker = worker
        # Virtual devices block a thread each in a collective, and several could block all threads.
        self._waits = mailbox is not None or (
            delivery.plan.gathers and devices[delivery.to.devices[0]].platform == "cpu"
        )
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
        target = self._target(piece, devices)
        return jax.ShapeDtypeStruct(tile_shape(piece.tile), delivery.dtype, sharding=target)

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
            is_used_up: whether the memory of the value may be reused before other workers fetch
                its pieces.
        """
        shards = {shard.device: shard.data for shard in value.addressable_shards}
        pieces: dict[int, jax.Array] = {}
        for device, numbers, cut in self._cuts:
            is_copied = is_used_up and self._mailbox is not None
            shard = jnp.copy(shards[device]) if is_copied else shards[device]
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
        """Wait until pieces of this worker have landed; others are fetched while in flight."""
        jax.block_until_ready(list(self._local.values()))

    def receive(self, tag: int) -> jax.Array:
        """Fetch the pieces for this worker and return the value."""
        pieces: dict[int, jax.Array] = {}
        for sender in self._avals:
            arrays = self._local.pop(tag) if sender == self._worker else self._fetch(sender, tag)
            pieces.update(zip(self._messages[sender, self._worker], arrays, strict=True))
        parts = [join([pieces[n] for n in numbers]) for numbers, join in self._joins]
        assert self._landing is not None
        landed = jax.make_array_from_single_device_arrays(self._plan.shape, self._landing, parts)
        value = landed if self._complete is None else self._complete(landed)
        return jax.block_until_ready(value) if self._waits else value

    def _fetch(self, sender: int, tag: int) -> Sequence[jax.Array]:
        assert self._mailbox is not None
        return self._mailbox.fetch(sender, tag + self._worker, self._avals[sender])
