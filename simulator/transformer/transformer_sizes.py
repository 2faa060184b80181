"""The section `model` of a scenario: the sizes of a transformer, and what follows from them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import NonNegativeInt, PositiveInt, model_validator

from simulator.hardware.description import Description, validate
from simulator.hardware.kernel_profile import FusedAttentionKind
from simulator.transformer.layer_kinds import (
    PATTERN,
    Adapters,
    Encoder,
    Experts,
    LatentAttention,
    LayerKind,
    Mamba,
    Mixer,
    Mlp,
)
from simulator.transformer.precision import Precision

Attention = Literal["naive", FusedAttentionKind]


class Transformer(Description):
    """The sizes of a transformer: of a decoder, which may have an encoder.

    Attributes:
        layers: number of layers.
        hidden: width of the residual stream, a multiple of `heads` unless `head_size` is given.
        heads: number of attention heads.
        head_size: width of a head; `hidden / heads` by default.
        seq: tokens of a sequence.
        vocab: size of the vocabulary.
        kv_heads: heads of keys and values, fewer than `heads` in grouped-query attention; as many
            by default. A higher degree of tensor parallelism copies them.
        ffn: inner width of the MLP; 4 times `hidden` by default.
        gated: whether the MLP, and experts, multiply two projections (SwiGLU) instead of applying a
            function to one (GELU).
        tied: whether input and output embeddings are one array.
        learned_positions: whether positions are parameters.
        biases: whether linear layers and norms have biases.
        head_norms: whether each head of queries and keys is normalized.
        dropout: whether attention and the residual stream have dropout.
        attention_dropout: whether attention has dropout; as `dropout` says by default.
        inner_dropout: whether the activations of MLPs have dropout.
        residual_streams: copies of the residual stream, which each part of a layer mixes
            (hyper-connections, Zhu et al., arXiv 2409.19606).
        causal: whether a token attends only to those before it, as in a language model; False for
            the patches of an image.
        encoder: the encoder whose tokens the layers attend to; by default there is none.
        attention: "naive" writes the scores to memory; "flash1", "flash" (in Triton) the faster
            "flash2", "cudnn", and "cudnn_f8" (with products of 8 bits) do not, and skip the masked
            half.
        precision: type of the products of linear layers: "bf16", "f16", "f8" (a scale per tensor),
            "f8-block" (a scale per block), "mxfp8", "nvfp4" or "mxfp4"; with 8 or 4 bits, all else
            is bf16.
        layers_in_16_bits: layers whose products are of 16 bits under a precision of fewer; their
            cost is spread evenly over all layers.
        window: tokens that a query attends to in layers with a sliding window; by default no layer
            has one.
        full_attention_every: a layer in so many, the last of each group, attends to all tokens
            instead of a window; by default none.
        experts: experts in place of the dense MLP.
        latent_attention: latents of queries, keys and values (MLA); by default none.
        mamba: sizes of Mamba layers, which `pattern` places.
        pattern: a character for each layer of one part: M for Mamba, * for attention, - for a dense
            MLP, E for experts; by default each layer is attention followed by an MLP.
        prediction_layers: layers after the last that predict further tokens (DeepSeek-V3, arXiv
            2412.19437, section 2.2), each with a projection and a loss.
        adapters: adapters that alone are trained (LoRA); by default all parameters are.
    """

    layers: PositiveInt
    hidden: PositiveInt
    heads: PositiveInt
    seq: PositiveInt
    vocab: PositiveInt
    head_size: PositiveInt | None = None
    kv_heads: PositiveInt | None = None
    ffn: PositiveInt | None = None
    gated: bool = False
    tied: bool = True
    learned_positions: bool = True
    biases: bool = True
    head_norms: bool = False
    dropout: bool = True
    attention_dropout: bool | None = None
    inner_dropout: bool = False
    residual_streams: PositiveInt = 1
    causal: bool = True
    encoder: Encoder | None = None
    attention: Attention = "naive"
    precision: Precision = "bf16"
    layers_in_16_bits: NonNegativeInt = 0
    window: PositiveInt | None = None
    full_attention_every: PositiveInt | None = None
    experts: Experts | None = None
    latent_attention: LatentAttention | None = None
    mamba: Mamba | None = None
    pattern: str | None = None
    prediction_layers: NonNegativeInt = 0
    adapters: Adapters | None = None

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.head_size is None and self.hidden % self.heads:
            raise ValueError(
                f"heads: given {self.heads}, expected a divisor of hidden, which is {self.hidden}, "
                "or head_size beside it"
            )
        if self.heads % self.key_heads:
            raise ValueError(
                f"kv_heads: given {self.key_heads}, expected a divisor of heads, which is "
                f"{self.heads}"
            )
        return self

    @model_validator(mode="after")
    def _layers_have_their_parts(self) -> Self:
        if self.pattern is not None:
            unknown = sorted(set(self.pattern) - set(PATTERN))
            if unknown:
                raise ValueError(
                    f"pattern: unknown character {unknown[0]!r}; expected M (Mamba), * "
                    "(attention), - (dense MLP) or E (experts) for each layer"
                )
            if len(self.pattern) != self.layers:
                raise ValueError(
                    f"pattern: given {len(self.pattern)} characters, expected one for each of the "
                    f"{self.layers} layers"
                )
            if ("E" in self.pattern) != (self.experts is not None):
                raise ValueError(
                    "pattern: layers E need the section experts, and the section needs them"
                )
            if self.experts is not None and (self.experts.first_dense or self.experts.every > 1):
                raise ValueError(
                    "experts: first_dense and every place experts in layers without a pattern; "
                    "given a pattern, leave them out"
                )
        elif self.experts is not None and self.experts.first_dense >= self.layers:
            raise ValueError(
                f"experts.first_dense: given {self.experts.first_dense}, expected less than layers,"
                f" which is {self.layers}"
            )
        if (self.mamba is not None) != ("M" in (self.pattern or "")):
            raise ValueError(
                "mamba: expected together with a pattern that has M for each Mamba layer"
            )
        if self.full_attention_every is not None and self.window is None:
            raise ValueError(
                f"full_attention_every: given {self.full_attention_every} without window; expected"
                " both or neither"
            )
        if self.latent_attention is not None and self.head_size is None:
            raise ValueError(
                "latent_attention: expected together with head_size, the part of a head without "
                "rotary positions"
            )
        latent = self.latent_attention
        if latent is not None and self.heads % latent.output_groups:
            raise ValueError(
                f"latent_attention.output_groups: given {latent.output_groups}, expected a divisor "
                f"of heads, which is {self.heads}"
            )
        return self

    @model_validator(mode="after")
    def _encoder_is_plain(self) -> Self:
        others = ("experts", "latent_attention", "mamba", "pattern", "window", "adapters")
        given = [name for name in others if getattr(self, name) is not None]
        if self.prediction_layers:
            given.append("prediction_layers")
        if self.encoder is not None and given:
            raise ValueError(f"encoder: given together with {given[0]}, expected without")
        return self

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of all layers; those that predict further tokens are the last."""
        if self.pattern is not None:
            kinds = [PATTERN[character] for character in self.pattern]
            last = LayerKind("attention", "dense" if self.experts is None else "experts")
        elif self.encoder is not None:
            kinds = [LayerKind("attention", "dense", "encoder")] * self.encoder.layers
            last = LayerKind("cross", "dense")
            kinds += [LayerKind("attention", None), last] * self.layers
        else:
            kinds = [
                LayerKind(self._mixer_of(layer), self._mlp_of(layer))
                for layer in range(self.layers)
            ]
            last = kinds[-1]
        return (*kinds, *[last] * self.prediction_layers)

    def _mixer_of(self, layer: int) -> Mixer:
        every = self.full_attention_every
        full = self.window is None or (every is not None and (layer + 1) % every == 0)
        return "attention" if full else "window"

    def _mlp_of(self, layer: int) -> Mlp:
        if self.experts is None or layer < self.experts.first_dense:
            return "dense"
        place = layer + 1 - self.experts.first_dense
        return "dense" if place % self.experts.every else "experts"

    @cached_property
    def kind_counts(self) -> Mapping[LayerKind, int]:
        """The number of layers of each kind."""
        return Counter(self.kinds)

    @cached_property
    def known_divisions(self) -> dict[Any, Any]:
        """Layers by device as `simulator.transformer.stages` found them, by what decides them."""
        return {}

    def with_key_heads(self, heads: int) -> "Transformer":
        """Return the transformer with another number of heads of keys and values."""
        if heads == self.key_heads:
            return self
        if heads not in self._known_key_heads:
            self._known_key_heads[heads] = self.model_copy(update={"kv_heads": heads})
        return self._known_key_heads[heads]

    @cached_property
    def _known_key_heads(self) -> "dict[int, Transformer]":
        return {}

    @cached_property
    def encoder_model(self) -> "Transformer":
        """The encoder as a transformer of its own."""
        assert self.encoder is not None, "a layer is one of an encoder"
        sizes = {"layers": self.encoder.layers, "seq": self.encoder.seq}
        return validate(
            Transformer, self.fields() | sizes | {"encoder": None, "causal": False}, "encoder"
        )

    @cached_property
    def drops_scores(self) -> bool:
        """Whether attention has dropout."""
        return self.dropout if self.attention_dropout is None else self.attention_dropout

    def of(self, kind: LayerKind) -> "Transformer":
        """Return the transformer that has the layers of a kind: this one, or its encoder."""
        return self.encoder_model if kind.stack == "encoder" else self

    def keys_of(self, mixer: Mixer) -> int:
        """Return the tokens of the sequence that a mixer attends to."""
        return self.encoder_model.seq if mixer == "cross" else self.seq

    @property
    def sequence_tokens(self) -> int:
        """Tokens of a sequence, in the encoder and in the decoder."""
        return self.seq + (self.encoder.seq if self.encoder is not None else 0)

    @cached_property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @cached_property
    def ffn_width(self) -> int:
        """Inner width of the MLP."""
        return self.ffn or 4 * self.hidden

    @cached_property
    def head_width(self) -> int:
        """Width of an attention head; with latent attention, its part without positions."""
        return self.head_size or self.hidden // self.heads

    @cached_property
    def query_size(self) -> int:
        """Width of a head of queries and keys."""
        latent = self.latent_attention
        return self.head_width + (latent.rotary_size if latent else 0)

    @cached_property
    def value_size(self) -> int:
        """Width of a head of values."""
        latent = self.latent_attention
        return latent.value_size if latent else self.head_width

    @cached_property
    def attention_width(self) -> int:
        """Width of the values of all heads: inputs of the projection after attention."""
        return self.heads * self.value_size

    @cached_property
    def qkv_width(self) -> int:
        """Width of queries, keys and values."""
        return self.heads * self.query_size + self.key_heads * (self.query_size + self.value_size)

    @cached_property
    def key_width(self) -> int:
        """Width of keys and values."""
        return self.key_heads * (self.query_size + self.value_size)

    @property
    def mlp_matrices(self) -> int:
        """Matrices of an MLP: 3 with a gate, 2 without."""
        return 3 if self.gated else 2

    def elements(self, kind: LayerKind) -> "Elements":
        """Return the elements of the parameters of a layer."""
        if kind not in self._known_elements:
            self._known_elements[kind] = self._count(kind)
        return self._known_elements[kind]

    @cached_property
    def _known_elements(self) -> "dict[LayerKind, Elements]":
        return {}

    def _count(self, kind: LayerKind) -> "Elements":
        matrices, vectors = self._mixer_elements(kind.mixer)
        match kind.mlp:
            case "dense":
                matrices += self.mlp_matrices * self.hidden * self.ffn_width
                vectors += self.hidden
                vectors += 2 * self.hidden + self.ffn_width if self.biases else 0
            case "experts":
                experts = self.experts_section
                matrices += experts.other_elements(self.hidden, self.mlp_matrices)
                vectors += (2 if self.biases else 1) * self.hidden
            case None:
                pass
        routed, active = 0, 0
        if kind.mlp == "experts":
            expert = self.experts_section.expert_elements(self.hidden, self.mlp_matrices)
            routed, active = (
                self.experts_section.count * expert,
                self.experts_section.top_k * expert,
            )
        return Elements(matrices, vectors, routed, active)

    def _mixer_elements(self, mixer: Mixer | None) -> tuple[int, int]:
        """Return the elements of the matrices, and of the norm and biases, of a mixer."""
        h = self.hidden
        norm = (2 if self.biases else 1) * h
        latent = self.latent_attention
        if mixer is None:
            return 0, 0
        if mixer == "mamba":
            mamba = self.mamba_section
            return h * (mamba.columns + mamba.inner), mamba.vectors + norm
        if latent is None:
            biases = self.qkv_width + h if self.biases else 0
            scales = 2 * self.query_size if self.head_norms else 0
            return h * (self.qkv_width + self.attention_width), norm + biases + scales
        queries = self.heads * self.query_size
        rank = latent.query_rank
        matrices = h * queries if rank is None else rank * (h + queries)
        matrices += h * (latent.key_rank + latent.rotary_size)
        if not latent.shared:
            matrices += latent.key_rank * self.heads * (self.head_width + self.value_size)
        if latent.output_rank is None:
            matrices += self.attention_width * h
        else:
            matrices += latent.output_rank * (self.attention_width + latent.output_groups * h)
        return matrices, norm + (rank or 0) + latent.key_rank

    def adapter_elements(self, kind: LayerKind) -> int:
        """Return the elements of the adapters of a layer."""
        if self.adapters is None:
            return 0
        h, width = self.hidden, 0
        if kind.mixer in ("attention", "window") and self.latent_attention is None:
            width += h + self.qkv_width
            width += h + self.attention_width if self.adapters.of != "qkv" else 0
        if kind.mlp == "dense" and self.adapters.of == "all":
            width += 2 * h + self.mlp_matrices * self.ffn_width
        return self.adapters.rank * width

    @property
    def experts_section(self) -> Experts:
        """The section `experts` of a model whose layers have some."""
        assert self.experts is not None, "a layer has experts"
        return self.experts

    @property
    def mamba_section(self) -> Mamba:
        """The section `mamba` of a model with Mamba layers."""
        assert self.mamba is not None, "a layer is Mamba"
        return self.mamba

    @property
    def embedding(self) -> int:
        """Elements of the input embedding."""
        return self.vocab * self.hidden + (self.seq * self.hidden if self.learned_positions else 0)

    @property
    def prediction_elements(self) -> int:
        """Elements of the projection before a layer that predicts further tokens."""
        return 2 * self.hidden * self.hidden

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        head = 0 if self.tied else self.vocab * self.hidden
        norm = (2 if self.biases else 1) * self.hidden
        layers = sum(count * self.elements(kind).total for kind, count in self.kind_counts.items())
        predictions = self.prediction_layers * self.prediction_elements
        return layers + predictions + self.embedding + head + norm

    def visible_keys(self, mixer: Mixer) -> float:
        """Return twice the mean number of keys that a query attends to under the causal mask.

        It is `seq` without a window.
        """
        if mixer != "window" or self.window is None or self.window >= self.seq:
            return float(self.keys_of(mixer))
        return self.seq * (1 - (1 - self.window / self.seq) ** 2)

    def mixing_flops(self, mixer: Mixer | None) -> float:
        """Return the FLOP per token of the scores of attention, or of the scan of Mamba."""
        match mixer:
            case "attention" | "window" | "cross":
                widths = self.heads * (self.query_size + self.value_size)
                return 2.0 * self.visible_keys(mixer) * widths
            case "mamba":
                return self.mamba_section.scan_flops
            case None:
                return 0.0

    def flops(self, sequences: int) -> float:
        """Return the model FLOP of a step: forward and backward, without recomputation.

        The scores of attention count in full, also those that a causal mask removes, as in
        published model FLOP. Frozen matrices have no weight gradients, and those of adapters are
        not counted.

        Args:
            sequences: sequences of the global batch.
        """
        tokens = sequences * self.seq
        layers = 0.0
        for kind, count in self.kind_counts.items():
            stack = self.of(kind)
            elements = self.elements(kind)
            matrices = float(elements.matrices + elements.routed_active)
            if kind.mixer == "cross":
                matrices += (self.keys_of("cross") / self.seq - 1) * self.hidden * self.key_width
            mixing = stack.mixing_flops(kind.mixer)
            of_token = 2.0 * self.products_of_weights * matrices + 3.0 * mixing
            layers += count * of_token * stack.seq / self.seq
        heads = (1 + self.prediction_layers) * self.hidden * self.vocab
        heads += self.prediction_layers * self.prediction_elements
        return tokens * (layers + 2.0 * self.products_of_weights * heads)

    @property
    def products_of_weights(self) -> int:
        """Products of a step with each matrix; frozen ones have no gradient of the weights."""
        return 3 if self.adapters is None else 2


@dataclass(frozen=True, slots=True)
class Elements:
    """Elements of the parameters of a layer.

    Attributes:
        matrices: of the matrices of all parts but routed experts.
        vectors: of the norms and biases.
        routed: of the routed experts.
        routed_active: of the routed experts that a token uses.
    """

    matrices: int
    vectors: int
    routed: int
    routed_active: int

    @property
    def dense(self) -> int:
        """Elements of all parts but routed experts."""
        return self.matrices + self.vectors

    @property
    def total(self) -> int:
        """Elements of the layer."""
        return self.dense + self.routed
