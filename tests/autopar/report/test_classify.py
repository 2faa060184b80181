"""Kinds of parallelism follow from the use of an axis, not from shardings alone."""

from itertools import product

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.analysis.axis_uses import with_axis_uses
from autopar.ir.spec import LogicalMesh
from autopar.plan import Plan
from autopar.planning.step_planner import make_planned
from autopar.report import PlannedStep, classify
from autopar.sharding.options import DATA_PARALLEL
from autopar.tracing.trace import trace
from simulator.hardware.cluster import Cluster
from tests.autopar.report.planned_steps import planned, respecced
from tests.tiers import covering

ONE_KIND = {"DataParallel": "data parallel", "Zero2Parallel": "ZeRO-2", "Zero3Parallel": "ZeRO-3"}


@pytest.mark.parametrize(
    ("step", "method", "shape"),
    covering(
        list(
            product(
                ["mlp", "decoder", "mlp in microbatches"],
                ONE_KIND,
                [(2,), (4,), (2, 2), (1, 4), (2, 4)],
            )
        ),
        2,
    ),
)
def test_methods_of_one_kind_are_that_kind_on_every_axis(step, method, shape):
    found = classify(planned(step, method, shape))
    assert found.label == ONE_KIND[method]
    assert {found.on(axis) for axis, size in found.mesh.sizes.items() if size > 1} == {
        ONE_KIND[method]
    }


def test_one_device_is_not_parallel():
    found = classify(planned("mlp", "ShardParallel", (1,)))
    assert found.label == "one device"
    assert {each.label for each in found.parameters} == {"one device"}


@pytest.mark.parametrize("devices", [2, 4])
def test_kernels_of_a_wide_mlp_alternate_between_column_and_row(devices):
    found = classify(planned("wide mlp", "ShardParallel", (devices,)))
    kernels = [each.kinds for each in found.parameters if each.path.endswith("kernel")]
    assert kernels == [(("x", ("column",)),), (("x", ("row",)),)] * 3
    assert found.label == "operator parallel (column, row)"


def test_biases_go_with_the_outputs_of_their_kernels():
    found = classify(planned("wide mlp"))
    assert found["0/params/params/Dense_0/bias"].label == "column on x"
    # the bias is added to a completed sum
    assert found["0/params/params/Dense_1/bias"].label == "replicated on x"


def test_two_axes_can_do_different_things():
    found = classify(planned("decoder", "ShardParallel", (2, 2)))
    examples, operators = sorted("xy", key=lambda axis: not found.on(axis).startswith("ZeRO"))
    assert found.on(examples).startswith("ZeRO")
    assert "operator parallel (column, row" in found.on(operators)
    for layer, kind in (("up", "column"), ("down", "row")):
        kinds = dict(found[f"0/params/params/{layer}/kernel"].kinds)
        assert kinds[examples] in [("ZeRO-2",), ("ZeRO-3",)]  # of equal cost
        assert kinds[operators] == (kind,)


def test_layers_are_told_apart():
    assert classify(planned("wide mlp")).layers == {
        f"0/params/params/Dense_{i}": f"operator parallel ({'column' if i % 2 == 0 else 'row'})"
        for i in range(6)
    }


def test_an_embedding_split_by_rows_is_vocab_parallel():
    split = respecced(planned("decoder"), {"0/params/params/tokens/embedding": (("x",), ())})
    assert classify(split)["0/params/params/tokens/embedding"].label == "vocab on x"


def test_experts_that_are_split_are_expert_parallel():
    def step(params, x):
        def loss(params):
            return (jnp.einsum("bed,edf->bef", x, params["experts"]) ** 2).mean()

        gradients = autopar.grad(loss)(params)
        return {"experts": params["experts"] - gradients["experts"]}

    graph = trace(
        step, ({"experts": np.zeros((4, 8, 8), np.float32)}, np.zeros((16, 4, 8), np.float32)), (1,)
    )
    plan = make_planned(
        graph, LogicalMesh((4,), ("x",)), Cluster.load("dgx_a100_80"), DATA_PARALLEL, "DataParallel"
    ).plan
    split = respecced(PlannedStep(graph, plan), {"0/experts": (("x",), (), ())})
    assert classify(split)["0/experts"].label == "expert on x"


