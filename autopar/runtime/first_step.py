"""Validation of a plan: its first step is compared with the same step on one device."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.analysis.replay import equation_name
from autopar.ir.evaluate import evaluate, unchanged
from autopar.ir.graph import aval_of, constant, source_line
from autopar.ir.keys import is_key
from autopar.ir.step_graph import StepGraph
from autopar.lowering.stage_lowering import StageLowering


class FirstStepError(RuntimeError):
    """The first step of a plan and the same step on one device have different results."""


def checked_first_step(fun: Callable[..., Any], executable: Any, args: Sequence[Any]) -> Any:
    """Run a step as planned and on one device, compare the results, and return the planned ones.

    Both runs use copies, so `args` stay valid even if the step donates them. The tolerance of an
    array is a third of the square root of the coarsest machine epsilon in the step, relative to the
    array's largest number, plus ten times the change on one device when the arguments change by a
    few units in the last place.

    Args:
        fun: the step as a function of `args`.
        executable: the planned step, or the planned function that creates a state.
        args: the arguments that are not static.

    Raises:
        FirstStepError: a result differs by more than its tolerance. The error names the result,
            and the first equation that differs if the step has no microbatches and no stages.
        ValueError: the step runs on other hosts, or its microbatches differ from the batch by
            choice.
    """
    placed_by = executable.placed_by
    if placed_by.hosts is not None:
        raise ValueError(
            "check='first step' compares steps of this process; leave it out on other hosts"
            " (autopar.init(cluster='ray'))"
        )
    # Loops of each microbatch must give the numbers of the batch, and are worth comparing.
    choices = asdict(replace(placed_by.plan.exactness, while_loops="exact")).items()
    if chosen := [f"{name}={choice!r}" for name, choice in choices if choice != "exact"]:
        raise ValueError(
            f"check='first step' compares with the step without microbatches, but by"
            f" {' and '.join(chosen)} the microbatches differ from it; leave it out"
        )
    step = executable.step
    leaves, tree = jax.tree.flatten(tuple(args))
    copies = list(map(_copy, leaves))
    perturbed = list(map(_perturbed, copies, range(len(copies))))
    placed = executable.shard_args(*jax.tree.unflatten(tree, map(_copy, copies)))
    results = jax.block_until_ready(executable(*placed))
    on_one_device = jax.jit(fun)
    expected = jax.tree.leaves(on_one_device(*jax.tree.unflatten(tree, copies)))
    noisy = jax.tree.leaves(on_one_device(*jax.tree.unflatten(tree, perturbed)))
    compare = _Comparison(step)
    for path, *values in zip(
        step.result.paths, jax.tree.leaves(results), expected, noisy, strict=True
    ):
        difference = compare(*values)
        if difference:
            result = f"result/{path}".removesuffix("/")
            inside = _first_equation(executable, copies, perturbed, compare)
            raise FirstStepError(
                f"the first step of {step.name} gives something else than one device: {result}"
                f" {difference}{inside}. Another method or mesh shape may be right; check=None runs"
                " the plan as it is"
            )
    return results


def _first_equation(
    executable: Any, args: Sequence[Any], perturbed: Sequence[Any], compare: "_Comparison"
) -> str:
    """Describe the first equation whose result differs; "" if there is none or it is unknown."""
    step = executable.step
    if executable is not executable.placed_by or step.microbatching is not None:
        return ""
    (stage,), (mesh,) = executable.plan.stages, executable.meshes
    lowering = StageLowering(executable.planned.graphs[0], [stage], mesh)
    shardings = [lowering.sharding(var) for var in step.jaxpr.invars]
    planned = jax.jit(partial(_values, step, lowering.run_eqns), in_shardings=shardings)(*args)
    whole = jax.jit(partial(_values, step, partial(evaluate, before=unchanged, after=unchanged)))
    expected = whole(*args)
    noisy = whole(*perturbed)
    for number, values in planned.items():
        eqn = step.jaxpr.eqns[number]
        compared = zip(eqn.outvars, values, expected[number], noisy[number], strict=True)
        for var, *versions in compared:
            difference = compare(*versions)
            if difference:
                return (
                    f"; the first value inside that differs is that of {equation_name(eqn)}"
                    f" ({source_line(eqn)}), {aval_of(var).str_short()}, which {difference}"
                )
    return ""


def _values(step: StepGraph, run_eqns: Callable[..., None], *leaves: Any) -> dict[int, list[Any]]:
    """Return the results of a step's equations by number, except those inside loops or branches."""
    env = dict(
        zip((*step.jaxpr.invars, *step.jaxpr.constvars), (*leaves, *step.jaxpr.consts), strict=True)
    )
    run_eqns(enumerate(step.jaxpr.eqns), env)
    return {
        number: [env[var] for var in eqn.outvars]
        for number, eqn in enumerate(step.jaxpr.eqns)
        if all(var in env for var in eqn.outvars)
    }


