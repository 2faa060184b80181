"""Pictures show which devices store which part of an array."""

import re
from math import prod

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding

from autopar.ir.spec import all_specs, partition_spec
from autopar.plan_stages import Value
from autopar.report import PlacementSpec, picture
from tests.autopar.report.planned_steps import planned
from tests.generators import meshes


def spec_of(shape, mesh_shape, names, *spec) -> PlacementSpec:
    sharding = NamedSharding(AbstractMesh(mesh_shape, names), jax.P(*spec))
    return PlacementSpec(
        jax.ShapeDtypeStruct(shape, "float32"), (0,), (sharding,), (tuple(range(prod(mesh_shape))),)
    )


def test_a_matrix_on_two_axes():
    assert picture(spec_of((4, 8), (2, 4), ("x", "y"), "x", "y")) == (
        "float32[4,8] P('x', 'y') on mesh x=2 x y=4\n"
        "down: dim 0 of 4 in 2 over x; across: dim 1 of 8 in 4 over y\n"
        "┌─────┬─────┬─────┬─────┐\n"
        "│  0  │  1  │  2  │  3  │\n"
        "├─────┼─────┼─────┼─────┤\n"
        "│  4  │  5  │  6  │  7  │\n"
        "└─────┴─────┴─────┴─────┘"
    )


def test_copies_are_listed_in_one_cell():
    lines = picture(spec_of((4, 8), (2, 4), ("x", "y"), "x")).splitlines()
    assert lines[3] == "│ 0-3 │"
    assert lines[5] == "│ 4-7 │"
    assert (
        picture(spec_of((8,), (2, 4), ("x", "y"), "y")).splitlines()[3]
        == "│ 0,4 │ 1,5 │ 2,6 │ 3,7 │"
    )
    assert "│ 0-7 │" in picture(spec_of((), (2, 4), ("x", "y")))


def test_the_first_of_two_axes_is_the_major_one():
    assert "│  0  │  2  │  1  │  3  │" in picture(spec_of((8,), (2, 2), ("x", "y"), ("y", "x")))


def test_dims_beyond_two_get_a_picture_per_part():
    text = picture(spec_of((2, 3, 4, 8), (2, 2, 2), ("x", "y", "z"), "x", None, "y", "z"))
    assert "part 1 of 2 of dim 0" in text
    assert "part 2 of 2 of dim 0" in text
    assert text.count("┌") == 2
    assert re.findall(r"\d(?=  [│])", text) == list("01234567")


@given(st.data())
def test_every_device_is_drawn_once(data):
    mesh = data.draw(meshes())
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 4, 8]), max_size=4)))
    spec = data.draw(st.sampled_from(all_specs(shape, mesh)))
    sharding = NamedSharding(AbstractMesh(mesh.shape, mesh.axis_names), partition_spec(spec))
    text = picture(
        PlacementSpec(
            jax.ShapeDtypeStruct(shape, "int8"),
            (0,),
            (sharding,),
            (tuple(range(mesh.num_devices)),),
        )
    )
    cells = [
        cell.strip()
        for line in text.splitlines()
        if line.startswith("│")
        for cell in line.strip("│").split("│")
    ]
    drawn = []
    for part in ",".join(cells).split(","):
        first, _, last = part.partition("-")
        drawn += range(int(first), int(last or first) + 1)
    assert sorted(drawn) == list(range(mesh.num_devices))
    assert len(cells) == mesh.ways(axis for axes in spec for axis in axes)


def test_values_of_a_plan_are_found_by_path_or_given():
    each = planned("wide mlp")
    path = "0/params/params/Dense_0/kernel"
    value = next(v for v in each.plan.stages[0].inputs if v.path == path)
    assert picture(path, each) == picture(path, each.plan) == picture(value, each.plan)
    assert picture(path, each).startswith(f"{path} float32[256,256] P(None, 'x') on mesh x=4\n")
    spec = spec_of((256, 256), (4,), ("x",), None, "x")
    assert picture(spec) == picture(path, each).removeprefix(f"{path} ")
    constraint = each.plan.stages[0].constraints[0]
    assert picture(constraint, each.plan).startswith(f"#{constraint.eqn} {constraint.name} float32")


def test_html_has_a_coloured_cell_per_part():
    text = picture("0/params/params/Dense_0/kernel", planned("wide mlp"), html=True)
    assert text.startswith(
        "<p>0/params/params/Dense_0/kernel float32[256,256] P(None, &#x27;x&#x27;)"
    )
    assert text.count("<td") == 4
    assert len(set(re.findall("background:(#[0-9a-f]+)", text))) == 4


def test_what_can_not_be_drawn_is_refused():
    plan = planned("mlp").plan
    with pytest.raises(
        ValueError, match=r"no input or output 'kernel'; did you mean 0/params/params/Dense_"
    ):
        picture("kernel", plan)
    with pytest.raises(ValueError, match=r"call picture\(value, plan\)"):
        picture("0/params/params/Dense_0/kernel")
    foreign = Value(path="w", role="other", shape=(4,), dtype="float32", itemsize=4, spec=((),))
    with pytest.raises(ValueError, match=r"w with spec P\(None\) is not of this plan"):
        picture(foreign, plan)
