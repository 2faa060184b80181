"""Pipelines are planned with uniform, manual or automatic stages, within memory."""

from dataclasses import replace
from functools import cache, partial
from math import inf
from unittest.mock import patch

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import AutoLayerOption, AutoStageOption, ManualStageOption, UniformStageOption
from autopar.devices import logical_mesh
from autopar.ir.step_graph import StepGraph
from autopar.pipeline.partitioner import partition_step
from autopar.pipeline.stage_graph import stage_graphs
from autopar.pipeline.submeshes import Submesh
from autopar.plan import WHOLE_STEP, PipelineSchedule, Plan
from autopar.planning.layer_costs import LayerCosts, LayerFront, MeshChoice, Shape
from autopar.planning.layer_ranges import LayerRanges, graph_key
from autopar.planning.pipeline_planner import TOLERANCE, PipelinePlanner
from autopar.planning.stage_construction import least_seconds, stage_problem
from autopar.planning.stage_costs import ClusterStageCosts, SolvedStage, StageCosts
from autopar.planning.stage_problem import NoStagesError, PlacedStage, StageProblem, step_seconds
from autopar.planning.step_planner import make_planned
from autopar.sharding.options import AUTO
from autopar.sharding.pins import ShardingError
from autopar.sharding.solve_within_memory import MemoryBudgetError
from autopar.tracing.step_traces import TraceOptions
from autopar.tracing.trace import trace
from autopar.xla_fusion import lifetimes
from experiments.models import build_model
from simulator.costs.cost_model import ClusterCosts
from simulator.hardware.cluster import Cluster
from simulator.work import CollectiveKind
from tests.steps import model_step
from tests.toy_costs import BandwidthOnly

LAYERS, BATCHES = 4, 8
CLUSTER = Cluster.load("p3.16xlarge").with_size(devices_per_host=4)
GPT = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_heads": 4,
    "sequence_length": 32,
    "vocab_size": 128,
    "batch_size": 32,
}
ONE_F_ONE_B = PipelineSchedule(name="1f1b")


@pytest.fixture(scope="module")
def mlp() -> StepGraph:
    return traced("mlp", {"dim": 64, "num_layers": LAYERS, "batch_size": 64}, LAYERS)


@pytest.fixture(scope="module")
def gpt() -> StepGraph:
    return traced("gpt", GPT | {"remat": True}, LAYERS)


def traced(name: str, sizes: dict, num_layers: int) -> StepGraph:
    model, layers = build_model(name, sizes), AutoLayerOption(num_layers)
    return trace(
        model_step(model),
        model.abstract_args(),
        (1,),
        BATCHES,
        TraceOptions(layers=layers, marked=True),
    )


def planned(
    step: StepGraph, option, schedule: str = "1f1b", chunks: int = 1, options=AUTO, **budget
) -> Plan:
    planner = PipelinePlanner(step, CLUSTER, options, **budget)
    pipeline = PipelineSchedule(name=schedule, num_chunks=chunks)
    return planner.plan(option, pipeline, "PipeshardParallel")


@cache
def layer_costs(step: StepGraph) -> tuple[LayerRanges, LayerCosts]:
    """Return the layers of a step, solved once for all tests."""
    return LayerRanges(step, LAYERS), LayerCosts(
        ClusterCosts(CLUSTER), replace(AUTO, tolerance=TOLERANCE)
    )


def stage_costs(step: StepGraph, budget: float = CLUSTER.device.usable_bytes) -> StageCosts:
    ranges, layers = layer_costs(step)
    return StageCosts(ranges, layers, layers.options, budget)


def one_f_one_b(step: StepGraph, option: AutoStageOption) -> StageProblem:
    costs = stage_costs(step)
    return stage_problem(ClusterStageCosts((costs,), costs.model), CLUSTER, option, "1f1b")


def solved_stage(
    costs: StageCosts, start: int, stop: int, shape: Shape, in_flight: int = 1
) -> SolvedStage:
    return costs.cheapest(costs.ranges.graph(start, stop), range(start, stop), [shape], in_flight)


@pytest.mark.slow
def test_planning_is_deterministic(gpt):
    a, b = (planned(gpt, AutoStageOption()) for _ in range(2))
    assert a == b.model_copy(update={"planning_seconds": a.planning_seconds})


