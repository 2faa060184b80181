"""A user's step, given as MODULE:FUNCTION: importing it, checking it, and locating its errors."""

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from difflib import get_close_matches
from functools import wraps
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from os.path import isfile
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import typer

from autopar._plugins import assume_cudnn
from autopar.capacity.sized_steps import checked_step
from autopar.methods import PlanningMethod
from autopar.plan import PlanError
from autopar.planning.stage_problem import NoStagesError
from autopar.sharding.selection_problem import InfeasibleError
from autopar.tracing.step_traces import TraceError
from simulator.cli.error_lines import NegativeAnswer, usage_errors
from simulator.files import one_line

_EXAMPLE = "MODULE:FUNCTION, such as my_step:make_step; `autopar new my_step.py` writes one"


@dataclass(frozen=True)
class UserStep:
    """A step with its arguments.

    Attributes:
        place: where it comes from, MODULE:FUNCTION.
        file: the file of the module; "" if it has none.
        fun: the step.
        args: its arguments, arrays or ShapeDtypeStructs.
        options: options by name, some of `STEP_OPTIONS`.
    """

    place: str
    file: str
    fun: Callable[..., Any]
    args: tuple[Any, ...]
    options: Mapping[str, Any]

    @property
    def batch_options(self) -> dict[str, Any]:
        """The option of every function that traces the step."""
        return {k: v for k, v in self.options.items() if k == "batch_argnums"}

    @property
    def prediction_options(self) -> dict[str, Any]:
        """The options of predictions of the step."""
        return {k: v for k, v in self.options.items() if k != "method"}

    @property
    def method(self) -> PlanningMethod | None:
        """The planning method that comes with the step, if any."""
        return self.options.get("method")

    def check_runs(self) -> None:
        """Raise a usage error if the step itself raises when JAX traces it."""
        try:
            with assume_cudnn():
                jax.eval_shape(self.fun, *self.args)
        except Exception as error:
            raise typer.BadParameter(
                _raised(f"the step of {self.place}", error, self.file)
            ) from error

    @contextmanager
    def usage_errors(self) -> Iterator[None]:
        """Turn errors of the step, and errors for users, into usage errors.

        What the step prints while it is traced goes to stderr, because stdout has the result.
        """
        try:
            with redirect_stdout(sys.stderr):
                yield
        except (InfeasibleError, NoStagesError) as error:
            raise NegativeAnswer(one_line(error)) from error
        except (TraceError, PlanError) as error:
            raise typer.BadParameter(one_line(error)) from error
        except Exception as error:
            self.check_runs()
            if isinstance(error, ValueError | TypeError | ImportError | NotImplementedError):
                raise typer.BadParameter(one_line(error)) from error
            raise


def load_step(place: str) -> UserStep:
    """Return the step of MODULE:FUNCTION.

    Args:
        place: a module, or a path that ends in .py, and a function in it. The function returns
            (step, args) or (step, args, options).

    Raises:
        typer.BadParameter: there is no such module or function, it raises, or it returns something
            else.
    """
    function = load_function(place)
    _check_needs_nothing(place, function.function)
    function()
    return function.last


@dataclass
class UserFunction:
    """A function that makes steps; calling it turns its errors into usage errors.

    Attributes:
        place: where it comes from, MODULE:FUNCTION.
        file: the file of the module; "" if it has none.
        function: the function.
    """

    place: str
    file: str
    function: Callable[..., Any]
    _last: UserStep | None = None

    def __call__(self, *size: int) -> Any:
        """Return what the function returns, and keep it as the last step."""
        try:
            with redirect_stdout(sys.stderr), assume_cudnn():
                result = self.function(*size)
        except (Exception, SystemExit) as error:
            raise typer.BadParameter(_raised(self.place, error, self.file)) from error
        with usage_errors():
            made = checked_step(self.place, result)
        self._last = UserStep(self.place, self.file, made.fun, made.args, made.options)
        return result

    @property
    def last(self) -> UserStep:
        """The step that was made last."""
        assert self._last is not None
        return self._last

    @property
    def made(self) -> Callable[..., Any]:
        """A function that calls this one, with the signature of the user's function."""

        @wraps(self.function)
        def call(*size: Any) -> Any:
            return self(*size)

        return call

    @contextmanager
    def usage_errors(self) -> Iterator[None]:
        """Turn errors of the steps that the function makes into usage errors."""
        with redirect_stdout(sys.stderr):
            try:
                yield
            except Exception as error:
                with usage_errors() if self._last is None else self._last.usage_errors():
                    raise error from error.__cause__


def load_function(place: str) -> UserFunction:
    """Return the function of MODULE:FUNCTION.

    Args:
        place: a module, or a path that ends in .py, and a function in it.

    Raises:
        typer.BadParameter: there is no such module or function.
    """
    module_name, _, function_name = place.rpartition(":")
    if not module_name or not function_name:
        raise typer.BadParameter(f"{place!r}: expected {_EXAMPLE}")
    module = _module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise typer.BadParameter(_no_function(module_name, module, function_name))
    return UserFunction(place, str(getattr(module, "__file__", None) or ""), function)


def _check_needs_nothing(place: str, make: Callable[..., Any]) -> None:
    """Raise a usage error if a function has required parameters."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind not in variadic
    ]
    if required:
        raise typer.BadParameter(
            f"{place} needs {', '.join(required)}; expected a function without required parameters"
            " that returns (step, args)"
        )


def _module(name: str) -> ModuleType:
    """Import a module by its name, or from its path, and return it."""
    path = Path(name)
    from_path = path.suffix == ".py"
    if from_path and not isfile(path):
        raise typer.BadParameter(f"{name}: there is no such file; expected {_EXAMPLE}")
    folder = str(path.absolute().parent if from_path else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        with redirect_stdout(sys.stderr), assume_cudnn():
            return _from_path(path) if from_path else import_module(name)
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name
        if missing and not from_path and f"{name}.".startswith(f"{missing}."):
            raise typer.BadParameter(
                f"there is no module {missing!r} in {folder} or among the installed packages;"
                f" expected {_EXAMPLE}"
            ) from error
        file = str(path.absolute()) if from_path else f"{folder}/{name.replace('.', '/')}.py"
        raise typer.BadParameter(_raised(f"importing {name}", error, file)) from error


def _from_path(path: Path) -> ModuleType:
    """Import a file under a name that hides no other module."""
    name = f"_autopar_step_{path.stem}"
    spec = spec_from_file_location(name, path.absolute())
    assert spec is not None, "the suffix is .py"
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _no_function(module_name: str, module: ModuleType, name: str) -> str:
    functions = [
        key
        for key, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    close = get_close_matches(name, functions, 1) or functions
    has = f"it has {', '.join(close[:6])}" if close else "it has no functions"
    return f"{module_name} has no function {name!r}; {has}"


def _raised(what: str, error: BaseException, file: str) -> str:
    """Return a line with an error of a user's code, and the place in that code's file."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if file and frame.filename == file
    ]
    where = f" (line {lines[-1]} of {Path(file).name})" if lines else ""
    return f"{what} raises {type(error).__name__}{where}: {one_line(error, 400)}"
