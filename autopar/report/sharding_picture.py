"""Pictures of shardings as text or HTML, for any mesh without its devices.

Compare `jax.debug.visualize_array_sharding`, which needs an array on devices.
"""

from collections.abc import Sequence
from html import escape
from itertools import groupby, product
from math import prod

from autopar.analysis.descriptions import nearest
from autopar.ir.spec import LogicalMesh, Spec, from_partition_spec, partition_spec
from autopar.lowering.placement_specs import PlacementSpec, array_text
from autopar.lowering.planned import Planned
from autopar.plan import Plan
from autopar.plan_stages import ShardingConstraint, Stage, Value, spec_text

type Grid = list[list[str]]
"""For each piece of a two-dimensional slice, by row and column, the devices that store it."""

_COLOURS = ("#cfe2f3", "#fce5cd", "#d9ead3", "#f4cccc", "#d9d2e9", "#fff2cc", "#d0e0e3", "#ead1dc")


def picture(
    value: PlacementSpec | Value | ShardingConstraint | str,
    plan: Plan | Planned | None = None,
    *,
    html: bool = False,
) -> str:
    """Draw which devices store which part of an array.

    Devices have their row-major numbers in the mesh. At most two dims are drawn, preferably sharded
    ones. If more dims are sharded, there is a picture for each part of the others.

    Args:
        value: a placement spec; or an input, output or constraint of a plan; or the path of an
            input or output.
        plan: the plan that the value belongs to; unused for a placement spec.
        html: return an HTML fragment instead of text.

    Raises:
        ValueError: the plan is missing or has no such value, or the spec does not fit the array.
    """
    name, shape, spec, mesh, array = _resolve(value, plan)
    if len(spec) != len(shape):
        raise ValueError(
            f"spec {spec_text(partition_spec(spec))} is for {len(spec)} dims, but the array has"
            f" shape {shape}"
        )
    title = f"{name} {array} {spec_text(partition_spec(spec))} on mesh {mesh}".strip()
    drawn = _drawn_dims(spec)
    outer = [dim for dim, axes in enumerate(spec) if axes and dim not in drawn]
    parts = [mesh.ways(spec[dim]) for dim in outer]
    draw = _html if html else _text
    legend = _legend(shape, spec, drawn, mesh)
    pictures = []
    for index in product(*map(range, parts)):
        part_by_dim = dict(zip(outer, index, strict=True))
        caption = ", ".join(
            f"part {i + 1} of {mesh.ways(spec[dim])} of dim {dim}" for dim, i in part_by_dim.items()
        )
        pictures.append(draw(caption, legend, _grid(spec, drawn, part_by_dim, mesh)))
    heading = f"<p>{escape(title)}</p>" if html else title
    return "\n".join([heading, *pictures])


def _resolve(
    value: PlacementSpec | Value | ShardingConstraint | str, plan: Plan | Planned | None
) -> tuple[str, tuple[int, ...], Spec, LogicalMesh, str]:
    """Return name, shape, spec, mesh, and dtype with shape as text, of the array to draw."""
    if isinstance(value, PlacementSpec):
        sharding = value.sharding_specs[0]
        mesh = LogicalMesh(tuple(sharding.mesh.axis_sizes), tuple(sharding.mesh.axis_names))
        spec = from_partition_spec(sharding.spec, len(value.aval.shape))
        return "", tuple(value.aval.shape), spec, mesh, array_text(value.aval)
    if plan is None:
        raise ValueError(
            "which mesh the value lies on is known to its plan; call picture(value, plan)"
        )
    stages = (plan if isinstance(plan, Plan) else plan.plan).stages
    if isinstance(value, str):
        value, stage = _find(value, stages)
    else:
        owners = [s for s in stages if value in (*s.inputs, *s.outputs, *s.constraints)]
        if not owners:
            raise ValueError(
                f"{_name(value)} with spec {spec_text(partition_spec(value.spec))} is not of this"
                " plan"
            )
        stage = owners[0]
    return _name(value), value.shape, value.spec, stage.mesh, array_text(value)


def _find(path: str, stages: Sequence[Stage]) -> tuple[Value, Stage]:
    by_path = {
        value.path: (value, stage) for stage in stages for value in (*stage.inputs, *stage.outputs)
    }
    if path not in by_path:
        raise ValueError(
            f"the plan has no input or output {path!r}; did you mean {nearest(path, by_path)}?"
        )
    return by_path[path]


