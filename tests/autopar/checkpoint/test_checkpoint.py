"""States are restored bit for bit under any plan; checkpoints are complete or do not exist."""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding

import autopar
from autopar.checkpoint import DamagedCheckpointError, saved_steps, saving
from autopar.checkpoint.manifest import SavedArray, SavedPiece
from autopar.checkpoint.parts import Wanted, copied, restore, write
from autopar.checkpoint.saving import _tiles
from autopar.ir.spec import all_specs, partition_spec
from tests.autopar.pipeline.stack_steps import stack_batch, stack_params, stack_step
from tests.generators import meshes


def pipeline(stages: int) -> autopar.PipeshardParallel:
    return autopar.PipeshardParallel(
        num_micro_batches=2, stage_option=autopar.UniformStageOption(stages)
    )


METHODS = {"shard": autopar.ShardParallel((1, 8)), "2 stages": pipeline(2), "4 stages": pipeline(4)}


@pytest.fixture(scope="module")
def functions():
    functions_by_name = {
        name: autopar.parallelize(stack_step, method=method) for name, method in METHODS.items()
    }
    for function in functions_by_name.values():
        function.get_executable(stack_params(), stack_batch())
    return functions_by_name


def placements(function: Any) -> Any:
    return function.get_last_executable().get_input_placement_specs()[0]


def assert_same(tree: Any, expected_tree: Any) -> None:
    assert jax.tree.structure(tree) == jax.tree.structure(expected_tree)
    for leaf, expected in zip(jax.tree.leaves(tree), jax.tree.leaves(expected_tree), strict=True):
        np.testing.assert_array_equal(np.array(leaf), np.array(expected))


@pytest.mark.parametrize("saved_under", METHODS)
def test_a_state_saved_under_one_plan_is_restored_under_every_plan(
    functions, saved_under, tmp_path
):
    params, _ = functions[saved_under](stack_params(), stack_batch())
    autopar.save_checkpoint(tmp_path, params, 1)
    for function in functions.values():
        restored = autopar.restore_checkpoint(tmp_path, placement_specs=placements(function))
        assert_same(restored, params)
        shardings = jax.tree.leaves(function.get_last_executable().in_shardings[0])
        leaves = jax.tree.leaves(restored)
        assert all(
            leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
            for leaf, sharding in zip(leaves, shardings, strict=True)
        )
        function.get_last_executable()(
            restored, function.preshard_dynamic_args(restored, stack_batch())[1]
        )


def test_a_state_may_be_donated_while_it_is_written(tmp_path):
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    state = {"x": jax.device_put(np.arange(1 << 16, dtype=np.float32))}
    saving = autopar.save_checkpoint(tmp_path, state, 0, wait=False)
    assert isinstance(saving, autopar.Saving)
    for _ in range(3):
        state["x"] = double(state["x"])
    assert saving.wait() == tmp_path / "0"
    assert saving.done()
    assert_same(
        autopar.restore_checkpoint(tmp_path), {"['x']": np.arange(1 << 16, dtype=np.float32)}
    )


def test_arrays_of_every_dtype_and_sharding_are_restored(tmp_path):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    keys = jax.device_put(jax.random.split(jax.random.key(1), 8), NamedSharding(mesh, jax.P("x")))
    state = {
        "bf16": jnp.arange(6, dtype=jnp.bfloat16),
        "bool": np.array([True, False]),
        "empty": np.zeros((0, 3), np.int8),
        "key": jax.random.key(7, impl="rbg"),
        "keys": keys,
        "number": 3,
        "scalar": np.float64(0.1),
        "sharded": jax.device_put(
            np.arange(16.0, dtype=np.float32), NamedSharding(mesh, jax.P("x"))
        ),
    }
    autopar.save_checkpoint(tmp_path, state, 0)
    single = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    placements = {
        name: jax.ShapeDtypeStruct(np.shape(value), jax.typeof(value).dtype, sharding=single)
        for name, value in state.items()
        if name != "scalar"
    }
    placements["keys"] = jax.ShapeDtypeStruct((8,), keys.dtype, sharding=keys.sharding)
    del state["scalar"]
    with pytest.raises(
        autopar.CheckpointError, match=r"\['scalar'\] is not in the state to restore"
    ):
        autopar.restore_checkpoint(tmp_path, 0, placements)
    autopar.save_checkpoint(tmp_path, state, 1, wait=False)
    restored = autopar.restore_checkpoint(tmp_path, 1, placements)
    for name in ("key", "keys"):
        assert_same(jax.random.key_data(restored.pop(name)), jax.random.key_data(state.pop(name)))
    assert {leaf.sharding for name, leaf in restored.items()} == {single}
    assert_same(restored, state)


