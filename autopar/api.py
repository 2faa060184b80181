"""`parallelize` and what belongs to it: trace the step, plan it, compile it, run it."""

import gc
import time
from collections.abc import Callable, Collection, Sequence
from functools import wraps
from math import prod
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import numpy as np
from flax.training.train_state import TrainState
from jax.sharding import AbstractMesh, Mesh

from autopar.analytic import analytic_pipeline, analytic_program
from autopar.checkpoint.saving import finish_saving
from autopar.devices import Device, cluster_of, device_mesh, logical_mesh, submeshes
from autopar.follow import follow_pipeline, follow_plan
from autopar.hosts import session
from autopar.hosts.arrays import DistributedArray
from autopar.interpreter import builds_graphs
from autopar.layers import LayerOption
from autopar.lower import compile_program
from autopar.methods import (
    CreateStateParallel,
    FollowParallel,
    Method,
    PipeshardParallel,
    PlanMethod,
    PlanningMethod,
    ShardParallel,
)
from autopar.pipeline.compiling import compile_pipeline
from autopar.pipeline.planned import PlannedPipeline
from autopar.pipeline.planning import PipelinePlanner
from autopar.pipeline.search import layer_options, micro_batch_counts, schedules, search
from autopar.plan import Plan
from autopar.planned import PlannedStep
from autopar.planning import make_plan
from autopar.runtime.create_state import CreateStateExecutable, state_avals
from autopar.runtime.executable import Executable
from autopar.runtime.pipeline import PipelineExecutable
from autopar.sharding.spec import LogicalMesh
from autopar.trace import StepGraph, abstract, trace
from simulator.cluster import Cluster
from simulator.description import ClusterError
from simulator.engine import simulate
from simulator.mixed import AnyCluster, MixedCluster, load_cluster
from simulator.program import Program
from simulator.timeline import Timeline

if TYPE_CHECKING:
    from autopar.hosts.cluster import RayHosts
    from autopar.hosts.create_state import RemoteCreateState
    from autopar.hosts.executable import RemoteExecutable

type AnyExecutable = "Executable | PipelineExecutable | CreateStateExecutable | RemoteExecutable | RemoteCreateState"

type Argnums = Literal["auto"] | int | Sequence[int]

Fidelity = Literal["compiled", "analytic"]
"""Whose program a prediction is of: XLA's, or the planner's."""


def parallelize(
    fun: Callable[..., Any] | None = None,
    *,
    static_argnums: Argnums = "auto",
    donate_argnums: Argnums = "auto",
    batch_argnums: int | Sequence[int] = (1,),
    method: Method | None = None,
) -> Any:
    """Parallelize a training step over devices; also a decorator, with or without arguments.

    Args:
        fun: a function of arrays (in pytrees), as one would give it to `jax.jit`.
        static_argnums: arguments that are constants of the compiled step. "auto": those with something in them that is not an
            array, and plain Python numbers and strings; never a flax TrainState.
        donate_argnums: arguments whose memory the step may reuse. "auto": flax TrainStates.
        batch_argnums: arguments whose arrays have the batch as their first dim.
        method: how to parallelize (`autopar.methods`); ShardParallel() by default.

    Returns:
        A `ParallelizedFunction`. It compiles once for each structure, shapes and dtypes of its arguments.
    """
    if fun is None:
        return lambda f: parallelize(
            f,
            static_argnums=static_argnums,
            donate_argnums=donate_argnums,
            batch_argnums=batch_argnums,
            method=method,
        )
    return ParallelizedFunction(fun, static_argnums, donate_argnums, batch_argnums, method or ShardParallel())


