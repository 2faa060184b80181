"""`parallelize` and what belongs to it: trace the step, plan it, compile it, run it."""

import gc
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, assert_never, get_args, overload

import jax

from autopar._cpython import builds_graphs
from autopar.checkpoint.saving import finish_saving
from autopar.checks import (
    NONE,
    TEXT,
    OptionError,
    checked,
    integer,
    items,
    one_of,
    real,
    short_repr,
)
from autopar.hosts import session
from autopar.hosts.arrays import DistributedArray
from autopar.ir.memo import forget_steps
from autopar.lowering.planned import PlannedStep
from autopar.methods import (
    CreateStateParallel,
    FollowParallel,
    Method,
    PlanMethod,
    PlanningMethod,
    ShardParallel,
)
from autopar.planning.follow import follow
from autopar.planning.method_planning import plan_by_method, trace_for
from autopar.runtime.create_state import CreateStateExecutable, state_avals
from autopar.runtime.executable import Executable
from autopar.runtime.first_step import checked_first_step
from autopar.runtime.fitting import budget_of, compiled_within
from autopar.runtime.local_backend import LOCAL, Backend, backend
from autopar.tracing.arguments import (
    ARGNUMS,
    AUTO_ARGNUMS,
    DEFAULT_BATCH,
    Argnums,
    NumberWatch,
    batch_arguments,
    check_args,
    check_arrays,
    check_hashable,
    donated_arguments,
    leaves_of,
    static_arguments,
    static_key,
    without,
)
from autopar.tracing.trace import abstract, trace

if TYPE_CHECKING:
    from autopar.hosts.remote_create_state import RemoteCreateState

type StateExecutable = "CreateStateExecutable | RemoteCreateState"
"""What makes a state, here or on other hosts."""

type AnyExecutable = "Executable | StateExecutable"


class _Options(TypedDict, total=False):
    """Options of `parallelize` beside the method."""

    static_argnums: Argnums
    donate_argnums: Argnums
    batch_argnums: int | Sequence[int]
    check: Literal["first step"] | None


@overload
def parallelize(
    fun: Callable[..., Any], *, method: CreateStateParallel, **options: Unpack[_Options]
) -> "ParallelizedFunction[StateExecutable]": ...
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
) -> "Callable[[Callable[..., Any]], ParallelizedFunction[StateExecutable]]": ...
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
    batch_argnums: int | Sequence[int] = DEFAULT_BATCH,
    method: Method | None = None,
    check: Literal["first step"] | None = None,
) -> Any:
    """Parallelize a training step over devices; also a decorator, with or without arguments.

    Args:
        fun: a function of arrays (in pytrees), as one would give it to `jax.jit`.
        static_argnums: arguments that are constants of the compiled step. "auto": those with something in them that is not an
            array, and plain Python numbers and strings; never a flax TrainState. A step is planned and compiled for each value of
            them; a number that changes, a learning rate for instance, is better given as an array: `jnp.float32(0.1)`.
        donate_argnums: arguments whose memory the step may reuse. "auto": flax TrainStates.
        batch_argnums: arguments whose arrays have the batch as their first dim.
        method: how to parallelize (`autopar.methods`); ShardParallel() by default.
        check: "first step" compares the first step of each plan with the same step on one device, which has to have room for it, and
            raises `FirstStepError` if a result differs by more than rounding explains.

    Returns:
        A `ParallelizedFunction`. It compiles once for each structure, shapes and dtypes of its arguments, and keeps the
        `MOST_PROGRAMS` programs that were used last.

    Raises:
        OptionError: an option has a type or a value that it can't have.
    """
    method = ShardParallel() if method is None else method
    if not isinstance(method, get_args(Method.__value__)):
        raise OptionError(
            f"method is {short_repr(method)}, expected one of autopar.methods, e.g. autopar.ShardParallel()"
        )
    static_argnums = checked("static_argnums", static_argnums, AUTO_ARGNUMS)
    donate_argnums = checked("donate_argnums", donate_argnums, AUTO_ARGNUMS)
    batch_argnums = checked("batch_argnums", batch_argnums, ARGNUMS)
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
            f"fun is {short_repr(fun)}, expected a function of arrays, and not a parallelized one: take its .fun"
        )
    return ParallelizedFunction(fun, static_argnums, donate_argnums, batch_argnums, method, check)


MOST_PROGRAMS = 32
"""How many compiled programs a parallelized function keeps, one for each combination of shapes and static values."""


