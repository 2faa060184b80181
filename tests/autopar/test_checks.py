"""Options have allowed values; any other raises an error of one line that names them."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import autopar
from autopar import checks
from autopar.layering.layer_options import FollowLayerOption, LayerError
from tests.steps import mlp_args, mlp_step

NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True, slots=True)
class Options:
    count: object = 1

    def __post_init__(self):
        checks.check(self, count=checks.integer() | checks.one_of("auto"))


def test_an_option_has_the_form_that_the_program_uses():
    taken = Options(np.int64(3)).count
    assert (taken, type(taken)) == (3, int)
    assert Options("auto").count == "auto"


@pytest.mark.parametrize(
    "given", [0, True, 1.0, "1", None, [1], np.float32(1), np.ones(1, int), NAN]
)
def test_the_line_names_the_option_what_was_given_and_what_is_expected(given):
    with pytest.raises(
        autopar.OptionError, match=r"^count is .*, expected a whole number of at least 1 or 'auto'$"
    ):
        Options(given)


def test_a_long_value_is_one_short_line():
    with pytest.raises(autopar.OptionError) as caught:
        Options(np.zeros((100, 100)))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


ACCEPTED = [
    (autopar.ShardParallel, {"devices": np.int32(8), "memory_budget": np.float32(1e9)}),
    (autopar.ShardParallel, {"devices": np.array([2, 4]), "num_micro_batches": np.int8(2)}),
    (autopar.ShardParallel, {"devices": AbstractMesh((2,), ("i",)), "memory_budget": INF}),
    (autopar.ShardingOptions, {"forbidden": ["all_gather"], "pins": {"0/*": jax.P("x")}}),
    (autopar.PipeshardParallel, {"num_chunks": 2, "pipeline_schedule": "auto"}),
    (autopar.PipeshardParallel, {"num_chunks": "auto", "stage_mode": "auto"}),
    (
        autopar.UniformStageOption,
        {"num_stages": 2, "submesh_physical_shape": [1, 4], "submesh_logical_shape": (2, 2)},
    ),
    (autopar.AutoLayerOption, {"layer_num": np.int64(2), "remat_layer": "auto", "eps": 1}),
]

REFUSED = [
    (
        autopar.ShardParallel,
        "devices",
        [8.0, True, "8", -1, 0, (), (2, 0), (2, "x"), (1, 1, 1, 1, 2), [None], {"x": 2}],
    ),
    (autopar.Zero3Parallel, "num_micro_batches", ["2", 2.0, None, 0, -1, True, "auto", (2,)]),
    (autopar.DataParallel, "memory_budget", ["1GB", NAN, -1.0, 0, True, [1e9], 10**400]),
    (autopar.Zero2Parallel, "cluster", [8, True, "", ["p3.16xlarge"], {}]),
    (autopar.ShardParallel, "options", [{}, None, "solve", autopar.ShardingOptions]),
    (
        autopar.ManualShardParallel,
        "pins",
        ["0", {"0/x": "x"}, {"": jax.P()}, {0: jax.P()}, [("0", jax.P())], None],
    ),
    (autopar.ShardingOptions, "mode", ["fast", None, ["solve"]]),
    (autopar.ShardingOptions, "data_parallel", [1, None, "yes"]),
    (autopar.ShardingOptions, "parameters", ["all", None, []]),
    (autopar.ShardingOptions, "batch_axis", [0, "", ["x"]]),
    (
        autopar.ShardingOptions,
        "forbidden",
        ["all_gather", {"gather"}, None, [1], {"all_gather": 1}],
    ),
    (autopar.ShardingOptions, "pins", [{"0": "x"}, {"0": None}, "0"]),
    (autopar.ShardingOptions, "time_limit", [0, -1, NAN, None, "60"]),
    (autopar.ShardingOptions, "tolerance", [-0.1, 2, NAN, None]),
    (autopar.PipeshardParallel, "num_micro_batches", [0, "2", 2.0, None, "all"]),
    (autopar.PipeshardParallel, "pipeline_schedule", ["1b1f", None, 1, ["gpipe"]]),
    (autopar.PipeshardParallel, "num_chunks", [2, 0, "two", 1.5]),
    (autopar.PipeshardParallel, "layer_option", ["all", 2, autopar.UniformStageOption()]),
    (autopar.PipeshardParallel, "stage_option", ["even", None, 2, autopar.ManualLayerOption()]),
    (autopar.PipeshardParallel, "stage_mode", ["even", 1, ()]),
    (autopar.PlanMethod, "plan", [None, "plan.json", {}]),
    (autopar.FollowParallel, "src_func", [None, mlp_step, "step"]),
    (autopar.UniformStageOption, "num_stages", [0, 2.0, "auto", True]),
    (autopar.UniformStageOption, "submesh_physical_shape", [4, (4,), (1, 0), (1, 2, 4), "14"]),
    (autopar.UniformStageOption, "submesh_logical_shape", [4, (), (2, 2.0), "22"]),
    (autopar.AutoStageOption, "submesh_physical_shape_space", ["some", None, 1]),
    (autopar.AutoStageOption, "stage_imbalance_tolerance", [-1.0, NAN, "inf", None]),
    (autopar.AutoStageOption, "profile", [1, "yes", None]),
    (autopar.AutoStageOption, "cached_profile_result", [1, "", "without_profile.json"]),
    (autopar.ManualLayerOption, "remat_layer", ["foo", 1, None]),
]


@pytest.mark.parametrize(("kind", "options"), ACCEPTED)
def test_options_that_make_sense_are_taken(kind, options):
    kind(**options)


@pytest.mark.parametrize(
    ("kind", "name", "values"),
    REFUSED,
    ids=[f"{kind.__name__} {name}" for kind, name, _ in REFUSED],
)
def test_options_are_refused_on_construction_in_one_line(kind, name, values):
    for value in values:
        with pytest.raises(ValueError, match=r"^.+$") as caught:
            kind(**{name: value})
        assert name in str(caught.value) or name in ("num_chunks",), value
        assert "\n" not in str(caught.value)


def test_layer_options_are_refused_as_such():
    for options in (
        {"layer_num": "2"},
        {"layer_num": 0},
        {"layer_num": 2, "eps": -1},
        {"layer_num": 2, "eps": NAN},
        {"layer_num": 2, "remat_layer": "foo"},
        {"layer_num": 2, "cost_criteria": "bytes"},
        {"layer_num": 2, "remat_parts": 0},
        {"layer_num": 2, "remat_parts": "blocks"},
    ):
        with pytest.raises(LayerError, match=r"is .*, expected"):
            autopar.AutoLayerOption(**options)
        with pytest.raises(LayerError, match=r"is .*, expected"):
            autopar.automatic_layer_construction(**options)
    with pytest.raises(LayerError, match="inputs is"):
        FollowLayerOption((-1,), 2)


@pytest.mark.parametrize(
    "change",
    [
        {"forward_stage_layer_ids": []},
        {"forward_stage_layer_ids": [[0], []]},
        {"forward_stage_layer_ids": [0, 1]},
        {"submesh_physical_shapes": [(1, 2)]},
        {"submesh_physical_shapes": [4, 4]},
        {"submesh_logical_shapes": [(2,), (4,)]},
        {"submesh_autosharding_option_dicts": [{"mode": "fast"}, {}]},
        {"submesh_autosharding_option_dicts": [{"modes": "solve"}, {}]},
        {"submesh_devices": [(0, 1), 2]},
    ],
    ids=str,
)
def test_manual_stages_that_cannot_fit_are_refused_on_construction(change):
    good = {
        "forward_stage_layer_ids": [[0], [1]],
        "submesh_physical_shapes": [(1, 2), (1, 2)],
        "submesh_logical_shapes": [(2,), (2,)],
    }
    autopar.ManualStageOption(**good)
    with pytest.raises(autopar.StageError):
        autopar.ManualStageOption(**good | change)


@pytest.mark.parametrize(
    "options",
    [
        {"static_argnums": "all"},
        {"static_argnums": 1.0},
        {"donate_argnums": [0, None]},
        {"donate_argnums": True},
        {"batch_argnums": "all"},
        {"batch_argnums": None},
        {"method": autopar.ShardParallel},
        {"method": 0},
    ],
    ids=str,
)
def test_parallelize_refuses_options_before_it_is_given_a_step(options):
    with pytest.raises(TypeError, match=f"{next(iter(options))} is .*, expected"):
        autopar.parallelize(**options)


@pytest.mark.parametrize("numbers", [5, (1, -3), [0, 2]])
def test_arguments_that_a_step_does_not_have_are_refused(numbers):
    for name in ("static_argnums", "donate_argnums", "batch_argnums"):
        step = autopar.parallelize(lambda a, b: a + b, **{name: numbers})
        with pytest.raises(
            ValueError, match=f"{name} is .*, but the step has 2 arguments; count from 0 to 1"
        ):
            step.get_executable(np.ones(8), np.ones(8))
    with pytest.raises(ValueError, match="batch_argnums is"):
        autopar.plan_step(mlp_step, mlp_args(), cluster="p3.16xlarge", batch_argnums=numbers)


def test_the_batch_may_be_counted_from_the_end():
    plan = autopar.plan_step(
        mlp_step, mlp_args(), cluster="p3.16xlarge", mesh_shape=(2,), batch_argnums=-1
    )
    assert {value.path for value in plan.stages[0].inputs if value.role == "batch"} == {
        "1/x",
        "1/y",
    }


@pytest.mark.parametrize(
    "change",
    [
        {"mesh_shape": 8},
        {"mesh_shape": (0,)},
        {"mesh_shape": "8"},
        {"method": "data"},
        {"method": 0},
        {"cluster": 8},
        {"cluster": None},
        {"batch_argnums": 1.5},
        {"args": None},
        {"fun": None},
    ],
    ids=str,
)
def test_plan_step_refuses_options_in_one_line(change):
    good = {"fun": mlp_step, "args": mlp_args(), "cluster": "p3.16xlarge"}
    with pytest.raises(
        autopar.OptionError, match=rf"^{next(iter(change))} is [^\n]*, expected [^\n]*$"
    ):
        autopar.plan_step(**good | change)


@pytest.mark.parametrize(
    "options",
    [
        {"cluster": 1},
        {"cluster": "ray", "num_nodes": 0},
        {"cluster": "ray", "num_devices_per_node": (4, 0)},
        {"cluster": "ray", "num_devices_per_node": 2.0},
        {"cluster": "ray", "timeout": 0},
        {"cluster": "ray", "timeout": "60"},
        {"cluster": "ray", "cluster_address": 6379},
        {"cluster": "ray", "namespace": 1},
    ],
    ids=str,
)
def test_init_refuses_options_before_it_joins_anything(options):
    with pytest.raises(autopar.OptionError, match=f"{list(options)[-1]} is .*, expected"):
        autopar.init(**options)