class ParallelizedFunction:
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
    ) -> None:
        wraps(fun)(self)
        self.fun = fun
        self.method = method
        self._static_argnums: Argnums = static_argnums
        self._donate_argnums: Argnums = donate_argnums
        self._batch_argnums = (batch_argnums,) if isinstance(batch_argnums, int) else tuple(batch_argnums)
        self._executables: dict[Any, AnyExecutable] = {}
        self._last: tuple[tuple[int, ...], tuple[Any, ...], AnyExecutable] | None = None
        self._hosts: RayHosts | None = None  # that the executables are for

    def __call__(self, *args: Any) -> Any:
        if self._last is not None and self._hosts is session.hosts():
            static, static_args, executable = self._last
            if not static or static_args == tuple(args[i] for i in static if i < len(args)):
                try:
                    return executable(*_without(args, static))
                except (TypeError, ValueError):
                    pass  # of other shapes or structure, or not in place yet; found out below
        executable, dynamic = self._prepare(args)
        return executable(*executable.shard_args(*dynamic))

    def get_executable(self, *args: Any) -> AnyExecutable:
        """The executable for arguments like these, compiled if need be; ShapeDtypeStructs will do."""
        return self._prepare(args)[0]

    def get_last_executable(self) -> AnyExecutable | None:
        """The executable of the last call."""
        return self._last[2] if self._last else None

    def preshard_dynamic_args(self, *args: Any) -> tuple[Any, ...]:
        """The arguments that are not static, distributed as the step wants them."""
        executable, dynamic = self._prepare(args)
        return executable.shard_args(*dynamic)

    def _prepare(self, args: Sequence[Any]) -> tuple[AnyExecutable, tuple[Any, ...]]:
        if self._hosts is not session.hosts():
            self._executables, self._last, self._hosts = {}, None, session.hosts()
        static = _static_argnums(self._static_argnums, args)
        dynamic = tuple(_without(args, static))
        static_args = tuple(args[i] for i in static)
        leaves, tree = jax.tree.flatten(dynamic)
        avals = tuple((a.shape, a.dtype, a.weak_type) for a in map(abstract, leaves))
        for i, arg in zip(static, static_args, strict=True):
            _check_hashable(i, arg)
        key = (static, static_args, tree, avals)
        if key not in self._executables:
            self._executables[key] = self._compile(args, static)
        executable = self._executables[key]
        self._last = (static, static_args, executable)
        return executable, dynamic

    @builds_graphs
    def _compile(self, args: Sequence[Any], static: tuple[int, ...]) -> AnyExecutable:
        start = time.perf_counter()
        kept = [i for i in range(len(args)) if i not in static]

        def positions(argnums: Collection[int]) -> tuple[int, ...]:
            """Numbers of arguments among those that are not static."""
            return tuple(kept.index(i % len(args)) for i in argnums if i % len(args) in kept)

        def fun(*dynamic: Any) -> Any:
            full = list(args)
            for i, arg in zip(kept, dynamic, strict=True):
                full[i] = arg
            return self.fun(*full)

        wraps(self.fun)(fun)
        dynamic = [args[i] for i in kept]
        batch = positions([i for i in self._batch_argnums if i < len(args)])
        donated = positions(_donate_argnums(self._donate_argnums, args))
        return self._executable(fun, dynamic, batch, donated, start)

    def _executable(
        self,
        fun: Callable[..., Any],
        args: Sequence[Any],
        batch: tuple[int, ...],
        donated: tuple[int, ...],
        start: float,
    ) -> AnyExecutable:
        if (remote := session.hosts()) is not None:
            return _remote_executable(remote, self.method, fun, args, batch, donated, start)
        match self.method:
            case PlanMethod(plan, devices):
                step = trace_for(plan, fun, args, batch)
                if plan.pipeline is not None:
                    meshes = submeshes(devices, plan.stages)
                    return _pipeline(PlannedPipeline(step, plan), meshes, args, donated, start)
                plan.check(step.fingerprint)
                stage = plan.stages[0]
                mesh = device_mesh(devices, stage.mesh_shape, stage.axis_names)
                return Executable(step, plan, mesh, donated, _since(start))
            case PipeshardParallel() as method:
                mesh = device_mesh(method.devices)
                cluster = _cluster_for(method, mesh)
                cluster, present = cluster.first_devices(mesh.size), list(mesh.devices.flat)
                step, plan = _plan_pipeline(fun, args, batch, method, cluster, present)
                return _pipeline(PlannedPipeline(step, plan), submeshes(mesh, plan.stages), args, donated, start)
            case FollowParallel() as method:
                return _follow(fun, args, batch, method, start)
            case CreateStateParallel() as method:
                return _create_state(fun, args, method)
            case PlanningMethod() as method:
                mesh = device_mesh(method.devices)
                cluster = _alike(_cluster_for(method, mesh), type(method).__name__)
                step = trace(fun, args, batch, method.num_micro_batches)
                logical = LogicalMesh(mesh.devices.shape, mesh.axis_names)
                return Executable(step, _make_plan(step, logical, cluster, method), mesh, donated, _since(start))
            case other:
                raise TypeError(f"method is {other!r}, expected one of autopar.methods, e.g. autopar.ShardParallel()")