@pytest.mark.slow
def test_the_last_dp_result_describes_the_stages_of_the_plan(gpt):
    plan, dp_result = planned(gpt, AutoStageOption()), autopar.get_last_dp_result()
    assert dp_result is not None
    assert tuple(stage.layers for stage in plan.stages) == dp_result.forward_stage_layer_ids
    assert tuple(stage.mesh_shape for stage in plan.stages) == dp_result.logical_mesh_shapes
    assert sorted(device for stage in plan.stages for device in stage.devices) == list(
        range(CLUSTER.num_devices)
    )
    manual = ManualStageOption(
        dp_result.forward_stage_layer_ids, dp_result.submesh_shapes, dp_result.logical_mesh_shapes
    )
    assert planned(gpt, manual).stages == plan.stages


@pytest.mark.slow
def test_automatic_stages_are_predicted_to_be_no_slower_than_uniform_ones(gpt):
    automatic = planned(gpt, AutoStageOption()).predicted_seconds
    for stages in (1, 2, 4):
        assert automatic <= planned(gpt, UniformStageOption(stages)).predicted_seconds * (1 + 1e-6)


def test_equal_layers_have_one_kind_and_are_solved_once(gpt):
    ranges = LayerRanges(gpt, LAYERS)
    assert ranges.kinds[1] == ranges.kinds[2]
    assert len(set(ranges.kinds)) == 3
    layers = stage_costs(gpt).layers
    fronts = [layers.front(layer, MeshChoice((2,), ())) for layer in ranges.layers]
    assert fronts[1] is fronts[2]
    assert len(set(fronts)) == 3


