"""Models of flaxmodels 0.1.3, trained as in its training folder, without pretrained weights.

Its GPT-2 calls `jnp.reshape(newshape=...)`, which JAX has renamed to `shape`. The module gets a
`jnp` whose `reshape` takes the former name; nothing else of it is changed.
"""

from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import flaxmodels as fm
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from flaxmodels.gpt2 import gpt2 as gpt2_module

from experiments.reach.public_step import VOCABULARY, PublicStep, classes, features, tokens


def _reshape(a: Any, shape: Any = None, newshape: Any = None, **options: Any) -> jax.Array:
    return jnp.reshape(a, newshape if shape is None else shape, **options)


gpt2_module.jnp = SimpleNamespace(**{**vars(jnp), "reshape": _reshape})


class _State(TrainState):
    batch_stats: Any = None


def resnet18() -> PublicStep:
    """training/resnet: ResNet18 with batch normalization.

    Images of 32 x 32 end in one pixel, whose variance over a microbatch is ill-conditioned.
    """
    model = fm.ResNet18(output="logits", pretrained=None, normalize=False, num_classes=10)
    images = features(64, 64, 3)
    variables = model.init(jax.random.key(0), images)
    state = _State.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optax.sgd(0.1, momentum=0.9),
    )

    def train_step(state, batch):
        def loss_fn(params):
            logits, new_model_state = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                batch["image"],
                train=True,
                mutable=["batch_stats"],
            )
            one_hot = jax.nn.one_hot(batch["label"], 10)
            return optax.softmax_cross_entropy(logits, one_hot).mean(), (new_model_state, logits)

        (loss, (new_model_state, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            state.params
        )
        state = state.apply_gradients(grads=grads, batch_stats=new_model_state["batch_stats"])
        accuracy = (logits.argmax(-1) == batch["label"]).mean()
        return state, {"loss": loss, "accuracy": accuracy}

    batch = {"image": images, "label": classes()}
    return PublicStep(train_step, (state, batch), uses_batch_statistics=True)


class _LanguageModel(nn.Module):
    """GPT2Model with a head: GPT2LMHeadModel works with pretrained weights only."""

    config: Any

    @nn.compact
    def __call__(self, ids, training=False):
        output = gpt2_module.GPT2Model(self.config)(ids, training=training)
        return nn.Dense(VOCABULARY, use_bias=False)(output["last_hidden_state"])


def gpt2() -> PublicStep:
    """GPT2Model with dropout."""
    config = SimpleNamespace(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_inner=None,
        activation_function="gelu_new",
        attn_pdrop=0.1,
        embd_pdrop=0.1,
        resid_pdrop=0.1,
        scale_attn_weights=True,
        layer_norm_epsilon=1e-5,
        initializer_range=0.02,
    )
    model = _LanguageModel(config)
    ids = tokens()
    params = model.init(jax.random.key(0), ids)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))

    def train_step(state, batch, rng):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch, training=True, rngs={"dropout": rng})
            losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch[:, 1:])
            return losses.mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return PublicStep(train_step, (state, ids, jax.random.key(1)))
