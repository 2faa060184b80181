"""The Flax models of transformers 4.57, trained as in its examples."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import transformers as hf
from flax.training.train_state import TrainState

from experiments.reach.libraries.transformers_training import (
    DECODER,
    ENCODER,
    SEQ2SEQ,
    VISION,
    labelled,
    language_model,
    masked_loss,
    masked_model,
    next_token,
    train,
)
from experiments.reach.public_step import LENGTH, PublicStep, classes, features, tokens


def bert() -> PublicStep:
    """FlaxBertForMaskedLM, as run_mlm_flax.py trains it."""
    return masked_model(hf.FlaxBertForMaskedLM(hf.BertConfig(**ENCODER), (1, LENGTH)))


def bert_classifier() -> PublicStep:
    """FlaxBertForSequenceClassification, as run_flax_glue.py trains it."""
    ids = tokens()
    model = hf.FlaxBertForSequenceClassification(
        hf.BertConfig(**ENCODER, num_labels=3), (1, LENGTH)
    )
    batch = {"input_ids": ids, "attention_mask": jnp.ones_like(ids), "labels": classes(3)}
    return train(model, batch, labelled)


def albert() -> PublicStep:
    """FlaxAlbertForMaskedLM: all layers share their weights."""
    return masked_model(
        hf.FlaxAlbertForMaskedLM(hf.AlbertConfig(**ENCODER, embedding_size=16), (1, LENGTH))
    )


def roberta() -> PublicStep:
    """FlaxRobertaForMaskedLM, whose positions depend on the tokens."""
    return masked_model(hf.FlaxRobertaForMaskedLM(hf.RobertaConfig(**ENCODER), (1, LENGTH)))


def roberta_prelayernorm() -> PublicStep:
    """FlaxRobertaPreLayerNormForMaskedLM."""
    config = hf.RobertaPreLayerNormConfig(**ENCODER)
    return masked_model(hf.FlaxRobertaPreLayerNormForMaskedLM(config, (1, LENGTH)))


def bert_span() -> PublicStep:
    """FlaxBertForQuestionAnswering, as run_qa.py trains it."""
    ids = tokens()
    model = hf.FlaxBertForQuestionAnswering(hf.BertConfig(**ENCODER), (1, LENGTH))
    batch = {
        "input_ids": ids,
        "attention_mask": jnp.ones_like(ids),
        "labels": jnp.stack([classes(8), 8 + classes(8)], axis=1),
    }

    def loss(outputs, batch):
        start, end = (
            optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"][:, k]).mean()
            for k, logits in enumerate((outputs.start_logits, outputs.end_logits))
        )
        return (start + end) / 2

    return train(model, batch, loss)


def bert_choices() -> PublicStep:
    """FlaxBertForMultipleChoice: each example has four texts."""
    ids = tokens(length=4 * LENGTH).reshape(-1, 4, LENGTH)
    model = hf.FlaxBertForMultipleChoice(hf.BertConfig(**ENCODER), (1, 4, LENGTH))
    batch = {"input_ids": ids, "attention_mask": jnp.ones_like(ids), "labels": classes(4)}
    return train(model, batch, labelled)


def bert_pretraining() -> PublicStep:
    """FlaxBertForPreTraining: masked tokens and whether a sentence is the next one."""
    ids = tokens()
    masked = ids % 5 == 0
    model = hf.FlaxBertForPreTraining(hf.BertConfig(**ENCODER), (1, LENGTH))
    labels = jnp.concatenate([jnp.where(masked, ids, 0), classes(2)[:, None]], axis=1)
    batch = {
        "input_ids": jnp.where(masked, 2, ids),
        "attention_mask": jnp.ones_like(ids),
        "labels": labels,
    }

    def loss(outputs, batch):
        targets, following = batch["labels"][:, :-1], batch["labels"][:, -1]
        chosen = jnp.where(targets > 0, 1.0, 0.0)
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs.prediction_logits, targets)
        next_ = optax.softmax_cross_entropy_with_integer_labels(
            outputs.seq_relationship_logits, following
        )
        return (losses * chosen).sum() / chosen.sum() + next_.mean()

    return train(model, batch, loss)


def electra_detector() -> PublicStep:
    """FlaxElectraForPreTraining, which finds replaced tokens."""
    config = hf.ElectraConfig(**ENCODER, embedding_size=32)
    ids = tokens()
    batch = {"input_ids": ids, "attention_mask": jnp.ones_like(ids), "labels": ids % 3 == 0}

    def loss(outputs, batch):
        labels = batch["labels"].astype(jnp.float32)
        losses = optax.sigmoid_binary_cross_entropy(outputs.logits, labels)
        return (losses * batch["attention_mask"]).sum() / batch["attention_mask"].sum()

    return train(hf.FlaxElectraForPreTraining(config, (1, LENGTH)), batch, loss)


def bert_tokens() -> PublicStep:
    """FlaxBertForTokenClassification, as run_flax_ner.py trains it, with ignored tokens."""
    ids = tokens()
    model = hf.FlaxBertForTokenClassification(hf.BertConfig(**ENCODER, num_labels=5), (1, LENGTH))
    batch = {
        "input_ids": ids,
        "attention_mask": jnp.ones_like(ids),
        "labels": jnp.where(ids % 4 == 0, -100, ids % 5),
    }

    def loss(outputs, batch):
        labels = batch["labels"]
        valid = labels >= 0
        losses = optax.softmax_cross_entropy_with_integer_labels(
            outputs.logits, jnp.where(valid, labels, 0)
        )
        return jnp.where(valid, losses, 0.0).sum() / valid.sum()

    return train(model, batch, loss)


def distilbert() -> PublicStep:
    """FlaxDistilBertForMaskedLM."""
    config = hf.DistilBertConfig(
        vocab_size=64, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=32
    )
    return masked_model(hf.FlaxDistilBertForMaskedLM(config, (1, LENGTH)))


def roformer() -> PublicStep:
    """FlaxRoFormerForMaskedLM with rotary positions."""
    return masked_model(hf.FlaxRoFormerForMaskedLM(hf.RoFormerConfig(**ENCODER), (1, LENGTH)))


def dinov2() -> PublicStep:
    """FlaxDinov2ForImageClassification with stochastic depth."""
    config = hf.Dinov2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        mlp_ratio=2,
        image_size=16,
        patch_size=4,
        num_labels=10,
        drop_path_rate=0.1,
    )
    model = hf.FlaxDinov2ForImageClassification(config, (1, 16, 16, 3))
    return train(model, {"pixel_values": features(3, 16, 16), "labels": classes()}, labelled)


def big_bird() -> PublicStep:
    """FlaxBigBirdForMaskedLM with block-sparse attention."""
    config = hf.BigBirdConfig(
        **{**ENCODER, "max_position_embeddings": 64}, block_size=2, num_random_blocks=1
    )
    ids = tokens(length=32)
    batch = {"input_ids": ids, "attention_mask": jnp.ones_like(ids), "labels": ids}
    state = hf.FlaxBigBirdForMaskedLM(config, (1, 32))
    step = train(state, batch, masked_loss)

    def train_step(state, batch, dropout_rng):
        dropout_rng, indices_rng = jax.random.split(dropout_rng)

        def loss_fn(params):
            outputs = state.apply_fn(
                batch["input_ids"],
                batch["attention_mask"],
                params=params,
                dropout_rng=dropout_rng,
                indices_rng=indices_rng,
                train=True,
            )
            return masked_loss(outputs, batch)

        value, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": value}

    return PublicStep(train_step, step.args)


def electra() -> PublicStep:
    """FlaxElectraForMaskedLM."""
    config = hf.ElectraConfig(**ENCODER, embedding_size=32)
    return masked_model(hf.FlaxElectraForMaskedLM(config, (1, LENGTH)))


def gpt2() -> PublicStep:
    """FlaxGPT2LMHeadModel, as run_clm_flax.py trains it."""
    config = hf.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    return language_model(hf.FlaxGPT2LMHeadModel(config, (1, LENGTH)))


def gptj() -> PublicStep:
    """FlaxGPTJForCausalLM with dropout."""
    config = hf.GPTJConfig(
        vocab_size=64,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=4,
        rotary_dim=4,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.1,
    )
    return language_model(hf.FlaxGPTJForCausalLM(config, (1, LENGTH)))


def gpt_neo() -> PublicStep:
    """FlaxGPTNeoForCausalLM with a global and a local layer."""
    config = hf.GPTNeoConfig(
        vocab_size=64,
        max_position_embeddings=32,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
        embed_dropout=0.1,
        resid_dropout=0.1,
        attention_dropout=0.1,
    )
    return language_model(hf.FlaxGPTNeoForCausalLM(config, (1, LENGTH)))


def llama() -> PublicStep:
    """FlaxLlamaForCausalLM with grouped queries."""
    return language_model(hf.FlaxLlamaForCausalLM(hf.LlamaConfig(**DECODER), (1, LENGTH)))


def mistral() -> PublicStep:
    """FlaxMistralForCausalLM with a sliding window; its dropout fails in the library itself."""
    config = hf.MistralConfig(**{**DECODER, "attention_dropout": 0.0}, sliding_window=8)
    return language_model(hf.FlaxMistralForCausalLM(config, (1, LENGTH)))


def gemma() -> PublicStep:
    """FlaxGemmaForCausalLM with tied embeddings."""
    config = hf.GemmaConfig(**DECODER, head_dim=8)
    return language_model(hf.FlaxGemmaForCausalLM(config, (1, LENGTH)))


def opt() -> PublicStep:
    """FlaxOPTForCausalLM with dropout."""
    config = hf.OPTConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=64,
        max_position_embeddings=32,
        word_embed_proj_dim=32,
    )
    ids = tokens()
    batch = {"input_ids": ids, "attention_mask": jnp.ones_like(ids), "labels": ids}
    model = hf.FlaxOPTForCausalLM(config, (1, LENGTH))
    return train(model, batch, next_token, {"deterministic": False})


def xglm() -> PublicStep:
    """FlaxXGLMForCausalLM with sinusoidal positions and dropout."""
    config = hf.XGLMConfig(
        vocab_size=64,
        max_position_embeddings=32,
        d_model=32,
        ffn_dim=64,
        num_layers=2,
        attention_heads=4,
        layerdrop=0.0,
    )
    return language_model(hf.FlaxXGLMForCausalLM(config, (1, LENGTH)))


def bloom() -> PublicStep:
    """FlaxBloomForCausalLM with ALiBi and dropout."""
    config = hf.BloomConfig(
        vocab_size=64,
        hidden_size=32,
        n_layer=2,
        n_head=4,
        hidden_dropout=0.1,
        attention_dropout=0.1,
    )
    return language_model(hf.FlaxBloomForCausalLM(config, (1, LENGTH)))


def bart() -> PublicStep:
    """FlaxBartForConditionalGeneration, as run_summarization_flax.py trains it."""
    config = hf.BartConfig(**SEQ2SEQ, max_position_embeddings=32)
    model = hf.FlaxBartForConditionalGeneration(config, (1, LENGTH))
    ids, target = tokens(), tokens(1)
    batch = {
        "input_ids": ids,
        "attention_mask": jnp.ones_like(ids),
        "decoder_input_ids": jnp.roll(target, 1, 1),
        "decoder_attention_mask": jnp.ones_like(target),
        "labels": target,
    }
    return train(model, batch, labelled)


def vit() -> PublicStep:
    """FlaxViTForImageClassification with dropout."""
    config = hf.ViTConfig(
        **VISION,
        num_labels=10,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    batch = {"pixel_values": features(3, 16, 16), "labels": classes()}
    return train(hf.FlaxViTForImageClassification(config), batch, labelled)


def beit() -> PublicStep:
    """FlaxBeitForImageClassification with relative positions and stochastic depth."""
    config = hf.BeitConfig(
        **VISION,
        num_labels=10,
        drop_path_rate=0.1,
        use_relative_position_bias=True,
        layer_scale_init_value=0.1,
    )
    batch = {"pixel_values": features(3, 16, 16), "labels": classes()}
    return train(hf.FlaxBeitForImageClassification(config, (1, 16, 16, 3)), batch, labelled)


def beit_pretraining() -> PublicStep:
    """FlaxBeitForMaskedImageModeling: the visual tokens of masked patches."""
    config = hf.BeitConfig(
        vocab_size=32,
        **VISION,
        use_mask_token=True,
    )
    model = hf.FlaxBeitForMaskedImageModeling(config, (1, 16, 16, 3))
    masked = tokens(length=16) % 3 == 0
    batch = {
        "pixel_values": features(3, 16, 16),
        "bool_masked_pos": masked,
        "labels": tokens(1, length=16, vocabulary=32),
    }

    def loss(outputs, batch):
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs.logits, batch["labels"])
        return (losses * batch["bool_masked_pos"]).sum() / batch["bool_masked_pos"].sum()

    return train(model, batch, loss)


def resnet() -> PublicStep:
    """FlaxResNetForImageClassification, whose step returns new statistics of the batch."""
    config = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=10
    )
    model: Any = hf.FlaxResNetForImageClassification(config, (1, 16, 16, 3))

    class State(TrainState):
        batch_stats: Any = None

    state = State.create(
        apply_fn=model.__call__,
        params=model.params["params"],
        batch_stats=model.params["batch_stats"],
        tx=optax.sgd(0.1, momentum=0.9),
    )

    def train_step(state, batch):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            outputs, stats = state.apply_fn(batch["pixel_values"], params=variables, train=True)
            return labelled(outputs, batch), stats

        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads, batch_stats=stats["batch_stats"])
        return state, {"loss": loss}

    batch = {"pixel_values": features(3, 16, 16), "labels": classes()}
    return PublicStep(train_step, (state, batch), uses_batch_statistics=True)


def whisper() -> PublicStep:
    """FlaxWhisperForConditionalGeneration with dropout."""
    config = hf.WhisperConfig(
        **SEQ2SEQ,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
        dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = hf.FlaxWhisperForConditionalGeneration(config, (1, 8, 32))
    target = tokens()
    batch = {
        "input_features": features(8, 32),
        "decoder_input_ids": jnp.roll(target, 1, 1),
        "labels": target,
    }
    return train(model, batch, labelled)


def wav2vec2() -> PublicStep:
    """FlaxWav2Vec2ForCTC with dropout and optax's CTC loss."""
    config = hf.Wav2Vec2Config(
        vocab_size=16,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        conv_dim=(16, 16),
        conv_stride=(4, 4),
        conv_kernel=(8, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )
    model = hf.FlaxWav2Vec2ForCTC(config, (1, 256))

    def loss(outputs, batch):
        frames = jnp.zeros(outputs.logits.shape[:2])
        return optax.ctc_loss(
            outputs.logits, frames, batch["labels"], jnp.zeros(batch["labels"].shape)
        ).mean()

    batch = {"input_values": features(256), "labels": tokens(length=4, vocabulary=16)}
    return train(model, batch, loss)
