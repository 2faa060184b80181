"""What the results of the workflow depend on, beside their inputs: the code, and the descriptions of clusters.

Snakemake reruns a rule when an input or a parameter changes, but does not see what a script imports.
"""

from functools import cache
from hashlib import sha256
from pathlib import Path

from simulator.files import read_yaml
from simulator.hardware.cluster import cluster_names, device_names

ROOT = Path(__file__).parent.parent


@cache
def code_hash(*packages: str) -> str:
    """Return a hash of the Python files of packages, as they are now: a rule with it as a parameter runs again when one changes."""
    digest = sha256()
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT)}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


CODE = "autopar", "simulator", "experiments"
"""The packages that results are made with."""


def cluster_files(cluster: str) -> list[str]:
    """The YAML file of a cluster (a shipped one's name, or a path) and that of its device."""
    path = (
        ROOT / "simulator/hardware/clusters" / f"{cluster}.yaml"
        if cluster in cluster_names()
        else Path(cluster)
    )
    device = read_yaml(path)["device"]
    if not isinstance(device, str):
        return [str(path)]
    shipped = ROOT / "simulator/hardware/devices" / f"{device}.yaml"
    return [str(path), str(shipped if device in device_names() else path.parent / device)]
