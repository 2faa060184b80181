"""Training steps with common models and optimizers of flax and optax."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tests.models import (
    ConvNext,
    MixtureOfExperts,
    RotaryAttention,
    VisionTransformer,
    WideResNet,
)

type Step = tuple[Callable[..., Any], Callable[[], Any], Any]
"""The step, a function that returns the initial state, and a batch."""

_random = np.random.default_rng(0)
_images = {"x": _random.normal(size=(16, 8, 8, 8)).astype(np.float32), "y": np.arange(16) % 8}
_tokens = {"x": (np.arange(16 * 8).reshape(16, 8) * 7) % 32, "y": np.arange(16) % 8}


def _linen(
    model: nn.Module, batch: Any, optimizer: optax.GradientTransformation, **rngs: int
) -> Step:
    """Return a step of a classifier that carries all variable collections and draws dropout."""

    def init() -> Any:
        keys = {name: jax.random.key(seed) for name, seed in {"params": 0, **rngs}.items()}
        variables = model.init(keys, batch["x"])
        params = variables.pop("params")
        return {
            "params": params,
            "rest": variables,
            "opt": optimizer.init(params),
            "step": jnp.int32(0),
        }

    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            dropout_keys = {
                name: jax.random.fold_in(jax.random.key(seed), state["step"])
                for name, seed in rngs.items()
            }
            logits, rest = model.apply(
                {"params": params, **state["rest"]},
                batch["x"],
                rngs=dropout_keys,
                mutable=list(state["rest"]),
            )
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), rest

        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "rest": rest, "opt": opt, "step": state["step"] + 1}, value

    return step, init, batch


def nnx_mlp() -> Step:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up, self.norm = nnx.Linear(8, 32, rngs=rngs), nnx.LayerNorm(32, rngs=rngs)
            self.down = nnx.Linear(32, 8, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.down(nnx.gelu(self.norm(self.up(x))))

    graph, _ = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))
    optimizer = optax.sgd(0.1, momentum=0.9, nesterov=True)

    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            return ((nnx.merge(graph, params)(batch["x"]) - batch["y"]) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    batch = {name: _random.normal(size=(16, 8)).astype(np.float32) for name in ("x", "y")}

    def init() -> Any:
        params = nnx.split(Model(nnx.Rngs(0)))[1]
        return {"params": params, "opt": optimizer.init(params)}

    return step, init, batch


def mixed_precision() -> Step:
    """Return a step in bfloat16 with a dynamic loss scale, which skips gradients that overflow."""
    model = nn.Dense(8, dtype=jnp.bfloat16)
    batch = {"x": _random.normal(size=(16, 8)).astype(np.float32), "y": np.arange(16) % 8}
    optimizer = optax.apply_if_finite(optax.lamb(1e-2), 3)

    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = model.apply(params, batch["x"]).astype(jnp.float32)
            return (
                state["scale"]
                * optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
            )

        grads = jax.tree.map(lambda g: g / state["scale"], jax.grad(loss)(state["params"]))
        finite = jnp.all(jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        scale = jnp.where(finite, state["scale"] * 2, state["scale"] / 2)
        return {
            "params": optax.apply_updates(state["params"], updates),
            "opt": opt,
            "scale": scale,
        }, finite

    def init() -> Any:
        params = model.init(jax.random.key(0), batch["x"])
        return {"params": params, "opt": optimizer.init(params), "scale": jnp.float32(8)}

    return step, init, batch


_adamw = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)),
)

STEPS: dict[str, Callable[[], Step]] = {
    "Wide-ResNet": lambda: _linen(
        WideResNet(), _images, optax.sgd(optax.exponential_decay(0.1, 10, 0.9), 0.9)
    ),
    "ConvNext": lambda: _linen(ConvNext(), _images, optax.adam(1e-2)),
    "ViT": lambda: _linen(VisionTransformer(), _images, _adamw, dropout=1),
    "MoE": lambda: _linen(MixtureOfExperts(), _tokens, optax.adafactor(1e-2)),
    "attention": lambda: _linen(RotaryAttention(), _tokens, _adamw),
    "nnx MLP": nnx_mlp,
    "mixed precision": mixed_precision,
    "lion": lambda: _linen(RotaryAttention(), _tokens, optax.lion(1e-3)),
    "muon": lambda: _linen(RotaryAttention(), _tokens, optax.contrib.muon(1e-3)),
    "rmsprop": lambda: _linen(
        RotaryAttention(), _tokens, optax.rmsprop(1e-3, centered=True, momentum=0.9)
    ),
    "noisy sgd": lambda: _linen(
        RotaryAttention(), _tokens, optax.noisy_sgd(1e-3, key=jax.random.key(0))
    ),
}
