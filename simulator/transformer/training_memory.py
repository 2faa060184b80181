"""Peak memory of the device of a pipeline that needs most, by role."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from simulator.transformer.composed_kernels import composed_saved, score_elements
from simulator.transformer.experts import Routing
from simulator.transformer.layer_kinds import DECODER_LAYER, LayerKind
from simulator.transformer.precision import RECIPES
from simulator.transformer.scenario import PROJECTIONS, Execution, activation_inputs
from simulator.transformer.stages import DeviceLayers, division_of
from simulator.transformer.transformer_sizes import Transformer


class Memory(NamedTuple):
    """Bytes on the device that needs most.

    Attributes:
        parameters: parameters of the layers on the device.
        gradients: gradients of the layers.
        optimizer: optimizer state of the layers.
        embedding: parameters, gradients and optimizer state of the embeddings on the device.
        activations: activations saved for backward, of all microbatches in flight.
        temporaries: temporaries of one layer: recomputed activations, gathered parameters, logits.
    """

    parameters: float
    gradients: float
    optimizer: float
    embedding: float
    activations: float
    temporaries: float

    @property
    def states(self) -> float:
        """Parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer + self.embedding

    @property
    def total(self) -> float:
        """All bytes."""
        return self.states + self.activations + self.temporaries


class DeviceParameters(NamedTuple):
    """Elements of parameters on a device, before ZeRO shards them.

    Attributes:
        layers: of layers, without routed experts.
        experts: of routed experts.
        ends: of embeddings.
    """

    layers: float
    experts: float
    ends: float = 0.0

    @property
    def total(self) -> float:
        """All elements."""
        return self.layers + self.experts + self.ends


def memory_of(model: Transformer, execution: Execution) -> Memory:
    """Return the memory of the device of the pipeline that needs most.

    Activations are counted as by Korthikanti et al. (arXiv 2205.05198), section 4.

    Raises:
        ValueError: the degrees of parallelism don't divide the sizes of the model.
    """
    execution.check(model)
    model = execution.on_devices(model)
    division = division_of(model, execution)
    activations: dict[LayerKind, tuple[float, float]] = {}
    for kind in model.kind_counts:
        saved = saved_activations(model.of(kind), execution, kind)
        activations[kind] = saved, _layer_temporaries(model.of(kind), execution, kind, saved)
    states = [
        (
            size,
            execution.shards if execution.zero >= level else 1,
            execution.expert_replica_shards if execution.zero >= level else 1,
        )
        for size, level in (
            (0 if execution.casts_parameters and model.adapters is None else 2, 3),
            (execution.gradient_bytes, 2),
            (execution.optimizer_bytes, 1),
        )
    ]
    memories = [
        # the first of equal devices has most in flight
        _device_memory(model, execution, device, states, activations, execution.in_flight(place))
        for device, place in division.first_places
    ]
    return max(memories, key=lambda memory: memory.total)


def _device_memory(
    model: Transformer,
    execution: Execution,
    device: DeviceLayers,
    states: Sequence[tuple[int, int, int]],
    activations: Mapping[LayerKind, tuple[float, float]],
    in_flight: float,
) -> Memory:
    """Return the memory of a device.

    Args:
        model: the model.
        execution: the execution.
        device: the layers of the device.
        states: bytes per element of parameters, gradients and optimizer state, and the numbers of
            devices over which those outside and inside of experts are sharded.
        activations: bytes of each kind of layer, saved and temporary.
        in_flight: microbatches whose activations are stored.
    """
    elements = device_parameters(model, execution, device)
    trained = trained_parameters(model, execution, elements, device)
    held = (elements, trained, trained)
    parameters, gradients, optimizer = [
        size * (part.layers / shards + part.experts / expert_shards)
        for part, (size, shards, expert_shards) in zip(held, states, strict=True)
    ]
    gradients += min(execution.gradient_buffer_bytes, gradients)
    if model.adapters is not None:
        size, shards, _ = states[0]
        parameters += size * trained.layers / shards
    embedding = sum(
        [size * part.ends / shards for part, (size, shards, _) in zip(held, states, strict=True)]
    )
    saved = sum([count * activations[kind][0] for kind, count in device.counts])
    temporaries = max([activations[kind][1] for kind, _ in device.counts], default=0.0)
    if device.losses:
        temporaries = max(temporaries, _loss_temporaries(model, execution))
    return Memory(parameters, gradients, optimizer, embedding, in_flight * saved, temporaries)


