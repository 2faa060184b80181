"""Reading and writing of text, YAML and JSON files.

An error is one bounded line that names the file and says what was expected.
"""

import json
import os
import re
import reprlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "FileError",
    "brief",
    "check_writable",
    "one_line",
    "parse_json",
    "parse_yaml",
    "read_table",
    "read_text",
    "read_yaml",
    "replacing",
    "unwritable",
    "write_text",
]

_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
_LINE = 800
_DEPTH = 50
_NODES = 100_000
_YAML_CHARACTERS = 2_000_000

_BRIEF = reprlib.Repr(
    maxlevel=3, maxdict=6, maxlist=6, maxtuple=6, maxstring=100, maxother=100, maxlong=60
)


class _Loader(yaml.SafeLoader):
    """A loader of YAML 1.1 for which `1e3` is a number, as in YAML 1.2 and JSON, and not text."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


class FileError(ValueError):
    """A file that can't be read or written."""


def brief(value: object) -> str:
    """Return `repr(value)`, shortened where it is long."""
    try:
        return _BRIEF.repr(value)
    except ValueError:  # Python prints no integer of more than 4300 digits.
        return f"a {type(value).__name__} too long to print"


def one_line(text: object, length: int = _LINE) -> str:
    """Return a message without line breaks, cut off after `length` characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= length else f"{line[:length]}..."


def read_text(
    path: str | Path, expected: str = "a text file", error: type[ValueError] = FileError
) -> str:
    """Return the text in a file, without a byte-order mark.

    Args:
        path: the file.
        expected: what the file should be, for errors.
        error: the class of errors.

    Raises:
        error: the file can't be read, or is not UTF-8.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as reason:
        raise error(
            f"{one_line(path)}: can't be read ({reason.strerror}); expected {expected}"
        ) from None
    except ValueError as reason:  # The path has a null character.
        raise error(
            f"{one_line(repr(str(path)))}: can't be read ({reason}); expected {expected}"
        ) from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as reason:
        line, byte = data.count(b"\n", 0, reason.start) + 1, data[reason.start]
        raise error(
            f"{path}: is not UTF-8: byte 0x{byte:02x} in line {line}; expected {expected}"
        ) from None


def write_text(path: str | Path, text: str) -> None:
    """Write a file as a whole: after an error, the former file is still there.

    Raises:
        FileError: it can't be written, e.g. because its folder doesn't exist.
    """
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield the path of a new file, with the same suffix, that replaces a file after the block.

    After an error or an interruption, the former file is still there, and no other one.

    Raises:
        FileError: it can't be written, e.g. because its folder doesn't exist.
    """
    # /dev/stdout, a pipe, or a folder. Methods of Path raise for names that are too long.
    is_special = os.path.exists(path) and not os.path.isfile(path)
    target = Path(path) if is_special else Path(os.path.realpath(path))
    partial = target if is_special else target.with_name(f".{os.getpid()}.{target.name}")
    try:
        yield partial
        if not is_special:
            if target.exists():
                shutil.copymode(target, partial)
            partial.replace(target)
    except OSError as reason:
        raise unwritable(path, reason) from None
    finally:
        if not is_special:
            with suppress(OSError):
                partial.unlink()


def unwritable(path: str | Path, reason: OSError) -> FileError:
    """Return the error that says why a file can't be written."""
    return FileError(
        f"{path}: can't be written ({reason.strerror}); expected a file in a folder that is there"
    )


def check_writable(*paths: Path | None) -> None:
    """Check before long work that files can be written after it.

    Args:
        paths: the files; None for an output that is not wanted.

    Raises:
        FileError: a path is a folder, its folder doesn't exist, or either can't be written to.
    """
    for path in paths:
        if path is None:
            continue
        folder = path.absolute().parent
        # Unlike the methods of Path, these functions return False for names that are too long.
        if os.path.isdir(path):
            reason = "it is a folder"
        elif not os.path.isdir(folder):
            reason = f"there is no folder {folder}"
        elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
            reason = "no permission to write"
        else:
            continue
        raise FileError(
            f"{path}: can't be written ({reason}); expected a file in a folder that is there"
        )


