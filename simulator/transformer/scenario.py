"""The sections of a scenario: the model that is trained, and its execution on devices."""

from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from simulator.hardware.description import Description

Recompute = Literal["none", "selective", "full"]
Precision = Literal["bf16", "f16", "f8"]
Attention = Literal["naive", "flash", "flash2"]


class Transformer(Description):
    """The sizes of a decoder.

    Attributes:
        layers: number of layers.
        hidden: width of the residual stream, a multiple of `heads` unless `head_size` is given.
        heads: number of attention heads.
        head_size: width of a head; `hidden / heads` by default.
        seq: tokens of a sequence.
        vocab: size of the vocabulary.
        kv_heads: heads of keys and values, fewer than `heads` in grouped-query attention; as many
            by default.
        ffn: inner width of the MLP; 4 times `hidden` by default.
        gated: whether the MLP multiplies two projections (SwiGLU) instead of applying a function to
            one (GELU).
        tied: whether input and output embeddings are one array.
        learned_positions: whether positions are parameters.
        biases: whether linear layers and norms have biases.
        dropout: whether attention and the residual stream have dropout.
        attention: "naive" writes the scores to memory; "flash" and the faster "flash2" do not, and
            skip the masked half.
        precision: type of the matrix products; with "f8" only linear layers have 8 bits, the rest
            bf16.
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
    dropout: bool = True
    attention: Attention = "naive"
    precision: Precision = "bf16"

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

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def ffn_width(self) -> int:
        """Inner width of the MLP."""
        return self.ffn or 4 * self.hidden

    @property
    def head_width(self) -> int:
        """Width of an attention head."""
        return self.head_size or self.hidden // self.heads

    @property
    def attention_width(self) -> int:
        """Width of all heads: inputs of the projection after attention."""
        return self.heads * self.head_width

    @property
    def qkv_width(self) -> int:
        """Columns of the projection to queries, keys and values."""
        return self.attention_width + 2 * self.key_heads * self.head_width

    @property
    def layer_matrices(self) -> int:
        """Elements of the matrices of one layer."""
        return self.hidden * (
            self.qkv_width + self.attention_width + (3 if self.gated else 2) * self.ffn_width
        )

    @property
    def layer_vectors(self) -> int:
        """Elements of the norms and biases of one layer."""
        norms = (4 if self.biases else 2) * self.hidden
        return norms + (self.qkv_width + 2 * self.hidden + self.ffn_width if self.biases else 0)

    @property
    def embedding(self) -> int:
        """Elements of the input embedding."""
        return self.vocab * self.hidden + (self.seq * self.hidden if self.learned_positions else 0)

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        head = 0 if self.tied else self.vocab * self.hidden
        norm = (2 if self.biases else 1) * self.hidden
        return (
            self.layers * (self.layer_matrices + self.layer_vectors) + self.embedding + head + norm
        )

    def flops(self, sequences: int) -> float:
        """Return the model FLOP of a step: forward and backward, without recomputation.

        The scores of attention count in full, also those that a causal mask removes, as in
        published model FLOP.

        Args:
            sequences: sequences of the global batch.
        """
        tokens = sequences * self.seq
        layer = 2.0 * self.layer_matrices + 4.0 * self.seq * self.attention_width
        return 3.0 * tokens * (self.layers * layer + 2.0 * self.hidden * self.vocab)


class Execution(Description):
    """The division of a step over devices.

    Attributes:
        tensor: degree of tensor parallelism; devices are numbered along tensor (innermost),
            context, data, pipeline.
        context: degree of context parallelism, which divides sequences and exchanges heads for
            tokens around attention (Jacobs et al., arXiv 2309.14509).
        data: degree of data parallelism.
        pipeline: degree of pipeline parallelism.
        sequence_parallel: whether the tensor axis divides norms and dropout along the sequence
            (Korthikanti et al., arXiv 2205.05198).
        microbatch: sequences of a microbatch on one device.
        global_batch: sequences of a step on all devices.
        interleave: stages of each device, of `pipeline * interleave` in total.
        schedule: "gpipe" runs all forward passes first, "1f1b" alternates forward and backward
            passes.
        recompute: what the backward pass recomputes: nothing, the core of attention, or complete
            layers.
        zero: what is sharded over the data axis: 0 nothing, 1 optimizer state, 2 gradients too, 3
            parameters too.
        gradient_bytes: bytes of an element of the gradients that are summed over microbatches.
        communicated_gradient_bytes: bytes of an element of the gradients that are communicated;
            `gradient_bytes` by default.
        optimizer_bytes: bytes of optimizer state per parameter, including a master copy.
        fused_loss: whether the loss is one kernel, which writes only the gradient of the logits.
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
    data: PositiveInt = 1
    pipeline: PositiveInt = 1
    sequence_parallel: bool = False
    microbatch: PositiveInt = 1
    global_batch: PositiveInt
    interleave: PositiveInt = 1
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    recompute: Recompute = "none"
    zero: Literal[0, 1, 2, 3] = 0
    gradient_bytes: Literal[2, 4] = 4
    communicated_gradient_bytes: Literal[2, 4] | None = None
    optimizer_bytes: PositiveInt = 12
    fused_loss: bool = False
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
        if self.zero == 3 and self.pipeline > 1:
            raise ValueError(
                "zero: given 3, expected at most 2 with a pipeline: parameters would be gathered "
                "per microbatch"
            )
        return self

    @property
    def devices(self) -> int:
        """Number of devices: the product of all degrees."""
        return self.tensor * self.replicas * self.pipeline

    @property
    def replicas(self) -> int:
        """Devices with the same parameters, which ZeRO may shard over them."""
        return self.context * self.data

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
        stages = self.pipeline * self.interleave
        if model.layers % stages:
            raise ValueError(
                f"{model.layers} layers don't divide into {stages} stages (pipeline * interleave)"
            )
        for name, size in (
            ("heads", model.heads),
            ("hidden", model.hidden),
            ("ffn", model.ffn_width),
        ):
            if size % self.tensor:
                raise ValueError(
                    f"tensor: given {self.tensor}, expected a divisor of {name}, which is {size}"
                )
        if self.sequence_parallel and model.seq % (self.tensor * self.context):
            raise ValueError(
                f"tensor * context: given {self.tensor * self.context}, expected a divisor of seq, "
                f"which is {model.seq}"
            )
        if model.seq % self.context or model.heads % (self.tensor * self.context):
            raise ValueError(
                f"context: given {self.context}, expected a divisor of seq, which is {model.seq}, "
                f"that together with tensor divides heads, which is {model.heads}"
            )
