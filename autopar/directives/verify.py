"""`Verify`: that a scheduled model computes what the model does, and when not, which directive is to blame."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from autopar.api import parallelize
from autopar.directives.build import Backend, BuiltModel, build
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
from autopar.tracing.trace import abstract

_LOSS = "the loss"
_FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""What runs once is to compile fast."""

type Loss = Callable[[Any], jax.Array]


class VerificationError(AssertionError):
    """The scheduled model computes something else than the model."""


@dataclass
class Verify:
    """Checks that a loss of the scheduled model, and its every gradient, are those of the model on one device.

    As a context, it checks the schedule that there is at the end:

        with Verify(sch, example_inputs):
            sch["linear1"].shard("kernel", axis=1)
            ...

    What is checked is what runs: with backend "auto" the loss and its gradients are a step that is planned, by the method that `build`
    gives. Stages of a pipeline are left out of it, and so is `fork_rng`: shards that draw their own numbers can't give the model's.

    Attributes:
        model: the schedule.
        example_inputs: the model's arguments, as values.
        params: values of the parameters; drawn at random by default.
        loss: from the model's result to a number; by default a sum with random weights of all that it returns.
        rtol: largest difference, relative to the largest number in the array; of the default loss, to the norm of what it adds up.

    Raises:
        VerificationError: at the end, naming what differs and the directive at fault.
        DirectiveError: the schedule can't be built.
    """

    model: ModelSchedule
    example_inputs: Sequence[Any]
    params: Any = None
    loss: Loss | None = None
    rtol: float = 1e-4
    backend: Backend = "manual"
    batch_axis: str | None = None
    _size: float = field(default=0.0, init=False, repr=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: Any) -> None:
        if failed is None:
            self.check()

    def check(self) -> None:
        """Compare the schedule as it is now."""
        given = self.model.schedule.directives
        schedule = DirectiveSchedule(
            tuple(each for each in given if not isinstance(each, CutPipelineStage | ForkRng))
        )
        params = _random(self.model.params) if self.params is None else self.params
        wanted, self._size = self._values(self.model.fun, params, _compiled)
        if strange := [name for name, value in wanted.items() if not np.isfinite(value).all()]:
            raise DirectiveError(
                f"{strange[0]} of the model itself, without the schedule, is not finite: nothing can be compared with it. Give params= "
                "(those drawn at random may be negative where variances are meant), or other example_inputs"
            )
        worst = self._worst(schedule, params, wanted)
        if worst is None:
            return
        directive = self._culprit(schedule, params, wanted)
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
        """The loss, and the gradients of all parameters and inputs that have any, by name; computed by `run` of them.

        And how large the numbers are that were added up to the loss.
        """
        args = tuple(self.example_inputs)

        def loss(smooth: Any, rest: Any) -> tuple[jax.Array, jax.Array]:
            given = jax.tree.map(
                lambda a, b: b if a is None else a, smooth, rest, is_leaf=lambda x: x is None
            )
            result = fun(*given)
            return _weighted(result) if self.loss is None else (self.loss(result), jnp.zeros(()))

        smooth, rest = _parted((params, *args))
        (value, size), gradients = run(jax.value_and_grad(loss, has_aux=True))(smooth, rest)
        leaves, _ = jax.tree.flatten_with_path(gradients)
        named = {f"the gradient of {self._name(path)}": np.asarray(leaf) for path, leaf in leaves}
        return {_LOSS: np.asarray(value), **named}, float(size)

    def _name(self, path: Any) -> str:
        inner = jax.tree_util.keystr(path[1:], simple=True, separator="/")
        return (
            inner
            if path[0].idx == 0
            else f"argument {path[0].idx - 1}" + (f", {inner}" if inner else "")
        )

    def _worst(
        self, schedule: DirectiveSchedule, params: Any, wanted: dict[str, np.ndarray]
    ) -> str | None:
        """What a schedule gets most wrong, in words; None when all is well. Raises DirectiveError if it can't be built."""
        model = self.model.replayed(schedule, jax.tree.map(abstract, tuple(self.example_inputs)))
        built = build(model, self.backend, self.batch_axis)
        found, _ = self._values(
            built.apply, params, _compiled if self.backend != "auto" else partial(_planned, built)
        )
        # Gradients that are zero but for rounding are compared with the others; a loss, with the numbers that may cancel in it.
        floor = 1e-2 * max(_largest(value) for name, value in wanted.items() if name != _LOSS)
        differences = {
            name: _difference(found[name], value, self._size if name == _LOSS else floor)
            for name, value in wanted.items()
        }
        name = max(differences, key=lambda name: differences[name])
        if differences[name] <= self.rtol:
            return None
        return f"{name} differs by {differences[name]:.2g} of its largest value"

    def _culprit(
        self, schedule: DirectiveSchedule, params: Any, wanted: dict[str, np.ndarray]
    ) -> Directive | None:
        """The directive without which, or with a plain all_reduce instead of which, all would be well."""
        for directive, others in _alternatives(schedule):
            try:
                if self._worst(others, params, wanted) is None:
                    return directive
            except DirectiveError:
                continue  # what is left does not fit together: no answer
        return None


