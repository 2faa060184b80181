"""Style and files of figures. Matplotlib is imported when a figure is drawn."""

from pathlib import Path
from typing import Any

from simulator.files import replacing


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
    # With a fixed salt, a figure is the same file each time it is drawn.
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
        with replacing(path) as partial:
            figure.savefig(partial, metadata={"Date": None} if path.suffix == ".svg" else None)
    finally:
        pyplot().close(figure)
