"""A cell, which is a model and a method: it runs as planned and is compared with one device."""

import inspect
import re
import sysconfig
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from experiments.reach.public_step import PublicStep
from experiments.reach.reach_methods import CLUSTER, METHODS, PREDICTION
from simulator import ClusterError

type Outcome = Literal["equal", "predicted", "refused", "wrong", "failed"]

RELATIVE_TOLERANCE = 2e-4
"""Tolerance of an array relative to the largest change that the step makes in it."""

NOISE_FACTOR = 10.0
"""Tolerance relative to the change on one device when arguments change in their last digits."""

NOISY_RUNS = 4
"""Runs with changed last digits; a few are needed to see a rectifier that opens in some of them."""


@dataclass(frozen=True, slots=True)
class ReachCell:
    """What became of a cell.

    Attributes:
        model: library and name of the model.
        method: name of the method.
        outcome: "equal" to one device; "predicted"; "refused" with one of autopar's errors; "wrong"
            numbers; "failed" with another error, an abort or a timeout.
        reason: why it is refused, wrong or failed: the first line of the message.
        line: the line of code that a refusal names, as "FILE:LINE".
        planning_s: seconds of tracing and planning.
        total_s: seconds of planning, compiling and running.
        warnings: warnings of the plan and of Python, separated by " | ".
    """

    model: str
    method: str
    outcome: Outcome
    reason: str = ""
    line: str = ""
    planning_s: float | None = None
    total_s: float | None = None
    warnings: str = ""


@dataclass
class ReachRun:
    """A model with its results on one device, which all of its cells are compared with.

    Attributes:
        model: library and name of the model.
        public: its step and arguments.
    """

    model: str
    public: PublicStep
    _expected: dict[int, list[list[tuple[str, np.ndarray]]]] = field(default_factory=dict)
    _before: dict[str, np.ndarray] = field(default_factory=dict)

    def cell(self, method: str) -> ReachCell:
        """Run the model by a method, and compare the result with that of one device."""
        start = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outcome, reason, line, planning, notes = self._outcome(method)
        texts = dict.fromkeys([*notes, *(str(each.message) for each in caught if _ours(each))])
        return ReachCell(
            self.model,
            method,
            outcome,
            brief_text(reason),
            line,
            planning,
            round(time.perf_counter() - start, 2),
            " | ".join(map(brief_text, texts)),
        )

    def _outcome(self, method: str) -> tuple[Outcome, str, str, float | None, Sequence[str]]:
        """Return outcome, reason, line, planning seconds and warnings of the plan."""
        try:
            if method == PREDICTION:
                plan, notes = self._predicted(method)
                return "predicted", "", "", round(plan.planning_seconds, 3), notes
            chosen, parts = replace(METHODS[method], **self.public.method_options), 1
            if self.public.uses_batch_statistics:
                parts = int(chosen.num_micro_batches)
                chosen = replace(chosen, batch_statistics="microbatch")
            step = autopar.parallelize(self.public.step, method=chosen, **self.public.options)
            args = self._args()
            result = self.public.observed(args, step(*args))
            executable: Any = step.get_last_executable()
            planning, notes = round(executable.plan_seconds, 3), executable.plan.warnings
            difference = self._difference(result, parts)
            return "wrong" if difference else "equal", difference, "", planning, notes
        except Exception as error:
            outcome = "refused" if is_refusal(error) else "failed"
            reason = f"{type(error).__name__}: {error}"
            return outcome, reason, line_of(str(error)), None, ()

    def _predicted(self, method: str) -> tuple[autopar.Plan, Sequence[str]]:
        """Predict a step; at analytic fidelity if only a machine with GPUs can compile it.

        Returns:
            The plan, and its warnings with the reason for analytic fidelity.
        """
        step, args, options = self.public.step, self._args(), self.public.options
        plan = autopar.plan_step(step, args, method=METHODS[method], cluster=CLUSTER, **options)
        predict = partial(autopar.predict, step, args, plan, CLUSTER, **options)
        notes = list(plan.warnings)
        try:
            prediction = predict()
        except ClusterError as error:
            if 'fidelity="analytic"' not in str(error):
                raise
            prediction = predict(fidelity="analytic")
            notes.append(f"predicted at analytic fidelity: {error}")
        assert prediction.seconds > 0
        return plan, notes

    def _args(self) -> Any:
        return self.public.with_arrays(self.public.args, jnp.copy)

    def _difference(self, result: Any, parts: int) -> str:
        """Describe the first array of a result that differs from one device; "" if none does.

        Args:
            result: the result.
            parts: number of microbatches that have statistics of their own; else one.
        """
        if parts not in self._expected:
            self._run_on_one_device(parts)
        actual, runs = named_arrays(result), self._expected[parts]
        if [path for path, _ in actual] != [path for path, _ in runs[0]]:
            return "the result has another structure than on one device"
        for (path, value), (_, expected), *noisy in zip(actual, *runs, strict=True):
            before = self._before.get(path)
            difference = array_difference(value, expected, [noise for _, noise in noisy], before)
            if difference:
                return f"{path} {difference}"
        return ""

    def _run_on_one_device(self, parts: int) -> None:
        public = self.public
        step = public.jit(public.step)

        def run(args: Any) -> list[tuple[str, np.ndarray]]:
            if parts > 1:
                return named_arrays(public.mean_over_microbatches(step, args, parts))
            return named_arrays(public.observed(args, step(*args)))

        noisy = (
            public.with_arrays(public.args, Perturbation(seed, public.computes_in))
            for seed in range(NOISY_RUNS)
        )
        self._expected[parts] = [run(args) for args in (self._args(), *noisy)]
        # the state before the step, by the paths of the results that it becomes
        given = dict(named_arrays(public.observed(self._args(), self._args())))
        given |= dict(named_arrays(self._args()))
        for path, value in self._expected[parts][0]:
            old = given.get(path)
            if old is not None and old.shape == value.shape and old.dtype == value.dtype:
                self._before[path] = old


