"""The knobs of a scheduled GPT, tuned for 8 GPUs that are not here: every candidate is scheduled, compiled for them, and simulated.

    JAX_PLATFORMS=cpu AUTOPAR_PROGRESS=1 python -m experiments.tutorials.tune_gpt

Degrees of pipeline, tensor and data parallelism, microbatches, how many blocks are recomputed, sequence parallelism, attention. Each
candidate takes 10 to 60 seconds, so the search goes one knob after the other; `--search-by exhaustive` tries all.
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
    """What there is to choose: `devices` are split into tensor x stages x data, the batch into microbatches for each part of the data."""
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
    """From a candidate to its training step, the step's arguments, and the method that keeps its schedule."""

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
        known = ", ".join(name for name, model in PUBLISHED.items() if isinstance(model, GPT))
        raise typer.BadParameter(f"no GPT is called {name!r}; expected one of {known}")
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
