"""Random operations of losses, and the arguments of the steps that have them.

They are what people write in losses: dropout, masks, tied weights, and inputs of every kind.
"""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

EXAMPLES, TIME, WIDTH = 16, 3, 4
_RNG = np.random.default_rng(0)


def _normal(*shape: int) -> np.ndarray:
    return (_RNG.normal(size=shape) / 2).astype(np.float32)


STATE = {
    "params": {
        "w": [_normal(WIDTH, WIDTH) for _ in range(3)],
        "table": _normal(EXAMPLES, WIDTH),
        "times": _normal(TIME, WIDTH),
        "token": _normal(1, 1, WIDTH),
        "bias": _normal(WIDTH),
    },
    "momentum": [_normal(WIDTH, WIDTH) for _ in range(3)],
    "seen": np.float32(3),
    "step": np.int32(2),
}
BATCH = {
    "x": _normal(EXAMPLES, TIME, WIDTH) * 2,
    "mask": (_RNG.random(EXAMPLES) > 0.3).astype(np.float32),
    "label": _RNG.integers(0, WIDTH, EXAMPLES).astype(np.int32),
    "length": _RNG.integers(1, TIME + 1, EXAMPLES).astype(np.int32),
    "keep": _RNG.random((EXAMPLES, TIME)) > 0.3,
    "tokens": _RNG.integers(0, WIDTH, (EXAMPLES, TIME)).astype(np.int32),
}
FRAMES = _normal(TIME, EXAMPLES, WIDTH)
"""An argument whose second dim is the batch."""

KEY = jax.random.key(7)
ARGS = (STATE, BATCH, FRAMES, KEY)
BATCH_ARGNUMS = {1: 0, 2: 1}


class Inputs(NamedTuple):
    """What an operation may read beside the values before it."""

    params: Any
    batch: Any
    frames: Any
    key: jax.Array


type Operation = Callable[[jax.Array, jax.Array, Inputs], jax.Array]
"""(value, another value, inputs) -> another value."""

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
    """`a`, whose gradient is a nonlinear function of the result's gradient."""
    return a


limited.defvjp(lambda a: (a, None), lambda _, gradient: (jnp.tanh(20 * gradient),))


def along(column, value):
    """A value per example, to be combined with `value`."""
    return column.reshape((-1,) + (1,) * (value.ndim - 1))


def flat(value):
    return value.reshape(value.shape[0], -1)


def last_features(value):
    """`value` with features of size WIDTH, by cutting or repeating them."""
    return resized(value, WIDTH) if value.ndim > 1 else value[:, None] * jnp.ones(WIDTH)


