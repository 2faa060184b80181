"""Keys of devices differ along the given mesh axes and nowhere else."""

from functools import partial

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from autopar.manual import fold_rng_over_axis

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("i", "j"), axis_types=(AxisType.Auto,) * 2)


def keys(axis) -> np.ndarray:
    """Return the key of every device, by its position in the mesh."""
    fold = partial(fold_rng_over_axis, axis=axis)
    folded = jax.shard_map(
        fold, mesh=MESH, in_specs=PartitionSpec(), out_specs=PartitionSpec(("i", "j"))
    )
    return np.asarray(jax.jit(folded)(jax.random.PRNGKey(0))).reshape(4, 2, 2)


def test_keys_differ_along_the_axis_and_nowhere_else() -> None:
    expected = [
        (1797259609, 2579123966),
        (928981903, 3453687069),
        (4146024105, 2718843009),
        (2467461003, 3840466878),
    ]
    np.testing.assert_array_equal(
        keys("i"), np.repeat(np.array(expected, np.uint32)[:, None], 2, axis=1)
    )


def test_every_device_has_its_own_key_if_the_key_is_folded_over_all_axes() -> None:
    folded = [jax.random.fold_in(jax.random.PRNGKey(0), device) for device in range(8)]
    np.testing.assert_array_equal(keys(("i", "j")).reshape(8, 2), folded)


def test_shards_have_the_same_dropout_mask_unless_the_key_is_folded() -> None:
    def masks(fold: bool) -> np.ndarray:
        def mask(key: jax.Array) -> jax.Array:
            key = fold_rng_over_axis(key, ("i", "j")) if fold else key
            return jax.lax.pcast(
                jax.random.bernoulli(key, 0.5, (1, 64)), () if fold else ("i", "j"), to="varying"
            )

        mapped = jax.shard_map(
            mask, mesh=MESH, in_specs=PartitionSpec(), out_specs=PartitionSpec(("i", "j"))
        )
        return np.asarray(jax.jit(mapped)(jax.random.key(0)))

    assert len(np.unique(masks(fold=False), axis=0)) == 1
    assert len(np.unique(masks(fold=True), axis=0)) == 8
