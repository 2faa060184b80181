"""A job loaded on a worker: `LoadedJob` with exported programs and transfers between workers."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from autopar.devices import Device
from autopar.ir.evaluate import FFT_OPTIONS
from autopar.lowering.job import Call, Job
from autopar.lowering.memory_limit import compile_on
from autopar.report.program_text import TaskStatus, partitioned
from autopar.runtime.carriers import PieceCarrier
from autopar.runtime.loaded_job import LoadedJob
from autopar.runtime.mailbox import Mailbox
from simulator.program import Run


class WorkerJob(LoadedJob):
    """A job that is ready to run on a worker."""

    def __init__(
        self,
        job: Job,
        worker: int,
        owner: Mapping[int, int],
        devices: Mapping[int, Device],
        mailbox: Mailbox | None,
    ) -> None:
        """Compile the worker's part of a job.

        Args:
            job: the worker's part.
            worker: number of the worker.
            owner: for each device its worker.
            devices: devices by number, of this worker and of those that it shares a mesh with.
            mailbox: the worker's end of the transfers; None if it has no deliveries.
        """
        self._exported = {
            key: jax.export.deserialize(bytearray(blob)) for key, blob in job.programs.items()
        }
        self._compiled: dict[Any, jax.stages.Compiled] = {}
        carrier = partial(
            PieceCarrier, devices=devices, worker=worker, owner=owner, mailbox=mailbox
        )
        super().__init__(job, devices, self._compile, carrier, len(set(owner.values())))

    def text(self, run: Run, status: TaskStatus) -> str:
        """Return the program of an instruction after a stage of its compilation."""
        if status == "optimized":
            return self.calls[run].compiled.as_text() or ""
        call = self.job.calls[run]
        return partitioned(self._lowered(call), len(call.devices))

    def _compile(self, run: Run, call: Call) -> jax.stages.Compiled:
        operands = tuple(map(self.sharding, call.operands))
        results = tuple(map(self.sharding, call.results))
        key = call.program, operands, results, call.donated
        if key not in self._compiled:
            self._compiled[key] = compile_on(
                self._lowered(call), self.job.memory_budget, jax.local_devices()[0]
            )
        return self._compiled[key]

    def _lowered(self, call: Call) -> jax.stages.Lowered:
        exported = self._exported[call.program]
        is_fft = self.waits(call) and "stablehlo.fft" in exported.mlir_module()
        jitted = jax.jit(
            partial(_call_exported, exported),
            in_shardings=tuple(map(self.sharding, call.operands)),
            out_shardings=list(map(self.sharding, call.results)),
            donate_argnums=call.donated,
            keep_unused=True,
            compiler_options=FFT_OPTIONS if is_fft else None,
        )
        return jitted.lower(*(operand.raw for operand in call.operands))


def _call_exported(exported: Any, *operands: Any) -> list[Any]:
    return list(exported.call(*operands))
