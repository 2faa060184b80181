"""Training steps of models of sequences, as tutorials and the code of papers write them."""

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from experiments.reach.public_step import LENGTH, VOCABULARY, PublicStep, features, tokens

_WIDTH = 16


def _rotary(x, positions):
    """Rotate pairs of features of (batch, length, heads, width) by angles of positions."""
    half = x.shape[-1] // 2
    frequencies = 1.0 / 10000.0 ** (jnp.arange(half) / half)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    sin, cos = jnp.sin(angles)[:, :, None], jnp.cos(angles)[:, :, None]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class _GroupedQueryAttention(nn.Module):
    heads: int = 4
    kv_heads: int = 2
    head_width: int = 4

    @nn.compact
    def __call__(self, x, positions, mask):
        dense = partial(nn.DenseGeneral, use_bias=False)
        q = _rotary(dense((self.heads, self.head_width), name="q")(x), positions)
        k = _rotary(dense((self.kv_heads, self.head_width), name="k")(x), positions)
        v = dense((self.kv_heads, self.head_width), name="v")(x)
        b, t, _, d = q.shape
        q = q.reshape(b, t, self.kv_heads, self.heads // self.kv_heads, d)
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k) / d**0.5
        scores = jnp.where(mask[:, None, None], scores, jnp.finfo(scores.dtype).min)
        out = jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(scores, axis=-1), v)
        return dense(x.shape[-1], axis=(-2, -1), name="o")(out.reshape(b, t, self.heads, d))


class _RopeBlock(nn.Module):
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, positions, mask, deterministic=True):
        h = _GroupedQueryAttention()(nn.RMSNorm()(x), positions, mask)
        x = x + nn.Dropout(self.dropout)(h, deterministic)
        h = nn.RMSNorm()(x)
        h = nn.silu(nn.Dense(32, use_bias=False)(h)) * nn.Dense(32, use_bias=False)(h)
        h = nn.Dense(x.shape[-1], use_bias=False)(h)
        return x + nn.Dropout(self.dropout)(h, deterministic)


class _RopeDecoder(nn.Module):
    layers: int = 2

    @nn.compact
    def __call__(self, ids, positions, mask):
        x = nn.Embed(VOCABULARY, _WIDTH)(ids)
        for _ in range(self.layers):
            x = _RopeBlock()(x, positions, mask)
        return nn.Dense(VOCABULARY, use_bias=False)(nn.RMSNorm()(x))


def _causal(ids):
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    return positions, jnp.tril(jnp.ones((ids.shape[1],) * 2, bool))[None]


