"""Gradients are summed over devices once per step, and the result equals one device."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.sharding.options import ShardingOptions
from autopar.testing import assert_allclose
from tests.tiers import tiers

RNG = np.random.default_rng(0)
PARAMS = {
    "up": RNG.standard_normal((16, 64), np.float32) / 4,
    "down": RNG.standard_normal((64, 16), np.float32) / 8,
    "bias": np.zeros(16, np.float32),
}
STATE = {"params": PARAMS, "momentum": jax.tree.map(np.zeros_like, PARAMS)}
WHOLE = ShardingOptions(pins={"1/*": P(("x", "y")), "0/params/*": P()})
TENSOR_PARALLEL = ShardingOptions(
    batch_axis="x",
    pins={"0/*/up": P(None, "y"), "0/*/down": P("y", None), "0/*/bias": P()},
    forbidden=frozenset({"all_gather"}),
)
METHODS = {
    "DataParallel": autopar.DataParallel,
    "Zero2Parallel": autopar.Zero2Parallel,
    "Zero3Parallel": autopar.Zero3Parallel,
    "ShardParallel": lambda **kw: autopar.ShardParallel(**kw, options=WHOLE),
    "tensor parallel": lambda **kw: autopar.ShardParallel(**kw, options=TENSOR_PARALLEL),
}


def batch_of(rows: int) -> dict[str, np.ndarray]:
    return {
        "x": RNG.standard_normal((rows, 16), np.float32),
        "y": RNG.standard_normal((rows, 16), np.float32),
    }


def step_of(reduce, dtype=np.float32):
    def step(state, batch):
        def loss(params):
            params = jax.tree.map(lambda p: p.astype(dtype), params)
            hidden = jax.nn.relu(batch["x"].astype(dtype) @ params["up"])
            error = hidden @ params["down"] + params["bias"] - batch["y"]
            return reduce(error.astype(np.float32) ** 2), {
                "fixed": jnp.int32(3),
                "largest weight": params["up"].max(),
            }

        (value, aux), grads = autopar.value_and_grad(loss, has_aux=True)(state["params"])
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
        params = jax.tree.map(lambda p, m: p - 1e-3 * m, state["params"], momentum)
        return {"params": params, "momentum": momentum}, (value, aux)

    return step


def collectives(hlo: str) -> tuple[Counter[str], Counter[str]]:
    """Return the collectives inside and outside loops, without gathers of parameters."""
    bodies = set(re.findall(r"body=%?([\w.\-]+)", hlo))
    inside, outside, here = Counter(), Counter(), ""
    for line in hlo.splitlines():
        if header := re.match(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            here = header[1]
        if found := re.search(
            r" (all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", line
        ):
            (inside if here in bodies else outside)[found[1]] += 1
    return inside, outside


def three_steps(planned, step, rows):
    state, expected = STATE, STATE
    for _ in range(3):
        batch = batch_of(rows)
        state, value = planned(state, batch)
        expected, one = jax.jit(step)(expected, batch)
        assert_allclose(value, one, rtol=1e-4, atol=1e-5)
    assert_allclose(state, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "shape", "count", "reduce"),
    tiers(
        [
            (method, shape, count, reduce)
            for method in METHODS
            for shape in [(2, 2), (1, 4)]
            for count, reduce in [(2, jnp.sum), (4, jnp.mean)]
        ]
    ),
)
def test_one_synchronization_per_step_and_the_result_of_one_device(method, shape, count, reduce):
    step = step_of(reduce)
    planned = autopar.parallelize(
        step, method=METHODS[method](devices=shape, num_micro_batches=count)
    )
    three_steps(planned, step, 32)
    executable = planned.get_executable(STATE, batch_of(32))
    inside, outside = collectives(executable.get_hlo_text())
    if method == "tensor parallel":  # partial activations are completed as they arise
        assert inside == {"all-reduce": 1}
        assert executable.plan.stages[0].deferred == (("x",) if shape == (2, 2) else ())
        return
    assert not inside
    assert executable.plan.stages[0].deferred
    # Loss and gradients at once; in ZeRO the loss alone, and the largest of the sharded weights.
    assert outside["all-reduce"] == 1 + (method == "Zero3Parallel")
    if method.startswith("Zero"):
        assert outside["reduce-scatter"] == len(PARAMS)  # the GPU's compiler combines them


@pytest.mark.parametrize(
    ("method", "shape", "rows"), [("DataParallel", 4, 8), ("tensor parallel", (2, 2), 4)]
)
def test_one_example_per_device_and_microbatch(method, shape, rows):
    step = step_of(jnp.mean)
    planned = autopar.parallelize(step, method=METHODS[method](devices=shape, num_micro_batches=2))
    three_steps(planned, step, rows)
    executable = planned.get_executable(STATE, batch_of(rows))
    assert executable.plan.stages[0].deferred == ("x",)
    inside, _ = collectives(executable.get_hlo_text())
    assert inside == ({"all-reduce": 1} if method == "tensor parallel" else {})


def test_a_loaded_plan_defers_as_the_planned_one():
    step, batch = step_of(jnp.mean), batch_of(32)
    planned = autopar.parallelize(
        step, method=METHODS["tensor parallel"](devices=(2, 2), num_micro_batches=2)
    )
    plan = autopar.Plan.from_json(planned.get_executable(STATE, batch).plan.to_json())
    assert plan.stages[0].deferred == ("x",)
    again = autopar.parallelize(step, method=autopar.PlanMethod(plan))
    assert_allclose(again(STATE, batch), planned(STATE, batch))


@pytest.mark.parametrize(
    ("dtype", "close"),
    [
        (np.float32, {"rtol": 1e-4, "atol": 1e-5}),
        pytest.param(jnp.bfloat16, {"rtol": 5e-2, "atol": 1e-2}, marks=pytest.mark.slow),
    ],
    ids=["float32", "bfloat16"],
)
def test_gathered_parameters_and_every_combination_of_axes_give_the_same_numbers(dtype, close):
    """Deferred axes change results by rounding only, whatever the shardings of the plan."""
    step, batch = step_of(jnp.mean, dtype), batch_of(32)
    planned = autopar.parallelize(
        step, method=autopar.Zero3Parallel(devices=(2, 2), num_micro_batches=2)
    )
    plan = planned.get_executable(STATE, batch).plan
    for axes in [("x",), ("y",), ("x", "y"), ()]:
        stage = plan.stages[0].model_copy(update={"deferred": axes})
        other = autopar.parallelize(
            step, method=autopar.PlanMethod(plan.model_copy(update={"stages": (stage,)}))
        )
        assert_allclose(other(STATE, batch), jax.jit(step)(STATE, batch), **close)


def test_the_batch_is_not_copied_for_the_loop_over_microbatches():
    rows = jax.ShapeDtypeStruct((1 << 20, 16), np.float32)
    args, cluster = (STATE, {"x": rows, "y": rows}), "dgx_a100_80"
    method = autopar.DataParallel(num_micro_batches=1024)
    plan = autopar.plan_step(step_of(jnp.mean), args, method=method, cluster=cluster)
    (memory,) = autopar.compile_step(step_of(jnp.mean), args, plan, cluster).memory
    assert memory.roles["inputs"] >= 2 * 4 * rows.size / 8
    assert memory.temporaries < memory.roles["inputs"] / 2
