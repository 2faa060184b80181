"""Options that are "auto" are replaced by the fastest combination of values."""

import gc
import re
import weakref
from collections import Counter
from itertools import pairwise
from math import inf

import jax
import pytest

import autopar
from autopar import AutoLayerOption, ManualLayerOption, UniformStageOption
from autopar.devices import logical_mesh
from autopar.pipeline.pipeline_schedules import schedule_names
from autopar.plan import WHOLE_STEP
from autopar.planning import method_planning
from autopar.planning.option_space import CHUNKS, layer_options, micro_batch_counts, schedules
from autopar.planning.pipeline_planner import PipelinePlanner
from autopar.planning.pipeline_planning import PipelinePlanning
from autopar.planning.plan_step import MEMORY_MARGIN
from autopar.planning.stage_problem import NoStagesError
from autopar.sharding.plan_shardings import plan_shardings
from autopar.testing import assert_allclose
from autopar.tracing.trace import trace
from experiments.models import build_model
from simulator.costs.cost_model import ClusterCosts
from simulator.hardware.cluster import Cluster
from tests.steps import model_step

CLUSTER = Cluster.load("p3.16xlarge").with_size(devices_per_host=4)
MODEL = build_model("mlp", {"dim": 64, "num_layers": 4, "batch_size": 16})


def train_step(state, batch):
    return MODEL.train_step(state, batch, autopar.value_and_grad)


def planned(**options) -> autopar.Plan:
    method = autopar.PipeshardParallel(
        **{"layer_option": AutoLayerOption(4), "stage_option": "auto", **options}
    )
    return autopar.plan_step(train_step, MODEL.abstract_args(), method=method, cluster=CLUSTER)


def test_numbers_of_microbatches_are_powers_of_two_that_divide_the_batch():
    assert micro_batch_counts("auto", [24, 8]) == [1, 2, 4, 8]
    assert micro_batch_counts("auto", [7]) == [1]
    assert micro_batch_counts(3, [7]) == [3]


def test_candidate_schedules_have_the_chunks_that_they_allow():
    candidates = schedules("auto", "auto")
    assert {name for name, _ in candidates} == set(schedule_names()) - {"inference", "inference_v"}
    assert [chunks for name, chunks in candidates if name == "interleaved_1f1b"] == list(CHUNKS[1:])
    assert {name for name, chunks in candidates if chunks == 2} == {
        "interleaved_1f1b",
        "zero_bubble_v",
        "dualpipe_v",
    }
    assert schedules("zero_bubble_v", "auto") == [("zero_bubble_v", 2)]
    assert schedules("1f1b", "auto") == [("1f1b", 1)]
    assert schedules("interleaved_1f1b", 2) == [("interleaved_1f1b", 2)]


def test_automatic_remat_is_tried_on_and_off():
    assert layer_options(AutoLayerOption(2, "auto")) == [
        AutoLayerOption(2),
        AutoLayerOption(2, remat_layer=True, remat_parts="auto"),
    ]
    assert layer_options(AutoLayerOption(2, "auto", remat_parts=3)) == [
        AutoLayerOption(2, remat_parts=3),
        AutoLayerOption(2, remat_layer=True, remat_parts=3),
    ]
    assert layer_options(ManualLayerOption("auto")) == [
        ManualLayerOption(False),
        ManualLayerOption(True),
    ]
    assert layer_options(AutoLayerOption(2, True)) == [AutoLayerOption(2, True)]
    assert layer_options(None) == [None]


@pytest.mark.slow
def test_the_plan_is_the_fastest_candidate():
    plan = planned(num_micro_batches="auto", pipeline_schedule="auto", num_chunks="auto")
    trials = autopar.get_last_search_result()
    whole_steps = [trial for trial in trials if trial.schedule == WHOLE_STEP]
    assert len(trials) - len(whole_steps) == 5 * len(schedules("auto", "auto"))
    # One for each mesh: memory limits neither, so that microbatches would not make them faster.
    assert [trial.num_micro_batches for trial in whole_steps] == [1, 1]
    best = min(
        (trial for trial in trials if trial.seconds is not None), key=lambda trial: trial.seconds
    )
    assert plan.predicted_seconds == best.seconds
    assert (plan.num_micro_batches, plan.schedule) == (best.num_micro_batches, best.schedule)
    whole = autopar.plan_step(train_step, MODEL.abstract_args(), cluster=CLUSTER)
    assert plan.predicted_seconds <= whole.predicted_seconds


