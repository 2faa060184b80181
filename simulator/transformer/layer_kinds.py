"""Kinds of layers, and the sizes of experts, of latent attention and of Mamba."""

from typing import Literal, NamedTuple

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from simulator.hardware.description import Description

Mixer = Literal["attention", "window", "cross", "mamba"]
Stack = Literal["decoder", "encoder"]
Mlp = Literal["dense", "experts"]


class LayerKind(NamedTuple):
    """What a layer consists of.

    Attributes:
        mixer: the part that mixes tokens: attention to all tokens, attention to a window, attention
            of a decoder to the tokens of its encoder ("cross"), or Mamba; None for a layer without
            one.
        mlp: the part that works on each token; None for a layer without one.
        stack: whether the layer is one of the decoder or of its encoder.
    """

    mixer: Mixer | None = "attention"
    mlp: Mlp | None = "dense"
    stack: Stack = "decoder"


DECODER_LAYER = LayerKind()
"""A layer with attention and a dense MLP."""

PATTERN: dict[str, LayerKind] = {
    "M": LayerKind("mamba", None),
    "*": LayerKind("attention", None),
    "-": LayerKind(None, "dense"),
    "E": LayerKind(None, "experts"),
}
"""Layers with one part by their character in a pattern, as in Megatron-Core's hybrid models."""


class Experts(Description):
    """Mixture of experts in place of the MLP of a layer.

    Attributes:
        count: routed experts of a layer.
        top_k: experts of each token.
        ffn: inner width of a routed expert.
        shared_ffn: inner width of the shared experts, which get all tokens; of all of them together
            if there are several.
        first_dense: layers at the start that have a dense MLP.
        every: number of layers in a group, the last of which has experts; the others have a dense
            MLP.
        latent: width to which tokens are projected before they are sent to experts, which then
            have inputs and outputs of this width; `hidden` by default.
        capacity_factor: capacity of an expert, relative to its even share of the tokens; further
            tokens are dropped, and fewer are padded. By default no token is dropped.
        imbalance: tokens of the busiest device relative to the mean, where no token is dropped. The
            default is 1 + MaxVio of an expert with loss-free balancing (Wang et al., arXiv
            2408.15664, table 2); benchmarks that force an even balance have 1.
        max_hosts: hosts that the experts of a token are on, at most, where the router limits them
            (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
        consecutive: whether the experts of a token follow each other, as in benchmarks without a
            router (AutoModel's FakeBalancedGate). They are on few devices, to which a deduplicated
            dispatch sends the token once. By default they are spread evenly.
        biases: whether the products of routed experts have biases.
        clamped: whether both inputs of a gated activation are clamped before it (gpt-oss). Unless
            experts are one kernel, these are kernels of their own.
    """

    count: PositiveInt
    top_k: PositiveInt
    ffn: PositiveInt
    shared_ffn: NonNegativeInt = 0
    first_dense: NonNegativeInt = 0
    every: PositiveInt = 1
    latent: PositiveInt | None = None
    capacity_factor: PositiveFloat | None = None
    imbalance: float = Field(default=1.04, ge=1)
    max_hosts: PositiveInt | None = None
    consecutive: bool = False
    biases: bool = False
    clamped: bool = False

    def model_post_init(self, _: object) -> None:
        """Check that a token has no more experts than there are."""
        if self.top_k > self.count:
            raise ValueError(
                f"top_k: given {self.top_k}, expected at most count, which is {self.count}"
            )

    @property
    def load(self) -> float:
        """Rows of the busiest device relative to an even share, with padding."""
        return self.imbalance if self.capacity_factor is None else self.capacity_factor

    def width(self, hidden: int) -> int:
        """Return the width of the tokens that are sent to experts."""
        return self.latent or hidden

    def expert_elements(self, hidden: int, matrices: int) -> int:
        """Return the elements of one routed expert.

        Args:
            hidden: width of the residual stream.
            matrices: matrices of an MLP: 3 with a gate, 2 without.
        """
        biases = (matrices - 1) * self.ffn + self.width(hidden) if self.biases else 0
        return matrices * self.width(hidden) * self.ffn + biases

    def other_elements(self, hidden: int, matrices: int) -> int:
        """Return the elements of the router, the shared experts and the latent projections."""
        latent = 2 * hidden * self.latent if self.latent else 0
        return self.count * hidden + matrices * hidden * self.shared_ffn + latent


