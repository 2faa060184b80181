"""Compiled programs fit in the memory budget by XLA's buffer assignment, or are refused."""

import pytest

import autopar
from autopar.lowering.planned import PlannedStep
from autopar.runtime import fitting
from autopar.runtime.local_executable import LocalExecutable
from autopar.testing import assert_allclose
from simulator.hardware.cluster import Cluster
from tests.steps import mlp_args, mlp_step, serial
from tests.tiers import tiers

ARGS = mlp_args((64, 64, 64), batch_size=32, features=64)


def parallelized(method, donate="auto"):
    return autopar.parallelize(mlp_step, method=method, donate_argnums=donate)


def compilations(monkeypatch):
    """Return a list that grows by an entry for each compiled program."""
    programs = []
    init = LocalExecutable.__init__

    def counted(self, *args, **kwargs):
        programs.append(args)
        init(self, *args, **kwargs)

    monkeypatch.setattr(LocalExecutable, "__init__", counted)
    return programs


@pytest.mark.parametrize("share", tiers([0.8, 0.95, 0.6]))
def test_a_budget_below_the_compiled_bytes_gives_a_plan_that_fits_or_an_error(share):
    first = parallelized(autopar.ShardParallel(8)).get_executable(*ARGS)
    budget = share * first.get_total_allocation_size()
    step = parallelized(autopar.ShardParallel(8, memory_budget=budget), donate=())
    try:
        executable = step.get_executable(*ARGS)
    except autopar.MemoryBudgetError as error:
        refused = error
    else:
        assert executable.get_total_allocation_size() <= budget
        assert executable.plan.predicted_bytes <= budget
        assert_allclose(step(*ARGS), serial(mlp_step, *ARGS), rtol=2e-3, atol=2e-3)
        return
    assert (refused.budget, refused.least > budget) == (budget, True)


def test_a_step_that_fits_is_planned_and_compiled_once(monkeypatch):
    programs = compilations(monkeypatch)
    free = parallelized(autopar.ShardParallel(8)).get_executable(*ARGS)
    budget = 1.01 * max(free.get_total_allocation_size(), free.plan.predicted_bytes)
    bound = parallelized(autopar.ShardParallel(8, memory_budget=budget)).get_executable(*ARGS)
    assert len(programs) == 2
    assert bound.plan.stages == free.plan.stages
    assert bound.plan.warnings == free.plan.warnings


def test_a_method_that_fixes_its_plan_is_refused_with_the_compilers_bytes():
    free = parallelized(autopar.DataParallel(8), donate=()).get_executable(*ARGS)
    budget = (free.plan.predicted_bytes + free.get_total_allocation_size()) / 2
    assert free.plan.predicted_bytes < free.get_total_allocation_size(), (
        "the state is not donated, which the planner does not know"
    )
    with pytest.raises(autopar.MemoryBudgetError) as caught:
        parallelized(autopar.DataParallel(8, memory_budget=budget), donate=()).get_executable(*ARGS)
    assert caught.value.budget == budget
    assert caught.value.least == free.get_total_allocation_size()
    assert "donate_argnums" in caught.value.__notes__[0]


class Compiled:
    """A stand-in for an executable, with memory only."""

    def __init__(self, used):
        self.memory = (fitting.MemoryUse(arguments=used),)


@pytest.mark.parametrize(("excess", "rounds"), [(1.0, 1), (1.1, 2), (1.3, 2)])
def test_budgets_shrink_until_a_plan_fits_which_warns_of_it(excess, rounds):
    """The compiler needs `excess` times the predicted bytes, and plans use their whole budget."""
    step, plan = planned()
    budgets = []

    def plan_within(within):
        budgets.append(within or 1000.0)
        return PlannedStep(step, plan.model_copy(update={"predicted_bytes": int(budgets[-1])}))

    plans = []
    compiled = fitting.compiled_within(
        1000.0,
        plan_within,
        lambda new: plans.append(new.plan) or Compiled(int(excess * new.plan.predicted_bytes)),
    )
    assert compiled.memory[0].total <= 1000
    assert len(budgets) >= rounds
    assert budgets == sorted(budgets, reverse=True)
    assert any("planned within" in warning for warning in plans[-1].warnings) == (len(budgets) > 1)


def test_a_step_is_refused_when_smaller_budgets_do_not_help():
    step, plan = planned()
    budgets = []

    def plan_within(within):
        budgets.append(within)
        return PlannedStep(step, plan.model_copy(update={"predicted_bytes": 1000}))

    with pytest.raises(autopar.MemoryBudgetError, match="at least"):
        fitting.compiled_within(1000.0, plan_within, lambda *_: Compiled(1100))
    assert len(budgets) == fitting.ROUNDS


def planned():
    executable = parallelized(autopar.DataParallel(2)).get_executable(*ARGS)
    return executable.step, executable.plan


def test_by_default_a_gpu_has_its_memory_less_its_reserve_and_a_cpu_no_limit():
    cluster = Cluster.load("p3.16xlarge")
    assert fitting.budget_of(None, cluster, "gpu") == cluster.device.usable_bytes
    assert fitting.budget_of(None, cluster, "cpu") is None
    assert fitting.budget_of(5.0, cluster, "cpu") == 5.0