@builds_graphs
def plan_step(
    fun: Callable[..., Any],
    args: Sequence[Any],
    *,
    method: PlanningMethod | None = None,
    cluster: AnyCluster | str,
    mesh_shape: Sequence[int] | None = None,
    batch_argnums: Sequence[int] = (1,),
) -> Plan:
    """Plan `fun` for arguments like `args` (arrays or ShapeDtypeStructs) on a cluster that need not be here.

    Args:
        mesh_shape: logical mesh over the cluster's first devices. By default that of `method.devices` if these are a mesh, abstract
            or not, else one axis over all; a pipeline has its own mesh for each stage and takes only the number of devices from it.
    """
    method = method or ShardParallel()
    cluster = _cluster(cluster)
    if mesh_shape is not None:
        mesh = logical_mesh(mesh_shape)
    elif isinstance(method.devices, Mesh | AbstractMesh):
        mesh = LogicalMesh(method.devices.axis_sizes, method.devices.axis_names)
    else:
        mesh = logical_mesh((cluster.num_devices,))
    if isinstance(method, PipeshardParallel):
        return _plan_pipeline(fun, args, batch_argnums, method, cluster.first_devices(mesh.num_devices))[1]
    cluster = _alike(cluster, type(method).__name__)
    step = trace(fun, args, batch_argnums, method.num_micro_batches)
    return _make_plan(step, mesh, cluster, method)


def predict(
    fun: Callable[..., Any],
    args: Sequence[Any],
    plan: Plan,
    cluster: AnyCluster | str,
    *,
    donate_argnums: Argnums = "auto",
    batch_argnums: Sequence[int] = (1,),
    fidelity: Fidelity = "compiled",
) -> Timeline:
    """Step time and per-device memory of a plan on a cluster that need not be here: `compile_step`, simulated."""
    cluster = _cluster(cluster)
    program = compile_step(
        fun, args, plan, cluster, donate_argnums=donate_argnums, batch_argnums=batch_argnums, fidelity=fidelity
    )
    return simulate(program, cluster)


def compile_step(
    fun: Callable[..., Any],
    args: Sequence[Any],
    plan: Plan,
    cluster: AnyCluster | str,
    *,
    donate_argnums: Argnums = "auto",
    batch_argnums: Sequence[int] = (1,),
    fidelity: Fidelity = "compiled",
) -> Program:
    """The program of a plan for the GPUs of a cluster that need not be here.

    `simulator.simulate` times it, `simulator.save_program` keeps it, for `python -m simulator predict`, say.

    Args:
        fidelity: "compiled": as XLA compiles it, on this machine; memory is the compiler's buffer assignment. "analytic": as the
            planner counts, in little more than it takes to trace; what is donated is then what a step carries on.
    """
    cluster = _cluster(cluster)
    if fidelity not in get_args(Fidelity):
        raise ValueError(f"fidelity {fidelity!r}, expected 'compiled' or 'analytic'")
    step = trace_for(plan, fun, args, batch_argnums)
    donated = _donate_argnums(donate_argnums, args)
    if plan.pipeline is not None:
        if fidelity == "analytic":
            return analytic_pipeline(PlannedPipeline(step, plan), cluster)
        return compile_pipeline(PlannedPipeline(step, plan), cluster, _leaves_of(args, donated))[0]
    cluster = _alike(cluster, f"a plan of {plan.method}")
    if fidelity == "analytic":
        return analytic_program(PlannedStep(step, plan), cluster)
    return compile_program(step, plan, cluster, donated)[0]


