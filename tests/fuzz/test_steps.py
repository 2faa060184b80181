"""Random steps in random microbatches by random methods equal `jax.jit`, or are refused."""

import random
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.layering.layer_clustering import NoLayersError
from autopar.sharding.pins import ShardingError
from autopar.sharding.selection_problem import InfeasibleError
from autopar.tracing.trace import TraceError
from tests.fuzz.outcomes import Outcomes

pytestmark = pytest.mark.fuzz

EXAMPLES, TIME, WIDTH = 16, 3, 4
RNG = np.random.default_rng(0)
STATE = {
    "w": [RNG.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 2 for _ in range(2)],
    "seen": np.float32(3),
}
BATCH = {
    "x": RNG.normal(size=(EXAMPLES, TIME, WIDTH)).astype(np.float32),
    "mask": (RNG.random(EXAMPLES) > 0.3).astype(np.float32),
    "label": RNG.integers(0, WIDTH, EXAMPLES).astype(np.int32),
}

ONE_TO_ONE = (
    jnp.sin,
    jnp.tanh,
    jnp.square,
    jnp.abs,
    jax.nn.relu,
    lambda a: a * 0.5 + 1,
    lax.stop_gradient,
)
OF_TWO = (jnp.add, jnp.multiply, jnp.subtract, jnp.maximum)


@jax.custom_vjp
def limited(a):
    """Return `a`; its gradient is a nonlinear function of the gradient of the result."""
    return a


limited.defvjp(lambda a: (a, None), lambda _, gradient: (jnp.tanh(20 * gradient),))


def along(column, value):
    """Return a value per example with the dims of `value`."""
    return column.reshape((-1,) + (1,) * (value.ndim - 1))