def device_parameters(
    model: Transformer, execution: Execution, device: DeviceLayers
) -> DeviceParameters:
    """Return the elements of parameters on a device of the pipeline."""
    layers, experts = 0.0, 0.0
    for kind, count in device.counts:
        parameters = layer_parameters(model, execution, kind)
        layers += count * parameters.layers
        experts += count * parameters.experts
    layers += device.predictions * model.prediction_elements / execution.tensor
    ends = model.embedding if device.embedding else 0
    if device.losses and not (model.tied and device.embedding):
        ends += model.vocab * model.hidden
    return DeviceParameters(layers, experts, ends / execution.tensor)


def trained_parameters(
    model: Transformer, execution: Execution, parameters: DeviceParameters, device: DeviceLayers
) -> DeviceParameters:
    """Return the elements of those parameters on a device that are trained.

    Args:
        model: the model.
        execution: the execution.
        parameters: all parameters of the device but adapters.
        device: the layers of the device.
    """
    if model.adapters is None:
        return parameters
    adapters = sum(count * model.adapter_elements(kind) for kind, count in device.counts)
    return DeviceParameters(adapters / execution.tensor, 0.0)


def layer_parameters(model: Transformer, execution: Execution, kind: LayerKind) -> DeviceParameters:
    """Return the elements of parameters of a layer on a device."""
    elements = model.elements(kind)
    shards = execution.expert * execution.expert_shards
    return DeviceParameters(elements.dense / execution.tensor, elements.routed / shards)


def _layer_temporaries(
    model: Transformer, execution: Execution, kind: LayerKind, saved: float
) -> float:
    """Return the bytes that are live only in the backward pass of a layer.

    They are recomputed activations, their gradients, the gradient of the largest matrix, and with
    ZeRO-3 gathered parameters.

    Args:
        model: the model.
        execution: the execution.
        kind: the kind of the layer.
        saved: bytes that the layer saves.
    """
    tokens = execution.tokens(model)
    recomputed = max(0.0, layer_activations(model, execution, kind) - saved)
    # The tensor axis divides gradients of the inner width, but neither input nor output gradients.
    inner, matrix = _widest(model, execution, kind)
    gradients = inner + 2 * 2.0 * tokens * model.hidden
    if kind.mixer in ("attention", "window", "cross"):
        keys = model.keys_of(kind.mixer)
        gradients = max(gradients, _score_gradients(model, execution, keys))
    largest = _gradient_width(execution) * matrix if model.adapters is None else 0.0
    parameters = layer_parameters(model, execution, kind)
    gathered = 0.0
    if execution.zero == 3:
        gathered += 2.0 * 2.0 * parameters.layers * (execution.shards > 1)
        gathered += 2.0 * 2.0 * parameters.experts * (execution.expert_replica_shards > 1)
    return recomputed + gradients + largest + gathered


def _gradient_width(execution: Execution) -> float:
    """Return the bytes of an element of the gradient of a matrix, as its product writes it."""
    return 2.0 if execution.casts_parameters else execution.gradient_bytes


def _widest(model: Transformer, execution: Execution, kind: LayerKind) -> tuple[float, float]:
    """Return the bytes of gradients of inner width, and the elements of the largest matrix."""
    tokens, t = execution.tokens(model), execution.tensor
    gates = 2 if model.gated else 1
    match kind.mlp:
        case "dense":
            up = gates * model.ffn_width
            return 2.0 * tokens * (up + model.ffn_width) / t, model.hidden * up / t
        case "experts":
            routing = Routing.of(model, execution)
            up = gates * routing.inner
            return (
                2.0 * routing.rows * (up + routing.inner + routing.width),
                routing.experts * routing.width * up,
            )
        case None:
            width = model.mamba.columns if model.mamba else model.qkv_width
            return 2.0 * tokens * width / t, model.hidden * width / t


