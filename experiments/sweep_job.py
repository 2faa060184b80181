"""Jobs and cells.

A *cell* is one row of the results: a model of some size, on a mesh, under a strategy, on a
platform. Cells that differ only in the strategy make a *job*: they share one process and the start
of JAX.
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
    """One model on one mesh of one platform, under every strategy that applies there.

    Attributes:
        model: name of the model, one of `experiments.models.MODELS`.
        size: name of its size.
        sizes: the numbers of that size, by field of the model.
        cluster: the cluster that the planner plans for and the simulator predicts: the name of a
            shipped one or the path of a YAML file.
        mesh: devices along each axis of the logical mesh.
        strategies: names of the strategies, in the order of their rows.
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
        """The cluster's name, without the folder and the suffix of its file."""
        return Path(self.cluster).name.removesuffix(".yaml")

    @property
    def name(self) -> str:
        """The folder of its results, e.g. `p3.16xlarge/mlp-2048/2x4`."""
        return f"{self.platform}/{self.model}-{self.size}/{mesh_name(self.mesh)}"

    @property
    def num_devices(self) -> int:
        """Number of devices in the mesh."""
        return prod(self.mesh)

    def to_json(self) -> str:
        """Return the job as JSON with sorted keys, so that equal jobs have equal texts."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Job":
        """Return the job that `to_json` wrote."""
        return cls(**json.loads(text))


def mesh_name(mesh: tuple[int, ...]) -> str:
    """Return `2x4` for the mesh shape `(2, 4)`."""
    return "x".join(map(str, mesh))
