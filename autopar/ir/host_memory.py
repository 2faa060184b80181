"""Values in the memory of the host, and the primitives that move them there and back."""

from functools import partial
from typing import Any, Literal, cast

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive

from autopar.ir.graph import Atom, aval_of

type Offload = Literal["none", "optimizer", "auto"]
"""What stays in host memory between updates.

none: nothing. optimizer: all state that only the update reads. auto: as little of it as lets the
step fit into the memory of the devices; none if it fits without.
"""

HOST_KIND = "pinned_host"
"""JAX's name of the host memory that devices reach by direct memory access."""


class _Move(Primitive):
    """A move of a value. It is traced as `jax.device_put`, which JAX needs to see to lower it."""

    def __init__(self, name: str, space: Any) -> None:
        super().__init__(name)
        self._space = space
        self.def_abstract_eval(partial(_in_space, space=space))

    def bind(self, *operands: Any, **_: Any) -> Any:
        (value,) = operands
        return jax.device_put(value, self._space)


def _in_space(aval: ShapedArray, space: Any) -> ShapedArray:
    return cast(Any, aval).update(memory_space=space)


to_host_p = _Move("to_host", jax.memory.Space.Host)
to_device_p = _Move("to_device", jax.memory.Space.Device)


def on_host(aval: ShapedArray) -> ShapedArray:
    """Return the aval of a value in host memory."""
    return _in_space(aval, jax.memory.Space.Host)


def is_on_host(atom: Atom) -> bool:
    """Return whether a value is in host memory, where it takes none of its device."""
    space = getattr(aval_of(atom), "memory_space", jax.memory.Space.Device)
    return space == jax.memory.Space.Host


def memory_kind(atom: Atom) -> str | None:
    """Return JAX's name of the memory of a value; None if it is on its device."""
    return HOST_KIND if is_on_host(atom) else None
