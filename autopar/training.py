"""A training loop that outlives the hosts it runs on."""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
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
from autopar.tracing.trace import abstract

type Batches = DataLoader | MeshDriverDataLoader | Callable[[int], Iterable[Any]]
"""A loader, or a function from k to the batches of the steps k, k + 1, ..."""


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
    """Run a step `num_steps` times, whatever happens to its hosts; the state afterwards.

    When a worker or a host is lost, hangs or fails, new workers start on the hosts that are there, the step is planned again if these
    are fewer, the last checkpoint is restored as the new plan wants it, and the loop goes on from there with the same batches as
    before. A program that was killed goes on from the last checkpoint in `ckpt_dir`, too, when it is run again. Checkpoints that can't
    be read are set aside with a warning, and the loop goes on from the one before.

    Args:
        step: what `parallelize` returned, from (state, batch) to a state, or to a tuple that begins with one. To be planned for
            fewer hosts its method must leave the devices open.
        state: before the first step, unless `ckpt_dir` has a checkpoint.
        batches: a loader, which brings them where the present plan wants them; or a function from k to the batches of step k and
            those after it. The same k must give the same batches.
        ckpt_dir: where checkpoints are, which all hosts see.
        save_every: steps from one checkpoint to the next. There is one of the first and the last state, too.
        keep: how many checkpoints stay there.
        max_failures: how often hosts may fail with no checkpoint between, until that is raised.
        on_step: called with the number of steps done and what the step returned, of a step that has been asked for, but has perhaps
            not run. Steps that are done again after a failure are told again.

    Raises:
        HostsError: hosts failed too often.
        CheckpointError: `ckpt_dir` has checkpoints of another state, or of more steps, or none of them can be read, or another loop
            uses it.
        ValueError: there are fewer batches than steps, the step does not return a state, or an argument makes no sense.
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
    num_steps, max_failures = (
        checked("num_steps", num_steps, integer(0)),
        checked("max_failures", max_failures, integer(0)),
    )
    save_every = checked("save_every", save_every, integer())
    checked("on_step", on_step, FUNCTION | NONE)
    check_keep(keep)
    directory, avals = directory_path(ckpt_dir), jax.tree.map(abstract, state)
    loop = _Loop(step, avals, batches, num_steps, directory, save_every, keep, on_step)
    forget_saving()  # of a loop before this one
    held = lock(directory, is_alone=True)
    try:
        return _run(loop, state, directory, num_steps, max_failures)
    finally:
        held.release()


def _run(loop: "_Loop", state: Any, directory: Path, num_steps: int, max_failures: int) -> Any:
    """Run the loop until it ends, or hosts fail too often."""
    last = latest_step(directory)
    if last is not None and last > num_steps:
        raise CheckpointError(
            f"{directory} has a checkpoint of step {last}, which is after num_steps={num_steps}"
        )
    if last is None:
        save_checkpoint(directory, state, 0)
        last = 0
    else:
        state = None
    failures = 0
    while True:
        try:
            if failures:
                session.rejoin()
            return loop.run(last, state)
        except HostsError as error:
            forget_saving()
            before, last = last, latest_step(directory)
            assert last is not None
            failures = failures + 1 if last == before else 1
            if failures > max_failures:
                raise
            state = None  # it was on these hosts
            log_progress(f"{error}; going on from step {last}")


class _Loop:
    def __init__(
        self,
        step: ParallelizedFunction,
        avals: Any,
        batches: Batches,
        num_steps: int,
        directory: Path,
        save_every: int,
        keep: int | None,
        on_step: Callable[[int, Any], None] | None,
    ) -> None:
        self._step, self._avals, self._batches, self._num_steps = step, avals, batches, num_steps
        self._directory, self._save_every, self._keep, self._on_step = (
            directory,
            save_every,
            keep,
            on_step,
        )

    def run(self, first: int, state: Any) -> Any:
        """The steps from number `first` on; without a state, of the last checkpoint that can be read, which is at most `first`."""
        batches = None
        if state is None:
            batch, batches = self._example(first)
            restored, state = restore_last(
                self._directory, self._avals if batch is None else self._placements(batch)[0]
            )
            if restored != first:
                first, batches = restored, None
        found = iter(self._from(first)) if batches is None else batches
        done = first
        for done, batch in enumerate(itertools.islice(found, self._num_steps - first), first + 1):
            results = self._step(state, batch)
            state = self._state_of(results)
            if done % self._save_every == 0 or done == self._num_steps:
                save_checkpoint(self._directory, state, done, keep=self._keep, wait=False)
            if self._on_step is not None:
                self._on_step(done, results)
        if done < self._num_steps:
            raise ValueError(f"the batches end after step {done}, expected {self._num_steps}")
        finish_saving()
        return state

    def _example(self, step: int) -> tuple[Any, Iterator[Any] | None]:
        """A batch as the step takes it, or None if there are none; the batches from `step` on, if one of them had to be made."""
        if isinstance(self._batches, DataLoader | MeshDriverDataLoader):
            return self._batches.batch, None
        batches = iter(self._batches(step))
        batch = next(batches, None)
        return batch, itertools.chain([] if batch is None else [batch], batches)

    def _from(self, step: int) -> Iterable[Any]:
        """The batches from a step on."""
        if not isinstance(self._batches, DataLoader | MeshDriverDataLoader):
            return self._batches(step)
        return self._batches.placed(self._placements(self._batches.batch)[1]).from_step(step)

    def _placements(self, batch: Any) -> Any:
        """Where the step wants a state and a batch, by its present plan."""
        executable: Any = self._step.get_executable(self._avals, batch)
        return executable.get_input_placement_specs()

    def _state_of(self, results: Any) -> Any:
        wanted = jax.tree.structure(self._avals)
        for state in (results, results[0] if isinstance(results, tuple) and results else None):
            if jax.tree.structure(state) == wanted:
                return state
        raise ValueError(
            f"the step returned {jax.tree.structure(results)}, expected a state like the one it is given, {wanted}, or a tuple that"
            " begins with one"
        )
