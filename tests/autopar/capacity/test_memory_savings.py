"""What would make a step fit: each change has the bytes of its plan."""

import autopar
from tests.autopar.capacity.test_fit import CLUSTER, WORKSPACE, of_cluster

STEP, ARGS = of_cluster()


def found_within(budget, method=autopar.DataParallel):
    return autopar.savings(STEP, ARGS, method=method((2,), memory_budget=budget), cluster=CLUSTER)


def test_changes_are_ordered_until_the_step_fits():
    found = found_within(WORKSPACE + 2.2e6)
    assert not found.fits
    assert [saving.saved_bytes for saving in found.alone] == sorted(
        (saving.saved_bytes for saving in found.alone), reverse=True
    )
    for saving in (*found.alone, *found.together):
        assert saving.num_bytes == saving.plan.predicted_bytes
        assert saving.saved_bytes == found.plan.predicted_bytes - saving.num_bytes
        assert saving.fits == (saving.num_bytes <= found.budget)
    (micro,) = [s for s in found.alone if s.change.startswith("num_micro_batches=")]
    method = autopar.DataParallel((2,), int(micro.change.partition("=")[2]))
    plan = autopar.plan_step(STEP, ARGS, method=method, cluster=CLUSTER)
    assert plan.predicted_bytes == micro.num_bytes
    needed = [saving.num_bytes for saving in found.together]
    assert needed == sorted(needed, reverse=True)
    assert [saving.fits for saving in found.together] == [False] * (len(needed) - 1) + [True]
    text = str(found)
    assert "train_step needs" in text
    assert "in order, until it fits:" in text


def test_a_step_that_fits_needs_no_change():
    found = found_within(1e9)
    assert (found.fits, found.alone, found.together) == (True, (), ())
    assert "it fits into 1 GB" in str(found)
