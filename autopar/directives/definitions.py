"""Directives as plain values: they print, compare, hash, and convert to JSON and back.

A directive names modules by their path in the model (`layers_0/mlp/linear1`, "" for the model
itself), equations by the names that `autopar.directives.model_graph` gives them
(`linear1/dot_general`), and functions of the user by `module:qualname`.
"""

import json
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, ClassVar, Literal, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from simulator.files import parse_json

type Mode = Literal["fwd_pre", "fwd_post", "bwd_post"]
"""Where a sync applies: before a module, after it, or to the gradients of its inputs."""


class DirectiveError(ValueError):
    """A directive does not apply to the model, or contradicts another directive."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A split of a parameter along one of its dims over a mesh axis."""

    kind: ClassVar[str] = "shard"
    path: str
    param: str
    axis: int
    mesh_axis: str


@dataclass(frozen=True, slots=True)
class Sync:
    """A collective over a mesh axis, on inputs, outputs or input gradients of a module.

    Attributes:
        op: "all_reduce", "all_gather", "reduce_scatter", "scatter", a change of layout such as
            "RS->SR", or the name of a function.
        axis: the array dim that is gathered or scattered.
        backward: what happens to the gradients of an all_gather: they are summed and scattered
            ("reduce_scatter"), or, where they are equal on all devices, only scattered ("scatter").
    """

    kind: ClassVar[str] = "sync"
    path: str
    mode: Mode
    op: str
    axis: int | None
    mesh_axis: str
    backward: Literal["reduce_scatter", "scatter"] | None = None


@dataclass(frozen=True, slots=True)
class Decompose:
    """A linear module whose product and bias `find` sees as separate equations."""

    kind: ClassVar[str] = "decompose"
    path: str


@dataclass(frozen=True, slots=True)
class Trace:
    """The equations of a module that `find` and `print` see.

    Attributes:
        flatten: whether equations of submodules are visible.
        leaf_modules: submodules whose equations stay hidden.
    """

    kind: ClassVar[str] = "trace"
    path: str
    flatten: bool
    leaf_modules: tuple[str, ...]


type Reads = tuple[tuple[tuple[str, ...], ...], ...]
"""For each equation and each of its operands, the names of the operand: its own, and those of the
values that it is a broadcast of."""


@dataclass(frozen=True, slots=True)
class Fuse:
    """Equations that run as one compiled function.

    Attributes:
        compiler: "xla", which is `jax.jit`.
        reads: operands of each of `nodes`. Names of equations are counted (`mul:2`) and may mean
            another equation in another model; the operands show whether they do.
    """

    kind: ClassVar[str] = "fuse"
    path: str
    nodes: tuple[str, ...]
    compiler: str
    name: str
    reads: Reads = ()


@dataclass(frozen=True, slots=True)
class Replace:
    """A function of the values named `inputs` that runs in place of equations.

    Attributes:
        params_first: whether the inputs that are parameters of the module at `path` are passed
            first, as a dict.
        reads: as for `Fuse`.
    """

    kind: ClassVar[str] = "replace"
    path: str
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    function: str
    name: str
    params_first: bool = False
    reads: Reads = ()


type Policy = str | tuple[str | Policy, ...]
"""A checkpoint policy: the name of one in `jax.checkpoint_policies`, a tuple of the name of a
policy factory and its arguments, or the name of a function."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A module that the backward pass recomputes, except for the values that `policy` saves."""

    kind: ClassVar[str] = "checkpoint"
    path: str
    policy: Policy | None


@dataclass(frozen=True, slots=True)
class CutPipelineStage:
    """The end of a pipeline stage after a module."""

    kind: ClassVar[str] = "cut_pipeline_stage"
    path: str


@dataclass(frozen=True, slots=True)
class ForkRng:
    """A module that draws its random numbers shard by shard, with one key per device."""

    kind: ClassVar[str] = "fork_rng"
    path: str


@dataclass(frozen=True, slots=True)
class Annotate:
    """Notes on a parameter, for human readers."""

    kind: ClassVar[str] = "annotate"
    path: str
    param: str
    notes: tuple[tuple[str, str | int | float | bool], ...]


type Directive = (
    Shard
    | Sync
    | Decompose
    | Trace
    | Fuse
    | Replace
    | Checkpoint
    | CutPipelineStage
    | ForkRng
    | Annotate
)

_CLASSES: dict[str, type[Any]] = {cls.kind: cls for cls in get_args(Directive.__value__)}


def directive_names() -> tuple[str, ...]:
    """Return the names of all directives."""
    return tuple(_CLASSES)


def describe(directive: Directive) -> str:
    """Return a directive as source text without its path: `shard(kernel, axis=1, mesh_axis=tp)`."""
    values = asdict(directive)
    del values["path"]
    values.pop("reads", None)  # long, and implied by the nodes
    words = ", ".join(
        f"{key}={_short_text(value)}"
        for key, value in values.items()
        if value is not None and value is not False
    )
    return f"{directive.kind}({words})"


def _short_text(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    shown = value if len(value) <= 4 else (value[0], f"... {len(value) - 2} more ...", value[-1])
    return f"[{', '.join(map(str, shown))}]"


@dataclass(frozen=True, slots=True)
class DirectiveSchedule:
    """An ordered list of directives, independent of any model.

    Apply it to a model with `create_schedule(model, params, example_args, schedule=...)`.
    """

    directives: tuple[Directive, ...] = ()

    def __str__(self) -> str:
        return "\n".join(
            f"{directive.path or '(model)'}: {describe(directive)}" for directive in self.directives
        )

    def to_json(self) -> str:
        """Return a JSON list with one directive per line."""
        lines = (
            json.dumps({"do": directive.kind, **asdict(directive)}) for directive in self.directives
        )
        return "[" + ",\n ".join(lines) + "]"

    @classmethod
    def from_json(cls, text: str) -> "DirectiveSchedule":
        """Parse the output of `to_json`.

        Raises:
            DirectiveError: `text` is no list of valid directives.
        """
        entries = parse_json(text, "a schedule, which is a JSON list of directives", DirectiveError)
        if not isinstance(entries, list):
            raise DirectiveError(
                f"a schedule is a JSON list of directives, not {type(entries).__name__}"
            )
        return cls(tuple(map(_directive, entries)))


def _directive(given: Any) -> Directive:
    """Return the directive of an entry of a JSON list."""
    entries = dict(given) if isinstance(given, dict) else {}
    kind = entries.pop("do", None)
    if not isinstance(kind, str) or kind not in _CLASSES:
        raise DirectiveError(
            f"{given!r} is no directive: 'do' is {kind!r}, expected one of {', '.join(_CLASSES)}"
        )
    cls = _CLASSES[kind]
    types = get_type_hints(cls)
    fields_by_name = {field.name: field for field in fields(cls)}
    required = {name for name, field in fields_by_name.items() if field.default is MISSING}
    if not required <= entries.keys() <= fields_by_name.keys():
        raise DirectiveError(f"{given!r}: {kind} takes {', '.join(fields_by_name)}")
    values = {key: _lists_as_tuples(value) for key, value in entries.items()}
    for key, value in values.items():
        try:
            TypeAdapter(types[key]).validate_python(value, strict=True)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise DirectiveError(
                f"{key} of {kind} is {entries[key]!r} in {given!r}: {reason}"
            ) from error
    return cls(**values)


def _lists_as_tuples(value: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(map(_lists_as_tuples, value))
    return value
