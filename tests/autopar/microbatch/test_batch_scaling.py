"""The batch scalings of the results of each primitive hold for their values."""

from random import Random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.ir.flatten import flatten
from autopar.microbatch.batch_scaling import BatchScalings
from autopar.microbatch.batch_scaling_constants import constant_scaling
from autopar.microbatch.batch_scaling_rules import BatchScaling
from autopar.primitives import FAMILIES
from tests.autopar.microbatch.claimed_scalings import wrong_claims
from tests.autopar.sharding.equation_cases import CASES, Case
from tests.autopar.sharding.test_rules import pointwise_case
from tests.tiers import fast


def of_elements(name: str) -> Case:
    return lambda size: pointwise_case(name, size())


POINTWISE = {name: of_elements(name) for name in sorted(map(str, FAMILIES["pointwise"]))}
EVERY = CASES | POINTWISE
FAST = (
    "dynamic_slice: rows",
    "gather: rows",
    "top_k",
    "triangular_solve",
    "conv_general_dilated: groups",
)


@pytest.mark.parametrize("label", fast(EVERY, FAST))
def test_derived_scalings_hold_for_the_values_of_microbatches_and_batch(label: str) -> None:
    for seed in range(12):
        assert not wrong_claims(EVERY[label], Random(seed))


@pytest.mark.parametrize("value", [0.0, np.zeros(3), np.array([0, np.inf]), np.array([np.nan])])
def test_numbers_that_a_factor_does_not_change_fit_any_power(value: float | np.ndarray) -> None:
    assert constant_scaling(value, value, 4).power is None
    assert constant_scaling(value, np.array(value), 4).power is None


def test_a_number_that_both_traces_share_does_not_scale() -> None:
    value = np.array([0.0, 2.0])
    assert constant_scaling(value, value, 4).power == 0


def test_elements_that_are_written_into_rows_scale_as_the_rows() -> None:
    def step(x: jax.Array, index: jax.Array) -> jax.Array:
        mean = x / x.shape[0]
        return jax.vmap(lambda row, i: row.at[i].set(0.0))(mean, index)

    small, large = (
        flatten(jax.make_jaxpr(step)(jnp.ones((rows, 3)), jnp.ones(rows, int))) for rows in (2, 6)
    )
    (result,) = small.outvars
    scalings = BatchScalings(small, large, frozenset({0, 1}), 3)
    assert scalings.kinds[result] == BatchScaling("rows", power=-1)