def operations(draw):
    """Return operations by name, of a value `a`, another value `o` and the batch `b`."""
    size, scale = draw.choice((2, 3, 4, 6, 8, 12)), draw.choice((0.5, 2.0))
    one, two = draw.choice(ONE_TO_ONE), draw.choice(OF_TWO)
    return {
        "one to one": lambda a, o, b: one(a),
        "of two": lambda a, o, b: two(
            a, o if o.shape == a.shape else along(o, a) if o.shape == a.shape[:1] else a
        ),
        "sum": lambda a, o, b: a.sum(axis=draw.randrange(a.ndim)),
        "mean": lambda a, o, b: a.mean(axis=draw.randrange(a.ndim)),
        "largest": lambda a, o, b: a.max(axis=draw.randrange(a.ndim)),
        "flat": lambda a, o, b: a.reshape(-1),
        "groups": lambda a, o, b: a.reshape(-1, size),
        "fixed number of parts": lambda a, o, b: a.reshape(size, -1),
        "rows": lambda a, o, b: a.reshape(a.shape[0], -1),
        "transposed": lambda a, o, b: a.T,
        "softmax": lambda a, o, b: jax.nn.softmax(a, axis=draw.randrange(a.ndim)),
        "by its size": lambda a, o, b: a / a.shape[0],
        "twice": lambda a, o, b: jnp.concatenate([a, a * 0.5], axis=draw.randrange(a.ndim)),
        "repeated": lambda a, o, b: jnp.repeat(a, 2, axis=0),
        "tiled": lambda a, o, b: jnp.tile(a, (2,) + (1,) * (a.ndim - 1)),
        "products of examples": lambda a, o, b: (
            a.reshape(a.shape[0], -1) @ a.reshape(a.shape[0], -1).T
        ),
        "weighted by the mask's sum": lambda a, o, b: a * b["mask"].sum(),
        "divided by the mask's sum": lambda a, o, b: a / b["mask"].sum(),
        "divided by at least one": lambda a, o, b: a / jnp.maximum(b["mask"].sum(), 1),
        "masked": lambda a, o, b: jnp.where(along(b["mask"], a) > 0, a, 0),
        "centred by examples": lambda a, o, b: a - a.mean(0),
        "centred by features": lambda a, o, b: a - a.mean(-1, keepdims=True),
        "first half": lambda a, o, b: a[: a.shape[0] // 2],
        "every other": lambda a, o, b: a[::2],
        "shifted": lambda a, o, b: jnp.roll(a, 1, axis=draw.randrange(a.ndim)),
        "by position": lambda a, o, b: a * along(jnp.arange(a.shape[0], dtype=a.dtype), a),
        "by constants per row": lambda a, o, b: (
            a * along(np.full(a.shape[0], scale, np.float32) / a.shape[0], a)
        ),
        "chosen by label": lambda a, o, b: jnp.take(
            a, b["label"], axis=draw.randrange(a.ndim), mode="clip"
        ),
        "sorted": lambda a, o, b: jnp.sort(a, axis=draw.randrange(a.ndim)),
        "accumulated": lambda a, o, b: jnp.cumsum(a, axis=draw.randrange(a.ndim)),
        "complex": lambda a, o, b: jnp.imag(a.astype(jnp.complex64) * (1j / a.shape[0])),
        "Fourier": lambda a, o, b: jnp.fft.irfft(jnp.fft.rfft(a), a.shape[-1]),
        "dropped features": lambda a, o, b: (
            a * jax.random.bernoulli(jax.random.key(size), 0.7, a.shape[1:])
        ),
        "dropped elements": lambda a, o, b: (
            a * jax.random.bernoulli(jax.random.key(size), 0.7, a.shape)
        ),
        "noise with the examples last": lambda a, o, b: (
            a + jax.random.normal(jax.random.key(size), a.shape[::-1]).T
        ),
        "a key per row": lambda a, o, b: jax.vmap(
            lambda key, row: row * jax.random.uniform(key, row.shape)
        )(jax.random.split(jax.random.key(size), a.shape[0]), a),
        "a key folded with the position": lambda a, o, b: jax.vmap(
            lambda at, row: (
                row + jax.random.normal(jax.random.fold_in(jax.random.key(size), at), row.shape)
            )
        )(jnp.arange(a.shape[0]), a),
        "own element": lambda a, o, b: a.reshape(a.shape[0], -1)[
            jnp.arange(a.shape[0]), b["label"]
        ],
        "a limited gradient": lambda a, o, b: limited(a),
        "in half precision": lambda a, o, b: (a.astype(jnp.float16) * scale).astype(jnp.float32),
        "in a loop": lambda a, o, b: lax.fori_loop(0, 2, lambda _, v: jnp.tanh(v) * scale, a),
    }


def random_loss(seed):
    """Return the loss of weights and a batch for a seed.

    Operations that refuse values of their shape are left out.
    """

    def loss(w, b, left_out=(), failed=None):
        draw = random.Random(seed)
        values = [jnp.tanh(b["x"] @ w[0]) @ w[1], b["mask"], b["x"]]
        for k in range(draw.randrange(1, 5)):
            a, other = values[0] if k == 0 else draw.choice(values[-2:]), draw.choice(values)
            operation = draw.choice(list(operations(random.Random(draw.random())).values()))
            try:
                values.append(jnp.sin(a) if k in left_out else operation(a, other, b))
            except (TypeError, ValueError, IndexError):
                if failed is None:
                    raise
                failed.add(k)
                values.append(jnp.sin(a))
        last, reduce = values[-1], draw.randrange(4)
        if reduce == 0 or not last.ndim:
            return last.sum()
        if reduce == 1 and last.shape[0] == b["x"].shape[0]:
            weight = draw.choice([lambda m: m, lambda m: jnp.maximum(m, 1), lambda m: m + 1e-6])(
                b["mask"].sum()
            )
            return (last * along(b["mask"], last)).sum() / (weight * last[0].size)
        return last.mean() + (0 if reduce == 2 else 1e-2 * (w[0] ** 2).sum())

    failed: set[int] = set()
    jax.eval_shape(lambda w, b: loss(w, b, failed=failed), STATE["w"], BATCH)
    return lambda w, b: loss(w, b, failed)


def random_step(seed):
    draw = random.Random(seed + 1)
    loss, by_size, half = random_loss(seed), draw.random() < 0.5, draw.random() < 0.2
    value_and_grad = draw.choice((autopar.value_and_grad, jax.value_and_grad))

    def step(state, batch):
        def with_aux(w):
            if half:
                w = jax.tree.map(lambda a: a.astype(jnp.float16).astype(jnp.float32), w)
            value = loss(w, batch)
            return value, {"examples": batch["x"].shape[0], "weights": batch["mask"].sum()}

        (value, aux), gradients = value_and_grad(with_aux, has_aux=True)(state["w"])
        scale = 1 / batch["x"].shape[0] if by_size else 1.0
        updated = jax.tree.map(lambda w, g: w - 0.1 * scale * g, state["w"], gradients)
        seen = state["seen"] + aux["examples"]
        return (
            {"w": updated, "seen": seen},
            value,
            gradients,
            aux["weights"],
            jnp.arange(aux["examples"]),
        )

    return step


def random_method(seed):
    draw = random.Random(seed + 2)
    count = draw.choice((2, 4, 8))
    kind = draw.randrange(10)
    if kind < 5:
        return autopar.ShardParallel(1, count)
    if kind < 6:
        return autopar.DataParallel(2, count)
    if kind < 7:
        return autopar.Zero3Parallel(2, count)
    if kind < 8:
        return autopar.ShardParallel((2, 2), count)
    schedule = draw.choice(("gpipe", "1f1b", "zero_bubble_h1"))
    return autopar.PipeshardParallel(
        2, count, pipeline_schedule=schedule, layer_option=autopar.AutoLayerOption(2)
    )


def compared(got, wanted):
    """Return "right", or the first array that differs, relative to its largest element."""
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if a.shape != b.shape:
            return f"WRONG {jax.tree_util.keystr(path)}: shape {a.shape} for {b.shape}"
        scale = max(1.0, np.abs(b).max(initial=0.0, where=np.isfinite(b)))
        if not np.allclose(a, b, rtol=2e-3, atol=1e-3 * scale, equal_nan=True):
            return f"WRONG {jax.tree_util.keystr(path)}: {a.ravel()[:3]} for {b.ravel()[:3]}"
    return "right"


@pytest.mark.parametrize("part", range(4))
def test_random_steps_are_right_or_refused(part, record_property):
    outcomes = Outcomes()
    for seed in range(500 * part, 500 * (part + 1)):

        def attempt(seed=seed):
            step = random_step(seed)
            try:
                wanted = jax.jit(step)(STATE, BATCH)
            except (TypeError, ValueError):
                return "no step"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return compared(
                    autopar.parallelize(step, method=random_method(seed))(STATE, BATCH), wanted
                )

        outcomes.add(
            f"seed {seed}",
            attempt,
            (autopar.MicrobatchError, ShardingError, InfeasibleError, TraceError, NoLayersError),
            120,
        )
        jax.clear_caches()
    record_property(f"outcomes of random steps, part {part}", dict(outcomes.counts))
    assert not outcomes.faults, "\n".join(outcomes.faults[:20])
    assert outcomes.counts["right"] > 100
