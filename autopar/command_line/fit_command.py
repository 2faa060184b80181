"""Subcommands about what fits into memory: fit, savings."""

from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.capacity.budgeted_step import checked_cluster
from autopar.capacity.fit_result import Fewest, Fit, Largest
from autopar.capacity.largest_fit import fit as largest_fit
from autopar.capacity.memory_savings import MemorySaving
from autopar.capacity.memory_savings import savings as memory_savings
from autopar.command_line.named_methods import MethodName, cluster_of_hosts, method_of_name
from autopar.command_line.planning_progress import planning_progress
from autopar.command_line.usage import ClusterName, Hosts, MicroBatches, StepPlace
from autopar.command_line.user_step import load_function, load_step
from autopar.methods import PlanningMethod
from simulator.cli.common_options import Json, print_json, print_written
from simulator.cli.error_lines import NO, usage_errors
from simulator.files import check_writable
from simulator.hardware.cluster import Cluster

MemoryBudget = Annotated[
    float | None,
    typer.Option(
        metavar="BYTES",
        help="Bytes of one device that the step may use; by default its memory less the reserve.",
    ),
]
Method = Annotated[
    MethodName,
    typer.Option(
        help="auto: the step's own method, or the fastest pipeline or sharding on any mesh."
    ),
]


def fit(
    make_step: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="A function of the batch size, sequence length or number of layers that returns a"
            " step and its arguments; with --fewest, a function without parameters.",
        ),
    ],
    cluster: ClusterName,
    largest: Annotated[
        Largest | None, typer.Option(help="What the function varies; the most is found.")
    ] = None,
    fewest: Annotated[
        Fewest | None, typer.Option(help="Find the smallest cluster of such hosts.")
    ] = None,
    hosts: Hosts = None,
    method: Method = MethodName.AUTO,
    micro_batches: MicroBatches = None,
    memory_budget: MemoryBudget = None,
    multiple_of: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Sizes are multiples of it; by default devices x microbatches for the batch, 128"
            " for the sequence, else 1.",
        ),
    ] = None,
    at_least: Annotated[int | None, typer.Option(min=1, help="The smallest size.")] = None,
    at_most: Annotated[int | None, typer.Option(min=1, help="The largest size.")] = None,
    confirm: Annotated[
        bool, typer.Option(help="Compile the answer with XLA; else the planner's model decides.")
    ] = True,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan to this file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the largest size of a step that fits into memory, or the smallest cluster for it.

    The answer has a plan that fits; the next size does not, and what would make it fit is printed.
    The exit code is 1 if no size fits.
    """
    if fewest is not None and hosts is not None:
        raise typer.BadParameter(
            f"--hosts {hosts} is given, but --fewest searches the number of hosts; leave it out, or"
            " limit the search by --at-least and --at-most"
        )
    with usage_errors():
        if output is not None:
            check_writable(output)
        hardware = checked_cluster(cluster_of_hosts(cluster, hosts), "fit")
        chosen = _method(method, hardware, micro_batches)
    function = load_function(make_step)
    with planning_progress("fitting", as_json), function.usage_errors():
        found = largest_fit(
            function.made,
            hardware,
            largest=largest,
            fewest=fewest,
            method=chosen,
            memory_budget=memory_budget,
            multiple_of=multiple_of,
            at_least=at_least,
            at_most=at_most,
            confirm=confirm,
        )
    if output is not None:
        found.plan.save(output)
    if as_json:
        print_json(_fit_values(found))
    else:
        typer.echo(str(found))
    if output is not None:
        print_written(output)


def savings(
    step: StepPlace,
    cluster: ClusterName,
    hosts: Hosts = None,
    method: Method = MethodName.AUTO,
    micro_batches: MicroBatches = None,
    memory_budget: MemoryBudget = None,
    as_json: Json = False,
) -> None:
    """Print what would make a step fit into memory, each change with the bytes that it saves.

    The exit code is 1 if the step fits neither as it is nor with the changes.
    """
    with usage_errors():
        hardware = checked_cluster(cluster_of_hosts(cluster, hosts), "savings")
        chosen = _method(method, hardware, micro_batches)
    user_step = load_step(step)
    with planning_progress("planning changes", as_json), user_step.usage_errors():
        found = memory_savings(
            user_step.fun,
            user_step.args,
            method=user_step.method if chosen is None else chosen,
            cluster=hardware,
            memory_budget=memory_budget,
            **user_step.batch_options,
        )
    if as_json:
        values = {"budget": found.budget, "num_bytes": found.plan.predicted_bytes}
        alone, together = ([*map(_saving_values, row)] for row in (found.alone, found.together))
        print_json({**values, "fits": found.fits, "alone": alone, "together": together})
    else:
        typer.echo(str(found))
    if not any(saving.fits for saving in (found, *found.alone, *found.together)):
        raise typer.Exit(NO)


def _method(name: MethodName, cluster: Cluster, micro_batches: int | None) -> PlanningMethod | None:
    """Return a method by its name; None for the step's own method, or the automatic one."""
    if name is MethodName.AUTO and micro_batches is None:
        return None
    return method_of_name(name, cluster, micro_batches)


def _fit_values(found: Fit) -> dict[str, Any]:
    """Return an answer as JSON values."""
    refused = found.refused
    return {
        "quantity": found.quantity,
        "size": found.size,
        "budget": found.budget,
        "is_confirmed": found.is_confirmed,
        "predicted_bytes": found.plan.predicted_bytes,
        "predicted_seconds": found.plan.predicted_seconds,
        "prediction": found.prediction.row(),
        "refused": refused
        and {
            "size": refused.size,
            "reason": refused.reason,
            "needed_bytes": refused.needed_bytes,
            "changes": [*map(_saving_values, refused.changes)],
        },
        "tried": found.tried,
    }


def _saving_values(saving: MemorySaving) -> dict[str, Any]:
    names = "change", "num_bytes", "saved_bytes", "seconds", "fits"
    return {name: getattr(saving, name) for name in names}
