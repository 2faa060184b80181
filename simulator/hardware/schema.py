"""JSON schemas of the files that describe hardware, for editors and checkers: what `simulator.hardware.cluster` and `simulator.hardware.heterogeneous` read."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from simulator.hardware.cluster import Cluster, Device, Link, Processes
from simulator.hardware.collective_profile import (
    CollectiveProfile,
    MeasuredLink,
    SizeCurve,
    SwitchCurve,
)
from simulator.hardware.description import Description
from simulator.hardware.dtypes import DTYPES
from simulator.hardware.kernel_profile import KernelProfile

_KINDS: tuple[type[Description], ...] = (
    Cluster,
    Device,
    Link,
    Processes,
    CollectiveProfile,
    MeasuredLink,
    SizeCurve,
    SwitchCurve,
    KernelProfile,
)
_NAMED = {"Cluster": ("device", "collectives"), "Device": ("kernels",)}
"""Fields that may also be a name or a path in a file."""

_OF_LINK = ("collective_launch_us", "intra_host")
"""Fields of a cluster that a profile of collectives brings along."""

_BY_DTYPE = {"Device": ("peak_tflop_per_s",), "KernelProfile": ("efficiency_by_dtype",)}


def cluster_schema() -> dict[str, Any]:
    """Of a cluster of equal hosts."""
    schema = _cluster()
    schema["required"] = [name for name in schema["required"] if name not in _OF_LINK]
    return schema | {"anyOf": [{"required": ["collectives"]}, {"required": list(_OF_LINK)}]}


def _cluster() -> dict[str, Any]:
    """The schema of a cluster, whose link within hosts may leave out what measured collectives say of it."""
    schema = _schema(Cluster)
    link = {name: value for name, value in schema["$defs"]["Link"].items() if name != "required"}
    schema["properties"]["intra_host"] = link | {
        "description": schema["properties"]["intra_host"]["description"]
    }
    return schema


def device_schema() -> dict[str, Any]:
    """Of a device."""
    return _schema(Device)


def heterogeneous_schema() -> dict[str, Any]:
    """Of a cluster with pools of unlike hosts; a pool has what it shares with no other pool, and with no cluster that it is like."""
    schema = _cluster()
    fields = schema.pop("properties")
    like = {
        "type": "string",
        "description": "a shipped cluster or the path of another, whose fields the pool has",
    }
    pool = {"type": "object", "properties": {"like": like, **fields}, "additionalProperties": False}
    pools = {"type": "array", "items": pool, "minItems": 2}
    return schema | {
        "description": "Pools of equal hosts; what is beside them is of all pools.",
        "properties": {**fields, "pools": pools},
        "required": ["name", "description", "pools"],
    }


SCHEMAS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "cluster": cluster_schema,
    "device": device_schema,
    "heterogeneous": heterogeneous_schema,
}
"""By the kind of file."""


def _schema(kind: type[Description]) -> dict[str, Any]:
    """The schema of a file, with what each field means."""
    schema = kind.model_json_schema()
    found = {name: schema.get("$defs", {}).get(name) for name in (each.__name__ for each in _KINDS)}
    found[kind.__name__] = schema
    for each in _KINDS:
        if (section := found[each.__name__]) is not None:
            _explain(each, section)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _explain(kind: type[Description], section: dict[str, Any]) -> None:
    """Say what fields mean, and what a file may have in their place."""
    name, meanings = kind.__name__, _meanings(kind)
    section["description"] = (kind.__doc__ or "").split("\n\n")[0].strip()
    fields: dict[str, dict[str, Any]] = section["properties"]
    for field, schema in fields.items():
        schema.pop("title", None)
        if field in _NAMED.get(name, ()):
            schema = fields[field] = {
                "anyOf": [*schema.pop("anyOf", [dict(schema)]), {"type": "string"}]
            }
        if field in _BY_DTYPE.get(name, ()):
            schema["propertyNames"] = {"enum": list(DTYPES)}
        if field in meanings:
            schema["description"] = meanings[field]


def _meanings(kind: type[Description]) -> dict[str, str]:
    """What the docstring says of each field."""
    _, _, attributes = (kind.__doc__ or "").partition("Attributes:\n")
    entries = re.split(r"\n(?=    (?:    )?\w+(?:, \w+)*: )", "\n" + attributes)
    meanings = {}
    for entry in entries:
        names, colon, meaning = entry.strip().partition(": ")
        if colon:
            meanings |= dict.fromkeys(names.split(", "), " ".join(meaning.split()))
    return meanings
