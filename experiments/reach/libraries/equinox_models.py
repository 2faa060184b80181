"""Models of Equinox, trained as in its examples."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax

from experiments.reach.public_step import PublicStep, classes, features, tokens


class _AttentionBlock(eqx.Module):
    layer_norm1: eqx.nn.LayerNorm
    layer_norm2: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    linear1: eqx.nn.Linear
    linear2: eqx.nn.Linear
    dropout1: eqx.nn.Dropout
    dropout2: eqx.nn.Dropout

    def __init__(self, size, hidden, heads, rate, key):
        key1, key2, key3 = jr.split(key, 3)
        self.layer_norm1 = eqx.nn.LayerNorm(size)
        self.layer_norm2 = eqx.nn.LayerNorm(size)
        self.attention = eqx.nn.MultiheadAttention(heads, size, key=key1)
        self.linear1 = eqx.nn.Linear(size, hidden, key=key2)
        self.linear2 = eqx.nn.Linear(hidden, size, key=key3)
        self.dropout1 = eqx.nn.Dropout(rate)
        self.dropout2 = eqx.nn.Dropout(rate)

    def __call__(self, x, enable_dropout, key):
        input_x = jax.vmap(self.layer_norm1)(x)
        x = x + self.attention(input_x, input_x, input_x)
        input_x = jax.vmap(self.linear1)(jax.vmap(self.layer_norm2)(x))
        key1, key2 = jr.split(key)
        input_x = self.dropout1(jax.nn.gelu(input_x), inference=not enable_dropout, key=key1)
        input_x = jax.vmap(self.linear2)(input_x)
        return x + self.dropout2(input_x, inference=not enable_dropout, key=key2)


class _VisionTransformer(eqx.Module):
    patch_embedding: eqx.nn.Linear
    positional_embedding: jax.Array
    cls_token: jax.Array
    attention_blocks: list[_AttentionBlock]
    dropout: eqx.nn.Dropout
    mlp: eqx.nn.Sequential

    def __init__(self, size, hidden, heads, layers, rate, key):
        keys = jr.split(key, 5)
        self.patch_embedding = eqx.nn.Linear(48, size, key=keys[0])
        self.positional_embedding = jr.normal(keys[1], (17, size))
        self.cls_token = jr.normal(keys[2], (1, size))
        self.attention_blocks = [
            _AttentionBlock(size, hidden, heads, rate, k) for k in jr.split(keys[3], layers)
        ]
        self.dropout = eqx.nn.Dropout(rate)
        self.mlp = eqx.nn.Sequential([eqx.nn.LayerNorm(size), eqx.nn.Linear(size, 10, key=keys[4])])

    def __call__(self, x, enable_dropout, key):
        x = x.reshape(3, 4, 4, 4, 4).transpose(1, 3, 0, 2, 4).reshape(16, 48)
        x = jnp.concatenate((self.cls_token, jax.vmap(self.patch_embedding)(x)), axis=0)
        x = x + self.positional_embedding
        dropout_key, *attention_keys = jr.split(key, num=len(self.attention_blocks) + 1)
        x = self.dropout(x, inference=not enable_dropout, key=dropout_key)
        for block, attention_key in zip(self.attention_blocks, attention_keys, strict=True):
            x = block(x, enable_dropout, key=attention_key)
        return self.mlp(x[0])


def vit() -> PublicStep:
    """examples/vision_transformer.ipynb: the model is an argument, functions and all."""
    model = _VisionTransformer(32, 64, 4, 2, 0.1, jr.key(0))
    optimizer = optax.adamw(1e-3)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_value_and_grad
    def compute_grads(model, images, labels, key):
        logits = jax.vmap(model, in_axes=(0, None, 0))(images, True, key)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    def step_model(model, state, images, labels, key):
        loss, grads = compute_grads(model, images, labels, key)
        updates, new_state = optimizer.update(grads, state, model)
        return eqx.apply_updates(model, updates), new_state, loss

    keys = jr.split(jr.key(1), len(classes()))
    args = (model, state, features(3, 16, 16), classes(), keys)
    return PublicStep(step_model, args, jit=eqx.filter_jit, options={"batch_argnums": (2, 3, 4)})


class _RNN(eqx.Module):
    hidden_size: int
    cell: eqx.Module
    linear: eqx.nn.Linear
    bias: jax.Array

    def __init__(self, in_size, out_size, hidden_size, *, key):
        ckey, lkey = jr.split(key)
        self.hidden_size = hidden_size
        self.cell = eqx.nn.GRUCell(in_size, hidden_size, key=ckey)
        self.linear = eqx.nn.Linear(hidden_size, out_size, use_bias=False, key=lkey)
        self.bias = jnp.zeros(out_size)

    def __call__(self, sequence):
        def step(carry, inp):
            return self.cell(inp, carry), None

        out, _ = jax.lax.scan(step, jnp.zeros((self.hidden_size,)), sequence)
        return jax.nn.sigmoid(self.linear(out) + self.bias)


def gru() -> PublicStep:
    """examples/train_rnn.ipynb: a GRU in a scan; the arguments are in its order."""
    model = _RNN(2, 1, 32, key=jr.key(0))
    optim = optax.adam(3e-3)
    opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_value_and_grad
    def compute_loss(model, x, y):
        pred_y = jax.vmap(model)(x)
        return -jnp.mean(y * jnp.log(pred_y) + (1 - y) * jnp.log(1 - pred_y))

    def make_step(model, x, y, opt_state):
        loss, grads = compute_loss(model, x, y)
        updates, opt_state = optim.update(grads, opt_state)
        return loss, eqx.apply_updates(model, updates), opt_state

    y = (classes(2)[:, None]).astype(jnp.float32)
    args = (model, features(16, 2), y, opt_state)
    return PublicStep(make_step, args, jit=eqx.filter_jit, options={"batch_argnums": (1, 2)})


def mlp() -> PublicStep:
    """eqx.nn.MLP, whose activation is a leaf of the model, by partition and combine."""
    model = eqx.nn.MLP(8, "scalar", 32, 3, activation=jax.nn.gelu, key=jr.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    optim = optax.adam(1e-3)

    def make_step(state, batch):
        params, opt_state = state

        def loss_fn(params):
            pred = jax.vmap(eqx.combine(params, static))(batch["x"])
            return jnp.mean((pred - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optim.update(grads, opt_state, params)
        return (eqx.apply_updates(params, updates), opt_state), loss

    batch = {"x": features(8), "y": features(seed=2)}
    return PublicStep(make_step, ((params, optim.init(params)), batch))


class _Bert(eqx.Module):
    embedding: eqx.nn.Embedding
    blocks: list[_AttentionBlock]
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jr.split(key, 3)
        self.embedding = eqx.nn.Embedding(64, 32, key=keys[0])
        self.blocks = [_AttentionBlock(32, 64, 4, 0.1, k) for k in jr.split(keys[1], 2)]
        self.head = eqx.nn.Linear(32, 3, key=keys[2])

    def __call__(self, ids, enable_dropout, key):
        x = jax.vmap(self.embedding)(ids)
        for block, block_key in zip(self.blocks, jr.split(key, 2), strict=True):
            x = block(x, enable_dropout, block_key)
        return self.head(x[0])


def bert() -> PublicStep:
    """examples/bert.ipynb: a classifier of tokens whose keys are split for the examples inside."""
    model = _Bert(jr.key(0))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    def compute_loss(model, inputs, key):
        keys = jr.split(key, inputs["label"].shape[0])
        logits = jax.vmap(model, in_axes=(0, None, 0))(inputs["token_ids"], True, keys)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, inputs["label"]))

    def make_step(model, inputs, opt_state, key):
        key, new_key = jr.split(key)
        loss, grads = eqx.filter_value_and_grad(compute_loss)(model, inputs, key)
        updates, opt_state = tx.update(grads, opt_state, model)
        return loss, eqx.apply_updates(model, updates), opt_state, new_key

    inputs = {"token_ids": tokens(), "label": classes(3)}
    return PublicStep(make_step, (model, inputs, opt_state, jr.key(1)), jit=eqx.filter_jit)
