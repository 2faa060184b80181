"""Checkpoints: states saved shard by shard, and restored for any plan, mesh and number of hosts.

    <directory>/20/manifest.json     arrays, the files of their tiles, and checksums of both
    <directory>/20/host-0/           the tiles that host 0 wrote, with Orbax
    <directory>/autopar.lock         names the process that writes to the directory
    <directory>/30.damaged/          a checkpoint that could not be read during a restore

A folder gets a step's number as its name after everything in it has been written, so a folder with
such a name is complete.
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
