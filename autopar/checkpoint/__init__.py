"""Checkpoints: a state saved as it lies on the devices, and restored as any other plan wants it.

    <directory>/20/manifest.json     what the arrays are, which part of each is where, and checksums of both
    <directory>/20/host-0/           the parts that host 0 wrote, with Orbax
    <directory>/autopar.lock         names the process that writes there, while one does
    <directory>/30.damaged/          a checkpoint that could not be read when the one before it was restored

A folder has a step's number for its name only once all of it is written, so what has such a name is whole.
"""

from autopar.checkpoint.manifest import (
    CheckpointError,
    DamagedCheckpointError,
    latest_step,
    saved_steps,
)
from autopar.checkpoint.restoring import restore_checkpoint
from autopar.checkpoint.saving import Saving, save_checkpoint

__all__ = [
    "CheckpointError",
    "DamagedCheckpointError",
    "Saving",
    "latest_step",
    "restore_checkpoint",
    "save_checkpoint",
    "saved_steps",
]
