"""`parallelize` traces, plans, compiles and runs a step on the devices that `init` selects."""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, Literal, TypedDict, Unpack, assert_never, get_args, overload

import jax

from autopar._cpython import builds_graphs
from autopar.checks import (
    NONE,
    OptionError,
    checked,
    one_of,
    short_repr,
)
from autopar.derived_methods import CreateStateParallel, FollowParallel, Method, PlanMethod
from autopar.hosts.arrays import DistributedArray
from autopar.ir.joined_array import JoinedArray
from autopar.ir.step_graph import Exactness
from autopar.lowering.planned import PlannedStep
from autopar.methods import PlanningMethod, ShardParallel
from autopar.planning.follow import follow
from autopar.planning.method_planning import plan_by_method, trace_for
from autopar.runtime.create_state import CreateStateExecutable, state_avals
from autopar.runtime.executable import Executable
from autopar.runtime.first_step import checked_first_step
from autopar.runtime.fitting import budget_of, compiled_within
from autopar.runtime.local_backend import LOCAL, Backend, backend
from autopar.tracing.argument_arrays import abstract
from autopar.tracing.arguments import (
    AUTO_ARGNUMS,
    BATCH_ARGNUMS,
    Argnums,
    BatchArgnums,
    NumberWatch,
    batch_arguments,
    batch_dims,
    by_position,
    check_args,
    check_hashable,
    donated_arguments,
    dynamic_arguments,
    leaves_of,
    positional_arguments,
    result_shapes,
    static_arguments,
    static_key,
)
from autopar.tracing.jax_settings import check_jit_is_on, jax_settings
from autopar.tracing.packing import Packing
from autopar.tracing.trace import trace, with_output_cuts

type AnyExecutable = Executable | CreateStateExecutable


class _Options(TypedDict, total=False):
    """The options of `parallelize` other than the method."""

    static_argnums: Argnums
    donate_argnums: Argnums
    batch_argnums: BatchArgnums
    check: Literal["first step"] | None


@overload
def parallelize(
    fun: Callable[..., Any], *, method: CreateStateParallel, **options: Unpack[_Options]
) -> "ParallelizedFunction[CreateStateExecutable]": ...
@overload
def parallelize(
    fun: Callable[..., Any],
    *,
    method: PlanningMethod | PlanMethod | FollowParallel | None = None,
    **options: Unpack[_Options],
) -> "ParallelizedFunction[Executable]": ...
@overload
def parallelize(
    fun: None = None, *, method: CreateStateParallel, **options: Unpack[_Options]
) -> "Callable[[Callable[..., Any]], ParallelizedFunction[CreateStateExecutable]]": ...
@overload
def parallelize(
    fun: None = None,
    *,
    method: PlanningMethod | PlanMethod | FollowParallel | None = None,
    **options: Unpack[_Options],
) -> "Callable[[Callable[..., Any]], ParallelizedFunction[Executable]]": ...
def parallelize(
    fun: Callable[..., Any] | None = None,
    *,
    static_argnums: Argnums = "auto",
    donate_argnums: Argnums = "auto",
    batch_argnums: BatchArgnums = "auto",
    method: Method | None = None,
    check: Literal["first step"] | None = None,
) -> Any:
    """Parallelize a training step over devices; also a decorator, with or without arguments.

    Args:
        fun: a function of pytrees of arrays, as `jax.jit` takes it; of Equinox modules, as
            `eqx.filter_jit` takes it; or of nnx modules, which it may change, as `nnx.jit` takes
            it.
        static_argnums: numbers of the arguments that are constants of the compiled step. "auto"
            selects plain Python numbers and strings, and arguments without arrays, such as a
            function, but never a flax TrainState. Of an argument with arrays and something else,
            such as an Equinox module, the arrays alone are inputs, and all else is constant. A step
            is planned and compiled for each value of its constants: pass a number that changes,
            such as a learning rate, as an array, `jnp.float32(0.1)`.
        donate_argnums: numbers of the arguments whose memory the step may reuse. "auto" selects
            flax TrainStates.
        batch_argnums: numbers of the arguments whose arrays have the batch as their first dim, or a
            mapping from these numbers to the batch dim, such as {1: 0, 2: 1}. Keyword-only
            parameters are counted after all others. "auto" selects the arguments after the first
            whose arrays all have the same first dim, and no second copy of the model, such as its
            optimizer state; without any, the last argument with arrays. Where that leaves a choice
            and the step returns a state of several arrays, arguments that it returns are not the
            batch, and the first argument may be.
        method: how to parallelize (see `autopar.methods`); `ShardParallel()` by default.
        check: "first step" compares the first step of each plan with the same step on one device,
            whose memory has to suffice for it.

    Returns:
        A `ParallelizedFunction`. It compiles once for each combination of structure, shapes and
        dtypes of its arguments, and keeps the `MOST_PROGRAMS` executables used last. With
        `check="first step"` its first call raises `FirstStepError` if a result differs by more
        than rounding explains.

    Raises:
        OptionError: an option has a type or a value that is not allowed.

    Example:
        >>> @autopar.parallelize(method=autopar.ShardParallel(devices=(2, 4)))
        ... def train_step(state, batch):
        ...     loss, grads = autopar.value_and_grad(loss_fn)(state.params, batch)
        ...     return state.apply_gradients(grads=grads), loss
    """
    method = ShardParallel() if method is None else method
    if not isinstance(method, get_args(Method.__value__)):
        raise OptionError(
            f"method is {short_repr(method)}, expected one of autopar.methods,"
            " e.g. autopar.ShardParallel()"
        )
    static_argnums = checked("static_argnums", static_argnums, AUTO_ARGNUMS)
    donate_argnums = checked("donate_argnums", donate_argnums, AUTO_ARGNUMS)
    batch_argnums = checked("batch_argnums", batch_argnums, BATCH_ARGNUMS)
    checked("check", check, NONE | one_of("first step"))
    if fun is None:
        return lambda f: parallelize(
            f,
            static_argnums=static_argnums,
            donate_argnums=donate_argnums,
            batch_argnums=batch_argnums,
            method=method,
            check=check,
        )
    if not callable(fun) or isinstance(fun, ParallelizedFunction):
        raise OptionError(
            f"fun is {short_repr(fun)}, expected a function of arrays, and not a parallelized one:"
            " take its .fun"
        )
    return ParallelizedFunction(fun, static_argnums, donate_argnums, batch_argnums, method, check)


