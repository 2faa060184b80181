"""The section `execution` of a scenario: how a training step is divided over devices, and runs."""

from math import gcd
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, NonNegativeInt, PositiveInt, model_validator

from simulator.hardware.description import Description
from simulator.transformer.transformer_sizes import Transformer

Recompute = Literal["none", "unsaved", "modules", "selective", "mlp", "full"]
RecomputedModule = Literal[
    "core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"
]
"""Modules of Megatron-Core by their names in its option recompute_modules."""

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


def activation_inputs(model: Transformer) -> tuple[SavedResult, ...]:
    """Return the results of an MLP or of experts that their activation reads."""
    return ("up", "gate") if model.gated else ("up",)


def _tuple(value: object) -> object:
    """Return a list of a YAML file as a tuple."""
    return tuple(value) if isinstance(value, list) else value


def _level(value: object) -> object:
    """Return a level of ZeRO, refusing true and false, which equal 1 and 0."""
    if isinstance(value, bool):
        raise ValueError(f"given {str(value).lower()}, expected 0, 1, 2 or 3")
    return value


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
            checkpoints do), the modules in `recomputed` ("modules", as Megatron-Core's option
            recompute_modules), the scores of attention ("selective"), these and complete MLPs or
            experts ("mlp"), or complete layers ("full").
        recomputed: modules of a layer that are recomputed with `recompute: modules`: the core of
            attention ("core_attn", also where it is fused), norms ("layernorm": those before
            experts and before latent attention, the others are part of a linear layer), the
            projections from latents to heads with their rotary positions ("mla_up_proj"), dense
            MLPs ("mlp"), all of the experts with their dispatch ("moe"), the activation of routed
            experts ("moe_act"), and shared experts ("shared_experts").
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
        gradient_copy_bytes: bytes that kernels move per gradient before and after its sum, without
            ZeRO-3: copies to and from a buffer of many gradients, casts and divisions.
        gradient_buffer_bytes: bytes of the buffers of that copy that are alive together; they are
            never larger than all gradients.
        combined_bytes: bytes of gradients that are summed together, at most; all by default. XLA's
            limit is xla_gpu_all_reduce_combine_threshold_bytes.
        casts_parameters: whether products cast parameters of 32 bits to 16 in each pass, and their
            gradients back (JAX), instead of parameters of 16 bits beside a master copy, which need
            memory of their own. Parameters that ZeRO-3 shards are cast before they are gathered,
            which costs little. XLA fuses the casts of a loss.
        autocast: whether parameters and the residual stream have 32 bits and torch.autocast casts
            them: parameters in each pass, after they are gathered, and the inputs of norms, with
            their gradients back. It counts in time alone.
        optimizer_bytes: bytes of optimizer state per parameter, including a master copy.
        fused_loss: whether the loss is one kernel, which writes only the gradient of the logits.
        loss_in_16_bits: whether the kernels of a loss that isn't fused read and write 16 bits.
        log_softmax_loss: whether a loss that isn't fused is PyTorch's cross_entropy, of f32 logits
            unless `loss_in_16_bits`.
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
        saves_casts: whether linear layers with products of few bits save their inputs in these
            (Transformer Engine) instead of in 16 bits. The input of the output projection of
            attention is in 16 bits, as attention saves it anyway.
        copies_shards: whether gathered parameters are copied from the buffer of the all_gather to
            arrays of their own, and gradients to the buffer of their sum, with ZeRO-3 (FSDP2 of
            PyTorch, and loops of XLA that are pipelined without double buffering).
        embedding_products: whether the input embedding is a product with one-hot rows (Pax's lookup
            style "matmul") instead of a gather.
        overlap_gradients: whether the communication of gradients overlaps with the backward pass,
            and gathers of parameters with the forward pass.
        overlap_tensor: which collectives over the tensor axis overlap with matrix products: "none",
            those of the backward pass that can overlap with the products of weight gradients
            ("backward"), or "all", in pieces that follow the product that they feed or come from.
        overlap_sends: whether sends to the next stage overlap with the computation of another
            microbatch. It needs several stages per device (`interleave`) or `spare_microbatches`: a
            device without either waits for the result anyway.
        serial_sends: whether a device sends and receives one message after the other, as the
            pipeline engine of DeepSpeed does, instead of exchanging two with its neighbour.
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
    recomputed: Annotated[tuple[RecomputedModule, ...], BeforeValidator(_tuple)] = ()
    saved: Annotated[tuple[SavedResult, ...], BeforeValidator(_tuple)] = ()
    zero: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_level)] = 0
    sharding_group: PositiveInt | None = None
    broadcasts: bool = False
    all_reduces_gradients: bool = False
    gradient_bytes: Literal[2, 4] = 4
    separate_accumulation: bool = False
    communicated_gradient_bytes: Literal[2, 4] | None = None
    gradient_copy_bytes: NonNegativeInt = 0
    gradient_buffer_bytes: NonNegativeInt = 0
    combined_bytes: PositiveInt | None = None
    casts_parameters: bool = False
    autocast: bool = False
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
    saves_casts: bool = False
    copies_shards: bool = False
    embedding_products: bool = False
    overlap_gradients: bool = False
    overlap_tensor: Literal["none", "backward", "all"] = "none"
    overlap_sends: bool = False
    serial_sends: bool = False
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
    def _results_and_modules_need_their_kind(self) -> Self:
        if self.saved and self.recompute != "unsaved":
            raise ValueError(
                f"saved: given {', '.join(self.saved)} with recompute {self.recompute}, expected "
                "together with recompute unsaved"
            )
        if bool(self.recomputed) != (self.recompute == "modules"):
            given = ", ".join(self.recomputed) or "nothing"
            raise ValueError(
                f"recomputed: given {given} with recompute {self.recompute}, expected modules "
                "together with recompute modules"
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
    def messages(self) -> int:
        """Messages of a microbatch that a device of a pipeline waits for, one after the other.

        Devices between others exchange one with each neighbour in either pass. Those at the ends
        have one neighbour.
        """
        return 4 if self.serial_sends and self.pipeline > 2 else 2

    @property
    def microbatches(self) -> int:
        """Microbatches of a replica in a step."""
        return self.global_batch // (self.microbatch * self.data)

    def in_flight(self, place: int) -> float:
        """Return the microbatches whose activations are stored on a device of the pipeline.

        The first has one for each stage of the pipeline, and a few chunks more with interleaving
        (Korthikanti et al., arXiv 2205.05198, eq. 5 and appendix B); the next has one less, or two
        chunks. A group of microbatches goes through a chunk before the next chunk starts: one for
        each device, or more where these don't divide the number of microbatches.

        Args:
            place: place of the device in the pipeline, from 0.
        """
        p, v = self.pipeline, self.interleave
        spare = self.spare_microbatches if p > 1 else 0
        if self.schedule == "gpipe":
            return self.microbatches
        if v == 1:
            return min(self.microbatches, p - place + spare)
        groups = max(1, self.microbatches // p)
        largest_group = -(-self.microbatches // groups)
        chunks = (v - 1) * largest_group + 2 * (p - place) - 1
        return min(self.microbatches, chunks / v + spare)

    @property
    def repeats_head(self) -> bool:
        """Whether the backward pass repeats the output embedding and the loss."""
        return self.recompute == "full" and self.recompute_head

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
