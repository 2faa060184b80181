"""Compare the first step of a plan with the same step on one device."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from autopar.ir.evaluate import as_is, evaluate
from autopar.ir.graph import aval_of, constant, source_line
from autopar.ir.keys import is_key
from autopar.ir.spec import partition_spec
from autopar.ir.step_graph import StepGraph
from autopar.lowering.stage_lowering import StageLowering
from autopar.runtime.create_state import CreateStateExecutable
from autopar.runtime.local_executable import LocalExecutable


class FirstStepError(RuntimeError):
    """The first step of a plan has other results than the same step on one device."""


def checked_first_step(fun: Callable[..., Any], executable: Any, args: Sequence[Any]) -> Any:
    """Run a step as planned and on one device, compare the results, and return the planned ones.

    Both run on copies: `args` stay as they are, also where the step reuses their memory. Results may differ as far as rounding
    explains: by a third of the square root of the coarsest machine epsilon in the step, relative to the largest number of an array, and
    by ten times what changes on one device when the last bits of the arguments do.

    Args:
        fun: the step as a function of `args`, which are the arguments that are not static.

    Raises:
        FirstStepError: a result differs by more. It names that result, and the first equation that differs, where the step runs without
            microbatches and stages.
        ValueError: the step runs on other hosts.
    """
    compiled = (
        executable.train_step if isinstance(executable, CreateStateExecutable) else executable
    )
    if not isinstance(compiled, LocalExecutable):
        raise ValueError(
            "check='first step' compares steps of this process; leave it out on other hosts (autopar.init(cluster='ray'))"
        )
    step = executable.step
    leaves, tree = jax.tree.flatten(tuple(args))
    given = list(map(_copy, leaves))
    perturbed = list(map(_perturbed, given, range(len(given))))
    placed = executable.shard_args(*jax.tree.unflatten(tree, map(_copy, given)))
    results = jax.block_until_ready(executable(*placed))
    whole = jax.jit(fun)
    expected, noisy = (
        jax.tree.leaves(whole(*jax.tree.unflatten(tree, each))) for each in (given, perturbed)
    )
    compare = _Comparison(step)
    for path, *values in zip(
        step.out_paths, jax.tree.leaves(results), expected, noisy, strict=True
    ):
        if difference := compare(*values):
            raise FirstStepError(
                f"the first step of {step.name} gives something else than one device: {f'result/{path}'.removesuffix('/')}"
                f" {difference}{_first_equation(executable, given, perturbed, compare)}. Another method or mesh shape may be right;"
                " check=None runs the plan as it is"
            )
    return results


def _first_equation(
    executable: Any, given: Sequence[Any], perturbed: Sequence[Any], compare: "_Comparison"
) -> str:
    """Describe the first equation whose result differs; "" if there is none, or if it can't be found."""
    step = executable.step
    if not isinstance(executable, LocalExecutable) or step.microbatching is not None:
        return ""
    (stage,), (mesh,) = executable.plan.stages, executable.meshes
    lowering = StageLowering(executable.planned.graphs[0], [stage], mesh)
    shardings = [NamedSharding(mesh, partition_spec(value.spec)) for value in stage.inputs]
    planned = jax.jit(partial(_values, step, lowering.run_eqns), in_shardings=shardings)(*given)
    whole = jax.jit(partial(_values, step, partial(evaluate, before=as_is, after=as_is)))
    expected, noisy = whole(*given), whole(*perturbed)
    for number, values in planned.items():
        eqn = step.jaxpr.eqns[number]
        for r, each in enumerate(zip(values, expected[number], noisy[number], strict=True)):
            if difference := compare(*each):
                name = f"{eqn.source_info.name_stack}/{eqn.primitive.name}".removeprefix("/")
                shape = aval_of(eqn.outvars[r]).str_short()
                return f"; the first value inside that differs is that of {name} ({source_line(eqn)}), {shape}, which {difference}"
    return ""


def _values(step: StepGraph, run_eqns: Callable[..., None], *leaves: Any) -> dict[int, list[Any]]:
    """Return what the equations of a step make, by their numbers, without what they make inside of loops and branches."""
    env = dict(
        zip((*step.jaxpr.invars, *step.jaxpr.constvars), (*leaves, *step.jaxpr.consts), strict=True)
    )
    run_eqns(enumerate(step.jaxpr.eqns), env)
    made = enumerate(step.jaxpr.eqns)
    return {
        n: [env[var] for var in eqn.outvars]
        for n, eqn in made
        if all(var in env for var in eqn.outvars)
    }


class _Comparison:
    """Compares a value with that of one device, and describes the difference where rounding does not explain it."""

    def __init__(self, step: StepGraph) -> None:
        avals = [aval_of(atom) for eqn in step.jaxpr.eqns for atom in (*eqn.invars, *eqn.outvars)]
        dtypes = {aval.dtype for aval in avals if jnp.issubdtype(aval.dtype, jnp.inexact)}
        epsilons = [float(jnp.finfo(dtype).eps) for dtype in dtypes]
        if jax.default_backend() != "cpu":
            epsilons.append(2.0**-11)  # products of float32 may be rounded to TF32
        self.tolerance = max(epsilons, default=0.0) ** 0.5 / 3

    def __call__(self, value: Any, expected: Any, noisy: Any) -> str:
        found, wanted, other = map(_numbers, (value, expected, noisy))
        if found.shape != wanted.shape:
            return f"has shape {found.shape} instead of {wanted.shape}"
        finite = np.isfinite(wanted) & np.isfinite(other)
        same = (
            (found == wanted)
            | (np.isnan(found) & np.isnan(wanted))
            | (np.isfinite(wanted) & ~np.isfinite(other))
        )
        if not np.all(same | (finite & np.isfinite(found))):
            return f"is {found[~same][0]} where it should be {wanted[~same][0]}"
        gaps = np.abs(np.subtract(found, wanted, where=finite, out=np.zeros_like(wanted)))
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
