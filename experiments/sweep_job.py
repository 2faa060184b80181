"""Jobs and cells, and the sweep that they make up. Imports nothing slow.

A *cell* is one row of the results: a model of some size, on a mesh, under a strategy, on a
platform, simulated or measured. Cells that differ only in the strategy make a *job*: they share one
process and the start of JAX.
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
        source: whether its cells are simulated or measured.
        model: name of the model, one of `experiments.models.MODELS`.
        size: name of its size.
        sizes: the numbers of that size, by field of the model.
        cluster: the cluster that the planner plans for and the simulator predicts: the name of a
            shipped one or the path of a YAML file.
        mesh: devices along each axis of the logical mesh.
        strategies: names of the strategies, in the order of their rows.
    """

    source: Source
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
    def figure(self) -> str:
        """The figure that shows its cells, e.g. `simulated/p3.16xlarge/mlp-2048`."""
        return f"{self.source}/{self.platform}/{self.model}-{self.size}"

    @property
    def name(self) -> str:
        """The folder of its results, e.g. `simulated/p3.16xlarge/mlp-2048/2x4`."""
        return f"{self.figure}/{mesh_name(self.mesh)}"

    @property
    def cells(self) -> list[str]:
        """Names of its cells, e.g. `simulated/p3.16xlarge/mlp-2048/2x4/shard`."""
        return [f"{self.name}/{strategy}" for strategy in self.strategies]

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


@dataclass(frozen=True, slots=True)
class Sweep:
    """A checked configuration.

    Attributes:
        jobs: the jobs by name, in the order of the configuration.
        cluster_files: for each cluster, the files that describe it.
        collectives: which collectives to time.
        measure: how often to run a measured step: `warmup`, `repeat` and `number`.
        published: path of the file with published numbers, from the root of the project.
    """

    jobs: Mapping[str, Job]
    cluster_files: Mapping[str, list[str]]
    collectives: Mapping[str, Any]
    measure: Mapping[str, int]
    published: str

    @property
    def cells(self) -> list[str]:
        """Names of all cells."""
        return [cell for job in self.jobs.values() for cell in job.cells]

    @property
    def figures(self) -> dict[str, list[str]]:
        """For each figure, a model on a platform, the names of the jobs that it shows."""
        figures: dict[str, list[str]] = {}
        for job in self.jobs.values():
            figures.setdefault(job.figure, []).append(job.name)
        return figures

    def to_json(self) -> str:
        """Return the sweep as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Sweep":
        """Return the sweep that `to_json` wrote."""
        fields = json.loads(text)
        jobs = {name: Job(**job) for name, job in fields.pop("jobs").items()}
        return cls(jobs, **fields)


def mesh_name(mesh: tuple[int, ...]) -> str:
    """Return `2x4` for the mesh shape `(2, 4)`."""
    return "x".join(map(str, mesh))
