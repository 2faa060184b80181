"""Tuning the schedule of a GPT for 8 GPUs that are not present.

    JAX_PLATFORMS=cpu AUTOPAR_PROGRESS=1 python -m experiments.tutorials.tune_gpt

The knobs are the degrees of pipeline, tensor and data parallelism, the number of microbatches, the
part of the blocks that are recomputed, sequence parallelism and flash attention. Each candidate is
compiled for the GPUs and simulated, which takes up to a minute. By default the search therefore
varies one knob after the other; `--search-by exhaustive` tries all combinations.
"""

from dataclasses import replace
from typing import Annotated, Literal

import typer

import autopar
from autopar.model_schedules import Knobs
from autopar.tuning import Domain, SearchSpace, StepFactory
from experiments.gpt_directives import scheduled_step
from experiments.models import GPT
from experiments.models.model_sizes import PUBLISHED
from simulator import Cluster

app = typer.Typer(add_completion=False)


def knobs_of(model: GPT, devices: int) -> dict[str, Domain]:
    """Return the search space of the knobs, in which tensor x stages x data = `devices`.

    Args:
        model: the model, whose batch is split over data parallelism and microbatches.
        devices: number of devices.
    """
    degrees = [2**k for k in range(devices.bit_length())]
    return {
        "tensor": degrees,
        "stages": lambda chosen: [s for s in (1, 2) if chosen["tensor"] * s <= devices],
        "data": lambda chosen: [devices // chosen["tensor"] // chosen["stages"]],
        "microbatches": lambda chosen: [
            m for m in (1, 2, 4, 8) if model.batch_size % (m * chosen["data"]) == 0
        ],
        "checkpoint": [0.0, 0.5, 1.0],
        "sequence": lambda chosen: [False, True] if chosen["tensor"] > 1 else [False],
        "flash": [False, True],
    }


def candidate_of(model: GPT) -> StepFactory:
    """Return a function that makes the training step, arguments and method of a candidate."""

    def make(chosen, mesh):
        knobs = Knobs(
            vocabulary_parallel=True,
            sequence_parallel=chosen["sequence"],
            flash_attention=chosen["flash"],
            checkpoint_ratio=chosen["checkpoint"],
            pipeline_stages=chosen["stages"],
        )
        return scheduled_step(
            model, mesh, (chosen["data"], chosen["tensor"]), knobs, chosen["microbatches"]
        )

    return make


@app.command(help=__doc__)
def main(
    name: Annotated[
        str, typer.Option("--model", help="A GPT of the published sizes.")
    ] = "gpt-1.3B",
    layers: Annotated[int, typer.Option(help="Cut to so many.")] = 4,
    batch_size: Annotated[int, typer.Option(help="Sequences in a step.")] = 256,
    cluster: Annotated[str, typer.Option(help="A shipped cluster or a YAML file.")] = "dgx_a100_40",
    devices: Annotated[int, typer.Option(help="How many of the cluster's.")] = 8,
    search_by: Annotated[Literal["coordinate", "exhaustive"], typer.Option()] = "coordinate",
) -> None:
    published = PUBLISHED.get(name)
    if not isinstance(published, GPT):
        names = ", ".join(name for name, model in PUBLISHED.items() if isinstance(model, GPT))
        raise typer.BadParameter(f"no GPT is called {name!r}; expected one of {names}")
    model = replace(published, num_layers=layers, batch_size=batch_size, remat=False)
    space = knobs_of(model, devices)
    tuned = autopar.tune(
        candidate_of(model), space, Cluster.load(cluster).first_devices(devices), search_by
    )
    table = tuned.table.assign(
        ms=tuned.table["predicted_seconds"] * 1e3, gb=tuned.table["predicted_bytes"] / 1e9
    )
    print(
        f"{name}, {layers} layers, batch of {batch_size}, on {devices} devices of {cluster}:"
        f" {len(table)} of {len(list(SearchSpace(space)))} candidates tried"
    )
    print(table[[*space, "status", "ms", "gb"]].round(2).to_string(index=False))
    print("best:", tuned.best)


if __name__ == "__main__":
    app()