def _score_gradients(model: Transformer, execution: Execution, keys: int) -> float:
    """Return the bytes of gradients of the scores of so many keys, if they are in memory.

    The fused softmax overwrites the gradient of its result. Composed kernels have it in 2 bytes and
    in f32, beside the gradient of the masked scores in f32.
    """
    if model.attention != "naive":
        return 0.0
    composed = "softmax" in execution.composed
    return (10.0 if composed else 2.0) * score_elements(model, execution, keys)


def _loss_temporaries(model: Transformer, execution: Execution) -> float:
    """Return the bytes of logits and their gradient, and of the output embedding and its gradient.

    The embedding itself is a temporary where ZeRO-3 gathers it.
    """
    t = execution.tensor
    elements = execution.tokens(model) * model.vocab
    largest = _gradient_width(execution) * model.vocab * model.hidden / t
    if model.adapters is not None:
        largest = 0.0
    gathers = execution.zero == 3 and execution.shards > 1
    gathered = 2.0 * model.vocab * model.hidden / t if gathers else 0.0
    return _bytes_per_logit(execution) * elements + largest + gathered


def _bytes_per_logit(execution: Execution) -> float:
    """Return the bytes that the loss needs per logit of the complete vocabulary.

    Fused: the logits, which their gradient replaces. Parallel over the vocabulary: the logits, a
    copy in f32 and their softmax; of PyTorch's cross_entropy the log_softmax and both gradients in
    f32, after the logits are gone; in 16 bits the logits, their softmax, which their gradient
    replaces, and an array as large for reductions (OneFlow), or the log_softmax and both gradients
    (PyTorch). XLA has the logits and exponentials in f32, which the gradient replaces. Gathered
    logits go to PyTorch's cross_entropy: the logits, a copy in f32, its log_softmax and the
    gradients of both, all of them complete; a gather of several parts has the parts beside their
    concatenation.
    """
    t = execution.tensor
    if not execution.gathered_logits:
        unfused = 12.0 if execution.log_softmax_loss else 10.0
        unfused = 6.0 if execution.loss_in_16_bits or execution.casts_parameters else unfused
        return (2.0 if execution.fused_loss else unfused) / t
    parts = 2.0 + 2.0 / t if t > 1 else 0.0
    return (2.0 if execution.fused_loss else 18.0) + parts


def layer_activations(model: Transformer, execution: Execution, kind: LayerKind) -> float:
    """Return the bytes that a layer saves for backward per microbatch, without recomputation."""
    return _saved_outside_scores(model, execution, kind) + _saved_scores(model, execution, kind)


def saved_activations(
    model: Transformer, execution: Execution, kind: LayerKind = DECODER_LAYER
) -> float:
    """Return the bytes that a layer saves for backward per microbatch.

    Of several residual streams it saves all; their mixtures are recomputed.
    """
    streams = 2.0 * (model.residual_streams - 1) * execution.stream(model)
    return streams + _saved_by_parts(model, execution, kind)


def _saved_by_parts(model: Transformer, execution: Execution, kind: LayerKind) -> float:
    """Return the saved bytes but those of further residual streams."""
    match execution.recompute:
        case "none":
            return layer_activations(model, execution, kind)
        case "unsaved":
            return _saved_results(model, execution, kind)
        case "modules":
            return _saved_beside_modules(model, execution, kind)
        case "selective":
            return _saved_outside_scores(model, execution, kind)
        case "mlp":
            input_bytes = 2.0 * execution.stream(model) if kind.mlp is not None else 0.0
            return _saved_by_mixer(model, execution, kind) + input_bytes
        case "full":
            return 2.0 * execution.stream(model)