class ParallelizedFunction[E: AnyExecutable]:
    """What `parallelize` returns: called like the function it was given.

    It takes numpy and jax arrays, distributes them over the devices, and returns distributed arrays.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        static_argnums: Argnums,
        donate_argnums: Argnums,
        batch_argnums: int | Sequence[int],
        method: Method,
        check: Literal["first step"] | None = None,
    ) -> None:
        wraps(fun)(self)
        self.fun = fun
        self.method = method
        self._static_argnums: Argnums = static_argnums
        self._donate_argnums: Argnums = donate_argnums
        self._batch_argnums = batch_argnums
        self._numbers = NumberWatch(fun)
        self._executables: OrderedDict[Any, E] = OrderedDict()  # that was used last comes last
        self._last: tuple[tuple[int, ...], tuple[Any, ...], E] | None = None
        self._backend: Backend = backend()  # that the executables are for
        self._check = check
        self._unchecked: set[E] = set()  # whose first step is still to be compared

    def __call__(self, *args: Any) -> Any:
        if (
            self._last is not None
            and self._backend is backend()
            and self._last[2] not in self._unchecked
        ):
            static, static_args, executable = self._last
            if not static or static_args == tuple(
                static_key(args[i]) for i in static if i < len(args)
            ):
                try:
                    return executable(*without(args, static))
                except (TypeError, ValueError):
                    pass  # of other shapes or structure, or not in place yet; found out below
        executable, dynamic = self._prepare(args)
        if executable in self._unchecked:
            return self._first_step(executable, args, dynamic)
        return executable(*executable.shard_args(*dynamic))

    def _first_step(self, executable: E, args: Sequence[Any], dynamic: Sequence[Any]) -> Any:
        """Run the first step of an executable beside one on one device."""
        static = static_arguments(self._static_argnums, args)
        results = checked_first_step(self._with_static(args, static), executable, dynamic)
        self._unchecked.discard(executable)
        return results

    def get_executable(self, *args: Any) -> E:
        """The executable for arguments like these, compiled if need be; ShapeDtypeStructs will do."""
        return self._prepare(args)[0]

    def get_last_executable(self) -> E | None:
        """The executable of the last call."""
        return self._last[2] if self._last else None

    def preshard_dynamic_args(self, *args: Any) -> tuple[Any, ...]:
        """The arguments that are not static, distributed as the step wants them."""
        executable, dynamic = self._prepare(args)
        return executable.shard_args(*dynamic)

    def _prepare(self, args: Sequence[Any]) -> tuple[E, tuple[Any, ...]]:
        if self._backend is not backend():
            self._executables, self._last, self._backend = OrderedDict(), None, backend()
            self._unchecked.clear()
        check_args(getattr(self.fun, "__name__", "the step"), args)
        static = static_arguments(self._static_argnums, args)
        dynamic = tuple(without(args, static))
        leaves, tree = jax.tree.flatten(dynamic)
        if self._backend is LOCAL and any(isinstance(leaf, DistributedArray) for leaf in leaves):
            leaves = [
                leaf.__jax_array__() if isinstance(leaf, DistributedArray) else leaf
                for leaf in leaves
            ]
            dynamic = jax.tree.unflatten(tree, leaves)
        try:
            avals = tuple((a.shape, a.dtype, a.weak_type) for a in map(abstract, leaves))
        except TypeError:
            check_arrays(args, static)
            raise
        for i in static:
            check_hashable(i, args[i])
        static_args = tuple(static_key(args[i]) for i in static)
        key = (static, static_args, tree, avals)
        if key not in self._executables:
            if self._static_argnums == "auto":
                for i in static:
                    self._numbers.add(i, args[i])
            self._executables[key] = self._compile(args, static)
            if self._check is not None:
                self._unchecked.add(self._executables[key])
            if len(self._executables) > MOST_PROGRAMS:
                self._unchecked.discard(self._executables.popitem(last=False)[1])
        self._executables.move_to_end(key)
        executable = self._executables[key]
        self._last = (static, static_args, executable)
        return executable, dynamic

    @builds_graphs
    def _compile(self, args: Sequence[Any], static: tuple[int, ...]) -> E:
        start = time.perf_counter()
        kept = [i for i in range(len(args)) if i not in static]

        def positions(argnums: Collection[int]) -> tuple[int, ...]:
            """Numbers of arguments among those that are not static."""
            return tuple(kept.index(i) for i in argnums if i in kept)

        dynamic = [args[i] for i in kept]
        batch = positions(batch_arguments(self._batch_argnums, args))
        donated = positions(donated_arguments(self._donate_argnums, args))
        # `parallelize` has E belong to the method.
        executable: Any = self._executable(
            self._with_static(args, static), dynamic, batch, donated, start
        )
        return executable

    def _with_static(self, args: Sequence[Any], static: Sequence[int]) -> Callable[..., Any]:
        """The function of the arguments that are not static."""
        count, static_args, function = len(args), {i: args[i] for i in static}, self.fun

        def fun(*dynamic: Any) -> Any:
            given = iter(dynamic)
            return function(
                *(static_args[i] if i in static_args else next(given) for i in range(count))
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
        here, leaves = backend(), leaves_of(args, donated)
        match self.method:
            case PlanMethod(plan, devices):
                present = here.devices_of_plan(plan, devices)
                planned = PlannedStep(trace_for(plan, fun, args, batch), plan)
                return here.load(planned, present, leaves, _since(start))
            case FollowParallel(src_func, num_micro_batches):
                followed = _compiled(src_func)
                present = here.devices_of(followed)
                cluster = here.cluster(src_func.method, present)
                planned = follow(
                    fun, args, batch, num_micro_batches or 1, followed.planned, cluster
                )
                return here.load(planned, present, plan_seconds=_since(start))
            case CreateStateParallel(train_step, other_args):
                others = (
                    tuple(other_args) if isinstance(other_args, tuple | list) else (other_args,)
                )
                step = trace(fun, args, ())
                executable = _parallelized(train_step, "train_step").get_executable(
                    state_avals(step), *others
                )
                assert isinstance(executable, Executable)
                return here.load_state(step, executable)
            case PlanningMethod() as method:
                target = here.target(method)
                present = target.devices or {}
                return compiled_within(
                    budget_of(method.memory_budget, target.cluster, target.platform),
                    lambda within: plan_by_method(
                        _within(method, within), fun, args, batch, target
                    ),
                    lambda planned: here.load(planned, present, leaves, _since(start)),
                )
            case _:
                assert_never(self.method)


def init(
    cluster: str = "local",
    cluster_address: str | None = None,
    num_nodes: int | None = None,
    num_devices_per_node: int | Sequence[int] | None = None,
    namespace: str | None = None,
    timeout: float = 600.0,
) -> None:
    """Get ready to run steps: "local", on the devices of this process, or "ray", on the hosts of a Ray cluster.

    What is compiled afterwards runs there. For "local" there is nothing to do, so that steps run without `init`, too.

    Args:
        cluster_address: of the Ray cluster, unless `ray.init` has been called; by default the one that Ray finds.
        num_nodes: hosts to take; all by default.
        num_devices_per_node: GPUs to take of each host, all by default; on hosts without GPUs, virtual CPU devices, by default as many
            as XLA_FLAGS asks for here. A sequence such as (4, 2) has a number for each host.
        namespace: of the driver in the Ray cluster, if it is joined here.
        timeout: seconds that a host may take for what it is asked, to compile for instance, before it is taken for hung.

    Raises:
        HostsError: there is no such Ray cluster, or it has fewer hosts or devices, or other versions of JAX.
    """
    checked("cluster", cluster, one_of("local", "ray"))
    cluster_address = checked("cluster_address", cluster_address, TEXT | NONE)
    num_nodes = checked("num_nodes", num_nodes, integer() | NONE)
    counts = integer() | items(integer(), "such a number for each host", least=1) | NONE
    num_devices_per_node = checked("num_devices_per_node", num_devices_per_node, counts)
    namespace = checked("namespace", namespace, TEXT | NONE)
    timeout = checked("timeout", timeout, real(above=0.0))
    match cluster:
        case "local":
            session.leave()
            jax.devices()
        case "ray":
            session.join(cluster_address, num_nodes, num_devices_per_node, namespace, timeout)


def shutdown() -> None:
    """Forget compiled programs and free what they hold on the devices; end the workers on other hosts.

    A checkpoint that is being written is finished first.
    """
    try:
        finish_saving()
    finally:
        session.leave()
        jax.clear_caches()
        forget_steps()
        gc.collect()  # steps and what was compiled for them refer to one another


def _parallelized(function: Any, name: str) -> ParallelizedFunction:
    if not isinstance(function, ParallelizedFunction):
        raise TypeError(f"{name} is {function!r}, expected what autopar.parallelize returns")
    return function


def _compiled(followed: Any) -> Executable:
    """Return the executable of a step that is followed."""
    executable = _parallelized(followed, "src_func").get_last_executable()
    if not isinstance(executable, Executable):
        raise ValueError(
            "the step to follow has not been compiled yet; call it, or its get_executable, first"
        )
    return executable


def _within[M: PlanningMethod](method: M, memory_budget: float | None) -> M:
    """Return the method with that budget; None leaves its own."""
    return method if memory_budget is None else replace(method, memory_budget=memory_budget)


def _since(start: float) -> float:
    return time.perf_counter() - start