@pytest.mark.slow
@pytest.mark.parametrize("budget", [None, 0.9])
def test_combinations_that_bounds_rule_out_are_no_faster(budget):
    """Each of them is planned by itself."""
    options = {"num_micro_batches": "auto", "pipeline_schedule": "auto"}
    layers = AutoLayerOption(4, remat_layer="auto")
    if budget:
        least = planned(**options, layer_option=layers).predicted_bytes
        budget = budget * MEMORY_MARGIN * least
    plan = planned(**options, layer_option=layers, memory_budget=budget)
    num_planned = 0
    for trial in autopar.get_last_search_result():
        if trial.schedule == WHOLE_STEP:
            continue
        num_planned += trial.seconds is not None
        given = {
            "num_micro_batches": trial.num_micro_batches,
            "pipeline_schedule": trial.schedule.name,
            "layer_option": trial.schedule.layer_option,
            "memory_budget": budget,
        }
        try:
            alone = planned(**given, stage_option=autopar.AutoStageOption(min_stages=2))
        except ValueError:
            assert trial.seconds is None
            continue
        assert alone.predicted_seconds >= 0.999 * plan.predicted_seconds
        if least := re.match(r"takes at least (\S+) s", trial.reason):
            assert alone.predicted_seconds >= 0.999 * float(least[1])
        elif trial.seconds is None:
            assert "fits in memory" in trial.reason  # or is slower than the best plan
    assert num_planned < 5 * 2 * 4


def test_automatic_stages_may_be_several_at_least():
    few = {"num_micro_batches": 1, "pipeline_schedule": "1f1b"}
    assert len(planned(**few).stages) < 4
    stages = planned(**few, stage_option=autopar.AutoStageOption(min_stages=4)).stages
    assert len(stages) == 4
    too_few = r"4 layer\(s\) and 4 device\(s\) are too few for 5 stages; use more layers"
    with pytest.raises(ValueError, match=too_few):
        planned(**few, stage_option=autopar.AutoStageOption(min_stages=5))


def test_a_step_that_is_fastest_on_one_mesh_has_no_stages():
    """On one host collectives are cheap, and a pipeline of few microbatches has a bubble."""
    options = {"num_micro_batches": 1, "pipeline_schedule": "auto"}
    plan = planned(**options)
    assert plan.schedule == WHOLE_STEP
    assert plan.predicted_seconds == min(
        autopar.plan_step(
            train_step, MODEL.abstract_args(), cluster=CLUSTER, mesh_shape=shape
        ).predicted_seconds
        for shape in ((4,), (2, 2))
    )
    trials = [trial for trial in autopar.get_last_search_result() if trial.seconds]
    assert min(trials, key=lambda trial: trial.seconds or inf).mesh is not None
    assert planned(**options, stage_option=UniformStageOption(2)).schedule != WHOLE_STEP


def test_a_step_that_barely_fits_as_one_program_is_not_ruled_out():
    """Its memory is less than the sum of what its layers save where each is planned alone."""
    step, arguments = step_of_gpt(64)
    whole = autopar.plan_step(step, arguments, cluster=CLUSTER, mesh_shape=(4,))
    method = autopar.PipeshardParallel(
        num_micro_batches=1,
        pipeline_schedule="auto",
        layer_option=AutoLayerOption(2),
        stage_option="auto",
        memory_budget=1.001 * MEMORY_MARGIN * whole.predicted_bytes,
    )
    plan = autopar.plan_step(step, arguments, method=method, cluster=CLUSTER)
    assert plan.predicted_seconds <= whole.predicted_seconds


def step_of_gpt(rows: int):
    """Return a step of a GPT without remat, and its arguments."""
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 128}
    batch = {"sequence_length": 64, "batch_size": rows}
    model = build_model("gpt", sizes | batch | {"remat": False})

    def step(state, batch):
        return model.train_step(state, batch, autopar.value_and_grad)

    return step, model.abstract_args()


def least_bytes(step, arguments, count: int) -> float:
    """Return the least bytes of a device on a mesh of all devices."""
    traced = trace(step, arguments, (1,), count)
    with pytest.raises(autopar.MemoryBudgetError) as error:
        plan_shardings(traced, logical_mesh((4,)), ClusterCosts(CLUSTER), memory_budget=1)
    return error.value.least


def test_microbatches_of_half_the_size_need_at_least_half_of_the_memory():
    step, arguments = step_of_gpt(64)
    least = [least_bytes(step, arguments, count) for count in (1, 2, 4, 8)]
    assert all(half >= whole / 2 for whole, half in pairwise(least))


