"""Style and files of figures. Matplotlib is imported when a figure is drawn."""

from pathlib import Path
from typing import Any

from simulator.files import unwritable


def pyplot() -> Any:
    """Return `matplotlib.pyplot` with the project's style.

    Raises:
        ModuleNotFoundError: matplotlib, of the extra `autopar[figures]`, is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "figures need matplotlib, not installed; pip install 'autopar[figures]'"
        ) from None
    matplotlib.use("Agg")
    # The salt makes the file the same each time.
    matplotlib.rcParams.update({"svg.hashsalt": "autopar", "font.size": 8})
    from matplotlib import pyplot

    return pyplot


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure, the same file each time, and close it.

    Raises:
        FileError: the file can't be written.
    """
    figure.tight_layout()
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise unwritable(path, error) from None
    finally:
        pyplot().close(figure)
