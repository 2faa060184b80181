"""The settings of JAX that decide what a step computes."""

from collections.abc import Hashable

import jax

_NAMES = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_explicit_x64_dtypes",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_random_seed_offset",
    "jax_softmax_custom_jvp",
    "jax_threefry_partitionable",
)


def jax_settings() -> tuple[Hashable, ...]:
    """Return the settings, in this thread and inside of contexts such as `jax.enable_x64`.

    A step that was traced under other settings may compute something else.
    """
    return tuple(getattr(jax.config, name, None) for name in _NAMES)


def has_x64() -> bool:
    """Return whether arrays may have 64 bits, in this thread and inside of `jax.enable_x64`."""
    return jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]


def check_jit_is_on(name: str) -> None:
    """Raise RuntimeError if `jax.disable_jit` is on, which compiled programs do not know.

    Args:
        name: what is called.
    """
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        raise RuntimeError(
            f"{name} runs compiled, which jax.disable_jit can't change; to see its values, call the"
            " function before parallelize: the attribute fun of what parallelize returns"
        )