def test_one_program_is_not_planned_in_microbatches_that_are_known_not_to_fit():
    step, arguments = step_of_gpt(64)
    method = autopar.PipeshardParallel(
        num_micro_batches="auto",
        pipeline_schedule="auto",
        layer_option=AutoLayerOption(2),
        stage_option="auto",
        memory_budget=least_bytes(step, arguments, 1) / 2.1 * MEMORY_MARGIN,
    )
    autopar.plan_step(step, arguments, method=method, cluster=CLUSTER)
    reasons = {
        trial.num_micro_batches: trial.reason
        for trial in autopar.get_last_search_result()
        if trial.mesh is not None and trial.mesh.shape == (4,)
    }
    refused = [reason for reason in reasons.values() if reason.startswith("one program on this")]
    assert any("every one that is allowed needs at least" in reason for reason in reasons.values())
    assert refused
    for reason in refused:
        assert re.match(r"one program on this mesh needs at least \d microbatches to fit", reason)


def test_only_the_least_bound_is_made_closer(monkeypatch):
    efforts: dict[int, list[str]] = {}

    def bound(self, stages, schedule, count, shape, effort, limit):
        efforts.setdefault(count, []).append(effort)
        return 1e9 if effort == "work" and count == 2 else 1e-9 / count

    monkeypatch.setattr(PipelinePlanner, "bound", bound)
    planned(num_micro_batches="auto", stage_option=UniformStageOption(2))
    counts = [trial.num_micro_batches for trial in autopar.get_last_search_result()]
    assert counts == [16, 8, 4, 1, 2]
    assert efforts[2] == ["work"]
    assert efforts[1] == ["work", "stages", "solves", "schedule", "memory"]


def test_the_leanest_combination_comes_first_if_others_do_not_fit(monkeypatch):
    """Fewer microbatches seem to be faster."""

    def plan(self, *args, plan=PipelinePlanner.plan):
        if self.step.num_micro_batches == 1:
            raise NoStagesError("no stages fit in memory")
        return plan(self, *args)

    monkeypatch.setattr(PipelinePlanner, "plan", plan)
    monkeypatch.setattr(PipelinePlanner, "bound", lambda self, a, b, count, *_: 1e-9 * count)
    planned(num_micro_batches="auto", stage_option=UniformStageOption(2))
    counts = [trial.num_micro_batches for trial in autopar.get_last_search_result()]
    assert counts == [1, 16, 2, 4, 8]


def test_stages_are_first_looked_for_near_the_lower_bound(monkeypatch):
    """Where there are none, the plan of the leanest combination limits the others."""
    limits: list[tuple[int, float]] = []

    def plan(self, *args, plan=PipelinePlanner.plan):
        limits.append((self.step.num_micro_batches, args[-1]))
        if args[-1] < 1e-6:
            raise NoStagesError("no stages are as fast")
        return plan(self, *args)

    monkeypatch.setattr(PipelinePlanner, "plan", plan)
    monkeypatch.setattr(PipelinePlanner, "bound", lambda self, a, b, count, *_: 1e-9 * count)
    chosen = planned(num_micro_batches="auto", stage_option=autopar.AutoStageOption(min_stages=2))
    assert [count for count, _ in limits] == [1, 16, 16, 1, 2, 4, 8]
    assert [limit for _, limit in limits[:3]] == pytest.approx([1.25e-9, 20e-9, inf])
    trials = autopar.get_last_search_result()
    assert len(trials) == 5
    fastest = min(trial.seconds for trial in trials if trial.seconds)
    assert chosen.predicted_seconds == fastest == min(limits[-1][1], fastest)


def test_costs_that_no_combination_needs_are_dropped(monkeypatch):
    """A bound is computed from the trace with the next smaller number of microbatches."""
    planners: dict[int, weakref.ref] = {}
    alive: dict[int, list[int]] = {}

    def plan(self, *args, plan=PipelinePlanner.plan):
        planners[self.step.num_micro_batches] = weakref.ref(self)
        gc.collect()
        found = [count for count, planner in planners.items() if planner() is not None]
        alive[self.step.num_micro_batches] = found
        return plan(self, *args)

    monkeypatch.setattr(PipelinePlanner, "plan", plan)
    monkeypatch.setattr(PipelinePlanner, "bound", lambda self, a, b, count, *_: 1e-9 * count)
    model = build_model("mlp", {"dim": 64, "num_layers": 2, "batch_size": 8})
    method = autopar.PipeshardParallel(
        num_micro_batches="auto",
        layer_option=AutoLayerOption(2),
        stage_option=UniformStageOption(2),
    )
    autopar.plan_step(model_step(model), model.abstract_args(), method=method, cluster=CLUSTER)
    assert alive == {1: [1], 2: [1, 2], 4: [1, 4], 8: [1, 8]}


