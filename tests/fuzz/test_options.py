"""Random options of all public classes and functions are used, or refused in one line."""

import random
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

import autopar
from simulator.hardware.cluster import Cluster
from simulator.hardware.heterogeneous import load_cluster
from tests.autopar.pipeline.stack_steps import stack, stack_batch, stack_params
from tests.fuzz.outcomes import Outcomes

pytestmark = pytest.mark.fuzz

ROOT = Path(__file__).parent.parent.parent
ARGS = jax.eval_shape(lambda: (stack_params(), stack_batch()))
CLUSTER = Cluster.load("p3.16xlarge")
SECONDS = 30
"""Seconds that an input may take."""

NAN, INF = float("nan"), float("inf")

JUNK: list[Any] = [
    None, True, False, 0, 1, 2, 3, -1, 8, 10**9, 10**400, 0.0, 0.5, 2.0, 8.0, -1.5, NAN, INF, -INF,
    1e308, 1j,
    "", "0", "2", "x", "auto", "foo", "1GB", "p3.16xlarge", "no/such.yaml", b"x", Path("somewhere"),
    (), (2,), (2, 4), (0,), (-1, 8), (2, 2.0), (2, "x"), (1, 1, 1, 1, 1),
    [], [None], [[0, 1], [2, 3]], ["x"], range(2), {1}, {}, {1: 2}, {"x": 2}, {"0": "x"},
    {"0/w0": jax.P("x")}, {"0": jax.P("x")}, {"": jax.P()},
    object(), int, len, lambda x: x, NotImplemented, np.int64(2), np.float32(2), np.bool_(True),
    np.array([2, 4]), np.array([0.5]), np.array("x"), np.zeros((3, 3)),
    jax.P("x"), jax.P("x", "x"), jax.P(("x", "y")), jax.ShapeDtypeStruct((2,), "float32"),
    autopar.ShardingOptions(), autopar.ShardParallel(), autopar.UniformStageOption(),
    autopar.ManualLayerOption(), CLUSTER,
]  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A class or function with options.

    Attributes:
        make: the class or function.
        options: valid values of each option.
        use: uses the result of `make`; does nothing by default.
        count: number of random choices of options.
        given: options of every choice.
    """

    make: Callable[..., Any]
    options: Mapping[str, Sequence[Any]]
    use: Callable[[Any], object] = lambda made: None
    count: int = 80
    given: Mapping[str, Any] | None = None


def loss(params: Any, batch: Any, bounded: bool) -> jax.Array:
    x = batch["x"]
    if bounded:
        x = stack(params, x)
    else:
        for name in sorted(params):
            x = jnp.tanh(x @ params[name])
    return jnp.mean((x - batch["y"]) ** 2)


def stepping(bounded: bool) -> Callable[[Any, Any], Any]:
    def step(params: Any, batch: Any) -> Any:
        value, gradients = autopar.value_and_grad(lambda params: loss(params, batch, bounded))(
            params
        )
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step


STEP, BOUNDED = stepping(False), stepping(True)


@cache
def a_plan() -> autopar.Plan:
    return autopar.plan_step(STEP, ARGS, cluster=CLUSTER)


def plan(method: Any) -> object:
    """Plan a small step."""
    bounded = isinstance(getattr(method, "layer_option", None), autopar.ManualLayerOption)
    return autopar.plan_step(BOUNDED if bounded else STEP, ARGS, method=method, cluster=CLUSTER)


def plan_with(**fields: Any) -> Callable[[Any], object]:
    """Plan with the option in a pipeline; `fields` are the others."""

    def use(option: Any) -> object:
        name = "stage_option" if "Stage" in type(option).__name__ else "layer_option"
        method = autopar.PipeshardParallel(num_micro_batches=2, **{name: option}, **fields)
        return plan(method)

    return use


LAYERS = autopar.AutoLayerOption(layer_num=2)
COUNTS = [1, 2, np.int64(4), 16]
COMMON = {
    "devices": [None, 8, 4, (2, 4), [2, 2], np.array([8]), AbstractMesh((2, 2), ("x", "y")),
                jax.devices(), 64, jax.make_mesh((4, 2), ("x", "y")),
                Mesh(jax.devices()[:2], ("x",))],
    "num_micro_batches": [*COUNTS, 3],
    "cluster": [None, CLUSTER, "dgx_h100", load_cluster("p3.16xlarge")],
    "memory_budget": [None, 1e9, 10**6, np.float32(1e8), INF, 1.0],
}  # fmt: skip
SHARDING = {
    "mode": ["solve", "heuristic", "manual"],
    "data_parallel": [False, True],
    "parameters": ["any", "replicated", "sharded"],
    "optimizer_state": ["any", "replicated", "sharded"],
    "batch_axis": [None, "x", "y"],
    "forbidden": [
        set(),
        {"all_gather"},
        ["all_reduce", "all_to_all"],
        frozenset({"reduce_scatter", "all_reduce"}),
    ],
    "prefer_reduce_scatter": [False, True],
    "pins": [
        {},
        {"0/w0": jax.P("x")},
        {"0/*": jax.P()},
        {"1/x": jax.P("x")},
        {"0/w9": jax.P()},
        {"0/w1": jax.P("x", "x")},
    ],
    "time_limit": [60.0, 10, 1e-9],
    "tolerance": [0.0, 0.1, 1],
}
LAYER = {
    "remat_layer": [False, True, "auto"],
    "eps": [0.6, 0, 5.0, 1e308],
    "cost_criteria": ["flops", "count"],
    "remat_parts": [None, 1, 3, 100, "auto"],
}
PIPELINE = {
    **COMMON,
    "num_micro_batches": [*COUNTS, "auto"],
    "default_auto_sharding_option": [
        autopar.ShardingOptions(),
        autopar.ShardingOptions(batch_axis="x"),
    ],
    "pipeline_schedule": [
        "1f1b",
        "gpipe",
        "interleaved_1f1b",
        "auto",
        "inference",
        "zero_bubble_h1",
        "zero_bubble_v",
    ],
    "layer_option": [LAYERS, autopar.ManualLayerOption(), autopar.AutoLayerOption(4, "auto"), None],
    "stage_option": [
        "uniform",
        "auto",
        autopar.UniformStageOption(2),
        autopar.AutoStageOption(leave_idle=True),
    ],
    "stage_mode": [None, "uniform", "auto"],
    "num_chunks": [1, 2, "auto"],
}
BATCHES = {"x": jax.ShapeDtypeStruct((4,), "float32")}


def reads(*_: Any) -> Any:
    return iter(())


SUBJECTS = {
    "ShardParallel": Subject(
        autopar.ShardParallel, {**COMMON, "options": [autopar.ShardingOptions()]}, plan, 120
    ),
    "DataParallel": Subject(autopar.DataParallel, COMMON, plan, 100),
    "Zero2Parallel": Subject(autopar.Zero2Parallel, COMMON, plan),
    "Zero3Parallel": Subject(autopar.Zero3Parallel, COMMON, plan),
    "ManualShardParallel": Subject(
        autopar.ManualShardParallel,
        {
            **COMMON,
            "in_specs": [None, (jax.P(), jax.P("x")), (None, jax.P("z"))],
            "out_specs": [None, (jax.P(), None)],
            "pins": SHARDING["pins"],
        },
        plan,
        120,
    ),
    "ShardingOptions": Subject(
        autopar.ShardingOptions,
        SHARDING,
        lambda made: plan(autopar.ShardParallel(options=made, devices=(2, 4))),
        240,
    ),
    "PipeshardParallel": Subject(
        autopar.PipeshardParallel, PIPELINE, plan, 200, {"layer_option": LAYERS}
    ),
    "AutoLayerOption": Subject(
        autopar.AutoLayerOption, {"layer_num": [2, 4, 1, 100], **LAYER}, plan_with(devices=2), 100
    ),
    "ManualLayerOption": Subject(
        autopar.ManualLayerOption, {"remat_layer": LAYER["remat_layer"]}, plan_with(devices=4), 40
    ),
    "UniformStageOption": Subject(
        autopar.UniformStageOption,
        {
            "num_stages": [None, 1, 2, 5],
            "submesh_physical_shape": [None, (1, 2), (2, 2)],
            "submesh_logical_shape": [None, (2,), (4,), (2, 2)],
        },
        plan_with(layer_option=LAYERS),
        100,
    ),
    "ManualStageOption": Subject(
        autopar.ManualStageOption,
        {
            "forward_stage_layer_ids": [[[0], [1]], [[0, 1]], ((0,), (1,)), [[1], [0]]],
            "submesh_physical_shapes": [[(1, 4), (1, 4)], [(1, 2), [1, 2]], [(1, 8), (1, 8)]],
            "submesh_logical_shapes": [[(4,), (2, 2)], [(2,), (2,)], [(4, 2), (8,)]],
            "submesh_autosharding_option_dicts": [
                [],
                [{}, {}],
                [{"batch_axis": "x"}, {"mode": "heuristic"}],
            ],
            "submesh_devices": [
                (),
                [(0, 1, 2, 3), (4, 5, 6, 7)],
                [(0, 1), (2, 3)],
                [(0, 1), (1, 2)],
            ],
        },
        plan_with(layer_option=LAYERS),
        100,
        {
            "forward_stage_layer_ids": [[0], [1]],
            "submesh_physical_shapes": [(1, 4), (1, 4)],
            "submesh_logical_shapes": [(4,), (4,)],
        },
    ),
    "AutoStageOption": Subject(
        autopar.AutoStageOption,
        {
            "submesh_physical_shape_space": ["power_of_two", "all", "whole_hosts"],
            "submesh_logical_shape_space": [
                "single_node_model_parallel",
                "data_parallel_only",
                "all",
            ],
            "stage_imbalance_tolerance": [INF, 0, 0.5],
            "leave_idle": [False, True],
            "profile": [False],
            "cached_profile_result": [None, "results.json"],
        },
        plan_with(layer_option=LAYERS, devices=2),
    ),
    "get_3d_parallel_method": Subject(
        autopar.get_3d_parallel_method,
        {
            "num_micro_batches": COUNTS,
            "data_parallel": [-1, 1, 2, 4],
            "operator_parallel": [1, 2, 4],
            "pipeline_parallel": [1, 2],
            "devices": [8, None, jax.devices()],
            "allow_degenerate_into_shard_parallel": [True, False],
            "memory_budget": COMMON["memory_budget"],
        },
        plan,
        100,
        {"num_micro_batches": 1},
    ),
    "PlanMethod": Subject(
        lambda **options: autopar.PlanMethod(**{"plan": a_plan()} | options),
        {"plan": [None], "devices": COMMON["devices"]},
    ),
    "FollowParallel": Subject(
        autopar.FollowParallel,
        {"src_func": [autopar.parallelize(STEP)], "num_micro_batches": [None, 1, 2]},
        count=50,
    ),
    "CreateStateParallel": Subject(
        autopar.CreateStateParallel,
        {"train_step": [autopar.parallelize(STEP)], "other_args": [ARGS[1:], ARGS[1]]},
        count=40,
    ),
    "parallelize": Subject(
        autopar.parallelize,
        {
            "fun": [STEP],
            "static_argnums": ["auto", (), 1, [0]],
            "donate_argnums": ["auto", (), 0, [-2]],
            "batch_argnums": [1, (1,), [-1], ()],
            "method": [None, autopar.DataParallel()],
        },
    ),
    "plan_step": Subject(
        autopar.plan_step,
        {
            "fun": [STEP, BOUNDED, autopar.parallelize(STEP)],
            "args": [ARGS, list(ARGS), ARGS[:1]],
            "cluster": [CLUSTER, "dgx_h100", Path("p3.16xlarge"), "nowhere"],
            "method": [None, autopar.DataParallel(), autopar.ShardParallel(devices=(2, 2))],
            "mesh_shape": [None, (8,), [2, 2], (2, 4), (64,)],
            "batch_argnums": [1, (1,), [-1], ()],
        },
        count=100,
        given={"fun": STEP, "args": ARGS, "cluster": CLUSTER},
    ),
    "simulate": Subject(
        lambda **options: autopar.simulate(
            STEP, **{"args": ARGS, "plan": a_plan(), "cluster": CLUSTER} | options
        ),
        {
            "args": [ARGS, list(ARGS)],
            "cluster": [CLUSTER, "dgx_h100"],
            "donate_argnums": ["auto", 0, ()],
            "batch_argnums": [1, (-1,)],
            "fidelity": ["analytic"],
        },
        given={"fidelity": "analytic"},
    ),
    "layer construction": Subject(
        autopar.automatic_layer_construction,
        {"layer_num": [2, 4], **LAYER},
        given={"layer_num": 2},
        count=40,
    ),
    "init": Subject(
        autopar.init,
        {
            "cluster": ["local"],
            "cluster_address": [None, "auto"],
            "num_nodes": [None, 2],
            "num_devices_per_node": [None, 4, (4, 2)],
            "namespace": [None, "name"],
            "timeout": [600.0, 1],
        },
        given={"cluster": "local"},
        count=70,
    ),
}


def drawn(subject: Subject, seed: int) -> dict[str, Any]:
    """Return options; about half of the choices are valid, and the others have one of `JUNK`."""
    rng = random.Random(seed)
    names = [name for name in subject.options if rng.random() < 0.4]
    options = {
        **(subject.given or {}),
        **{name: rng.choice(subject.options[name]) for name in names},
    }
    if rng.random() < 0.55:
        options[rng.choice(list(subject.options))] = rng.choice(JUNK)
    return options


def is_ours(error: BaseException) -> bool:
    """Whether it is a `raise` of this project, and not what a library says of what it was given."""
    return any(
        Path(traceback.extract_tb(error.__traceback__)[-1].filename).is_relative_to(ROOT / part)
        for part in ("autopar", "simulator")
    )


def outcome(subject: Subject, options: Mapping[str, Any]) -> str:
    try:
        made = subject.make(**options)
    except (ValueError, TimeoutError) as error:
        if not is_ours(error) or not str(error).strip():
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        if isinstance(error, autopar.OptionError) and "\n" in str(error):
            return f"LINES: {error}"
        return "refused"
    except TypeError as error:
        if "argument" in str(error) and (
            "missing" in str(error) or "takes" in str(error)
        ):  # Python's own, of a call
            return "refused"
        raise
    try:
        subject.use(made)
    except (ValueError, TimeoutError) as error:
        if not is_ours(error) or not str(error).strip():
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        return "unplannable"
    return "accepted"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SUBJECTS)
def test_options_are_used_or_refused_in_a_line(name, record_property):
    outcomes, subject = Outcomes(), SUBJECTS[name]
    for seed in range(subject.count):
        options = drawn(subject, seed)
        outcomes.add(
            f"{name}, seed {seed}, {options}",
            lambda options=options: outcome(subject, options),
            (),
            SECONDS,
        )
    record_property(f"outcomes of {name}", dict(outcomes.counts))
    assert not outcomes.faults, "\n".join(outcomes.faults[:20])


def test_two_thousand_are_tried():
    assert sum(subject.count for subject in SUBJECTS.values()) >= 2000