def _name(value: Value | ShardingConstraint) -> str:
    return value.path if isinstance(value, Value) else f"#{value.eqn} {value.name}"


def _drawn_dims(spec: Spec) -> tuple[int, ...]:
    """Return the dims to draw, in order: the last two sharded ones, else the last other ones."""
    sharded = [dim for dim, axes in enumerate(spec) if axes]
    unsharded = [dim for dim, axes in enumerate(spec) if not axes]
    return tuple(sorted((unsharded + sharded)[-2:]))


def _legend(
    shape: Sequence[int], spec: Spec, drawn: Sequence[int], mesh: LogicalMesh
) -> tuple[str, ...]:
    """Return the dim, its size and its mesh axes for the vertical and horizontal direction."""

    def describe(dim: int) -> str:
        axes = spec[dim]
        split = f" in {mesh.ways(axes)} over {', '.join(axes)}" if axes else ""
        return f"dim {dim} of {shape[dim]}{split}"

    match tuple(drawn):
        case (down, across):
            return f"down: {describe(down)}", f"across: {describe(across)}"
        case (across,):
            return (f"across: {describe(across)}",)
        case _:
            return ()


def _grid(spec: Spec, drawn: Sequence[int], part_by_dim: dict[int, int], mesh: LogicalMesh) -> Grid:
    """Return the devices of each piece, where dims that are not drawn have the given parts."""
    rows, columns = (1, 1, *(mesh.ways(spec[dim]) for dim in drawn))[-2:]
    devices: dict[tuple[int, ...], list[int]] = {}
    for device in range(mesh.num_devices):
        coordinates = dict(zip(mesh.axis_names, mesh.position(device), strict=True))
        part = [_part(axes, coordinates, mesh) for axes in spec]
        if all(part[dim] == i for dim, i in part_by_dim.items()):
            devices.setdefault((0, 0, *(part[dim] for dim in drawn))[-2:], []).append(device)
    return [[_ranges(devices[row, column]) for column in range(columns)] for row in range(rows)]


def _part(axes: Sequence[str], coordinates: dict[str, int], mesh: LogicalMesh) -> int:
    """Return the part of a dim that a device stores; the first axis of the dim is the major one."""
    return sum(
        coordinates[axis] * prod(mesh.sizes[a] for a in axes[i + 1 :])
        for i, axis in enumerate(axes)
    )


def _ranges(devices: Sequence[int]) -> str:
    """Return numbers with runs abbreviated: `0-3,8` for 0, 1, 2, 3, 8."""
    runs = []
    for _, run in groupby(enumerate(devices), key=lambda item: item[1] - item[0]):
        ids = [device for _, device in run]
        runs.append(f"{ids[0]}-{ids[-1]}" if len(ids) > 2 else ",".join(map(str, ids)))
    return ",".join(runs)


def _text(caption: str, legend: Sequence[str], grid: Grid) -> str:
    width = max(5, *(len(cell) + 2 for row in grid for cell in row))
    rule = "─" * width
    columns = len(grid[0])

    def border(left: str, middle: str, right: str) -> str:
        return left + middle.join([rule] * columns) + right

    body = [f"│{'│'.join(cell.center(width) for cell in row)}│" for row in grid]
    lines = [border("┌", "┬", "┐")]
    for i, row in enumerate(body):
        lines += [row, border("└", "┴", "┘") if i == len(body) - 1 else border("├", "┼", "┤")]
    return "\n".join([*filter(None, [caption, "; ".join(legend)]), *lines])


def _html(caption: str, legend: Sequence[str], grid: Grid) -> str:
    names = list(dict.fromkeys(cell for row in grid for cell in row))
    colour = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    style = "border:1px solid #666;padding:0.6em 1em;text-align:center"
    rows = (
        "<tr>"
        + "".join(
            f'<td style="{style};background:{colour[cell]}">{escape(cell)}</td>' for cell in row
        )
        + "</tr>"
        for row in grid
    )
    text = escape("; ".join(filter(None, [caption, *legend])))
    return (
        f'<table style="border-collapse:collapse"><caption>{text}</caption>{"".join(rows)}</table>'
    )
