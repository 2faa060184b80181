"""JSON schemas of hardware files accept the shipped files and refuse what loading refuses."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

import simulator
from simulator.cli import app
from simulator.hardware.description import ClusterError
from simulator.hardware.heterogeneous import load_cluster
from simulator.hardware.schema import SCHEMAS

SHIPPED = Path(simulator.__file__).parent / "hardware"


def fields_of(path: Path) -> Any:
    """Return the fields with string keys, as JSON has them."""
    return json.loads(json.dumps(yaml.safe_load(path.read_text())))


def errors(kind: str, fields: Any) -> list[str]:
    checker = jsonschema.Draft202012Validator(SCHEMAS[kind]())
    return [error.message for error in checker.iter_errors(fields)]


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        *(("cluster", path) for path in sorted(SHIPPED.glob("clusters/*.yaml"))),
        *(
            ("heterogeneous", path)
            for path in sorted(SHIPPED.glob("clusters/heterogeneous/*.yaml"))
        ),
        *(("device", path) for path in sorted(SHIPPED.glob("devices/*.yaml"))),
    ],
    ids=lambda value: getattr(value, "stem", value),
)
def test_shipped_files_satisfy_the_schema(kind: str, path: Path) -> None:
    assert not errors(kind, fields_of(path))


LINK = {"bandwidth_gb_per_s": 100, "latency_us": 1}


@pytest.mark.parametrize(
    "change",
    [
        *({field: None} for field in ("name", "device", "hosts")),
        {"intra_host": None, "collectives": None},
        {"hosts": 0},
        {"hosts": "two"},
        {"device": 5},
        {"intra_host": LINK | {"bandwith_gb_per_s": 1}},
        {"intra_host": LINK | {"bandwidth_gb_per_s": "25 GB/s"}},
        {"intra_host": LINK | {"contention_factor": 3}},
        {"wires": 4},
        {
            "device": fields_of(SHIPPED / "devices/v100_sxm2_16gb.yaml")
            | {"peak_tflop_per_s": {"bfloat16": 989}}
        },
        {"collectives": {"gpu": "toy", "source": "made up"}},
    ],
    ids=str,
)
def test_files_that_loading_refuses_violate_the_schema(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    fields = fields_of(SHIPPED / "clusters/dgx_h100.yaml") | change
    fields = {name: value for name, value in fields.items() if value is not None}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(fields))
    assert errors("cluster", fields)
    with pytest.raises(ClusterError):
        load_cluster(tmp_path / "mine.yaml")


def test_the_schema_has_the_descriptions_of_fields() -> None:
    schema = SCHEMAS["cluster"]()
    assert schema["properties"]["nics_per_host"]["description"].startswith("NICs of a host")
    assert (
        "one hop of an empty message"
        in schema["$defs"]["Link"]["properties"]["latency_us"]["description"]
    )
    assert schema["properties"]["device"]["anyOf"][1] == {"type": "string"}


def test_the_command_line_prints_the_schema() -> None:
    result = CliRunner().invoke(app, ["schema", "device"])
    assert json.loads(result.stdout) == SCHEMAS["device"]()
    unknown = CliRunner().invoke(app, ["schema", "rack"], env={"COLUMNS": "300"})
    assert unknown.exit_code == 2
    assert (
        "unknown kind of file 'rack'; expected one of cluster, device, heterogeneous"
        in " ".join(unknown.output.split())
    )