@settings(max_examples=15)
@given(st.data())
def test_an_array_of_any_sharding_is_restored_with_any_other(tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 4, 8]), max_size=3)))
    value = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)

    def draw_sharding() -> NamedSharding:
        mesh = data.draw(meshes())
        devices = np.array(data.draw(st.permutations(jax.devices()))[: mesh.num_devices])
        spec = data.draw(st.sampled_from(all_specs(shape, mesh)))
        return NamedSharding(
            Mesh(devices.reshape(mesh.shape), mesh.axis_names), partition_spec(spec)
        )

    folder = tmp_path_factory.mktemp("parts")
    array = jax.device_put(value, draw_sharding())
    tiles = _tiles(array)
    tile_sizes = (np.prod([end - start for start, end in tile], dtype=int) for tile in tiles)
    assert sum(tile_sizes) == value.size  # no element is saved twice
    names = [str(n) for n in range(len(tiles))]
    write(folder / "part", dict(zip(names, copied(array, tiles), strict=True)))
    pieces = tuple(
        SavedPiece(tile=t, part="part", name=n) for t, n in zip(tiles, names, strict=True)
    )
    saved = SavedArray(path="x", shape=shape, dtype="int32", pieces=pieces)
    sharding = draw_sharding()
    (restored,) = restore(folder, [Wanted(saved, sharding)])
    assert restored.sharding == sharding
    np.testing.assert_array_equal(np.asarray(restored), value)


def test_a_device_reads_only_the_pieces_that_it_needs(tmp_path, monkeypatch):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    array = jax.device_put(np.arange(16), NamedSharding(mesh, jax.P("x")))
    autopar.save_checkpoint(tmp_path, {"x": array}, 0)
    from autopar.checkpoint import parts

    names_read: list[str] = []

    def read(folder: Path, names: list[str]) -> dict[str, np.ndarray]:
        names_read.extend(names)
        return read_pieces(folder, names)

    read_pieces = parts.read
    monkeypatch.setattr(parts, "read", read)
    manifest = autopar.checkpoint.manifest.Manifest.load(tmp_path, 0)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    parts.restore(tmp_path / "0", [Wanted(manifest.arrays[0], device)])
    assert len(names_read) == 8
    names_read.clear()
    half = SavedArray(path="x", shape=(16,), dtype="int64", pieces=manifest.arrays[0].pieces)
    array_of_one_piece = half.model_copy(update={"pieces": half.pieces[:1]})
    assert [piece.name for piece in parts._needed(Wanted(array_of_one_piece, device))] == ["0.0"]


def test_the_last_checkpoints_are_kept(tmp_path):
    for step in range(5):
        autopar.save_checkpoint(tmp_path, {"x": np.arange(step + 1)}, step, keep=2)
    assert autopar.restore_checkpoint(tmp_path)["['x']"].size == 5
    assert saved_steps(tmp_path) == [3, 4]
    assert autopar.latest_step(tmp_path) == 4
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["3", "4"]
    assert autopar.latest_step(tmp_path / "nowhere") is None
    with pytest.raises(autopar.CheckpointError, match="later steps 3, 4, so keep=2 would remove"):
        autopar.save_checkpoint(tmp_path, {"x": 1}, 1, keep=2)  # after a return to step 0
    assert saved_steps(tmp_path) == [3, 4]


def test_a_failed_save_leaves_earlier_checkpoints(tmp_path, monkeypatch):
    from autopar.checkpoint import saving

    autopar.save_checkpoint(tmp_path, {"x": np.arange(3)}, 0)

    def fail(folder: Path, arrays: Any, verify: bool) -> None:
        folder.mkdir()
        (folder / "half").write_text("of it")
        raise OSError("no space left on device")

    monkeypatch.setattr(saving, "write", fail)
    saving_step_1 = autopar.save_checkpoint(tmp_path, {"x": np.arange(4)}, 1, wait=False)
    with pytest.raises(OSError, match="no space left"):
        saving_step_1.wait()
    with pytest.raises(OSError, match="no space left"):
        # the next save raises the error again
        autopar.save_checkpoint(tmp_path, {"x": np.arange(4)}, 2)
    assert saved_steps(tmp_path) == [0]
    assert autopar.restore_checkpoint(tmp_path)["['x']"].tolist() == [0, 1, 2]


