"""Costs of changing a spec, compared with values by hand for 1 GB/s and no latency."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.spec import LogicalMesh, all_specs
from autopar.sharding.mesh_costs import MeshCosts, reshard_steps
from tests.toy_costs import BandwidthOnly

MESH = LogicalMesh((2, 4), ("x", "y"))
COSTS = MeshCosts(MESH, BandwidthOnly(1e9))
SPECS = all_specs((8, 8), MESH)
R, X0, Y0, Y1, XY0 = ((), ()), (("x",), ()), (("y",), ()), ((), ("y",)), (("x", "y"), ())


@pytest.mark.parametrize(
    ("source", "target", "steps"),
    [
        (R, XY0, []),
        (X0, XY0, []),
        (Y0, R, [("all_gather", 8000.0, ("y",))]),
        (XY0, X0, [("all_gather", 4000.0, ("y",))]),
        (XY0, R, [("all_gather", 8000.0, ("x", "y"))]),
        ((("x",), ("y",)), R, [("all_gather", 2000.0, ("x",)), ("all_gather", 8000.0, ("y",))]),
        (Y0, Y1, [("all_to_all", 2000.0, ("y",))]),
        (Y0, (("x",), ("y",)), [("all_to_all", 1000.0, ("y",))]),
        (Y0, (("x", "y"), ()), [("all_gather", 4000.0, ("y",))]),
        (XY0, Y1, [("all_gather", 8000.0, ("x", "y"))]),
        (XY0, (("x",), ("y",)), [("all_to_all", 1000.0, ("y",))]),
    ],
)
def test_reshard_steps_have_the_expected_collectives(source, target, steps):
    assert list(reshard_steps(8000.0, source, target, MESH)) == steps


def test_an_all_gather_receives_all_shards_but_its_own():
    assert COSTS.reshard(8000.0, Y0, R) == pytest.approx(8000 * 3 / 4 / 1e9)


@given(st.sampled_from(SPECS), st.sampled_from(SPECS))
def test_only_a_change_of_spec_costs_time(source, target):
    assert COSTS.reshard(8000.0, source, source) == 0
    assert COSTS.reshard(8000.0, source, target) >= 0


def test_the_reshard_matrix_has_the_costs_of_all_pairs():
    matrix = COSTS.reshard_matrix(8000.0, (R, Y0), (R, Y0, Y1))
    expected = [[COSTS.reshard(8000.0, a, b) for b in (R, Y0, Y1)] for a in (R, Y0)]
    np.testing.assert_array_equal(matrix, expected)  # pyright: ignore[reportArgumentType]
    assert COSTS.reshard_matrix(8000.0, (R,), (R, Y0)) is None


def test_a_collective_over_no_axis_costs_nothing():
    assert COSTS.collective("all_reduce", 1e9, ()) == 0
