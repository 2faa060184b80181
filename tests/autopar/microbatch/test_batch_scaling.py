"""The batch scalings of the results of each primitive hold for their values."""

from random import Random

import pytest

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
