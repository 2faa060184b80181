"""Passes over a dense MLP."""

from simulator.transformer.composed_kernels import composed_norm, composed_passes
from simulator.transformer.machine import Machine
from simulator.transformer.pass_cost import (
    PartPasses,
    linear_passes,
    residual_passes,
    tensor_collectives,
)
from simulator.transformer.scenario import Execution, Transformer


def mlp_passes(model: Transformer, execution: Execution, machine: Machine) -> PartPasses:
    """Return the passes of one microbatch over the dense MLP of a layer."""
    t, h, w = execution.tensor, model.hidden, 2
    up = (2 if model.gated else 1) * model.ffn_width // t
    down = model.ffn_width // t
    shapes = ((up, h), (h, down))
    adapters = model.adapters
    adapted = len(shapes) if adapters is not None and adapters.of == "all" else 0
    linear = linear_passes(shapes, model, execution, machine, adapted=adapted)
    inner = w * execution.tokens(model) * model.ffn_width / t
    read_and_written = 3 if model.gated else 2
    elementwise = residual_passes(
        model,
        execution,
        machine,
        read_and_written * inner,
        (2 * read_and_written - 1 + (1 if model.biases else 0)) * inner,
    )
    collectives = tensor_collectives(up, down, model, execution, machine)
    norm = composed_norm(execution.stream(model), execution, machine)
    elements = inner / w if model.gated else 0.0
    activation = composed_passes("activation", elements, execution, machine)
    return PartPasses(
        elementwise[0] + norm[0] + activation[0] + linear[0] + collectives[0],
        elementwise[1] + norm[1] + activation[1] + linear[1] + collectives[1],
    )