def _saved_beside_modules(model: Transformer, execution: Execution, kind: LayerKind) -> float:
    """Return the saved bytes without those that recomputed modules save or return."""
    modules, tokens, t = execution.recomputed, execution.tokens(model), execution.tensor
    scores = 0.0 if "core_attn" in modules else _saved_scores(model, execution, kind)
    mixer = _saved_by_mixer(model, execution, kind)
    if kind.mixer in ("attention", "window") and model.latent_attention is not None:
        width = _input_width(model, execution, kind, mlp=False)
        if "layernorm" in modules:
            mixer -= width * execution.stream(model)
        if "mla_up_proj" in modules:
            mixer -= 2.0 * tokens * model.qkv_width / t
    stream = 2.0 * execution.stream(model)
    if kind.mlp == "dense":
        whole = "mlp" in modules
        return scores + mixer + (stream if whole else _saved_by_mlp(model, execution, kind))
    if kind.mlp is None:
        return scores + mixer
    normalized = 0.0 if "layernorm" in modules else stream
    if "moe" in modules:
        return scores + mixer + stream + normalized
    saved = _saved_by_mlp(model, execution, kind) - stream + normalized
    experts, routing = model.experts_section, Routing.of(model, execution)
    width = _input_width(model, execution, kind, mlp=True)
    if "moe_act" in modules:
        clamped = 4.0 if experts.clamped else 0.0
        saved -= (width + clamped) * routing.rows * routing.inner
    if "shared_experts" in modules:
        gates = 4.0 if model.gated else 2.0
        saved -= (gates + width) * tokens * experts.shared_ffn / t
    return scores + mixer + saved


def _saved_outside_scores(model: Transformer, execution: Execution, kind: LayerKind) -> float:
    """Return the saved bytes except for the scores.

    In a GPT they are 34 per token and hidden element; the tensor axis divides 10 of them only with
    sequence parallelism.
    """
    return _saved_by_mixer(model, execution, kind) + _saved_by_mlp(model, execution, kind)


def _saved_by_mixer(model: Transformer, execution: Execution, kind: LayerKind) -> float:
    """Return the bytes that attention without the scores, or Mamba, saves."""
    if kind.mixer is None:
        return 0.0
    tokens, t = execution.tokens(model), execution.tensor
    stream = execution.stream(model)
    width = _input_width(model, execution, kind, mlp=False)
    saved = _saved_stream(model, execution, width)
    if kind.mixer == "mamba":
        mamba = model.mamba_section
        # outputs of the projection, of the convolution, and of the scan, and its gated norm
        outputs = 2.0 * (mamba.columns + mamba.convolved + mamba.inner)
        return saved + tokens * (outputs + width * mamba.inner) / t
    divided = 2.0 * tokens * (model.qkv_width + model.attention_width)
    if kind.mixer == "cross":
        divided += 2.0 * (execution.tokens(model.encoder_model) - tokens) * model.key_width
    if model.latent_attention is not None:
        latent = model.latent_attention
        ranks = latent.key_rank + latent.rotary_size + (latent.query_rank or 0)
        saved += (2.0 + width) * stream / model.hidden * ranks  # before and after their norms
    if model.attention != "naive":
        divided += 4.0 * tokens * model.heads  # row sums of the softmax
    return saved + divided / t


def _input_width(model: Transformer, execution: Execution, kind: LayerKind, mlp: bool) -> float:
    """Return the bytes of an element of the input of a linear layer, as it is saved.

    The gradients of frozen layers don't need it, unless these have adapters.

    Args:
        model: the model.
        execution: the execution.
        kind: the kind of the layer that the linear layer belongs to.
        mlp: whether the linear layer is one of an MLP or of experts instead of a mixer.
    """
    if model.adapters is not None:
        if mlp:
            adapted = model.adapters.of == "all" and kind.mlp == "dense"
        else:
            adapted = kind.mixer != "mamba" and model.latent_attention is None
        return 2.0 if adapted else 0.0
    recipe = RECIPES[model.precision]
    if not execution.saves_casts or recipe.dtype is None:
        return 2.0
    in_16_bits = min(1.0, model.layers_in_16_bits / model.layers)
    return recipe.width + in_16_bits * (2.0 - recipe.width)


