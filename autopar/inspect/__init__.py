"""What a plan does and why, without a device: placements, reshardings, reasons, kinds of parallelism, differences, pictures."""

from autopar.inspect.classify import Classification, ParameterClass, classify
from autopar.inspect.diff import PlanDiff, diff
from autopar.inspect.dump import DEBUG_FILES, dump_debug_info, dump_pipeline
from autopar.inspect.hlo import Status, annotated, hlo_text, partitioned, traced, unknown_status
from autopar.inspect.picture import picture
from autopar.inspect.placement import PlacementSpec, input_placement_specs, output_placement_specs, placed
from autopar.inspect.reasons import Reason, RunnerUp
from autopar.inspect.resharding import ReshardingTask, resharding_tasks
from autopar.inspect.stages import StageInfo, TaskInfo, stage_infos
from autopar.inspect.strategies import strategies
from autopar.planned import PlannedStep

__all__ = [
    "DEBUG_FILES",
    "Classification",
    "ParameterClass",
    "PlacementSpec",
    "PlanDiff",
    "PlannedStep",
    "Reason",
    "ReshardingTask",
    "RunnerUp",
    "StageInfo",
    "Status",
    "TaskInfo",
    "annotated",
    "classify",
    "diff",
    "dump_debug_info",
    "dump_pipeline",
    "hlo_text",
    "input_placement_specs",
    "output_placement_specs",
    "partitioned",
    "picture",
    "placed",
    "resharding_tasks",
    "stage_infos",
    "strategies",
    "traced",
    "unknown_status",
]