def resized(value, size):
    """`value` with `size` features."""
    copies = -(-size // value.shape[-1])
    return jnp.concatenate([value] * copies, -1)[..., :size]


def per_row(draw_row):
    """An operation that draws for each example with a key of its own."""
    return lambda a, o, i: jax.vmap(draw_row)(jax.random.split(i.key, a.shape[0]), a)


def shaping(draw) -> dict[str, Operation]:
    """Operations that change shapes or combine elements."""
    size = draw.choice((2, 3, 4, 6, 8, 12))
    two = draw.choice(OF_TWO)
    return {
        "of two": lambda a, o, i: two(
            a, o if o.shape == a.shape else along(o, a) if o.shape == a.shape[:1] else a
        ),
        "sum": lambda a, o, i: a.sum(axis=draw.randrange(a.ndim)),
        "mean": lambda a, o, i: a.mean(axis=draw.randrange(a.ndim)),
        "largest": lambda a, o, i: a.max(axis=draw.randrange(a.ndim)),
        "flat": lambda a, o, i: a.reshape(-1),
        "groups": lambda a, o, i: a.reshape(-1, size),
        "so many parts": lambda a, o, i: a.reshape(size, -1),
        "rows": lambda a, o, i: flat(a),
        "transposed": lambda a, o, i: a.T,
        "softmax": lambda a, o, i: jax.nn.softmax(a, axis=draw.randrange(a.ndim)),
        "by its size": lambda a, o, i: a / a.shape[0],
        "twice": lambda a, o, i: jnp.concatenate([a, a * 0.5], axis=draw.randrange(a.ndim)),
        "repeated": lambda a, o, i: jnp.repeat(a, 2, axis=0),
        "tiled": lambda a, o, i: jnp.tile(a, (2,) + (1,) * (a.ndim - 1)),
        "first half": lambda a, o, i: a[: a.shape[0] // 2],
        "every other": lambda a, o, i: a[::2],
        "shifted": lambda a, o, i: jnp.roll(a, 1, axis=draw.randrange(a.ndim)),
        "sorted": lambda a, o, i: jnp.sort(a, axis=draw.randrange(a.ndim)),
        "largest one": lambda a, o, i: lax.top_k(flat(a), 1)[0] * a.mean(-1, keepdims=True),
        "accumulated": lambda a, o, i: jnp.cumsum(a, axis=draw.randrange(a.ndim)),
        "centred by examples": lambda a, o, i: a - a.mean(0),
        "centred by features": lambda a, o, i: a - a.mean(-1, keepdims=True),
        "normalized by features": lambda a, o, i: (
            (a - a.mean(-1, keepdims=True)) * lax.rsqrt(a.var(-1, keepdims=True) + 1e-3)
        ),
        "normalized by examples": lambda a, o, i: (a - a.mean(0)) * lax.rsqrt(a.var(0) + 1e-3),
        "products of examples": lambda a, o, i: flat(a) @ flat(a).T,
        "contrasted": lambda a, o, i: jax.nn.log_softmax(flat(a) @ flat(a).T, axis=-1),
    }


def elementwise(draw) -> dict[str, Operation]:
    """Operations of single elements, layers, and control flow."""
    one, scale = draw.choice(ONE_TO_ONE), draw.choice((0.5, 2.0))
    number = draw.randrange(3)

    def recurrent(a, o, i):
        def cell(carry, x):
            carry = jnp.tanh(carry @ i.params["w"][number] + x)
            return carry, carry

        features = last_features(a)
        rows = features if features.ndim == 3 else features[:, None]
        return lax.scan(cell, jnp.zeros((a.shape[0], WIDTH)), rows.swapaxes(0, 1))[1].swapaxes(0, 1)

    return {
        "one to one": lambda a, o, i: one(a),
        "a layer": lambda a, o, i: jnp.tanh(last_features(a) @ i.params["w"][number]),
        "a tied layer": lambda a, o, i: last_features(a) @ i.params["w"][number].T,
        "a checkpointed layer": lambda a, o, i: jax.checkpoint(
            lambda w, v: jnp.tanh(last_features(v) @ w)
        )(i.params["w"][number], a),
        "a layer for each example": lambda a, o, i: jax.vmap(
            lambda v: jnp.sin(v) @ i.params["w"][number]
        )(last_features(a)),
        "layers in a scan": lambda a, o, i: lax.scan(
            lambda v, w: (jnp.tanh(v @ w), None), last_features(a), jnp.stack(i.params["w"])
        )[0],
        "recurrent": recurrent,
        "attention": lambda a, o, i: attention(last_features(a), i, causal=draw.random() < 0.5),
        "a limited gradient": lambda a, o, i: limited(a),
        "in half precision": lambda a, o, i: (a.astype(jnp.float16) * scale).astype(jnp.float32),
        "in bfloat16": lambda a, o, i: (a.astype(jnp.bfloat16) * scale).astype(jnp.float32),
        "in a loop": lambda a, o, i: lax.fori_loop(0, 2, lambda _, v: jnp.tanh(v) * scale, a),
        "until each is small": lambda a, o, i: (
            jax.vmap(
                lambda v: lax.stop_gradient(
                    lax.while_loop(lambda c: jnp.abs(c).max() > 0.3, lambda c: c * 0.5, v)
                )
            )(a)
            * a
        ),
        "until all are small": lambda a, o, i: (
            a
            * lax.stop_gradient(
                lax.while_loop(lambda c: jnp.abs(c).max() > 0.3, lambda c: c * 0.5, a)
            )
        ),
        "as often as there are examples": lambda a, o, i: lax.fori_loop(
            0, a.shape[0], lambda _, v: jnp.sin(v), a
        ),
        "while there are examples": lambda a, o, i: (
            a
            * lax.stop_gradient(
                lax.while_loop(
                    lambda c: c[0] < a.shape[0], lambda c: (c[0] + 1, jnp.sin(c[1])), (0, a)
                )[1]
            )
        ),
        "example by example": lambda a, o, i: lax.scan(
            lambda c, row: (c + row, row * 0.5), jnp.zeros(a.shape[1:]), a
        )[1],
        "an average so far": lambda a, o, i: lax.scan(
            lambda c, row: (c * 0.5 + row, c), jnp.zeros(a.shape[1:]), a
        )[1],
        "mapped one by one": lambda a, o, i: lax.map(jnp.tanh, a),
        "mapped in twos": lambda a, o, i: lax.map(jnp.tanh, a, batch_size=2),
        "by a parameter's sign": lambda a, o, i: lax.cond(
            i.params["bias"][0] > 0, jnp.sin, lambda v: v * 0.5, a
        ),
        "by the batch's sign": lambda a, o, i: lax.cond(
            i.batch["x"].sum() > 0, jnp.sin, lambda v: v * 0.5, a
        ),
        "complex": lambda a, o, i: jnp.imag(a.astype(jnp.complex64) * (1j / a.shape[0])),
        "Fourier": lambda a, o, i: jnp.fft.irfft(jnp.fft.rfft(a), a.shape[-1]),
        "bias": lambda a, o, i: last_features(a) + i.params["bias"],
    }


CAUSAL = np.tril(np.ones((TIME, TIME), bool))


def attention(a, i, causal):
    """Attention of the times of each example, with masks by length and by order."""
    a = a if a.ndim == 3 and a.shape[1] == TIME else a.reshape(a.shape[0], 1, -1)
    scores = jnp.einsum("btd,bsd->bts", a, a)
    if a.shape[1] == TIME and a.shape[0] == i.batch["x"].shape[0]:
        mask = jnp.arange(TIME)[None, :] < i.batch["length"][:, None]
        mask = mask[:, None, :] & CAUSAL if causal else mask[:, None, :]
        scores = jnp.where(mask, scores, -1e9)
        distance = jnp.abs(jnp.arange(TIME)[:, None] - jnp.arange(TIME)[None, :])
        scores = scores + i.params["table"][jnp.minimum(distance, 2), 0]
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), a)


