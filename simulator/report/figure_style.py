"""Style and saving of figures; matplotlib is imported when a figure is drawn."""

from pathlib import Path
from typing import Any

from simulator.files import unwritable


def pyplot() -> Any:
    """Drawing is for the experiments' environment only, so it is imported when it is needed."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "figures need matplotlib: install the dependency group `experiments`"
        ) from None
    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": "autopar", "font.size": 8}
    )  # the same file each time
    from matplotlib import pyplot

    return pyplot


def save_figure(figure: Any, path: Path) -> None:
    """Write the figure, the same file each time, and forget it."""
    figure.tight_layout()
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise unwritable(path, error) from None
    finally:
        pyplot().close(figure)
