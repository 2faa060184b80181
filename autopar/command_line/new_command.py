"""The subcommand `new`, which writes a step to start from."""

import sys
from importlib.metadata import packages_distributions
from os.path import exists
from pathlib import Path
from typing import Annotated

import typer

from autopar.command_line import template_step
from simulator.cli.common_options import print_written
from simulator.cli.error_lines import usage_errors
from simulator.files import check_writable, read_text, write_text


def new(
    path: Annotated[Path, typer.Argument(help="The file to write, such as my_step.py.")],
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> None:
    """Write a training step that plans as it is, as a template for your own."""
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise typer.BadParameter(f"{path}: expected the name of a Python module, e.g. my_step.py")
    if path.stem in sys.stdlib_module_names or path.stem in packages_distributions():
        raise typer.BadParameter(
            f"{path} would hide the installed module {path.stem}; choose another name, e.g."
            " my_step.py"
        )
    if exists(path) and not force:
        raise typer.BadParameter(f"{path} exists; choose another name, or replace it with --force")
    with usage_errors():
        check_writable(path)
        text = read_text(template_step.__file__)
        write_text(path, text.replace("my_step:", f"{path.stem}:"))
    print_written(path)
    place = path.stem if path.parent == Path() else path
    typer.echo(f"next: autopar plan {place}:make_step --cluster dgx_h100")
