"""Classification of a plan: the kind of parallelism of each parameter along each mesh axis.

A sharding does not determine the kind: a kernel sharded over an axis is operator parallel if the
axis also splits the product, and ZeRO-3 if the kernel is gathered first and the axis splits the
batch. Plans therefore store what each axis splits where a parameter meets the activations
(`autopar.analysis.axis_uses`), and the kind follows from that.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal as OneOf

from autopar.analysis.axis_uses import with_axis_uses
from autopar.analysis.descriptions import nearest
from autopar.ir.spec import LogicalMesh, Spec, axes_of, partition_spec
from autopar.lowering.placement_specs import array_text
from autopar.lowering.planned import Planned, single_stage
from autopar.plan import Plan
from autopar.plan_stages import AxisUse, OperatorKind, Stage, Value, spec_text

type DataKind = OneOf["data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
"""Parallelism of an axis that splits the batch. ZeRO also shards the storage of the optimizer
state (1), and of the gradients (2), and of the parameters (3)."""

type ParallelismKind = DataKind | OperatorKind | OneOf["stored in parts", "replicated"]

_DATA: tuple[ParallelismKind, ...] = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")
_OPERATOR: tuple[ParallelismKind, ...] = ("column", "row", "vocab", "expert", "sequence")


@dataclass(frozen=True, slots=True)
class ParameterClass:
    """The kinds of parallelism of one parameter.

    Attributes:
        path: its path in the arguments of the step.
        array: its dtype and shape.
        spec: the spec that it is stored with.
        num_bytes: bytes of the whole array.
        kinds: (mesh axis, kinds of parallelism) pairs; there are several kinds if uses of the
            parameter differ.
    """

    path: str
    array: str
    spec: Spec
    num_bytes: int
    kinds: tuple[tuple[str, tuple[ParallelismKind, ...]], ...]

    @property
    def label(self) -> str:
        """The kinds in words, e.g. `column on x`, or `data parallel on x, row on y`."""
        groups: dict[tuple[ParallelismKind, ...], list[str]] = {}
        for axis, kinds in self.kinds:
            groups.setdefault(kinds, []).append(axis)
        phrases = (
            f"{' and '.join(kinds)} on {' and '.join(axes)}" for kinds, axes in groups.items()
        )
        return ", ".join(phrases) or "one device"

    def __str__(self) -> str:
        return f"{self.path} {self.array} {spec_text(partition_spec(self.spec))}: {self.label}"


@dataclass(frozen=True)
class Classification:
    """The kinds of parallelism of a plan, or of one stage of a pipeline.

    Attributes:
        mesh: the logical mesh.
        parameters: the class of each parameter, in the order of the step's inputs.
    """

    mesh: LogicalMesh
    parameters: tuple[ParameterClass, ...]

    def __getitem__(self, path: str) -> ParameterClass:
        """Return the class of one parameter, by its path.

        Raises:
            KeyError: there is no such parameter; the message has the nearest paths.
        """
        by_path = {parameter.path: parameter for parameter in self.parameters}
        if path not in by_path:
            suggestion = nearest(path, by_path) or "another plan, as this has none"
            raise KeyError(f"no parameter {path!r}; did you mean {suggestion}?")
        return by_path[path]

    def on(self, axis: str) -> str:
        """Return the kind of parallelism along a mesh axis, e.g. `operator parallel (column, row)`.

        Raises:
            KeyError: the mesh has no such axis.
        """
        if axis not in self.mesh.axis_names:
            raise KeyError(
                f"no mesh axis {axis!r}; the plan's are {', '.join(self.mesh.axis_names)}"
            )
        return _axis_label([(p.num_bytes, dict(p.kinds).get(axis, ())) for p in self.parameters])

    @cached_property
    def label(self) -> str:
        """The whole plan in a phrase: one kind, or the kind on each axis."""
        axes = {axis: self.on(axis) for axis in self.mesh.nontrivial_axes}
        if not axes:
            return "one device"
        if len(set(axes.values())) == 1:
            return next(iter(axes.values()))
        text = ", ".join(f"{label} on {axis}" for axis, label in axes.items())
        mixed = len(set(axes.values()) - {"replicated"}) > 1 and "mixture" not in text
        return f"mixture: {text}" if mixed else text

    @property
    def layers(self) -> dict[str, str]:
        """The label of each module, by the path that its parameters share up to the last part."""
        groups: dict[str, list[ParameterClass]] = {}
        for parameter in self.parameters:
            groups.setdefault(parameter.path.rpartition("/")[0], []).append(parameter)
        return {
            path: Classification(self.mesh, tuple(group)).label for path, group in groups.items()
        }

    def __str__(self) -> str:
        lines = [f"  {parameter}" for parameter in self.parameters]
        return "\n".join([f"{self.label} (mesh {self.mesh})", *lines])


def classify(planned: Plan | Planned, stage: int | None = None) -> Classification:
    """Classify each parameter, and the plan as a whole, by its parallelism along each mesh axis.

    Args:
        planned: a plan, or an executable or `PlannedStep`. A pipeline needs the latter, because its
            stages are classified with the step.
        stage: number of the stage of a pipeline to classify.

    Raises:
        ValueError: the plan is a pipeline, and no stage is given or its step is missing.
    """
    plan = planned if isinstance(planned, Plan) else _with_uses(planned, stage)
    if not plan.schedule.is_whole_step:
        raise ValueError(
            "the plan is a pipeline, which is classified with its step: give the executable, and"
            " stage="
        )
    (single,) = plan.stages
    parameters = []
    for value in single.inputs:
        if value.role == "parameter":
            parameter_axes = axes_of(value.spec)
            state_axes = _state_axes(value, single)
            kinds = tuple(
                (use.axis, _kinds(use, use.axis in parameter_axes, use.axis in state_axes))
                for use in value.axes
            )
            size = prod(value.shape) * value.itemsize
            parameters.append(
                ParameterClass(value.path, array_text(value), value.spec, size, kinds)
            )
    return Classification(single.mesh, tuple(parameters))


def _with_uses(planned: Planned, stage: int | None) -> Plan:
    """Return the plan of a step, or of one stage of a pipeline, with the axis uses filled in."""
    single = single_stage(planned, stage)
    return single.plan if single is planned else with_axis_uses(single.step, single.plan)


def _kinds(use: AxisUse, shards_parameter: bool, shards_state: bool) -> tuple[ParallelismKind, ...]:
    """Return the kinds of parallelism of a parameter along an axis.

    Args:
        use: how the computation with the parameter uses the axis.
        shards_parameter: whether the axis shards the stored parameter.
        shards_state: whether the axis shards its optimizer state.
    """
    operator: tuple[ParallelismKind, ...] = tuple(kind for kind in _OPERATOR if kind in use.splits)
    if operator == ("column", "vocab"):  # an embedding that also gives the logits
        operator = ("vocab",)
    data: tuple[ParallelismKind, ...] = ()
    if "batch" in use.splits:
        kind: ParallelismKind = "data parallel"
        if shards_parameter and not operator:
            kind = "ZeRO-3"
        elif shards_state and not operator:
            kind = "ZeRO-1" if "all_reduce" in use.completions else "ZeRO-2"
        data = (kind,)
    return data + operator or ("stored in parts" if shards_parameter else "replicated",)


def _state_axes(value: Value, stage: Stage) -> frozenset[str]:
    """Return the mesh axes that shard the optimizer state of a parameter.

    Its state has the parameter's shape and a path with the same ending.
    """
    own = value.path.split("/")[1:]
    length = min(len(own), max(1, len(own) - 1))  # of the ending that they share
    ending = own[len(own) - length :]

    def belongs(other: Value) -> bool:
        if other.role != "state" or other.shape != value.shape:
            return False
        parts = other.path.split("/")
        return parts[max(0, len(parts) - length) :] == ending

    return frozenset(
        axis for other in stage.inputs if belongs(other) for axis in axes_of(other.spec)
    )


def _axis_label(kinds: list[tuple[int, tuple[ParallelismKind, ...]]]) -> str:
    """Return a phrase for the kinds of all parameters, given as (bytes, kinds), along an axis."""
    weight: Counter[ParallelismKind] = Counter()
    for num_bytes, own in kinds:
        weight.update(dict.fromkeys(own, num_bytes))
    data: list[ParallelismKind] = [kind for kind in _DATA if kind in weight]
    operator: list[ParallelismKind] = [kind for kind in _OPERATOR if kind in weight]
    phrases = list(_phrases(weight, data, operator))
    if not phrases:
        return "stored in parts" if "stored in parts" in weight else "replicated"
    return phrases[0] if len(phrases) == 1 else f"mixture of {' and '.join(phrases)}"


def _phrases(
    weight: Counter[ParallelismKind], data: list[ParallelismKind], operator: list[ParallelismKind]
) -> Iterator[str]:
    if data:
        yield max(data, key=lambda kind: weight[kind])
    if operator:
        yield f"operator parallel ({', '.join(operator)})"
