"""Jobs and cells.

A *cell* is one row of the results: a model of some size, on a mesh, under a strategy, on a platform. Cells that differ only in
the strategy make a *job*: they share one process and the start of JAX.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

Source = Literal["simulated", "measured"]


@dataclass(frozen=True, slots=True)
class Job:
    """One model on one mesh of one platform, under every strategy that makes sense there.

    Attributes:
        size: the name of the size; `sizes` are its numbers.
        cluster: what the planner plans for and the simulator predicts: a shipped cluster's name or the path of a YAML file.
        mesh: devices along each axis of the logical mesh.
    """

    model: str
    size: str
    sizes: Mapping[str, Any]
    cluster: str
    mesh: tuple[int, ...]
    strategies: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", tuple(self.mesh))
        object.__setattr__(self, "strategies", tuple(self.strategies))

    @property
    def platform(self) -> str:
        return Path(self.cluster).name.removesuffix(".yaml")

    @property
    def name(self) -> str:
        """Its place in `results`, e.g. `p3.16xlarge/mlp-2048/2x4`."""
        return f"{self.platform}/{self.model}-{self.size}/{mesh_name(self.mesh)}"

    @property
    def num_devices(self) -> int:
        return prod(self.mesh)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Job":
        return cls(**json.loads(text))


def mesh_name(mesh: tuple[int, ...]) -> str:
    """`(2, 4)` as `2x4`."""
    return "x".join(map(str, mesh))
