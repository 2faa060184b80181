"""A value that is read with another spec than it is stored with is resharded."""

import pytest

from autopar.report import decisions, resharding_tasks
from tests.autopar.report.planned_steps import OPTIONS, SLOW, planned


def test_data_parallelism_reshards_nothing():
    assert resharding_tasks(planned("mlp", "DataParallel")) == ()


def test_zero_3_gathers_every_kernel_before_its_products():
    """Dense_0 is read in the forward pass only, Dense_1 in both; each has 64 x 64 floats.

    The gradient of the batch, which would read Dense_0, is not computed.
    """
    tasks = resharding_tasks(planned("mlp", "Zero3Parallel"))
    products = [t for t in tasks if t.reader.endswith("dot_general") and t.value.endswith("kernel")]
    assert [t.value.split("/")[-2] for t in products] == ["Dense_0", "Dense_1", "Dense_1"]
    assert {t.collectives for t in products} == {(("all_gather", 64 * 64 * 4, ("x",)),)}
    assert str(products[0]).endswith(
        "-> P(None, None) for #0 jvp(MLP)/Dense_0/dot_general: all_gather of 16,384 bytes over x"
    )


def test_zero_2_gathers_new_parameters():
    tasks = resharding_tasks(planned("mlp", "Zero2Parallel"))
    gathered = [
        t.reader for t in tasks if t.eqn is None and t.collectives and "/params/params/" in t.reader
    ]
    assert "result/0/params/params/Dense_0/kernel" in gathered


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@pytest.mark.parametrize("method", OPTIONS)
def test_every_constraint_on_an_operand_is_a_task(method, shape):
    each = planned("decoder", method, shape)
    constraints = {(c.eqn, c.spec) for c in each.plan.stages[0].constraints if c.side == "in"}
    tasks = resharding_tasks(each)
    assert constraints == {(t.eqn, t.target) for t in tasks if t.eqn is not None}
    assert all(t.source != t.target for t in tasks)


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@pytest.mark.parametrize("method", OPTIONS)
def test_who_reads_what_must_be_moved_pays_for_it(method, shape):
    each = planned("decoder", method, shape)
    table = decisions(each, costs=SLOW)
    paying = {int(n) for n in table["eqn"][table["resharding_seconds"] > 0].dropna()}
    moving = {t.eqn for t in resharding_tasks(each) if t.collectives}
    deciding = {int(n) for n in table["eqn"][table["kind"] == "decides"].dropna()}
    assert moving & deciding <= paying
    assert bool(moving) == bool((table["resharding_seconds"] > 0).any())
