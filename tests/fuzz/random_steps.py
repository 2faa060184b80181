"""Random training steps.

A step puts together at random what people write in losses, metrics and updates: dropout, masks,
tied weights, several losses, loss scales, metrics of logits, and inputs of every kind.
"""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import autopar

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
    """`a`, with a gradient that is a nonlinear function of that of the result."""
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


class RandomLoss:
    """A loss of parameters and inputs, the same for a seed.

    Operations that are not for values of their shape are replaced by a sine.

    Attributes:
        names: the names of its operations.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._failed: set[int] = set()
        self.names: list[str] = []
        inputs = Inputs(STATE["params"], *ARGS[1:])
        jax.eval_shape(lambda *inputs: self._value(Inputs(*inputs), is_first=True), *inputs)

    def __call__(self, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
        return self._value(inputs)

    def _value(self, inputs: Inputs, is_first: bool = False) -> tuple[jax.Array, jax.Array]:
        """The loss, and a value with a row per example."""
        draw = random.Random(self.seed)
        params, batch = inputs.params, inputs.batch
        hidden = batch["x"]
        for weights in params["w"]:
            hidden = jnp.tanh(hidden @ weights)
        values = [hidden @ params["w"][0].T, batch["mask"], batch["x"]]
        for k in range(draw.randrange(1, 5)):
            a = values[0] if k == 0 or draw.random() < 0.1 else values[-1]
            other = draw.choice(values)
            name, operation = random_operation(draw)
            own = inputs._replace(key=jax.random.fold_in(inputs.key, k))
            try:
                values.append(jnp.sin(a) if k in self._failed else operation(a, other, own))
                if is_first:
                    self.names.append(name)
            except (TypeError, ValueError, IndexError):
                if not is_first:
                    raise
                self._failed.add(k)
                values.append(jnp.sin(a))
        rows = next(value for value in reversed(values) if value.shape[:1] == batch["x"].shape[:1])
        return self._reduced(draw, values[-1], inputs), lax.stop_gradient(rows)

    def _reduced(self, draw, last, inputs):
        reduce, mask = draw.randrange(6), inputs.batch["mask"]
        if reduce == 0 or not last.ndim:
            return last.sum()
        if reduce == 1 and last.shape[0] == mask.shape[0]:
            weight = draw.choice([lambda m: m, lambda m: jnp.maximum(m, 1), lambda m: m + 1e-6])(
                mask.sum()
            )
            return (last * along(mask, last)).sum() / (weight * last[0].size)
        if reduce == 2 and last.shape[0] == mask.shape[0]:
            return jnp.where(along(mask, last) > 0, last, 0).mean()
        if reduce == 5 and last.shape[0] == mask.shape[0]:
            return draw.choice(losses_of_all(draw, last))()
        return last.mean() + (0 if reduce == 3 else 1e-2 * (inputs.params["w"][0] ** 2).sum())


def losses_of_all(draw, last):
    """Losses that need the values of all examples, some of them more than a microbatch has."""
    values = draw.choice((flat(last).mean(-1), last.reshape(-1), jnp.moveaxis(last, 0, -1)))
    flattened, number = values.reshape(-1), draw.choice((2, EXAMPLES // 2, EXAMPLES - 2))

    def threshold():
        return jnp.sort(flattened)[-number]

    def weights():
        return lax.stop_gradient(jax.nn.softmax(flattened))

    return [
        lambda: jnp.sort(flattened)[-number:].mean(),
        lambda: lax.top_k(flattened, number)[0].mean(),
        lambda: jnp.mean(values, where=values >= threshold()),
        lambda: threshold() + jax.nn.relu(values - threshold()).mean(),
        lambda: jnp.sum(values, where=jnp.sign(values - values.max()) == 0),
        lambda: (values - values.min()).mean() + (values.max(0) ** 2).mean(),
        lambda: (((values - values.mean()) * lax.rsqrt(values.var() + 0.01)) ** 3).mean(),
        lambda: (weights() * flattened).sum(),
        lambda: jnp.maximum(values.mean(), 0.1) + jnp.quantile(flattened, 0.8),
    ]


def metrics_of(rows, batch):
    """Metrics computed from a value with a row per example, by name."""
    logits = flat(rows)
    hits = logits.argmax(-1) == batch["label"] % logits.shape[1]
    return {
        "accuracy": lambda: hits.mean(),
        "masked accuracy": lambda: (
            (hits * batch["mask"]).sum() / jnp.maximum(batch["mask"].sum(), 1)
        ),
        "hits": lambda: hits.sum(),
        "rows": lambda: logits,
        "predictions": lambda: logits.argmax(-1),
        "mean": lambda: logits.mean(),
        "deviation": lambda: logits.std(),
        "largest": lambda: logits.max(),
        "median": lambda: jnp.median(logits),
        "sorted": lambda: jnp.sort(logits[:, 0]),
        "confusion": lambda: jnp.zeros((WIDTH, WIDTH)).at[batch["label"], batch["label"]].add(hits),
        "count": lambda: jnp.bincount(batch["label"], length=WIDTH),
        "norm": lambda: jnp.linalg.norm(logits),
        "correlation": lambda: logits.T @ logits,
        "first": lambda: logits[0],
        "positions": lambda: jnp.arange(logits.shape[0]),
        "none": lambda: jnp.zeros(()),
    }


def update_of(state, gradients, examples):
    """Updates of the parameters, by name."""
    params = state["params"]

    def plain(gradients, rate=0.1):
        return jax.tree.map(lambda p, g: p - rate * g, params, gradients)

    def norm():
        return jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradients)))

    def momentum():
        added = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients["w"])
        return {**plain(gradients), "w": jax.tree.map(lambda p, m: p - m, params["w"], added)}

    def is_finite():
        return jnp.all(jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(gradients)]))

    return {
        "plain": lambda: plain(gradients),
        "by size": lambda: plain(gradients, 0.1 / examples),
        "clipped": lambda: plain(jax.tree.map(lambda g: g / jnp.maximum(norm(), 1.0), gradients)),
        "momentum": momentum,
        "normalized": lambda: plain(jax.tree.map(lambda g: g / (jnp.abs(g) + 1e-2), gradients)),
        "skipped": lambda: jax.tree.map(
            lambda p, new: jnp.where(is_finite(), new, p), params, plain(gradients)
        ),
        "conditional": lambda: lax.cond(is_finite(), plain, lambda g: params, gradients),
        "decayed": lambda: jax.tree.map(lambda p: 0.99 * p, plain(gradients)),
        "noisy": lambda: plain(
            jax.tree.map(lambda g: g + 0.1 * jax.random.normal(KEY, g.shape), gradients)
        ),
        "scheduled": lambda: plain(gradients, 0.1 / (1 + state["step"])),
    }


def _half(params):
    return jax.tree.map(lambda a: a.astype(jnp.float16).astype(jnp.float32), params)


_WAYS = (
    *("plain", "plain", "scaled", "half", "several", "separate", "per example"),
    *("nonlinear", "sharpness-aware", "alternating", "weighted"),
)
"""Ways of taking gradients; for the last ones, another loop completes what the gradients need."""


def _gradients(draw, losses, value_and_grad, params, inputs):
    """((value, rows), gradients) of a loss, in one of the ways that people take gradients."""
    way = draw.choice(_WAYS)

    def loss(params, inputs, number=0):
        return losses[number](inputs._replace(params=params))

    match way:
        case "half":
            return value_and_grad(lambda p: loss(_half(p), inputs), has_aux=True)(params)
        case "scaled":
            (value, rows), gradients = value_and_grad(
                lambda p: (lambda v, r: (v * 64.0, r))(*loss(p, inputs)), has_aux=True
            )(params)
            return (value / 64.0, rows), jax.tree.map(lambda g: g / 64.0, gradients)
        case "several":

            def both(params):
                value, rows = loss(params, inputs)
                return value + 0.3 * loss(params, inputs, 1)[0], rows

            return value_and_grad(both, has_aux=True)(params)
        case "separate":
            first, second = (
                value_and_grad(lambda p, k=k: loss(p, inputs, k), has_aux=True)(params)
                for k in (0, 1)
            )
            return first[0], jax.tree.map(jnp.add, first[1], second[1])
        case "nonlinear":
            function = draw.choice((jnp.exp, jnp.square, jnp.tanh))
            return value_and_grad(
                lambda p: (lambda v, r: (function(v / 8), r))(*loss(p, inputs)), has_aux=True
            )(params)
        case "sharpness-aware":
            (value, _), first = value_and_grad(lambda p: loss(p, inputs), has_aux=True)(params)
            norm = draw.choice((_norm, _dot_norm, lambda first: _norm(first["w"])))
            scale = 0.05 / (norm(first) + 1e-2)  # a gradient of rounding errors has no direction
            moved = jax.tree.map(lambda p, g: p + scale * g, params, first)
            (other, rows), second = value_and_grad(lambda p: loss(p, inputs), has_aux=True)(moved)
            return (other - value, rows), second
        case "alternating":
            # As in a GAN: the second loss sees some parameters as the first one has updated them.
            names = {"w", draw.choice(("bias", "table"))}
            first = value_and_grad(lambda p: loss(p, inputs), has_aux=True)(params)[1]
            updated = {k: v - 0.1 * first[k] for k, v in params.items() if k not in names}
            frozen = {k: params[k] for k in names}
            (value, rows), second = value_and_grad(
                lambda p: loss({**updated, **p}, inputs, 1), has_aux=True
            )(frozen)
            return (value, rows), {**{k: first[k] for k in updated}, **second}
        case "weighted":
            # As in AWAC: examples count by a softmax over the batch of an updated network's values.
            first = value_and_grad(lambda p: loss(p, inputs), has_aux=True)(params)[1]
            critic = jax.tree.map(lambda p, g: p - 0.1 * g, params, first)
            advantages = flat(loss(critic, inputs)[1]).mean(-1)
            statistic = draw.choice((jax.nn.softmax, lambda a: a / (jnp.abs(a).mean() + 1.0)))
            weights = lax.stop_gradient(statistic(advantages))

            def weighted(params):
                value, rows = loss(params, inputs, 1)
                hidden = jnp.tanh(inputs.batch["x"] @ params["w"][0])
                return value + (weights * flat(hidden).mean(-1)).sum(), rows

            return value_and_grad(weighted, has_aux=True)(params)
        case "per example":

            def one(params, x, frames):
                batch = {k: v[None] for k, v in x.items()}
                own = inputs._replace(batch=batch, frames=frames[:, None])
                value, rows = loss(params, own)
                return value, rows[0]

            (values, rows), gradients = jax.vmap(
                value_and_grad(one, has_aux=True), in_axes=(None, 0, 1)
            )(params, inputs.batch, inputs.frames)
            limits = 1 / jnp.maximum(1.0, jax.vmap(_norm)(gradients))
            clipped = jax.tree.map(lambda g: (g * along(limits, g)).mean(0), gradients)
            return (values.mean(), rows), clipped
        case _:
            return value_and_grad(lambda p: loss(p, inputs), has_aux=True)(params)


def _dot_norm(tree):
    return jnp.sqrt(sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(tree)))


def _norm(tree):
    return jnp.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(tree)))


class RandomStep:
    """A training step, the same for a seed, of arguments like `ARGS`.

    Attributes:
        names: the names of its operations.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._losses = RandomLoss(seed), RandomLoss(seed + 10**6)
        self.names = self._losses[0].names
        self.__name__ = "step"

    def __call__(self, state, batch, frames, key):
        draw = random.Random(self.seed + 1)
        value_and_grad = draw.choice((autopar.value_and_grad, jax.value_and_grad))
        inputs = Inputs(state["params"], batch, frames, key)
        (value, rows), gradients = _gradients(
            draw, self._losses, value_and_grad, state["params"], inputs
        )
        examples = batch["x"].shape[0]
        metrics = metrics_of(rows, batch)
        updated = draw.choice(list(update_of(state, gradients, examples).values()))()
        seen = state["seen"] + examples
        new = {**state, "params": updated, "seen": seen, "step": state["step"] + 1}
        chosen = draw.sample(list(metrics), 2)
        return new, value, gradients, {name: metrics[name]() for name in chosen}