def test_the_kind_of_a_layer_does_not_depend_on_names_of_parameters():
    """Pytrees are sorted by name, so that block_10 comes before block_9."""
    names = [("a", "b"), ("d", "c"), ("e", "f"), ("h", "g")]  # of both parameters of each layer
    params = {name: jax.ShapeDtypeStruct((8, 8), jnp.float32) for pair in names for name in pair}
    adam = optax.adam(1e-3)

    def step(state, x):
        @autopar.manual_layer_construction
        def loss(params):
            y = x
            for i, (first, second) in enumerate(names):
                if i:
                    autopar.mark_pipeline_boundary()
                y = jnp.tanh(y @ params[first]) @ params[second]
            return jnp.mean(y**2)

        params, opt_state = state
        updates, opt_state = adam.update(autopar.grad(loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    state = params, jax.eval_shape(adam.init, params)
    graph = trace(
        step,
        (state, jax.ShapeDtypeStruct((16, 8), jnp.float32)),
        (1,),
        4,
        TraceOptions(marked=True),
    )
    kinds = [graph_key(layer) for layer in LayerRanges(graph, 4).layers]
    assert kinds[1] == kinds[2]
    assert kinds[0] != kinds[1] != kinds[3]


@pytest.mark.parametrize("start", range(LAYERS))
def test_the_graph_of_a_layer_range_equals_that_of_a_stage_of_the_partition(mlp, start):
    """The step has no value that is the sum of results of several stages."""
    ranges = LayerRanges(mlp, LAYERS)
    for stop in range(start + 1, LAYERS + 1):
        groups = [0 if layer < start else 1 if layer < stop else 2 for layer in range(LAYERS)]
        partition = stage_graphs(partition_step(mlp, [group - groups[0] for group in groups]))
        assert graph_key(ranges.graph(start, stop)) == graph_key(partition[1 - groups[0]])


def test_lower_bounds_of_stage_costs_hold_for_every_stage(gpt):
    problem, count = one_f_one_b(gpt, AutoStageOption()), gpt.num_micro_batches
    assert problem.lower_bound is not None
    for mesh in problem.submeshes:
        for start in (0, 2):
            for stop in (start + 2, LAYERS):
                (bound,) = problem.lower_bound(start, stop, mesh)
                for cost in problem.costs(start, stop, mesh):
                    assert bound.seconds <= cost.seconds * (1 + 1e-9)
                    assert (count - 1) * bound.seconds + bound.once_seconds <= (
                        (count - 1) * cost.seconds + cost.once_seconds
                    ) * (1 + 1e-9)
                    assert bound.fixed_bytes <= cost.fixed_bytes
                    assert bound.micro_batch_bytes <= cost.micro_batch_bytes


@pytest.fixture(scope="module")
def steps_of_16_examples() -> dict[int, StepGraph]:
    """Return a step in several numbers of microbatches."""
    sizes = {"num_layers": 3, "hidden_size": 64, "num_heads": 4, "vocab_size": 128}
    model = build_model("gpt", sizes | {"sequence_length": 32, "batch_size": 16, "remat": False})
    return {
        count: trace(
            model_step(model),
            model.abstract_args(),
            (1,),
            count,
            TraceOptions(layers=AutoLayerOption(3), marked=True),
        )
        for count in (1, 4, 8, 16)
    }


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)])
def test_bounds_from_larger_microbatches_hold_for_smaller_ones(steps_of_16_examples, shape):
    """Shardings of examples that small microbatches have too few of do not count."""
    fronts = {count: fronts_of_layer(step, shape) for count, step in steps_of_16_examples.items()}
    whole_seconds = min(front.least_seconds(1) for front in fronts[1])
    whole_bytes = min(front.least_peak(1) for front in fronts[1])
    for count in (4, 8, 16):
        exact = [front.cheapest.priced for front in fronts[count]]
        least_seconds = min(priced.seconds for priced in exact)
        least_bytes = min(priced.resident_bytes + priced.extra_bytes for priced in exact)
        seconds = min(front.least_seconds(count) for front in fronts[1])
        assert whole_seconds <= seconds <= least_seconds
        peak = min(front.least_peak(count) for front in fronts[1])
        assert whole_bytes <= peak <= count * least_bytes
        if count > 4:
            seconds = min(front.least_seconds(count // 4) for front in fronts[4])
            assert seconds <= least_seconds
    if shape == (4,):  # a microbatch of 16 / 8 examples has too few for four devices
        assert fronts[1][0].least_seconds(8) > whole_seconds


def front_of_second_product(spec: P, choice: MeshChoice, num_micro_batches: int) -> LayerFront:
    """Return the front of a layer with one product, for a spec of the weights."""
    params = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 2

    def step(params, x):
        @autopar.manual_layer_construction
        def loss(params):
            first = jnp.tanh(x @ params[0])
            autopar.mark_pipeline_boundary()
            return jnp.mean((first @ params[1]) ** 2)

        return jax.tree.map(jnp.subtract, params, autopar.grad(loss)(params))

    args = params, jax.ShapeDtypeStruct((2**14, 512), jnp.float32)
    options = replace(AUTO, pins={"0/*": spec}, batch_axis="x", tolerance=TOLERANCE)
    graph = trace(step, args, (1,), num_micro_batches, TraceOptions(marked=True))
    costs = LayerCosts(ClusterCosts(CLUSTER), options)
    front = costs.front(LayerRanges(graph, 2).layers[1], choice)
    assert front is not None
    return front


def seconds_of_weights(collective: CollectiveKind) -> float:
    """Return the seconds of a collective on the weights of `front_of_second_product`."""
    costs = LayerCosts(ClusterCosts(CLUSTER), AUTO).mesh_costs((4,))
    return costs.collective(collective, 512 * 512 * 4, ("x",))


def test_weights_that_are_gathered_in_each_microbatch_count_in_bounds_for_more_of_them():
    """ZeRO-3 gathers weights for each microbatch; smaller microbatches don't make that faster."""
    front = front_of_second_product(P("x"), MeshChoice((4,), ()), 1)
    # Three equations read the gathered weights; the bound leaves out what two of them share.
    gather = seconds_of_weights("all_gather")
    assert front.least_seconds(8) >= front.least_seconds(1) + 7 * gather / 4


def test_gradients_that_are_completed_in_each_microbatch_count_in_bounds_for_more_of_them():
    """They do not where they are completed once, as they may be if one microbatch is traced."""
    every, once = (MeshChoice((4,), deferred) for deferred in ((), ("x",)))

    def more_seconds(choice: MeshChoice, anchor: int) -> float:
        front = front_of_second_product(P(), choice, anchor)
        exact = front_of_second_product(P(), choice, 16).cheapest.priced
        assert front.least_seconds(16 // anchor) <= exact.seconds
        return (front.least_seconds(16 // anchor) - front.least_seconds(1)) / (16 - anchor)

    accumulating = more_seconds(once, 2)
    assert more_seconds(every, 1) <= accumulating
    assert more_seconds(every, 2) > accumulating + seconds_of_weights("reduce_scatter") / 8


def test_one_program_needs_less_memory_in_a_few_more_microbatches():
    front = front_of_second_product(P(), MeshChoice((4,), ()), 2)
    (_, two), (_, three), (_, four) = (front.least_as_program(count, inf) for count in (2, 3, 4))
    assert four < three < two
    assert three == pytest.approx(four + (two - four) / 3)


def test_one_program_stores_one_value_for_each_product_that_the_backward_pass_needs():
    def step(params, x):
        @autopar.manual_layer_construction
        def loss(params):
            hidden = x
            for number, kernel in enumerate(params):
                if number:
                    autopar.mark_pipeline_boundary()
                product = hidden @ kernel
                hidden = jnp.tanh(product) * jax.nn.sigmoid(product + 1)  # saves several values
            return jnp.mean(hidden**2)

        return jax.tree.map(jnp.subtract, params, autopar.grad(loss)(params))

    args = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 3
    graph = trace(
        step,
        (args, jax.ShapeDtypeStruct((32, 64), jnp.float32)),
        (1,),
        1,
        TraceOptions(marked=True),
    )
    ranges = LayerRanges(graph, 3)
    assert ranges.saved_product_bytes(0, 3) == 3 * 32 * 64 * 4
    assert ranges.saved_bytes(0, 3) > 2 * ranges.saved_product_bytes(0, 3)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zero_bubble_v", "zero_bubble_h1"])
def test_bounds_of_other_schedules_are_no_more_than_their_plans(gpt, schedule):
    """Memory rules out no plan that fits."""
    chunks = 1 if schedule == "zero_bubble_h1" else 2
    option = AutoStageOption(min_stages=2) if chunks == 1 else UniformStageOption(4)
    plan = planned(gpt, option, schedule, chunks)
    kind = PipelineSchedule(name=schedule, num_chunks=chunks)
    for budget, fits in ((plan.predicted_bytes, True), (0.02 * plan.predicted_bytes, False)):
        planner = PipelinePlanner(gpt, CLUSTER, memory_budget=budget)
        for effort in ("work", "stages", "solves"):
            bound = partial(planner.bound, AutoStageOption(min_stages=2), kind, BATCHES)
            if fits or effort == "work":
                assert 0 < bound(effort=effort) <= plan.predicted_seconds
            else:
                with pytest.raises(NoStagesError, match="memory"):
                    bound(effort=effort)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_h1"])
def test_stages_that_are_slower_than_a_known_plan_are_not_solved(gpt, schedule, monkeypatch):
    planner = PipelinePlanner(gpt, CLUSTER)
    option, kind = AutoStageOption(min_stages=2), PipelineSchedule(name=schedule)
    plan = planner.plan(option, kind, "test")
    monkeypatch.setattr(PipelinePlanner, "_solve", None)
    with pytest.raises(NoStagesError, match="takes less than"):
        planner.plan(option, kind, "test", 0.5 * plan.predicted_seconds)


@pytest.mark.parametrize(("count", "shares"), [(1, (0.55, 0.5)), (4, (0.4, 0.35))])
def test_bounds_of_one_program_rise_as_memory_gets_short(count, shares):
    """No plan that fits is faster, also if the bound is from larger microbatches."""
    sizes = {"num_layers": 2, "hidden_size": 256, "sequence_length": 128, "remat": False}
    model = build_model("gpt", GPT | sizes)
    args, mesh = (model_step(model), model.abstract_args(), (1,)), logical_mesh((4,))
    whole = trace(*args, count, TraceOptions())
    plan = partial(make_planned, whole, mesh, CLUSTER, AUTO, "test")
    ample = plan().plan
    layers = TraceOptions(layers=AutoLayerOption(2), marked=True)
    for step in (trace(*args, anchor, layers) for anchor in {1, count}):

        def bound(share: float, step: StepGraph = step) -> float:
            budget = share * ample.predicted_bytes
            planner = PipelinePlanner(step, CLUSTER, memory_budget=budget)
            return planner.bound(AutoStageOption(), WHOLE_STEP, count, mesh.shape, "memory")

        assert 0.5 * ample.predicted_seconds < bound(1.0) < ample.predicted_seconds
        short, shorter = map(bound, shares)
        assert shorter > short > 10 * ample.predicted_seconds
        with pytest.raises(NoStagesError, match="memory"):
            bound(0.2)
        if count > 1:
            less = plan(memory_budget=0.95 * ample.predicted_bytes).plan
            assert bound(1.0) <= bound(0.95) < less.predicted_seconds


@pytest.mark.parametrize("count", [1, 2])
def test_weights_that_layers_share_count_once_in_bounds_of_one_program(count):
    def step(kernel, x):
        @autopar.manual_layer_construction
        def loss(kernel):
            hidden = x
            for layer in range(24):
                if layer:
                    autopar.mark_pipeline_boundary()
                hidden = jnp.tanh(hidden @ kernel)
            return jnp.mean(hidden**2)

        return kernel - autopar.grad(loss)(kernel)

    args = (
        jax.ShapeDtypeStruct((1024, 1024), jnp.float32),
        jax.ShapeDtypeStruct((16, 1024), jnp.float32),
    )
    whole = trace(step, args, (1,), count, TraceOptions())
    plan = make_planned(whole, logical_mesh((4,)), CLUSTER, AUTO, "test").plan
    layers = trace(step, args, (1,), count, TraceOptions(marked=True))
    planner = PipelinePlanner(layers, CLUSTER, memory_budget=plan.predicted_bytes)
    bound = planner.bound(AutoStageOption(), WHOLE_STEP, count, (4,), "memory")
    assert 0 < bound <= plan.predicted_seconds


def test_schedules_with_the_same_objective_share_a_bound_until_it_is_the_least(gpt):
    """It is at most the bound of each schedule, and at most the time of its plan."""
    planner, stages = PipelinePlanner(gpt, CLUSTER), AutoStageOption(min_stages=2)
    names = ("gpipe", "1f1b", "1f1b_overlap_friendly")
    kinds = [PipelineSchedule(name=name) for name in names]
    for effort in ("stages", "solves"):
        with patch("autopar.planning.pipeline_planner.least_seconds", wraps=least_seconds) as found:
            shared = {planner.bound(stages, kind, BATCHES, effort=effort) for kind in kinds}
        assert found.call_count == len(shared) == 1
    for kind in kinds:
        own = planner.bound(stages, kind, BATCHES, effort="schedule")
        assert min(shared) <= own <= planned(gpt, stages, kind.name).predicted_seconds


def fronts_of_layer(step: StepGraph, shape: Shape) -> list[LayerFront]:
    """Return the fronts of the second of three layers on all mesh choices of a shape."""
    layers = LayerCosts(ClusterCosts(CLUSTER), replace(AUTO, tolerance=TOLERANCE))
    costs = StageCosts(LayerRanges(step, 3), layers, layers.options, 1e12)
    fronts = (layers.front(costs.ranges.layers[1], choice) for choice in costs.mesh_choices(shape))
    return [front for front in fronts if front is not None]


def test_a_single_example_saves_half_of_what_two_examples_save():
    """It has no batch dim to follow."""
    sizes = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "vocab_size": 128}
    model = build_model("gpt", sizes | {"sequence_length": 64, "batch_size": 8, "remat": False})
    one, two = (
        LayerRanges(
            trace(
                model_step(model),
                model.abstract_args(),
                (1,),
                count,
                TraceOptions(layers=AutoLayerOption(2), marked=True),
            ),
            2,
        )
        for count in (8, 4)
    )
    for layer in range(2):
        assert one.saved_bytes(layer, layer + 1) == pytest.approx(
            two.saved_bytes(layer, layer + 1) / 2, rel=0.01
        )


@pytest.mark.parametrize(("schedule", "held"), [("gpipe", [8]), ("1f1b", [3, 2])])
def test_stages_are_composed_for_the_microbatches_that_they_may_hold(gpt, schedule, held):
    costs = stage_costs(gpt, 1e5)  # no stage fits
    problem = stage_problem(
        ClusterStageCosts((costs,), costs.model), CLUSTER, AutoStageOption(), schedule
    )
    composed: list[int] = []
    with patch.object(costs, "composed", lambda *args: composed.append(args[3])):
        assert problem.costs(2, 3, Submesh(0, 1, 2)) == []
    assert composed == held


@pytest.mark.parametrize("shape", [(1,), (4,), (2, 2)])
def test_the_cost_of_a_stage_is_near_the_sum_of_its_layers(gpt, shape):
    costs = stage_costs(gpt)
    for start, stop in ((0, 2), (1, 3)):  # with the tied embedding in one of them
        composed = costs.composed(start, stop, [shape], 2)
        assert composed is not None
        solved = costs.solve(costs.ranges.graph(start, stop), composed, 2)
        # each layer computes shared scalars again, which the bound counts
        assert composed.bound(2, costs.budget) <= solved.shardings.seconds * 1.02
        assert composed.cost.seconds == pytest.approx(solved.seconds, rel=0.1)
        composed_bytes = composed.cost.fixed_bytes + 2 * composed.cost.micro_batch_bytes
        assert solved.bytes(2) <= composed_bytes * 1.05


def test_a_composition_whose_solve_takes_too_long_is_composed_again_in_less_memory(gpt):
    costs = stage_costs(gpt)
    rooms = []

    def solve(*args):
        rooms.append(costs.room / costs.budget)
        if len(rooms) == 1:
            raise TimeoutError
        return StageCosts.solve(costs, *args)

    with patch.object(costs, "solve", solve):
        stage = costs.cheapest(costs.ranges.graph(0, 2), range(2), [(4,)], 2)
    assert stage.bytes(2) <= costs.budget
    assert rooms == pytest.approx([1.0, 0.95])
    assert costs.revisions == 1


def test_microbatches_that_divide_evenly_are_not_traced_again(mlp):
    def retrace(count: int) -> StepGraph:
        raise AssertionError(f"traced in {count} microbatches")

    options = replace(AUTO, data_parallel=True)
    stages = ManualStageOption([[0], [1, 2, 3]], [(1, 2)] * 2, [(2,)] * 2)
    plan = planned(replace(mlp, retrace=retrace), stages, options=options)
    assert [stage.deferred for stage in plan.stages] == [("x",), ("x",)]


def test_it_takes_a_trace_whether_examples_that_share_statistics_can_be_divided(mlp):
    def divides(ways: int, **changes) -> bool:
        micro = replace(mlp.microbatching, **changes)
        partition = partition_step(replace(mlp, microbatching=micro), range(LAYERS))
        return stage_graphs(partition)[1].step.divides_evenly(ways)

    assert divides(2)
    assert divides(4)
    assert not divides(3)
    assert not divides(2, own_statistics=("step.py:1",))
    assert not divides(2, parts=2)
    assert not divides(2, powers={})


@pytest.mark.slow
def test_smaller_memory_budgets_cost_more_seconds(gpt):
    """A stage fits the budget as a composition of layers and when it is solved as a whole."""
    unlimited = stage_costs(gpt).composed(0, LAYERS, [(4,)], 4)
    assert unlimited is not None
    assert unlimited.price == 0
    most_bytes = unlimited.cost.fixed_bytes + 4 * unlimited.cost.micro_batch_bytes
    seconds, bytes_used = [unlimited.step_seconds], [most_bytes]
    for share in (0.98, 0.96, 0.95):
        costs = stage_costs(gpt, share * most_bytes)
        composed = costs.composed(0, LAYERS, [(4,)], 4)
        assert composed is not None
        assert composed.price > 0
        seconds.append(composed.step_seconds)
        bytes_used.append(composed.cost.fixed_bytes + 4 * composed.cost.micro_batch_bytes)
        assert bytes_used[-1] <= share * most_bytes
        assert composed.bound(4, share * most_bytes) <= composed.step_seconds
        solved = costs.cheapest(costs.ranges.graph(0, LAYERS), range(LAYERS), [(4,)], 4)
        assert solved.bytes(4) <= share * most_bytes
    assert seconds == sorted(seconds)
    assert bytes_used == sorted(bytes_used, reverse=True)
    assert stage_costs(gpt, 0.1 * most_bytes).composed(0, LAYERS, [(4,)], 4) is None


def test_the_best_of_several_meshes_is_as_fast_as_the_best_of_each(gpt):
    """Bounds leave out only compositions that are slower or do not fit."""
    shapes = [(4,), (2, 2)]
    unlimited = stage_costs(gpt).composed(0, 2, [(4,)], 4)
    assert unlimited is not None
    most_bytes = unlimited.cost.fixed_bytes + 4 * unlimited.cost.micro_batch_bytes
    for share in (1.0, 0.9, 0.8):
        budget = share * most_bytes
        alone = [stage_costs(gpt, budget).composed(0, 2, [shape], 4) for shape in shapes]
        best = stage_costs(gpt, budget).composed(0, 2, shapes, 4)
        seconds = [stage.step_seconds for stage in alone if stage is not None]
        assert (best.step_seconds if best else inf) == pytest.approx(min(seconds, default=inf))


@pytest.mark.parametrize("option", [UniformStageOption(2), AutoStageOption()], ids=str)
def test_pins_apply_in_the_stage_that_has_the_pinned_value(mlp, option):
    kernel = "0/params/params/Dense_1/kernel"
    options = replace(AUTO, pins={kernel: P(None, "x")})
    plan = planned(mlp, option, options=options)
    (owner,) = (
        stage for stage in plan.stages if any(value.path == kernel for value in stage.inputs)
    )
    spec = next(value.spec for value in owner.inputs if value.path == kernel)
    assert spec == ((), ("x",) if owner.mesh_shape[0] > 1 else ())


def test_a_pin_that_matches_nothing_in_any_stage_is_refused(mlp):
    options = replace(AUTO, pins={"0/params/params/Dense_1/kernle": P("x")})
    with pytest.raises(ShardingError, match=r"matches no input.*Dense_1/kernel"):
        planned(mlp, UniformStageOption(2), options=options)


def test_a_stage_receives_only_values_of_other_stages(gpt):
    """The sums over its own microbatches are not received."""
    for graph in stage_graphs(partition_step(gpt, [0, 0, 1, 1])):
        assert graph.received
        assert all(graph.partition.producers[var].stage != graph.stage for var in graph.received)


def test_the_predicted_seconds_are_near_the_objective_of_the_dynamic_program(gpt):
    """For equal stages the formula of 1f1b is exact except for transfers, which overlap."""
    plan, dp_result = planned(gpt, AutoStageOption()), autopar.get_last_dp_result()
    assert dp_result is not None
    assert plan.predicted_seconds == pytest.approx(dp_result.seconds, rel=0.1)


def test_seconds_of_a_stages_phases_add_up_to_those_of_the_stage(gpt):
    for shape in ((1,), (4,), (2, 2)):
        solved = solved_stage(stage_costs(gpt), 0, 2, shape)
        phases = solved.phases
        assert BATCHES * (phases["F"] + phases["B"]) + phases["U"] == pytest.approx(
            solved.shardings.seconds
        )
        # backward, each matrix product of the forward pass becomes two, and remat repeats it
        assert phases["B"] > 1.9 * phases["F"] > 0


def test_memory_grows_with_microbatches_in_flight(mlp):
    graph = LayerRanges(mlp, LAYERS).graph(1, 3)
    one, three = (solved_stage(stage_costs(mlp), 1, 3, (1,), k) for k in (1, 3))
    assert (one.phases, one.bytes(2)) == (three.phases, three.bytes(2))
    rows, dim = 64 // BATCHES, 64
    assert one.micro_batch_bytes == graph_bytes(graph)
    assert one.micro_batch_bytes % (rows * dim) == 0
    fitting = solved_stage(stage_costs(mlp, one.bytes(3)), 1, 3, (1,), 3)
    assert fitting.bytes(3) == one.bytes(3)
    with pytest.raises(MemoryBudgetError):
        solved_stage(stage_costs(mlp, one.bytes(3) - 1), 1, 3, (1,), 3)


def graph_bytes(graph) -> int:
    return sum(var.aval.size * var.aval.dtype.itemsize for var in graph.step.saved_for_backward)


def test_gpipe_needs_the_memory_of_all_microbatches(mlp):
    """A memory budget that suffices for 1f1b is too small for it."""
    option = UniformStageOption(4)
    used = planned(mlp, option).predicted_bytes
    assert planned(mlp, option, "gpipe").predicted_bytes > used
    assert planned(mlp, option, memory_budget=used).predicted_bytes <= used
    with pytest.raises(MemoryBudgetError, match="stage"):
        planned(mlp, option, "gpipe", memory_budget=used)


def test_a_memory_budget_without_feasible_stages_is_refused(mlp):
    with pytest.raises(NoStagesError, match="more layers, more devices"):
        planned(mlp, AutoStageOption(), memory_budget=1000.0)


def test_few_stages_are_planned_for_slow_links(gpt):
    """Compute is free, so that only transfers count."""
    costs = BandwidthOnly(bandwidth=1e3, flop_per_s=1e30)
    plan = planned(gpt, AutoStageOption(submesh_physical_shape_space="all"), costs=costs)
    assert len(plan.stages) <= 2


def test_the_imbalance_tolerance_excludes_unequal_stages(mlp):
    problem = one_f_one_b(mlp, AutoStageOption(stage_imbalance_tolerance=0.5))
    assert problem.costs(0, 2, Submesh(0, 1, 2))
    assert not problem.costs(0, LAYERS, Submesh(0, 1, 2))
    assert not problem.costs(0, 1, Submesh(0, 1, 4))


def test_automatic_stages_have_the_least_objective_of_all_cuts(mlp):
    """The cuts have one stage on all devices or two stages on half of the devices each."""
    problem = one_f_one_b(mlp, AutoStageOption())
    planned(mlp, AutoStageOption())
    dp_result = autopar.get_last_dp_result()
    assert dp_result is not None

    def seconds(cuts: list[tuple[int, int]], mesh: Submesh) -> float:
        stages = []
        for start, stop in cuts:
            costs = problem.costs(start, stop, mesh)
            stages.append(
                PlacedStage(
                    start,
                    stop,
                    mesh,
                    min(costs, key=lambda c: BATCHES * c.seconds + c.once_seconds),
                )
            )
        return step_seconds(problem, stages)

    all_devices, half = Submesh(0, 1, 4), Submesh(0, 1, 2)
    objectives = [
        seconds([(0, LAYERS)], all_devices),
        *(seconds([(0, k), (k, LAYERS)], half) for k in range(1, LAYERS)),
    ]
    assert dp_result.seconds <= min(objectives) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"submesh_physical_shape_space": "some"},
            "submesh_physical_shape_space is 'some', expected one of 'power_of_two'",
        ),
        (
            {"submesh_logical_shape_space": "any"},
            "submesh_logical_shape_space is 'any', expected one of",
        ),
        ({"stage_imbalance_tolerance": -1.0}, "expected a number of at least 0"),
    ],
)
def test_unknown_options_are_refused(change, message):
    with pytest.raises(autopar.StageError, match=message):
        replace(AutoStageOption(), **change)


