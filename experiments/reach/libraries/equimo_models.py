"""Vision models of equimo, trained as Equinox models are."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from equimo.vision.models.convnext import ConvNeXt
from equimo.vision.models.mlla import Mlla
from equimo.vision.models.mobilenet import mobilenetv3_small
from equimo.vision.models.vit import VisionTransformer
from equimo.vision.models.vssd import Vssd

from experiments.reach.public_step import PublicStep, classes, features


def _training(model, size=32) -> PublicStep:
    optimizer = optax.sgd(1e-2, momentum=0.9)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_value_and_grad
    def compute_loss(model, images, labels, keys):
        logits = jax.vmap(model)(images, key=keys)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    def train_step(model, state, images, labels, keys):
        loss, grads = compute_loss(model, images, labels, keys)
        updates, state = optimizer.update(grads, state, model)
        return eqx.apply_updates(model, updates), state, loss

    keys = jr.split(jr.key(1), len(classes()))
    args = (model, state, features(3, size, size), classes(), keys)
    return PublicStep(train_step, args, jit=eqx.filter_jit, options={"batch_argnums": (2, 3, 4)})


def vit() -> PublicStep:
    """A vision transformer with registers and stochastic depth."""
    return _training(VisionTransformer(
        img_size=32, in_channels=3, dim=32, patch_size=8, num_heads=4, depths=[4],
        drop_path_rate=0.1, num_classes=10, key=jr.key(0),
    ))  # fmt: skip


def convnext() -> PublicStep:
    """ConvNeXt V2: global response normalization."""
    return _training(ConvNeXt(
        3, depths=[1, 1, 1, 1], dims=[8, 16, 32, 32], use_grn=True, layer_scale_init_value=None,
        num_classes=10, key=jr.key(0),
    ))  # fmt: skip


def mlla() -> PublicStep:
    """Linear attention as in Mamba."""
    return _training(Mlla(
        img_size=32, in_channels=3, dim=16, patch_size=4, depths=[1, 1], num_heads=[2, 4],
        num_classes=10, key=jr.key(0),
    ))  # fmt: skip


def vssd() -> PublicStep:
    """State space duality without causality."""
    return _training(Vssd(
        img_size=32, in_channels=3, dim=16, patch_size=4, depths=[1, 1], num_heads=[2, 4],
        attentions_layers=("mamba2mixer", "attention"), num_classes=10, key=jr.key(0),
    ))  # fmt: skip


def mobilenet() -> PublicStep:
    """MobileNet V3."""
    return _training(mobilenetv3_small(num_classes=10, key=jr.key(0)))
