"""The differences between two plans, in words."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from autopar.ir.spec import Spec, partition_spec
from autopar.lowering.planned import Planned
from autopar.plan import Plan, TimeSplit
from autopar.plan_stages import ShardingConstraint, Value, spec_text
from autopar.progress import ranges
from autopar.report.classify import classify
from autopar.sharding.options import ShardingOptions

_ROLES = {
    "parameter": "parameters",
    "state": "optimizer state",
    "batch": "batch",
    "other": "other inputs",
    "output": "outputs",
}
_MAX_NAMES = 3
"""Number of values that a sentence names at most."""


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """The differences between two plans; false if there are none.

    Attributes:
        lines: a sentence for each difference, first of the settings, last of the predictions.
    """

    lines: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.lines)

    def __str__(self) -> str:
        return "\n".join(self.lines) or "the plans are the same"


def diff(a: Plan | Planned, b: Plan | Planned) -> PlanDiff:
    """Compare two plans: settings, parallelism of parameters, shardings, predicted time and memory.

    The time that planning took does not count.

    Args:
        a: the first plan, or an executable or `PlannedStep` with it.
        b: the second one.
    """
    plan_a, plan_b = _plan(a), _plan(b)
    return PlanDiff(
        (
            *_setting(plan_a, plan_b),
            *_classes(plan_a, plan_b),
            *_values(plan_a, plan_b),
            *_constraints(plan_a, plan_b),
            *_predictions(plan_a, plan_b),
        )
    )


def _plan(planned: Plan | Planned) -> Plan:
    return planned if isinstance(planned, Plan) else planned.plan


def _setting(a: Plan, b: Plan) -> Iterator[str]:
    """Yield a sentence for each setting that differs."""
    settings = {
        "mesh": (a.meshes_text(), b.meshes_text()),
        "schedule": (_schedule(a), _schedule(b)),
        "layers of stages": (_layers(a), _layers(b)),
        "microbatches": (a.num_micro_batches, b.num_micro_batches),
        "remat": (a.remat, b.remat),
        "recomputed equations": (len(a.recomputed), len(b.recomputed)),
        "offloaded inputs": (len(a.offloaded), len(b.offloaded)),
        "offloaded results": (len(a.offloaded_results), len(b.offloaded_results)),
        "method": (a.method, b.method),
        "cluster": (a.cluster, b.cluster),
        "step": (a.step, b.step),
    }
    for name, (before, after) in settings.items():
        if before != after:
            yield f"{name}: {before} -> {after}"
    for field in fields(ShardingOptions):
        before = getattr(a.options, field.name)
        after = getattr(b.options, field.name)
        if before != after:
            yield f"option {field.name}: {before!r} -> {after!r}"
    if a.fingerprint != b.fingerprint:
        yield (
            "they are for different steps (or microbatches of different size):"
            f" {a.fingerprint} and {b.fingerprint}"
        )
    before = _deferred_axes(a)
    after = _deferred_axes(b)
    if before != after:
        yield f"gradients are completed once for all microbatches along {before} -> {after}"


def _deferred_axes(plan: Plan) -> str:
    """Return the deferred axes of each stage, once if all stages have the same."""
    axes = [", ".join(stage.deferred) or "no axis" for stage in plan.stages]
    return "; ".join(axes if len(set(axes)) > 1 else axes[:1])


def _schedule(plan: Plan) -> str:
    if plan.schedule.is_whole_step:
        return "no pipeline"
    return f"{plan.schedule.name} with {plan.schedule.num_chunks} stage(s) per mesh"


def _layers(plan: Plan) -> str:
    stages = (
        f"{ranges(stage.layers)} on devices {ranges(stage.devices)}"
        for stage in plan.stages
        if stage.layers
    )
    return "; ".join(stages) or "whole step"


def _classes(a: Plan, b: Plan) -> Iterator[str]:
    if not (a.schedule.is_whole_step and b.schedule.is_whole_step):
        return  # classification of a pipeline needs the step
    before = classify(a)
    after = classify(b)
    if before.label != after.label:
        yield f"parallelism: {before.label} -> {after.label}"
    labels = {parameter.path: parameter.label for parameter in before.parameters}
    changes = [
        (parameter.path, f"{labels[parameter.path]} -> {parameter.label}")
        for parameter in after.parameters
        if labels.get(parameter.path, parameter.label) != parameter.label
    ]
    yield from _grouped("parameters", changes, len(after.parameters))


def _values(a: Plan, b: Plan) -> Iterator[str]:
    old = _by_path(a)
    new = _by_path(b)
    for role, name in _ROLES.items():
        common = [path for path in new if path in old and new[path].role == role]
        changes = [(path, _value_change(old[path], new[path])) for path in common]
        yield from _grouped(name, [change for change in changes if change[1]], len(common))
    if removed := [path for path in old if path not in new]:
        yield f"only in the first: {_names(removed)}"
    if added := [path for path in new if path not in old]:
        yield f"only in the second: {_names(added)}"


def _by_path(plan: Plan) -> dict[str, Value]:
    """Return the inputs and outputs of the step, without the values sent between stages."""
    return {
        value.path: value
        for stage in plan.stages
        for value in (*stage.inputs, *stage.outputs)
        if not value.path.startswith(("received/", "result/sent/"))
    }


def _value_change(a: Value, b: Value) -> str:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return (
            f"{a.dtype}{list(a.shape)} {_text(a.spec)} -> {b.dtype}{list(b.shape)} {_text(b.spec)}"
        )
    return f"{_text(a.spec)} -> {_text(b.spec)}" if a.spec != b.spec else ""


def _constraints(a: Plan, b: Plan) -> Iterator[str]:
    stages_differ = [s.layers for s in a.stages] != [s.layers for s in b.stages]
    if a.fingerprint != b.fingerprint or stages_differ:
        return  # equation numbers of different steps, or of other stages, do not correspond
    old = _by_position(a)
    new = _by_position(b)
    common = [position for position in new if position in old]
    changes = [
        (_position_text(new[p]), f"{_text(old[p].spec)} -> {_text(new[p].spec)}")
        for p in common
        if old[p].spec != new[p].spec
    ]
    yield from _grouped("values pinned inside", changes, len(common))
    for name, ours, others in (("no longer", old, new), ("newly", new, old)):
        pins = [
            f"{_position_text(constraint)} to {_text(constraint.spec)}"
            for position, constraint in ours.items()
            if position not in others
        ]
        if pins:
            yield f"{len(pins)} values {name} pinned inside: {_names(pins)}"


def _by_position(plan: Plan) -> dict[tuple[int, int, str, int], ShardingConstraint]:
    """Return the constraints by stage, equation, side and index."""
    return {
        (s, c.eqn, c.side, c.index): c
        for s, stage in enumerate(plan.stages)
        for c in stage.constraints
    }


def _position_text(constraint: ShardingConstraint) -> str:
    word = "operand" if constraint.side == "in" else "result"
    return f"{word} {constraint.index} of #{constraint.eqn} {constraint.name}"


def _predictions(a: Plan, b: Plan) -> Iterator[str]:
    """Yield a sentence for each prediction that differs."""
    if a.predicted_seconds != b.predicted_seconds:
        ratio = (
            f" ({b.predicted_seconds / a.predicted_seconds:.2f} x)" if a.predicted_seconds else ""
        )
        yield (
            f"predicted step: {a.predicted_seconds * 1e3:.4g} ms ->"
            f" {b.predicted_seconds * 1e3:.4g} ms{ratio}"
        )
    for part in TimeSplit.model_fields:
        before = getattr(a.predicted_split, part)
        after = getattr(b.predicted_split, part)
        if before != after:
            yield f"predicted {part}: {before * 1e3:.4g} ms -> {after * 1e3:.4g} ms"
    if a.predicted_bytes != b.predicted_bytes:
        yield f"predicted bytes per device: {a.predicted_bytes:,} -> {b.predicted_bytes:,}"
    bytes_a = _input_bytes(a)
    bytes_b = _input_bytes(b)
    parts = [
        f"{_ROLES[role]} {bytes_a[role]:,} -> {bytes_b[role]:,}"
        for role in _ROLES
        if role != "output" and bytes_a[role] != bytes_b[role]
    ]
    if parts:
        total = f"{sum(bytes_a.values()):,} -> {sum(bytes_b.values()):,}"
        yield f"bytes of inputs per device: {total} ({', '.join(parts)})"


def _input_bytes(plan: Plan) -> Counter[str]:
    """Return the bytes of inputs on one device by role, the maximum over stages for each role."""
    maximum: Counter[str] = Counter()
    for stage in plan.stages:
        by_role: Counter[str] = Counter()
        for value in stage.inputs:
            by_role[value.role] += value.device_bytes(stage.mesh)
        maximum |= by_role
    return maximum


def _grouped(name: str, changes: Sequence[tuple[str, str]], total: int) -> Iterator[str]:
    """Yield a sentence for each distinct change, with the values that it applies to.

    Args:
        name: name of the group of values.
        changes: (value, change) pairs.
        total: number of values in the group, unchanged ones included.
    """
    groups: dict[str, list[str]] = {}
    for value, change in changes:
        groups.setdefault(change, []).append(value)
    for change, values in groups.items():
        yield f"{name}: {len(values)} of {total} {change}: {_names(values)}"


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def _text(spec: Spec) -> str:
    return spec_text(partition_spec(spec))
