"""Flax models of transformers 4.57 with an encoder and a decoder, or with two encoders.

T5, mT5 and LongT5 are left out: they call `jnp.clip` with an argument that today's JAX lacks.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import transformers as hf

from experiments.reach.libraries.transformers_training import (
    ENCODER,
    GPT2,
    SEQ2SEQ,
    VISION,
    mean_of,
    texts,
    train,
)
from experiments.reach.public_step import LENGTH, PublicStep, features, tokens


def _summarization(model: Any, **inputs: jax.Array) -> PublicStep:
    """Return the step of run_summarization_flax.py, with its label smoothing and its mask."""
    target = tokens(1)
    batch = {
        **(inputs or texts(tokens())),
        "decoder_input_ids": jnp.roll(target, 1, 1),
        "decoder_attention_mask": (target != 5).astype(jnp.int32),
        "labels": target,
    }

    def loss(outputs, batch):
        labels, logits = batch["labels"], outputs.logits
        vocab_size, factor = logits.shape[-1], 0.1
        confidence = 1.0 - factor
        low = (1.0 - confidence) / (vocab_size - 1)
        constant = -(
            confidence * jnp.log(confidence) + (vocab_size - 1) * low * jnp.log(low + 1e-20)
        )
        hot = jax.nn.one_hot(labels, vocab_size) * (confidence - low) + low
        losses = optax.softmax_cross_entropy(logits, hot) - constant
        return mean_of(losses, batch["decoder_attention_mask"])

    return train(model, batch, loss)


def pegasus() -> PublicStep:
    """FlaxPegasusForConditionalGeneration with sinusoidal positions."""
    config = hf.PegasusConfig(**SEQ2SEQ, max_position_embeddings=32)
    return _summarization(hf.FlaxPegasusForConditionalGeneration(config, (1, LENGTH)))


def marian() -> PublicStep:
    """FlaxMarianMTModel, which translates."""
    config = hf.MarianConfig(**SEQ2SEQ, max_position_embeddings=32, pad_token_id=0)
    return _summarization(hf.FlaxMarianMTModel(config, (1, LENGTH)))


def mbart() -> PublicStep:
    """FlaxMBartForConditionalGeneration with normalization before each layer."""
    config = hf.MBartConfig(**SEQ2SEQ, max_position_embeddings=32)
    return _summarization(hf.FlaxMBartForConditionalGeneration(config, (1, LENGTH)))


def blenderbot() -> PublicStep:
    """FlaxBlenderbotForConditionalGeneration."""
    config = hf.BlenderbotConfig(**SEQ2SEQ, max_position_embeddings=32)
    return _summarization(hf.FlaxBlenderbotForConditionalGeneration(config, (1, LENGTH)))


def bert2bert() -> PublicStep:
    """FlaxEncoderDecoderModel of two BERTs with cross attention."""
    config = hf.EncoderDecoderConfig.from_encoder_decoder_configs(
        hf.BertConfig(**ENCODER), hf.BertConfig(**ENCODER)
    )
    return _summarization(hf.FlaxEncoderDecoderModel(config, ((1, LENGTH), (1, LENGTH))))


def vit_gpt2() -> PublicStep:
    """FlaxVisionEncoderDecoderModel, which describes images."""
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        hf.ViTConfig(**VISION), hf.GPT2Config(**GPT2)
    )
    model = hf.FlaxVisionEncoderDecoderModel(config, ((1, 16, 16, 3), (1, LENGTH)))
    return _summarization(model, pixel_values=features(3, 16, 16))


def _contrastive(model: Any) -> PublicStep:
    """Return the step of run_hybrid_clip.py: images and texts of the batch, each with all."""

    def cross_entropy(logits):
        return -jnp.diag(jax.nn.log_softmax(logits, axis=-1)).mean()

    def loss(outputs, batch):
        similarity = outputs.logits_per_text
        return (cross_entropy(similarity) + cross_entropy(similarity.T)) / 2

    return train(model, texts(tokens(), pixel_values=features(3, 16, 16)), loss)


def clip() -> PublicStep:
    """FlaxCLIPModel."""
    text = {**ENCODER, "max_position_embeddings": LENGTH, "eos_token_id": 63}
    config = hf.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=16)
    return _contrastive(hf.FlaxCLIPModel(config, ((1, LENGTH), (1, 16, 16, 3))))


def vit_bert() -> PublicStep:
    """FlaxVisionTextDualEncoderModel of a ViT and a BERT."""
    config = hf.VisionTextDualEncoderConfig.from_vision_text_configs(
        hf.ViTConfig(**VISION), hf.BertConfig(**ENCODER), projection_dim=16
    )
    return _contrastive(hf.FlaxVisionTextDualEncoderModel(config, ((1, LENGTH), (1, 16, 16, 3))))