class Encoder(Description):
    """The encoder of an encoder-decoder (T5, Raffel et al., arXiv 1910.10683).

    Its layers have the sizes of the decoder's, and its attention has no causal mask. Layers of the
    decoder attend to its tokens between their own attention and their MLP. Both share the input
    embedding.

    Attributes:
        layers: number of layers.
        seq: tokens of a sequence of the encoder.
    """

    layers: PositiveInt
    seq: PositiveInt


class Adapters(Description):
    """Low-rank adapters, which alone are trained (LoRA, Hu et al., arXiv 2106.09685).

    A linear layer may have one: a product to `rank` columns, and one back, whose result is added to
    that of the linear layer. All other parameters are frozen: they have no gradients and no
    optimizer state. Experts, Mamba and latent attention have no adapters.

    Attributes:
        rank: inner width of an adapter.
        of: linear layers that have one: those of queries, keys and values ("qkv"), all of attention
            ("attention"), or those of dense MLPs too ("all").
    """

    rank: PositiveInt
    of: Literal["qkv", "attention", "all"] = "all"


class LatentAttention(Description):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    `head_size` of the model is the part of a query or key head without rotary positions.

    Attributes:
        key_rank: width of the latent of keys and values.
        query_rank: width of the latent of queries; None for a direct projection.
        rotary_size: part of a query or key head with rotary positions, which all keys share.
        value_size: width of a value head.
        shared: whether all heads attend to the latent itself, as key and as value, which is not
            projected to heads (DeepSeek-V4).
        output_groups: groups of heads whose values are projected to `output_rank` before the
            projection to the width of the residual stream.
        output_rank: width to which the values of a group are projected; None for one projection of
            all values.
    """

    key_rank: PositiveInt
    query_rank: PositiveInt | None = None
    rotary_size: PositiveInt
    value_size: PositiveInt
    shared: bool = False
    output_groups: PositiveInt = 1
    output_rank: PositiveInt | None = None


class Mamba(Description):
    """Mamba-2 layers (Dao and Gu, arXiv 2405.21060).

    Attributes:
        heads: heads of a layer.
        head_size: width of a head.
        state: width of the state of a head.
        groups: groups of heads with the same input and output projections of the state.
        convolution: width of the convolution before the scan.
        chunk: tokens of a chunk of the scan.
    """

    heads: PositiveInt
    head_size: PositiveInt
    state: PositiveInt
    groups: PositiveInt = 1
    convolution: PositiveInt = 4
    chunk: PositiveInt = 128

    @property
    def inner(self) -> int:
        """Width of all heads."""
        return self.heads * self.head_size

    @property
    def convolved(self) -> int:
        """Channels of the convolution: inputs, and both projections of the state."""
        return self.inner + 2 * self.groups * self.state

    @property
    def columns(self) -> int:
        """Columns of the projection before the scan: gate, convolved channels, time steps."""
        return self.inner + self.convolved + self.heads

    @property
    def vectors(self) -> int:
        """Elements of the convolution, the norm, and the parameters of heads."""
        return (self.convolution + 1) * self.convolved + self.inner + 3 * self.heads

    @property
    def scan_flops(self) -> float:
        """FLOP of the scan per token.

        Within a chunk: the products of both projections and with the inputs. Between chunks: the
        update of the states, and their products with the output projection.
        """
        within = 2.0 * self.chunk * (self.groups * self.state + self.inner)
        return within + 4.0 * self.state * self.inner
