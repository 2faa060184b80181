"""Random training steps.

A step puts together at random what people write in losses, metrics and updates: random operations,
several losses, loss scales, ways of taking gradients, and metrics of logits.
"""

import random

import jax
import jax.numpy as jnp
from jax import lax

import autopar
from tests.fuzz.random_operations import (
    ARGS,
    EXAMPLES,
    KEY,
    STATE,
    WIDTH,
    Inputs,
    along,
    flat,
    random_operation,
)


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
