"""The batch scalings of the results of each primitive hold for their values."""

from random import Random

import numpy as np
import pytest

from autopar.microbatch.batch_scaling_constants import constant_scaling
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
