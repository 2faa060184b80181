"""The largest size that fits and the smallest cluster: all sizes tried, compiled, refused."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.capacity.budgeted_step import BudgetedStep, DoesNotFit
from simulator import Cluster, load_cluster

WIDTH = 64
CLUSTER = "dgx_a100_80"
WORKSPACE = 2**22
"""Bytes that every matrix product takes on a GPU while it runs."""
METHOD = autopar.DataParallel((2,), memory_budget=WORKSPACE + 3e6)


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def train_step(params, batch):
    def loss(params):
        x = batch
        for weight in params:
            x = jnp.tanh(x @ weight)
        return jnp.mean((x - batch) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def of_batch(size):
    return train_step, ([array(WIDTH, WIDTH)] * 4, array(size, WIDTH))


def of_layers(size):
    return train_step, ([array(WIDTH, WIDTH)] * size, array(1024, WIDTH))


def of_cluster():
    return train_step, ([array(WIDTH, WIDTH)] * 4, array(8192, WIDTH))


def fits(size, make=of_batch, method=METHOD):
    cluster = load_cluster(CLUSTER)
    assert isinstance(cluster, Cluster)
    assert method.memory_budget is not None
    fun, args = make(size)
    step = BudgetedStep(fun, args, cluster, method.memory_budget, method)
    try:
        step.plan()
    except DoesNotFit:
        return False
    return True


def test_the_largest_batch_is_that_of_a_search_through_all_sizes():
    found = autopar.fit(
        of_batch, CLUSTER, largest="batch", method=METHOD, multiple_of=1000, confirm=False
    )
    assert found.size == max(size for size in range(1000, 8001, 1000) if fits(size))
    assert found.refused is not None
    assert found.refused.size == found.size + 1000
    assert found.plan.predicted_bytes <= found.budget == METHOD.memory_budget
    assert len(found.tried) < 12
    assert found.refused.needed_bytes is not None
    assert found.refused.needed_bytes > found.budget
    for change in found.refused.changes:
        assert change.fits
        assert change.num_bytes <= found.budget
    assert 'remat="auto"' in [change.change for change in found.refused.changes]


def test_the_answer_is_compiled_within_the_budget_and_the_next_is_not():
    method = replace(METHOD, memory_budget=30e6)
    found = autopar.fit(
        of_batch, CLUSTER, largest="batch", method=method, multiple_of=8192, at_least=16384
    )
    assert found.is_confirmed
    assert found.prediction.memory.total <= found.budget
    args = of_batch(found.size)[1]
    compiled = autopar.predict(train_step, args, found.plan, CLUSTER)
    assert compiled.memory.total == found.prediction.memory.total
    assert found.refused is not None
    args = of_batch(found.refused.size)[1]
    plan = autopar.plan_step(train_step, args, method=autopar.DataParallel((2,)), cluster=CLUSTER)
    assert autopar.predict(train_step, args, plan, CLUSTER).memory.total > found.budget
    text = str(found)
    assert text.startswith(f"largest batch: {found.size}\n")
    assert f"batch={found.refused.size} does not fit" in text


def test_the_next_size_is_compiled_where_plans_are_estimated_too_large():
    def infer(params, x):
        for weight in params:
            x = jnp.tanh(x @ weight)
        return x

    def of_requests(size):
        return infer, of_batch(size)[1]

    found = autopar.fit(
        of_requests,
        CLUSTER,
        largest="batch",
        method=replace(METHOD, memory_budget=30e6),
        multiple_of=4096,
    )
    assert found.prediction.memory.total <= found.budget
    assert found.refused is not None
    args = of_requests(found.refused.size)[1]
    plan = autopar.plan_step(infer, args, method=autopar.DataParallel((2,)), cluster=CLUSTER)
    assert autopar.predict(infer, args, plan, CLUSTER).memory.total > found.budget


def test_the_step_is_made_of_multiples_only():
    def of_triples(size):
        if size % 3:
            raise ValueError(f"{size} examples are no triples")
        return of_batch(size)

    options = {"largest": "batch", "confirm": False, "at_most": 12}
    given = autopar.fit(
        of_triples, CLUSTER, method=replace(METHOD, devices=(1,)), multiple_of=3, **options
    )
    counted = autopar.fit(
        of_triples, CLUSTER, method=autopar.DataParallel((1,), 3, memory_budget=30e6), **options
    )
    assert given.size == counted.size == 12


def test_layers_are_fitted_and_limits_hold():
    method = replace(METHOD, memory_budget=WORKSPACE + 1e6)
    found = autopar.fit(of_layers, CLUSTER, largest="layers", method=method, confirm=False)
    assert fits(found.size, of_layers, method)
    assert not fits(found.size + 1, of_layers, method)
    limited = autopar.fit(
        of_layers, CLUSTER, largest="layers", method=method, confirm=False, at_most=2
    )
    assert (limited.size, limited.refused) == (2, None)
    assert "nothing beyond it was allowed" in str(limited)


def test_without_a_limit_on_memory_the_largest_allowed_size_fits():
    found = autopar.fit(
        of_batch,
        CLUSTER,
        largest="batch",
        method=METHOD,
        memory_budget=float("inf"),
        confirm=False,
        at_most=60,
    )
    assert (found.size, found.refused) == (60, None)


def test_the_batch_is_a_multiple_of_devices_and_microbatches():
    method = autopar.DataParallel((2,), 3, memory_budget=WORKSPACE + 3e6)
    found = autopar.fit(
        of_batch, CLUSTER, largest="batch", method=method, confirm=False, at_most=60
    )
    assert (found.size, found.plan.num_micro_batches) == (60, 3)


@pytest.mark.parametrize(("fewest", "budget", "size"), [("gpus", 8e6, 2), ("hosts", 1e6, 2)])
def test_the_smallest_cluster_that_fits(fewest, budget, size):
    method = autopar.DataParallel(memory_budget=WORKSPACE + budget)
    found = autopar.fit(of_cluster, CLUSTER, fewest=fewest, method=method, confirm=False)
    assert (found.quantity, found.size) == (fewest, size)
    assert found.refused is not None
    assert found.refused.size == size - 1
    devices = size * (8 if fewest == "hosts" else 1)
    assert found.plan.stages[0].mesh.num_devices == devices
    assert all("hosts" not in change.change for change in found.refused.changes)


@pytest.mark.parametrize(("fewest", "batch", "size"), [("gpus", 65536, 16), ("hosts", 9600, 12)])
def test_clusters_over_which_the_batch_does_not_divide_hide_no_smaller_one(fewest, batch, size):
    def make_step():
        return of_batch(batch)

    cluster = load_cluster(CLUSTER)
    assert isinstance(cluster, Cluster)
    hosts = size if fewest == "hosts" else size // 8
    plan = autopar.plan_step(
        *make_step(), method=autopar.DataParallel(), cluster=cluster.with_size(hosts)
    )
    method = autopar.DataParallel(memory_budget=plan.predicted_bytes)
    found = autopar.fit(make_step, CLUSTER, fewest=fewest, method=method, confirm=False, at_least=3)
    assert found.size == size


def test_the_method_of_the_options_is_taken():
    def make_step(size):
        return *of_batch(size), {"method": METHOD}

    found = autopar.fit(make_step, CLUSTER, largest="batch", confirm=False, at_most=64)
    assert (found.plan.method, found.budget) == ("DataParallel", METHOD.memory_budget)


def test_a_step_that_never_fits_is_told_what_it_needs_and_what_would_help():
    method = autopar.DataParallel((2,), memory_budget=WORKSPACE + 0.25e6)
    with pytest.raises(autopar.NeverFitsError) as caught:
        autopar.fit(of_layers, CLUSTER, largest="layers", method=method, confirm=False, at_most=4)
    message = str(caught.value)
    assert (
        "no number of layers from 1 to 4 fits into 0.00444 GB per device: layers=1 needs 0.0"
        in message
    )
    assert "inputs" in message
    assert "it would fit with num_micro_batches=" in message


def two_parameters(size, depth):
    return of_batch(size)


@pytest.mark.parametrize(
    ("options", "make_step", "message"),
    [
        ({}, of_batch, "neither of largest and fewest are given; expected one"),
        ({"largest": "batch", "fewest": "gpus"}, of_batch, "both of largest and fewest"),
        ({"largest": "width"}, of_batch, "largest is 'width', expected one of 'batch'"),
        ({"fewest": "racks"}, of_cluster, "fewest is 'racks', expected 'hosts' or 'gpus'"),
        ({"largest": "batch"}, two_parameters, r"takes \(size, depth\), expected a function of"),
        ({"largest": "batch"}, of_cluster, r"takes \(\), expected a function of the size"),
        ({"fewest": "gpus"}, of_batch, "expected a function without required parameters"),
        ({"largest": "batch"}, 3, "make_step is 3, expected a function of the size"),
        ({"largest": "batch"}, lambda n: of_cluster(), "same shapes"),
        ({"largest": "batch"}, lambda n: train_step, "returns .*; expected .step, args. or"),
        ({"largest": "batch", "at_least": 9, "at_most": 8}, of_batch, "leave no multiple"),
        ({"fewest": "gpus", "at_least": 9, "at_most": 15}, of_cluster, "leave no number of gpus"),
        ({"fewest": "gpus", "method": METHOD}, of_cluster, "chooses the devices, but method.dev"),
        ({"largest": "batch", "multiple_of": 0}, of_batch, "multiple_of is 0"),
        ({"largest": "batch", "method": "shard"}, of_batch, "method is 'shard'"),
    ],
)
def test_bad_input_is_refused(options, make_step, message):
    options = {"method": autopar.DataParallel(), **options}
    with pytest.raises(autopar.OptionError, match=message):
        autopar.fit(make_step, CLUSTER, **options)


def test_a_size_without_a_plan_is_named():
    with pytest.raises(ValueError, match=r"batch=3: .*must divide evenly over 2 devices"):
        autopar.fit(of_batch, CLUSTER, largest="batch", method=METHOD, multiple_of=3)


def test_pools_of_different_hosts_are_refused():
    mixed = load_cluster("p3_beside_p4d")
    assert not isinstance(mixed, Cluster)
    with pytest.raises(ValueError, match="hosts that are alike"):
        autopar.fit(of_batch, mixed, largest="batch")