@dataclass
class Perturbation:
    """Changes the last digits of floating-point arrays at random.

    Attributes:
        seed: seed of the random numbers.
        dtype: the type whose last digits change, in arrays that are not narrower themselves.
    """

    seed: int
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def __call__(self, array: jax.Array) -> jax.Array:
        """Return a changed copy of an array; integers and keys stay."""
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            return jnp.copy(array)
        units = self._random.integers(-2, 3, array.shape)
        epsilon = max(float(jnp.finfo(dtype).eps) for dtype in (array.dtype, self.dtype))
        factor = 1 + units * epsilon
        return jnp.asarray(np.asarray(array) * factor, array.dtype)


_ARRAYS = (jax.Array, autopar.JoinedArray, np.ndarray, np.generic, bool, int, float)


def named_arrays(tree: Any) -> list[tuple[str, np.ndarray]]:
    """Return the arrays and numbers of a pytree with their paths; keys as their data."""
    named = []
    for path, leaf in jax.tree.leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if isinstance(leaf, _ARRAYS):
            named.append((jax.tree_util.keystr(path, simple=True, separator="/"), np.asarray(leaf)))
    return named


def array_difference(
    actual: np.ndarray,
    expected: np.ndarray,
    noisy: Sequence[np.ndarray],
    before: np.ndarray | None = None,
) -> str:
    """Describe how an array differs from the expected one; "" if rounding explains it.

    Args:
        actual: the array.
        expected: the array on one device.
        noisy: the same with arguments that differ in their last digits. A gradient that is zero but
            for rounding differs between any two programs, and Adam makes it as large as any other.
        before: the array that the step changed. The tolerance is relative to the change, not to the
            array: an update is small beside its parameter.
    """
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return f"is {actual.dtype}{actual.shape}, expected {expected.dtype}{expected.shape}"
    if expected.size == 0:
        return ""
    inexact = np.issubdtype(expected.dtype, np.inexact)
    value, wanted, *others = (array.astype(np.float64) for array in (actual, expected, *noisy))
    if not np.array_equal(np.isfinite(value), np.isfinite(wanted)):
        return "is finite in other places"
    finite = np.isfinite(wanted)
    if not np.array_equal(value[~finite], wanted[~finite], equal_nan=True):
        return "has other infinite numbers"
    value, wanted = value[finite], wanted[finite]
    old = np.zeros_like(wanted) if before is None else before.astype(np.float64)[finite]
    gap = float(np.abs(value - wanted).max(initial=0.0))
    noise = max(float(np.abs(other[finite] - wanted).max(initial=0.0)) for other in others)
    change = float(np.abs(wanted - old).max(initial=0.0))
    allowed = NOISE_FACTOR * noise
    if allowed > change > 0 and (wanted >= 0).all():
        # zero but for rounding, and squared, as the second moments of Adam
        allowed *= NOISE_FACTOR
    if inexact:
        rounding = 4 * float(np.finfo(expected.dtype).eps) * float(np.abs(wanted).max(initial=0.0))
        allowed += RELATIVE_TOLERANCE * change + rounding
    return f"is off by {gap:.3g} where it changes by {change:.3g}" if gap > allowed else ""


_REFUSALS = (
    autopar.InfeasibleError,
    autopar.LayerError,
    autopar.MemoryBudgetError,
    autopar.MicrobatchError,
    autopar.MissingRuleError,
    autopar.NoStagesError,
    autopar.OptionError,
    autopar.PlanError,
    autopar.ShardingError,
    autopar.StageError,
    autopar.TraceError,
)
_AUTOPAR = str(Path(inspect.getfile(autopar)).parent)


def is_refusal(error: Exception) -> bool:
    """Return whether an error is autopar's own: by its class, or by a `raise` in its code."""
    if isinstance(error, _REFUSALS):
        return True
    last = traceback.extract_tb(error.__traceback__)[-1]
    raised = (last.line or "").startswith("raise") and last.filename.startswith(_AUTOPAR)
    return raised and isinstance(error, TypeError | ValueError)


def _ours(warning: warnings.WarningMessage) -> bool:
    """Return whether a warning was raised in autopar."""
    return warning.filename.startswith(_AUTOPAR) or "autopar" in str(warning.message)


_LINE = re.compile(r"[^\s()]+\.py:\d+")
_FOLDERS = (sysconfig.get_paths()["purelib"], str(Path(__file__).parents[2]))


def line_of(message: str) -> str:
    """Return the first line of code that a message names, as "FILE:LINE", or ""."""
    named = _LINE.search(message)
    return without_folders(named[0]) if named else ""


def without_folders(text: str) -> str:
    """Return a text with paths relative to the repository or to the installed packages."""
    for folder in _FOLDERS:
        text = text.replace(f"{folder}/", "")
    return text


def brief_text(text: str) -> str:
    """Return the beginning of a text in one line, without the folders of this machine."""
    return " ".join(without_folders(text).split())[:600]
