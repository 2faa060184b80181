"""Closed-form model of transformer training: seconds and bytes of a step from its sizes.

Nothing is traced or compiled.

>>> from simulator import Cluster
>>> from simulator.transformer import Execution, Machine, Transformer, predict
>>> gpt = Transformer(layers=96, hidden=12288, heads=96, seq=2048, vocab=51200)
>>> execution = Execution(
...     tensor=8, pipeline=8, data=16, microbatch=1, global_batch=1024,
...     recompute="selective", sequence_parallel=True,
... )
>>> prediction = predict(gpt, execution, Machine(Cluster.load("dgx_a100_80").with_size(128)))
>>> f"{prediction.seconds:.1f} s, {prediction.memory.total / 1e9:.0f} GB, MFU {prediction.mfu:.0%}"
'16.8 s, 61 GB, MFU 42%'
"""

from simulator.backend import (
    CUDA_GRAPH,
    EAGER,
    JITTED,
    MEGATRON_CORE,
    MEGATRON_GRAPHS,
    ZERO_2021,
    Backend,
)
from simulator.transformer.layout_search import Layout, LayoutSearch, search_layouts
from simulator.transformer.machine import Machine
from simulator.transformer.scenario import Execution
from simulator.transformer.step import predict
from simulator.transformer.training_memory import Memory, memory_of
from simulator.transformer.transformer_sizes import Transformer

__all__ = [
    "CUDA_GRAPH",
    "EAGER",
    "JITTED",
    "MEGATRON_CORE",
    "MEGATRON_GRAPHS",
    "ZERO_2021",
    "Backend",
    "Execution",
    "Layout",
    "LayoutSearch",
    "Machine",
    "Memory",
    "Transformer",
    "memory_of",
    "predict",
    "search_layouts",
]
