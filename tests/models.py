"""Flax models that several tests train, plan or schedule."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


class MLP(nn.Module):
    """Dense layers of the given sizes with relu between them."""

    sizes: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i, size in enumerate(self.sizes):
            x = nn.Dense(size)(x if i == 0 else nn.relu(x))
        return x


class TutorialMLP(nn.Module):
    """The model of Slapo's tutorial: two layers with names, gelu between them."""

    hidden: int

    def setup(self) -> None:
        self.linear1 = nn.Dense(self.hidden)
        self.linear2 = nn.Dense(self.hidden)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear2(nn.gelu(self.linear1(x), approximate=False))


class Dropping(nn.Module):
    """Two layers with dropout after each; returns the hidden values and the result."""

    rate: float = 0.25

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden = nn.relu(nn.Dense(64, name="up")(x))
        hidden = nn.Dropout(self.rate, deterministic=False, name="inner")(hidden)
        result = nn.Dense(16, name="down")(hidden)
        return hidden, nn.Dropout(self.rate, deterministic=False, name="outer")(result)


class Attention(nn.Module):
    """Multi-head self-attention with one projection each for queries, keys and values."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, hidden = x.shape
        query, key, value = (
            nn.Dense(hidden, name=name)(x).reshape(batch, length, self.heads, -1)
            for name in ("q", "k", "v")
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
        return nn.Dense(hidden, name="out")(mixed.reshape(x.shape))


class Block(nn.Module):
    """A transformer block with relu, which has a custom derivative."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + Attention(self.heads, name="attention")(nn.LayerNorm(name="norm1")(x))
        y = nn.relu(nn.Dense(4 * x.shape[-1], name="up")(nn.LayerNorm(name="norm2")(x)))
        return x + nn.Dense(x.shape[-1], name="down")(y)


class Transformer(nn.Module):
    """Blocks between an embedding and logits from the same embedding."""

    vocabulary: int = 32
    hidden: int = 16
    heads: int = 4
    layers: int = 2
    remat: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocabulary, self.hidden, name="embed")
        x = embed(tokens)
        for number in range(self.layers):
            x = (nn.remat(Block) if self.remat else Block)(self.heads, name=f"block_{number}")(x)
        return embed.attend(nn.LayerNorm(name="norm")(x))


class Decoder(nn.Module):
    """One block with single-head attention, and a head tied to the embedding."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embedding = nn.Embed(64, 32, name="tokens")
        x = embedding(tokens) + self.param("positions", nn.initializers.normal(), (8, 32))
        y = nn.LayerNorm(name="norm")(x)
        q, k, v = (nn.Dense(32, name=name)(y) for name in "qkv")
        weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k))
        x = x + nn.Dense(32, name="out")(jnp.einsum("bqk,bkd->bqd", weights, v))
        x = x + nn.Dense(32, name="down")(nn.gelu(nn.Dense(128, name="up")(x)))
        return embedding.attend(x)


class RotaryAttention(nn.Module):
    """A classifier with `jax.nn` causal attention, rotary positions and a padding mask.

    The embedding is a lookup, whose gradient is a scatter.
    """

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(32, 32)(tokens)
        q, k, v = (nn.DenseGeneral((4, 8))(x) for _ in range(3))
        angles = jnp.arange(x.shape[1])[:, None] / 10 ** jnp.linspace(0, 2, 4)
        sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]

        def rotate(h: Any) -> Any:
            a, b = jnp.split(h, 2, -1)
            return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

        out = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + nn.DenseGeneral(32, (-2, -1))(out)
        last = jnp.maximum((tokens != 0).sum(1) - 1, 0)
        return nn.Dense(8)(jnp.take_along_axis(x, last[:, None, None], 1)[:, 0])


class VisionTransformer(nn.Module):
    """Patches by convolution, a class token, and one block with dropout and RMSNorm."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Conv(32, (2, 2), (2, 2))(x).reshape(x.shape[0], -1, 32)
        first = self.param("first", nn.initializers.zeros, (1, 1, 32))
        x = jnp.concatenate([jnp.tile(first, (x.shape[0], 1, 1)), x], 1)
        x = x + self.param("position", nn.initializers.normal(0.02), x.shape[1:])
        x = nn.Dropout(0.1, deterministic=False)(x)
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(4, dropout_rate=0.1, deterministic=False)(y, y)
        y = nn.Dense(64)(nn.RMSNorm()(x))
        x = x + nn.Dropout(0.1, deterministic=False)(nn.Dense(32)(nn.gelu(y)))
        return nn.Dense(8)(x[:, 0])


class MixtureOfExperts(nn.Module):
    """Two of four experts for each token, dispatched with einsums; experts have a capacity."""

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(32, 16)(tokens)
        gates = nn.softmax(nn.Dense(4, use_bias=False)(x).astype(jnp.float32))
        chosen, experts = jax.lax.top_k(gates, 2)
        hot = jax.nn.one_hot(experts, 4).transpose(0, 2, 1, 3).reshape(x.shape[0], -1, 4)
        place = jnp.cumsum(hot, 1) * hot - 1
        room = jax.nn.one_hot(place.astype(jnp.int32), 6) * hot[..., None]
        room = room.reshape(x.shape[0], 2, -1, 4, 6).transpose(0, 2, 1, 3, 4)
        combine = jnp.einsum("bsk,bskec->bsec", chosen / chosen.sum(-1, keepdims=True), room)
        up = self.param("up", nn.initializers.lecun_normal(), (4, 16, 32))
        down = self.param("down", nn.initializers.lecun_normal(), (4, 32, 16))
        inner = nn.relu(jnp.einsum("bsec,bsm,emh->ebch", (combine > 0).astype(x.dtype), x, up))
        x = x + jnp.einsum("bsec,ebch,ehm->bsm", combine, inner, down)
        return nn.Dense(8)(x.mean(1))


class ConvNext(nn.Module):
    """Depthwise, dilated and transposed convolutions, GroupNorm and a resize."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Conv(8, (3, 3), feature_group_count=8, kernel_dilation=2)(x)
        x = nn.GroupNorm(4)(nn.gelu(x))
        x = nn.ConvTranspose(8, (2, 2), (2, 2))(x)
        x = jax.image.resize(x, (x.shape[0], 8, 8, 8), "bilinear")
        return nn.Dense(8)(x.mean((1, 2)))


class _Residual(nn.Module):
    features: int
    strides: int = 1

    @nn.compact
    def __call__(self, x: Any) -> Any:
        norm = lambda: nn.BatchNorm(use_running_average=False)  # noqa: E731
        y = nn.Conv(self.features, (3, 3), self.strides, use_bias=False)(nn.relu(norm()(x)))
        y = nn.Conv(self.features, (3, 3), use_bias=False)(nn.relu(norm()(y)))
        if x.shape != y.shape:
            x = nn.Conv(self.features, (1, 1), self.strides, use_bias=False)(x)
        return x + y


class WideResNet(nn.Module):
    """Two residual blocks with BatchNorm, the second of which halves the image."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.max_pool(nn.Conv(16, (3, 3))(x), (3, 3), (2, 2), "SAME")
        x = _Residual(32, 2)(_Residual(16)(x))
        return nn.Dense(8)(nn.avg_pool(x, x.shape[1:3]).reshape(x.shape[0], -1))
