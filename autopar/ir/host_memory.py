"""Values in the memory of the host, and the primitives that move them there and back."""

from functools import partial
from typing import Any, Literal, cast

import jax
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Primitive, Var

from autopar.ir.graph import Atom, aval_of

type Offload = Literal["none", "optimizer", "activations", "auto"]
"""What is in host memory while the devices don't need it.

none: nothing. optimizer: all state that only the update reads. activations: as many values of the
forward pass, until the backward pass reads them, as let the step fit into the memory of the
devices. auto: the faster of both, or both, if the step does not fit without.
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


def in_its_memory(var: Var, value: Any) -> Any:
    """Return an argument of a traced function with the memory of its variable in its type.

    Arguments of a function that is compiled for absent devices have none, and JAX drops moves
    between memories that it takes for one.
    """
    return jax.device_put(value, jax.memory.Space.Host) if is_on_host(var) else value


def memory_kind(atom: Atom) -> str | None:
    """Return JAX's name of the memory of a value; None if it is on its device."""
    return HOST_KIND if is_on_host(atom) else None


def move_beside(eqn: JaxprEqn, primitive: Primitive, source: Var, target: Var) -> JaxprEqn:
    """Return the equation that moves a value, in the scope of the equation that it is moved for."""
    return eqn.replace(
        primitive=primitive, params={}, invars=[source], outvars=[target], effects=frozenset()
    )
