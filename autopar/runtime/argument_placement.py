"""Placing the arguments of a planned step, and collecting its results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.sharding import NamedSharding, PartitionSpec

from autopar.graph import Atom, aval_of
from autopar.keys import is_key
from autopar.microbatch.batch_rows import cut_rows, join_rows
from autopar.runtime.value_placement import Places

type Values = dict[str, jax.Array]
"""The values that a mesh has, by name (`autopar.pipeline.instructions.Names`)."""


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
        self._splits = {i: self._split(i) for i in self._step.batch if not self._cut.is_whole_step}
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
        names: the values of the mesh that it is made of; none for a constant.
        sharding: where it is.
        make: makes it of them; None: it is one of them.
    """

    mesh: int
    names: tuple[str, ...]
    sharding: NamedSharding
    make: Callable[..., jax.Array] | None = None

    def take(self, values: Sequence[Values]) -> jax.Array:
        """Return the output, made of the values of each mesh."""
        parts = [values[self.mesh][name] for name in self.names]
        return parts[0] if self.make is None else self.make(*parts)


def outputs_of(places: Places, donated: frozenset[int] = frozenset()) -> list[Output]:
    """Return how every output of the step is made.

    Each is an array of its own, which the next step may be given as an argument whose memory it reuses: an output that is also
    another one, or an argument that the caller keeps, is copied.

    Args:
        donated: numbers of the inputs that the caller gives away.
    """
    taken = {f"in{i}" for i in range(len(places.planned.step.jaxpr.invars)) if i not in donated}
    outputs = []
    for atom in places.planned.step.jaxpr.outvars:
        output = _output(places, atom)
        if output.make is None and output.names[0] in taken:
            copied = jax.jit(jnp.copy, in_shardings=output.sharding, out_shardings=output.sharding)
            output = replace(output, make=copied)
        taken.update(output.names[:1])
        outputs.append(output)
    return outputs


def _output(places: Places, atom: Atom) -> Output:
    step, cut, names = places.planned.step, places.planned.cut, places.planned.names
    if isinstance(atom, Literal) or atom in step.jaxpr.constvars:
        value = atom.val if isinstance(atom, Literal) else step.jaxpr.consts[step.jaxpr.constvars.index(atom)]
        here = NamedSharding(places.meshes[0], PartitionSpec())
        return Output(0, (), here, jax.jit(partial(_constant, value, aval_of(atom)), out_shardings=here))
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


def _constant(value: Any, aval: Any) -> Any:
    if is_key(aval.dtype):
        return value
    return np.asarray(value).item() if aval.weak_type and not aval.shape else jnp.asarray(value, aval.dtype)


def micro_batches(count: int, chunks: int, whole: jax.Array) -> list[jax.Array]:
    """Return the microbatches of a batch."""
    return list(cut_rows(whole, count, chunks))
