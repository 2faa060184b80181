"""A training loop with checkpoints that recovers from lost hosts."""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from autopar.api import ParallelizedFunction
from autopar.checkpoint import CheckpointError, latest_step, save_checkpoint
from autopar.checkpoint.locks import lock
from autopar.checkpoint.manifest import check_keep, directory_path
from autopar.checkpoint.restoring import restore_last
from autopar.checkpoint.saving import finish_saving, forget_saving
from autopar.checks import FUNCTION, NONE, checked, instance, integer, satisfying
from autopar.hosts import session
from autopar.hosts.errors import HostsError
from autopar.progress import log_progress
from autopar.runtime.data_loader import DataLoader, MeshDriverDataLoader
from autopar.tracing.argument_arrays import abstract

type Batches = DataLoader | MeshDriverDataLoader | Callable[[int], Iterable[Any]]
"""A loader, or a function from k to an iterable of the batches of the steps k, k + 1, ..."""


def train(
    step: ParallelizedFunction,
    state: Any,
    batches: Batches,
    num_steps: int,
    ckpt_dir: str | os.PathLike[str],
    *,
    save_every: int = 100,
    keep: int | None = 2,
    max_failures: int = 3,
    on_step: Callable[[int, Any], None] | None = None,
) -> Any:
    """Run a step `num_steps` times with checkpoints, and recover from failures of hosts.

    When a worker or a host is lost, hangs or fails, the loop starts new workers on the remaining
    hosts, plans the step again if there are fewer of them, restores the last checkpoint with the
    placements of the new plan, and continues with the same batches as before. A killed program
    that runs again continues from the last checkpoint in `ckpt_dir`. Checkpoints that cannot be
    read are moved aside with a warning, and the loop continues from the one before.

    Args:
        step: the parallelized step, a function from (state, batch) to a state, or to a tuple whose
            first item is a state. Its method must leave `devices` open for the step to be planned
            again on fewer hosts.
        state: the state before the first step, used unless `ckpt_dir` has a checkpoint.
        batches: a loader, which places batches as the current plan reads them; or a function from
            k to the batches of the steps k, k + 1, ... It must return the same batches for the
            same k.
        num_steps: number of steps in total, those before the last checkpoint included.
        ckpt_dir: directory of the checkpoints, on a file system that all hosts share.
        save_every: number of steps between two checkpoints. The first and the last state are saved
            too.
        keep: number of checkpoints to keep; None keeps all.
        max_failures: number of failures in a row, without a new checkpoint in between, from which
            the loop recovers.
        on_step: called with the number of dispatched steps and the results of the last one, which
            may not have run yet. It is called again for steps that are repeated after a failure.

    Returns:
        The state after the last step.

    Raises:
        HostsError: hosts failed more than `max_failures` times in a row.
        CheckpointError: `ckpt_dir` has checkpoints of another state or of later steps, none of
            them can be read, or another loop uses the directory.
        ValueError: there are fewer batches than steps, the step does not return a state, or an
            argument is not allowed (`OptionError`).

    Example:
        >>> state = autopar.train(train_step, state, loader, 10_000, "checkpoints")
    """
    checked(
        "step",
        step,
        satisfying(
            "what autopar.parallelize returns", lambda step: hasattr(step, "get_executable")
        ),
    )
    checked(
        "batches",
        batches,
        instance("a loader or a function of a step's number", DataLoader, MeshDriverDataLoader)
        | FUNCTION,
    )
    num_steps = checked("num_steps", num_steps, integer(0))
    max_failures = checked("max_failures", max_failures, integer(0))
    save_every = checked("save_every", save_every, integer())
    checked("on_step", on_step, FUNCTION | NONE)
    check_keep(keep)
    directory = directory_path(ckpt_dir)
    avals = jax.tree.map(abstract, state)
    loop = _Loop(step, avals, batches, num_steps, directory, save_every, keep, on_step)
    forget_saving()  # a failed checkpoint of an earlier loop is not an error of this one
    with ExitStack() as at_end:
        at_end.callback(lock(directory, is_alone=True).release)
        # After an error the program may end, and then a checkpoint is no longer written.
        at_end.callback(forget_saving)
        return _run(loop, state, max_failures)


