"""Numerical verification of a scheduled model against the model on one device.

If results differ, the directive at fault is found by leaving out one directive after another.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from autopar.api import parallelize
from autopar.directives.build_model import Backend, BuiltModel, build
from autopar.directives.definitions import (
    CutPipelineStage,
    Directive,
    DirectiveError,
    DirectiveSchedule,
    ForkRng,
    Replace,
    Sync,
    describe,
)
from autopar.directives.scheduled_model import ModelSchedule
from autopar.tracing.argument_arrays import abstract

_LOSS = "the loss"
_FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiler options for functions that run once: compile time matters, run time does not."""

type Loss = Callable[[Any], jax.Array]


class VerificationError(AssertionError):
    """The scheduled model computes other values than the model."""


@dataclass
class Verify:
    """A comparison of the loss and all gradients of a scheduled model with the unscheduled model.

    As a context manager, it checks the schedule at the end:

        with Verify(sch, example_inputs):
            sch["linear1"].shard("kernel", axis=1)
            ...

    It runs what `build` returns. With backend "auto" the loss and its gradients are planned as a
    step. Pipeline stages are left out, and so is `fork_rng`, with which random numbers differ from
    the model's.

    Attributes:
        model: the schedule.
        example_inputs: values of the model's arguments.
        params: values of the parameters; random by default.
        loss: a function from the model's result to a scalar. The default is a sum of everything
            that the model returns, with random weights.
        rtol: the largest difference, relative to the largest number in the array. For the default
            loss it is relative to the norm of the summands.
        backend: as for `build`.
        batch_axis: as for `build`.

    Raises:
        VerificationError: Results differ. The message names the worst one and the directive at
            fault.
        DirectiveError: The schedule can't be built.
    """

    model: ModelSchedule
    example_inputs: Sequence[Any]
    params: Any = None
    loss: Loss | None = None
    rtol: float = 1e-4
    backend: Backend = "manual"
    batch_axis: str | None = None
    _loss_scale: float = field(default=0.0, init=False, repr=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: Any) -> None:
        if failed is None:
            self.check()

    def check(self) -> None:
        """Compare the schedule as it is now; errors as for the class."""
        directives = tuple(
            directive
            for directive in self.model.schedule.directives
            if not isinstance(directive, CutPipelineStage | ForkRng)
        )
        schedule = DirectiveSchedule(directives)
        params = _random(self.model.params) if self.params is None else self.params
        expected, self._loss_scale = self._values(self.model.fun, params, _compiled)
        not_finite = [name for name, value in expected.items() if not np.isfinite(value).all()]
        if not_finite:
            raise DirectiveError(
                f"{not_finite[0]} of the model itself, without the schedule, is not finite: nothing"
                " can be compared with it. Give params= (those drawn at random may be negative"
                " where variances are meant), or other example_inputs"
            )
        worst = self._worst_difference(schedule, params, expected)
        if worst is None:
            return
        directive = self._culprit(schedule, params, expected)
        blamed = (
            f"{describe(directive)} of {directive.path or 'the model'}"
            if directive
            else "no single directive"
        )
        raise VerificationError(f"{worst}; at fault is {blamed}")

    def _values(
        self,
        fun: Callable[..., Any],
        params: Any,
        run: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> tuple[dict[str, np.ndarray], float]:
        """Return loss and gradients by name, and the norm of the summands of the loss.

        Gradients of all floating-point parameters and inputs are compared.

        Args:
            fun: the model.
            params: values of its parameters.
            run: a transformation like `jax.jit` with which the loss and its gradients run.
        """
        args = tuple(self.example_inputs)

        def loss(smooth: Any, rest: Any) -> tuple[jax.Array, jax.Array]:
            inputs = jax.tree.map(
                lambda a, b: b if a is None else a, smooth, rest, is_leaf=lambda x: x is None
            )
            result = fun(*inputs)
            if self.loss is None:
                return _weighted_sum(result)
            return self.loss(result), jnp.zeros(())

        smooth, rest = _split_by_smoothness((params, *args))
        (value, scale), gradients = run(jax.value_and_grad(loss, has_aux=True))(smooth, rest)
        leaves, _ = jax.tree.flatten_with_path(gradients)
        named = {f"the gradient of {self._name(path)}": np.asarray(leaf) for path, leaf in leaves}
        return {_LOSS: np.asarray(value), **named}, float(scale)

    def _name(self, path: Any) -> str:
        inner = jax.tree_util.keystr(path[1:], simple=True, separator="/")
        number = path[0].idx
        if number == 0:
            return inner
        return f"argument {number - 1}" + (f", {inner}" if inner else "")

    def _worst_difference(
        self, schedule: DirectiveSchedule, params: Any, expected: dict[str, np.ndarray]
    ) -> str | None:
        """Return the largest difference as text, or None if all differences are within `rtol`.

        Raises:
            DirectiveError: The schedule can't be built.
        """
        model = self.model.replay(schedule, jax.tree.map(abstract, tuple(self.example_inputs)))
        built = build(model, self.backend, self.batch_axis)
        run = _compiled if self.backend != "auto" else partial(_planned, built)
        values, _ = self._values(built.apply, params, run)
        # A gradient may be zero except for rounding; it is compared with the scale of the others.
        # Summands of a loss may cancel; it is compared with their norm.
        floor = 1e-2 * max(_max_abs(value) for name, value in expected.items() if name != _LOSS)
        differences = {
            name: _difference(values[name], value, self._loss_scale if name == _LOSS else floor)
            for name, value in expected.items()
        }
        name = max(differences, key=differences.__getitem__)
        if differences[name] <= self.rtol:
            return None
        return f"{name} differs by {differences[name]:.2g} of its largest value"

    def _culprit(
        self, schedule: DirectiveSchedule, params: Any, expected: dict[str, np.ndarray]
    ) -> Directive | None:
        """Return the directive without which results agree; see `_alternatives`."""
        for directive, alternative in _alternatives(schedule):
            try:
                if self._worst_difference(alternative, params, expected) is None:
                    return directive
            except DirectiveError:
                # The other directives need this one, so that leaving it out shows nothing.
                continue
        return None


def _compiled(step: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(step, compiler_options=_FAST)


def _planned(built: BuiltModel, step: Callable[..., Any]) -> Callable[..., Any]:
    return parallelize(
        step, method=built.method, static_argnums=(), donate_argnums=(), batch_argnums=()
    )


def _alternatives(schedule: DirectiveSchedule) -> Iterator[tuple[Directive, DirectiveSchedule]]:
    """Yield each directive with the schedule without it.

    A sync is also yielded with the schedule that has a plain all_reduce in its place. Directives
    that run functions of the user come first.
    """
    directives = list(enumerate(schedule.directives))
    for k, directive in sorted(directives, key=lambda entry: not _has_function(entry[1])):
        before = schedule.directives[:k]
        after = schedule.directives[k + 1 :]
        if isinstance(directive, Sync) and directive.op != "all_reduce":
            all_reduce = replace(directive, op="all_reduce", axis=None)
            yield directive, DirectiveSchedule((*before, all_reduce, *after))
        yield directive, DirectiveSchedule((*before, *after))


def _has_function(directive: Directive) -> bool:
    return isinstance(directive, Replace) or (isinstance(directive, Sync) and ":" in directive.op)


def _random(avals: Any) -> Any:
    """Return random parameters, scaled by fan-in so that no activation function saturates."""
    rng = np.random.default_rng(0)

    def values(aval: Any) -> Any:
        if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
            return jnp.zeros(aval.shape, aval.dtype)
        if not jnp.issubdtype(aval.dtype, jnp.inexact):
            return np.zeros(aval.shape, aval.dtype)
        scale = max(1, *aval.shape[:1]) ** 0.5
        return (rng.standard_normal(aval.shape) / scale).astype(aval.dtype)

    return jax.tree.map(values, avals)


def _weighted_sum(result: Any) -> tuple[jax.Array, jax.Array]:
    """Return a sum of all floating-point results with random weights, and the norm of its summands.

    With random weights, an error such as a permutation changes the sum.
    """
    rng = np.random.default_rng(1)
    leaves = [leaf for leaf in jax.tree.leaves(result) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    terms = [rng.standard_normal(leaf.shape).astype(leaf.dtype) * leaf for leaf in leaves]
    squares = sum(
        (jnp.sum(jnp.square(jax.lax.stop_gradient(jnp.abs(term)))) for term in terms), jnp.zeros(())
    )
    return sum(map(jnp.sum, terms), jnp.zeros(())), jnp.sqrt(squares)


def _split_by_smoothness(tree: Any) -> tuple[Any, Any]:
    """Return the leaves that have gradients, and the others, as trees with None elsewhere."""

    def has_gradient(x: Any) -> bool:
        return bool(jnp.issubdtype(jnp.asarray(x).dtype, jnp.inexact))

    smooth = jax.tree.map(lambda x: x if has_gradient(x) else None, tree)
    rest = jax.tree.map(lambda x: None if has_gradient(x) else x, tree)
    return smooth, rest


def _difference(value: np.ndarray, expected: np.ndarray, floor: float) -> float:
    """Return the largest difference, relative to the largest number but at least to `floor`.

    Infinite if a number is not finite.
    """
    difference = _max_abs(value.astype(np.float64) - expected)
    if not np.isfinite(difference):
        return float("inf")
    return difference / (max(_max_abs(expected), floor) or 1.0)


def _max_abs(values: np.ndarray) -> float:
    return float(np.max(np.abs(values), initial=0.0))