SAVER = """
import sys, numpy as np, autopar
step = (autopar.latest_step(sys.argv[1]) or 0) + 1
while True:
    state = {"x": np.full(200_000, step), "y": np.full(3, step)}
    autopar.save_checkpoint(sys.argv[1], state, step, keep=2, wait=False)
    print(step, flush=True)
    step += 1
"""


@pytest.mark.slow
def test_a_saver_killed_at_random_moments_leaves_a_complete_latest_checkpoint(tmp_path):
    delays, last = random.Random(0), 0
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    for _ in range(3):
        command = [sys.executable, "-W", "ignore", "-c", SAVER, str(tmp_path)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        ) as saver:
            assert saver.stdout is not None
            for _ in range(2):
                assert saver.stdout.readline()
            time.sleep(delays.random() * 0.3)
            saver.send_signal(signal.SIGKILL)
        step = autopar.latest_step(tmp_path)
        assert step is not None
        assert step > last
        state = autopar.restore_checkpoint(tmp_path)
        assert set(state["['x']"]) == set(state["['y']"]) == {step}
        last = step


SAVER_KILLED_BEFORE_EACH_CALL = """
import itertools, os, sys
import numpy as np, autopar
import orbax.checkpoint
from autopar.checkpoint import parts, saving

def die_before_call(kill_at):
    '''End this process before call number `kill_at` that touches the directory.'''
    count = itertools.count()
    def hook(event, args):
        if event.split(".")[0] in ("open", "os", "shutil"):
            if args and str(args[0]).startswith(sys.argv[1]) and next(count) == kill_at:
                os._exit(9)
    sys.addaudithook(hook)

def save(step):
    state = {"x": np.full(5, step), "y": np.full(3, step)}
    autopar.save_checkpoint(sys.argv[1], state, step, keep=2)

def check_and_save(kill_at):
    last = autopar.latest_step(sys.argv[1])
    state = autopar.restore_checkpoint(sys.argv[1])
    assert {*state["['x']"].tolist(), *state["['y']"].tolist()} == {last}, (last, state)
    die_before_call(kill_at)
    save(last + 1)

for kill_at in itertools.count(-1):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if kill_at < 0:
                for step in range(2):
                    save(step)
            else:
                check_and_save(kill_at)
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, 9):
        sys.exit(f"call {kill_at}: exit status {code}")
    print(kill_at, code, autopar.latest_step(sys.argv[1]), flush=True)
    if code == 0 and kill_at >= 0:
        break
"""


@pytest.mark.slow
def test_a_saver_killed_before_any_file_operation_leaves_a_complete_latest_checkpoint(tmp_path):
    program = SAVER_KILLED_BEFORE_EACH_CALL
    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path / "saved")]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert run.returncode == 0, run.stderr
    steps = [int(line.split()[2]) for line in run.stdout.splitlines()]
    # calls create the folder, write to it, rename it and remove old ones
    assert len(steps) > 10
    assert all(after - before in (0, 1) for before, after in itertools.pairwise(steps))
    # some savers are killed before the checkpoint is complete, some afterwards
    assert 2 < len(set(steps)) < len(steps)


def test_a_missing_checkpoint_is_an_error(tmp_path, functions):
    placed = placements(functions["shard"])
    with pytest.raises(autopar.CheckpointError, match="has no checkpoint"):
        autopar.restore_checkpoint(tmp_path, placement_specs=placed)
    autopar.save_checkpoint(tmp_path, stack_params(), 3)
    with pytest.raises(autopar.CheckpointError, match="no checkpoint of step 4; its steps are: 3"):
        autopar.restore_checkpoint(tmp_path, 4, placed)
    (tmp_path / "3" / "manifest.json").write_text("{}")
    with pytest.raises(
        autopar.CheckpointError, match="not the manifest of a checkpoint that this version"
    ):
        autopar.restore_checkpoint(tmp_path, 3, placed)