def _run(loop: "_Loop", state: Any, max_failures: int) -> Any:
    """Run the loop to its end; after a failure of hosts, again from the last checkpoint."""
    last = latest_step(loop.directory)
    if last is not None and last > loop.num_steps:
        raise CheckpointError(
            f"{loop.directory} has a checkpoint of step {last}, which is after"
            f" num_steps={loop.num_steps}"
        )
    if last is None:
        save_checkpoint(loop.directory, state, 0)
        last = 0
    else:
        state = None
    failures = 0
    while True:
        try:
            if failures:
                session.current.rejoin()
            return loop.run(last, state)
        except HostsError as error:
            forget_saving()
            previous = last
            last = latest_step(loop.directory)
            assert last is not None
            failures = failures + 1 if last == previous else 1
            if failures > max_failures:
                raise
            state = None  # its arrays were on these hosts
            log_progress(f"{error}; going on from step {last}")


@dataclass(frozen=True, slots=True)
class _Loop:
    """The training loop from one checkpoint to the end or the first failure of a host.

    Attributes:
        avals: the shapes and dtypes of the state.
        directory: directory of the checkpoints.

    The other attributes are arguments of `train`.
    """

    step: ParallelizedFunction
    avals: Any
    batches: Batches
    num_steps: int
    directory: Path
    save_every: int
    keep: int | None
    on_step: Callable[[int, Any], None] | None

    def run(self, first: int, state: Any) -> Any:
        """Run the steps from number `first` on, and return the state after the last one.

        Args:
            first: number of the first step.
            state: the state before it; None restores the last checkpoint that can be read, and
                continues from its step, which is at most `first`.
        """
        batches = None
        if state is None:
            batch, batches = self._example(first)
            restored, state = restore_last(
                self.directory, self.avals if batch is None else self._placements(batch)[0]
            )
            if restored != first:
                first, batches = restored, None
        if batches is None:
            batches = iter(self._batches_from(first))
        done = first
        for done, batch in enumerate(itertools.islice(batches, self.num_steps - first), first + 1):
            results = self.step(state, batch)
            state = self._state_of(results)
            if done % self.save_every == 0 or done == self.num_steps:
                save_checkpoint(self.directory, state, done, keep=self.keep, wait=False)
            if self.on_step is not None:
                self.on_step(done, results)
        if done < self.num_steps:
            raise ValueError(f"the batches end after step {done}, expected {self.num_steps}")
        finish_saving()
        return state

    def _example(self, step: int) -> tuple[Any, Iterator[Any] | None]:
        """Return a batch for its shapes, and the batches from `step` on if reading it began them.

        The batch is None if there are none.
        """
        if isinstance(self.batches, DataLoader | MeshDriverDataLoader):
            return self.batches.batch, None
        batches = iter(self.batches(step))
        batch = next(batches, None)
        return batch, itertools.chain([] if batch is None else [batch], batches)

    def _batches_from(self, step: int) -> Iterable[Any]:
        """Return the batches from a step on."""
        if not isinstance(self.batches, DataLoader | MeshDriverDataLoader):
            return self.batches(step)
        return self.batches.placed(self._placements(self.batches.batch)[1]).from_step(step)

    def _placements(self, batch: Any) -> Any:
        """Return the placements of a state and a batch in the step's current plan."""
        executable: Any = self.step.get_executable(self.avals, batch)
        return executable.get_input_placement_specs()

    def _state_of(self, results: Any) -> Any:
        """Return the state among the results of the step."""
        expected = jax.tree.structure(self.avals)
        for state in (results, results[0] if isinstance(results, tuple) and results else None):
            if jax.tree.structure(state) == expected:
                return state
        raise ValueError(
            f"the step returned {jax.tree.structure(results)}, expected a state like the one it is"
            f" given, {expected}, or a tuple that begins with one"
        )
