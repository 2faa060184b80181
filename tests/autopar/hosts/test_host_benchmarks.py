"""Benchmarks of transfers between hosts and of loading a step."""

import jax
import pytest

import autopar
from autopar import host_benchmarks
from tests.autopar.pipeline.stack_steps import pipeline, stack_batch, stack_params, stack_step


def test_transfers_without_hosts_are_refused() -> None:
    with pytest.raises(autopar.HostsError, match="no hosts are joined"):
        host_benchmarks.transfer_chain((0, 1), 1024, 1)


def test_loading_a_step_of_this_process_is_refused() -> None:
    function = autopar.parallelize(lambda x: 2 * x, batch_argnums=0)
    with pytest.raises(ValueError, match="the step runs in this process"):
        host_benchmarks.load_seconds(function.get_executable(jax.numpy.ones((8, 8))))


@pytest.mark.slow
@pytest.mark.hosts(2, 4)
def test_seconds_of_transfers_and_of_loading_are_positive(hosts) -> None:
    assert host_benchmarks.transfer_seconds((0, 4), 4096, 3, 1) > 0
    function = autopar.parallelize(stack_step, method=pipeline(devices=8), donate_argnums=())
    executable = function.get_executable(stack_params(), stack_batch())
    seconds = host_benchmarks.load_seconds(executable)
    assert 0 < seconds.export < executable.compile_seconds
    assert seconds.compile > 0
