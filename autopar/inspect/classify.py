"""Which kind of parallelism a plan is, for each parameter and mesh axis.

A sharding alone does not tell: a kernel split over an axis is operator parallel when the multiplication is split along with it,
and ZeRO-3 when it is gathered first and the axis splits the batch. So the kind is read off the equations in which a
parameter meets the activations, in the forward pass: what does the axis split there?
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal as OneOf

import numpy as np
from jax.extend.core import Literal, Var

from autopar.graph import Atom, aval_of
from autopar.inspect.placement import array_text
from autopar.inspect.replay import Planned, Played, replay
from autopar.inspect.words import nearest
from autopar.plan import Stage, Value, spec_text
from autopar.sharding.spec import LogicalMesh, Spec, axes_of, partition_spec
from autopar.trace import StepGraph

type DataKind = OneOf["data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
"""The axis splits the batch; ZeRO also stores in parts the optimizer state (1), and gradients (2), and parameters (3)."""

type OperatorKind = OneOf["column", "row", "vocab", "expert", "sequence"]
"""The axis splits an operator: a kernel's output dim, its contracted dim, the rows of an embedding, experts, or a dim of the
activations that is neither batch nor feature."""

type Kind = DataKind | OperatorKind | OneOf["stored in parts", "replicated"]

_DATA: tuple[Kind, ...] = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")
_OPERATOR: tuple[Kind, ...] = ("column", "row", "vocab", "expert", "sequence")

type _Role = OneOf["data", "none"] | OperatorKind
"""What a mesh axis does in one equation, seen from a parameter."""


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
    kinds: tuple[tuple[str, tuple[Kind, ...]], ...]

    @property
    def label(self) -> str:
        """E.g. `column on x`, or `data parallel on x, row on y`."""
        groups: dict[tuple[Kind, ...], list[str]] = {}
        for axis, kinds in self.kinds:
            groups.setdefault(kinds, []).append(axis)
        phrases = (f"{' and '.join(kinds)} on {' and '.join(axes)}" for kinds, axes in groups.items())
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
            raise KeyError(f"no mesh axis {axis!r}; the plan's are {', '.join(self.mesh.axis_names)}")
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
        return {path: Classification(self.mesh, tuple(group)).label for path, group in groups.items()}

    def __str__(self) -> str:
        mesh = " x ".join(f"{axis}={size}" for axis, size in self.mesh.sizes.items())
        return "\n".join([f"{self.label} (mesh {mesh})", *(f"  {each}" for each in self.parameters)])


def classify(planned: Planned) -> Classification:
    """Say for each parameter, and for the plan as a whole, which parallelism it is on which mesh axis.

    Raises:
        PlanError: the plan is for another step.
    """
    step, (stage,) = planned.step, planned.plan.stages
    played = replay(planned)
    axes = [axis for axis in stage.axis_names if stage.mesh.sizes[axis] > 1]
    makers = {var: each for each in played.equations for var in each.eqn.outvars}
    updates = {i: step.jaxpr.outvars[o] for o, i in step.carried.items()}
    uses = _uses(step, stage, played.equations)
    found = []
    for i, value in enumerate(stage.inputs):
        if value.role != "parameter":
            continue
        state = _state_axes(value, stage)
        reduced = _completions(updates.get(i), value, makers)
        roles: dict[str, set[_Role]] = {axis: {_role(each, k, axis) for each, k in uses[i]} for axis in axes}
        kinds = tuple(
            (axis, _kinds(roles[axis], axis in axes_of(value.spec), axis in state, reduced, axis)) for axis in axes
        )
        size = prod(value.shape) * value.itemsize
        found.append(ParameterClass(value.path, array_text(value), value.spec, size, kinds))
    return Classification(stage.mesh, tuple(found))


def _uses(step: StepGraph, stage: Stage, equations: tuple[Played, ...]) -> dict[int, list[tuple[Played, int]]]:
    """For each parameter the equations, and operands of them, in which it (or what is made of it alone) meets the batch.

    The backward pass reads kernels transposed, so it is left out where there is a forward one.
    """
    made_of: dict[Var, frozenset[int]] = {
        var: frozenset({i})
        for i, (var, value) in enumerate(zip(step.jaxpr.invars, stage.inputs, strict=True))
        if value.role == "parameter"
    }
    uses: dict[int, list[tuple[Played, int]]] = {i: [] for sources in made_of.values() for i in sources}
    for each in equations:
        sources = [frozenset() if isinstance(a, Literal) else made_of.get(a, frozenset()) for a in each.eqn.invars]
        if each.batch:
            for k, found in enumerate(sources):
                for i in found:
                    uses[i].append((each, k))
        else:
            made_of.update(dict.fromkeys(each.eqn.outvars, frozenset().union(*sources)))
    return {i: [use for use in found if not _is_backward(use[0])] or found for i, found in uses.items()}


def _is_backward(each: Played) -> bool:
    return "transpose(" in str(each.eqn.source_info.name_stack)  # JAX's mark of a transposed function


def _role(each: Played, operand: int, axis: str) -> _Role:
    """What `axis` splits in an equation that reads a parameter as its operand number `operand`."""
    factors = each.factors
    assert factors is not None, "pass-through equations have no batch factors"
    split = [f for f, axes in enumerate(each.assignment) if axis in axes]
    if not split:
        return "none"
    (factor,) = split
    if factor in each.batch:
        return "data"
    dims = [dim for dim, of in enumerate(factors.operands[operand]) if factor in of]
    if not dims:
        return "sequence"
    is_gather = each.eqn.primitive.name == "gather"
    if factors.kinds[factor] != "parallel":
        return "vocab" if is_gather else "row"
    if not factors.decides:  # added or multiplied: the last dim is a feature's
        return "column" if dims[-1] == len(factors.operands[operand]) - 1 else "sequence"
    others = [of for k, of in enumerate(factors.operands) if k != operand]
    shared = all(any(factor in inner for inner in of) for of in others)
    return "expert" if shared and not is_gather else "column"


def _kinds(
    roles: set[_Role], stored: bool, state: bool, reduced: Mapping[str, set[str]], axis: str
) -> tuple[Kind, ...]:
    """The kinds of parallelism along an axis, from its roles at the uses of a parameter and from what is stored in parts."""
    operator: tuple[Kind, ...] = tuple(kind for kind in _OPERATOR if kind in roles)
    if operator == ("column", "vocab"):  # an embedding that also gives the logits
        operator = ("vocab",)
    data: tuple[Kind, ...] = ()
    if "data" in roles:
        kind: Kind = "data parallel"
        if stored and not operator:
            kind = "ZeRO-3"
        elif state and not operator:
            kind = "ZeRO-1" if "all_reduce" in reduced.get(axis, ()) else "ZeRO-2"
        data = (kind,)
    return data + operator or ("stored in parts" if stored else "replicated",)


def _state_axes(value: Value, stage: Stage) -> frozenset[str]:
    """The axes over which the optimizer state of a parameter is split: state of its shape whose path ends as its own does."""
    own = value.path.split("/")[1:]

    def belongs(other: Value) -> bool:
        parts = other.path.split("/")
        suffixes = (own[start:] for start in range(len(own)))
        best = max((len(s) for s in suffixes if parts[-len(s) :] == s), default=0)
        return other.role == "state" and other.shape == value.shape and best >= min(len(own), max(1, len(own) - 1))

    return frozenset(axis for other in stage.inputs if belongs(other) for axis in axes_of(other.spec))


def _completions(update: Atom | None, value: Value, makers: Mapping[Var, Played]) -> dict[str, set[str]]:
    """For each axis the collectives that complete the gradient of a parameter: those that its new value is made with."""
    found: dict[str, set[str]] = {}
    waiting = [update]
    seen: set[Var] = set()
    while waiting:
        atom = waiting.pop()
        if (
            not isinstance(atom, Var)
            or atom in seen
            or atom not in makers
            or aval_of(atom).size != np.prod(value.shape)
        ):
            continue
        seen.add(atom)
        each = makers[atom]
        if not each.batch:
            waiting.extend(each.eqn.invars)
        synchronised = [(kind, axis) for axis, kind in each.synchronised(each.eqn.outvars.index(atom)).items()]
        for kind, axis in (*synchronised, *(each.completions if each.batch else ())):
            found.setdefault(axis, set()).add(kind)
    return found


def _axis_label(kinds: list[tuple[int, tuple[Kind, ...]]]) -> str:
    """One phrase for what all parameters, given as (bytes, kinds), do along an axis."""
    weight: Counter[Kind] = Counter()
    for num_bytes, own in kinds:
        weight.update(dict.fromkeys(own, num_bytes))
    data: list[Kind] = [kind for kind in _DATA if kind in weight]
    operator: list[Kind] = [kind for kind in _OPERATOR if kind in weight]
    phrases = list(_phrases(weight, data, operator))
    if not phrases:
        return "stored in parts" if "stored in parts" in weight else "replicated"
    return phrases[0] if len(phrases) == 1 else f"mixture of {' and '.join(phrases)}"


def _phrases(weight: Counter[Kind], data: list[Kind], operator: list[Kind]) -> Iterator[str]:
    if data:
        yield max(data, key=lambda kind: weight[kind])
    if operator:
        yield f"operator parallel ({', '.join(operator)})"
