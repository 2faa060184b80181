"""Arguments get the shardings of their specs, or an error that names the argument and the dim."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.manual import shardings

P = PartitionSpec
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("i", "j"), axis_types=(AxisType.Auto,) * 2)


def test_every_array_gets_the_sharding_of_its_spec() -> None:
    args = {"x": np.zeros((8, 3)), "y": jax.ShapeDtypeStruct((16,), np.float32), "z": np.zeros(())}
    specs = {"x": P("i"), "y": P(("i", "j")), "z": P()}
    assert shardings(MESH, specs, args) == {
        name: NamedSharding(MESH, spec) for name, spec in specs.items()
    }


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            P("i"),
            r"argument batch/x: dim 0 of its shape \(6, 4\) can't be split over the 4 devices "
            r"along i; use a multiple of 4",
        ),
        (
            P(None, ("i", "j")),
            r"dim 1 of .* can't be split over the 8 devices along i, j; use a multiple of 8",
        ),
        (P("k"), r"names the axis 'k'; the mesh has i, j"),
        (P("j", "j"), r"batch/x: .* names the axis 'j' twice"),
        (P(None, None, "i"), r"batch/x: .* is for 3 dims, but its shape \(6, 4\) has 2"),
    ],
)
def test_an_argument_that_its_spec_does_not_fit_is_named(spec: PartitionSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shardings(MESH, {"batch": {"x": spec}}, {"batch": {"x": np.zeros((6, 4))}})


def test_a_spec_in_place_of_a_subtree_is_that_of_all_its_arrays() -> None:
    args = {"w": np.zeros((8, 3)), "b": np.zeros(8)}, 1.0
    split, whole = NamedSharding(MESH, P("i")), NamedSharding(MESH, P())
    assert shardings(MESH, (P("i"), P()), args) == ({"w": split, "b": split}, whole)


def test_specs_of_another_structure_are_refused() -> None:
    args = {"w": np.zeros((8, 3)), "b": np.zeros(8)}
    for specs in ({"w": P()}, {"w": P(), "b": None}):
        with pytest.raises(ValueError, match=r"specs is PyTreeDef\(.*, expected the structure of"):
            shardings(MESH, specs, args)
    with pytest.raises(TypeError, match=r"specs has 'i' in it, expected PartitionSpecs"):
        shardings(MESH, "i", args)
    assert shardings(MESH, {"mask": None}, {"mask": None}) == {"mask": None}
