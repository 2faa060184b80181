"""Bytes per device, by what they hold: the busiest stage of the pipeline, which is the first."""

from dataclasses import dataclass

from simulator.transformer.scenario import Execution, Transformer


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the device that needs most.

    Attributes:
        parameters, gradients, optimizer: of the layers on this device.
        embedding: all three, of the embeddings on it.
        activations: kept for the backward pass, of all microbatches in flight.
        temporaries: of the layer at work: what is recomputed, gathered parameters, logits.
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
        return self.states + self.activations + self.temporaries


def memory_of(model: Transformer, plan: Execution) -> Memory:
    """The memory of the first stage; activations as in Korthikanti et al. (arXiv 2205.05198), section 4."""
    plan.check(model)
    layers = model.layers // plan.pipeline
    elements, ends = stage_parameters(model, plan)
    share = [plan.replicas if plan.zero >= level else 1 for level in (3, 2, 1)]
    sizes = [2 / share[0], plan.gradient_bytes / share[1], plan.optimizer_bytes / share[2]]
    parameters, gradients, optimizer = (elements * size for size in sizes)
    embedding = ends * sum(sizes)
    # the first stage holds a microbatch for each stage of the pipeline, with interleaving a few chunks more (eq. 5 and appendix B)
    flight = (
        plan.microbatches if plan.schedule == "gpipe" else min(plan.microbatches, plan.pipeline)
    )
    if plan.interleave > 1:
        flight = min(
            plan.microbatches,
            plan.pipeline * (1 + (plan.pipeline - 1) / (plan.pipeline * plan.interleave)),
        )
    activations = flight * layers * kept_activations(model, plan)
    temporaries = _layer_temporaries(model, plan)
    if plan.pipeline == 1:  # the loss is on this device too
        temporaries = max(temporaries, _loss_temporaries(model, plan))
    return Memory(parameters, gradients, optimizer, embedding, activations, temporaries)


def stage_parameters(model: Transformer, plan: Execution) -> tuple[float, float]:
    """Elements of the parameters on a device of the first stage, before any are divided over the data axis: of layers, of embeddings."""
    layers = model.layers // plan.pipeline * (model.layer_matrices + model.layer_vectors)
    head = model.vocab * model.hidden if plan.pipeline == 1 and not model.tied else 0
    return layers / plan.tensor, (model.embedding + head) / plan.tensor


def _layer_temporaries(model: Transformer, plan: Execution) -> float:
    """What is alive while the backward pass of a layer runs: activations computed again, their gradients, that of the largest matrix."""
    tokens, t, up = plan.tokens(model), plan.tensor, (2 if model.gated else 1) * model.ffn_width
    again = layer_activations(model, plan) - kept_activations(model, plan)
    # of the inner width; in and out, whole
    gradients = 2.0 * tokens * (up + model.ffn_width) / t + 2 * 2.0 * tokens * model.hidden
    largest = plan.gradient_bytes * model.hidden * up / t
    gathered = (
        2.0 * 2.0 * (model.layer_matrices + model.layer_vectors) / t if plan.zero == 3 else 0.0
    )
    return again + gradients + largest + gathered


def _loss_temporaries(model: Transformer, plan: Execution) -> float:
    """Logits and their gradient, in f32 too unless the loss is fused, and the gradient of the output embedding."""
    logits = plan.tokens(model) * model.vocab / plan.tensor
    largest = plan.gradient_bytes * model.vocab * model.hidden / plan.tensor
    return (2.0 if plan.fused_loss else 10.0) * logits + largest


def layer_activations(model: Transformer, plan: Execution) -> float:
    """Bytes that one layer and microbatch keep where nothing is recomputed."""
    return _outside(model, plan) + _scores(model, plan)


def kept_activations(model: Transformer, plan: Execution) -> float:
    """Bytes that one layer and microbatch keep until the backward pass."""
    match plan.recompute:
        case "none":
            return layer_activations(model, plan)
        case "selective":
            return _outside(model, plan)
        case "full":
            return (
                2.0
                * plan.tokens(model)
                * model.hidden
                / (plan.tensor if plan.sequence_parallel else 1)
            )


def _outside(model: Transformer, plan: Execution) -> float:
    """All but the scores: 34 bytes per token and hidden element in a GPT, 10 of them whole unless the sequence is divided."""
    tokens, t = plan.tokens(model), plan.tensor
    stream = tokens * model.hidden
    whole = (
        8 + (2 if model.dropout else 0)
    ) * stream  # inputs of two norms and of the products behind them; two masks
    qkv = 2.0 * tokens * model.qkv_width
    # of the activation, and of the second product
    inner = (2 if not model.gated else 3) * 2.0 * tokens * model.ffn_width
    divided = qkv + 2.0 * stream + inner
    if model.attention != "naive":
        divided += 4.0 * tokens * model.heads  # sums of the softmax
    return whole / (t if plan.sequence_parallel else 1) + divided / t


def _scores(model: Transformer, plan: Execution) -> float:
    """Softmax, its dropped-out copy and the mask, of each head."""
    if model.attention != "naive":
        return 0.0
    scores = plan.microbatch * model.heads * model.seq**2 / plan.tensor
    return (5.0 if model.dropout else 2.0) * scores
