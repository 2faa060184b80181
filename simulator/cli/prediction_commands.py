"""The subcommand `simulate`, which predicts saved programs, and what it shares with `llm`."""

from pathlib import Path
from typing import Annotated

import typer

from simulator.backend import BACKENDS, Backend, backend_named
from simulator.cli.common_options import Clusters, Json, print_table
from simulator.cli.error_lines import NO, usage_errors
from simulator.engine.breakdown import prediction_of
from simulator.engine.prediction import Prediction
from simulator.engine.simulation import simulate as simulate_program
from simulator.files import check_writable
from simulator.program_file import load_program
from simulator.report.gantt import save_gantt
from simulator.report.prediction_table import prediction_json, prediction_table
from simulator.transformer.scenario_files import load_for_program
from simulator.transformer.what_if import Change

BackendName = Annotated[
    str | None,
    typer.Option(
        help=f"The software that drives the devices: {', '.join(BACKENDS)}. By default eager"
        " for scenarios, none for programs.",
        autocompletion=lambda: list(BACKENDS),
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "--what-if",
        help="section.field=value of cluster, or of a scenario's model or execution; or a"
        " factor, e.g. cluster.inter_host.bandwidth_gb_per_s=2x.",
    ),
]
Gantt = Annotated[
    Path | None, typer.Option(help="Draw the timeline of a program here (.svg, .png, .pdf).")
]
Trace = Annotated[
    Path | None, typer.Option(help="Write the timeline of a program here (.json), for Perfetto.")
]
DEFAULT_CLUSTER = "dgx_a100_80"


def simulate(
    program: Annotated[
        Path,
        typer.Argument(help="A program, .json, as simulator.save_program writes it."),
    ],
    cluster: Clusters = None,
    backend: BackendName = None,
    change: Changes = None,
    gantt: Gantt = None,
    trace: Trace = None,
    as_json: Json = False,
) -> None:
    """Simulate a saved program: its time, the breakdown of the time, and memory.

    Several clusters make several columns.
    """
    with usage_errors():
        check_writable(gantt, trace)
        names, changes = clusters_and_changes(cluster, change)
        software = None if backend is None else backend_named(backend)
        predictions = _predict_program(program, names, changes, software, gantt, trace)
    print_predictions(predictions, as_json)


def print_predictions(predictions: dict[str, Prediction], as_json: bool, width: int = 80) -> None:
    """Print predictions by name, and exit with `NO` if none fits in the memory of its cluster.

    Args:
        predictions: the predictions.
        as_json: whether to print JSON instead of a table.
        width: least width of the table, in characters.
    """
    if as_json:
        typer.echo(prediction_json(predictions))
    else:
        print_table(prediction_table(predictions), width)
    memories = [prediction.memory for prediction in predictions.values()]
    if not any(not memory.parts or memory.fits for memory in memories):
        raise typer.Exit(NO)


def clusters_and_changes(
    clusters: list[str] | None, changes: list[str] | None
) -> tuple[list[str], list[Change]]:
    """Return the clusters of `--cluster` or the default one, and the changes of `--set`."""
    return clusters or [DEFAULT_CLUSTER], [Change.parse(text) for text in changes or []]


def _predict_program(
    file: Path,
    names: list[str],
    changes: list[Change],
    backend: Backend | None,
    gantt: Path | None,
    trace: Path | None,
) -> dict[str, Prediction]:
    other_changes = [change.text for change in changes if change.path[0] != "cluster"]
    if other_changes:
        raise ValueError(
            f"{other_changes[0]!r}: a program can't be changed, only its cluster:"
            " cluster.field=value"
        )
    if (gantt or trace) and len(names) > 1:
        raise ValueError(
            f"--gantt and --trace show one timeline, given {len(names)} clusters; give one"
        )
    program = load_program(file)
    devices = 1 + max(map(max, program.meshes), default=0)
    predictions = {}
    for name in names:
        cluster = load_for_program(name, devices, changes)
        timeline = simulate_program(program, cluster, backend=backend)
        predictions[name] = prediction_of(timeline, cluster)
        if gantt is not None:
            save_gantt(timeline, gantt)
        if trace is not None:
            timeline.save_chrome_trace(trace)
    return predictions
