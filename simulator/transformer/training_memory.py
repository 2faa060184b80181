"""Peak memory of a device of the first pipeline stage, which needs most, by role."""

from dataclasses import dataclass

from simulator.transformer.scenario import Execution, Transformer


@dataclass(frozen=True, slots=True)
class Memory:
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


def memory_of(model: Transformer, execution: Execution) -> Memory:
    """Return the memory of the first stage.

    Activations are counted as by Korthikanti et al. (arXiv 2205.05198), section 4.

    Raises:
        ValueError: the degrees of parallelism don't divide the sizes of the model.
    """
    execution.check(model)
    layers = model.layers // execution.pipeline
    elements, ends = stage_parameters(model, execution)
    shards = [execution.replicas if execution.zero >= level else 1 for level in (3, 2, 1)]
    sizes = [
        2 / shards[0],
        execution.gradient_bytes / shards[1],
        execution.optimizer_bytes / shards[2],
    ]
    parameters, gradients, optimizer = (elements * size for size in sizes)
    embedding = ends * sum(sizes)
    # the first stage has a microbatch in flight for each stage of the pipeline, and a few chunks
    # more with interleaving (eq. 5 and appendix B)
    in_flight = (
        execution.microbatches
        if execution.schedule == "gpipe"
        else min(execution.microbatches, execution.pipeline)
    )
    if execution.interleave > 1:
        in_flight = min(
            execution.microbatches,
            execution.pipeline
            * (1 + (execution.pipeline - 1) / (execution.pipeline * execution.interleave)),
        )
    activations = in_flight * layers * saved_activations(model, execution)
    temporaries = _layer_temporaries(model, execution)
    if execution.pipeline == 1:  # the loss is on this device too
        temporaries = max(temporaries, _loss_temporaries(model, execution))
    return Memory(parameters, gradients, optimizer, embedding, activations, temporaries)


def stage_parameters(model: Transformer, execution: Execution) -> tuple[float, float]:
    """Return the elements of parameters on a device of the first stage: of layers, of embeddings.

    ZeRO may shard them over the data axis.
    """
    layers = model.layers // execution.pipeline * (model.layer_matrices + model.layer_vectors)
    head = model.vocab * model.hidden if execution.pipeline == 1 and not model.tied else 0
    return layers / execution.tensor, (model.embedding + head) / execution.tensor


def _layer_temporaries(model: Transformer, execution: Execution) -> float:
    """Return the bytes that are live only in the backward pass of a layer.

    They are recomputed activations, their gradients, the gradient of the largest matrix, and with
    ZeRO-3 gathered parameters.
    """
    tokens = execution.tokens(model)
    t = execution.tensor
    up = (2 if model.gated else 1) * model.ffn_width
    recomputed = layer_activations(model, execution) - saved_activations(model, execution)
    # those of the inner width, which the tensor axis divides; those of input and output, which it
    # does not
    gradients = 2.0 * tokens * (up + model.ffn_width) / t + 2 * 2.0 * tokens * model.hidden
    largest = execution.gradient_bytes * model.hidden * up / t
    gathered = (
        2.0 * 2.0 * (model.layer_matrices + model.layer_vectors) / t if execution.zero == 3 else 0.0
    )
    return recomputed + gradients + largest + gathered


def _loss_temporaries(model: Transformer, execution: Execution) -> float:
    """Return the bytes of logits, their gradient, and the gradient of the output embedding.

    Logits have a copy in f32 unless the loss is fused.
    """
    logits = execution.tokens(model) * model.vocab / execution.tensor
    largest = execution.gradient_bytes * model.vocab * model.hidden / execution.tensor
    return (2.0 if execution.fused_loss else 10.0) * logits + largest


def layer_activations(model: Transformer, execution: Execution) -> float:
    """Return the bytes that a layer saves for backward per microbatch, without recomputation."""
    return _saved_outside_scores(model, execution) + _saved_scores(model, execution)


def saved_activations(model: Transformer, execution: Execution) -> float:
    """Return the bytes that a layer saves for backward per microbatch."""
    match execution.recompute:
        case "none":
            return layer_activations(model, execution)
        case "selective":
            return _saved_outside_scores(model, execution)
        case "full":
            return (
                2.0
                * execution.tokens(model)
                * model.hidden
                / (execution.tensor if execution.sequence_parallel else 1)
            )


def _saved_outside_scores(model: Transformer, execution: Execution) -> float:
    """Return the saved bytes except for the scores.

    In a GPT they are 34 per token and hidden element; the tensor axis divides 10 of them only with
    sequence parallelism.
    """
    tokens = execution.tokens(model)
    t = execution.tensor
    stream = tokens * model.hidden
    # inputs of two norms and of the products that follow them; two masks of dropout
    undivided = (8 + (2 if model.dropout else 0)) * stream
    qkv = 2.0 * tokens * model.qkv_width
    # inputs of the activation function and of the second product
    inner = (2 if not model.gated else 3) * 2.0 * tokens * model.ffn_width
    divided = qkv + 2.0 * stream + inner
    if model.attention != "naive":
        divided += 4.0 * tokens * model.heads  # row sums of the softmax
    return undivided / (t if execution.sequence_parallel else 1) + divided / t


def _saved_scores(model: Transformer, execution: Execution) -> float:
    """Return the saved bytes of the scores: softmax, its copy after dropout, and the mask."""
    if model.attention != "naive":
        return 0.0
    scores = execution.microbatch * model.heads * model.seq**2 / execution.tensor
    return (5.0 if model.dropout else 2.0) * scores
