"""Layers in a scan are stages on several hosts, whose pieces of the weights are one array."""

import jax
import numpy as np
import pytest

import autopar
from autopar.ir.joined_array import JoinedArray
from tests.autopar.pipeline.scan_steps import X, momentum_state, momentum_step, stages


@pytest.mark.slow
@pytest.mark.hosts(2, 1)
def test_a_stack_is_trained_saved_and_restored_in_pieces_on_hosts(hosts, tmp_path):
    parallel = autopar.parallelize(momentum_step, method=stages(2), donate_argnums=())
    actual = expected = momentum_state()
    for _ in range(3):
        actual, value = parallel(actual, X)
        expected, expected_value = jax.jit(momentum_step)(expected, X)
        assert np.allclose(float(value), expected_value, rtol=1e-5)
    autopar.prefetch(actual)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert isinstance(one, JoinedArray)
        assert np.allclose(np.asarray(one), other, atol=1e-6)
    autopar.save_checkpoint(tmp_path, actual, 3)
    specs = parallel.get_executable(actual, X).get_input_placement_specs()[0]
    restored = autopar.restore_checkpoint(tmp_path, 3, specs)
    assert float(parallel(restored, X)[1]) == float(parallel(actual, X)[1])
    create = autopar.CreateStateParallel(parallel, [X])
    created = autopar.parallelize(lambda batch: momentum_state(), method=create)(X)
    assert isinstance(created[0]["stack"], JoinedArray)
    assert np.allclose(
        float(parallel(created, X)[1]), jax.jit(momentum_step)(momentum_state(), X)[1]
    )