MOST_PROGRAMS = 32
"""Number of executables that a parallelized function keeps, one per combination of shapes and
static values."""


class ParallelizedFunction[E: AnyExecutable]:
    """A training step that runs in parallel: the result of `parallelize`.

    It is called like the function it wraps. Numpy and JAX arrays are distributed over the devices,
    and the results are distributed arrays: `jax.Array` in one process, `DistributedArray` on the
    hosts of a Ray cluster.

    Attributes:
        fun: the function that was parallelized.
        method: how it is parallelized.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        static_argnums: Argnums,
        donate_argnums: Argnums,
        batch_argnums: BatchArgnums,
        method: Method,
        check: Literal["first step"] | None = None,
    ) -> None:
        wraps(fun)(self)
        self.fun = fun
        self._by_position = by_position(fun)
        self.method = method
        self._static_argnums: Argnums = static_argnums
        self._donate_argnums: Argnums = donate_argnums
        self._batch_argnums: BatchArgnums = batch_argnums
        self._numbers = NumberWatch(fun)
        # in order of use, the last one used at the end
        self._executables: OrderedDict[Any, E] = OrderedDict()
        # the settings of JAX in the last call, numbers and keys of its static arguments, and its
        # executable
        self._last: tuple[tuple[Any, ...], tuple[int, ...], tuple[Any, ...], E] | None = None
        # the backend that the executables were compiled for
        self._backend: Backend = backend()
        self._check = check
        # the executables whose first step has not been compared yet
        self._unchecked: set[E] = set()

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Run the step; plan and compile it first if no executable fits the arguments.

        Args:
            *args: arguments by position.
            **keywords: arguments by name.

        Raises:
            TypeError: an argument is neither an array nor static and hashable, or the call is under
                a JAX transformation.
            TraceError: the step cannot be traced.
            MemoryBudgetError: no allowed plan fits in the memory of a device.
            FirstStepError: `check="first step"` was set, and the results differ.
            RuntimeError: `jax.disable_jit` is on.
        """
        if keywords:
            args = positional_arguments(self.fun, args, keywords)
        last = self._last  # another thread may change it
        if (
            last is not None
            and self._backend is backend()
            and last[0] == jax_settings()
            and last[-1] not in self._unchecked
        ):
            _, static, static_args, executable = last
            if not static or static_args == tuple(
                static_key(args[i]) for i in static if i < len(args)
            ):
                try:
                    return executable(*dynamic_arguments(args, static))
                except (TypeError, ValueError):
                    # other shapes or structure, or arrays not distributed yet: handled below
                    pass
        executable, packing, dynamic = self._prepare(args)
        if executable in self._unchecked:
            return packing.result(self._first_step(executable, args, packing, dynamic))
        return packing.result(executable(*executable.shard_args(*dynamic)))

    def _first_step(
        self, executable: E, args: Sequence[Any], packing: Packing, dynamic: Sequence[Any]
    ) -> Any:
        """Run the first step of an executable, and compare it with the step on one device."""
        static = static_arguments(self._static_argnums, args)
        fun = self._with_static(packing, static)
        results = checked_first_step(fun, executable, dynamic)
        self._unchecked.discard(executable)
        return results

    def get_executable(self, *args: Any, **keywords: Any) -> E:
        """Return the executable for arguments like these; plan and compile it if there is none.

        Args:
            *args: arrays or `jax.ShapeDtypeStruct`s, by position.
            **keywords: the same by name.

        Raises:
            TypeError, TraceError, MemoryBudgetError: as `__call__`.
        """
        if keywords:
            args = positional_arguments(self.fun, args, keywords)
        return self._prepare(args)[0]

    def get_last_executable(self) -> E | None:
        """Return the executable of the last call, or None before the first one."""
        return self._last[-1] if self._last else None

    def preshard_dynamic_args(self, *args: Any) -> tuple[Any, ...]:
        """Return the arguments that are not static, distributed as the step reads them.

        A training loop that passes them back saves the distribution of each call.
        """
        executable, packing, dynamic = self._prepare(args)
        return packing.arguments(executable.shard_args(*dynamic))

    def _prepare(self, args: Sequence[Any]) -> tuple[E, Packing, tuple[Any, ...]]:
        """Return the executable for `args`, compiled if need be, and the packed arguments.

        Returns:
            The executable, the packing of the arguments, and the arguments that are not static.
        """
        if self._backend is not backend():
            self._executables, self._last, self._backend = OrderedDict(), None, backend()
            self._unchecked.clear()
        name = getattr(self.fun, "__name__", "the step")
        check_jit_is_on(name)
        check_args(name, args)
        static = static_arguments(self._static_argnums, args)
        for i in static:
            check_hashable(i, args[i])
        packing = Packing(args, static, batch_dims(self._batch_argnums, args))
        dynamic = tuple(dynamic_arguments(packing.args, static))
        leaves, tree = jax.tree.flatten(dynamic)
        if self._backend is LOCAL and any(map(_is_on_hosts, leaves)):
            leaves = [leaf.__jax_array__() if _is_on_hosts(leaf) else leaf for leaf in leaves]
            dynamic = jax.tree.unflatten(tree, leaves)
        avals = tuple((a.shape, a.dtype, a.weak_type) for a in map(abstract, leaves))
        static_args = tuple(static_key(args[i]) for i in static)
        settings = jax_settings()
        key = (settings, static, static_args, tree, avals)
        if key not in self._executables:
            if self._static_argnums == "auto":
                for i in static:
                    self._numbers.add(i, args[i])
            for i, path, value in packing.constants():
                self._numbers.add(i, value, path)
            self._executables[key] = self._compile(packing, static)
            if self._check is not None:
                self._unchecked.add(self._executables[key])
            if len(self._executables) > MOST_PROGRAMS:
                self._unchecked.discard(self._executables.popitem(last=False)[1])
        self._executables.move_to_end(key)
        executable = self._executables[key]
        self._last = (settings, static, static_args, executable)
        return executable, packing, dynamic

    @builds_graphs
    def _compile(self, packing: Packing, static: tuple[int, ...]) -> E:
        start, args = time.perf_counter(), packing.args
        dynamic_argnums = [i for i in range(len(args)) if i not in static]

        def positions(argnums: Collection[int]) -> tuple[int, ...]:
            """Return the positions of arguments among those that are not static."""
            return tuple(dynamic_argnums.index(i) for i in argnums if i in dynamic_argnums)

        dynamic = [args[i] for i in dynamic_argnums]
        fun = self._with_static(packing, static)
        batch = batch_arguments(
            self._batch_argnums, args[: packing.count], lambda: result_shapes(fun, dynamic)
        )
        donated = positions(donated_arguments(self._donate_argnums, args[: packing.count]))
        # the overloads of `parallelize` tie E to the method
        executable: Any = self._executable(fun, dynamic, positions(batch), donated, start)
        return executable

    def _with_static(self, packing: Packing, static: Sequence[int]) -> Callable[..., Any]:
        """Return the function of the packed non-static arguments alone."""
        count = len(packing.args)
        static_args = {i: packing.args[i] for i in static}
        function = packing.step(self._by_position)

        def fun(*dynamic: Any) -> Any:
            remaining = iter(dynamic)
            return function(
                *(static_args[i] if i in static_args else next(remaining) for i in range(count))
            )

        return wraps(self.fun)(fun)

    def _executable(
        self,
        fun: Callable[..., Any],
        args: Sequence[Any],
        batch: tuple[int, ...],
        donated: tuple[int, ...],
        start: float,
    ) -> AnyExecutable:
        """Trace, plan and load a step as the method says.

        Args:
            fun: the step as a function of its non-static arguments.
            args: these arguments.
            batch: positions of the arguments with the batch as their first dim.
            donated: positions of the donated arguments.
            start: value of `time.perf_counter` when planning began.
        """
        target_backend = backend()
        donated_leaves = leaves_of(args, donated)
        match self.method:
            case PlanMethod(plan, devices):
                present = target_backend.devices_of_plan(plan, devices)
                planned = PlannedStep(trace_for(plan, fun, args, batch), plan)
                reusable = planned.step.arguments.numbers_of_pieces(donated_leaves)
                return target_backend.load(planned, present, reusable, _since(start))
            case FollowParallel() as method:
                followed = _compiled(method.src_func)
                present = target_backend.devices_of(followed)
                cluster = target_backend.cluster(method.cluster, present)
                count, exactness = method.num_micro_batches or 1, Exactness(rng=method.random_bits)
                planned = follow(fun, args, batch, count, followed.planned, cluster, exactness)
                return target_backend.load(planned, present, plan_seconds=_since(start))
            case CreateStateParallel(train_step, other_args):
                others = other_args if isinstance(other_args, tuple | list) else (other_args,)
                step = trace(fun, args, ())
                executable = _parallelized(train_step, "train_step").get_executable(
                    state_avals(step), *others
                )
                cuts = executable.step.arguments.cuts[: len(step.jaxpr.outvars)]
                return target_backend.load_state(with_output_cuts(step, cuts), executable)
            case PlanningMethod() as method:
                target = target_backend.target(method)
                present = target.devices or {}
                return compiled_within(
                    budget_of(method.memory_budget, target.cluster, target.platform),
                    lambda budget: plan_by_method(
                        _with_budget(method, budget), fun, args, batch, target
                    ).within(method.memory_budget),
                    lambda planned: target_backend.load(
                        planned,
                        present,
                        planned.step.arguments.numbers_of_pieces(donated_leaves),
                        _since(start),
                    ),
                )
            case _:
                assert_never(self.method)


def _is_on_hosts(leaf: Any) -> bool:
    """Return whether an array, or a piece of it, is on other hosts."""
    pieces = leaf.pieces if isinstance(leaf, JoinedArray) else (leaf,)
    return any(isinstance(piece, DistributedArray) for piece in pieces)


def _parallelized(function: Any, name: str) -> ParallelizedFunction[Executable]:
    if not isinstance(function, ParallelizedFunction):
        raise TypeError(f"{name} is {function!r}, expected what autopar.parallelize returns")
    return function


def _compiled(followed: Any) -> Executable:
    """Return the executable of the last call of a parallelized step that another step follows."""
    executable = _parallelized(followed, "src_func").get_last_executable()
    if executable is None:
        raise ValueError(
            "the step to follow has not been compiled yet; call it, or its get_executable, first"
        )
    return executable


def _with_budget[M: PlanningMethod](method: M, memory_budget: float | None) -> M:
    """Return the method with another memory budget; None keeps its own."""
    return method if memory_budget is None else replace(method, memory_budget=memory_budget)


def _since(start: float) -> float:
    return time.perf_counter() - start
