"""Module tree of a model: paths, classes and parameters."""

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax
from flax import linen as nn

from autopar.directives.definitions import Directive, DirectiveError, describe
from autopar.directives.model_graph import ModelGraph, within


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    """A module, or a named scope: its class, if it has one, and the shapes of its own parameters."""

    path: str
    type: type | None
    params: dict[str, jax.ShapeDtypeStruct]

    @property
    def type_name(self) -> str:
        return self.type.__name__ if self.type else ""

    def is_a(self, wanted: "type | str") -> bool:
        """Whether it is of a class, or of one of that name."""
        if isinstance(wanted, str):
            return bool(wanted) and self.type_name == wanted
        return self.type is not None and issubclass(self.type, wanted)

    @property
    def is_linear(self) -> bool:
        """Whether it is a product with a bias, one thing to `find` unless it is decomposed."""
        return {"kernel", "bias"} <= self.params.keys()


def classes_of(fun: Callable[..., Any], params: Any, args: Sequence[Any]) -> dict[str, type]:
    """The class of each linen module that `fun(params, *args)` calls, by path, in the order of their first call."""
    found: dict[str, type] = {}

    def watch(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name != "setup":
            found.setdefault("/".join(context.module.path), type(context.module))
        return next_fun(*args, **kwargs)

    with nn.intercept_methods(watch):
        jax.eval_shape(
            lambda *given: fun(*given), params, *args
        )  # a function of its own: not one that JAX has traced
    return found


@dataclass(frozen=True, slots=True)
class ModuleTree:
    """The tree, by path, in the order in which modules are first used; "" is the model."""

    by_path: dict[str, ModuleInfo]

    @classmethod
    def of(
        cls, graph: ModelGraph, classes: dict[str, type], shapes: dict[str, jax.ShapeDtypeStruct]
    ) -> "ModuleTree":
        paths = {"": None}
        for scope in (
            *classes,
            *(node.scope for node in graph.nodes),
            *(name.rpartition("/")[0] for name in shapes),
        ):
            paths.update(dict.fromkeys(_parents(scope)))
        own = {path: {} for path in paths}
        for name, aval in shapes.items():
            path, _, param = name.rpartition("/")
            own[path][param] = aval
        return cls(
            {path: ModuleInfo(path, classes.get(path), own[path]) for path in _nested(paths)}
        )

    def find(self, pattern: str) -> list[str]:
        """The paths that `pattern` names: itself, or with `*` all that match. Raises DirectiveError when there is none."""
        path = pattern.replace(".", "/").strip("/")
        if path in self.by_path:
            return [path]
        matched = [
            each
            for each in self.by_path
            if each and fnmatchcase(each, path) and each.count("/") == path.count("/")
        ]
        if not matched:
            raise DirectiveError(
                f"no module {pattern!r} in the model; {nearest(path, self.by_path)}"
            )
        return matched

    def param(self, path: str, name: str) -> jax.ShapeDtypeStruct:
        """A parameter of a module. Raises DirectiveError when it has none of that name."""
        params = self.by_path[path].params
        if name not in params:
            raise DirectiveError(
                f"no parameter {name!r} in {path or 'the model'}, which has {', '.join(params) or 'none'}; {nearest(name, params)}"
            )
        return params[name]

    def text(self, directives: Iterable[Directive], roots: Sequence[str] = ("",)) -> str:
        """The modules at `roots` and inside them, with shapes, and under each its directives."""
        directives = list(directives)
        lines = []
        for path, module in self.by_path.items():
            root = next((root for root in roots if within(path, root)), None)
            if root is None:
                continue
            indent = "  " * (_depth(path) - _depth(root))
            params = ", ".join(
                f"{name}={each.dtype}{list(each.shape)}" for name, each in module.params.items()
            )
            name = path.rpartition("/")[2]
            label = (
                f"({name}): {module.type_name or 'scope'}"
                if name
                else module.type_name or "function"
            )
            lines.append(f"{indent}{label}({params})")
            lines += [f"{indent}  .{describe(each)}" for each in directives if each.path == path]
        return "\n".join(lines)


def nearest(name: str, known: Iterable[str]) -> str:
    """What might have been meant."""
    known = [each for each in known if each]
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or known[:3]
    return f"near it: {', '.join(close) or 'nothing'}"


def _depth(path: str) -> int:
    return path.count("/") + 1 if path else 0


def _parents(scope: str) -> list[str]:
    parts = scope.split("/") if scope else []
    return ["/".join(parts[:k]) for k in range(len(parts) + 1)]


def _nested(paths: Iterable[str]) -> list[str]:
    """`paths`, each followed by those inside it."""
    paths = list(paths)
    order: list[str] = []

    def visit(path: str) -> None:
        order.append(path)
        for each in paths:
            if each and each != path and within(each, path) and each.rpartition("/")[0] == path:
                visit(each)

    visit("")
    return order
