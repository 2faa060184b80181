"""Files of clusters: the shipped ones by name, and others by path."""

from pathlib import Path

from simulator.files import brief
from simulator.hardware.description import ClusterError, read
from simulator.hardware.device import device_path

_CLUSTERS = Path(__file__).parent / "clusters"
_HETEROGENEOUS = _CLUSTERS / "heterogeneous"


def cluster_names() -> tuple[str, ...]:
    """Return the names of the shipped clusters of equal hosts."""
    return tuple(sorted(path.stem for path in _CLUSTERS.glob("*.yaml")))


def heterogeneous_cluster_names() -> tuple[str, ...]:
    """Return the names of the shipped heterogeneous clusters."""
    return tuple(sorted(path.stem for path in _HETEROGENEOUS.glob("*.yaml")))


def cluster_path(name_or_path: str | Path, beside: Path | None = None) -> Path:
    """Return the file of a cluster.

    Args:
        name_or_path: the name of a shipped cluster, or the path of a YAML file.
        beside: a file to whose folder the path is relative; the working folder by default.

    Raises:
        ClusterError: it is neither a shipped cluster nor a path of a YAML file.
    """
    for names, folder in (
        (cluster_names(), _CLUSTERS),
        (heterogeneous_cluster_names(), _HETEROGENEOUS),
    ):
        if str(name_or_path) in names:
            return folder / f"{name_or_path}.yaml"
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        raise ClusterError(
            f"unknown cluster {brief(str(name_or_path))}; expected one of "
            f"{', '.join(cluster_names() + heterogeneous_cluster_names())}, or a path to a .yaml "
            "file"
        )
    return path if beside is None else beside.parent / path


def cluster_files(name_or_path: str | Path) -> tuple[Path, ...]:
    """Return the files that describe a cluster of equal hosts: its own, and its device's.

    Args:
        name_or_path: a shipped cluster or the path of another. A cluster that describes its device
            itself has one file.

    Raises:
        ClusterError: there is no such cluster, or its file can't be read.
    """
    path = cluster_path(name_or_path)
    device = read(path).get("device")
    return (path, device_path(device, path)) if isinstance(device, str) else (path,)