def by_batch(draw) -> dict[str, Operation]:
    """Operations that read other inputs of the batch."""
    segments = draw.choice((jax.ops.segment_sum, jax.ops.segment_max))
    return {
        "frames": lambda a, o, i: a + along(i.frames.mean((0, 2)), a),
        "frames by time": lambda a, o, i: last_features(flat(a)) * i.frames.swapaxes(0, 1).mean(1),
        "weighted by the mask's sum": lambda a, o, i: a * i.batch["mask"].sum(),
        "divided by the mask's sum": lambda a, o, i: a / i.batch["mask"].sum(),
        "divided by at least one": lambda a, o, i: a / jnp.maximum(i.batch["mask"].sum(), 1),
        "masked": lambda a, o, i: jnp.where(along(i.batch["mask"], a) > 0, a, 0),
        "kept": lambda a, o, i: a * along(i.batch["keep"].any(1), a),
        "by length": lambda a, o, i: a / along(i.batch["length"], a),
        "chosen by label": lambda a, o, i: jnp.take(
            a, i.batch["label"], axis=draw.randrange(a.ndim), mode="clip"
        ),
        "own element": lambda a, o, i: flat(a)[jnp.arange(a.shape[0]), i.batch["label"]],
        "taken along features": lambda a, o, i: jnp.take_along_axis(
            flat(a), i.batch["label"][:, None] % flat(a).shape[1], 1
        ),
        "one hot": lambda a, o, i: last_features(flat(a)) * jax.nn.one_hot(i.batch["label"], WIDTH),
        "embedded labels": lambda a, o, i: (
            last_features(flat(a)) + i.params["table"][i.batch["label"]]
        ),
        "embedded tokens": lambda a, o, i: (
            last_features(flat(a))[:, None] + i.params["table"][i.batch["tokens"]]
        ),
        "cross entropy": lambda a, o, i: (
            -jnp.take_along_axis(
                jax.nn.log_softmax(last_features(flat(a))), i.batch["label"][:, None], -1
            )[:, 0]
        ),
        "sums by label": lambda a, o, i: jax.ops.segment_sum(flat(a), i.batch["label"], WIDTH),
        "means by label": lambda a, o, i: (
            jax.ops.segment_sum(flat(a), i.batch["label"], WIDTH)
            / jnp.maximum(jax.ops.segment_sum(jnp.ones(a.shape[0]), i.batch["label"], WIDTH), 1)[
                :, None
            ]
        ),
        "segments of each example": lambda a, o, i: jax.vmap(lambda v, s: segments(v, s, TIME)[s])(
            resized(flat(a), TIME), i.batch["tokens"] % TIME
        ),
        "in the order of lengths": lambda a, o, i: a[jnp.argsort(i.batch["length"])],
        "in the order of tokens": lambda a, o, i: jnp.take_along_axis(
            resized(flat(a), TIME), jnp.argsort(i.batch["tokens"], -1), 1
        ),
        "class token": lambda a, o, i: jnp.concatenate(
            [jnp.tile(i.params["token"], (a.shape[0], 1, 1)), last_features(flat(a))[:, None]], 1
        ),
        "broadcast token": lambda a, o, i: jnp.concatenate(
            [
                jnp.broadcast_to(i.params["token"], (a.shape[0], 1, WIDTH)),
                last_features(flat(a))[:, None],
            ],
            1,
        )[:, 0],
        "set at the label": lambda a, o, i: (
            flat(a).at[jnp.arange(a.shape[0]), i.batch["label"]].set(0.5)
        ),
        "weighted by class frequency": lambda a, o, i: (
            a * along(1 / jnp.bincount(i.batch["label"], length=WIDTH)[i.batch["label"]], a)
        ),
    }