def init(
    cluster: str = "local",
    cluster_address: str | None = None,
    num_nodes: int | None = None,
    num_devices_per_node: int | None = None,
    namespace: str | None = None,
    timeout: float = 600.0,
) -> None:
    """Get ready to run steps: "local", on the devices of this process, or "ray", on the hosts of a Ray cluster.

    What is compiled afterwards runs there. For "local" there is nothing to do, so that steps run without `init`, too.

    Args:
        cluster_address: of the Ray cluster, unless `ray.init` has been called; by default the one that Ray finds.
        num_nodes: hosts to take; all by default.
        num_devices_per_node: GPUs to take of each host, all by default; on hosts without GPUs, virtual CPU devices, by default as many
            as XLA_FLAGS asks for here.
        namespace: of the driver in the Ray cluster, if it is joined here.
        timeout: seconds that a host may take for what it is asked, to compile for instance, before it is taken for hung.

    Raises:
        HostsError: there is no such Ray cluster, or it has fewer hosts or devices, or other versions of JAX.
    """
    match cluster:
        case "local":
            session.leave()
            jax.devices()
        case "ray":
            session.join(cluster_address, num_nodes, num_devices_per_node, namespace, timeout)
        case _:
            raise ValueError(f"cluster={cluster!r}, expected 'local', the devices of this process, or 'ray'")


def shutdown() -> None:
    """Forget compiled programs and free what they hold on the devices; end the workers on other hosts.

    A checkpoint that is being written is finished first.
    """
    try:
        finish_saving()
    finally:
        session.leave()
        jax.clear_caches()
        gc.collect()  # steps and what was compiled for them refer to one another


def _make_plan(step: StepGraph, mesh: LogicalMesh, cluster: Cluster, method: PlanningMethod) -> Plan:
    name = type(method).__name__
    return make_plan(step, mesh, cluster, method.sharding_of(step), name, memory_budget=method.memory_budget)


def _plan_pipeline(
    fun: Callable[..., Any],
    args: Sequence[Any],
    batch: Sequence[int],
    method: PipeshardParallel,
    cluster: AnyCluster,
    devices: Sequence[Device] | None = None,
) -> tuple[StepGraph, Plan]:
    forward = method.pipeline_schedule == "inference"
    rows = [leaf.shape[0] for i in batch for leaf in jax.tree.leaves(args[i]) if getattr(leaf, "shape", ())]

    def traced(count: int, layers: LayerOption | None) -> StepGraph:
        return trace(fun, args, batch, count, layers, marked=True, forward=forward)

    def planner(step: StepGraph) -> PipelinePlanner:
        options = method.sharding_of(step)
        return PipelinePlanner(step, cluster, options, method.memory_budget, devices=devices)

    return search(
        traced,
        planner,
        micro_batch_counts(method.num_micro_batches, rows),
        layer_options(method.layer_option),
        schedules(method.pipeline_schedule, method.num_chunks),
        method.stages,
        type(method).__name__,
    )


def trace_for(plan: Plan, fun: Callable[..., Any], args: Sequence[Any], batch_argnums: Sequence[int]) -> StepGraph:
    """The step as `plan` was made for."""
    if plan.pipeline is None:
        return trace(fun, args, batch_argnums, plan.num_micro_batches)
    forward = plan.pipeline.name == "inference"
    return trace(fun, args, batch_argnums, plan.num_micro_batches, plan.pipeline.layer_option, True, forward)


