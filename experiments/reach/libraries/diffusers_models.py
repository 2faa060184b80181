"""Flax models of diffusers, trained as in its examples."""

import jax
import jax.numpy as jnp
import optax
from diffusers import FlaxControlNetModel, FlaxDDPMScheduler, FlaxUNet2DConditionModel
from diffusers.models.vae_flax import FlaxAutoencoderKL
from flax.training.train_state import TrainState

from experiments.reach.public_step import PublicStep, features

_SIZES = {
    "sample_size": 8,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
}


def _state(model, params) -> TrainState:
    transform = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2))
    return TrainState.create(apply_fn=model.__call__, params=params, tx=transform)


def unet() -> PublicStep:
    """examples/text_to_image/train_text_to_image_flax.py from latents and text on."""
    unet = FlaxUNet2DConditionModel(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        dropout=0.1,
        **_SIZES,
    )
    state = _state(unet, unet.init_weights(jax.random.key(0)))
    noise_scheduler = FlaxDDPMScheduler(num_train_timesteps=1000)
    noise_state = noise_scheduler.create_state()

    def train_step(state, batch, train_rng):
        dropout_rng, sample_rng, new_rng = jax.random.split(train_rng, 3)

        def compute_loss(params):
            latents = batch["latents"]
            noise_rng, timestep_rng = jax.random.split(sample_rng)
            noise = jax.random.normal(noise_rng, latents.shape)
            timesteps = jax.random.randint(timestep_rng, (latents.shape[0],), 0, 1000)
            noisy = noise_scheduler.add_noise(noise_state, latents, noise, timesteps)
            predicted = unet.apply(
                {"params": params},
                noisy,
                timesteps,
                batch["text"],
                train=True,
                rngs={"dropout": dropout_rng},
            ).sample
            return ((noise - predicted) ** 2).mean()

        loss, grad = jax.value_and_grad(compute_loss)(state.params)
        return state.apply_gradients(grads=grad), {"loss": loss}, new_rng

    batch = {"latents": features(4, 8, 8), "text": features(16, 16, seed=1)}
    return PublicStep(train_step, (state, batch, jax.random.key(1)))


def controlnet() -> PublicStep:
    """examples/controlnet/train_controlnet_flax.py: the UNet is frozen."""
    unet = FlaxUNet2DConditionModel(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        **_SIZES,
    )
    controlnet = FlaxControlNetModel(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        conditioning_embedding_out_channels=(8, 16, 32, 96),
        **_SIZES,
    )
    unet_params = unet.init_weights(jax.random.key(0))
    params = controlnet.init_weights(jax.random.key(1))
    state = _state(controlnet, params)

    def train_step(state, unet_params, batch):
        def compute_loss(params):
            down, mid = controlnet.apply(
                {"params": params},
                batch["noisy"],
                batch["timesteps"],
                batch["text"],
                batch["conditioning"],
                train=True,
                return_dict=False,
            )
            predicted = unet.apply(
                {"params": unet_params},
                batch["noisy"],
                batch["timesteps"],
                batch["text"],
                down_block_additional_residuals=down,
                mid_block_additional_residual=mid,
            ).sample
            return ((batch["noise"] - predicted) ** 2).mean()

        loss, grad = jax.value_and_grad(compute_loss)(state.params)
        return state.apply_gradients(grads=grad), loss

    batch = {
        "noisy": features(4, 8, 8),
        "noise": features(4, 8, 8, seed=1),
        "text": features(16, 16, seed=2),
        "conditioning": features(3, 64, 64, seed=3),
        "timesteps": jnp.arange(8) * 100,
    }
    return PublicStep(train_step, (state, unet_params, batch))


def autoencoder() -> PublicStep:
    """The variational autoencoder of Stable Diffusion, with the loss of its training."""
    vae = FlaxAutoencoderKL(
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        sample_size=8,
    )
    state = _state(vae, vae.init_weights(jax.random.key(0)))

    def train_step(state, images, key):
        def compute_loss(params):
            posterior = vae.apply({"params": params}, images, method=vae.encode).latent_dist
            latents = posterior.sample(key)
            latents = jnp.transpose(latents, (0, 3, 1, 2))
            decoded = vae.apply({"params": params}, latents, method=vae.decode).sample
            return jnp.mean(jnp.abs(decoded - images)) + 1e-2 * posterior.kl().mean()

        loss, grad = jax.value_and_grad(compute_loss)(state.params)
        return state.apply_gradients(grads=grad), loss

    return PublicStep(train_step, (state, features(3, 8, 8), jax.random.key(1)))
