"""Module tree of a model: paths, classes and parameters."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax
from flax import linen as nn

from autopar._plugins import assume_cudnn
from autopar.analysis.descriptions import nearest
from autopar.directives.definitions import Directive, DirectiveError, describe
from autopar.directives.model_graph import ModelGraph, depth, within


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    """A module, or a named scope.

    Attributes:
        path: the path in the model.
        type: the class; None for a scope.
        params: shapes and dtypes of its own parameters, without its submodules' parameters.
    """

    path: str
    type: type | None
    params: dict[str, jax.ShapeDtypeStruct]

    @property
    def type_name(self) -> str:
        """The name of the class, or "" for a scope."""
        return self.type.__name__ if self.type else ""

    def is_a(self, cls: "type | str") -> bool:
        """Return whether the module is of the given class, or of a class with the given name."""
        if isinstance(cls, str):
            return bool(cls) and self.type_name == cls
        return self.type is not None and issubclass(self.type, cls)

    @property
    def is_linear(self) -> bool:
        """Whether it has a kernel and a bias. `find` sees it as one unless it is decomposed."""
        return {"kernel", "bias"} <= self.params.keys()


def classes_of(fun: Callable[..., Any], params: Any, args: Sequence[Any]) -> dict[str, type]:
    """Return the class of each linen module that `fun(params, *args)` calls.

    The modules are keyed by path, in the order of their first call.
    """
    classes: dict[str, type] = {}

    def watch(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name != "setup":
            classes.setdefault("/".join(context.module.path), type(context.module))
        return next_fun(*args, **kwargs)

    with assume_cudnn(), nn.intercept_methods(watch):
        # JAX may have cached a trace of `fun`; a new function is traced again.
        jax.eval_shape(lambda *inputs: fun(*inputs), params, *args)
    return classes


@dataclass(frozen=True, slots=True)
class ModuleTree:
    """The modules of a model.

    Attributes:
        by_path: modules by path, each before those inside it, in the order of their first use. The
            model itself is "".
    """

    by_path: dict[str, ModuleInfo]

    @classmethod
    def of(
        cls, graph: ModelGraph, classes: dict[str, type], shapes: dict[str, jax.ShapeDtypeStruct]
    ) -> "ModuleTree":
        """Return the tree of all modules that have a class, an equation or a parameter.

        Args:
            graph: the equations of the model.
            classes: the classes of modules by path.
            shapes: the parameters by path.
        """
        scopes = (
            *classes,
            *(node.scope for node in graph.nodes),
            *(name.rpartition("/")[0] for name in shapes),
        )
        paths = {"": None}
        for scope in scopes:
            paths.update(dict.fromkeys(_parents(scope)))
        own = {path: {} for path in paths}
        for name, aval in shapes.items():
            path, _, param = name.rpartition("/")
            own[path][param] = aval
        return cls(
            {path: ModuleInfo(path, classes.get(path), own[path]) for path in _nested(paths)}
        )

    def find(self, pattern: str) -> list[str]:
        """Return the paths of the modules that match `pattern`.

        Args:
            pattern: a path with "/" or "." between names, in which `*` matches within one name.

        Raises:
            DirectiveError: No module matches.
        """
        path = pattern.replace(".", "/").strip("/")
        if path in self.by_path:
            return [path]
        matched = [
            module
            for module in self.by_path
            if module and fnmatchcase(module, path) and module.count("/") == path.count("/")
        ]
        if not matched:
            raise DirectiveError(
                f"no module {pattern!r} in the model; near it:"
                f" {nearest(path, self.by_path) or 'none'}"
            )
        return matched

    def param(self, path: str, name: str) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of parameter `name` of the module at `path`.

        Raises:
            DirectiveError: The module has no such parameter.
        """
        params = self.by_path[path].params
        if name not in params:
            raise DirectiveError(
                f"no parameter {name!r} in {path or 'the model'}, which has"
                f" {', '.join(params) or 'none'}; near it: {nearest(name, params) or 'none'}"
            )
        return params[name]

    def text(self, directives: Iterable[Directive], roots: Sequence[str] = ("",)) -> str:
        """Return the modules at and inside `roots` as text, with parameters and directives."""
        directives = list(directives)
        lines = []
        for path, module in self.by_path.items():
            root = next((root for root in roots if within(path, root)), None)
            if root is None:
                continue
            indent = "  " * (depth(path) - depth(root))
            params = ", ".join(
                f"{name}={aval.dtype}{list(aval.shape)}" for name, aval in module.params.items()
            )
            name = path.rpartition("/")[2]
            label = (
                f"({name}): {module.type_name or 'scope'}"
                if name
                else module.type_name or "function"
            )
            lines.append(f"{indent}{label}({params})")
            lines += [
                f"{indent}  .{describe(directive)}"
                for directive in directives
                if directive.path == path
            ]
        return "\n".join(lines)


def _parents(scope: str) -> list[str]:
    parts = scope.split("/") if scope else []
    return ["/".join(parts[:k]) for k in range(len(parts) + 1)]


def _nested(paths: Iterable[str]) -> list[str]:
    """Return `paths` in depth-first order."""
    paths = list(paths)
    order: list[str] = []

    def visit(path: str) -> None:
        order.append(path)
        for inner in paths:
            if inner and inner.rpartition("/")[0] == path:
                visit(inner)

    visit("")
    return order
