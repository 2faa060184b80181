"""Moving a value from one mesh to another: what carries out a `Resharding` in this process.

`whole` lets JAX do it at once. It copies shards from device to device where every shard that is wanted is one that is there, and
otherwise goes through the memory of the host, waiting for the value. `by_tiles` does what the plan says: it cuts the shards where
they are, sends each piece once, puts the pieces together, and gathers what copies lack inside the destination mesh; the host waits
for nothing. Devices of a CPU share its memory, so that tiles save nothing and take 1.3 to 5 times as long there
(`benchmarks/test_pipeline_dispatch.py` measures both); workers on several hosts have no other way.
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
    """How a value gets to another mesh.

    Attributes:
        send: from where it is to where it lands; run by the sender's instruction.
        complete: from there to where it is wanted; run by the receiver's instruction. None: it has landed there.
    """

    send: Carry
    complete: Carry | None = None


type Transport = Callable[[Resharding, jax.ShapeDtypeStruct, Mesh, Mesh], Move]
"""(plan, the value, its mesh, the other mesh) -> how to carry the plan out, as often as asked."""


class MoveCarrier:
    """A delivery between meshes of this process; see `autopar.runtime.loaded_job.Carrier`."""

    def __init__(
        self, delivery: Delivery, devices: Mapping[int, Device], transport: Transport
    ) -> None:
        """Prepare it.

        Args:
            devices: those of the two meshes, by number.
            transport: how to carry the resharding out.
        """
        source, to = delivery.source.on(devices), delivery.to.on(devices)
        value = jax.ShapeDtypeStruct(delivery.plan.shape, delivery.dtype)
        self._move = transport(delivery.plan, value, source, to)
        self._waits = to.devices.size > 1 and to.devices.flat[0].platform == "cpu"
        self._sent: dict[int, jax.Array] = {}

    def send(self, value: jax.Array, tag: int, is_used_up: bool) -> None:
        """Send the value; JAX copies it before its memory is used for something else."""
        self._sent[tag] = self._move.send(value)

    def receive(self, tag: int) -> jax.Array:
        """Return the value where it is wanted."""
        value = self._sent.pop(tag)
        if self._move.complete is None:  # whoever uses it waits for it
            return value
        completed = self._move.complete(value)
        return jax.block_until_ready(completed) if self._waits else completed

    def wait(self) -> None:
        """Wait until what has been sent is there."""
        jax.block_until_ready(list(self._sent.values()))


def default_transport(
    plan: Resharding, value: jax.ShapeDtypeStruct, source: Mesh, to: Mesh
) -> Move:
    """By tiles between devices with memory of their own, unless whole shards will do; random keys always whole."""
    held = set(tiles(plan.shape, *plan.source))
    same = held.issuperset(tiles(plan.shape, plan.mesh, plan.spec))
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.extended)
    local = source.devices.flat[0].platform == "cpu"
    return (whole if same or is_key or local or not plan.pieces else by_tiles)(
        plan, value, source, to
    )


def whole(plan: Resharding, value: jax.ShapeDtypeStruct, source: Mesh, to: Mesh) -> Move:
    """`jax.device_put` of the value."""
    wanted = NamedSharding(to, partition_spec(plan.spec))
    return Move(lambda value: jax.device_put(value, wanted))


def by_tiles(plan: Resharding, value: jax.ShapeDtypeStruct, source: Mesh, to: Mesh) -> Move:
    """Each piece of the plan by itself."""
    landing = NamedSharding(to, partition_spec(plan.landing))
    sources, destinations = list(source.devices.flat), list(to.devices.flat)
    held = tiles(plan.shape, *plan.source)
    outgoing: dict[int, list[int]] = defaultdict(list)
    incoming: dict[int, list[int]] = defaultdict(list)
    for number, piece in enumerate(plan.pieces):
        outgoing[piece.source].append(number)
        incoming[piece.destination].append(number)
    cuts = [
        (
            device,
            cutting(
                [plan.pieces[k].tile for k in numbers], held[device], value.dtype, sources[device]
            ),
        )
        for device, numbers in outgoing.items()
    ]
    order = [number for numbers in outgoing.values() for number in numbers]
    places = [
        SingleDeviceSharding(destinations[plan.pieces[number].destination]) for number in order
    ]
    position = {number: at for at, number in enumerate(order)}
    joins = [
        (
            [position[number] for number in incoming[device]],
            joining([plan.pieces[k].tile for k in incoming[device]], value.dtype, place),
        )
        for device, place in enumerate(destinations)
    ]

    def send(value: jax.Array) -> jax.Array:
        shards = [shard.data for shard in value.addressable_shards]
        pieces = [piece for device, cut in cuts for piece in cut(shards[device])]
        moved = jax.device_put(pieces, places)
        parts = [join([moved[at] for at in positions]) for positions, join in joins]
        return jax.make_array_from_single_device_arrays(plan.shape, landing, parts)

    if not plan.gathers:
        return Move(send)
    wanted = NamedSharding(to, partition_spec(plan.spec))
    landed = jax.ShapeDtypeStruct(plan.shape, value.dtype, sharding=landing)
    return Move(send, jax.jit(lambda landed: landed, out_shardings=wanted).lower(landed).compile())
