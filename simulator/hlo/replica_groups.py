"""Groups of devices of a collective: the notations of `replica_groups` and `source_target_pairs`.

    {{0,1},{2,3}}               a list
    {}                          all devices
    [4,2]<=[2,4]T(1,0)          0 ... 7 as (2, 4), transposed, regrouped as 4 groups of 2
    mesh['x'=2,'y'=4] {'y'}     along axes of a mesh, here {{0,1,2,3},{4,5,6,7}}
    mesh['x'=2,'y'=4] {'y':(2)2}
                                along a part of an axis

A part of an axis is that of xla/hlo/ir/mesh_and_axis.cc: `'y':(pre)size` reshapes the axis to (pre,
size, rest), and takes `size`.
"""

import math
import re
from collections.abc import Collection

import numpy as np

from simulator.hlo.text import Instruction
from simulator.work import Groups

_LISTED = re.compile(r"\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"(?:\[([\d,]+)\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{(.*?)\}")
_EXAMPLES = "{{0,1},{2,3}}, [4,2]<=[2,4]T(1,0) or mesh['x'=2,'y'=4] {'y'}"
_SIZE = re.compile(r"'?([^',=]+)'?=(\d+)")
_AXIS = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?'?")


def groups_of(instruction: Instruction, num_devices: int) -> Groups:
    """Return the groups of devices of a collective, or the pairs of a collective_permute.

    Args:
        instruction: the collective.
        num_devices: devices of the module.

    Raises:
        HloError: the notation is unknown, or the groups are not of different devices from 0 to
            `num_devices` - 1.
    """
    for key in ("replica_groups=", "source_target_pairs="):
        _, key_found, text = instruction.attributes.partition(key)
        if key_found:
            break
    else:
        return (tuple(range(num_devices)),)
    pairs = key == "source_target_pairs="
    try:
        groups = _read(text, num_devices)
    except (LookupError, ValueError) as error:
        raise instruction.error(
            f"device groups {text[:80]!r} can't be read: {error}; expected e.g. {_EXAMPLES} "
            "(further notations go into simulator/hlo/replica_groups.py)"
        ) from None
    for group in groups:
        different = len(group) == 2 if pairs else len(set(group)) == len(group)
        if not group or not different or max(group) >= num_devices:
            what = "pairs of devices" if pairs else "different devices"
            raise instruction.error(
                f"device groups {text[:80]!r} have {group} among them; expected {what} from 0 to "
                f"{num_devices - 1}, as num_partitions= and replica_count= in the first line count "
                "them"
            )
    return groups


def _read(text: str, num_devices: int) -> Groups:
    """Return the groups of a text in one of the notations; a `ValueError` for other texts."""
    if listed := _LISTED.match(text):
        groups = tuple(_integers(group) for group in re.findall(r"\{([\d,]*)\}", listed[1]))
        return groups or (tuple(range(num_devices)),)
    if (iota := _IOTA.match(text)) and iota[1]:
        return _as_groups(_iota(iota, num_devices).reshape(_integers(iota[1])))
    if mesh := _MESH.match(text):
        return _mesh_groups(mesh[1], mesh[2], mesh[3], num_devices)
    raise ValueError("the notation is not known")


def _mesh_groups(mesh: str, device_ids: str | None, axes: str, num_devices: int) -> Groups:
    """Return the groups along axes of a mesh."""
    sizes = {name: int(size) for name, size in _SIZE.findall(mesh)}
    count = _device_count(sizes.values(), num_devices)
    strides = {}
    stride = count
    for name, size in sizes.items():
        stride //= size
        strides[name] = stride
    position = np.zeros(count, int)  # of each device within its group
    group = np.arange(count)  # number of the group of each device
    group_size = 1
    for name, before, part in _AXIS.findall(axes):
        if name not in sizes:
            raise ValueError(
                f"the mesh has no axis {name!r}, but {', '.join(map(repr, sizes)) or 'none'}"
            )
        size = int(part or sizes[name])
        if not size or sizes[name] % (int(before or 1) * size):
            raise ValueError(
                f"axis {name!r} of size {sizes[name]} has no part ({before}){part}; the sizes of"
                " its parts divide its size"
            )
        stride = strides[name] * sizes[name] // (int(before or 1) * size)
        coordinate = np.arange(count) // stride % size
        position = position * size + coordinate
        group = group - coordinate * stride
        group_size *= size
    order = np.lexsort((position, group))
    if device_ids:
        iota = _IOTA.match(device_ids)
        order = (
            _iota(iota, num_devices).ravel()
            if iota and iota[3]
            else np.array(_integers(device_ids))
        )[order]
    return _as_groups(order.reshape(-1, group_size))


def _iota(notation: re.Match[str], num_devices: int) -> np.ndarray:
    """Return device ids 0, 1, ... in the shape of an iota notation, transposed if it says so."""
    sizes = _integers(notation[2])
    devices = np.arange(_device_count(sizes, num_devices)).reshape(sizes)
    return devices.transpose(_integers(notation[3])) if notation[3] else devices


def _device_count(sizes: Collection[int], num_devices: int) -> int:
    """Return the number of devices of a mesh; a `ValueError` if the module has fewer."""
    count = math.prod(sizes)
    if not 0 < count <= num_devices:
        raise ValueError(
            f"given groups of {count} devices; expected 1 to {num_devices}, as in the module"
        )
    return count


def _as_groups(rows: np.ndarray) -> Groups:
    return tuple(tuple(int(device) for device in row) for row in rows)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))
