"""Directives: what a schedule says about a model, as plain values that print, compare, hash and go to JSON and back.

A directive names modules by their path in the model (`layers_0/mlp/linear1`, "" for the model itself), equations by the names
that `autopar.directives.model_graph` gives them (`linear1/dot_general`), and functions of the user by `module:qualname`.
"""

import json
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, ClassVar, Literal, get_type_hints

from pydantic import TypeAdapter, ValidationError

from simulator.files import parse_json

type Mode = Literal["fwd_pre", "fwd_post", "bwd_post"]
"""Where a sync stands: before a module, after it, or on the gradients of its inputs."""


class DirectiveError(ValueError):
    """A directive can't hold for this model, or contradicts another."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A parameter is split along one of its dims over a mesh axis."""

    kind: ClassVar[str] = "shard"
    path: str
    param: str
    axis: int
    mesh_axis: str


@dataclass(frozen=True, slots=True)
class Sync:
    """What a module takes, gives or hands back as gradients is put together, or apart, over a mesh axis.

    Attributes:
        op: "all_reduce", "all_gather", "reduce_scatter", "scatter", a change of layout such as "RS->SR", or a function.
        axis: the array dim that is gathered or scattered.
        backward: of an all_gather: whether its gradients are added up and scattered, or, being equal everywhere, only scattered.
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
    """The product and the bias of a linear module are equations of their own for `find`."""

    kind: ClassVar[str] = "decompose"
    path: str


@dataclass(frozen=True, slots=True)
class Trace:
    """Which equations of a module `find` and `print` see: those of its submodules too if `flatten`, but of no leaf module."""

    kind: ClassVar[str] = "trace"
    path: str
    flatten: bool
    leaf_modules: tuple[str, ...]


type Reads = tuple[tuple[tuple[str, ...], ...], ...]
"""For each of some equations, for each operand, what it is called: as it is, and before broadcasts."""


@dataclass(frozen=True, slots=True)
class Fuse:
    """Equations run as one compiled function.

    Attributes:
        reads: what each of `nodes` reads, by which they are known again in another model: names are counted, `mul:2`.
    """

    kind: ClassVar[str] = "fuse"
    path: str
    nodes: tuple[str, ...]
    compiler: str
    name: str
    reads: Reads = ()


@dataclass(frozen=True, slots=True)
class Replace:
    """A function, given the values named `inputs`, stands in for equations.

    With `params_first` those of its inputs that are parameters in the module at `path` come first, as a dict.

    Attributes:
        reads: as of Fuse.
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
"""What is kept: one of `jax.checkpoint_policies`, a tuple of what makes one and its arguments, or a function."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A module is recomputed in the backward pass, but for what `policy` keeps."""

    kind: ClassVar[str] = "checkpoint"
    path: str
    policy: Policy | None


@dataclass(frozen=True, slots=True)
class CutPipelineStage:
    """A pipeline stage ends after a module."""

    kind: ClassVar[str] = "cut_pipeline_stage"
    path: str


@dataclass(frozen=True, slots=True)
class ForkRng:
    """Devices draw the random numbers of a module for their own shards, from keys of their own."""

    kind: ClassVar[str] = "fork_rng"
    path: str


@dataclass(frozen=True, slots=True)
class Annotate:
    """A note on a parameter, for whoever reads the schedule."""

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

_KINDS: dict[str, type[Any]] = {
    each.kind: each
    for each in (
        Shard,
        Sync,
        Decompose,
        Trace,
        Fuse,
        Replace,
        Checkpoint,
        CutPipelineStage,
        ForkRng,
        Annotate,
    )
}


def primitives() -> tuple[str, ...]:
    """The names of the directives there are."""
    return tuple(_KINDS)


def describe(directive: Directive) -> str:
    """A directive as one would write it: `shard(kernel, axis=1, mesh_axis=tp)`, without its path."""
    given = asdict(directive)
    del given["path"]
    given.pop("reads", None)  # long, and told by the nodes
    words = ", ".join(
        f"{key}={_text(value)}"
        for key, value in given.items()
        if value is not None and value is not False
    )
    return f"{directive.kind}({words})"


def _text(value: Any) -> str:
    """Long lists in short."""
    if not isinstance(value, tuple):
        return str(value)
    shown = value if len(value) <= 4 else (value[0], f"... {len(value) - 2} more ...", value[-1])
    return f"[{', '.join(map(str, shown))}]"


@dataclass(frozen=True, slots=True)
class DirectiveSchedule:
    """An ordered list of directives: how to run a model, apart from the model.

    Replay it on a model with `create_schedule(model, params, example_args, schedule=...)`.
    """

    directives: tuple[Directive, ...] = ()

    def __str__(self) -> str:
        return "\n".join(f"{each.path or '(model)'}: {describe(each)}" for each in self.directives)

    def to_json(self) -> str:
        """As JSON, a directive per line."""
        lines = (json.dumps({"do": each.kind, **asdict(each)}) for each in self.directives)
        return "[" + ",\n ".join(lines) + "]"

    @classmethod
    def from_json(cls, text: str) -> "DirectiveSchedule":
        """What `to_json` wrote. Raises DirectiveError for anything else."""
        given = parse_json(text, "a schedule, which is a JSON list of directives", DirectiveError)
        if not isinstance(given, list):
            raise DirectiveError(
                f"a schedule is a JSON list of directives, not {type(given).__name__}"
            )
        return cls(tuple(map(_directive, given)))


def _directive(given: Any) -> Directive:
    entries = dict(given) if isinstance(given, dict) else {}
    kind = entries.pop("do", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise DirectiveError(
            f"{given!r} is no directive: 'do' is {kind!r}, expected one of {', '.join(_KINDS)}"
        )
    cls = _KINDS[kind]
    types = get_type_hints(cls)
    known = {field.name: field for field in fields(cls)}
    missing = {name for name, field in known.items() if field.default is MISSING} - entries.keys()
    if missing or not entries.keys() <= known.keys():
        raise DirectiveError(f"{given!r}: {kind} takes {', '.join(known)}")
    values = {key: _frozen(value) for key, value in entries.items()}
    for key, value in values.items():
        try:
            TypeAdapter(types[key]).validate_python(value, strict=True)
        except ValidationError as error:
            why = error.errors()[0]["msg"]
            raise DirectiveError(
                f"{key} of {kind} is {entries[key]!r} in {given!r}: {why}"
            ) from error
    return cls(**values)


def _frozen(value: Any) -> Any:
    return (
        tuple(map(_frozen, value))
        if isinstance(value, Sequence) and not isinstance(value, str)
        else value
    )
