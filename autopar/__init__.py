"""autopar plans, runs and predicts parallel training of unmodified JAX steps.

    step --trace--> StepGraph --plan--> Plan --lower--> Program --run----------> results
                                                           |
                                                           +------simulate-----> Timeline

`parallelize` plans and runs a step on the devices of this process, or, after `init("ray")`, on
the hosts of a Ray cluster. `plan_step` and `predict` need no devices: they take a description of
a cluster.

    @autopar.parallelize(method=autopar.ShardParallel())
    def train_step(state, batch): ...

The import keeps JAX from starting XLA's CUDA 12 plugin where it cannot run. It changes nothing
else in the process.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autopar._plugins import assume_cudnn, silence_idle_plugin

silence_idle_plugin()

from autopar import manual, report, testing, util
from autopar.api import ParallelizedFunction, parallelize
from autopar.capacity.fit_result import Fit, NeverFitsError, RefusedSize
from autopar.capacity.largest_fit import fit
from autopar.capacity.memory_savings import MemorySaving, MemorySavings, savings
from autopar.checkpoint import (
    CheckpointError,
    Saving,
    latest_step,
    restore_checkpoint,
    save_checkpoint,
)
from autopar.checks import OptionError
from autopar.derived_methods import CreateStateParallel, FollowParallel, PlanMethod
from autopar.devices import cluster_of
from autopar.hosts.arrays import DistributedArray, prefetch
from autopar.hosts.errors import HostLostError, HostsError, HostTimeoutError, StepFailedError
from autopar.initialization import init, shutdown
from autopar.ir.joined_array import JoinedArray
from autopar.layering.layer_options import (
    AutoLayerOption,
    FollowLayerOption,
    LayerError,
    ManualLayerOption,
    mark_pipeline_boundary,
)
from autopar.layering.layered_functions import (
    automatic_layer_construction,
    automatic_remat,
    manual_layer_construction,
    manual_remat,
)
from autopar.lowering.target import (
    TargetExecutable,
    compile_for,
    target_devices,
    target_mesh,
)
from autopar.methods import (
    DataParallel,
    ManualShardParallel,
    PipeshardParallel,
    PlanningMethod,
    ShardParallel,
    Zero2Parallel,
    Zero3Parallel,
)
from autopar.microbatch.gradients import grad, value_and_grad
from autopar.microbatch.splitting import MicrobatchError
from autopar.parallel_degrees import get_3d_parallel_method
from autopar.pipeline.pipeline_schedules import register_schedule
from autopar.pipeline.stage_options import (
    AutoStageOption,
    ManualStageOption,
    StageError,
    UniformStageOption,
)
from autopar.plan import Plan, PlanError
from autopar.planning.last_results import get_last_dp_result, get_last_search_result
from autopar.planning.plan_step import plan_step, planned_step
from autopar.planning.stage_problem import NoStagesError
from autopar.prediction.predicting import compile_step, predict, simulate
from autopar.primitives import MissingRuleError
from autopar.runtime.batch_reading import DataLoaderError
from autopar.runtime.data_loader import DataLoader, MeshDriverDataLoader
from autopar.runtime.executable import Executable
from autopar.runtime.first_step import FirstStepError
from autopar.sharding.options import ShardingOptions
from autopar.sharding.pins import ShardingError
from autopar.sharding.selection_problem import InfeasibleError
from autopar.sharding.solve_within_memory import MemoryBudgetError
from autopar.tracing.shared_traces import shared_traces
from autopar.tracing.step_traces import TraceError
from autopar.training import train
from autopar.tuning import TuningResult, tune
from simulator.kernel_costs import KernelCost, register_kernel_cost

if TYPE_CHECKING:
    from autopar import directives, model_schedules
    from autopar.directives import Verify, build, create_schedule


def __getattr__(name: str) -> Any:
    """Import directives on first use: they need Flax, whose import is nearly as slow as JAX's."""
    if name in ("directives", "model_schedules"):
        return import_module(f"autopar.{name}")
    if name in ("Verify", "build", "create_schedule"):
        return getattr(import_module("autopar.directives"), name)
    if new := {"inspect": "report", "schedule": "directives"}.get(name):
        raise AttributeError(f"autopar.{name} is called autopar.{new}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, including those that `__getattr__` imports."""
    return sorted({*globals(), *__all__})


__all__ = [
    "AutoLayerOption",
    "AutoStageOption",
    "CheckpointError",
    "CreateStateParallel",
    "DataLoader",
    "DataLoaderError",
    "DataParallel",
    "DistributedArray",
    "Executable",
    "FirstStepError",
    "Fit",
    "FollowLayerOption",
    "FollowParallel",
    "HostLostError",
    "HostTimeoutError",
    "HostsError",
    "InfeasibleError",
    "JoinedArray",
    "KernelCost",
    "LayerError",
    "ManualLayerOption",
    "ManualShardParallel",
    "ManualStageOption",
    "MemoryBudgetError",
    "MemorySaving",
    "MemorySavings",
    "MeshDriverDataLoader",
    "MicrobatchError",
    "MissingRuleError",
    "NeverFitsError",
    "NoStagesError",
    "OptionError",
    "ParallelizedFunction",
    "PipeshardParallel",
    "Plan",
    "PlanError",
    "PlanMethod",
    "PlanningMethod",
    "RefusedSize",
    "Saving",
    "ShardParallel",
    "ShardingError",
    "ShardingOptions",
    "StageError",
    "StepFailedError",
    "TargetExecutable",
    "TraceError",
    "TuningResult",
    "UniformStageOption",
    "Verify",
    "Zero2Parallel",
    "Zero3Parallel",
    "assume_cudnn",
    "automatic_layer_construction",
    "automatic_remat",
    "build",
    "cluster_of",
    "compile_for",
    "compile_step",
    "create_schedule",
    "directives",
    "fit",
    "get_3d_parallel_method",
    "get_last_dp_result",
    "get_last_search_result",
    "grad",
    "init",
    "latest_step",
    "manual",
    "manual_layer_construction",
    "manual_remat",
    "mark_pipeline_boundary",
    "model_schedules",
    "parallelize",
    "plan_step",
    "planned_step",
    "predict",
    "prefetch",
    "register_kernel_cost",
    "register_schedule",
    "report",
    "restore_checkpoint",
    "save_checkpoint",
    "savings",
    "shared_traces",
    "shutdown",
    "simulate",
    "target_devices",
    "target_mesh",
    "testing",
    "train",
    "tune",
    "util",
    "value_and_grad",
]