def _pipeline(
    planned: PlannedPipeline, meshes: Sequence[Mesh], args: Sequence[Any], donated: Sequence[int], start: float
) -> PipelineExecutable:
    return PipelineExecutable(planned, meshes, _leaves_of(args, donated), _since(start))


def _follow(
    fun: Callable[..., Any], args: Sequence[Any], batch: Sequence[int], method: FollowParallel, start: float
) -> AnyExecutable:
    followed = _parallelized(method.src_func, "src_func").get_last_executable()
    count = method.num_micro_batches or 1
    match followed:
        case PipelineExecutable():
            devices = Mesh(np.array(followed.devices), ("x",))
            cluster = _cluster_for(method.src_func.method, devices)
            step, plan = follow_pipeline(fun, args, batch, count, followed.planned, cluster)
            return _pipeline(PlannedPipeline(step, plan), followed.meshes, args, (), start)
        case Executable() if count == 1:
            cluster = _alike(_cluster_for(method.src_func.method, followed.mesh), type(method).__name__)
            step, plan = follow_plan(fun, args, batch, followed.plan, cluster)
            return Executable(step, plan, followed.mesh, plan_seconds=_since(start))
        case Executable():
            raise ValueError(
                f"num_micro_batches is {count}, but {followed.step.name}, which is followed, is no pipeline; leave it out"
            )
        case _:
            raise ValueError("the step to follow has not been compiled yet; call it, or its get_executable, first")


def _create_state(fun: Callable[..., Any], args: Sequence[Any], method: CreateStateParallel) -> CreateStateExecutable:
    train_step, others = _followers(method)
    step = trace(fun, args, ())
    executable = train_step.get_executable(state_avals(step), *others)
    assert isinstance(executable, Executable | PipelineExecutable)
    shardings = jax.tree.leaves(executable.in_shardings[0])
    return CreateStateExecutable(step, shardings, jax.tree.leaves(executable.get_input_placement_specs()[0]))


def _remote_executable(
    hosts: "RayHosts",
    method: Method,
    fun: Callable[..., Any],
    args: Sequence[Any],
    batch: tuple[int, ...],
    donated: tuple[int, ...],
    start: float,
) -> AnyExecutable:
    """What runs on other hosts."""
    from autopar.hosts.cluster import cluster_of_hosts, mesh_shape
    from autopar.hosts.create_state import RemoteCreateState
    from autopar.hosts.executable import RemoteExecutable, RemotePipeline, remote_executable

    given = method.cluster if isinstance(method, PlanningMethod) else None
    cluster = cluster_of_hosts(hosts) if given is None else _cluster(given)
    match method:
        case PlanMethod(plan, _):
            step = trace_for(plan, fun, args, batch)
            planned = PlannedStep(step, plan) if plan.pipeline is None else PlannedPipeline(step, plan)
        case PipeshardParallel():
            shape = mesh_shape(hosts, method.devices)
            planned = PlannedPipeline(*_plan_pipeline(fun, args, batch, method, cluster.first_devices(prod(shape))))
        case FollowParallel(src_func=src_func):
            followed = _parallelized(src_func, "src_func").get_last_executable()
            if not isinstance(followed, RemoteExecutable):
                raise ValueError("the step to follow has not been compiled for these hosts yet; call it first")
            count = method.num_micro_batches or 1
            if isinstance(followed, RemotePipeline):
                planned = PlannedPipeline(*follow_pipeline(fun, args, batch, count, followed.planned, cluster))
            else:
                alike = _alike(cluster, type(method).__name__)
                planned = PlannedStep(*follow_plan(fun, args, batch, followed.plan, alike))
            donated = ()
        case CreateStateParallel():
            train_step, others = _followers(method)
            step = trace(fun, args, ())
            executable = train_step.get_executable(state_avals(step), *others)
            assert isinstance(executable, RemoteExecutable)
            return RemoteCreateState(step, executable)
        case PlanningMethod():
            step = trace(fun, args, batch, method.num_micro_batches)
            alike = _alike(cluster, type(method).__name__)
            planned = PlannedStep(
                step, _make_plan(step, logical_mesh(mesh_shape(hosts, method.devices)), alike, method)
            )
        case other:
            raise TypeError(f"method is {other!r}, expected one of autopar.methods, e.g. autopar.ShardParallel()")
    return remote_executable(planned, hosts, _leaves_of(args, donated), _since(start))


