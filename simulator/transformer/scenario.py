"""The two sections of a scenario: the model that is trained, and its execution, how the step is divided over devices."""

from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from simulator.hardware.description import Description

Recompute = Literal["none", "selective", "full"]
Precision = Literal["bf16", "f16", "f8"]
Attention = Literal["naive", "flash", "flash2"]


class Transformer(Description):
    """A decoder by its sizes.

    Attributes:
        hidden: width of the residual stream; heads divide it.
        kv_heads: heads of keys and values, fewer than `heads` in grouped-query attention; as many by default.
        seq: tokens of a sequence.
        ffn: inner width of the MLP; 4 times `hidden` by default.
        gated: whether the MLP multiplies two projections (SwiGLU) instead of applying a function to one (GELU).
        tied: whether input and output embeddings are one array.
        learned_positions: whether positions are parameters.
        biases: whether linear layers and norms have them.
        dropout: whether there is any, in attention and on the residual stream.
        attention: "naive" writes the scores to memory; "flash" does not, and leaves out the masked half; "flash2" does so faster.
        precision: of the matrix products; "f8" is for the linear layers only, the rest stays in bf16.
    """

    layers: PositiveInt
    hidden: PositiveInt
    heads: PositiveInt
    seq: PositiveInt
    vocab: PositiveInt
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
        if self.hidden % self.heads:
            raise ValueError(
                f"heads: given {self.heads}, expected a divisor of hidden, which is {self.hidden}"
            )
        if self.heads % self.key_heads:
            raise ValueError(
                f"kv_heads: given {self.key_heads}, expected a divisor of heads, which is {self.heads}"
            )
        return self

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def ffn_width(self) -> int:
        return self.ffn or 4 * self.hidden

    @property
    def qkv_width(self) -> int:
        """Columns of the projection to queries, keys and values."""
        return self.hidden + 2 * self.hidden * self.key_heads // self.heads

    @property
    def layer_matrices(self) -> int:
        """Elements of the matrices of one layer."""
        return self.hidden * (
            self.qkv_width + self.hidden + (3 if self.gated else 2) * self.ffn_width
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
        """Multiplications and additions that a step of so many sequences needs, forward and backward, nothing computed twice.

        Scores count whole, as is the custom of published model FLOP, whatever attention leaves out.
        """
        tokens = sequences * self.seq
        layer = 2.0 * self.layer_matrices + 4.0 * self.seq * self.hidden
        return 3.0 * tokens * (self.layers * layer + 2.0 * self.hidden * self.vocab)


class Execution(Description):
    """How a step is spread over devices.

    Attributes:
        tensor, context, data, pipeline: degrees of parallelism; devices are numbered in this order, tensor innermost. `context`
            divides sequences, and exchanges heads for tokens around attention (Jacobs et al., arXiv 2309.14509).
        sequence_parallel: whether what tensor parallelism leaves whole is divided along the sequence (Korthikanti et al. 2022).
        microbatch, global_batch: sequences that a device takes at once, and all devices in a step.
        interleave: stages that a device holds, of `pipeline * interleave`.
        schedule: "gpipe" runs all forward passes first, "1f1b" alternates.
        recompute: what the backward pass computes again: nothing, the core of attention, or all of a layer.
        zero: what is divided over the data axis: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
        gradient_bytes: of an element of the gradients that are summed over microbatches.
        communicated_gradient_bytes: of an element when gradients are sent; as `gradient_bytes` by default.
        optimizer_bytes: of the optimizer's state per parameter, master copy included.
        fused_loss: whether the loss is one kernel, which writes nothing but the gradient of the logits.
        overlap_gradients: whether gradients are sent while the backward pass goes on, and parameters gathered while the forward does.
        overlap_tensor: which collectives over the tensor axis run beside matrix products: none, those of the backward pass that can
            run beside weight gradients, or all, cut into pieces that follow the product they feed or come from.
        overlap_sends: whether sends to the next stage go on while another microbatch is computed, for which devices need several
            stages (`interleave`): with one they wait for what comes back all the same.
        scatter_sends: whether the devices of a tensor group each send a part to the next stage (always with sequence_parallel).
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
                f"global_batch: given {self.global_batch}, expected a multiple of microbatch * data, which is {step}"
            )
        if self.interleave > 1 and self.pipeline == 1:
            raise ValueError(f"interleave: given {self.interleave}, expected 1 where pipeline is 1")
        if self.zero == 3 and self.pipeline > 1:
            raise ValueError(
                "zero: given 3, expected at most 2 with a pipeline: parameters would be gathered per microbatch"
            )
        return self

    @property
    def devices(self) -> int:
        return self.tensor * self.replicas * self.pipeline

    @property
    def replicas(self) -> int:
        """Devices that hold the same parameters, unless these are divided over them."""
        return self.context * self.data

    def tokens(self, model: Transformer) -> int:
        """Tokens of a microbatch on one device, not counting how tensor parallelism divides them."""
        return self.microbatch * model.seq // self.context

    @property
    def microbatches(self) -> int:
        """Microbatches that a pipeline takes in a step."""
        return self.global_batch // (self.microbatch * self.data)

    @property
    def accumulates(self) -> bool:
        """Whether whole gradients are summed over microbatches on each device; with ZeRO-3 only its part of them is."""
        return self.microbatches > 1 and self.zero < 3

    @property
    def sent_gradient_bytes(self) -> int:
        return self.communicated_gradient_bytes or self.gradient_bytes

    def check(self, model: Transformer) -> None:
        """`ValueError` where the model can't be divided so."""
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
                f"tensor * context: given {self.tensor * self.context}, expected a divisor of seq, which is {model.seq}"
            )
        if model.seq % self.context or model.heads % (self.tensor * self.context):
            raise ValueError(
                f"context: given {self.context}, expected a divisor of seq, which is {model.seq}, "
                f"that together with tensor divides heads, which is {model.heads}"
            )