class _Comparison:
    """Compares a value with the one of one device; describes the difference if it is too large.

    Attributes:
        tolerance: the tolerance relative to the largest number of an array.
    """

    def __init__(self, step: StepGraph) -> None:
        avals = [aval_of(atom) for eqn in step.jaxpr.eqns for atom in (*eqn.invars, *eqn.outvars)]
        dtypes = {aval.dtype for aval in avals if jnp.issubdtype(aval.dtype, jnp.inexact)}
        epsilons = [float(jnp.finfo(dtype).eps) for dtype in dtypes]
        if jax.default_backend() != "cpu":
            epsilons.append(2.0**-11)  # products of float32 may be rounded to TF32
        self.tolerance = max(epsilons, default=0.0) ** 0.5 / 3

    def __call__(self, value: Any, expected: Any, noisy: Any) -> str:
        actual, wanted, other = map(_numbers, (value, expected, noisy))
        if actual.shape != wanted.shape:
            return f"has shape {actual.shape} instead of {wanted.shape}"
        finite = np.isfinite(wanted) & np.isfinite(other)
        same = (
            (actual == wanted)
            | (np.isnan(actual) & np.isnan(wanted))
            | (np.isfinite(wanted) & ~np.isfinite(other))
        )
        if not np.all(same | (finite & np.isfinite(actual))):
            return f"is {actual[~same][0]} where it should be {wanted[~same][0]}"
        gaps = np.abs(np.subtract(actual, wanted, where=finite, out=np.zeros_like(wanted)))
        noise = np.abs(np.subtract(other, wanted, where=finite, out=np.zeros_like(wanted)))
        largest = float(np.abs(wanted[finite]).max(initial=0.0))
        exact = not jnp.issubdtype(expected.dtype, jnp.inexact)
        allowed = 10 * float(noise.max(initial=0.0)) + (0.0 if exact else self.tolerance * largest)
        gap = float(gaps.max(initial=0.0))
        return f"is off by {gap:.3g} where its numbers reach {largest:.3g}" if gap > allowed else ""


def _copy(leaf: Any) -> Any:
    """Return a copy of a leaf in memory of its own."""
    if isinstance(leaf, jax.Array) and is_key(leaf.dtype):
        return jax.random.wrap_key_data(
            jnp.array(jax.random.key_data(leaf), copy=True), impl=jax.random.key_impl(leaf)
        )
    return np.array(leaf) if isinstance(leaf, jax.Array | np.ndarray) else leaf


def _perturbed(leaf: Any, seed: int) -> Any:
    """Return a leaf with its numbers changed by a few units in the last place."""
    if not isinstance(leaf, np.ndarray) or not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return leaf
    units = np.random.default_rng(seed).integers(-2, 3, leaf.shape)
    return (leaf * (1 + units * float(jnp.finfo(leaf.dtype).eps))).astype(leaf.dtype)


def _numbers(value: Any) -> np.ndarray:
    array = constant(value)
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
