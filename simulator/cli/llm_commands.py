"""The subcommands of `llm`: predictions of scenarios, and the search of layouts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from simulator.cli.common_options import (
    Clusters,
    Json,
    print_json,
    print_table,
    print_written,
    shipped_clusters,
)
from simulator.cli.error_lines import NegativeAnswer, usage_errors
from simulator.cli.prediction_commands import (
    DEFAULT_CLUSTER,
    BackendName,
    Changes,
    clusters_and_changes,
    print_predictions,
)
from simulator.engine.prediction import Prediction
from simulator.files import check_writable
from simulator.report.figure_style import pyplot
from simulator.transformer import predict
from simulator.transformer.layout_report import layout_table, layout_values, save_layout_picture
from simulator.transformer.layout_search import SEARCHED, LayoutSearch, search_layouts
from simulator.transformer.scenario_files import Scenario, load_machine
from simulator.transformer.what_if import Change

ScenarioFile = Annotated[
    Path,
    typer.Argument(metavar="SCENARIO", help="YAML with the sections `model` and `execution`."),
]
_PICTURES = (".svg", ".png", ".pdf")
_PREDICT = "predict"
_MIN_WIDTH = 100
_FREE = {"pipeline", "interleave", "microbatch"}
"""Searched fields that restrict other fields of an execution, such as `zero`."""

_DERIVED = {
    "data": "data parallelism has the devices that the other degrees leave",
    "sequence_parallel": "layouts have sequence parallelism where they have tensor parallelism",
}
"""Why a search can't change fields of an execution that follow from searched ones."""


class PredictsByDefault(TyperGroup):
    """A group of subcommands whose first one may be left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line, with `predict` before a scenario."""
        is_named = bool(args) and (args[0] in self.commands or args[0] in ("--help", "-h"))
        return super().parse_args(ctx, args if is_named else [_PREDICT, *args])


llm = typer.Typer(
    name="llm",
    cls=PredictsByDefault,
    help="Predict the training step of a transformer from its sizes, or search its fastest layout.",
)


@llm.command(_PREDICT)
def predict_scenario(
    scenario: ScenarioFile,
    cluster: Clusters = None,
    backend: BackendName = None,
    change: Changes = None,
    as_json: Json = False,
) -> None:
    """Predict the training step of a transformer from its sizes.

    Several clusters make several columns. The name of this subcommand may be left out.
    """
    with usage_errors():
        names, changes = clusters_and_changes(cluster, change)
        predictions = _predict_scenario(scenario, names, changes, backend or "eager")
    print_predictions(predictions, as_json)


@llm.command("search")
def search(
    scenario: ScenarioFile,
    cluster: Annotated[
        str,
        typer.Option(
            metavar="NAME_OR_FILE",
            help="A shipped cluster or a YAML file.",
            autocompletion=shipped_clusters,
        ),
    ] = DEFAULT_CLUSTER,
    hosts: Annotated[
        int | None,
        typer.Option(min=1, help="Number of hosts; those of the cluster by default."),
    ] = None,
    backend: BackendName = None,
    change: Changes = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A field that has its value in the scenario: {', '.join(SEARCHED)}.",
            autocompletion=lambda: list(SEARCHED),
        ),
    ] = None,
    confidence: Annotated[
        float, typer.Option(help="Probability with which a layout has to fit in memory.")
    ] = 0.95,
    rows: Annotated[int, typer.Option(min=1, help="Number of layouts in the table.")] = 10,
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw time against memory here (.svg, .png, .pdf)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Search the fastest layouts of a scenario that fit in the memory of a cluster.

    Searched are the degrees of tensor, context, pipeline and expert parallelism, stages per device,
    the microbatch and recomputation; data parallelism has the remaining devices. The exit code is 1
    if no layout fits.
    """
    with usage_errors():
        if picture is not None:
            _check_picture(picture)
        _, changes = clusters_and_changes(None, change)
        found, title, zero = _search(
            scenario, cluster, hosts, backend or "eager", changes, confidence, keep or []
        )
    if not found.fitting:
        raise NegativeAnswer(_why_none_fits(found, confidence, zero))
    if as_json:
        print_json(layout_values(found, rows))
    else:
        fitting = f"{len(found.fitting)} of {found.count} layouts fit with {confidence:.0%}"
        heading = f"{title}: {fitting}"
        print_table(layout_table(found, rows, heading), _MIN_WIDTH)
    if picture is not None:
        with usage_errors():
            save_layout_picture(found, picture, title)
        print_written(picture)


def _check_picture(picture: Path) -> None:
    """Check before the search that the picture can be drawn."""
    if picture.suffix not in _PICTURES:
        raise ValueError(f"{picture}: expected a path that ends in {', '.join(_PICTURES)}")
    check_writable(picture)
    pyplot()


def _search(
    file: Path,
    cluster: str,
    hosts: int | None,
    backend: str,
    changes: Sequence[Change],
    confidence: float,
    kept: Sequence[str],
) -> tuple[LayoutSearch, str, int]:
    """Return the search, a title that names the model and the devices, and the level of ZeRO."""
    cluster_changes = [change for change in changes if change.path[0] == "cluster"]
    scenario_changes = [change for change in changes if change.path[0] != "cluster"]
    for change in scenario_changes:
        section, name = change.path[0], change.path[-1]
        if section == "execution" and name in SEARCHED and name not in kept:
            raise ValueError(
                f"{change.text!r}: the search chooses {name}; expected together with --keep {name}"
            )
        if section == "execution" and (reason := _DERIVED.get(name)):
            raise ValueError(f"{change.text!r}: {reason}; leave out the change")
    scenario = Scenario.load(file, scenario_changes, _FREE - set(kept))
    if hosts is not None:
        for change in cluster_changes:
            if change.path == ("cluster", "hosts"):
                raise ValueError(
                    f"{change.text!r}: given together with --hosts; expected one of them"
                )
        cluster_changes.append(Change.parse(f"cluster.hosts={hosts}"))
    machine = load_machine(cluster, 1, backend, cluster_changes)
    found = search_layouts(scenario.model, scenario.execution, machine, confidence, kept)
    used = machine.cluster
    title = f"{file.stem} on {used.num_devices} devices of {used.name}"
    return found, title, scenario.execution.zero


def _why_none_fits(found: LayoutSearch, confidence: float, zero: int) -> str:
    """Return why no layout fits, with the layout that is most likely to, and what would fit."""
    text = f"none of {found.count} layouts fits with {confidence:.0%}"
    if found.uncertain:
        best = max(
            found.uncertain, key=lambda layout: layout.prediction.memory.fit_probability
        ).prediction.memory
        text += f"; the best fits with {best.fit_probability:.0%}"
    more = "more hosts or another cluster"
    if zero < 3:
        more = f"more hosts, another cluster, or --set execution.zero={zero + 1}"
    return f"{text}; the least memory of a layout is {found.least_bytes / 1e9:.1f} GB; give {more}"


def _predict_scenario(
    file: Path, names: list[str], changes: list[Change], backend: str
) -> dict[str, Prediction]:
    cluster_changes = [change for change in changes if change.path[0] == "cluster"]
    scenario = Scenario.load(file, [change for change in changes if change.path[0] != "cluster"])
    devices = scenario.execution.devices
    machines = {name: load_machine(name, devices, backend, cluster_changes) for name in names}
    return {
        name: predict(scenario.model, scenario.execution, machine)
        for name, machine in machines.items()
    }