def test_a_combination_that_does_not_fit_leaves_nothing_in_memory(monkeypatch):
    """Its error is kept for the reasons of the search."""
    left: list[weakref.ref] = []

    def plan(self, *args, plan=PipelinePlanner.plan):
        if self.step.num_micro_batches == 1:
            problem = set()
            left.append(weakref.ref(problem))
            try:
                raise autopar.InfeasibleError("")
            except autopar.InfeasibleError as error:
                raise autopar.MemoryBudgetError(1.0, 2.0) from error
        return plan(self, *args)

    monkeypatch.setattr(PipelinePlanner, "plan", plan)
    monkeypatch.setattr(PipelinePlanner, "bound", lambda self, a, b, count, *_: 1e-9 * count)
    planned(num_micro_batches="auto", stage_option=UniformStageOption(2))
    assert [problem() for problem in left] == [None]


def test_no_schedule_is_planned_that_holds_more_than_one_that_does_not_fit(monkeypatch):
    names: list[str] = []

    def plan(self, stages, schedule, *_):
        names.append(schedule.name)
        raise NoStagesError("no stages fit in memory")

    def plan_whole_step(*_):
        raise autopar.MemoryBudgetError(1.0, 2.0)

    monkeypatch.setattr(PipelinePlanner, "plan", plan)
    monkeypatch.setattr(PipelinePlanning, "plan_whole_step", plan_whole_step)
    with pytest.raises(ValueError, match="no plan for the step fits"):
        planned(num_micro_batches=16, pipeline_schedule="auto")
    # Near the lower bound, then without a limit, and both again with more room.
    assert Counter(names) == {"1f1b": 4, "zero_bubble_h1": 4}
    reasons = {t.schedule.name: t.reason for t in autopar.get_last_search_result()}
    assert reasons["gpipe"] == reasons["1f1b_overlap_friendly"]
    assert reasons["gpipe"].startswith("1f1b, which holds no more microbatches, has no stages")


def test_automatic_layers_are_as_many_as_the_loss_has():
    options = {"num_micro_batches": 2, "stage_option": UniformStageOption(2)}
    assert planned(**options, layer_option="auto").schedule.layer_option == AutoLayerOption(4)


@pytest.mark.parametrize(
    ("devices", "options", "layers"),
    [
        (2, {}, 2),
        (2, {"pipeline_schedule": "zero_bubble_v"}, 4),
        (4, {}, 4),
        (4, {"stage_option": UniformStageOption(submesh_physical_shape=(1, 2))}, 2),
    ],
)
def test_automatic_layers_are_no_more_than_the_stages_that_devices_have(devices, options, layers):
    options = {"num_micro_batches": 2, "stage_option": "uniform", **options}
    plan = planned(devices=devices, layer_option="auto", **options)
    assert plan.schedule.layer_option == AutoLayerOption(layers)
    assert len(plan.stages) == layers


def test_layers_of_a_decorator_are_taken_as_they_are():
    def step(params, x):
        @autopar.automatic_layer_construction(layer_num=2)
        def loss(params):
            hidden = x
            for kernel in params:
                hidden = jax.nn.relu(hidden @ kernel)
            return hidden.sum()

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, autopar.grad(loss)(params))

    method = autopar.PipeshardParallel(2, layer_option="auto", stage_option=UniformStageOption(2))
    args = (
        [jax.ShapeDtypeStruct((64, 64), "float32")] * 4,
        jax.ShapeDtypeStruct((16, 64), "float32"),
    )
    plan = autopar.plan_step(step, args, method=method, cluster=CLUSTER)
    assert plan.schedule.layer_option is None


@pytest.mark.slow
def test_planning_seconds_are_the_sum_over_all_candidates(monkeypatch):
    def plan_in_a_second(*args, plan=PipelinePlanner.plan):
        return plan(*args).model_copy(update={"planning_seconds": 1.0})

    monkeypatch.setattr(PipelinePlanner, "plan", plan_in_a_second)
    plan = planned(
        num_micro_batches="auto", pipeline_schedule="auto", stage_option=UniformStageOption(2)
    )
    assert (
        plan.planning_seconds
        == sum(trial.seconds is not None for trial in autopar.get_last_search_result())
        > 1
    )


