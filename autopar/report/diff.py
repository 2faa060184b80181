"""What differs between two plans, in words."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from autopar.ir.spec import Spec, partition_spec
from autopar.lowering.planned import Planned
from autopar.plan import Plan, ShardingConstraint, TimeSplit, Value, spec_text
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
_SHOWN = 3
"""How many values of a kind are named."""


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """What differs between two plans; falsy when nothing does.

    Attributes:
        lines: a sentence for each difference, the weightiest first.
    """

    lines: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.lines)

    def __str__(self) -> str:
        return "\n".join(self.lines) or "the plans are the same"


def diff(a: Plan | Planned, b: Plan | Planned) -> PlanDiff:
    """Say what differs from plan `a` to plan `b`: step, mesh, microbatches, parallelism of each parameter, shardings, time, bytes.

    How long planning took does not count.
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
    facts = [(_mesh(a), _mesh(b), "mesh")]
    facts += [
        (_schedule(a), _schedule(b), "schedule"),
        (_layers(a), _layers(b), "layers of stages"),
    ]
    facts += [(a.num_micro_batches, b.num_micro_batches, "microbatches")]
    facts += [
        (a.method, b.method, "method"),
        (a.cluster, b.cluster, "cluster"),
        (a.step, b.step, "step"),
    ]
    for before, after, name in facts:
        if before != after:
            yield f"{name}: {before} -> {after}"
    for field in fields(ShardingOptions):
        before, after = getattr(a.options, field.name), getattr(b.options, field.name)
        if before != after:
            yield f"option {field.name}: {before!r} -> {after!r}"
    if a.fingerprint != b.fingerprint:
        yield f"they are for different steps (or microbatches of different size): {a.fingerprint} and {b.fingerprint}"
    if _once(a) != _once(b):
        yield f"gradients are completed once for all microbatches along {_once(a)} -> {_once(b)}"


def _once(plan: Plan) -> str:
    return "; ".join(", ".join(stage.deferred) or "no axis" for stage in plan.stages)


def _mesh(plan: Plan) -> str:
    return "; ".join(
        " x ".join(f"{axis}={n}" for axis, n in stage.mesh.sizes.items()) for stage in plan.stages
    )


def _schedule(plan: Plan) -> str:
    if plan.schedule.is_whole_step:
        return "no pipeline"
    return f"{plan.schedule.name} with {plan.schedule.num_chunks} stage(s) per mesh"


def _layers(plan: Plan) -> str:
    return "; ".join(
        f"{ranges(stage.layers)} on devices {ranges(stage.devices)}"
        for stage in plan.stages
        if stage.layers
    )


def _classes(a: Plan, b: Plan) -> Iterator[str]:
    if not (a.schedule.is_whole_step and b.schedule.is_whole_step):
        return  # stages are classified one by one, with their step
    before, after = classify(a), classify(b)
    if before.label != after.label:
        yield f"parallelism: {before.label} -> {after.label}"
    labels = {each.path: each.label for each in before.parameters}
    changes = [
        (each.path, f"{labels[each.path]} -> {each.label}")
        for each in after.parameters
        if each.path in labels and labels[each.path] != each.label
    ]
    yield from _grouped("parameters", changes, len(after.parameters))


def _values(a: Plan, b: Plan) -> Iterator[str]:
    old, new = _by_path(a), _by_path(b)
    for role, name in _ROLES.items():
        both = [path for path in new if path in old and new[path].role == role]
        yield from _grouped(
            name, [(p, c) for p in both if (c := _value_change(old[p], new[p]))], len(both)
        )
    for name, paths in (
        ("only in the first", [p for p in old if p not in new]),
        ("only in the second", [p for p in new if p not in old]),
    ):
        if paths:
            yield f"{name}: {_names(paths)}"