def _followers(method: CreateStateParallel) -> tuple[ParallelizedFunction, tuple[Any, ...]]:
    """The training step that a state is made for, and its other arguments."""
    others = tuple(method.other_args) if isinstance(method.other_args, tuple | list) else (method.other_args,)
    return _parallelized(method.train_step, "train_step"), others


def _parallelized(function: Any, name: str) -> ParallelizedFunction:
    if not isinstance(function, ParallelizedFunction):
        raise TypeError(f"{name} is {function!r}, expected what autopar.parallelize returns")
    return function


def _cluster_for(method: Method, mesh: Mesh) -> AnyCluster:
    """The hardware that a method plans for, if it runs on `mesh`."""
    cluster = method.cluster if isinstance(method, PlanningMethod) else None
    return cluster_of(mesh) if cluster is None else _cluster(cluster)


def _leaves_of(args: Sequence[Any], argnums: Sequence[int]) -> frozenset[int]:
    """The numbers, among all leaves of `args`, of those of the arguments `argnums`."""
    owner = [i for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    return frozenset(leaf for leaf, i in enumerate(owner) if i in argnums)


def _since(start: float) -> float:
    return time.perf_counter() - start


def _cluster(cluster: Any) -> AnyCluster:
    return cluster if isinstance(cluster, Cluster | MixedCluster) else load_cluster(cluster)


def _alike(cluster: AnyCluster, what: str) -> Cluster:
    """The cluster, if one mesh can span it."""
    if isinstance(cluster, Cluster):
        return cluster
    raise ClusterError(
        f"{what} shards a step over one mesh of devices that are alike, but cluster {cluster.name!r} has {len(cluster.pools)} pools of"
        " different hosts; use PipeshardParallel, whose stages lie in one pool each, or one pool: load_cluster(...).pools[0]"
    )


def _without(args: Sequence[Any], static: Sequence[int]) -> Sequence[Any]:
    return [arg for i, arg in enumerate(args) if i not in static] if static else args


def _static_argnums(argnums: Argnums, args: Sequence[Any]) -> tuple[int, ...]:
    if argnums == "auto":
        return tuple(i for i, arg in enumerate(args) if _is_static(arg))
    return _as_tuple(argnums, len(args))


def _donate_argnums(argnums: Argnums, args: Sequence[Any]) -> tuple[int, ...]:
    if argnums == "auto":
        return tuple(i for i, arg in enumerate(args) if isinstance(arg, TrainState))
    return _as_tuple(argnums, len(args))


def _as_tuple(argnums: Any, count: int) -> tuple[int, ...]:
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if any(not -count <= i < count for i in numbers):
        raise ValueError(f"argnums {numbers} for a step with {count} arguments; count from 0 to {count - 1}")
    return tuple(sorted(i % count for i in numbers))


def _check_hashable(i: int, arg: Any) -> None:
    try:
        hash(arg)
    except TypeError as error:
        raise TypeError(
            f"argument {i} holds something that is no array, so it is static, but a {type(arg).__name__} can't be hashed;"
            " pass only arrays in it, or close the step over it"
        ) from error


def _is_static(arg: Any) -> bool:
    if isinstance(arg, TrainState):
        return False
    if isinstance(arg, bool | int | float | complex | str):
        return True
    arrays = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, DistributedArray, bool, int, float, complex)
    return not all(isinstance(leaf, arrays) for leaf in jax.tree.leaves(arg))
