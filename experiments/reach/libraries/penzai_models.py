"""Models of penzai, trained as in its documentation."""

import jax
import optax
from penzai import pz
from penzai.models import simple_mlp
from penzai.models.transformer.variants import llamalike_common

from experiments.reach.public_step import VOCABULARY, PublicStep, classes, features, tokens


def mlp() -> PublicStep:
    """simple_mlp.DropoutMLP with a random stream, its variables unbound around the gradient."""
    model = simple_mlp.DropoutMLP.from_config(
        name="mlp", init_base_rng=jax.random.key(0), feature_sizes=[8, 32, 32, 10], drop_rate=0.1
    )
    stateless, params = pz.unbind_params(model, freeze=True)
    optimizer = optax.adam(1e-3)

    def train_step(state, batch, rng):
        params, opt_state = state

        def loss_fn(params):
            model = pz.bind_variables(stateless, params)
            xs = pz.nx.wrap(batch["x"], "batch", "features")
            stream = pz.RandomStream(rng, offset=pz.StateVariable(0))
            logits = model(xs, random_stream=stream).unwrap("batch", "features")
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    batch = {"x": features(8), "y": classes()}
    return PublicStep(train_step, ((params, optimizer.init(params)), batch, jax.random.key(1)))


def llama() -> PublicStep:
    """A Llama-like transformer of named axes, its parameters unbound around the gradient."""
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=2,
        query_head_multiplier=2,
        embedding_dim=32,
        projection_dim=8,
        mlp_hidden_dim=64,
        num_decoder_blocks=2,
        vocab_size=VOCABULARY,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )
    model = llamalike_common.build_llamalike_transformer(config, init_base_rng=jax.random.key(0))
    stateless, params = pz.unbind_params(model, freeze=True)
    optimizer = optax.adam(1e-3)

    def train_step(state, batch):
        params, opt_state = state

        def loss_fn(params):
            model = pz.bind_variables(stateless, params)
            ids = pz.nx.wrap(batch, "batch", "seq")
            positions = pz.nx.arange("seq", batch.shape[1])
            logits = model(ids, token_positions=positions).unwrap("batch", "seq", "vocabulary")
            losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch[:, 1:])
            return losses.mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return PublicStep(train_step, ((params, optimizer.init(params)), tokens()))
