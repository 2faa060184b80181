"""A planned step compiled for devices that are here."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from autopar import report
from autopar.lower import jit_step, program_of
from autopar.plan import Plan
from autopar.target import memory_of
from autopar.trace import StepGraph
from simulator.memory import MemoryUse
from simulator.program import Program


class Executable:
    """One step, for arguments of one structure, shape and dtype.

    Attributes:
        step: what was traced.
        plan: how it runs.
        program: the same as instructions.
        mesh: the devices it runs on.
        jitted, compiled: the step as JAX has it, before and after compilation.
        in_shardings, out_shardings: pytrees like the arguments and the result.
        plan_seconds, compile_seconds: what tracing and planning, and compiling took.
    """

    def __init__(
        self, step: StepGraph, plan: Plan, mesh: Mesh, donate_argnums: Sequence[int] = (), plan_seconds: float = 0.0
    ) -> None:
        self.step = step
        self.plan = plan
        self.mesh = mesh
        self.program: Program = program_of(plan)
        self.plan_seconds = plan_seconds
        start = time.perf_counter()
        self.jitted = jit_step(step, plan, mesh, donate_argnums)
        self.compiled = self.jitted.lower(*step.in_avals).compile()
        self.compile_seconds = time.perf_counter() - start
        self.in_shardings: Any = self.compiled.input_shardings[0]
        self.out_shardings: Any = self.compiled.output_shardings

    def __call__(self, *args: Any) -> Any:
        """Run the step on arguments that are where `in_shardings` wants them."""
        return self.compiled(*args)

    def shard_args(self, *args: Any) -> tuple[Any, ...]:
        """`args` on the devices, as the plan wants them; what is in place already is not copied."""
        return tuple(jax.device_put(arg, shardings) for arg, shardings in zip(args, self.in_shardings, strict=True))

    @property
    def memory(self) -> MemoryUse:
        """Bytes on one device, by the compiler's buffer assignment."""
        return memory_of(self.compiled)

    def get_total_allocation_size(self) -> int:
        """Bytes that one device needs to run the step."""
        return self.memory.total

    def get_hlo_text(self, status: report.Status = "optimized") -> str:
        """The program: "traced", "annotated" with shardings, "partitioned" for one device, or "optimized" as it runs."""
        return report.hlo_text(self, status)

    def get_input_placement_specs(self) -> Any:
        """A tuple like the arguments, with a `PlacementSpec` for every array."""
        return report.input_placement_specs(self, self._device_ids)

    def get_output_placement_specs(self) -> Any:
        """A pytree like the result, with a `PlacementSpec` for every array."""
        return report.output_placement_specs(self, self._device_ids)

    @property
    def _device_ids(self) -> list[int]:
        return [device.id for device in self.mesh.devices.flat]

    def dump_debug_info(self, folder: str | Path, name: str | None = None) -> tuple[Path, ...]:
        """Write plan, reasons, placements, reshardings, programs and memory to `folder`; see `autopar.report.DEBUG_FILES`."""
        return report.dump_debug_info(self, folder, name)
