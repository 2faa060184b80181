"""The sweep as data: which jobs there are, checked before anything runs."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, prod
from pathlib import Path
from typing import Any, get_args

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend

from experiments.models import MODELS, build_model
from experiments.names import known
from experiments.strategies import STRATEGIES
from experiments.sweep_job import Job, Source
from simulator import Cluster
from simulator.files import brief, one_line, read_yaml

ROOT = Path(__file__).parent.parent
SCHEMA = Path(__file__).parent / "schemas" / "config.schema.yaml"
PUBLISHED_SCHEMA = Path(__file__).parent / "schemas" / "published.schema.yaml"

_LEAST_ROWS = 5  # of each kind of collective, one for each parameter of a curve


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
    check(config, SCHEMA, "configuration")
    for name in config["strategies"]:
        known("strategy", name, STRATEGIES)
    for model, sizes in config["models"].items():
        for size, numbers in sizes.items():
            if not re.fullmatch(r"[\w.\-]+", size):
                raise ValueError(
                    f"configuration, at models.{model}: a size called {brief(size)}; expected letters, digits, '.', '_' and '-', as files are "
                    "called like it"
                )
            build_model(model, numbers)
    _check_collectives(config["collectives"])
    _check_published(config["published"])
    jobs: dict[Source, dict[str, Job]] = {source: {} for source in get_args(Source)}
    for number, platform in enumerate(config["platforms"]):
        of_platform = list(_jobs(platform, config))
        if not of_platform:
            raise ValueError(
                f"configuration, at platforms.{number}: none of the strategies {', '.join(config['strategies'])} runs any of its models on any of "
                "its meshes; expected one that does"
            )
        for job in of_platform:
            if jobs[platform["source"]].setdefault(job.name, job) != job:
                raise ValueError(
                    f"two clusters are called {job.platform!r}; give one of the files another name"
                )
    return Sweep(jobs, config["collectives"], config["measure"], config["published"])


def _jobs(platform: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[Job]:
    cluster = Cluster.load(platform["cluster"])
    if platform["source"] == "simulated" and cluster.device.xla_target is None:
        raise ValueError(
            f"{cluster.name} can't be simulated: {cluster.device.name!r} has no xla_target to compile for; expected source: measured, or "
            "another cluster"
        )
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
            cluster.first_devices(prod(mesh))  # whole hosts, or part of one
            strategies = tuple(
                name for name in config["strategies"] if STRATEGIES[name].runs_on(built, mesh)
            )
            if strategies:
                yield Job(model, size, numbers, platform["cluster"], mesh, strategies)


def check(given: Any, schema: Path, what: str) -> None:
    """Check that `given` is as a schema file says; a `ValueError` says where it is not."""
    _check_keys(given, what)
    errors = _Validator(read_yaml(schema)).iter_errors(given)
    for error in sorted(errors, key=lambda error: list(map(str, error.absolute_path))):
        raise ValueError(one_line(f"{what}, at {_explain(error)}"))


def _check_keys(given: Any, where: str) -> None:
    """Refuse keys that are no texts, such as a size that is called 2048 without quotes: results are called like them."""
    match given:
        case Mapping():
            for key, value in given.items():
                if not isinstance(key, str):
                    raise ValueError(
                        f"{where}: a key {brief(key)}; expected a text, in quotes where it is a number"
                    )
                _check_keys(value, f"{where}.{key}")
        case list():
            for number, value in enumerate(given):
                _check_keys(value, f"{where}.{number}")
        case _:
            pass


def _check_collectives(given: Mapping[str, Any]) -> None:
    """Refuse collectives that can't be measured on their cluster, or to which no curve can be fitted."""
    cluster, sizes, kib = Cluster.load(given["cluster"]), given["group_sizes"], given["sizes_kib"]
    if max(sizes) > cluster.num_devices:
        raise ValueError(
            f"configuration, at collectives.group_sizes: a group of {max(sizes)} devices, but {cluster.name} has {cluster.num_devices}"
        )
    if len(sizes) * len(kib) < _LEAST_ROWS:
        raise ValueError(
            f"configuration, at collectives: {len(sizes)} group_sizes and {len(kib)} sizes_kib; expected {_LEAST_ROWS} combinations at least, "
            "to which curves are fitted"
        )
    if max(kib) * 1024 > cluster.device.memory_bytes:
        raise ValueError(
            f"configuration, at collectives.sizes_kib: given {brief(max(kib))}, which is more than the {cluster.device.memory_gb:g} GB of a device of "
            f"{cluster.name}"
        )


def _check_published(path: str) -> None:
    """Refuse a file of published numbers that tables could not be made of."""
    papers = read_yaml(ROOT / path, "published numbers, as in experiments/config/published.yaml")
    check(papers, PUBLISHED_SCHEMA, path)
    for paper in papers:
        known("model", paper["model"], MODELS)
        for row in paper["rows"]:
            known("strategy", row["strategy"], STRATEGIES)


def _is_whole(checker: object, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(checker: object, value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < inf


_Validator = extend(
    Draft202012Validator,
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine_many(
        {"integer": _is_whole, "number": _is_finite}
    ),
)
"""In JSON schemas 2.0 is an integer, and infinity a number."""


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
                    return f"{where}: {unknown}"
    return f"{where}: {error.message}"
