"""Every split of every family of primitives by XLA's partitioner gives the results of one device.

The partitioner is a part of jaxlib. A family that a new version splits wrong fails here, and has to
be added to `autopar.lowering.shardwise`.
"""

import jax
import numpy as np
import pytest

from autopar.ir.spec import LogicalMesh
from autopar.primitives import FAMILIES, op_factors
from tests.autopar.sharding.equation_cases import CASES, RANDOM, ints
from tests.autopar.sharding.shard_by_shard import candidates, equations
from tests.autopar.sharding.split_by_xla import wrong_splits
from tests.autopar.sharding.test_rules import pointwise_case
from tests.fuzz.outcomes import Outcomes

pytestmark = pytest.mark.fuzz

MESHES = [LogicalMesh((8,), ("x",)), LogicalMesh((2, 4), ("x", "y"))]
DIVIDED = ("contractions", "index", "linalg", "order", "pointwise", "random", "reduce", "shape")


def cases_of(family: str):
    """Yield the label, the function and the arguments of each case of a family."""
    for name in sorted(FAMILIES[family]):
        if family == "pointwise":
            yield name, *pointwise_case(name, 8)
        elif name in RANDOM:
            yield name, RANDOM[name], (jax.random.key(3), ints(8, 2, low=0, dtype=np.uint32))
        for label, case in CASES.items():
            if label.split(":")[0] == name:
                yield label, *case(lambda: 8)


@pytest.mark.parametrize("family", DIVIDED)
def test_every_split_that_the_planner_may_choose_gives_the_numbers_of_one_device(
    family, record_property
):
    outcomes = Outcomes()
    for label, fun, args in cases_of(family):
        for eqn, operands in equations(label.split(":")[0], fun, args):
            for mesh in MESHES:
                splits = wrong_splits(eqn, operands, mesh)
                for number in range(len(candidates(eqn, op_factors(eqn), mesh))):

                    def attempt(splits=splits):
                        option, wrong = next(splits)
                        return f"WRONG: {wrong} under {option}" if wrong else "right"

                    shapes = ", ".join(str(atom.aval) for atom in eqn.invars)
                    outcomes.add(
                        f"{label} of ({shapes}) on {mesh.shape}, candidate {number}", attempt, ()
                    )
    record_property(f"outcomes of splits, {family}", dict(outcomes.counts))
    assert outcomes.counts["right"]
    assert not outcomes.faults, "\n".join(outcomes.faults[:20])