def test_the_selected_options_given_explicitly_have_the_same_plan():
    plan = planned(num_micro_batches="auto", stage_option=UniformStageOption(4))
    assert autopar.get_last_search_result()
    explicit = planned(num_micro_batches=plan.num_micro_batches, stage_option=UniformStageOption(4))
    assert explicit.stages == plan.stages
    assert (
        str(autopar.get_last_search_result()[0])
        == f"{plan.num_micro_batches} microbatches, 1f1b: {explicit.predicted_seconds:.4g} s"
    )


@pytest.mark.slow
def test_a_plan_with_automatic_options_equals_one_device():
    method = autopar.PipeshardParallel(
        devices=4,
        num_micro_batches="auto",
        pipeline_schedule="auto",
        layer_option=AutoLayerOption(2, remat_layer="auto"),
        stage_option=UniformStageOption(2),
    )
    state, batch = MODEL.init_state(jax.random.key(0)), MODEL.make_batch(jax.random.key(1))
    expected = jax.jit(train_step)(state, batch)
    actual = autopar.parallelize(train_step, method=method)(state, batch)
    assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_small_memory_budget_selects_more_microbatches():
    """Fewer microbatches are larger and need more memory."""
    unlimited = planned(num_micro_batches="auto", stage_option=UniformStageOption(2))
    bytes_by_count = {
        n: planned(num_micro_batches=n, stage_option=UniformStageOption(2)).predicted_bytes
        for n in (1, 16)
    }
    assert bytes_by_count[16] < bytes_by_count[1]
    budget = MEMORY_MARGIN * bytes_by_count[16]
    tight = planned(
        num_micro_batches="auto", stage_option=UniformStageOption(2), memory_budget=budget
    )
    assert tight.predicted_bytes <= bytes_by_count[16]
    assert tight.predicted_seconds >= unlimited.predicted_seconds


def test_a_combination_whose_solve_takes_too_long_is_left_out(monkeypatch):
    def plan_in_time(self, stages, schedule, *args, plan=PipelinePlanner.plan):
        if self.step.num_micro_batches == 2:
            raise TimeoutError("no sharding was found in 60 seconds")
        return plan(self, stages, schedule, *args)

    monkeypatch.setattr(PipelinePlanner, "plan", plan_in_time)
    plan = planned(num_micro_batches="auto", stage_option=UniformStageOption(2))
    assert plan.num_micro_batches != 2
    reasons = [trial.reason for trial in autopar.get_last_search_result()]
    assert "no sharding was found in 60 seconds" in reasons


