"""Costs of the passes over a dense MLP."""

from simulator.transformer.composed_kernels import composed_norm, composed_passes
from simulator.transformer.machine import Machine
from simulator.transformer.pass_cost import (
    NO_COST,
    PartPasses,
    PassCost,
    linear_passes,
    residual_passes,
    tensor_collectives,
)
from simulator.transformer.scenario import Execution, activation_inputs
from simulator.transformer.transformer_sizes import Transformer


def mlp_passes(model: Transformer, execution: Execution, machine: Machine) -> PartPasses:
    """Return the passes of one microbatch over the dense MLP of a layer."""
    t, h, w = execution.tensor, model.hidden, 2
    up = (2 if model.gated else 1) * model.ffn_width // t
    down = model.ffn_width // t
    separate = model.gated and execution.separate_gates
    shapes = ((down, h), (down, h), (h, down)) if separate else ((up, h), (h, down))
    adapters = model.adapters
    adapted = len(shapes) if adapters is not None and adapters.of == "all" else 0
    linear = linear_passes(shapes, model, execution, machine, adapted=adapted)
    elements = execution.tokens(model) * model.ffn_width / t
    inner, mask = w * elements, elements if model.inner_dropout else 0.0
    read_and_written = 3 if model.gated else 2
    elementwise = residual_passes(
        model,
        execution,
        machine,
        read_and_written * inner + mask,
        mask + (2 * read_and_written - 1 + (1 if model.biases else 0)) * inner,
    )
    inputs = 2 if separate else 1
    collectives = tensor_collectives(up, down, model, execution, machine, inputs)
    norm = composed_norm(execution.stream(model), execution, machine)
    kind = "activation" if model.gated else "gelu_by_xla"
    activation = composed_passes(kind, elements, execution, machine)
    dropped = mask + (execution.stream(model) if model.dropout else 0.0)
    dropout = composed_passes("dropout_by_xla", dropped, execution, machine)
    kernels = elementwise + norm + activation + dropout
    forward, backward = kernels + linear + collectives
    if execution.recompute == "modules":
        unsaved = forward if "mlp" in execution.recomputed else NO_COST
    else:
        unsaved = kernels.forward + _unsaved_products(model, execution, machine)
    return PartPasses(forward, backward, unsaved=unsaved)


def _unsaved_products(model: Transformer, execution: Execution, machine: Machine) -> PassCost:
    """Return the products before the activation whose results are not saved.

    What they read is gathered over the tensor axis for the gradients of their weights anyway, and
    the last product is not repeated, as the backward pass doesn't read its result.
    """
    if execution.recompute != "unsaved":
        return NO_COST
    unsaved = sum(result not in execution.saved for result in activation_inputs(model))
    columns = model.ffn_width // execution.tensor
    shapes = [(columns, model.hidden)] * unsaved
    if unsaved == 2 and not execution.separate_gates:
        shapes = [(2 * columns, model.hidden)]
    return linear_passes(shapes, model, execution, machine).forward if unsaved else NO_COST