def _next_token_loss(model, params, ids):
    logits = model.apply(params, ids, *_causal(ids)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean()


def packed_llama() -> PublicStep:
    """Packed documents: segments mask the attention, positions restart, padding has no loss."""
    model = _RopeDecoder()
    schedule = optax.cosine_decay_schedule(1e-3, 1000)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1)
    )

    def train_step(state: TrainState, batch):
        inputs, targets = batch["inputs"], batch["targets"]
        segments = batch["segment_ids"]
        same = segments[:, :, None] == segments[:, None, :]
        mask = same & (batch["positions"][:, :, None] >= batch["positions"][:, None, :])

        def loss_fn(params):
            logits = state.apply_fn({"params": params}, inputs, batch["positions"], mask)
            logits = logits.astype(jnp.float32)
            xent = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
            z_loss = 1e-4 * jnp.square(jax.nn.logsumexp(logits, axis=-1))
            weights = (segments != 0).astype(jnp.float32)
            denominator = weights.sum()
            loss = jnp.sum((xent + z_loss) * weights) / denominator
            correct = jnp.sum((jnp.argmax(logits, -1) == targets) * weights)
            return loss, {"tokens": denominator, "accuracy": correct / denominator}

        (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        metrics |= {
            "loss": loss,
            "grad_norm": optax.global_norm(grads),
            "param_norm": optax.global_norm(state.params),
            "lr": schedule(state.step),
        }
        return state.apply_gradients(grads=grads), metrics

    ids = tokens()
    cuts = np.array([5, 7, 9, 16, 11, 3, 8, 12])[:, None]
    where = np.arange(LENGTH)
    segments = np.where(where < cuts, 1, np.where(where < cuts + 4, 2, 0))
    positions = np.where(where < cuts, where, where - cuts)
    batch = {
        "inputs": ids,
        "targets": jnp.roll(ids, -1, axis=1),
        "segment_ids": jnp.asarray(segments, jnp.int32),
        "positions": jnp.asarray(positions, jnp.int32),
    }
    params = model.init(jax.random.key(0), ids, *_causal(ids))["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    return PublicStep(train_step, (state, batch))


def accumulation_scan() -> PublicStep:
    """The user's own accumulation of gradients: a scan over parts of the batch."""
    model = _RopeDecoder()
    loss_fn = partial(_next_token_loss, model)
    tx = optax.adamw(1e-3)
    parts = 2

    def train_step(params, opt_state, ids):
        def accumulate(carry, micro):
            total, grads = carry
            loss, new = jax.value_and_grad(loss_fn)(params, micro)
            return (total + loss, jax.tree.map(jnp.add, grads, new)), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        micros = ids.reshape(parts, -1, ids.shape[1])
        (loss, grads), _ = jax.lax.scan(accumulate, (0.0, zeros), micros)
        grads = jax.tree.map(lambda g: g / parts, grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss / parts

    ids = tokens()
    params = model.init(jax.random.key(0), ids, *_causal(ids))
    return PublicStep(train_step, (params, tx.init(params), ids))


def accumulation_loop() -> PublicStep:
    """The user's own accumulation of gradients: a Python loop over slices of the batch."""
    model = _RopeDecoder()
    loss_fn = partial(_next_token_loss, model)
    tx = optax.adamw(1e-3)
    steps = 4

    def train_step(params, opt_state, ids):
        size = ids.shape[0] // steps
        grads = jax.tree.map(jnp.zeros_like, params)
        loss = 0.0
        for i in range(steps):
            part = ids[i * size : (i + 1) * size]
            value, new = jax.value_and_grad(loss_fn)(params, part)
            loss += value / steps
            grads = jax.tree.map(lambda total, g: total + g / steps, grads, new)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    ids = tokens()
    params = model.init(jax.random.key(0), ids, *_causal(ids))
    return PublicStep(train_step, (params, tx.init(params), ids))


class _LoraDense(nn.Module):
    features: int
    rank: int = 2

    @nn.compact
    def __call__(self, x):
        base = nn.Dense(self.features, use_bias=False, name="base")(x)
        a = self.param("lora_a", nn.initializers.normal(0.1), (x.shape[-1], self.rank))
        b = self.param("lora_b", nn.initializers.normal(0.1), (self.rank, self.features))
        return base + 2.0 * (x @ a) @ b


class _LoraModel(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCABULARY, _WIDTH)(ids)
        _, mask = _causal(ids)
        for _ in range(2):
            h = nn.LayerNorm()(x)
            q, k, v = (_LoraDense(_WIDTH)(h) for _ in range(3))
            scores = jnp.where(mask, q @ k.mT / 4.0, -1e9)
            x = x + _LoraDense(_WIDTH)(jax.nn.softmax(scores) @ v)
            x = x + _LoraDense(_WIDTH)(nn.gelu(_LoraDense(32)(nn.LayerNorm()(x))))
        return nn.Dense(VOCABULARY)(x)


def lora() -> PublicStep:
    """LoRA: `optax.multi_transform` trains the adapters and freezes everything else."""
    model, ids = _LoraModel(), tokens()
    params = model.init(jax.random.key(0), ids)["params"]
    labels = jax.tree.map_with_path(
        lambda path, _: "train" if "lora" in jax.tree_util.keystr(path) else "freeze", params
    )
    tx = optax.multi_transform({"train": optax.adamw(1e-3), "freeze": optax.set_to_zero()}, labels)

    def train_step(state, input_ids, loss_mask):
        def compute_loss(params):
            logits = state.apply_fn({"params": params}, input_ids[:, :-1])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, input_ids[:, 1:])
            mask = loss_mask[:, 1:]
            return jnp.where(mask, losses, 0.0).sum() / mask.sum()

        loss, grads = jax.value_and_grad(compute_loss)(state.params)
        return state.apply_gradients(grads=grads), loss

    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    mask = jnp.arange(LENGTH) >= jnp.array([3, 5, 2, 8, 4, 6, 3, 9])[:, None]
    return PublicStep(train_step, (state, ids, mask))


class _Experts(nn.Module):
    """Switch routing: one expert for each token, with a capacity."""

    experts: int = 4
    capacity_factor: float = 1.5

    @nn.compact
    def __call__(self, x):
        _, t, d = x.shape
        capacity = int(self.capacity_factor * t / self.experts)
        gates = jax.nn.softmax(nn.Dense(self.experts, use_bias=False, name="router")(x))
        expert = jnp.argmax(gates, -1)
        one_hot = jax.nn.one_hot(expert, self.experts)
        place = jnp.cumsum(one_hot, axis=1) * one_hot - 1
        kept = one_hot * (place < capacity)
        slot = jax.nn.one_hot(jnp.sum(place * one_hot, -1).astype(jnp.int32), capacity)
        dispatch = jnp.einsum("bte,btc->btec", kept, slot)
        combine = dispatch * jnp.max(gates, -1)[..., None, None]
        init = nn.initializers.lecun_normal(batch_axis=(0,))
        w1 = self.param("w1", init, (self.experts, d, 32))
        w2 = self.param("w2", init, (self.experts, 32, d))
        inputs = jnp.einsum("btec,btd->becd", dispatch, x)
        outputs = jnp.einsum(
            "becf,efd->becd", nn.gelu(jnp.einsum("becd,edf->becf", inputs, w1)), w2
        )
        balance = self.experts * jnp.sum(one_hot.mean((0, 1)) * gates.mean((0, 1)))
        self.sow("losses", "balance", balance)
        self.sow("losses", "z", jnp.mean(jax.nn.logsumexp(gates, -1) ** 2))
        return jnp.einsum("btec,becd->btd", combine, outputs)


class _MoeModel(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCABULARY, _WIDTH)(ids)
        positions, mask = _causal(ids)
        for _ in range(2):
            x = x + _GroupedQueryAttention()(nn.LayerNorm()(x), positions, mask)
            x = x + _Experts()(nn.LayerNorm()(x))
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


def switch_moe() -> PublicStep:
    """A switch transformer: experts with a capacity, and a loss that balances their load."""
    model, ids = _MoeModel(), tokens()
    variables = model.init(jax.random.key(0), ids)
    params = variables["params"]
    tx = optax.adafactor(1e-2)

    def train_step(params, opt_state, ids):
        def loss_fn(params):
            logits, state = model.apply({"params": params}, ids[:, :-1], mutable=["losses"])
            xent = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()
            aux = sum(jax.tree.leaves(state["losses"]))
            return xent + 0.01 * aux, (xent, aux)

        (loss, (xent, aux)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, dict(loss=loss, xent=xent, aux=aux)

    return PublicStep(train_step, (params, tx.init(params), ids))


def ctc_speech() -> PublicStep:
    """Speech recognition by CTC: convolutions over spectrograms, LSTMs both ways, SpecAugment."""

    class SpeechModel(nn.Module):
        @nn.compact
        def __call__(self, spectrogram, lengths):
            x = nn.relu(nn.Conv(16, (3,), strides=(2,))(spectrogram))
            lengths = (lengths + 1) // 2
            x = nn.LayerNorm()(x)
            forward = nn.RNN(nn.OptimizedLSTMCell(16))(x, seq_lengths=lengths)
            backward = nn.RNN(nn.OptimizedLSTMCell(16), reverse=True, keep_order=True)(
                x, seq_lengths=lengths
            )
            x = jnp.concatenate([forward, backward], axis=-1)
            padding = jnp.arange(x.shape[1])[None] >= lengths[:, None]
            return nn.Dense(12)(x), padding.astype(jnp.float32)

    model = SpeechModel()
    tx = optax.chain(optax.clip_by_global_norm(5.0), optax.adam(1e-3))

    def mask_spectrogram(key, x):
        t_key, f_key = jax.random.split(key)
        start = jax.random.randint(t_key, (), 0, x.shape[0] - 4)
        frames = jnp.arange(x.shape[0])
        keep = (frames < start) | (frames >= start + 3)
        band = jax.random.randint(f_key, (), 0, x.shape[1] - 2)
        bins = jnp.arange(x.shape[1])
        return x * keep[:, None] * ((bins < band) | (bins >= band + 2))

    def train_step(params, opt_state, key, batch):
        key, mask_key = jax.random.split(key)
        keys = jax.random.split(mask_key, batch["spectrogram"].shape[0])
        spectrogram = jax.vmap(mask_spectrogram)(keys, batch["spectrogram"])

        def loss_fn(params):
            logits, padding = model.apply(params, spectrogram, batch["frames"])
            losses = optax.ctc_loss(logits, padding, batch["labels"], batch["label_paddings"])
            return jnp.mean(losses / jnp.sum(1 - batch["label_paddings"], axis=-1))

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, key, loss

    numbers = np.random.default_rng(5)
    frames = jnp.array([20, 14, 18, 20, 12, 16, 20, 17])
    label_lengths = jnp.array([4, 2, 3, 4, 2, 3, 4, 3])[:, None]
    batch = {
        "spectrogram": features(20, 8),
        "frames": frames,
        "labels": jnp.asarray(numbers.integers(1, 12, (8, 4)), jnp.int32),
        "label_paddings": (jnp.arange(4) >= label_lengths).astype(jnp.float32),
    }
    params = model.init(jax.random.key(0), batch["spectrogram"], frames)
    return PublicStep(train_step, (params, tx.init(params), jax.random.PRNGKey(2), batch))


def perceiver() -> PublicStep:
    """A Perceiver: learned latents read a long input by cross attention, and repeat that."""

    class Perceiver(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            b, n, _ = x.shape
            position = jnp.linspace(-1, 1, n)[:, None] * jnp.pi * 2.0 ** jnp.arange(3)
            fourier = jnp.concatenate([jnp.sin(position), jnp.cos(position)], axis=-1)
            x = jnp.concatenate([x, jnp.broadcast_to(fourier, (b, n, 6))], axis=-1)
            latents = self.param("latents", nn.initializers.normal(0.02), (4, _WIDTH))
            z = jnp.broadcast_to(latents, (b, *latents.shape))
            cross = nn.MultiHeadDotProductAttention(1, qkv_features=_WIDTH, out_features=_WIDTH)
            mlp = nn.Sequential([nn.LayerNorm(), nn.Dense(32), nn.gelu, nn.Dense(_WIDTH)])
            for _ in range(2):  # the weights of all repetitions are the same
                z = z + cross(nn.LayerNorm()(z), nn.LayerNorm()(x), mask=mask[:, None, None])
                z = z + nn.SelfAttention(2)(nn.LayerNorm()(z))
                z = z + mlp(z)
            return nn.Dense(5)(z.mean(axis=1))

    model = Perceiver()
    tx = optax.lamb(1e-3)

    def train_step(params, opt_state, x, mask, y):
        def loss_fn(params):
            logits = model.apply(params, x, mask)
            targets = optax.smooth_labels(jax.nn.one_hot(y, 5), 0.1)
            return optax.softmax_cross_entropy(logits, targets).mean(), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        top_2 = jax.lax.top_k(logits, 2)[1]
        metrics = {"loss": loss, "top_2": jnp.mean(jnp.any(top_2 == y[:, None], axis=-1))}
        return optax.apply_updates(params, updates), opt_state, metrics

    x, y = features(24, 3), jnp.arange(8) % 5
    mask = jnp.arange(24) < jnp.array([24, 20, 18, 24, 12, 22, 24, 16])[:, None]
    params = model.init(jax.random.key(0), x, mask)
    return PublicStep(train_step, (params, tx.init(params), x, mask, y))


def seq2seq_forecast() -> PublicStep:
    """A forecaster: an encoder scans the history, a decoder its own predictions."""
    hidden, horizon = 16, 6

    def cell(params, h, x):
        z = jax.nn.sigmoid(x @ params["wz"] + h @ params["uz"] + params["bz"])
        r = jax.nn.sigmoid(x @ params["wr"] + h @ params["ur"] + params["br"])
        candidate = jnp.tanh(x @ params["wh"] + (r * h) @ params["uh"] + params["bh"])
        return (1 - z) * h + z * candidate

    def init_cell(key, inputs):
        keys = iter(jax.random.split(key, 6))
        params = {}
        for gate in "zrh":
            params["w" + gate] = 0.3 * jax.random.normal(next(keys), (inputs, hidden))
            params["u" + gate] = 0.3 * jax.random.normal(next(keys), (hidden, hidden))
            params["b" + gate] = jnp.zeros(hidden)
        return params

    def forecast(params, history, key, truth, teacher_forcing):
        center = history.mean(axis=1, keepdims=True)
        scale = history.std(axis=1, keepdims=True) + 1e-3
        history, truth = (history - center) / scale, (truth - center) / scale
        h = jnp.zeros((history.shape[0], hidden))
        h, _ = jax.lax.scan(
            lambda h, x: (cell(params["encoder"], h, x), None), h, jnp.moveaxis(history, 1, 0)
        )

        def decode(carry, inputs):
            h, last = carry
            target, key = inputs
            h = cell(params["decoder"], h, last)
            out = h @ params["w"] + params["b"]
            forced = jax.random.bernoulli(key, teacher_forcing, (out.shape[0], 1))
            return (h, jnp.where(forced, target, out)), out

        keys = jax.random.split(key, horizon)
        start = (h, history[:, -1])
        _, out = jax.lax.scan(decode, start, (jnp.moveaxis(truth, 1, 0), keys))
        return jnp.moveaxis(out, 0, 1) * scale + center

    def train_step(params, opt_state, history, future, key):
        def loss_fn(params):
            predicted = forecast(params, history, key, future, 0.5)
            return optax.huber_loss(predicted, future).mean(), jnp.abs(predicted - future).mean()

        (loss, mae), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss, "mae": mae}

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    params = {
        "encoder": init_cell(jax.random.key(0), 2),
        "decoder": init_cell(jax.random.key(1), 2),
        "w": 0.1 * jax.random.normal(jax.random.key(2), (hidden, 2)),
        "b": jnp.zeros(2),
    }
    args = (params, tx.init(params), features(12, 2), features(horizon, 2, seed=2))
    return PublicStep(train_step, (*args, jax.random.PRNGKey(3)))


def scanned_gpt() -> PublicStep:
    """Layers in `nn.scan` with remat and dropout; weight decay only for matrices."""

    class ScannedLayer(nn.Module):
        @nn.compact
        def __call__(self, x, inputs):
            positions, mask = inputs
            return _RopeBlock(dropout=0.1)(x, positions, mask, False), None

    class ScannedGpt(nn.Module):
        @nn.compact
        def __call__(self, ids):
            embed = nn.Embed(VOCABULARY, _WIDTH)
            x = nn.Dropout(0.1)(embed(ids), deterministic=False)
            layers = nn.scan(
                nn.remat(ScannedLayer, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=nn.broadcast,
                length=4,
            )
            x, _ = layers()(x, _causal(ids))
            return embed.attend(nn.RMSNorm()(x))

    model, ids = ScannedGpt(), tokens()
    params = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, ids)
    decayed = jax.tree.map(lambda x: x.ndim > 1, params)
    tx = optax.inject_hyperparams(optax.adamw, static_args="mask")(1e-3, mask=decayed)

    def train_step(state, ids, dropout_rng):
        params, opt_state = state
        rng = jax.random.fold_in(dropout_rng, opt_state.count)

        def loss_fn(params):
            logits = model.apply(params, ids, rngs={"dropout": rng})
            shifted = logits[:, :-1].reshape(-1, VOCABULARY)
            return optax.softmax_cross_entropy_with_integer_labels(
                shifted, ids[:, 1:].reshape(-1)
            ).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        lr = opt_state.hyperparams["learning_rate"]
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss, "lr": lr}

    return PublicStep(train_step, ((params, tx.init(params)), ids, jax.random.key(3)))


def masked_lm() -> PublicStep:
    """BERT's pretraining: the step draws which tokens are masked; a mean over these."""

    class MaskedEncoder(nn.Module):
        @nn.compact
        def __call__(self, ids, attention_mask):
            positions = jnp.arange(ids.shape[1])[None, :]
            x = nn.Embed(VOCABULARY, _WIDTH)(ids) + nn.Embed(LENGTH, _WIDTH)(positions)
            mask = nn.make_attention_mask(attention_mask, attention_mask)
            for _ in range(2):
                attention = nn.SelfAttention(2, dropout_rate=0.1, deterministic=False)
                x = nn.LayerNorm()(x + attention(x, mask=mask))
                h = nn.Dense(_WIDTH)(nn.gelu(nn.Dense(32)(x)))
                x = nn.LayerNorm()(x + nn.Dropout(0.1, deterministic=False)(h))
            return nn.Dense(VOCABULARY)(x)

    model, ids = MaskedEncoder(), tokens()
    tx = optax.adamw(optax.linear_schedule(1e-3, 0.0, 100))

    def corrupt(rng, ids, attention_mask):
        choose_rng, kind_rng, token_rng = jax.random.split(rng, 3)
        chosen = jax.random.bernoulli(choose_rng, 0.3, ids.shape) & (attention_mask == 1)
        kind = jax.random.uniform(kind_rng, ids.shape)
        random_ids = jax.random.randint(token_rng, ids.shape, 3, VOCABULARY)
        corrupted = jnp.where(kind < 0.8, 2, jnp.where(kind < 0.9, random_ids, ids))
        return jnp.where(chosen, corrupted, ids), jnp.where(chosen, ids, -100)

    def train_step(state, batch, rng):
        rng, corrupt_rng, dropout_rng = jax.random.split(rng, 3)
        inputs, labels = corrupt(corrupt_rng, batch["input_ids"], batch["attention_mask"])

        def loss_fn(params):
            logits = state.apply_fn(
                params, inputs, batch["attention_mask"], rngs={"dropout": dropout_rng}
            )
            mask = jnp.where(labels != -100, 1.0, 0.0)
            losses = optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, VOCABULARY))
            return (losses * mask).sum() / mask.sum(), mask.sum()

        (loss, count), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, "masked": count}, rng

    lengths = jnp.array([16, 9, 12, 16, 11, 7, 16, 10])[:, None]
    attention_mask = (jnp.arange(LENGTH) < lengths).astype(jnp.int32)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = model.init(rngs, ids, attention_mask)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    batch = {"input_ids": ids, "attention_mask": attention_mask}
    return PublicStep(train_step, (state, batch, jax.random.PRNGKey(4)))


