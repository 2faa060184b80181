"""Steps of common models and optimizers have rules for all equations, and equal one device."""

import jax
import pytest

import autopar
from autopar.ir.flatten import flatten
from autopar.primitives import op_factors, record_of
from autopar.testing import assert_allclose
from tests.autopar.sharding.flax_steps import STEPS
from tests.tiers import tiers


@pytest.mark.parametrize("name", STEPS)
def test_every_equation_of_a_step_has_a_rule(name: str) -> None:
    step, init, batch = STEPS[name]()
    jaxpr = flatten(jax.make_jaxpr(step)(jax.eval_shape(init), batch))
    for eqn in jaxpr.eqns:
        if not record_of(eqn).passes_through and eqn.outvars:
            factors = op_factors(eqn)
            for atom, dims in zip(
                (*eqn.invars, *eqn.outvars), (*factors.operands, *factors.results), strict=True
            ):
                assert len(dims) == len(atom.aval.shape)


@pytest.mark.parametrize("name", tiers(["MoE", "Wide-ResNet", "attention", "muon"]))
def test_a_planned_step_equals_one_device(name: str) -> None:
    step, init, batch = STEPS[name]()
    state = jax.jit(init)()
    planned = autopar.parallelize(step, method=autopar.ShardParallel(devices=(2, 4)))
    assert_allclose(planned(state, batch), jax.jit(step)(state, batch), rtol=1e-3, atol=1e-4)