def test_a_dim_of_activations_that_is_no_batch_is_sequence_parallel():
    split = respecced(planned("decoder"), {"1/tokens": ((), ("x",))})
    assert classify(split)["0/params/params/up/kernel"].label == "sequence on x"


def test_storing_a_parameter_in_parts_without_splitting_the_batch_is_no_zero():
    """The parameter is gathered before every use, and every device does all the work."""
    base = planned("mlp")
    (stage,) = base.plan.stages
    kernel = "0/params/params/Dense_0/kernel"
    split = respecced(base, {kernel: (("x",), ())})
    first = next(
        n for n, eqn in enumerate(base.step.jaxpr.eqns) if eqn.primitive.name == "dot_general"
    )
    whole = next(c for c in stage.constraints if c.eqn == first and c.side == "out")
    gather = whole.model_copy(
        update={"side": "in", "index": 1, "shape": (64, 64), "spec": ((), ())}
    )
    (bare,) = split.plan.stages
    plan = split.plan.model_copy(
        update={"stages": (bare.model_copy(update={"constraints": (gather,)}),)}
    )
    assert classify(with_axis_uses(base.step, plan))[kernel].label == "stored in parts on x"


def test_optimizer_state_in_parts_with_whole_gradients_is_zero_1():
    data = planned("mlp", "DataParallel")
    (stage,) = data.plan.stages
    moments = {f"0/opt_state/0/{m}/params/Dense_0/kernel" for m in ("mu", "nu")}
    inputs = [
        v.model_copy(update={"spec": (("x",), ())}) if v.path in moments else v
        for v in stage.inputs
    ]
    stage = stage.model_copy(update={"inputs": tuple(inputs)})
    found = classify(with_axis_uses(data.step, data.plan.model_copy(update={"stages": (stage,)})))
    assert found["0/params/params/Dense_0/kernel"].label == "ZeRO-1 on x"
    assert found["0/params/params/Dense_1/kernel"].label == "data parallel on x"


def test_a_step_without_optimizer_state_is_data_parallel():
    def step(params, x):
        gradients = autopar.grad(lambda params: jnp.mean((x @ params["w"]) ** 2))(params)
        return optax.apply_updates(params, gradients)

    graph = trace(step, ({"w": np.zeros((8, 8), np.float32)}, np.zeros((16, 8), np.float32)), (1,))
    plan = make_planned(
        graph, LogicalMesh((4,), ("x",)), Cluster.load("dgx_a100_80"), DATA_PARALLEL, "DataParallel"
    ).plan
    assert classify(PlannedStep(graph, plan)).label == "data parallel"


def test_a_plan_read_from_json_is_classified_without_its_step():
    each = planned("decoder", "ShardParallel", (2, 2))
    found = classify(Plan.from_json(each.plan.to_json()))
    assert found == classify(each)
    assert "operator parallel" in found.label


def test_unknown_names_are_answered_with_known_ones():
    found = classify(planned("mlp"))
    with pytest.raises(KeyError, match="did you mean 0/params/params/Dense_0/kernel"):
        found["0/params/Dense_0/kernel"]
    with pytest.raises(KeyError, match="no mesh axis 'y'; the plan's are x"):
        found.on("y")


def test_text_has_a_line_for_every_parameter():
    text = str(classify(planned("wide mlp")))
    assert text.splitlines()[0] == "operator parallel (column, row) (mesh x=4)"
    assert (
        "  0/params/params/Dense_1/kernel float32[256,256] P('x', None): row on x"
        in text.splitlines()
    )
