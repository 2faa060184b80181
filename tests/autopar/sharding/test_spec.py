"""Specs and logical meshes."""

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from autopar.ir.spec import (
    LogicalMesh,
    all_specs,
    axes_of,
    from_partition_spec,
    local_shape,
    partition_spec,
    replicated,
)
from tests.generators import meshes

SHAPES = st.lists(st.integers(1, 16), max_size=3).map(tuple)


@given(SHAPES, meshes())
def test_all_specs_divide_the_shape_evenly_and_the_replicated_one_is_first(shape, mesh):
    specs = all_specs(shape, mesh)
    assert specs[0] == replicated(len(shape))
    assert len(specs) == len(set(specs))
    for spec in specs:
        local = local_shape(shape, spec, mesh)
        assert prod(local) * mesh.ways(axes_of(spec)) == prod(shape)


@given(SHAPES, meshes())
def test_specs_survive_conversion_to_partition_specs(shape, mesh):
    for spec in all_specs(shape, mesh):
        assert from_partition_spec(partition_spec(spec), len(shape)) == spec


def test_a_vector_on_a_mesh_of_two_axes_has_four_specs():
    assert all_specs((8,), LogicalMesh((2, 4), ("x", "y"))) == [
        ((),),
        (("y",),),
        (("x",),),
        (("x", "y"),),
    ]


def test_dims_beyond_a_partition_spec_are_replicated():
    assert from_partition_spec(PartitionSpec("x"), 3) == (("x",), (), ())


@given(meshes(), st.data())
def test_groups_partition_the_devices_along_their_axes(mesh, data):
    axes = data.draw(st.lists(st.sampled_from(mesh.axis_names), unique=True))
    groups = mesh.groups(axes)
    assert sorted(device for group in groups for device in group) == list(range(mesh.num_devices))
    assert {len(group) for group in groups} == {mesh.ways(axes)}
    positions = np.arange(mesh.num_devices).reshape(mesh.shape)
    for group in groups:
        coordinates = np.argwhere(np.isin(positions, group))
        for dim, axis in enumerate(mesh.axis_names):
            assert len(set(coordinates[:, dim])) == (mesh.sizes[axis] if axis in axes else 1)


@pytest.mark.parametrize(
    ("shape", "names"), [((2, 4), ("x",)), ((2, 2), ("x", "x")), ((0,), ("x",))]
)
def test_invalid_meshes_are_refused(shape, names):
    with pytest.raises(ValueError, match="mesh shape"):
        LogicalMesh(shape, names)


@given(meshes(), st.data())
def test_the_axes_of_groups_are_those_that_the_groups_are_built_from(mesh, data):
    axes = data.draw(st.sets(st.sampled_from(mesh.axis_names)))
    assert mesh.axes_of_groups(mesh.groups(tuple(axes))) == mesh.axes_text(
        {axis for axis in axes if mesh.sizes[axis] > 1}
    )


def test_the_axes_of_groups_within_an_axis_and_of_pairs_are_those_whose_positions_differ():
    mesh = LogicalMesh((2, 4), ("x", "y"))  # 0 1 2 3 / 4 5 6 7
    assert mesh.axes_of_groups(((0, 1), (2, 3), (4, 5), (6, 7))) == "y"
    assert mesh.axes_of_groups(((0, 4), (1, 5))) == "x"  # of a collective_permute
    assert mesh.axes_of_groups(((1, 6),)) == "x,y"
    assert mesh.axes_of_groups(((3, 3), (5,))) == ""
