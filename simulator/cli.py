"""The simulator's subcommands, and `python -m simulator`, which is those subcommands without JAX.

`autopar` has the same subcommands.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from simulator.backend import BACKENDS, Backend, backend_named
from simulator.calibration.fit_profiles import COLUMNS, fit_collective_profile
from simulator.calibration.shipped_profiles import fit_profiles, write_profile
from simulator.engine.breakdown import prediction_of
from simulator.engine.prediction import Prediction
from simulator.engine.simulation import simulate as simulate_program
from simulator.files import check_writable, one_line, read_table
from simulator.hardware.schema import SCHEMAS
from simulator.program_file import load_program
from simulator.report.gantt import save_gantt
from simulator.report.prediction_table import prediction_json, prediction_table
from simulator.transformer import predict
from simulator.transformer.scenario_files import Scenario, load_for_program, load_machine
from simulator.transformer.what_if import Change
from simulator.validation.published import PUBLISHED_SETS
from simulator.validation.report import (
    Comparison,
    NothingPredictedError,
    summary,
    write_report,
)
from simulator.validation.report import as_json as comparisons_json

Clusters = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME_OR_FILE", help="A shipped cluster or a YAML file; several to compare."
    ),
]
BackendName = Annotated[
    str | None,
    typer.Option(
        help=f"The software that drives the devices: {', '.join(BACKENDS)}. By default eager"
        " for scenarios, none for programs."
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
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

_DEFAULT_CLUSTER = "dgx_a100_80"


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn errors for users into usage errors: one message, exit code 2."""
    try:
        yield
    except (ValueError, ImportError) as error:
        raise typer.BadParameter(one_line(error)) from None


def simulate(
    program: Annotated[
        Path,
        typer.Argument(
            help="A program, .json, as simulator.save_program writes it.",
            exists=True,
            dir_okay=False,
        ),
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
        changes = [Change.parse(text) for text in change or []]
        software = None if backend is None else backend_named(backend)
        names = cluster or [_DEFAULT_CLUSTER]
        predictions = _predict_program(program, names, changes, software, gantt, trace)
    _print_predictions(predictions, as_json)


def llm(
    scenario: Annotated[
        Path,
        typer.Argument(
            help="YAML with the sections `model` and `execution`.", exists=True, dir_okay=False
        ),
    ],
    cluster: Clusters = None,
    backend: BackendName = None,
    change: Changes = None,
    as_json: Json = False,
) -> None:
    """Predict the training step of a transformer from its sizes.

    Several clusters make several columns.
    """
    with usage_errors():
        changes = [Change.parse(text) for text in change or []]
        names = cluster or [_DEFAULT_CLUSTER]
        predictions = _predict_scenario(scenario, names, changes, backend or "eager")
    _print_predictions(predictions, as_json)


def predict_file(
    file: Annotated[
        Path,
        typer.Argument(
            help="A program, .json, as simulator.save_program writes it; or a scenario: YAML with"
            " the sections `model` and `execution`.",
            exists=True,
            dir_okay=False,
        ),
    ],
    cluster: Clusters = None,
    backend: BackendName = None,
    change: Changes = None,
    gantt: Gantt = None,
    trace: Trace = None,
    as_json: Json = False,
) -> None:
    """Simulate a program, or predict a transformer from its sizes, by the kind of the file."""
    if file.suffix == ".json":
        simulate(file, cluster, backend, change, gantt, trace, as_json)
    elif gantt is not None or trace is not None:
        raise typer.BadParameter(
            "a scenario has no timeline; --gantt and --trace are for programs (.json)"
        )
    else:
        llm(file, cluster, backend, change, as_json)


def _print_predictions(predictions: dict[str, Prediction], as_json: bool) -> None:
    if as_json:
        typer.echo(prediction_json(predictions))
        return
    console = Console()
    console.width = max(console.width, 80)
    console.print(prediction_table(predictions))


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
        raise ValueError(f"--gantt and --trace are of one timeline; given {len(names)} clusters")
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


def validate(
    sets: Annotated[
        list[str] | None, typer.Argument(help="Names of published sets; all by default.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="A folder with other rows of these sets, as CSV files of the same names and"
            " columns; sets without a file there are left out.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for tables and figures; results/validation by default, none with --data."
        ),
    ] = None,
    write: Annotated[bool, typer.Option(help="Write tables and figures.")] = True,
    as_json: Json = False,
    worst: Annotated[
        int, typer.Option(help="Also show this many rows of each set with the largest errors.")
    ] = 0,
) -> None:
    """Compare predictions with published measurements.

    Prints errors, rank correlation, and the cost of choosing plans by prediction.
    """
    sets_by_name = {published.name: published for published in PUBLISHED_SETS}
    if unknown := [name for name in sets or [] if name not in sets_by_name]:
        raise typer.BadParameter(
            f"unknown set {unknown[0]!r}; expected some of {', '.join(sets_by_name)}"
        )
    chosen = [sets_by_name[name] for name in sets or sets_by_name]
    if data is not None:
        chosen = [
            published
            for published in chosen
            if any((data / f"{name}.csv").exists() for name in published.files)
        ]
    console, errors = Console(), Console(stderr=True)
    console.width = max(console.width, 105)  # room for the table if the output is not a terminal
    comparisons = []
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), console=errors, transient=True
    ) as progress:
        task = progress.add_task("", total=len(chosen))
        for published in chosen:
            progress.update(task, description=published.title)
            try:
                comparisons.append(Comparison.of(published, data))
            except NothingPredictedError as error:
                errors.print(str(error), highlight=False, soft_wrap=True)
            except ValueError as error:
                raise typer.BadParameter(f"{published.name}: {error}") from None
            progress.advance(task)
    if not comparisons:
        names = ", ".join(
            f"{name}.csv" for published in sets_by_name.values() for name in published.files
        )
        raise typer.BadParameter(f"{data}: no rows to compare; expected some of {names}")
    if as_json:
        typer.echo(json.dumps(comparisons_json(comparisons), indent=1))
    else:
        console.print(summary(comparisons))
        for comparison in comparisons:
            _print_unpredicted(console, comparison)
            _print_worst(console, comparison, worst)
    folder = output or (Path("results/validation") if data is None else None)
    if write and folder is not None:
        try:
            paths = write_report(comparisons, folder)
        except (ValueError, OSError) as error:
            raise typer.BadParameter(f"--output: {error}") from None
        errors.print(f"written: {', '.join(map(str, paths))}", highlight=False, soft_wrap=True)


