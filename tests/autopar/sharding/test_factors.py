"""Assignments of mesh axes to factors, the specs that they imply, and the inverse."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.flatten import flatten
from autopar.ir.spec import LogicalMesh, divides
from autopar.primitives import op_factors
from autopar.primitives.factors import FactorBuilder, OpFactors

MESH = LogicalMesh((2, 4), ("x", "y"))


def _matmul(m: int = 8, n: int = 8, k: int = 8) -> OpFactors:
    build = FactorBuilder()
    rows, columns, inner = build.new(m), build.new(n), build.new(k, "sum")
    return build.build([(rows, inner), (inner, columns)], [(rows, columns)], decides=True)


def test_every_mesh_axis_is_assigned_to_a_factor_or_to_none() -> None:
    # each of two axes is assigned to one of three factors or to none
    assert len(_matmul().assignments(MESH)) == 16
    assert _matmul().assignments(MESH)[0] == ((), (), ())


def test_a_factor_that_does_not_divide_is_not_sharded() -> None:
    assert _matmul(m=2, n=3, k=1).assignments(MESH) == [((), ()), (("x",), ())]


@given(st.tuples(*(st.sampled_from([1, 2, 3, 4, 8, 16]),) * 3))
def test_assignments_divide_every_dim_and_follow_from_the_specs_of_operands(
    sizes: tuple[int, int, int],
) -> None:
    factors = _matmul(*sizes)
    m, n, k = sizes
    for assignment in factors.assignments(MESH):
        lhs, rhs, out = (
            factors.operand_spec(0, assignment),
            factors.operand_spec(1, assignment),
            factors.result_spec(0, assignment),
        )
        assert all(
            divides(shape, spec, MESH)
            for shape, spec in (((m, k), lhs), ((k, n), rhs), ((m, n), out))
        )
        inferred = factors.assign(0, lhs, MESH)
        assert inferred is not None
        assert factors.operand_spec(0, inferred) == lhs


def test_results_are_partial_over_the_axes_of_sharded_sums() -> None:
    factors = _matmul()
    assert factors.partial_axes(((), (), ("x",))) == ("x",)
    assert factors.partial_axes((("x",), ("y",), ())) == ()


@pytest.mark.parametrize("spec", [((), ("x",)), (("y",), ("x",))])
def test_only_the_outermost_factor_of_a_dim_is_sharded(spec: tuple) -> None:
    jaxpr = flatten(jax.make_jaxpr(lambda x: x.reshape(-1))(np.zeros((8, 8))))
    factors = op_factors(jaxpr.eqns[0])
    assert factors.assign(0, spec, MESH) is None
    assert factors.assign(0, (("x", "y"), ()), MESH) == (("x", "y"), ())


def test_whole_factors_are_never_sharded() -> None:
    build = FactorBuilder()
    whole = build.new(8, "whole")
    factors = build.build([(whole,)], [(whole,)])
    assert factors.assignments(MESH) == [((),)]
    assert factors.assign(0, (("x",),), MESH) is None
