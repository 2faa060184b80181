"""Costs of the passes over a Mamba-2 layer."""

from simulator.transformer.machine import Machine
from simulator.transformer.pass_cost import (
    NO_COST,
    BothPasses,
    PartPasses,
    PassCost,
    linear_passes,
    residual_passes,
    sum_of_outputs,
    tensor_collectives,
)
from simulator.transformer.scenario import PROJECTIONS, Execution
from simulator.transformer.transformer_sizes import Transformer

_SCAN_KERNELS = 5
"""Kernels of the chunked scan: sums of time steps, states of chunks, their passage from chunk to
chunk, the products of projections, and the outputs."""

_SCAN_RATE = 0.45
"""FLOP of the scan per FLOP of the vector units.

It is fitted to the steps of Nemotron 3 Nano and Super on H100, B200, GB200 and GB300 in
simulator/validation/data/steps/megatron_bridge_25.09-26.08.csv (26 rows).
"""


def mamba_passes(model: Transformer, execution: Execution, machine: Machine) -> PartPasses:
    """Return the passes of one microbatch over the Mamba part of a layer.

    The kernels of the scan are Triton's. Their products are small, and limited by what feeds them:
    exponentials of decays, masks and conversions of each chunk in f32. The scan is therefore priced
    by the peak of the vector units.
    """
    mamba, t = model.mamba_section, execution.tensor
    tokens, h, w = execution.tokens(model), model.hidden, 2
    columns, rows = mamba.columns // t, mamba.inner // t
    linear = linear_passes(((columns, h), (h, rows)), model, execution, machine)
    collectives = tensor_collectives(columns, rows, model, execution, machine)
    flops = tokens * mamba.scan_flops / t
    rate = _SCAN_RATE * machine.cluster.device.vector_tflop_per_s * 1e12
    convolution = 2.0 * w * tokens * mamba.convolved / t
    gate = 3.0 * w * tokens * mamba.inner / t
    # inputs and outputs of the scan, and the states of chunks in f32, written and read
    states = 2 * 4.0 * tokens / mamba.chunk * mamba.inner * mamba.state / t
    scan = w * tokens * (mamba.convolved + mamba.inner) / t + states
    passes = residual_passes(
        model, execution, machine, convolution + gate, 2 * convolution + 2 * gate
    )
    bandwidth = machine.gemms.bandwidth
    launches = machine.launch_seconds
    passes += BothPasses(
        PassCost(
            max(flops / rate, scan / bandwidth) + _SCAN_KERNELS * launches,
            _SCAN_KERNELS,
            0.0,
            flops,
        ),
        PassCost(
            max(2.5 * flops / rate, 2.5 * scan / bandwidth) + 2 * _SCAN_KERNELS * launches,
            2 * _SCAN_KERNELS,
            0.0,
            2 * flops,
        ),
    )
    # the modules that can be recomputed are none of Mamba, whose norm is part of a linear layer
    unsaved = NO_COST if execution.recompute == "modules" else passes.forward
    if execution.recompute == "unsaved" and execution.recomputes(*PROJECTIONS):
        unsaved += linear.forward + sum_of_outputs(rows, model, execution, machine)
    forward, backward = passes + linear + collectives
    return PartPasses(forward, backward, unsaved=unsaved)