def _saved_stream(model: Transformer, execution: Execution, width: float) -> float:
    """Return the saved bytes of the input of a norm and of the product after it, and of dropout.

    Args:
        model: the model.
        execution: the execution.
        width: bytes of an element of the input of the product.
    """
    stream = execution.stream(model)
    product = execution.tokens(model) * model.hidden if execution.saves_gathered else stream
    norm = 2.0 * stream + composed_saved("norm", stream, execution)
    return norm + width * product + model.dropout * stream


def _saved_by_mlp(model: Transformer, execution: Execution, kind: LayerKind) -> float:
    """Return the bytes that an MLP or experts save."""
    if kind.mlp is None:
        return 0.0
    tokens, t = execution.tokens(model), execution.tensor
    width = _input_width(model, execution, kind, mlp=True)
    # inputs of the activation function and of the second product
    inner = (2.0 if not model.gated else 4.0) + width
    if kind.mlp == "dense":
        elements = tokens * model.ffn_width / t
        saved = _saved_stream(model, execution, width)
        saved += (inner + model.inner_dropout) * elements
        activation = "activation" if model.gated else "gelu_by_xla"
        saved += composed_saved(activation, elements, execution)
    else:
        # the router reads 16 bits
        saved = _saved_stream(model, execution, 2.0 if model.adapters is None else 0.0)
        experts, routing = model.experts_section, Routing.of(model, execution)
        saved += inner * tokens * experts.shared_ffn / t
        # results are not saved: scores multiply the inputs of the second product
        clamped = 4.0 if experts.clamped else 0.0
        saved += routing.rows * (width * routing.width + (inner + clamped) * routing.inner)
        saved += 2 * 4.0 * routing.tokens * experts.count  # scores before and after the softmax
    return saved


def _saved_results(model: Transformer, execution: Execution, kind: LayerKind) -> float:
    """Return the bytes of the input of a layer, and of its results in `execution.saved`."""
    tokens, t = execution.tokens(model), execution.tensor
    input_bytes = 2.0 * execution.stream(model)
    saved = input_bytes
    match kind.mixer:
        case "attention" | "window" if model.latent_attention is None:
            widths = {
                "queries": model.heads * model.query_size,
                "keys": model.key_heads * model.query_size,
                "values": model.key_heads * model.value_size,
                # with the row sums of the softmax
                "context": model.attention_width + 2 * model.heads,
            }
            width = sum(widths[name] for name in widths if name in execution.saved)
            saved += 2.0 * tokens * width / t
            if "output" in execution.saved:
                saved += 2.0 * execution.stream(model)
        case None:
            pass
        case _:
            if not execution.recomputes(*PROJECTIONS):
                saved += _saved_by_mixer(model, execution, kind) - input_bytes
    gates = activation_inputs(model)
    match kind.mlp:
        case "dense":
            width = sum(name in execution.saved for name in gates) * model.ffn_width
            saved += 2.0 * tokens * width / t
        case "experts":
            if not execution.recomputes(*gates):
                first = kind.mixer is None  # the input of the layer
                saved += _saved_by_mlp(model, execution, kind) - (input_bytes if first else 0.0)
        case None:
            pass
    return saved


def _saved_scores(model: Transformer, execution: Execution, kind: LayerKind) -> float:
    """Return the saved bytes of the scores: softmax, its copy after dropout, and the mask."""
    if model.attention != "naive" or kind.mixer not in ("attention", "window", "cross"):
        return 0.0
    keys = model.keys_of(kind.mixer)
    scores = execution.microbatch * model.heads * model.seq * keys / execution.tensor
    composed = composed_saved("softmax", score_elements(model, execution, keys), execution)
    return (5.0 if model.drops_scores else 2.0) * scores + composed
