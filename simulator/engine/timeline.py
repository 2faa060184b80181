"""Timelines: the spans of one simulated step, and their sums."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from simulator.engine.perfetto import chrome_trace
from simulator.files import write_text
from simulator.hardware.heterogeneous import AnyCluster
from simulator.memory import Level, MemoryUse
from simulator.spans import Arrow, Category, Span, Stream

_IDLE = ("wait", "bubble", "host")


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step of a program on a cluster.

    Attributes:
        spans: what the streams of all meshes did.
        meshes: for each mesh, the ids of its devices.
        memory: for each mesh, the memory of one of its devices; empty if unknown.
        arrows: the values sent from mesh to mesh.
        levels: for each mesh, the memory of one of its devices by role, each level with the second
            at which it begins; empty if unknown.
        flops: FLOP of products and convolutions on all devices, by dtype; empty if unknown.
        unmodelled_kernels: how many kernels of each sort no model has the cost of. They were priced
            by their bytes.
        model_flops: FLOP that the step needs, as in `Program`; None if unknown.
        examples: examples that the step learns from; 0 if unknown.
    """

    spans: tuple[Span, ...]
    meshes: tuple[tuple[int, ...], ...]
    memory: tuple[MemoryUse, ...] = ()
    arrows: tuple[Arrow, ...] = ()
    levels: tuple[tuple[tuple[float, Level], ...], ...] = ()
    flops: Mapping[str, float] = field(default_factory=dict)
    unmodelled_kernels: Mapping[str, int] = field(default_factory=dict)
    model_flops: float | None = None
    examples: int = 0

    @property
    def makespan(self) -> float:
        """Seconds of the step."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def peak_bytes(self) -> int:
        """Bytes on the device that needs most; 0 if unknown."""
        return max((use.total for use in self.memory), default=0)

    def busy(self, mesh: int, stream: Stream) -> float:
        """Return the seconds in which a stream of a mesh does work, rather than wait."""
        return sum(
            span.seconds
            for span in self.spans
            if (span.mesh, span.stream) == (mesh, stream) and span.category not in _IDLE
        )

    def seconds_by_category(self, mesh: int) -> dict[Category, float]:
        """Return the seconds of each kind of kernel, collective and wait on a mesh."""
        total: Counter[Category] = Counter()
        for span in self.spans:
            if span.mesh == mesh:
                total[span.category] += span.seconds  # pyright: ignore[reportArgumentType]
        return dict(total)

    def tasks(self) -> list[Span]:
        """Return one span for each instruction, from its first to its last kernel, with waits."""
        starts: dict[tuple[int, str], float] = {}
        last: dict[tuple[int, str], Span] = {}
        for span in self.spans:
            if span.task and span.stream == "compute":
                starts.setdefault((span.mesh, span.task), span.start)
                last[span.mesh, span.task] = span
        return [
            replace(span, name=span.task, start=starts[key], busy=None)
            for key, span in last.items()
        ]

    def fits(self, cluster: AnyCluster) -> bool:
        """Return whether the memory of every mesh fits on its devices of `cluster`.

        Raises:
            ValueError: the memory is unknown.
        """
        if not self.memory:
            raise ValueError(
                "this timeline knows no memory; give the program `memory`, one MemoryUse per mesh"
            )
        return all(
            use.total <= cluster.pools[cluster.pool_of(devices)].device.usable_bytes
            for use, devices in zip(self.memory, self.meshes, strict=True)
        )

    def __str__(self) -> str:
        rows = [f"{self.makespan * 1e3:.3f} ms, {self.peak_bytes / 1e9:.3f} GB"]
        for mesh in range(len(self.meshes)):
            parts = sorted(self.seconds_by_category(mesh).items(), key=lambda part: -part[1])
            rows.append(
                f"mesh {mesh}: "
                + ", ".join(f"{name} {seconds * 1e3:.3f} ms" for name, seconds in parts)
            )
        for mesh, use in enumerate(self.memory):
            parts = sorted(use.parts().items(), key=lambda part: -part[1])
            rows.append(
                f"mesh {mesh} holds "
                + ", ".join(f"{name} {size / 1e9:.3f} GB" for name, size in parts if size)
            )
        rows += [
            f"{count} x {name}: cost unknown, priced by its bytes"
            for name, count in self.unmodelled_kernels.items()
        ]
        return "\n".join(rows)

    def chrome_trace(self) -> dict[str, Any]:
        """Return the timeline in the Trace Event Format, which ui.perfetto.dev opens.

        What the format has no events for is under the key `otherData`.
        """
        trace = chrome_trace(self.meshes, self.tasks(), self.spans, self.arrows, self.levels)
        other = {
            "meshes": list(map(list, self.meshes)),
            "memory": list(map(asdict, self.memory)),
            "flops": dict(self.flops),
            "unmodelled_kernels": dict(self.unmodelled_kernels),
            "model_flops": self.model_flops,
            "examples": self.examples,
        }
        return trace | {"otherData": other}

    def save_chrome_trace(self, path: str | Path) -> None:
        """Write `chrome_trace` as JSON; `load_timeline` reads it.

        Raises:
            FileError: the file can't be written.
        """
        write_text(path, json.dumps(self.chrome_trace()))
