"""Checkpoints: a state saved as it lies on the devices, and restored as any other plan wants it.

    <directory>/20/manifest.json     what the arrays are, and which part of each is where
    <directory>/20/host-0/           the parts that host 0 wrote, with Orbax

A folder has a step's number for its name only once all of it is written, so what has such a name is whole.
"""

from autopar.checkpoint.manifest import CheckpointError, latest_step, saved_steps
from autopar.checkpoint.restoring import restore_checkpoint
from autopar.checkpoint.saving import Saving, save_checkpoint

__all__ = ["CheckpointError", "Saving", "latest_step", "restore_checkpoint", "save_checkpoint", "saved_steps"]
