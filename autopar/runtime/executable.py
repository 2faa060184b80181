"""A planned step compiled for devices that are here."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from autopar.lower import jit_step, program_of
from autopar.plan import Plan
from autopar.target import memory_of
from autopar.trace import StepGraph
from simulator.memory import MemoryUse
from simulator.program import Program


class Executable:
    """One step, for arguments of one structure, shape and dtype.

    Attributes:
        plan: what it runs.
        program: the same as instructions.
        mesh: the devices it runs on.
        in_shardings, out_shardings: pytrees like the arguments and the result.
        plan_seconds, compile_seconds: what tracing and planning, and compiling took.
    """

    def __init__(
        self, step: StepGraph, plan: Plan, mesh: Mesh, donate_argnums: Sequence[int] = (), plan_seconds: float = 0.0
    ) -> None:
        self.plan = plan
        self.mesh = mesh
        self.program: Program = program_of(plan)
        self.plan_seconds = plan_seconds
        start = time.perf_counter()
        self._compiled = jit_step(step, plan, mesh, donate_argnums).lower(*step.in_avals).compile()
        self.compile_seconds = time.perf_counter() - start
        self.in_shardings: Any = self._compiled.input_shardings[0]
        self.out_shardings: Any = self._compiled.output_shardings

    def __call__(self, *args: Any) -> Any:
        """Run the step on arguments that are where `in_shardings` wants them."""
        return self._compiled(*args)

    def shard_args(self, *args: Any) -> tuple[Any, ...]:
        """`args` on the devices, as the plan wants them; what is in place already is not copied."""
        return tuple(jax.device_put(arg, shardings) for arg, shardings in zip(args, self.in_shardings, strict=True))

    @property
    def memory(self) -> MemoryUse:
        """Bytes on one device, by the compiler's buffer assignment."""
        return memory_of(self._compiled)

    def get_total_allocation_size(self) -> int:
        """Bytes that one device needs to run the step."""
        return self.memory.total

    def get_hlo_text(self) -> str:
        """The compiled program of one device."""
        return self._compiled.as_text() or ""

    def save_plan(self, path: str | Path) -> None:
        self.plan.save(path)