def _print_unpredicted(console: Console, comparison: Comparison) -> None:
    for why in dict.fromkeys(row.why for row in comparison.unpredicted):
        names = [row.name for row in comparison.unpredicted if row.why == why]
        text = f"{comparison.published.name}: {len(names)} not predicted, {why}: {', '.join(names)}"
        console.print(text, highlight=False, soft_wrap=True)


def _print_worst(console: Console, comparison: Comparison, count: int) -> None:
    for case in sorted(comparison.cases, key=lambda case: -abs(case.error))[:count]:
        unit = comparison.published.unit
        console.print(
            f"{comparison.published.name}: {case.name}: {case.predicted:.4g} {unit},"
            f" measured {case.measured:.4g} ({case.error:+.1%})",
            highlight=False,
        )


def schema(
    kind: Annotated[
        str, typer.Argument(help=f"Of a file that describes: {', '.join(SCHEMAS)}.")
    ] = "cluster",
) -> None:
    """Print the JSON schema of files that describe hardware, for editors and checkers."""
    if kind not in SCHEMAS:
        raise typer.BadParameter(
            f"unknown kind of file {kind!r}; expected one of {', '.join(SCHEMAS)}"
        )
    typer.echo(json.dumps(SCHEMAS[kind](), indent=1))


def fit(
    measurements: Annotated[
        Path | None,
        typer.Argument(
            help=f"Collectives measured on one kind of device, .csv: {', '.join(COLUMNS)}.",
            exists=True,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The profile to write, .yaml.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Fit the curves of collectives to a table of measurements.

    A fifth of the rows is not fitted to; the errors are those on that fifth. Without a table, fit
    the shipped profiles of GPUs and links again, in place, to the measurements shipped with them.
    """
    console = Console()
    if measurements is None:
        if output is not None:
            raise typer.BadParameter(
                "--output is for a table of measurements; the shipped profiles are written in place"
            )
        for path, profile in fit_profiles():
            write_profile(path, profile)
            console.print(f"{path.parent.name}/{path.name}", highlight=False)
        return
    output = output or measurements.with_suffix(".yaml")
    try:
        check_writable(output)
        table = read_table(measurements)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        profile, errors = fit_collective_profile(table, f"fitted to {measurements.name}")
        write_profile(output, profile)
    except ValueError as error:
        raise typer.BadParameter(f"{measurements}: {error}") from None
    if as_json:
        typer.echo(errors.to_json(orient="records", indent=1))
    else:
        typer.echo(errors.to_string(index=False, float_format="{:.1%}".format))
    typer.echo(f"written: {output}", err=True)


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Predict training steps on clusters that need not exist on this machine.",
)
for command in (simulate, llm, validate, schema, fit):
    app.command()(command)
app.command("predict")(predict_file)
