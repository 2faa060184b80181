"""The sections of a scenario: the model that is trained, and its execution on devices."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, NonNegativeInt, PositiveInt, model_validator

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

Recompute = Literal["none", "unsaved", "selective", "mlp", "full"]
SavedResult = Literal["queries", "keys", "values", "context", "output", "gate", "up"]
PROJECTIONS: tuple[SavedResult, ...] = ("queries", "keys", "values", "output")
"""Results of the linear layers of a mixer."""

ComposedOperation = Literal[
    "norm",
    "norm_in_f32",
    "norm_by_xla",
    "rotary",
    "complex_rotary",
    "activation",
    "gelu_by_xla",
    "dropout_by_xla",
    "softmax",
    "softmax_by_xla",
    "padding_by_xla",
]
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
            raise ValueError("full_attention_every: expected together with window")
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
        return self._parameters(lambda elements: elements.total)

    @property
    def active_parameters(self) -> int:
        """Elements of the parameters that a token uses: of the routed experts, those of top_k."""
        return self._parameters(lambda elements: elements.active)

    def _parameters(self, of_layer: Callable[["Elements"], int]) -> int:
        head = 0 if self.tied else self.vocab * self.hidden
        norm = (2 if self.biases else 1) * self.hidden
        layers = sum(
            count * of_layer(self.elements(kind)) for kind, count in self.kind_counts.items()
        )
        return (
            layers
            + self.prediction_layers * self.prediction_elements
            + self.embedding
            + head
            + norm
        )

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


def activation_inputs(model: Transformer) -> tuple[SavedResult, ...]:
    """Return the results of an MLP or of experts that their activation reads."""
    return ("up", "gate") if model.gated else ("up",)


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

    @property
    def active(self) -> int:
        """Elements that a token uses."""
        return self.dense + self.routed_active


def _tuple(value: object) -> object:
    """Return a list of a YAML file as a tuple."""
    return tuple(value) if isinstance(value, list) else value


class Execution(Description):
    """The division of a step over devices.

    Attributes:
        tensor: degree of tensor parallelism; devices are numbered along tensor (innermost),
            context, data, pipeline.
        context: degree of context parallelism, which divides sequences.
        context_exchange: how attention gets complete sequences: "all_to_all" exchanges heads for
            tokens around it (Jacobs et al., arXiv 2309.14509), "ring" passes keys and values on
            while it computes (Liu et al., arXiv 2310.01889), "all_gather" gathers them before it.
        balanced_context: whether each device has an early and a late part of the sequence, so that
            the causal mask leaves all devices equal work; without, the last device has most.
            Exchanged heads need no balance.
        data: degree of data parallelism.
        pipeline: degree of pipeline parallelism.
        expert: degree of expert parallelism: devices over which the experts of a layer are divided.
            They are devices of the tensor, context and data axes; on them, devices are numbered
            along expert_tensor (innermost), expert, and copies of the experts.
        expert_tensor: degree of tensor parallelism within an expert; `tensor` by default.
        dispatch: how tokens get to their experts: "all_to_all" sends a copy for each expert,
            "all_gather" sends all tokens to all devices of the group, "deduplicated" sends a token
            once to each host and each device with experts of it (DeepEP).
        overlap_dispatch: whether the dispatch of a microbatch overlaps with the computation of
            another one.
        sequence_parallel: whether the tensor axis divides norms and dropout along the sequence
            (Korthikanti et al., arXiv 2205.05198).
        microbatch: sequences of a microbatch on one device.
        global_batch: sequences of a step on all devices.
        interleave: stages of each device, of `pipeline * interleave` in total.
        stage_layers: layers of each stage, in the order of the model; by default as even as
            possible, with fewer in the first and in the last stage.
        embedding_as_layer: whether the input embedding counts as a layer of the first stage when
            layers are divided (Megatron-LM's account_for_embedding_in_pipeline_split).
        loss_as_layer: whether the loss counts as a layer of the last stage (likewise).
        schedule: "gpipe" runs all forward passes first, "1f1b" alternates forward and backward
            passes.
        recompute: what the backward pass recomputes: nothing, what it reads but for the results in
            `saved` ("unsaved", as policies of `jax.checkpoint` and of PyTorch's selective
            checkpoints do), the core of attention ("selective"), that and complete MLPs or experts
            ("mlp"), or complete layers ("full").
        saved: results of a layer that are saved with `recompute: unsaved`, beside its input: the
            projections to "queries", "keys" and "values", the "context" that fused attention
            returns, the "output" projection of attention, and the products before the activation
            of an MLP, "up" and, if it is gated, "gate". The last product of an MLP is not among
            them, as the backward pass doesn't read its result. Mamba, latent attention and
            attention to an encoder save their products together, with all of "queries", "keys",
            "values" and "output"; experts with "up" and "gate".
        zero: what is sharded over the data axis, and of experts over all of their copies: 0
            nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
        sharding_group: neighbouring devices of the data axis, context included, over which ZeRO
            shards; groups are replicas of each other (HSDP, MiCS). By default it shards over all.
        broadcasts: whether each device broadcasts the parameters that it updated (ZeRO-1 and 2),
            which pays the latency of a collective for each device, instead of one all_gather.
        all_reduces_gradients: whether devices sum complete gradients even where ZeRO-1 or 2 needs
            only the sum of a shard.
        gradient_bytes: bytes of an element of the gradients that are summed over microbatches.
        separate_accumulation: whether a product writes a gradient that another kernel adds to the
            sum over microbatches (PyTorch's AccumulateGrad), instead of adding to it itself.
        communicated_gradient_bytes: bytes of an element of the gradients that are communicated;
            `gradient_bytes` by default.
        combined_bytes: bytes of gradients that are summed together, at most; all by default. XLA's
            limit is xla_gpu_all_reduce_combine_threshold_bytes.
        casts_parameters: whether products cast parameters of 32 bits to 16 in each pass, and their
            gradients back (JAX), instead of parameters of 16 bits beside a master copy. Parameters
            that ZeRO-3 shards are cast before they are gathered, which costs little.
        optimizer_bytes: bytes of optimizer state per parameter, including a master copy.
        fused_loss: whether the loss is one kernel, which writes only the gradient of the logits.
        loss_in_16_bits: whether the kernels of a loss that isn't fused read and write 16 bits.
        log_softmax_loss: whether a loss that isn't fused is PyTorch's cross_entropy of f32 logits.
        compiled_loss: whether torch.compile fuses the kernels of a loss that isn't one kernel
            (Megatron-LM's cross_entropy_loss_fusion with its implementation "native").
        gathered_logits: whether each device of a tensor group computes the loss from all logits,
            which it gathers, instead of from its part of the vocabulary.
        recompute_head: whether full recomputation also repeats the output embedding.
        spare_microbatches: microbatches whose activations a device of a pipeline has room for
            beyond those that wait for their backward pass; 1 in DeepSpeed's pipeline engine.
        composed: operations of several elementwise kernels instead of one fused kernel: "norm",
            "norm_in_f32" (a fused norm between casts, which the backward pass repeats), "rotary"
            (halves that are joined), "complex_rotary" (a product of complex numbers of f32),
            "activation" (of gated MLPs), "softmax" (of naive attention); and "norm_by_xla",
            "gelu_by_xla" (of MLPs without a gate), "dropout_by_xla", "softmax_by_xla" and
            "padding_by_xla" (of scores), which are several kernels of XLA.
        separate_gates: whether the two products of a gated MLP before its activation are two linear
            layers, each of which sums the gradient of its input over the tensor axis.
        saves_gathered: whether the inputs of products that sequence parallelism gathers are saved
            whole for the backward pass, instead of gathered again.
        copies_shards: whether gathered parameters are copied from the buffer of the all_gather to
            arrays of their own, and gradients to the buffer of their sum, with ZeRO-3 (FSDP2 of
            PyTorch).
        embedding_products: whether the input embedding is a product with one-hot rows (Pax's lookup
            style "matmul") instead of a gather.
        overlap_gradients: whether the communication of gradients overlaps with the backward pass,
            and gathers of parameters with the forward pass.
        overlap_tensor: which collectives over the tensor axis overlap with matrix products: "none",
            those of the backward pass that can overlap with the products of weight gradients
            ("backward"), or "all", in pieces that follow the product that they feed or come from.
        overlap_sends: whether sends to the next stage overlap with the computation of another
            microbatch. It needs several stages per device (`interleave`): a device with one stage
            waits for the result anyway.
        scatter_sends: whether the devices of a tensor group each send a part of an activation to
            the next stage (always with `sequence_parallel`).
    """

    tensor: PositiveInt = 1
    context: PositiveInt = 1
    context_exchange: Literal["all_to_all", "ring", "all_gather"] = "all_to_all"
    balanced_context: bool = True
    data: PositiveInt = 1
    pipeline: PositiveInt = 1
    expert: PositiveInt = 1
    expert_tensor: PositiveInt | None = None
    dispatch: Literal["all_to_all", "all_gather", "deduplicated"] = "all_to_all"
    overlap_dispatch: bool = False
    sequence_parallel: bool = False
    microbatch: PositiveInt = 1
    global_batch: PositiveInt
    interleave: PositiveInt = 1
    stage_layers: Annotated[tuple[NonNegativeInt, ...], BeforeValidator(_tuple)] | None = None
    embedding_as_layer: bool = False
    loss_as_layer: bool = False
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    recompute: Recompute = "none"
    saved: Annotated[tuple[SavedResult, ...], BeforeValidator(_tuple)] = ()
    zero: Literal[0, 1, 2, 3] = 0
    sharding_group: PositiveInt | None = None
    broadcasts: bool = False
    all_reduces_gradients: bool = False
    gradient_bytes: Literal[2, 4] = 4
    separate_accumulation: bool = False
    communicated_gradient_bytes: Literal[2, 4] | None = None
    combined_bytes: PositiveInt | None = None
    casts_parameters: bool = False
    optimizer_bytes: PositiveInt = 12
    fused_loss: bool = False
    loss_in_16_bits: bool = False
    log_softmax_loss: bool = False
    compiled_loss: bool = False
    gathered_logits: bool = False
    recompute_head: bool = False
    spare_microbatches: NonNegativeInt = 0
    composed: Annotated[tuple[ComposedOperation, ...], BeforeValidator(_tuple)] = ()
    separate_gates: bool = False
    saves_gathered: bool = False
    copies_shards: bool = False
    embedding_products: bool = False
    overlap_gradients: bool = False
    overlap_tensor: Literal["none", "backward", "all"] = "none"
    overlap_sends: bool = False
    scatter_sends: bool = False

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        step = self.microbatch * self.data
        if self.global_batch % step:
            raise ValueError(
                f"global_batch: given {self.global_batch}, expected a multiple of microbatch * "
                f"data, which is {step}"
            )
        if self.interleave > 1 and self.pipeline == 1:
            raise ValueError(f"interleave: given {self.interleave}, expected 1 where pipeline is 1")
        if self.replicas % self.shards:
            raise ValueError(
                f"sharding_group: given {self.shards}, expected a divisor of context * data, which "
                f"is {self.replicas}"
            )
        if self.zero == 3 and self.pipeline > 1:
            raise ValueError(
                "zero: given 3, expected at most 2 with a pipeline: parameters would be gathered "
                "per microbatch"
            )
        return self

    @model_validator(mode="after")
    def _saved_results_need_a_policy(self) -> Self:
        if self.saved and self.recompute != "unsaved":
            raise ValueError(
                f"saved: given {', '.join(self.saved)} with recompute {self.recompute}, expected "
                "together with recompute unsaved"
            )
        return self

    def recomputes(self, *results: SavedResult) -> bool:
        """Return whether some of these results are not saved."""
        return any(result not in self.saved for result in results)

    @property
    def expert_shards(self) -> int:
        """Degree of tensor parallelism within an expert."""
        return self.expert_tensor or self.tensor

    @property
    def expert_replicas(self) -> int:
        """Devices with the same experts, which ZeRO may shard over them."""
        return self.tensor * self.replicas // (self.expert * self.expert_shards)

    @property
    def shards(self) -> int:
        """Devices over which ZeRO shards parameters outside of experts."""
        return self.sharding_group or self.replicas

    @property
    def expert_replica_shards(self) -> int:
        """Devices over which ZeRO shards parameters of experts: copies within a sharding group."""
        copies = self.tensor * self.shards // (self.expert * self.expert_shards)
        return gcd(self.expert_replicas, max(1, copies))

    @property
    def devices(self) -> int:
        """Number of devices: the product of all degrees but those of experts."""
        return self.tensor * self.replicas * self.pipeline

    @property
    def replicas(self) -> int:
        """Devices with the same parameters, which ZeRO may shard over them."""
        return self.context * self.data

    def on_devices(self, model: Transformer) -> Transformer:
        """Return the model with all copies of the heads of keys and values.

        Where tensor parallelism has more devices than there are such heads, each is on several.
        """
        return model.with_key_heads(max(self.tensor, model.key_heads))

    def tokens(self, model: Transformer) -> int:
        """Return the tokens of a microbatch on a device, before tensor parallelism divides them."""
        return self.microbatch * model.seq // self.context

    def stream(self, model: Transformer) -> float:
        """Return the elements of the residual stream of a microbatch on a device.

        Sequence parallelism divides them over the tensor axis.
        """
        return self.tokens(model) * model.hidden / (self.tensor if self.sequence_parallel else 1)

    @property
    def microbatches(self) -> int:
        """Microbatches of a replica in a step."""
        return self.global_batch // (self.microbatch * self.data)

    @property
    def accumulates(self) -> bool:
        """Whether a device sums complete gradients over microbatches; not so with ZeRO-3."""
        return self.microbatches > 1 and self.zero < 3

    @property
    def sent_gradient_bytes(self) -> int:
        """Bytes of an element of the gradients that are communicated."""
        return self.communicated_gradient_bytes or self.gradient_bytes

    def check(self, model: Transformer) -> None:
        """Check that the degrees of parallelism divide the sizes of a model.

        Raises:
            ValueError: a size is no multiple of its degree.
        """
        mamba = model.mamba
        for name, size in (
            ("heads", model.heads),
            ("hidden", model.hidden),
            ("ffn", model.ffn_width),
            ("mamba.heads", mamba.heads if mamba is not None else self.tensor),
        ):
            if size % self.tensor:
                raise ValueError(
                    f"tensor: given {self.tensor}, expected a divisor of {name}, which is {size}"
                )
        if model.key_heads % self.tensor and self.tensor % model.key_heads:
            raise ValueError(
                f"tensor: given {self.tensor}, expected a divisor or a multiple of kv_heads, which "
                f"is {model.key_heads}"
            )
        if self.sequence_parallel and model.seq % (self.tensor * self.context):
            raise ValueError(
                f"tensor * context: given {self.tensor * self.context}, expected a divisor of seq, "
                f"which is {model.seq}"
            )
        self._check_experts(model)
        if model.encoder is not None and self.pipeline * self.context > 1:
            raise ValueError(
                f"encoder: given with pipeline {self.pipeline} and context {self.context}; expected"
                " 1 and 1"
            )
        latent = model.latent_attention
        if latent is not None and latent.output_rank and latent.output_groups % self.tensor:
            raise ValueError(
                f"tensor: given {self.tensor}, expected a divisor of latent_attention."
                f"output_groups, which is {latent.output_groups}"
            )
        exchanges_heads = self.context_exchange == "all_to_all"
        divided_heads = self.tensor * (self.context if exchanges_heads else 1)
        if model.seq % self.context or model.heads % divided_heads:
            raise ValueError(
                f"context: given {self.context}, expected a divisor of seq, which is {model.seq}, "
                f"that together with tensor divides heads, which is {model.heads}"
            )

    def _check_experts(self, model: Transformer) -> None:
        """Check the degrees of experts against a model."""
        if model.experts is None:
            if self.expert > 1 or self.expert_tensor not in (None, self.tensor):
                raise ValueError(
                    f"expert: given {self.expert}, expert_tensor: given {self.expert_shards}, but "
                    "the model has no experts; expected 1 and the degree of tensor, or the section "
                    "experts in the model"
                )
            return
        for name, degree, what, size in (
            ("expert", self.expert, "experts.count", model.experts.count),
            ("expert_tensor", self.expert_shards, "experts.ffn", model.experts.ffn),
            (
                "expert * expert_tensor",
                self.expert * self.expert_shards,
                "tensor * context * data",
                self.tensor * self.replicas,
            ),
            ("tensor", self.tensor, "experts.shared_ffn", model.experts.shared_ffn),
        ):
            if size % degree:
                raise ValueError(
                    f"{name}: given {degree}, expected a divisor of {what}, which is {size}"
                )
        folded = self.expert > 1 or self.expert_shards != self.tensor
        if self.tensor > 1 and folded and not self.sequence_parallel:
            raise ValueError(
                f"expert: given {self.expert}, expert_tensor: given {self.expert_shards} with "
                f"tensor {self.tensor}; expected sequence_parallel: true, so that the devices of a "
                "tensor group have tokens of their own"
            )
