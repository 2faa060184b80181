"""Damaged checkpoints are restored right, refused by name, or set aside for the one before."""

import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.checkpoint import DamagedCheckpointError, saved_steps
from tests.fuzz.outcomes import Outcomes

pytestmark = [
    pytest.mark.fuzz,
    # reads that TensorStore ends after Orbax has given up on another
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

COUNT = 300
STEPS = (1, 2)
DEVICES = np.array(jax.devices())


def state_of(step: int) -> dict[str, jax.Array]:
    """Return arrays of several dtypes and shardings, and random keys, which differ by step."""
    mesh = jax.sharding.Mesh(DEVICES, ("x",))

    def placed(array: jax.Array, spec: jax.P) -> jax.Array:
        return jax.device_put(array, jax.NamedSharding(mesh, spec))

    key = jax.random.key(step)
    return {
        "w": placed(jax.random.normal(key, (64, 64)), jax.P("x")),
        "half": placed(jax.random.normal(key, (16, 8)).astype(jnp.bfloat16), jax.P(None, "x")),
        "whole": placed(jnp.arange(1000.0) * step, jax.P()),
        "zeros": jnp.zeros(32).at[0].set(step),
        "count": jnp.int32(step),
        "key": key,
    }


def equal(one: dict[str, jax.Array], other: dict[str, jax.Array]) -> bool:
    def raw(array: jax.Array) -> np.ndarray:
        return np.asarray(
            jax.random.key_data(array)
            if jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
            else array
        )

    return all(
        one[name].dtype == other[name].dtype and np.array_equal(raw(one[name]), raw(other[name]))
        for name in one
    )


def flip(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    for _ in range(rng.choice([1, 1, 1, 4, 32])):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def truncate(file: Path, rng: random.Random) -> None:
    file.write_bytes(file.read_bytes()[: rng.randrange(max(1, file.stat().st_size))])


def swap_within(file: Path, rng: random.Random) -> None:
    """Exchange two files of the checkpoint."""
    other = rng.choice([path for path in last(file).rglob("*") if path.is_file()])
    one, two = file.read_bytes(), other.read_bytes()
    file.write_bytes(two)
    other.write_bytes(one)


def swap_steps(file: Path, rng: random.Random) -> None:
    """Replace a file by a file of the checkpoint before, of the same name if there is one."""
    before = [path for path in (last(file).parent / "1").rglob("*") if path.is_file()]
    same = [path for path in before if path.name == file.name]
    shutil.copy(rng.choice(same or before), file)


def stray(file: Path, rng: random.Random) -> None:
    """Put a stray entry beside a file or beside the checkpoints."""
    name = rng.choice(
        [
            "3",
            "99",
            "007",
            "2.saving",
            "x",
            ".DS_Store",
            "autopar.lock.old",
            "driver2",
            "manifest.json~",
        ]
    )
    path = rng.choice([file.parent, last(file).parent]) / name
    if not path.exists():
        rng.choice([Path.mkdir, Path.touch, lambda path: path.write_text("{}")])(path)


def garbage(file: Path, rng: random.Random) -> None:
    file.write_bytes(
        rng.choice(
            [b"{}", b"[]", b"null", b"\xff\xfe", b"[" * 10_000, rng.randbytes(500), b"1e999"]
        )
    )


def become_folder(file: Path, rng: random.Random) -> None:
    file.unlink()
    file.mkdir()


def lose_folder(file: Path, rng: random.Random) -> None:
    shutil.rmtree(file.parent)


def rename_steps(file: Path, rng: random.Random) -> None:
    """Give the checkpoints each other's names."""
    directory = last(file).parent
    (directory / "1").rename(directory / "x")
    (directory / "2").rename(directory / "1")
    (directory / "x").rename(directory / "2")


DAMAGES: dict[str, Callable[[Path, random.Random], object]] = {
    "flips": flip,
    "truncated": truncate,
    "empty": lambda file, rng: file.write_bytes(b""),
    "missing": lambda file, rng: file.unlink(),
    "swapped within a step": swap_within,
    "swapped between steps": swap_steps,
    "stray entries": stray,
    "garbage": garbage,
    "a folder for a file": become_folder,
    "a missing folder": lose_folder,
    "swapped names": rename_steps,
}
WEIGHTS = (16, 4, 2, 2, 4, 4, 4, 4, 1, 1, 1)


def last(file: Path) -> Path:
    """Return the folder of the last checkpoint, which contains `file`."""
    return next(path for path in file.parents if path.name == "2")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    for step in STEPS:
        autopar.save_checkpoint(directory, state_of(step), step)
    return directory


@pytest.mark.parametrize("is_asked_for", [False, True], ids=["the last", "a step"])
def test_a_damaged_checkpoint_is_never_restored_wrong(
    saved, tmp_path, record_property, is_asked_for
):
    states = {step: state_of(step) for step in STEPS}
    wanted = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), states[2]
    )
    outcomes = Outcomes()
    for seed in range(is_asked_for, COUNT, 2):
        rng, directory = random.Random(seed), tmp_path / str(seed)
        shutil.copytree(saved, directory)
        files = sorted(path for path in (directory / "2").rglob("*") if path.is_file())
        (name,) = rng.choices(list(DAMAGES), WEIGHTS)
        file = rng.choice([*files, directory / "2" / "manifest.json"])
        DAMAGES[name](file, rng)

        def attempt(directory: Path = directory) -> str:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                restored = autopar.restore_checkpoint(
                    directory, 2 if is_asked_for else None, wanted
                )
            if equal(restored, states[2]):
                return "right"
            is_announced = any(
                "set aside" in str(warning.message) and str(directory / "2") in str(warning.message)
                for warning in warned
            )
            if (
                not is_asked_for
                and equal(restored, states[1])
                and is_announced
                and 2 not in saved_steps(directory)
            ):
                return "aside"
            return "WRONG"

        errors = (DamagedCheckpointError,) if is_asked_for else (autopar.CheckpointError,)
        outcomes.add(f"seed {seed}: {name} of {file.relative_to(directory)}", attempt, errors)
        shutil.rmtree(directory)
    record_property(
        f"outcomes of checkpoints, {'a step' if is_asked_for else 'the last'}",
        dict(outcomes.counts),
    )
    assert not outcomes.faults, "\n".join(outcomes.faults[:20])