def by_position(draw) -> dict[str, Operation]:
    """Operations that read the positions of examples, or constants with a row for each."""
    scale = draw.choice((0.5, 2.0))
    return {
        "position": lambda a, o, i: a * along(jnp.arange(a.shape[0], dtype=a.dtype), a),
        "position by size": lambda a, o, i: a * along(jnp.arange(a.shape[0]) / a.shape[0], a),
        "linspace": lambda a, o, i: a * along(jnp.linspace(0, 1, a.shape[0]), a),
        "last position": lambda a, o, i: (
            a * along(jnp.arange(a.shape[0]) == a.shape[0] - 1, a).astype(a.dtype)
        ),
        "reversed positions": lambda a, o, i: a + along(jnp.arange(a.shape[0])[::-1], a) / 10,
        "first half by position": lambda a, o, i: jnp.where(
            along(jnp.arange(a.shape[0]), a) < a.shape[0] // 2, a, 0.5
        ),
        "even positions": lambda a, o, i: jnp.where(along(jnp.arange(a.shape[0]) % 2, a), a, 0.5),
        "table by position": lambda a, o, i: (
            last_features(flat(a)) + i.params["table"][jnp.arange(a.shape[0]) % EXAMPLES]
        ),
        "times": lambda a, o, i: (
            last_features(flat(a))[:, None] + i.params["times"][jnp.arange(TIME)][None]
        ),
        "identity": lambda a, o, i: a * along(jnp.diagonal(jnp.eye(a.shape[0])), a),
        "off the diagonal": lambda a, o, i: (1 - jnp.eye(a.shape[0])) @ flat(a),
        "constants per row": lambda a, o, i: (
            a * along(np.full(a.shape[0], scale, np.float32) / a.shape[0], a)
        ),
        "other constants per row": lambda a, o, i: (
            a * along(np.arange(a.shape[0], dtype=np.float32), a)
        ),
        "a row of a table by the size": lambda a, o, i: (
            last_features(flat(a)) * i.params["table"][a.shape[0] - 1]
        ),
        "a slice of a table by the size": lambda a, o, i: (
            last_features(flat(a))
            * lax.dynamic_slice(i.params["table"], (a.shape[0] - 1, 0), (1, WIDTH))
        ),
        "a power of the size": lambda a, o, i: a + i.params["bias"].mean() ** a.shape[0],
        "joined": lambda a, o, i: jnp.concatenate([a, jnp.sin(a)])[a.shape[0] :] * scale,
        "joined and compared": lambda a, o, i: jnp.subtract(
            *jnp.split(jnp.tanh(jnp.concatenate([flat(a), 2 * flat(a)])), 2)
        ),
        "joined with weights": lambda a, o, i: (
            jnp.concatenate([flat(a), flat(a) ** 2])
            * jnp.concatenate([jnp.ones(a.shape[0]), i.batch["mask"]])[:, None]
        )[: a.shape[0]],
        "joined and dropped": lambda a, o, i: jnp.where(
            jax.random.bernoulli(i.key, 0.5, (2 * a.shape[0], 1)),
            jnp.concatenate([flat(a), flat(a)]),
            0,
        )[a.shape[0] :],
        "joined and shifted": lambda a, o, i: jnp.concatenate([flat(a), -flat(a)])[1:-1][
            : a.shape[0]
        ],
        "mean of joined": lambda a, o, i: flat(a) * jnp.concatenate([flat(a), flat(a) ** 2]).mean(),
        "padded and cut": lambda a, o, i: (
            jnp.pad(flat(a), ((0, a.shape[0]), (0, 0)), constant_values=1.0)[: a.shape[0]] * scale
        ),
        "rolled by the size": lambda a, o, i: jnp.roll(flat(a), a.shape[0] // 4, axis=1),
        "a key of the size": lambda a, o, i: (
            a * jax.random.uniform(jax.random.fold_in(i.key, a.shape[0]))
        ),
        "a branch by the size": lambda a, o, i: lax.cond(
            jnp.int32(a.shape[0]) > 8, jnp.sin, jnp.tanh, a
        ),
        "clipped by the size": lambda a, o, i: jnp.clip(a * 9, -a.shape[0], a.shape[0]),
        "in bins of the size": lambda a, o, i: jnp.digitize(a, jnp.arange(4) / a.shape[0]) * a,
        "meshgrid": lambda a, o, i: (
            a
            * along(jnp.meshgrid(jnp.arange(a.shape[0]), jnp.arange(2), indexing="ij")[0][:, 1], a)
        ),
    }


def by_chance(draw) -> dict[str, Operation]:
    """Operations with random bits."""
    bernoulli, normal, uniform = jax.random.bernoulli, jax.random.normal, jax.random.uniform
    return {
        "dropped features": lambda a, o, i: a * bernoulli(i.key, 0.7, a.shape[1:]),
        "dropped elements": lambda a, o, i: jnp.where(bernoulli(i.key, 0.7, a.shape), a / 0.7, 0),
        "dropped rows": lambda a, o, i: (
            a * bernoulli(i.key, 0.7, (a.shape[0],) + (1,) * (a.ndim - 1))
        ),
        "mixed up": lambda a, o, i: (
            lambda by: by * a + (1 - by) * a[jax.random.permutation(i.key, a.shape[0])]
        )(uniform(i.key)),
        "noise with the examples last": lambda a, o, i: a + normal(i.key, a.shape[::-1]).T,
        "a key per row": per_row(lambda key, row: row * uniform(key, row.shape)),
        "a folded key per row": lambda a, o, i: jax.vmap(
            lambda at, row: row + normal(jax.random.fold_in(i.key, at), row.shape)
        )(jnp.arange(a.shape[0]), a),
        "keys of keys per row": per_row(
            lambda key, row: row * uniform(jax.random.split(key)[1], row.shape)
        ),
        "gamma": lambda a, o, i: (
            a * lax.stop_gradient(jax.random.gamma(i.key, 2.0, (a.shape[0], *(1,) * (a.ndim - 1))))
        ),
        "gamma per row": per_row(lambda key, row: row * jax.random.gamma(key, 2.0)),
        "poisson": lambda a, o, i: a * jax.random.poisson(i.key, 3.0, a.shape),
        "poisson per row": per_row(lambda key, row: row * jax.random.poisson(key, 3.0, row.shape)),
        "categorical": lambda a, o, i: (
            a * along(jax.random.categorical(i.key, lax.stop_gradient(flat(a))), a)
        ),
        "choice": lambda a, o, i: a * along(jax.random.choice(i.key, 5, (a.shape[0],)), a),
        "choice without replacement per row": per_row(
            lambda key, row: row * jax.random.choice(key, 4, (), replace=False)
        ),
        "permuted per row": per_row(lambda key, row: jax.random.permutation(key, row)),
        "permuted": lambda a, o, i: jax.random.permutation(i.key, a),
        "permuted features": lambda a, o, i: jax.random.permutation(i.key, a, axis=a.ndim - 1),
        "integers by size": lambda a, o, i: (
            a * along(jax.random.randint(i.key, (a.shape[0],), 0, a.shape[0]), a)
        ),
        "negatives": lambda a, o, i: a * jnp.roll(a, 1, 0),
        "random negatives": lambda a, o, i: (
            a * a[jax.random.randint(i.key, (a.shape[0],), 0, a.shape[0])]
        ),
        "beta": lambda a, o, i: a * along(jax.random.beta(i.key, 2.0, 3.0, (a.shape[0],)), a),
        "truncated": lambda a, o, i: a * jax.random.truncated_normal(i.key, -2, 2, a.shape),
        "dropout in a scan": lambda a, o, i: lax.scan(
            lambda v, key: (v * bernoulli(key, 0.8, v.shape), None), a, jax.random.split(i.key, 2)
        )[0],
    }


FAMILIES = (shaping, elementwise, by_batch, by_position, by_chance)


def random_operation(draw) -> tuple[str, Operation]:
    """A name and an operation."""
    family = draw.choice(FAMILIES)(random.Random(draw.random()))
    return draw.choice(list(family.items()))