def test_a_checkpoint_of_another_model_is_refused_with_the_differences(tmp_path, functions):
    other = {**stack_params(), "more": np.zeros(2)}
    other["w0"] = np.zeros((3, 3), np.float16)
    del other["w1"]
    autopar.save_checkpoint(tmp_path, other, 0)
    message = (
        r"another state: \['w1'\] is missing; \['more'\] is not in the state"
        r".*\['w0'\] is float16\[3, 3\] there, float32\["
    )
    with pytest.raises(autopar.CheckpointError, match=message):
        autopar.restore_checkpoint(tmp_path, 0, placements(functions["shard"]))


def test_a_step_is_saved_once(tmp_path):
    autopar.save_checkpoint(tmp_path, {"x": 1}, 0)
    with pytest.raises(
        autopar.CheckpointError, match="has a checkpoint of step 0 already; remove it"
    ):
        autopar.save_checkpoint(tmp_path, {"x": 2}, 0)
    for step in (-1, 0.5, True):
        with pytest.raises(ValueError, match="expected a number from 0"):
            autopar.save_checkpoint(tmp_path, {"x": 2}, step)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="expected a number of checkpoints"):
        autopar.save_checkpoint(tmp_path, {"x": 2}, 1, keep=0)
    with pytest.raises(autopar.CheckpointError, match="no arrays"):
        autopar.save_checkpoint(tmp_path, {}, 1)
    (tmp_path / "not-a-folder").write_text("")
    with pytest.raises(autopar.CheckpointError, match="not-a-folder is not a directory"):
        autopar.save_checkpoint(tmp_path / "not-a-folder", {"x": 2}, 1)


