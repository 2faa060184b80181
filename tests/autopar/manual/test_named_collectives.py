"""Each collective equals its NumPy definition, for random shapes, meshes and axes."""

from collections.abc import Callable
from math import prod
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, PartitionSpec

from autopar import manual

ALL_AXES = PartitionSpec(("i", "j"))


@st.composite
def groups(draw: st.DrawFn) -> tuple[Mesh, Any, np.ndarray]:
    """Draw a mesh, one or both of its axes, and the groups of devices along them, one per row."""
    shape = draw(st.sampled_from([(2, 2), (2, 4), (4, 2), (1, 3), (8, 1)]))
    mesh = Mesh(
        np.array(jax.devices()[: prod(shape)]).reshape(shape),
        ("i", "j"),
        axis_types=(AxisType.Auto,) * 2,
    )
    ids = np.arange(prod(shape)).reshape(shape)
    axis = draw(st.sampled_from(["i", "j", ("i", "j")]))
    return mesh, axis, {"i": ids.T, "j": ids, ("i", "j"): ids.reshape(1, -1)}[axis]


def draw_parts(draw: Callable, mesh: Mesh, multiples: dict[int, int], rank: int) -> np.ndarray:
    """Draw integers for every device along a first dim, with other dims small or in `multiples`."""
    shape = [draw(st.integers(1, 3)) * multiples.get(dim, 1) for dim in range(rank)]
    return np.random.default_rng(draw(st.integers(0, 9))).integers(
        -99, 99, (mesh.size, *shape), np.int32
    )


def run(function: Callable[[jax.Array], jax.Array], mesh: Mesh, parts: np.ndarray) -> np.ndarray:
    """Return what `function` returns on each device for its part."""
    mapped = jax.shard_map(
        lambda x: function(x[0])[None], mesh=mesh, in_specs=ALL_AXES, out_specs=ALL_AXES
    )
    return np.asarray(jax.jit(mapped)(parts))


def evaluate_definition(
    rows: np.ndarray, parts: np.ndarray, define: Callable[[list[np.ndarray], int], np.ndarray]
) -> Any:
    """Return `define(parts of the group, position in the group)` for every device."""
    values = {
        int(device): define(list(parts[row]), position)
        for row in rows
        for position, device in enumerate(row)
    }
    return np.stack([values[device] for device in range(len(values))])


@settings(max_examples=6)
@given(st.data())
def test_all_reduce_is_the_sum(data: st.DataObject) -> None:
    mesh, axis, rows = data.draw(groups())
    parts = draw_parts(data.draw, mesh, {}, data.draw(st.integers(0, 3)))
    actual = run(lambda x: manual.all_reduce(x, axis), mesh, parts)
    np.testing.assert_array_equal(
        actual, evaluate_definition(rows, parts, lambda group, _: sum(group))
    )


@settings(max_examples=6)
@given(st.data())
def test_all_gather_concatenates(data: st.DataObject) -> None:
    mesh, axis, rows = data.draw(groups())
    rank = data.draw(st.integers(1, 3))
    dim = data.draw(st.integers(0, rank - 1))
    parts = draw_parts(data.draw, mesh, {}, rank)
    actual = run(lambda x: manual.all_gather(x, axis, dim), mesh, parts)
    np.testing.assert_array_equal(
        actual, evaluate_definition(rows, parts, lambda group, _: np.concatenate(group, dim))
    )


@settings(max_examples=6)
@given(st.data())
def test_reduce_scatter_returns_the_own_part_of_the_sum(data: st.DataObject) -> None:
    mesh, axis, rows = data.draw(groups())
    rank, n = data.draw(st.integers(1, 3)), rows.shape[1]
    dim = data.draw(st.integers(0, rank - 1))
    parts = draw_parts(data.draw, mesh, {dim: n}, rank)
    actual = run(lambda x: manual.reduce_scatter(x, axis, dim), mesh, parts)
    expected = evaluate_definition(rows, parts, lambda group, i: np.split(sum(group), n, dim)[i])
    np.testing.assert_array_equal(actual, expected)


@settings(max_examples=6)
@given(st.data())
def test_all_to_all_concatenates_the_own_piece_of_every_part(data: st.DataObject) -> None:
    mesh, axis, rows = data.draw(groups())
    rank, n = data.draw(st.integers(1, 3)), rows.shape[1]
    split, concat = (data.draw(st.integers(0, rank - 1)) for _ in range(2))
    parts = draw_parts(data.draw, mesh, {split: n}, rank)
    actual = run(lambda x: manual.all_to_all(x, axis, split, concat), mesh, parts)

    def define(group: list[np.ndarray], i: int) -> np.ndarray:
        return np.concatenate([np.split(part, n, split)[i] for part in group], concat)

    np.testing.assert_array_equal(actual, evaluate_definition(rows, parts, define))


@settings(max_examples=6)
@given(st.data())
def test_shift_returns_the_part_of_an_earlier_device_in_the_ring(data: st.DataObject) -> None:
    mesh, axis, rows = data.draw(groups())
    n, by = rows.shape[1], data.draw(st.integers(-3, 9))
    parts = draw_parts(data.draw, mesh, {}, data.draw(st.integers(0, 3)))
    actual = run(lambda x: manual.shift(x, axis, by), mesh, parts)
    np.testing.assert_array_equal(
        actual, evaluate_definition(rows, parts, lambda group, i: group[(i - by) % n])
    )


def test_a_dim_that_the_devices_do_not_divide_is_refused() -> None:
    mesh = Mesh(
        np.array(jax.devices()[:4]).reshape(4, 1), ("i", "j"), axis_types=(AxisType.Auto,) * 2
    )
    with pytest.raises(ValueError, match="6 must be divisible by shard_count 4"):
        run(lambda x: manual.reduce_scatter(x, "i", 0), mesh, np.zeros((4, 6), np.float32))
