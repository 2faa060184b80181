"""What a plan does and why, without a device: placements, reshardings, reasons, kinds of parallelism, differences, pictures."""

from autopar.inspect.classify import Classification, ParameterClass, classify
from autopar.inspect.placement import PlacementSpec, input_placement_specs, output_placement_specs
from autopar.inspect.reasons import Reason, RunnerUp
from autopar.inspect.replay import PlannedStep
from autopar.inspect.resharding import ReshardingTask, resharding_tasks
from autopar.inspect.strategies import strategies

__all__ = [
    "Classification",
    "ParameterClass",
    "PlacementSpec",
    "PlannedStep",
    "Reason",
    "ReshardingTask",
    "RunnerUp",
    "classify",
    "input_placement_specs",
    "output_placement_specs",
    "resharding_tasks",
    "strategies",
]