def test_several_chunks_without_uniform_stages_are_refused(mlp):
    with pytest.raises(autopar.StageError, match="UniformStageOption"):
        planned(mlp, AutoStageOption(), "interleaved_1f1b", 2)
    plan = planned(mlp, UniformStageOption(4), "interleaved_1f1b", 2)
    assert len({stage.devices for stage in plan.stages}) == 2


def test_a_logical_shape_must_have_all_devices_of_the_submesh(mlp):
    with pytest.raises(
        autopar.StageError,
        match=r"\(2,\) is of 2 device\(s\), but each of 1 submesh\(es\) has 4; give",
    ):
        planned(mlp, UniformStageOption(1, submesh_logical_shape=(2,)))
    plan = planned(mlp, UniformStageOption(1, (1, 2), (2,)))
    assert [stage.devices for stage in plan.stages] == [(0, 1)]


def test_stages_that_fit_are_found_where_their_memory_is_estimated_too_large():
    """Automatic stages were refused by an estimate 15 % above what the stage needs."""

    def step(params, batch):
        def loss(params):
            x = batch["x"]
            for weights in params:
                x = jnp.tanh(x @ weights)
            return jnp.mean(x**2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    params = [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 8
    batch = {"x": jax.ShapeDtypeStruct((2**17, 2048), jnp.float32)}

    def planned(stages, budget):
        layers = autopar.AutoLayerOption(8)
        method = autopar.PipeshardParallel(
            8, 2, layer_option=layers, stage_option=stages, memory_budget=budget
        )
        return autopar.plan_step(
            step, (params, batch), method=method, cluster="dgx_a100_80", batch_argnums=(1,)
        )

    free = planned(autopar.AutoStageOption(), None)
    budget = 1.1 * free.predicted_bytes
    plan = planned(autopar.AutoStageOption(), budget)
    assert plan.predicted_bytes <= budget
    given = planned(autopar.UniformStageOption(1), budget)
    assert plan.predicted_seconds <= 1.001 * given.predicted_seconds
    with pytest.raises(NoStagesError):
        planned(autopar.AutoStageOption(), 0.5 * free.predicted_bytes)


def test_weight_gradients_of_their_own_store_what_the_forward_pass_does():
    """What input gradients alone read is free once they are computed."""
    gpt = traced("gpt", GPT | {"remat": False}, LAYERS)
    together, apart = (
        stage_graphs(partition_step(gpt, [0, 0, 1, 1], split_backward=split))
        for split in (False, True)
    )
    for one, two in zip(together, apart, strict=True):
        assert set(two.step.saved_for_backward) == set(one.step.saved_for_backward)
        assert len(one.step.task_ends) == 2
    _, inputs, weights = two.step.task_ends
    last = {lifetimes(two.step)[var][1] for var in two.step.cross_task_values}
    assert {inputs, weights} <= last
    h1, one_f_one_b = (
        planned(gpt, UniformStageOption(2), schedule).predicted_bytes
        for schedule in ("zero_bubble_h1", "1f1b")
    )
    assert h1 <= one_f_one_b  # H1 fills the bubble in the memory of 1f1b
