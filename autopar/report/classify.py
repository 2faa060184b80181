"""Which kind of parallelism a plan is, for each parameter and mesh axis.

A sharding alone does not tell: a kernel split over an axis is operator parallel when the multiplication is split along with it,
and ZeRO-3 when it is gathered first and the axis splits the batch. So plans record what each axis splits where a parameter
meets the activations (`autopar.analysis.axis_uses`), and the kind is read off that.
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
from autopar.plan import AxisUse, OperatorKind, Plan, Stage, Value, spec_text

type DataKind = OneOf["data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
"""The axis splits the batch; ZeRO also stores in parts the optimizer state (1), and gradients (2), and parameters (3)."""

type ParallelismKind = DataKind | OperatorKind | OneOf["stored in parts", "replicated"]

_DATA: tuple[ParallelismKind, ...] = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")
_OPERATOR: tuple[ParallelismKind, ...] = ("column", "row", "vocab", "expert", "sequence")


@dataclass(frozen=True, slots=True)
class ParameterClass:
    """How one parameter is parallel.

    Attributes:
        path: what the user calls it.
        spec: how it is stored.
        num_bytes: bytes of the whole array.
        kinds: for each mesh axis the kinds of parallelism, more than one where uses of the parameter differ.
    """

    path: str
    array: str
    spec: Spec
    num_bytes: int
    kinds: tuple[tuple[str, tuple[ParallelismKind, ...]], ...]

    @property
    def label(self) -> str:
        """E.g. `column on x`, or `data parallel on x, row on y`."""
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
    """How a plan is parallel.

    Attributes:
        mesh: its logical mesh.
        parameters: the class of each parameter, in the order of the step's inputs.
    """

    mesh: LogicalMesh
    parameters: tuple[ParameterClass, ...]

    def __getitem__(self, path: str) -> ParameterClass:
        """The class of one parameter, by its path. Raises KeyError, with the nearest paths, when there is none."""
        found = {each.path: each for each in self.parameters}
        if path not in found:
            raise KeyError(
                f"no parameter {path!r}; did you mean {nearest(path, found) or 'another plan, as this has none'}?"
            )
        return found[path]

    def on(self, axis: str) -> str:
        """What the plan does along one mesh axis, e.g. `operator parallel (column, row)`.

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
        """The whole plan in a phrase: one kind, or what it is on each axis."""
        axes = {axis: self.on(axis) for axis in self.mesh.axis_names if self.mesh.sizes[axis] > 1}
        if not axes:
            return "one device"
        if len(set(axes.values())) == 1:
            return next(iter(axes.values()))
        text = ", ".join(f"{label} on {axis}" for axis, label in axes.items())
        mixed = len(set(axes.values()) - {"replicated"}) > 1 and "mixture" not in text
        return f"mixture: {text}" if mixed else text

    @property
    def layers(self) -> dict[str, str]:
        """The same for each layer: the parameters that share all of their path but its last part."""
        groups: dict[str, list[ParameterClass]] = {}
        for each in self.parameters:
            groups.setdefault(each.path.rpartition("/")[0], []).append(each)
        return {
            path: Classification(self.mesh, tuple(group)).label for path, group in groups.items()
        }

    def __str__(self) -> str:
        mesh = " x ".join(f"{axis}={size}" for axis, size in self.mesh.sizes.items())
        return "\n".join(
            [f"{self.label} (mesh {mesh})", *(f"  {each}" for each in self.parameters)]
        )


def classify(planned: Plan | Planned, stage: int | None = None) -> Classification:
    """Say for each parameter, and for the plan as a whole, which parallelism it is on which mesh axis.

    Args:
        planned: a plan (the step is not needed, unless it is a pipeline), or something that has one.
        stage: of a pipeline, the stage to tell of.

    Raises:
        ValueError: the plan is a pipeline and no stage is given, or it comes without its step.
    """
    plan = planned if isinstance(planned, Plan) else _with_uses(planned, stage)
    if not plan.schedule.is_whole_step:
        raise ValueError(
            "the plan is a pipeline, which is classified with its step: give the executable, and stage="
        )
    (only,) = plan.stages
    parameters = []
    for value in only.inputs:
        if value.role == "parameter":
            state = _state_axes(value, only)
            kinds = tuple(
                (use.axis, _kinds(use, use.axis in axes_of(value.spec), use.axis in state))
                for use in value.axes
            )
            size = prod(value.shape) * value.itemsize
            parameters.append(
                ParameterClass(value.path, array_text(value), value.spec, size, kinds)
            )
    return Classification(only.mesh, tuple(parameters))


def _with_uses(planned: Planned, stage: int | None) -> Plan:
    """The plan of a step, or of one stage of a pipeline, that says what each axis does with a parameter."""
    one = single_stage(planned, stage)
    return one.plan if one is planned else with_axis_uses(one.step, one.plan)


def _kinds(use: AxisUse, stored: bool, state: bool) -> tuple[ParallelismKind, ...]:
    """The kinds of parallelism along an axis, from its use of a parameter and from what is stored in parts."""
    operator: tuple[ParallelismKind, ...] = tuple(kind for kind in _OPERATOR if kind in use.splits)
    if operator == ("column", "vocab"):  # an embedding that also gives the logits
        operator = ("vocab",)
    data: tuple[ParallelismKind, ...] = ()
    if "batch" in use.splits:
        kind: ParallelismKind = "data parallel"
        if stored and not operator:
            kind = "ZeRO-3"
        elif state and not operator:
            kind = "ZeRO-1" if "all_reduce" in use.completions else "ZeRO-2"
        data = (kind,)
    return data + operator or ("stored in parts" if stored else "replicated",)


def _state_axes(value: Value, stage: Stage) -> frozenset[str]:
    """The axes over which the optimizer state of a parameter is split: state of its shape whose path ends as its own does."""
    own = value.path.split("/")[1:]

    def belongs(other: Value) -> bool:
        parts = other.path.split("/")
        suffixes = (own[start:] for start in range(len(own)))
        best = max((len(s) for s in suffixes if parts[-len(s) :] == s), default=0)
        return (
            other.role == "state"
            and other.shape == value.shape
            and best >= min(len(own), max(1, len(own) - 1))
        )

    return frozenset(
        axis for other in stage.inputs if belongs(other) for axis in axes_of(other.spec)
    )


def _axis_label(kinds: list[tuple[int, tuple[ParallelismKind, ...]]]) -> str:
    """One phrase for what all parameters, given as (bytes, kinds), do along an axis."""
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