def test_without_a_feasible_candidate_the_first_error_is_raised():
    with pytest.raises(ValueError, match="fits into"):
        planned(num_micro_batches="auto", stage_option=UniformStageOption(2), memory_budget=10.0)
    assert all(trial.seconds is None and trial.reason for trial in autopar.get_last_search_result())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_micro_batches": 0},
            "num_micro_batches is 0, expected a whole number of at least 1 or 'auto'",
        ),
        ({"num_micro_batches": "many"}, "num_micro_batches is 'many', expected"),
        ({"num_chunks": "auto?"}, "num_chunks is 'auto\\?', expected"),
        ({"pipeline_schedule": "automatic"}, "pipeline_schedule is 'automatic', expected one of"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        autopar.PipeshardParallel(**options)


def test_automatic_remat_is_refused_in_a_decorator():
    with pytest.raises(ValueError, match="layer_option of PipeshardParallel"):
        autopar.automatic_layer_construction(layer_num=2, remat_layer="auto")(MODEL.train_step)


def bound_without_pipelines(self, stages, schedule, count, whole_shape=None, *effort_and_limit):
    if not whole_shape:
        raise NoStagesError("no pipelines")
    return 0.0


@pytest.mark.parametrize("is_limited", [False, True])
def test_one_program_is_planned_in_more_microbatches_only_if_memory_limits_it(
    monkeypatch, is_limited
):
    monkeypatch.setattr(PipelinePlanner, "bound", bound_without_pipelines)
    options = {"num_micro_batches": "auto", "pipeline_schedule": "auto"}
    plan = planned(**options)
    assert not plan.memory_limited
    if is_limited:
        plan = planned(**options, memory_budget=0.97 * MEMORY_MARGIN * plan.predicted_bytes)
    assert plan.memory_limited == is_limited
    trials = autopar.get_last_search_result()
    solved = (t for t in trials if t.mesh and (t.seconds or "of a known plan" in t.reason))
    assert ({t.num_micro_batches for t in solved} > {1}) == is_limited


def test_the_step_as_one_program_is_not_solved_to_the_end_if_a_plan_is_faster(monkeypatch):
    limits: list[float] = []

    def plan_whole_step(self, count, mesh, limit, plan=PipelinePlanning.plan_whole_step):
        limits.append(limit)
        return plan(self, count, mesh, limit)

    monkeypatch.setattr(PipelinePlanner, "bound", bound_without_pipelines)
    monkeypatch.setattr(PipelinePlanning, "plan_whole_step", plan_whole_step)
    plan = planned(num_micro_batches="auto", pipeline_schedule="auto")
    trials = autopar.get_last_search_result()
    found = [trial.seconds for trial in trials if trial.seconds is not None]
    assert plan.predicted_seconds == min(found)
    assert limits[0] == inf
    assert min(limits) == plan.predicted_seconds
    slower = [trial.reason for trial in trials if "of a known plan" in trial.reason]
    assert slower
    assert len(found) + len(slower) == len(limits)


def test_microbatches_that_are_slower_on_one_mesh_may_be_faster_on_another(monkeypatch):
    seconds = {
        (4,): {1: 5.0, 2: 6.0},
        (2, 2): {1: 4.0, 2: 3.0, 4: 2.0, 8: 1.0, 16: 0.5},
    }

    def plan_whole_step(self, count, mesh, limit, plan=PipelinePlanning.plan_whole_step):
        step, found = plan(self, count, mesh, inf)
        predicted = {"predicted_seconds": seconds[mesh.shape][count], "memory_limited": True}
        return step, found.model_copy(update=predicted)

    monkeypatch.setattr(PipelinePlanner, "bound", bound_without_pipelines)
    monkeypatch.setattr(PipelinePlanning, "plan_whole_step", plan_whole_step)
    plan = planned(num_micro_batches="auto", pipeline_schedule="auto")
    assert (plan.stages[0].mesh.shape, plan.num_micro_batches) == ((2, 2), 16)
    on_four = [t for t in autopar.get_last_search_result() if t.mesh and t.mesh.shape == (4,)]
    assert [trial.num_micro_batches for trial in on_four] == [1, 2]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_chunks": 4}, "4 layer(s) and 4 device(s) are too few for 4 stages on each of"),
        (
            {"num_micro_batches": [1, 2], "pipeline_schedule": "dualpipe_v"},
            "schedule 'dualpipe_v' needs at least twice as many microbatches as meshes: 4 for 2",
        ),
        (
            {
                "pipeline_schedule": "1f1b",
                "num_chunks": 1,
                "stage_option": autopar.AutoStageOption(min_stages=5),
            },
            "4 layer(s) and 4 device(s) are too few for 5 stages",
        ),
        ({"memory_budget": 10.0}, "do not fit in memory, even if all devices share them"),
    ],
)
def test_a_combination_without_a_bound_has_its_own_reason(options, reason, monkeypatch):
    counts = options.pop("num_micro_batches", [2, 4])
    monkeypatch.setattr(method_planning, "micro_batch_counts", lambda *_: counts)
    with pytest.raises(ValueError, match=re.escape(reason)):
        planned(**{"pipeline_schedule": "interleaved_1f1b", "num_chunks": 2, **options})
    assert all(reason in trial.reason for trial in autopar.get_last_search_result())


def test_the_error_is_about_memory_if_more_memory_would_do():
    """The first combinations have too few microbatches for the schedule."""
    with pytest.raises(NoStagesError, match="do not fit in memory"):
        planned(num_micro_batches="auto", pipeline_schedule="dualpipe_v", memory_budget=10.0)
    first = autopar.get_last_search_result()[0]
    assert "needs at least twice as many microbatches" in first.reason


def test_one_program_is_a_candidate_where_stages_have_fewer_hosts_than_the_cluster():
    cluster = Cluster.load("p3.16xlarge").with_size(hosts=8, devices_per_host=1)
    method = autopar.PipeshardParallel(
        num_micro_batches=1,
        pipeline_schedule="auto",
        layer_option=AutoLayerOption(4),
        stage_option=autopar.AutoStageOption("small_power_of_two"),
    )
    autopar.plan_step(train_step, MODEL.abstract_args(), method=method, cluster=cluster)
    whole = [t for t in autopar.get_last_search_result() if t.schedule == WHOLE_STEP]
    assert whole
    assert not any("memory" in trial.reason for trial in whole)
