"""Equivariant networks of e3nn-jax."""

import e3nn_jax as e3nn
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from experiments.reach.public_step import PublicStep, classes, features


class _EquivariantConvolution(nn.Module):
    irreps: str

    @nn.compact
    def __call__(self, nodes, vectors):
        # nodes: [atoms] of irreps; vectors: [atoms, atoms, 3]
        harmonics = e3nn.spherical_harmonics("0e + 1o + 2e", vectors, True, "component")
        lengths = jnp.linalg.norm(vectors.array + 1e-6, axis=-1, keepdims=True)
        radial = e3nn.bessel(lengths[..., 0], 8, 4.0)
        messages = e3nn.tensor_product(nodes[None, :, :], harmonics, filter_ir_out=self.irreps)
        weights = e3nn.flax.MultiLayerPerceptron((16, messages.irreps.num_irreps), jax.nn.silu)
        messages = messages * weights(radial)
        summed = e3nn.sum(messages, axis=1) / vectors.shape[0] ** 0.5
        return e3nn.gate(e3nn.flax.Linear(self.irreps)(summed))


class _PointNetwork(nn.Module):
    @nn.compact
    def __call__(self, positions):
        vectors = e3nn.IrrepsArray("1o", positions[None] - positions[:, None])
        nodes = e3nn.IrrepsArray("0e", jnp.ones((len(positions), 1)))
        for _ in range(3):
            nodes = _EquivariantConvolution("16x0e + 8x0e + 8x1o")(nodes, vectors)
        return e3nn.flax.Linear("10x0e")(e3nn.mean(nodes, axis=0)).array


def classifier() -> PublicStep:
    """A message-passing network over all pairs of points that classifies clouds of them."""
    network = _PointNetwork()
    params = network.init(jax.random.key(0), features(6, 3)[0])
    optimizer = optax.sgd(1e-2)

    def train_step(params, state, positions, labels):
        def compute_loss(params):
            logits = jax.vmap(lambda x: network.apply(params, x))(positions)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return jnp.mean(loss), jnp.mean(jnp.argmax(logits, 1) == labels)

        (loss, accuracy), grads = jax.value_and_grad(compute_loss, has_aux=True)(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, loss, accuracy

    return PublicStep(train_step, (params, optimizer.init(params), features(6, 3), classes()))