def _compiled(step: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(step, compiler_options=_FAST)


def _planned(built: BuiltModel, step: Callable[..., Any]) -> Callable[..., Any]:
    return parallelize(
        step, method=built.method, static_argnums=(), donate_argnums=(), batch_argnums=()
    )


def _alternatives(schedule: DirectiveSchedule) -> Iterator[tuple[Directive, DirectiveSchedule]]:
    given = schedule.directives
    # What runs functions of the user is tried first.
    for k, directive in sorted(enumerate(given), key=lambda each: not _has_function(each[1])):
        if isinstance(directive, Sync) and directive.op != "all_reduce":
            yield (
                directive,
                DirectiveSchedule(
                    (*given[:k], replace(directive, op="all_reduce", axis=None), *given[k + 1 :])
                ),
            )
        yield directive, DirectiveSchedule((*given[:k], *given[k + 1 :]))


def _has_function(directive: Directive) -> bool:
    return isinstance(directive, Replace) or (isinstance(directive, Sync) and ":" in directive.op)


def _random(avals: Any) -> Any:
    """Parameters to compare with: small, so that nothing saturates, and each different from all others."""
    draw = np.random.default_rng(0)

    def values(aval: Any) -> Any:
        if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
            return jnp.zeros(aval.shape, aval.dtype)
        if not jnp.issubdtype(aval.dtype, jnp.inexact):
            return np.zeros(aval.shape, aval.dtype)
        return (draw.standard_normal(aval.shape) / max(1, *aval.shape[:1]) ** 0.5).astype(
            aval.dtype
        )

    return jax.tree.map(values, avals)


def _weighted(result: Any) -> tuple[jax.Array, jax.Array]:
    """A sum of everything, with weights that no mistake leaves unchanged; and the norm of what was added up."""
    draw = np.random.default_rng(1)
    leaves = [leaf for leaf in jax.tree.leaves(result) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    terms = [draw.standard_normal(leaf.shape).astype(leaf.dtype) * leaf for leaf in leaves]
    squares = sum(
        (jnp.sum(jnp.square(jax.lax.stop_gradient(jnp.abs(each)))) for each in terms), jnp.zeros(())
    )
    return sum(map(jnp.sum, terms), jnp.zeros(())), jnp.sqrt(squares)


def _parted(tree: Any) -> tuple[Any, Any]:
    """What has gradients and what has none, each with None in the place of the other."""
    smooth = jax.tree.map(
        lambda x: x if jnp.issubdtype(jnp.asarray(x).dtype, jnp.inexact) else None, tree
    )
    return smooth, jax.tree.map(
        lambda x: None if jnp.issubdtype(jnp.asarray(x).dtype, jnp.inexact) else x, tree
    )


def _difference(found: np.ndarray, wanted: np.ndarray, floor: float) -> float:
    """The largest difference, relative to the largest number or to `floor`; infinite when something is not finite."""
    difference = _largest(found.astype(np.float64) - wanted)
    return (
        difference / (max(_largest(wanted), floor) or 1.0)
        if np.isfinite(difference)
        else float("inf")
    )


def _largest(values: np.ndarray) -> float:
    return float(np.max(np.abs(values), initial=0.0))