def flip(file: Path, at: int = -1) -> None:
    """Flip a bit of one byte, by default in the middle of the file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if at < 0 else at] ^= 4
    file.write_bytes(data)


def data_file(folder: Path) -> Path:
    """Return the file that stores the values of the arrays."""
    return max(folder.glob("driver/**/d/*"), key=lambda file: file.stat().st_size)


NOISE = np.random.default_rng(0).bytes(1 << 14)  # incompressible, so that most flips hit values


def noise(step: int) -> dict[str, np.ndarray]:
    return {"x": np.frombuffer(NOISE, np.uint8) + np.uint8(step)}


def test_a_flipped_bit_is_an_error_unless_verify_is_off(tmp_path):
    autopar.save_checkpoint(tmp_path, noise(0), 0)
    flip(data_file(tmp_path / "0"))
    with pytest.raises(
        DamagedCheckpointError,
        match=r"driver is damaged: tile .* of \['x'\] is not what was saved: its",
    ):
        autopar.restore_checkpoint(tmp_path, 0)
    restored = autopar.restore_checkpoint(tmp_path, 0, verify=False)["['x']"]
    assert np.unpackbits(restored ^ noise(0)["x"]).sum() == 1


def test_a_checkpoint_that_is_read_back_differently_is_not_committed(tmp_path, monkeypatch):
    from autopar.checkpoint import parts

    read = parts.read
    monkeypatch.setattr(
        parts, "read", lambda *args: {name: value + 1 for name, value in read(*args).items()}
    )
    with pytest.raises(
        autopar.CheckpointError,
        match="driver was written, but 1 of its arrays are read back with other",
    ):
        autopar.save_checkpoint(tmp_path, noise(0), 0)
    assert not list(tmp_path.iterdir())
    autopar.save_checkpoint(tmp_path, noise(0), 0, verify=False)
    assert saved_steps(tmp_path) == [0]


DAMAGES = {
    "a flipped bit": lambda folder: flip(data_file(folder)),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "half a manifest": lambda folder: os.truncate(folder / "manifest.json", 40),
    "a manifest that is no text": lambda folder: (folder / "manifest.json").write_bytes(
        b"\xff\xfe"
    ),
    "a flipped bit in the manifest": lambda folder: flip(folder / "manifest.json"),
    "the manifest of another step": lambda folder: shutil.copy(
        folder.parent / "1" / "manifest.json", folder
    ),
    "the data of another step": lambda folder: shutil.copytree(
        folder.parent / "1" / "driver", folder / "driver", dirs_exist_ok=True
    ),
    "no data": lambda folder: shutil.rmtree(folder / "driver"),
    "half of the data": lambda folder: os.truncate(data_file(folder), 1000),
    "no metadata": lambda folder: (folder / "driver" / "_METADATA").write_text(""),
    "nothing": lambda folder: [shutil.rmtree(folder), folder.mkdir()],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_unreadable_checkpoint_is_set_aside_and_the_one_before_it_is_restored(tmp_path, damage):
    for step in (1, 2):
        autopar.save_checkpoint(tmp_path, noise(step), step)
    DAMAGES[damage](tmp_path / "2")
    with pytest.raises(DamagedCheckpointError, match=f"^{tmp_path}/2"):
        autopar.restore_checkpoint(tmp_path, 2)
    with pytest.warns(
        UserWarning, match=r"of step 2 is set aside as .*2\.damaged, and step 1 is restored"
    ):
        restored = autopar.restore_checkpoint(tmp_path)
    np.testing.assert_array_equal(restored["['x']"], noise(1)["x"])
    assert autopar.latest_step(tmp_path) == 1
    autopar.save_checkpoint(tmp_path, noise(2), 2)
    DAMAGES[damage](tmp_path / "2")
    with pytest.warns(UserWarning, match=r"2\.damaged\.2"):
        autopar.restore_checkpoint(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["1", "2.damaged", "2.damaged.2"]


def test_nothing_is_set_aside_unless_another_can_be_restored(tmp_path):
    for step in (1, 2):
        autopar.save_checkpoint(tmp_path, noise(step), step)
        (tmp_path / str(step) / "manifest.json").unlink()
    with pytest.raises(
        autopar.CheckpointError,
        match=f"no checkpoint that can be read: {tmp_path}/2/.*; {tmp_path}/1/",
    ):
        autopar.restore_checkpoint(tmp_path)
    assert saved_steps(tmp_path) == [1, 2]


def test_other_folders_do_not_count_as_checkpoints(tmp_path):
    autopar.save_checkpoint(tmp_path, noise(0), 7)
    (tmp_path / "12").write_text("a file")
    for name in ("007", "8.saving", "\u0663", "9.damaged"):
        (tmp_path / name).mkdir()
    assert saved_steps(tmp_path) == [7]
    assert list(autopar.restore_checkpoint(tmp_path)) == ["['x']"]


def remove_checksums(folder: Path) -> None:
    """Turn a checkpoint into one of format 1, which has no checksums."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["format"] = 1
    del manifest["checksum"]
    for piece in (piece for array in manifest["arrays"] for piece in array["pieces"]):
        del piece["checksum"]
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_checkpoint_without_checksums_is_restored_with_a_warning(tmp_path):
    autopar.save_checkpoint(tmp_path, noise(0), 0)
    remove_checksums(tmp_path / "0")
    with pytest.warns(
        UserWarning, match="0 was written before checkpoints had checksums: damage to its data"
    ):
        restored = autopar.restore_checkpoint(tmp_path)
    np.testing.assert_array_equal(restored["['x']"], noise(0)["x"])
    autopar.restore_checkpoint(tmp_path, verify=False)
    text = (tmp_path / "0" / "manifest.json").read_text()
    for old, new, message in [
        ("uint8", "uintB", "has no dtype 'uintB'"),
        ("uint8", "uint16", r"is uint8\[16384\], expected uint16\[16384\]"),
        ('"shape": [16384]', '"shape": [16385]', "has pieces of 16384 elements"),
        ('"shape": [16384]', '"shape": [128, 128]', "has no tile"),
        ("[0, 16384]", "[0, 26384]", r"has no tile \(\(0, 26384\),\)"),
        ('"step": 0', '"step": 4', "is the manifest of the checkpoint of another step, 4"),
    ]:
        assert old in text
        (tmp_path / "0" / "manifest.json").write_text(text.replace(old, new))
        with pytest.raises(DamagedCheckpointError, match=message):
            autopar.restore_checkpoint(tmp_path, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda path: autopar.save_checkpoint(path, {"a": "x"}, 1),
            r"\['a'\] of the state is 'x', expected an array",
        ),
        (
            lambda path: autopar.save_checkpoint(path, {"a": object}, 1),
            r"\['a'\] of the state is <class 'object'>, exp",
        ),
        (lambda path: autopar.save_checkpoint(path, None, 1), "the state has no arrays"),
        (
            lambda path: autopar.save_checkpoint(3, {"a": 1}, 1),
            "ckpt_dir is 3, expected the path of a directory",
        ),
        (
            lambda path: autopar.save_checkpoint(None, {"a": 1}, 1),
            "ckpt_dir is None, expected the path",
        ),
        (
            lambda path: autopar.save_checkpoint(path, {"a": 1}, "1"),
            "step is '1', expected a number from 0",
        ),
        (
            lambda path: autopar.save_checkpoint(path, {"a": 1}, 1, keep=2.0),
            r"keep is 2\.0, expected a number of check",
        ),
        (
            lambda path: autopar.save_checkpoint(path, {"a": 1}, 1, keep=True),
            "keep is True, expected a number of",
        ),
        (lambda path: autopar.restore_checkpoint(path, -1), "step is -1, expected a number from 0"),
        (
            lambda path: autopar.restore_checkpoint(path, 1.5),
            r"step is 1\.5, expected a number from 0",
        ),
        (
            lambda path: autopar.restore_checkpoint(path, "0"),
            "step is '0', expected a number from 0",
        ),
        (
            lambda path: autopar.restore_checkpoint(path, 77),
            "no checkpoint of step 77; its steps are: 0",
        ),
        (
            lambda path: autopar.restore_checkpoint(3),
            "ckpt_dir is 3, expected the path of a directory",
        ),
        (
            lambda path: autopar.restore_checkpoint(path, 0, {"a": 3}),
            r"placement_specs has 3 at \['a'\], expected a Pl",
        ),
        (
            lambda path: autopar.restore_checkpoint(path, 0, np.ones(3)),
            "at its only place, expected a PlacementSpec",
        ),
        (
            lambda path: autopar.restore_checkpoint(path, 0, {}),
            r"another state: \['a'\] is not in the state to restore",
        ),
        (lambda path: autopar.latest_step(3), "ckpt_dir is 3, expected the path of a directory"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(tmp_path, call, message):
    autopar.save_checkpoint(tmp_path, {"a": np.arange(3)}, 0)
    with pytest.raises((ValueError, TypeError), match=message) as error:
        call(tmp_path)
    assert "\n" not in str(error.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["0"]


def test_random_keys_of_another_implementation_are_refused(tmp_path):
    autopar.save_checkpoint(tmp_path, jax.random.key(0, impl="rbg"), 0)
    placement = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)
    with pytest.raises(
        autopar.CheckpointError, match=r"random keys \(rbg\)\[4\] there, key<fry>\[\] in the state"
    ):
        autopar.restore_checkpoint(tmp_path, 0, placement)


def test_a_full_disk_is_an_error_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(*_: Any, **__: Any) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: Error writing: No space left on device")

    autopar.save_checkpoint(tmp_path, {"x": np.ones(3)}, 1)
    monkeypatch.setattr(orbax.checkpoint.Checkpointer, "save", save)
    with pytest.raises(autopar.CheckpointError, match=r"can't be written: .*No space left"):
        autopar.save_checkpoint(tmp_path, {"x": np.ones(3)}, 2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["1"]


def test_threads_that_save_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint begins while another one is written, and would remove its folder."""
    begin, write = saving.begin, saving.write

    def late(directory: Path, step: int, keep: int | None) -> Path:
        time.sleep(0.1 * step)
        return begin(directory, step, keep)

    def slow(*args: Any) -> dict[str, int]:
        checksums = write(*args)
        time.sleep(0.3)
        return checksums

    monkeypatch.setattr(saving, "begin", late)
    monkeypatch.setattr(saving, "write", slow)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda k: autopar.save_checkpoint(tmp_path, {"x": k}, k), range(3)))
    assert saved_steps(tmp_path) == [0, 1, 2]


def test_integers_that_jax_would_wrap_are_refused(tmp_path: Path) -> None:
    autopar.save_checkpoint(tmp_path, {"tokens": np.int64(2**40), "steps": np.int64(2**30)}, 1)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    specs = {
        name: jax.ShapeDtypeStruct((), dtype, sharding=sharding)
        for name, dtype in (("tokens", np.int32), ("steps", np.int64))
    }
    with pytest.raises(autopar.CheckpointError, match=r"'tokens'.* beyond the range of int32"):
        autopar.restore_checkpoint(tmp_path, placement_specs=specs)
    autopar.save_checkpoint(tmp_path, {"tokens": 7, "steps": np.int64(2**30)}, 2)
    restored = autopar.restore_checkpoint(tmp_path, placement_specs=specs)
    assert (int(restored["tokens"]), int(restored["steps"])) == (7, 2**30)
