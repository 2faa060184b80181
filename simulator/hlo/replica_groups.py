"""Which devices a collective connects: the notations of `replica_groups` and `source_target_pairs`.

    {{0,1},{2,3}}                       listed
    {}                                  all devices
    [4,2]<=[2,4]T(1,0)                  0 ... 7 as (2, 4), transposed, regrouped as 4 groups of 2
    mesh['x'=2,'y'=4] {'y'}             along axes of a mesh, here {{0,1,2,3},{4,5,6,7}}; `'y':(2)2` is a part of an axis

The last is xla/hlo/ir/mesh_and_axis.cc: an axis of size n, seen as (pre, size, rest), is split and `size` taken.
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
    """The groups of devices (or, for a collective_permute, the pairs) that `instruction` names.

    Raises:
        HloError: they can't be read, or are not of different devices from 0 to `num_devices` - 1.
    """
    for key in ("replica_groups=", "source_target_pairs="):
        _, found, text = instruction.attributes.partition(key)
        if found:
            break
    else:
        return (tuple(range(num_devices)),)
    pairs = key == "source_target_pairs="
    try:
        groups = _read(text, num_devices)
    except (LookupError, ValueError) as error:
        raise instruction.error(
            f"device groups {text[:80]!r} can't be read: {error}; expected e.g. {_EXAMPLES} (further notations go into"
            " simulator/hlo/replica_groups.py)"
        ) from None
    for group in groups:
        different = len(group) == 2 if pairs else len(set(group)) == len(group)
        if not group or not different or max(group) >= num_devices:
            what = "pairs of devices" if pairs else "different devices"
            raise instruction.error(
                f"device groups {text[:80]!r} have {group} among them; expected {what} from 0 to {num_devices - 1}, as"
                " num_partitions= and replica_count= in the first line count them"
            )
    return groups


def _read(text: str, num_devices: int) -> Groups:
    if found := _LISTED.match(text):
        groups = tuple(_integers(group) for group in re.findall(r"\{([\d,]*)\}", found[1]))
        return groups or (tuple(range(num_devices)),)
    if (found := _IOTA.match(text)) and found[1]:
        return _as_groups(_iota(found, num_devices).reshape(_integers(found[1])))
    if found := _MESH.match(text):
        return _mesh_groups(found[1], found[2], found[3], num_devices)
    raise ValueError("the notation is not known")


def _mesh_groups(mesh: str, device_ids: str | None, axes: str, num_devices: int) -> Groups:
    sizes = {name: int(size) for name, size in _SIZE.findall(mesh)}
    count = _counted(sizes.values(), num_devices)
    strides, stride = {}, count
    for name, size in sizes.items():
        stride //= size
        strides[name] = stride
    # of each: its position within its group, and which group
    inside, outside, group_size = np.zeros(count, int), np.arange(count), 1
    for name, before, part in _AXIS.findall(axes):
        if name not in sizes:
            raise ValueError(
                f"the mesh has no axis {name!r}, but {', '.join(map(repr, sizes)) or 'none'}"
            )
        size = int(part or sizes[name])
        if not size or sizes[name] % (int(before or 1) * size):
            raise ValueError(f"axis {name!r} of size {sizes[name]} has no part ({before}){part}")
        stride = strides[name] * sizes[name] // (int(before or 1) * size)
        coordinate = np.arange(count) // stride % size
        inside, outside, group_size = (
            inside * size + coordinate,
            outside - coordinate * stride,
            group_size * size,
        )
    order = np.lexsort((inside, outside))
    if device_ids:
        iota = _IOTA.match(device_ids)
        order = (
            _iota(iota, num_devices).ravel()
            if iota and iota[3]
            else np.array(_integers(device_ids))
        )[order]
    return _as_groups(order.reshape(-1, group_size))


def _iota(found: re.Match[str], num_devices: int) -> np.ndarray:
    sizes = _integers(found[2])
    devices = np.arange(_counted(sizes, num_devices)).reshape(sizes)
    return devices.transpose(_integers(found[3])) if found[3] else devices


def _counted(sizes: Collection[int], num_devices: int) -> int:
    """The devices of a mesh."""
    count = math.prod(sizes)
    if not 0 < count <= num_devices:
        raise ValueError(f"they are of {count} devices, the module of {num_devices}")
    return count


def _as_groups(rows: np.ndarray) -> Groups:
    return tuple(tuple(int(device) for device in row) for row in rows)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))
