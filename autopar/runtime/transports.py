"""Cross-mesh resharding in this process: two ways to carry out a `Resharding`.

`whole` calls `jax.device_put`. This copies shards from device to device if every target shard is a
source shard, and otherwise goes through host memory and blocks until the value is ready.
`by_tiles` follows the plan: it cuts the source shards, sends each piece once, joins the pieces, and
gathers the rest inside the target mesh, without blocking the host. Virtual devices share the host's
memory, where tiles take 1.3 to 5 times as long (`benchmarks/test_pipeline_dispatch.py` measures
both). Workers on several hosts always use tiles.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from autopar.devices import Device
from autopar.ir.spec import partition_spec
from autopar.lowering.cross_mesh_resharding import Resharding, tiles
from autopar.lowering.job import Delivery
from autopar.runtime.pieces import cutting, joining

type Carry = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True, slots=True)
class Move:
    """A transfer of values to another mesh.

    Attributes:
        send: returns the value with its landing sharding on the target mesh; run by the sender.
        complete: reshards the landed value to the target sharding; run by the receiver. None if
            the value lands with the target sharding.
    """

    send: Carry
    complete: Carry | None = None


type Transport = Callable[[Resharding, jax.ShapeDtypeStruct, Mesh, Mesh], Move]
"""(plan, type of the value, source mesh, target mesh) to the transfer."""


class MoveCarrier:
    """A delivery between meshes of this process; a `autopar.runtime.loaded_job.Carrier`."""

    def __init__(
        self, delivery: Delivery, devices: Mapping[int, Device], transport: Transport
    ) -> None:
        """Prepare the transfer.

        Args:
            delivery: the delivery.
            devices: the devices of the two meshes by number.
            transport: carries out the resharding.
        """
        source, to = delivery.source.on(devices), delivery.to.on(devices)
        value = jax.ShapeDtypeStruct(delivery.plan.shape, delivery.dtype)
        self._move = transport(delivery.plan, value, source, to)
        self._waits = to.devices.size > 1 and to.devices.flat[0].platform == "cpu"
        self._sent: dict[int, jax.Array] = {}

    def send(self, value: jax.Array, tag: int, is_used_up: bool) -> None:
        """Send the value; JAX copies it before its memory is reused."""
        self._sent[tag] = self._move.send(value)

    def receive(self, tag: int) -> jax.Array:
        """Return the value on the target mesh."""
        value = self._sent.pop(tag)
        if self._move.complete is None:
            return value
        completed = self._move.complete(value)
        return jax.block_until_ready(completed) if self._waits else completed

    def wait(self) -> None:
        """Wait until the values that were sent have landed."""
        jax.block_until_ready(list(self._sent.values()))


def default_transport(
    plan: Resharding, value: jax.ShapeDtypeStruct, source: Mesh, to: Mesh
) -> Move:
    """Choose `by_tiles` if devices have their own memory and target shards are not source shards.

    Random keys, which can't be cut, and plans without pieces use `whole` as well.
    """
    present = set(tiles(plan.shape, *plan.source))
    has_shards = present.issuperset(tiles(plan.shape, plan.mesh, plan.spec))
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.extended)
    shares_memory = source.devices.flat[0].platform == "cpu"
    is_whole = has_shards or is_key or shares_memory or not plan.pieces
    transport = whole if is_whole else by_tiles
    return transport(plan, value, source, to)


def whole(plan: Resharding, value: jax.ShapeDtypeStruct, source: Mesh, to: Mesh) -> Move:
    """Transfer the whole value with `jax.device_put`."""
    target = NamedSharding(to, partition_spec(plan.spec))
    return Move(lambda value: jax.device_put(value, target))


def by_tiles(plan: Resharding, value: jax.ShapeDtypeStruct, source: Mesh, to: Mesh) -> Move:
    """Transfer each piece of the plan by itself."""
    landing = NamedSharding(to, partition_spec(plan.landing))
    sources = list(source.devices.flat)
    destinations = list(to.devices.flat)
    present = tiles(plan.shape, *plan.source)
    # Numbers of the pieces by source and by destination.
    outgoing: dict[int, list[int]] = defaultdict(list)
    incoming: dict[int, list[int]] = defaultdict(list)
    for number, piece in enumerate(plan.pieces):
        outgoing[piece.source].append(number)
        incoming[piece.destination].append(number)
    cuts = []
    for device, numbers in outgoing.items():
        pieces = [plan.pieces[number].tile for number in numbers]
        cuts.append((device, cutting(pieces, present[device], value.dtype, sources[device])))
    order = [number for numbers in outgoing.values() for number in numbers]
    places = [
        SingleDeviceSharding(destinations[plan.pieces[number].destination]) for number in order
    ]
    position = {number: at for at, number in enumerate(order)}
    joins = []
    for device, target in enumerate(destinations):
        pieces = [plan.pieces[number].tile for number in incoming[device]]
        positions = [position[number] for number in incoming[device]]
        joins.append((positions, joining(pieces, value.dtype, target)))

    def send(value: jax.Array) -> jax.Array:
        shards = [shard.data for shard in value.addressable_shards]
        pieces = [piece for device, cut in cuts for piece in cut(shards[device])]
        moved = jax.device_put(pieces, places)
        parts = [join([moved[at] for at in positions]) for positions, join in joins]
        return jax.make_array_from_single_device_arrays(plan.shape, landing, parts)

    if not plan.gathers:
        return Move(send)
    target = NamedSharding(to, partition_spec(plan.spec))
    landed = jax.ShapeDtypeStruct(plan.shape, value.dtype, sharding=landing)
    gather = jax.jit(lambda landed: landed, out_shardings=target)
    return Move(send, gather.lower(landed).compile())
