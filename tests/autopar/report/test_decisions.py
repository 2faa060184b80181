"""Reasons agree with the plan and with the planner's costs."""

import pandas as pd
import pytest

import autopar
from autopar.analysis.reasons import PRINT_VARIABLE, print_if_asked
from autopar.plan import PlanError
from autopar.report import PlannedStep, decisions
from autopar.report.decisions import default_costs
from autopar.sharding.options import AUTO
from tests.autopar.report.planned_steps import OPTIONS, SLOW, planned, respecced
from tests.steps import mlp_args, mlp_step
from tests.tiers import pairs
from tests.toy_costs import BandwidthOnly

SECONDS = ["compute_seconds", "communication_seconds", "resharding_seconds"]


@pytest.mark.parametrize(
    ("step", "method", "shape", "costs"),
    pairs(["mlp", "decoder", "mlp in microbatches"], list(OPTIONS), [(4,), (2, 2)], [SLOW, None]),
)
def test_costs_add_up_to_the_predicted_time(step, method, shape, costs):
    each = planned(step, method, shape, costs)
    table = decisions(each, costs=costs)
    assert table[SECONDS].sum().sum() == pytest.approx(each.plan.predicted_seconds, rel=1e-9)


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@pytest.mark.parametrize("method", OPTIONS)
def test_no_runner_up_is_better(method, shape):
    table = decisions(planned("decoder", method, shape), costs=SLOW, runners_up=None)
    extra = [other.extra_seconds for others in table["runners_up"] for other in others]
    assert min(extra, default=0) >= -1e-12
    assert all(
        list(others) == sorted(others, key=lambda o: o.extra_seconds)
        for others in table["runners_up"]
    )


def test_every_input_and_equation_has_a_row():
    each = planned("mlp")
    table = decisions(each, costs=SLOW)
    assert len(table) == len(each.step.jaxpr.invars) + len(each.step.jaxpr.eqns)
    assert list(table["name"][table["kind"] == "input"]) == list(each.step.in_paths)
    assert list(table["eqn"].dropna()) == list(range(len(each.step.jaxpr.eqns)))
    products = table[table["name"].str.endswith("dot_general")]
    assert set(products["kind"]) == {"decides"}
    assert isinstance(table, pd.DataFrame)


def test_a_row_product_says_so_and_what_it_costs():
    """Dense_1 sums over its contracted dim: an all_reduce of 32 x 64 floats.

    Each of the four devices sends 2 * 3/4 of the bytes, or half of that for a reduce_scatter.
    """
    table = decisions(planned("mlp"), costs=SLOW).set_index("name")
    row = table.loc["jvp(MLP)/Dense_1/dot_general"]
    assert row["choice"].startswith("x on contracted (operand 0 dim 1, operand 1 dim 0), then ")
    reduce = 2 if "all_reduce" in row["choice"] else 1
    assert row["communication_seconds"] == pytest.approx(
        reduce * 0.75 * 32 * 64 * 4 / 1e9, rel=0.01
    )
    assert row["runners_up"]


def test_followers_name_what_they_follow():
    table = decisions(planned("wide mlp"), costs=SLOW).set_index("name")
    row = table.loc["jvp(MLP)/Dense_0/add"]
    assert row["kind"] == "follows"
    assert row["follows"] == "#0 jvp(MLP)/Dense_0/dot_general"
    assert row["why"] == "operand 0 is its largest, and keeps its sharding"
    assert pd.isna(row["compute_seconds"])


def test_bytes_are_those_of_one_shard():
    table = decisions(planned("wide mlp"), costs=SLOW).set_index("name")
    assert table.loc["0/params/params/Dense_0/kernel", "memory_bytes"] == 256 * 256 * 4 // 4
    assert table.loc["jvp(MLP)/Dense_0/dot_general", "memory_bytes"] == 32 * 256 * 4 // 4


def test_as_many_runners_up_as_asked():
    for count in (0, 1, 5):
        table = decisions(planned("decoder"), costs=SLOW, runners_up=count)
        assert max(map(len, table["runners_up"])) == count


def test_a_plan_that_the_planner_would_not_make_is_refused():
    split = respecced(planned("mlp", "DataParallel"), {"1/x": ((), ("x",))})
    with pytest.raises(
        PlanError, match=r"the plan shards 1/x in a way .*options=ShardingOptions\(\)"
    ):
        decisions(split, costs=SLOW)


def test_a_cluster_that_is_not_shipped_must_be_given():
    each = planned("mlp")
    own = PlannedStep(each.step, each.plan.model_copy(update={"cluster": "ours"}))
    with pytest.raises(
        ValueError, match=r"cluster 'ours', which is not a shipped one; give the cost model"
    ):
        decisions(own)
    assert len(decisions(own, costs=SLOW))


def test_costs_of_a_mesh_larger_than_the_shipped_cluster_are_known():
    plan = planned("mlp").plan
    (stage,) = plan.stages
    large = plan.model_copy(update={"stages": (stage.model_copy(update={"mesh_shape": (1024,)}),)})
    groups = (tuple(range(1024)),)
    assert default_costs(large).collective("all_reduce", 1e9, groups) > 0


def test_plans_are_printed_only_when_asked(monkeypatch, capsys):
    each = planned("mlp")
    monkeypatch.delenv(PRINT_VARIABLE, raising=False)
    print_if_asked(each.step, each.plan, SLOW, AUTO)
    assert not capsys.readouterr().out
    monkeypatch.setenv(PRINT_VARIABLE, "1")
    print_if_asked(each.step, each.plan, SLOW, AUTO)
    text = capsys.readouterr().out
    assert "#0 jvp(MLP)/Dense_0/dot_general float32[32,64]: x on " in text
    assert "    rather than " in text
    assert "follows #0 jvp(MLP)/Dense_0/dot_general" in text


def test_alternatives_that_a_method_forbids_can_be_priced():
    """With the options of ShardParallel, a data parallel plan has more candidates."""
    costs = BandwidthOnly(bandwidth=1e9, flop_per_s=1e10)
    table = decisions(
        planned("wide mlp", "DataParallel"), costs=costs, options=autopar.ShardParallel.options
    )
    assert len(table)
    own = decisions(planned("wide mlp", "DataParallel"), costs=costs)
    assert sum(map(len, table["runners_up"])) > sum(map(len, own["runners_up"]))


def test_an_executable_on_the_devices_here_is_explained_by_default():
    executable = autopar.parallelize(mlp_step, method=autopar.ShardParallel((2, 2))).get_executable(
        *mlp_args()
    )
    table = decisions(executable)
    assert table[SECONDS].sum().sum() == pytest.approx(executable.plan.predicted_seconds, rel=1e-9)
