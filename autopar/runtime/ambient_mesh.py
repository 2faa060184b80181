"""The mesh that the user sets by `jax.set_mesh`. Plans have meshes of their own."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np
from jax.sharding import AxisType

_EMPTY = jax.sharding.Mesh(np.empty((), object), ())


@contextmanager
def without_ambient_mesh() -> Iterator[None]:
    """Run without the mesh of `jax.set_mesh`: a plan may have other devices.

    A mesh with explicit axes stays: a step that is traced under it has the mesh in its types.
    """
    if jax.sharding.get_mesh().empty or _explicit_axes():
        yield
    else:
        with jax.set_mesh(_EMPTY):
            yield


def check_axes_are_auto() -> None:
    """Raise ValueError under a mesh with explicit axes, which no stage of a pipeline has."""
    if axes := _explicit_axes():
        raise ValueError(
            "a pipeline was called under jax.set_mesh of a mesh with explicit axes,"
            f" {', '.join(axes)}: its stages have meshes of their own; call it outside of the"
            " context, or make the mesh with axis_types=(jax.sharding.AxisType.Auto, ...)"
        )


def _explicit_axes() -> list[str]:
    mesh = jax.sharding.get_mesh()
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return [str(name) for name, kind in pairs if kind is not AxisType.Auto]
