"""JSON schemas of the files that describe hardware, for editors and checkers.

They describe what `simulator.hardware.cluster` and `simulator.hardware.heterogeneous` read.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from simulator.hardware.cluster import Cluster, Link, Processes
from simulator.hardware.collective_profile import (
    CollectiveProfile,
    MeasuredLink,
    SizeCurve,
    SwitchCurve,
)
from simulator.hardware.description import Description
from simulator.hardware.device import Device
from simulator.hardware.dtypes import DTYPES
from simulator.hardware.kernel_profile import KernelProfile

_DESCRIPTIONS: tuple[type[Description], ...] = (
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
_REFERENCES = {"Cluster": ("device", "collectives"), "Device": ("kernels",)}
"""Fields for which a file may give a name or a path."""

_LINK_FIELDS = ("collective_launch_us", "intra_host")
"""Fields of a cluster that a profile of collectives can replace."""

_BY_DTYPE = {"Device": ("peak_tflop_per_s",), "KernelProfile": ("efficiency_by_dtype",)}


def cluster_schema() -> dict[str, Any]:
    """Return the schema of a cluster of equal hosts."""
    schema = _cluster()
    schema["required"] = [name for name in schema["required"] if name not in _LINK_FIELDS]
    return schema | {"anyOf": [{"required": ["collectives"]}, {"required": list(_LINK_FIELDS)}]}


def _cluster() -> dict[str, Any]:
    """Return the schema of a cluster.

    Fields of `intra_host` are optional, as measured collectives may imply them.
    """
    schema = _schema(Cluster)
    link = {name: value for name, value in schema["$defs"]["Link"].items() if name != "required"}
    schema["properties"]["intra_host"] = link | {
        "description": schema["properties"]["intra_host"]["description"]
    }
    return schema


def device_schema() -> dict[str, Any]:
    """Return the schema of a device."""
    return _schema(Device)


def heterogeneous_schema() -> dict[str, Any]:
    """Return the schema of a cluster with pools of unlike hosts.

    No field of a pool is required: the others come from the cluster that it is `like`, and from the
    fields beside `pools`.
    """
    schema = _cluster()
    fields = schema.pop("properties")
    like = {
        "type": "string",
        "description": "a shipped cluster or the path of another: the defaults of the fields",
    }
    pool = {"type": "object", "properties": {"like": like, **fields}, "additionalProperties": False}
    pools = {"type": "array", "items": pool, "minItems": 2}
    return schema | {
        "description": "Pools of equal hosts; the fields beside `pools` are common to all of them.",
        "properties": {**fields, "pools": pools},
        "required": ["name", "description", "pools"],
    }


SCHEMAS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "cluster": cluster_schema,
    "device": device_schema,
    "heterogeneous": heterogeneous_schema,
}
"""Functions that return a schema, by the kind of file."""


def _schema(kind: type[Description]) -> dict[str, Any]:
    """Return the schema of a file, with the meaning of each field."""
    schema = kind.model_json_schema()
    sections = schema.get("$defs", {}) | {kind.__name__: schema}
    for description in _DESCRIPTIONS:
        if description.__name__ in sections:
            _explain(description, sections[description.__name__])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _explain(kind: type[Description], section: dict[str, Any]) -> None:
    """Add the meaning of fields to a section, and the names or paths that may replace them."""
    name = kind.__name__
    meanings = _meanings(kind)
    section["description"] = (kind.__doc__ or "").split("\n\n")[0].strip()
    fields: dict[str, dict[str, Any]] = section["properties"]
    for field, schema in fields.items():
        schema.pop("title", None)
        if field in _REFERENCES.get(name, ()):
            schema = fields[field] = {
                "anyOf": [*schema.pop("anyOf", [dict(schema)]), {"type": "string"}]
            }
        if field in _BY_DTYPE.get(name, ()):
            schema["propertyNames"] = {"enum": list(DTYPES)}
        if field in meanings:
            schema["description"] = meanings[field]


def _meanings(kind: type[Description]) -> dict[str, str]:
    """Return what the `Attributes:` section of the docstring says of each field."""
    _, _, attributes = (kind.__doc__ or "").partition("Attributes:\n")
    entries = re.split(r"\n(?=    (?:    )?\w+(?:, \w+)*: )", "\n" + attributes)
    meanings = {}
    for entry in entries:
        names, colon, meaning = entry.strip().partition(": ")
        if colon:
            meanings |= dict.fromkeys(names.split(", "), " ".join(meaning.split()))
    return meanings