class _ScaledState(NamedTuple):
    params: Any
    opt_state: Any
    loss_scale: jax.Array
    good_steps: jax.Array


def dynamic_loss_scale() -> PublicStep:
    """Mixed precision: a dynamic scale of the loss, and no update if gradients overflow."""
    model = _RopeDecoder()
    tx = optax.adamw(1e-3)

    def train_step(state, ids):
        def loss_fn(params):
            half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
            loss = _next_token_loss(model, half, ids)
            return loss * state.loss_scale, loss

        (_, loss), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        grads = jax.tree.map(lambda g: g / state.loss_scale, grads)
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        select = partial(jax.tree.map, partial(jnp.where, finite))
        grow = finite & (state.good_steps == 1999)
        loss_scale = jnp.where(
            finite,
            jnp.where(grow, state.loss_scale * 2, state.loss_scale),
            jnp.maximum(1.0, state.loss_scale / 2),
        )
        good_steps = jnp.where(grow | ~finite, 0, state.good_steps + 1)
        state = _ScaledState(
            select(params, state.params), select(opt_state, state.opt_state), loss_scale, good_steps
        )
        return state, {"loss": loss, "finite": finite, "loss_scale": loss_scale}

    ids = tokens()
    params = model.init(jax.random.key(0), ids, *_causal(ids))
    args = (params, tx.init(params), jnp.float32(2.0**12), jnp.int32(0))
    return PublicStep(train_step, (_ScaledState(*args), ids), computes_in=jnp.bfloat16)
