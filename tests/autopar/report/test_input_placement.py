"""Placement specs have the structure of the step and the shardings of the executable."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding

import autopar
from autopar.report import PlacementSpec, placed
from tests.autopar.pipeline.stack_steps import stack_batch, stack_params, stack_step
from tests.steps import mlp_args, mlp_step

ARGS = mlp_args((64, 64), 32, 64)


def specs_of(tree):
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, PlacementSpec))


def paths_of(tree):
    return [path for path, _ in jax.tree.leaves_with_path(tree)]


def test_specs_have_the_structure_of_arguments_and_result():
    executable = autopar.parallelize(mlp_step, method=autopar.Zero3Parallel(4)).get_executable(
        *ARGS
    )
    state, batch = executable.get_input_placement_specs()
    assert paths_of((state, batch)) == paths_of(ARGS)
    new_state, loss = executable.get_output_placement_specs()
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    assert repr(batch["x"]) == "PlacementSpec(float32[32,64], P('x', None) on mesh 0)"
    assert repr(loss) == "PlacementSpec(float32[], P() on mesh 0)"
    assert state.params["params"]["Dense_0"]["bias"].sharding_specs[0].spec == jax.P("x")


def test_specs_are_of_the_whole_batch_when_it_runs_in_parts():
    method = autopar.DataParallel(4, num_micro_batches=2)
    executable = autopar.parallelize(mlp_step, method=method).get_executable(*ARGS)
    _, batch = executable.get_input_placement_specs()
    assert batch["x"].aval.shape == (32, 64)


@pytest.mark.parametrize(
    "method",
    [autopar.DataParallel((4,)), autopar.Zero3Parallel((2, 2)), autopar.ShardParallel((2,))],
)
def test_specs_are_what_the_executable_runs_with(method):
    executable = autopar.parallelize(mlp_step, method=method).get_executable(*ARGS)
    shardings = jax.tree.leaves((executable.in_shardings, executable.out_shardings))
    specs = specs_of(
        (executable.get_input_placement_specs(), executable.get_output_placement_specs())
    )
    assert len(specs) == len(shardings)
    for spec, sharding in zip(specs, shardings, strict=True):
        (own,) = spec.sharding_specs
        assert spec.mesh_ids == (0,)
        assert own.shard_shape(spec.aval.shape) == sharding.shard_shape(spec.aval.shape)
        assert dict(own.mesh.shape) == dict(executable.meshes[0].shape)
        assert spec.sharding().is_equivalent_to(sharding, len(spec.aval.shape))
    leaves = jax.tree.leaves(ARGS)
    assert [(s.aval.shape, s.aval.dtype) for s in specs[: len(leaves)]] == [
        (np.shape(leaf), jax.typeof(leaf).dtype) for leaf in leaves
    ]


def test_an_array_can_be_put_where_a_placement_says():
    executable = autopar.parallelize(
        stack_step,
        method=autopar.PipeshardParallel(
            num_micro_batches=2, stage_option=autopar.UniformStageOption(2)
        ),
    ).get_executable(stack_params(), stack_batch())
    specs, homes = (
        specs_of(executable.get_input_placement_specs()),
        jax.tree.leaves(executable.in_shardings),
    )
    assert [spec.sharding() for spec in specs] == homes
    assert {spec.devices for spec in specs} == {((0, 1, 2, 3),), ((4, 5, 6, 7),)}


def test_devices_that_are_not_here_are_named():
    rows = NamedSharding(AbstractMesh((8,), ("x",)), jax.P("x"))
    spec = placed(jax.ShapeDtypeStruct((32, 64), "float32"), rows, 0, range(6, 6 + 8))
    with pytest.raises(ValueError, match=r"no devices \[8, 9"):
        spec.sharding()
