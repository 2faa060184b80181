"""The sweep as data: which jobs there are, checked before anything runs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, get_args

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from experiments.job import Job, Source
from experiments.models import build_model
from experiments.names import known
from experiments.strategies import STRATEGIES
from simulator.cluster import Cluster

SCHEMA = Path(__file__).parent / "schemas" / "config.schema.yaml"


@dataclass(frozen=True, slots=True)
class Sweep:
    """A checked configuration: the jobs of each source by name, which collectives to time, and how long to measure."""

    jobs: Mapping[Source, Mapping[str, Job]]
    collectives: Mapping[str, Any]
    measure: Mapping[str, int]
    published: str

    def __getitem__(self, name: str) -> Job:
        """The job of that name, whichever source asks for it."""
        return next(jobs[name] for jobs in self.jobs.values() if name in jobs)

    @property
    def cells(self) -> list[str]:
        """For each job of each source, `source/job`: where its results are, below results/cells."""
        return [f"{source}/{name}" for source, jobs in self.jobs.items() for name in jobs]

    @property
    def figures(self) -> list[str]:
        """Names of the figures: `source/platform/model-size`, one for each model on each platform."""
        return list(dict.fromkeys(cell.rsplit("/", 1)[0] for cell in self.cells))


def make_sweep(config: Mapping[str, Any]) -> Sweep:
    """Check `config` and list its jobs. A `ValueError` says which key or name is wrong, and what is valid."""
    errors = Draft202012Validator(yaml.safe_load(SCHEMA.read_text())).iter_errors(dict(config))
    for error in sorted(errors, key=lambda error: list(map(str, error.absolute_path))):
        raise ValueError(_explain(error))
    for name in config["strategies"]:
        known("strategy", name, STRATEGIES)
    for model, sizes in config["models"].items():
        for numbers in sizes.values():
            build_model(model, numbers)
    jobs: dict[Source, dict[str, Job]] = {source: {} for source in get_args(Source)}
    for platform in config["platforms"]:
        for job in _jobs(platform, config):
            if jobs[platform["source"]].setdefault(job.name, job) != job:
                raise ValueError(f"two clusters are called {job.platform!r}; give one of the files another name")
    return Sweep(jobs, config["collectives"], config["measure"], config["published"])


def _jobs(platform: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[Job]:
    cluster = Cluster.load(platform["cluster"])
    for model, size in platform["models"].items():
        sizes = config["models"][known("model", model, config["models"])]
        numbers = sizes[known(f"size of {model}", size, sizes)]
        built = build_model(model, numbers)
        for mesh in map(tuple, platform.get("meshes", config["meshes"])):
            if prod(mesh) > cluster.num_devices:
                raise ValueError(
                    f"mesh {mesh} has {prod(mesh)} devices, but {cluster.name} only {cluster.num_devices}; use smaller meshes"
                    " or a cluster with more hosts"
                )
            strategies = tuple(name for name in config["strategies"] if STRATEGIES[name].runs_on(built, mesh))
            if strategies:
                yield Job(model, size, numbers, platform["cluster"], mesh, strategies)


def _explain(error: ValidationError) -> str:
    where = ".".join(map(str, error.absolute_path)) or "the top level"
    schema: Mapping[str, Any] = error.schema  # pyright: ignore[reportAssignmentType]
    match error.validator:
        case "additionalProperties":
            given: Mapping[str, Any] = error.instance  # pyright: ignore[reportAssignmentType]
            for key in given:
                try:
                    known("key", key, schema["properties"])
                except ValueError as unknown:
                    return f"configuration, at {where}: {unknown}"
    return f"configuration, at {where}: {error.message}"