def parse_json(text: str, source: object, error: type[ValueError] = FileError) -> Any:
    """Return the value of a JSON text.

    Args:
        text: the JSON.
        source: what errors call the text, e.g. its path.
        error: the class of errors.

    Raises:
        error: it is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise error(f"{source}: is nested too deeply; expected JSON of a few levels") from None
    except ValueError as reason:
        raise error(f"{source}: is not JSON: {one_line(reason)}") from None


def parse_yaml(text: str, source: object, error: type[ValueError] = FileError) -> Any:
    """Return the value of a YAML text. A mapping must not have a key twice.

    Args:
        text: the YAML.
        source: what errors call the text, e.g. its path.
        error: the class of errors.

    Raises:
        error: it is not YAML, is nested too deeply, or is too large once its aliases are expanded.
    """
    if len(text) > _YAML_CHARACTERS:
        raise error(
            f"{source}: has {len(text):,} characters; expected at most {_YAML_CHARACTERS:,}"
        )
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check(node, {}, 0)
        return loader.construct_document(node)
    except RecursionError:
        raise error(f"{source}: is nested too deeply; expected at most {_DEPTH} levels") from None
    except yaml.MarkedYAMLError as reason:
        mark = reason.problem_mark or reason.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise error(
            f"{source}: is not YAML: {where}{one_line(reason.problem or reason.context)}"
        ) from None
    # PyYAML's own errors, and those of Python where a value isn't what its form or its tag
    # promises: a date such as 2026-13-01, `!!int x`.
    except (
        yaml.YAMLError,
        ValueError,
        LookupError,
        AttributeError,
        TypeError,
        ArithmeticError,
    ) as reason:
        raise error(f"{source}: is not YAML: {one_line(reason) or type(reason).__name__}") from None


def read_yaml(
    path: str | Path, expected: str = "a YAML file", error: type[ValueError] = FileError
) -> Any:
    """Return the value in a YAML file, or raise an error as `read_text` and `parse_yaml` do."""
    return parse_yaml(read_text(path, expected, error), path, error)


def read_table(path: str | Path) -> "pd.DataFrame":
    """Return the table in a CSV file.

    Args:
        path: the file.

    Raises:
        FileError: the file can't be read, or holds no table.
    """
    import pandas as pd  # slow to import

    text = read_text(path, "a CSV file")
    try:
        return pd.read_csv(StringIO(text))
    except (ValueError, OverflowError) as reason:
        raise FileError(f"{path}: is not CSV: {one_line(reason)}") from None


def _check(node: yaml.Node, sizes: dict[int, int], depth: int) -> int:
    """Return how many values a node has once aliases are expanded.

    Args:
        node: the node.
        sizes: the result for each node that was visited, by id; 0 for a node that is being visited.
        depth: levels of nodes above this one.

    Raises:
        MarkedYAMLError: the node has too many values, a key twice, or an alias of itself.
        RecursionError: the node is nested too deeply.
    """
    if id(node) in sizes:
        if not sizes[id(node)]:
            raise yaml.MarkedYAMLError(
                problem="an alias is part of itself", problem_mark=node.start_mark
            )
        return sizes[id(node)]
    if depth > _DEPTH:
        raise RecursionError
    sizes[id(node)] = 0
    size = 1
    match node:
        case yaml.MappingNode():
            given: set[tuple[str, str]] = set()
            for key, value in node.value:
                name = (key.tag, str(key.value)) if isinstance(key, yaml.ScalarNode) else None
                if name in given:
                    raise yaml.MarkedYAMLError(
                        problem=f"{brief(key.value)} is given twice", problem_mark=key.start_mark
                    )
                if name is not None:
                    given.add(name)
                size += _check(key, sizes, depth + 1) + _check(value, sizes, depth + 1)
        case yaml.SequenceNode():
            size += sum(_check(item, sizes, depth + 1) for item in node.value)
        case _:
            pass
    if size > _NODES:
        problem = f"more than {_NODES:,} values once its aliases are expanded"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    sizes[id(node)] = size
    return size
