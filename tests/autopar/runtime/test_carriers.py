"""Every carrier moves values from any mesh and spec to any other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding

import autopar
from autopar import ManualStageOption
from autopar.ir.spec import LogicalMesh, Spec, all_specs, partition_spec
from autopar.lowering.cross_mesh_resharding import reshard
from autopar.lowering.job import Delivery, StageMesh
from autopar.runtime.carriers import PieceCarrier, WholeCarrier, default_carrier
from autopar.runtime.local_executable import LocalExecutable
from simulator.program import Recv, Send
from tests.autopar.pipeline.stack_steps import pipeline, stack_batch, stack_params, stack_step

SHAPES = [(1,), (2,), (3,), (4,), (2, 2), (1, 2), (4, 1)]


def mesh_of(shape: tuple[int, ...], first: int) -> Mesh:
    devices = np.array(jax.devices()[first : first + int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, tuple("xy"[: len(shape)]), axis_types=(AxisType.Auto,) * len(shape))


def logical(mesh: Mesh) -> LogicalMesh:
    return LogicalMesh(mesh.devices.shape, mesh.axis_names)


def stage_mesh(mesh: Mesh) -> StageMesh:
    numbers = tuple(device.id for device in mesh.devices.flat)
    return StageMesh(numbers, mesh.devices.shape, mesh.axis_names)


def transferred(carrier, value, source: tuple[Mesh, Spec], to: tuple[Mesh, Spec]) -> jax.Array:
    plan = reshard(value.shape, (logical(source[0]), source[1]), (logical(to[0]), to[1]))
    delivery = Delivery(0, plan, value.dtype, stage_mesh(source[0]), stage_mesh(to[0]))
    carrier = carrier(delivery, {device.id: device for device in jax.devices()})
    sharding = NamedSharding(source[0], partition_spec(source[1]))
    carrier.send(jax.device_put(value, sharding), tag=0, is_used_up=False)
    return carrier.receive(tag=0)


@st.composite
def transfers(draw):
    meshes = mesh_of(draw(st.sampled_from(SHAPES)), 0), mesh_of(draw(st.sampled_from(SHAPES)), 4)
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 4, 6, 12]), min_size=0, max_size=3)))
    return shape, *(
        (mesh, draw(st.sampled_from(all_specs(shape, logical(mesh))))) for mesh in meshes
    )


@pytest.mark.parametrize("carrier", [WholeCarrier, PieceCarrier, default_carrier])
@settings(max_examples=40)
@given(transfers())
def test_values_transfer_exactly_between_all_meshes_and_specs(carrier, transfer) -> None:
    shape, source, (mesh, spec) = transfer
    value = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    received = transferred(carrier, value, source, (mesh, spec))
    assert received.sharding.is_equivalent_to(NamedSharding(mesh, partition_spec(spec)), len(shape))
    np.testing.assert_array_equal(received, value)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, bool, np.int8])
def test_values_of_any_dtype_transfer_in_pieces(dtype) -> None:
    value = np.random.default_rng(0).integers(0, 2, (6, 4)).astype(dtype)
    spec = ("x",), ()
    received = transferred(PieceCarrier, value, (mesh_of((2,), 0), spec), (mesh_of((3,), 4), spec))
    np.testing.assert_array_equal(received, value)


def test_random_keys_transfer_exactly() -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    source, to = (mesh_of((2,), 0), (("x",),)), (mesh_of((2,), 4), ((),))
    received = transferred(default_carrier, keys, source, to)
    np.testing.assert_array_equal(jax.random.key_data(received), jax.random.key_data(keys))


STAGES = ManualStageOption([[0], [1, 2], [3]], [(1, 1), (1, 2), (1, 4)], [(1,), (2,), (2, 2)])


def test_a_pipeline_that_sends_pieces_equals_one_device() -> None:
    args = stack_params(), stack_batch()
    parallel = autopar.parallelize(
        stack_step, method=pipeline(devices=7, stage_option=STAGES), donate_argnums=()
    )
    default = parallel.get_executable(*args)
    assert isinstance(default, LocalExecutable)
    tiled = LocalExecutable(default.planned, default.meshes, carrier=PieceCarrier)
    expected = jax.jit(stack_step)(*args)
    for executable in (default, tiled):
        autopar.testing.assert_allclose(
            executable(*executable.shard_args(*args)), expected, rtol=1e-5, atol=1e-6
        )


def test_bytes_of_sends_and_gathers_are_those_of_the_resharding() -> None:
    args = stack_params(), stack_batch()
    executable = autopar.parallelize(
        stack_step, method=pipeline(devices=7, stage_option=STAGES)
    ).get_executable(*args)
    assert isinstance(executable, LocalExecutable)
    planned = executable.planned
    rows = planned.program.instructions
    sends = [
        (mesh, instruction)
        for mesh, row in enumerate(rows)
        for instruction in row
        if isinstance(instruction, Send)
    ]
    receives = {
        (instruction.value, mesh): instruction
        for mesh, row in enumerate(rows)
        for instruction in row
        if isinstance(instruction, Recv)
    }
    assert len(sends) == len(receives) == len(planned.instructions.crossings)
    for source, send in sends:
        crossing = planned.instructions.crossings[send.value, send.to]
        plan = planned.transfer(crossing)
        assert planned.schedule.mesh_of(crossing.source) == source
        assert send.num_bytes == sum(plan.traffic(4).values())
        gather = receives[send.value, send.to].gather
        assert (gather is not None) == plan.gathers
        # Each example's activation or gradient is sent once: all devices divide microbatches of
        # 4 rows of 16 numbers.
        assert send.num_bytes == 4 * 16 * 4
        if gather is not None:
            assert gather.num_bytes == 4 * np.prod(
                NamedSharding(
                    executable.meshes[crossing.to], partition_spec(plan.spec)
                ).shard_shape(plan.shape)
            )


def test_replicas_on_the_destination_are_gathered_there() -> None:
    """Each of two devices receives half of the 64 numbers and gathers the other half."""
    source, destination = LogicalMesh((1,), ("x",)), LogicalMesh((2,), ("x",))
    plan = reshard((8, 8), (source, ((), ())), (destination, ((), ())))
    assert (plan.sent_bytes(4), plan.gathered_bytes(4), plan.gather_groups) == (
        64 * 4,
        64 * 4,
        ((0, 1),),
    )
