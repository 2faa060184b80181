"""Training steps of models whose layers run in a `scan` over stacked weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import autopar

WIDTH = 16
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3))
"""An update that reduces over all layers and keeps moments of each."""


def llama_params(layers: int) -> dict[str, Any]:
    """Return the weights of `llama`, with those of all layers in one array each."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.3, shape).astype(np.float32)

    return {
        "embedding": normal(24, WIDTH),
        "layers": {
            "norm": 1 + normal(layers, WIDTH),
            "qkv": normal(layers, WIDTH, 3, 2, WIDTH // 2),
            "out": normal(layers, 2, WIDTH // 2, WIDTH),
            "gate": normal(layers, WIDTH, 2 * WIDTH),
            "up": normal(layers, WIDTH, 2 * WIDTH),
            "down": normal(layers, 2 * WIDTH, WIDTH),
        },
        "head": normal(WIDTH, 24),
    }


def llama_layer(x: jax.Array, w: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """Return a layer's result, and the mean square of its attention as an auxiliary value."""
    normed = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * w["norm"]
    q, k, v = jnp.einsum("btd,dnhe->nbhte", normed, w["qkv"])
    scores = jnp.einsum("bhte,bhse->bhts", q, k) / 3
    scores = jnp.where(jnp.tri(x.shape[1]) > 0, scores, -1e9)
    attention = jnp.einsum("bhts,bhse,hed->btd", jax.nn.softmax(scores), v, w["out"])
    x = x + attention
    return x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"], jnp.mean(attention**2)


def llama(params: dict[str, Any], tokens: jax.Array, remat: bool = False, **scan: Any) -> Any:
    """Return logits, and the auxiliary value of each layer; `scan` are options of the scan."""
    layer = jax.checkpoint(llama_layer) if remat else llama_layer
    x, aux = jax.lax.scan(layer, params["embedding"][tokens], params["layers"], **scan)
    return x @ params["head"], aux


def llama_step(
    layers: int,
    value_and_grad: Any = autopar.value_and_grad,
    around: Any = lambda model: model,
    **options: Any,
) -> tuple[Any, Any, Any]:
    """Return a step of `llama`, its state and a batch.

    Args:
        layers: The number of layers.
        value_and_grad: What differentiates the loss.
        around: What is put around the whole model, such as `jax.checkpoint`.
        **options: Options of `llama`.
    """

    def step(state: Any, batch: Any) -> Any:
        params, moments = state

        def loss(params: Any) -> jax.Array:
            model = around(lambda params: llama(params, batch["tokens"], **options))
            logits, aux = model(params)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
            return jnp.mean(losses) + 0.1 * jnp.sum(aux)

        value, gradients = value_and_grad(loss)(params)
        updates, moments = TX.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    rng = np.random.default_rng(1)
    batch = {name: rng.integers(0, 24, (16, 6)).astype(np.int32) for name in ("tokens", "labels")}
    params = llama_params(layers)
    return step, (params, TX.init(params)), batch


class Layer(nn.Module):
    """A layer of `Scanned`."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        h = nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH)(nn.gelu(h)), None


class Scanned(nn.Module):
    """A Flax model whose layers run in `nn.scan`."""

    layers: int
    remat: bool = False
    axis: int = 0
    unroll: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layer = nn.remat(Layer, prevent_cse=False) if self.remat else Layer
        scanned = nn.scan(
            layer,
            variable_axes={"params": self.axis},
            split_rngs={"params": True},
            length=self.layers,
            unroll=self.unroll,
        )
        x, _ = scanned(name="layers")(nn.Dense(WIDTH, name="first")(x), None)
        return nn.Dense(WIDTH, name="last")(x)


def scanned_step(
    model: nn.Module, tx: Any = TX, value_and_grad: Any = autopar.value_and_grad
) -> tuple[Any, Any, Any]:
    """Return a step of a Flax model, its state and a batch."""

    def step(state: Any, batch: Any) -> Any:
        params, moments = state

        def loss(params: Any) -> jax.Array:
            predicted = model.apply(params, batch["x"])
            assert isinstance(predicted, jax.Array)
            return jnp.mean((predicted - batch["y"]) ** 2)

        value, gradients = value_and_grad(loss)(params)
        updates, moments = tx.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    rng = np.random.default_rng(1)
    batch = {name: rng.normal(size=(16, WIDTH)).astype(np.float32) for name in ("x", "y")}
    params = model.init(jax.random.key(0), batch["x"])
    return step, (params, tx.init(params)), batch


def weights(*shape: int) -> np.ndarray:
    """Return weights of a shape."""
    return np.random.default_rng(0).normal(0, 0.3, shape).astype(np.float32)


X = np.random.default_rng(1).normal(size=(16, WIDTH)).astype(np.float32)


def momentum_step(state: Any, batch: Any) -> Any:
    """Take a step of gradient descent with momentum on a model of stacked layers."""
    params, moments = state

    def loss(params: Any) -> jax.Array:
        y, _ = jax.lax.scan(lambda y, w: (y + jnp.tanh(y @ w), None), batch, params["stack"])
        return jnp.mean(y**2)

    value, gradients = autopar.value_and_grad(loss)(params)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
    return (jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments), value


def momentum_state() -> tuple[Any, Any]:
    """Return the weights and moments of `momentum_step`."""
    stack = {"stack": weights(5, WIDTH, WIDTH)}
    return stack, jax.tree.map(np.zeros_like, stack)


def stages(count: int, devices: int | None = None, **options: Any) -> autopar.PipeshardParallel:
    """Return a pipeline with `count` stages of one layer and four microbatches."""
    options.setdefault("num_micro_batches", 4)
    layers = autopar.AutoLayerOption(layer_num=count)
    return autopar.PipeshardParallel(devices or count, layer_option=layers, **options)
