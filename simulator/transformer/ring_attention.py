"""Context parallelism by a ring: keys and values pass from device to device (arXiv 2310.01889).

In each step of the ring a device computes the scores of its queries with the keys that it has,
while it sends these keys and values to the next device. Each device has two pieces of a sequence,
one from either end, so that all have as much to do under a causal mask.
"""

from simulator.transformer.machine import Machine
from simulator.transformer.pass_cost import (
    COLLECTIVE_LAUNCHES,
    BothPasses,
    PassCost,
)
from simulator.transformer.scenario import Execution
from simulator.transformer.transformer_sizes import Transformer


def ring_passes(
    model: Transformer,
    execution: Execution,
    machine: Machine,
    core: BothPasses,
) -> BothPasses:
    """Return what a ring adds to the passes of attention.

    That is the exposed part of the sends, and kernels that join the results of the steps.

    Args:
        model: the model.
        execution: the execution, whose `context` is the length of the ring.
        machine: the machine.
        core: the passes of attention without the ring.
    """
    steps = execution.context - 1
    width = model.key_heads * (model.query_size + model.value_size)
    message = 2.0 * execution.tokens(model) * width / execution.tensor
    outputs = execution.tokens(model) * model.attention_width / execution.tensor
    far = execution.tensor * execution.context > machine.cluster.devices_per_host
    # a join reads a result in 2 bytes and a sum in f32, and writes the sum
    join = machine.memory_seconds(steps * 10.0 * outputs, steps)
    passes = []
    for cost, sent in zip(core, (message, 2 * message), strict=True):  # gradients go back too
        send = machine.network.send_seconds(sent, execution.tensor)
        exposed = steps * machine.exposed_send(send, cost.compute / execution.context, far)
        passes.append(
            PassCost(
                compute=join,
                kernels=steps * (1 + COLLECTIVE_LAUNCHES),
                communication=exposed,
                hidden=steps * send - exposed,
            )
        )
    return BothPasses(*passes)
