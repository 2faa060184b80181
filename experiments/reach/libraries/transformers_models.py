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
    GPT2,
    SEQ2SEQ,
    VISION,
    cross_entropy,
    image_classifier,
    labelled,
    language_model,
    masked_loss,
    masked_model,
    mean_of,
    next_token,
    texts,
    train,
)
from experiments.reach.public_step import LENGTH, PublicStep, classes, features, tokens


def bert() -> PublicStep:
    """FlaxBertForMaskedLM, as run_mlm_flax.py trains it."""
    return masked_model(hf.FlaxBertForMaskedLM(hf.BertConfig(**ENCODER), (1, LENGTH)))


def bert_classifier() -> PublicStep:
    """FlaxBertForSequenceClassification, as run_flax_glue.py trains it."""
    config = hf.BertConfig(**ENCODER, num_labels=3)
    model = hf.FlaxBertForSequenceClassification(config, (1, LENGTH))
    return train(model, texts(tokens(), labels=classes(3)), labelled)


def albert() -> PublicStep:
    """FlaxAlbertForMaskedLM: all layers share their weights."""
    config = hf.AlbertConfig(**ENCODER, embedding_size=16)
    return masked_model(hf.FlaxAlbertForMaskedLM(config, (1, LENGTH)))


def roberta() -> PublicStep:
    """FlaxRobertaForMaskedLM, whose positions depend on the tokens."""
    return masked_model(hf.FlaxRobertaForMaskedLM(hf.RobertaConfig(**ENCODER), (1, LENGTH)))


def roberta_prelayernorm() -> PublicStep:
    """FlaxRobertaPreLayerNormForMaskedLM."""
    config = hf.RobertaPreLayerNormConfig(**ENCODER)
    return masked_model(hf.FlaxRobertaPreLayerNormForMaskedLM(config, (1, LENGTH)))


def bert_span() -> PublicStep:
    """FlaxBertForQuestionAnswering, as run_qa.py trains it."""
    model = hf.FlaxBertForQuestionAnswering(hf.BertConfig(**ENCODER), (1, LENGTH))

    def loss(outputs, batch):
        start = cross_entropy(outputs.start_logits, batch["labels"][:, 0]).mean()
        end = cross_entropy(outputs.end_logits, batch["labels"][:, 1]).mean()
        return (start + end) / 2

    spans = jnp.stack([classes(8), 8 + classes(8)], axis=1)
    return train(model, texts(tokens(), labels=spans), loss)


def bert_choices() -> PublicStep:
    """FlaxBertForMultipleChoice: each example has four texts."""
    ids = tokens(length=4 * LENGTH).reshape(-1, 4, LENGTH)
    model = hf.FlaxBertForMultipleChoice(hf.BertConfig(**ENCODER), (1, 4, LENGTH))
    return train(model, texts(ids, labels=classes(4)), labelled)


def bert_pretraining() -> PublicStep:
    """FlaxBertForPreTraining: masked tokens and whether a sentence is the next one."""
    ids = tokens()
    masked = ids % 5 == 0
    model = hf.FlaxBertForPreTraining(hf.BertConfig(**ENCODER), (1, LENGTH))

    def loss(outputs, batch):
        targets, following = batch["labels"][:, :-1], batch["labels"][:, -1]
        chosen = jnp.where(targets > 0, 1.0, 0.0)
        losses = cross_entropy(outputs.prediction_logits, targets)
        next_ = cross_entropy(outputs.seq_relationship_logits, following)
        return mean_of(losses, chosen) + next_.mean()

    labels = jnp.concatenate([jnp.where(masked, ids, 0), classes(2)[:, None]], axis=1)
    return train(model, texts(jnp.where(masked, 2, ids), labels=labels), loss)


def electra_detector() -> PublicStep:
    """FlaxElectraForPreTraining, which finds replaced tokens."""
    config = hf.ElectraConfig(**ENCODER, embedding_size=32)
    ids = tokens()

    def loss(outputs, batch):
        labels = batch["labels"].astype(jnp.float32)
        losses = optax.sigmoid_binary_cross_entropy(outputs.logits, labels)
        return mean_of(losses, batch["attention_mask"])

    model = hf.FlaxElectraForPreTraining(config, (1, LENGTH))
    return train(model, texts(ids, labels=ids % 3 == 0), loss)


def bert_tokens() -> PublicStep:
    """FlaxBertForTokenClassification, as run_flax_ner.py trains it, with ignored tokens."""
    ids = tokens()
    model = hf.FlaxBertForTokenClassification(hf.BertConfig(**ENCODER, num_labels=5), (1, LENGTH))

    def loss(outputs, batch):
        labels = batch["labels"]
        valid = labels >= 0
        losses = cross_entropy(outputs.logits, jnp.where(valid, labels, 0))
        return jnp.where(valid, losses, 0.0).sum() / valid.sum()

    return train(model, texts(ids, labels=jnp.where(ids % 4 == 0, -100, ids % 5)), loss)


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
    return image_classifier(hf.FlaxDinov2ForImageClassification(config, (1, 16, 16, 3)))


def big_bird() -> PublicStep:
    """FlaxBigBirdForMaskedLM with block-sparse attention."""
    config = hf.BigBirdConfig(
        **{**ENCODER, "max_position_embeddings": 64}, block_size=2, num_random_blocks=1
    )
    ids = tokens(length=32)
    step = train(hf.FlaxBigBirdForMaskedLM(config, (1, 32)), texts(ids, labels=ids), masked_loss)

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
    return language_model(hf.FlaxGPT2LMHeadModel(hf.GPT2Config(**GPT2), (1, LENGTH)))


def gptj() -> PublicStep:
    """FlaxGPTJForCausalLM with dropout."""
    config = hf.GPTJConfig(**GPT2, rotary_dim=4, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
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
    model = hf.FlaxOPTForCausalLM(config, (1, LENGTH))
    return train(model, texts(ids, labels=ids), next_token, {"deterministic": False})


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
    target = tokens(1)
    batch = {
        "decoder_input_ids": jnp.roll(target, 1, 1),
        "decoder_attention_mask": jnp.ones_like(target),
        "labels": target,
    }
    return train(model, texts(tokens(), **batch), labelled)


def vit() -> PublicStep:
    """FlaxViTForImageClassification with dropout."""
    config = hf.ViTConfig(
        **VISION, num_labels=10, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1
    )
    return image_classifier(hf.FlaxViTForImageClassification(config))


def beit() -> PublicStep:
    """FlaxBeitForImageClassification with relative positions and stochastic depth."""
    config = hf.BeitConfig(
        **VISION,
        num_labels=10,
        drop_path_rate=0.1,
        use_relative_position_bias=True,
        layer_scale_init_value=0.1,
    )
    return image_classifier(hf.FlaxBeitForImageClassification(config, (1, 16, 16, 3)))


def beit_pretraining() -> PublicStep:
    """FlaxBeitForMaskedImageModeling: the visual tokens of masked patches."""
    config = hf.BeitConfig(vocab_size=32, **VISION, use_mask_token=True)
    model = hf.FlaxBeitForMaskedImageModeling(config, (1, 16, 16, 3))
    masked = tokens(length=16) % 3 == 0
    batch = {
        "pixel_values": features(3, 16, 16),
        "bool_masked_pos": masked,
        "labels": tokens(1, length=16, vocabulary=32),
    }

    def loss(outputs, batch):
        return mean_of(cross_entropy(outputs.logits, batch["labels"]), batch["bool_masked_pos"])

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