def _by_path(plan: Plan) -> dict[str, Value]:
    """Inputs and outputs of the step; what stages hand to one another is none of the user's."""
    values = (value for stage in plan.stages for value in (*stage.inputs, *stage.outputs))
    own = (each for each in values if not each.path.startswith(("received/", "result/sent/")))
    return {value.path: value for value in own}


def _value_change(a: Value, b: Value) -> str:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return (
            f"{a.dtype}{list(a.shape)} {_text(a.spec)} -> {b.dtype}{list(b.shape)} {_text(b.spec)}"
        )
    return f"{_text(a.spec)} -> {_text(b.spec)}" if a.spec != b.spec else ""


def _constraints(a: Plan, b: Plan) -> Iterator[str]:
    if a.fingerprint != b.fingerprint:
        return  # equations have other numbers
    old, new = _by_place(a), _by_place(b)
    both = [place for place in new if place in old]
    changes = [
        (_place(new[p]), f"{_text(old[p].spec)} -> {_text(new[p].spec)}")
        for p in both
        if old[p].spec != new[p].spec
    ]
    yield from _grouped("values pinned inside", changes, len(both))
    for name, here, there in (("no longer", old, new), ("newly", new, old)):
        pins = [
            f"{_place(c)} to {_text(c.spec)}" for place, c in here.items() if place not in there
        ]
        if pins:
            yield f"{len(pins)} values {name} pinned inside: {_names(pins)}"


def _by_place(plan: Plan) -> dict[tuple[int, int, str, int], ShardingConstraint]:
    return {
        (s, c.eqn, c.side, c.index): c
        for s, stage in enumerate(plan.stages)
        for c in stage.constraints
    }


def _place(constraint: ShardingConstraint) -> str:
    word = "operand" if constraint.side == "in" else "result"
    return f"{word} {constraint.index} of #{constraint.eqn} {constraint.name}"


def _predictions(a: Plan, b: Plan) -> Iterator[str]:
    if a.predicted_seconds != b.predicted_seconds:
        ratio = (
            f" ({b.predicted_seconds / a.predicted_seconds:.2f} x)" if a.predicted_seconds else ""
        )
        yield f"predicted step: {a.predicted_seconds * 1e3:.4g} ms -> {b.predicted_seconds * 1e3:.4g} ms{ratio}"
    for part in TimeSplit.model_fields:
        before, after = getattr(a.predicted_split, part), getattr(b.predicted_split, part)
        if before != after:
            yield f"predicted {part}: {before * 1e3:.4g} ms -> {after * 1e3:.4g} ms"
    if a.predicted_bytes != b.predicted_bytes:
        yield f"predicted bytes per device: {a.predicted_bytes:,} -> {b.predicted_bytes:,}"
    bytes_a, bytes_b = _input_bytes(a), _input_bytes(b)
    parts = [
        f"{_ROLES[role]} {bytes_a[role]:,} -> {bytes_b[role]:,}"
        for role in _ROLES
        if role != "output" and bytes_a[role] != bytes_b[role]
    ]
    if parts:
        total = f"{sum(bytes_a.values()):,} -> {sum(bytes_b.values()):,}"
        yield f"bytes of inputs per device: {total} ({', '.join(parts)})"


def _input_bytes(plan: Plan) -> Counter[str]:
    """Bytes on one device for each role; where stages differ, on the fullest."""
    most: Counter[str] = Counter()
    for stage in plan.stages:
        used: Counter[str] = Counter()
        for value in stage.inputs:
            used[value.role] += value.device_bytes(stage.mesh)
        most |= used
    return most


def _grouped(name: str, changes: Sequence[tuple[str, str]], total: int) -> Iterator[str]:
    """A sentence for each kind of change, with how many of `total` values it happens to and which."""
    groups: dict[str, list[str]] = {}
    for what, change in changes:
        groups.setdefault(change, []).append(what)
    for change, whats in groups.items():
        yield f"{name}: {len(whats)} of {total} {change}: {_names(whats)}"


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _text(spec: Spec) -> str:
    return spec_text(partition_spec(spec))
