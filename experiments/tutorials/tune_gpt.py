"""The knobs of a scheduled GPT, tuned for 8 GPUs that are not here: every candidate is scheduled, compiled for them, and simulated.

    JAX_PLATFORMS=cpu AUTOPAR_PROGRESS=1 python -m experiments.tutorials.tune_gpt

Degrees of pipeline, tensor and data parallelism, microbatches, how many blocks are recomputed, sequence parallelism, attention. Each
candidate takes 10 to 60 seconds, so the search goes one knob after the other; `--search-by exhaustive` tries all.
"""

import argparse
from dataclasses import replace

import autopar
from autopar.model_schedules import Knobs
from autopar.tuning import Space
from experiments.models import GPT
from experiments.models.published import PUBLISHED
from experiments.schedules import scheduled_step
from simulator.cluster import Cluster

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="gpt-1.3B", choices=[name for name in PUBLISHED if name.startswith("gpt")])
parser.add_argument("--layers", type=int, default=4, help="cut to so many")
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--cluster", default="dgx_a100_40")
parser.add_argument("--devices", type=int, default=8)
parser.add_argument("--search-by", default="coordinate", choices=["coordinate", "exhaustive"])
flags = parser.parse_args()
published = PUBLISHED[flags.model]
assert isinstance(published, GPT)
model = replace(published, num_layers=flags.layers, batch_size=flags.batch_size, remat=False)


def powers_of_two(limit):
    return [2**k for k in range(limit.bit_length())]


SPACE = {
    "tensor": powers_of_two(flags.devices),
    "stages": lambda chosen: [s for s in (1, 2) if chosen["tensor"] * s <= flags.devices],
    "data": lambda chosen: [flags.devices // chosen["tensor"] // chosen["stages"]],
    "microbatches": lambda chosen: [m for m in (1, 2, 4, 8) if model.batch_size % (m * chosen["data"]) == 0],
    "checkpoint": [0.0, 0.5, 1.0],
    "sequence": lambda chosen: [False, True] if chosen["tensor"] > 1 else [False],
    "flash": [False, True],
}


def make(chosen, mesh):
    """The training step of a candidate, its arguments, and the method that keeps its schedule."""
    knobs = Knobs(
        vocabulary_parallel=True,
        sequence_parallel=chosen["sequence"],
        flash_attention=chosen["flash"],
        checkpoint_ratio=chosen["checkpoint"],
        pipeline_stages=chosen["stages"],
    )
    return scheduled_step(model, mesh, (chosen["data"], chosen["tensor"]), knobs, chosen["microbatches"])


tuned = autopar.tune(make, SPACE, Cluster.load(flags.cluster).first_devices(flags.devices), flags.search_by)
table = tuned.table.assign(ms=tuned.table["predicted_seconds"] * 1e3, gb=tuned.table["predicted_bytes"] / 1e9)
print(
    f"{flags.model}, {flags.layers} layers, batch of {flags.batch_size}, on {flags.devices} GPUs of {flags.cluster}:"
    f" {len(table)} of {len(list(Space(SPACE)))} candidates tried"
)
print(table[[*SPACE, "status", "ms", "gb"]].round(2).to_string(index=False))
print("best:", tuned.best)