CHUNKS = 4
"""The number of chunks of an `AccumulatingStep`."""


class AccumulatingStep:
    """A training step that adds the gradients of chunks in a loop of its own.

    It may take the first chunk before the loop, or be a loop of Python. It is the same for a seed,
    and takes arguments like `ARGS`.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._losses = RandomLoss(seed), RandomLoss(seed + 10**6)
        self.__name__ = "step"

    def __call__(self, state, batch, frames, key):
        draw = random.Random(self.seed + 1)
        value_and_grad = draw.choice((autopar.value_and_grad, jax.value_and_grad))
        keys = draw.choice(("sliced", "folded", "split"))
        way = draw.choice(("slices", "slices", "counter"))
        gradient_seed = draw.random()
        params, examples = state["params"], batch["x"].shape[0]
        size = examples // CHUNKS

        def chunk(i):
            def cut(rows):
                if way == "slices":
                    return rows.reshape(CHUNKS, size, *rows.shape[1:])[i]
                return lax.dynamic_slice_in_dim(rows, i * size, size)

            return jax.tree.map(cut, batch), jnp.moveaxis(cut(jnp.moveaxis(frames, 1, 0)), 0, 1)

        def add(carry, sliced):
            sums, key, number = carry
            (batch, frames), own = sliced if way == "slices" else (chunk(number), key)
            if keys == "folded":
                own = jax.random.fold_in(key, number)
            elif keys == "split" or way == "counter":
                key, own = jax.random.split(key)
            inputs = Inputs(params, batch, frames, own)
            (value, rows), gradients = _gradients(
                random.Random(gradient_seed), self._losses, value_and_grad, params, inputs
            )
            sums = jax.tree.map(jnp.add, sums, {"value": value, "gradients": gradients})
            return (sums, key, number + 1), (rows, value)

        slices = None
        if way == "slices":
            chunks = [chunk(i) for i in range(CHUNKS)]
            stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *chunks)
            slices = stacked, jax.random.split(key, CHUNKS)
        sums = {"value": 0.0, "gradients": jax.tree.map(jnp.zeros_like, params)}
        carry = sums, key, 0
        form = random.Random(self.seed + 3).choice(("loop", "first chunk before", "python"))
        if form == "python":
            results = []
            for i in range(CHUNKS):
                own = jax.tree.map(lambda part, i=i: part[i], slices)
                carry, result = add(carry, own)
                results.append(result)
            rows, values = jax.tree.map(lambda *parts: jnp.stack(parts), *results)
        elif form == "first chunk before":
            carry, _ = add(carry, jax.tree.map(lambda part: part[0], slices))
            others = jax.tree.map(lambda part: part[1:], slices)
            carry, _ = lax.scan(lambda *of: (add(*of)[0], None), carry, others, length=CHUNKS - 1)
        else:
            carry, (rows, values) = lax.scan(add, carry, slices, length=CHUNKS)
        sums = carry[0]
        gradients = jax.tree.map(lambda g: g / CHUNKS, sums["gradients"])
        if form == "first chunk before":
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
            return {**state, "params": params}, sums["value"]
        metrics = metrics_of(rows.reshape(examples, *rows.shape[2:]), batch)
        updated = draw.choice(list(update_of(state, gradients, examples).values()))()
        new = {**state, "params": updated, "step": state["step"] + 1}
        chosen = draw.sample(list(metrics), 2)
        return new, sums["value"], values, {name: metrics[name]() for name in chosen}
