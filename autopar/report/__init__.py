"""Reports about a plan that need no device.

They cover placements, reshardings, decisions with their costs, kinds of parallelism, primitives,
differences between plans, pictures of shardings, program texts and debug dumps.
"""

from autopar.analysis.planned_collectives import planned_collectives
from autopar.analysis.reasons import Reason, RunnerUp
from autopar.analysis.reshardings import ReshardingTask, resharding_tasks
from autopar.lowering.placement_specs import (
    JoinedPlacement,
    PlacementSpec,
    placed,
)
from autopar.lowering.planned import PlannedStep
from autopar.report.classify import Classification, ParameterClass, classify
from autopar.report.decisions import decisions
from autopar.report.diff import PlanDiff, diff
from autopar.report.dump import dump_debug_info
from autopar.report.page_data import Alternative, PlanReport
from autopar.report.primitive_coverage import primitives
from autopar.report.program_text import (
    Status,
    TaskStatus,
    annotated,
    partitioned,
    traced,
    unknown_status,
)
from autopar.report.report_page import plan_report, report_page, save_report
from autopar.report.sharding_picture import picture
from autopar.report.stage_reports import StageInfo, TaskInfo, stage_infos
from autopar.report.table_page import PageTable, table_page

__all__ = [
    "Alternative",
    "Classification",
    "JoinedPlacement",
    "PageTable",
    "ParameterClass",
    "PlacementSpec",
    "PlanDiff",
    "PlanReport",
    "PlannedStep",
    "Reason",
    "ReshardingTask",
    "RunnerUp",
    "StageInfo",
    "Status",
    "TaskInfo",
    "TaskStatus",
    "annotated",
    "classify",
    "decisions",
    "diff",
    "dump_debug_info",
    "partitioned",
    "picture",
    "placed",
    "plan_report",
    "planned_collectives",
    "primitives",
    "report_page",
    "resharding_tasks",
    "save_report",
    "stage_infos",
    "table_page",
    "traced",
    "unknown_status",
]
