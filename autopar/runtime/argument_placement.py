"""Placing the arguments of a pipelined step, and collecting its results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.sharding import NamedSharding, PartitionSpec

from autopar.graph import Atom, aval_of
from autopar.microbatch.batch_rows import cut_rows, join_rows
from autopar.runtime.value_placement import Places

type Values = dict[str, jax.Array]
"""What a mesh has, by name (`autopar.pipeline.instructions.Names`)."""


class Inputs:
    """Brings the step's inputs to the meshes.

    Attributes:
        homes: where each input is before the step.
    """

    def __init__(self, places: Places) -> None:
        planned = places.planned
        self._step, self._cut = planned.step, planned.cut
        self._places = places
        self.homes = [places.home(i) for i in range(len(self._step.jaxpr.invars))]
        self._splits = {i: self._split(i) for i in self._step.batch}
        self._zeros = [self._make_zeros(mesh) for mesh in range(len(planned.program.meshes))]

    def start(self, leaves: Sequence[jax.Array]) -> list[Values]:
        """The values of each mesh before the first instruction: its inputs, in microbatches, and sums of zero."""
        values = [zeros() for zeros in self._zeros]
        for i, leaf in enumerate(leaves):
            if i in self._splits:
                named = {f"in{i}.{k}": part for k, part in enumerate(self._splits[i](leaf))}
            else:
                named = {f"in{i}": leaf}
            stages = self._cut.input_stages[i]
            is_sent = i in self._step.carried.values()  # by an instruction, to all but the first
            for mesh in dict.fromkeys(map(self._places.mesh_of, stages[:1] if is_sent else stages)):
                for name, value in named.items():
                    place = self._places.read(mesh, name)
                    is_there = place is None or place == value.sharding
                    values[mesh][name] = value if is_there else jax.device_put(value, place)
        return values

    def _split(self, i: int) -> Callable[[jax.Array], list[jax.Array]]:
        """What cuts a batch input into microbatches."""
        count, chunks = self._step.num_micro_batches, self._step.chunks
        return jax.jit(
            partial(micro_batches, count, chunks), in_shardings=self.homes[i], out_shardings=[self.homes[i]] * count
        )

    def _make_zeros(self, mesh: int) -> Callable[[], Values]:
        """What makes the sums of a mesh, before the first microbatch."""
        planned = self._places.planned
        names, arrays, shardings = [], [], []
        for task, totals in self._cut.totals.items():
            if self._places.mesh_of(task.stage) == mesh:
                for each in totals:
                    names.append(planned.names.of(each.sum, 0))
                    arrays.append((planned.values[task.stage].shape(each.sum), aval_of(each.sum).dtype))
                    shardings.append(self._places.of(task.stage, each.sum))
        if not names:
            return dict
        make = jax.jit(lambda: [jnp.zeros(shape, dtype) for shape, dtype in arrays], out_shardings=shardings)
        compiled = make.lower().compile()
        return lambda: dict(zip(names, compiled(), strict=True))


@dataclass(frozen=True, slots=True)
class Output:
    """How an output is made when all instructions have run.

    Attributes:
        names: the values of the mesh that it is made of.
        sharding: where it is.
        make: makes it of them; None: it is one of them.
        value: a constant, which is made of nothing.
    """

    mesh: int
    names: tuple[str, ...]
    sharding: NamedSharding
    make: Callable[..., jax.Array] | None = None
    value: jax.Array | None = None

    def take(self, values: Sequence[Values]) -> jax.Array:
        """The output, of the values of each mesh."""
        if self.value is not None:
            return self.value
        parts = [values[self.mesh][name] for name in self.names]
        return parts[0] if self.make is None else self.make(*parts)


def outputs_of(places: Places) -> list[Output]:
    """Every output of the step."""
    return [_output(places, atom) for atom in places.planned.step.jaxpr.outvars]


def _output(places: Places, atom: Atom) -> Output:
    step, cut, names = places.planned.step, places.planned.cut, places.planned.names
    if isinstance(atom, Literal) or atom in step.jaxpr.constvars:
        value = atom.val if isinstance(atom, Literal) else step.jaxpr.consts[step.jaxpr.constvars.index(atom)]
        here = NamedSharding(places.meshes[0], PartitionSpec())
        return Output(0, (), here, value=jax.device_put(np.asarray(value, aval_of(atom).dtype), here))
    if atom in cut.joined:
        part = cut.joined[atom]
        stage, count = cut.made_by[part].stage, step.num_micro_batches
        sharding = places.of(stage, part)
        join = jax.jit(partial(join_rows, step.chunks), in_shardings=(sharding,) * count, out_shardings=sharding)
        return Output(places.mesh_of(stage), tuple(names.of(part, k) for k in range(count)), sharding, join)
    if atom in cut.made_by:
        stage = cut.made_by[atom].stage
        return Output(places.mesh_of(stage), (names.of(atom, 0),), places.of(stage, atom))
    i = step.jaxpr.invars.index(atom)
    return Output(places.mesh_of(cut.input_stages[i][0]), (f"in{i}",), places.home(i))


def micro_batches(count: int, chunks: int, whole: jax.Array) -> list[jax.Array]:
    """Return the microbatches of a batch."""
    return list(cut_rows(whole, count, chunks))
