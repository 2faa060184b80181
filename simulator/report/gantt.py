"""Timelines as Gantt charts."""

from pathlib import Path

from simulator.engine.timeline import Timeline
from simulator.program import Phase, Run, parse_instruction
from simulator.report.figure_style import pyplot, save_figure
from simulator.spans import Link

_TASKS: dict[Phase, tuple[str, str]] = {
    "F": ("forward", "#4878cf"),
    "B": ("backward", "#6acc65"),
    "I": ("backward, inputs", "#6acc65"),
    "W": ("backward, weights", "#b8e6b5"),
    "U": ("update", "#d65f5f"),
    "S": ("whole step", "#4878cf"),
}
_LINKS: dict[Link | None, tuple[str, str]] = {
    "within hosts": ("communication within hosts", "#888888"),
    "between hosts": ("communication between hosts", "#222222"),
    None: ("communication", "#888888"),
}


def save_gantt(timeline: Timeline, path: str | Path) -> None:
    """Draw the tasks of each mesh and, below them, its communication.

    Args:
        timeline: the timeline.
        path: the file, whose ending determines the format: .svg, .png or .pdf.

    Raises:
        FileError: the file can't be written.
        ModuleNotFoundError: matplotlib is not installed.
    """
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(10, 1 + 0.45 * len(timeline.meshes)))
    legend: dict[str, str] = {}

    def bar(kind: tuple[str, str], start: float, end: float, lane: tuple[float, float]) -> None:
        label, color = kind
        legend[label] = color
        axes.broken_barh(
            [(1e3 * start, 1e3 * (end - start))],
            lane,
            color=color,
            edgecolor="white",
            linewidth=0.3,
        )

    for span in timeline.tasks():
        instruction = parse_instruction(span.task)
        if isinstance(instruction, Run):
            bar(_TASKS[instruction.phase], span.start, span.end, (span.mesh - 0.4, 0.55))
    for span in timeline.spans:
        if span.stream == "communication":
            bar(_LINKS[span.link], span.start, span.end, (span.mesh + 0.2, 0.2))
    boxes = [plt.Rectangle((0, 0), 1, 1, color=color) for color in legend.values()]
    place = {
        "loc": "lower center",
        "bbox_to_anchor": (0.5, 1.0),
        "ncols": max(1, len(legend)),
        "frameon": False,
    }
    axes.legend(boxes, list(legend), **place)
    count = len(timeline.meshes)
    axes.set(xlabel="ms", xlim=(0, 1e3 * timeline.makespan or 1), ylim=(count - 0.4, -0.6))
    axes.set_yticks(range(count), [f"mesh {mesh}" for mesh in range(count)])
    save_figure(figure, Path(path))
