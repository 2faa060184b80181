"""The configuration of the sweep, checked, and the jobs that follow from it."""

import re
from collections.abc import Iterator, Mapping
from math import inf, prod
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend

from experiments.models import MODELS, build_model
from experiments.names import check_name
from experiments.strategies import STRATEGIES
from experiments.sweep_job import Job, Sweep
from simulator import Cluster, cluster_files
from simulator.files import brief, one_line, read_yaml

ROOT = Path(__file__).parent.parent
SCHEMA = Path(__file__).parent / "schemas" / "config.schema.yaml"
PUBLISHED_SCHEMA = Path(__file__).parent / "schemas" / "published.schema.yaml"

_LEAST_ROWS = 5
"""Measurements of each kind of collective, at least: one for each parameter of a curve."""


def make_sweep(config: Mapping[str, Any]) -> Sweep:
    """Check a configuration and list its jobs.

    Raises:
        ValueError: a key, a name or a number is wrong; the message says which, and what is valid.
    """
    check(config, SCHEMA, "configuration")
    for name in config["strategies"]:
        check_name("strategy", name, STRATEGIES)
    for model, sizes in config["models"].items():
        for size, numbers in sizes.items():
            if not re.fullmatch(r"[\w.\-]+", size):
                raise ValueError(
                    f"configuration, at models.{model}: a size called {brief(size)}; expected"
                    " letters, digits, '.', '_' and '-', as files are called like it"
                )
            build_model(model, numbers)
    _check_collectives(config["collectives"])
    _check_published(config["published"])
    jobs: dict[str, Job] = {}
    for number, platform in enumerate(config["platforms"]):
        platform_jobs = list(_jobs(platform, config))
        if not platform_jobs:
            raise ValueError(
                f"configuration, at platforms.{number}: none of the strategies"
                f" {', '.join(config['strategies'])} runs any of its models on any of its meshes;"
                " expected one that does"
            )
        for job in platform_jobs:
            if jobs.setdefault(job.name, job) != job:
                raise ValueError(
                    f"two clusters are called {job.platform!r}; give one of the files another name"
                )
    clusters = {job.cluster for job in jobs.values()} | {config["collectives"]["cluster"]}
    files = {cluster: list(map(str, cluster_files(cluster))) for cluster in sorted(clusters)}
    return Sweep(jobs, files, config["collectives"], config["measure"], config["published"])


def _jobs(platform: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[Job]:
    """Yield the jobs of one platform of the configuration."""
    cluster = Cluster.load(platform["cluster"])
    if platform["source"] == "simulated" and cluster.device.xla_target is None:
        raise ValueError(
            f"{cluster.name} can't be simulated: {cluster.device.name!r} has no xla_target to"
            " compile for; expected source: measured, or another cluster"
        )
    for model, size in platform["models"].items():
        sizes = config["models"][check_name("model", model, config["models"])]
        numbers = sizes[check_name(f"size of {model}", size, sizes)]
        built = build_model(model, numbers)
        for mesh in map(tuple, platform.get("meshes", config["meshes"])):
            if prod(mesh) > cluster.num_devices:
                raise ValueError(
                    f"mesh {mesh} has {prod(mesh)} devices, but {cluster.name} only"
                    f" {cluster.num_devices}; use smaller meshes or a cluster with more hosts"
                )
            cluster.first_devices(prod(mesh))  # raises unless they are whole hosts, or part of one
            strategies = tuple(
                name for name in config["strategies"] if STRATEGIES[name].runs_on(built, mesh)
            )
            if strategies:
                yield Job(
                    platform["source"], model, size, numbers, platform["cluster"], mesh, strategies
                )


def check(given: Any, schema: Path, what: str) -> None:
    """Check `given` against a schema file.

    Args:
        given: the value, of dicts, lists, texts and numbers.
        schema: a JSON schema, in YAML.
        what: what the value is, for errors.

    Raises:
        ValueError: it does not have the schema; the message says where.
    """
    _check_keys(given, what)
    errors = _Validator(read_yaml(schema)).iter_errors(given)
    for error in sorted(errors, key=lambda error: list(map(str, error.absolute_path))):
        raise ValueError(one_line(f"{what}, at {_explain(error)}"))


def _check_keys(given: Any, where: str) -> None:
    """Refuse keys that are not texts, such as a size 2048 without quotes; files are named so."""
    match given:
        case Mapping():
            for key, value in given.items():
                if not isinstance(key, str):
                    raise ValueError(
                        f"{where}: a key {brief(key)};"
                        " expected a text, in quotes where it is a number"
                    )
                _check_keys(value, f"{where}.{key}")
        case list():
            for number, value in enumerate(given):
                _check_keys(value, f"{where}.{number}")
        case _:
            pass


def _check_collectives(given: Mapping[str, Any]) -> None:
    """Refuse collectives that their cluster can't run, or that no curve can be fitted to."""
    cluster, sizes, kib = Cluster.load(given["cluster"]), given["group_sizes"], given["sizes_kib"]
    if max(sizes) > cluster.num_devices:
        raise ValueError(
            f"configuration, at collectives.group_sizes: a group of {max(sizes)} devices, but"
            f" {cluster.name} has {cluster.num_devices}"
        )
    if len(sizes) * len(kib) < _LEAST_ROWS:
        raise ValueError(
            f"configuration, at collectives: {len(sizes)} group_sizes and {len(kib)} sizes_kib;"
            f" expected {_LEAST_ROWS} combinations at least, to which curves are fitted"
        )
    if max(kib) * 1024 > cluster.device.memory_bytes:
        raise ValueError(
            f"configuration, at collectives.sizes_kib: given {brief(max(kib))}, which is more"
            f" than the {cluster.device.memory_gb:g} GB of a device of {cluster.name}"
        )


def _check_published(path: str) -> None:
    """Refuse a file of published numbers that has the wrong form or unknown names."""
    papers = read_yaml(ROOT / path, "published numbers, as in experiments/config/published.yaml")
    check(papers, PUBLISHED_SCHEMA, path)
    for paper in papers:
        check_name("model", paper["model"], MODELS)
        for row in paper["rows"]:
            check_name("strategy", row["strategy"], STRATEGIES)


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
"""A validator that refuses 2.0 as an integer and infinity as a number, which JSON schemas allow."""


def _explain(error: ValidationError) -> str:
    """Return where a value violates its schema, and how, with the valid keys for an unknown one."""
    where = ".".join(map(str, error.absolute_path)) or "the top level"
    schema: Mapping[str, Any] = error.schema  # pyright: ignore[reportAssignmentType]
    match error.validator:
        case "additionalProperties":
            given: Mapping[str, Any] = error.instance  # pyright: ignore[reportAssignmentType]
            for key in given:
                try:
                    check_name("key", key, schema["properties"])
                except ValueError as unknown:
                    return f"{where}: {unknown}"
    return f"{where}: {error.message}"
