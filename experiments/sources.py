"""Which files of the project each rule of the workflow depends on.

Snakemake reruns a rule when an input changes, but does not see what a script imports: the rules take these files as inputs.
"""

from collections.abc import Iterable
from pathlib import Path

from simulator.cluster import cluster_names, device_names
from simulator.files import read_yaml

ROOT = Path(__file__).parent.parent

# What a planned step is run, or predicted, with. Everything else in the two packages has a say in the plan itself.
RUN = (
    "autopar/api.py",
    "autopar/tracing/arguments.py",
    "autopar/runtime/**/*.py",
    "autopar/testing.py",
    "autopar/util.py",
)
PREDICT = (
    "autopar/_plugins.py",
    "autopar/prediction/predicting.py",
    "autopar/lowering/target.py",
    "simulator/engine.py",
    "simulator/hlo/**/*.py",
    "simulator/memory.py",
    "simulator/program.py",
    "simulator/timeline.py",
)

# What single collectives are timed with, and what their curves are fitted with.
COLLECTIVES = (
    "autopar/manual/named_collectives.py",
    "autopar/microbenchmarks.py",
    "autopar/util.py",
    "experiments/measurements/collectives.py",
    "simulator/calibration/fit_collectives.py",
    "simulator/calibration/shipped_profiles.py",
    "simulator/calibration/fit_profiles.py",
    "simulator/collective_profile.py",
    "simulator/files.py",
    "simulator/work.py",
)

CELLS = ("experiments/cells.py", "experiments/isolate.py", "experiments/job.py")
STEPS = ("by_hand/*", "models/*", "planned", "schedules", "strategies", "strategy")
MODELS = tuple(f"experiments/{name}.py" for name in STEPS)


def sources(rule: str) -> list[str]:
    """Paths of the Python files that the results of `rule` depend on, beside those of the rules before it."""
    own = f"experiments/scripts/{rule}.py"
    match rule:
        case "plan":
            planner = set(_paths(["autopar/**/*.py", "simulator/**/*.py"])) - set(_paths([*RUN, *PREDICT]))
            return sorted(planner | set(_paths([own, *CELLS, *MODELS])))
        case "measure":
            return _paths([own, *RUN])
        case "simulate":
            return _paths([own, *PREDICT])
        case "collectives":
            return _paths([own, "experiments/scripts/measure.py", *COLLECTIVES])
        case _:
            return _paths([own, f"experiments/report/{rule}.py"])


def cluster_files(cluster: str) -> list[str]:
    """The YAML file of a cluster (a shipped one's name, or a path) and that of its device."""
    path = ROOT / "simulator/clusters" / f"{cluster}.yaml" if cluster in cluster_names() else Path(cluster)
    device = read_yaml(path)["device"]
    if not isinstance(device, str):
        return [str(path)]
    shipped = ROOT / "simulator/devices" / f"{device}.yaml"
    return [str(path), str(shipped if device in device_names() else path.parent / device)]


def _paths(patterns: Iterable[str]) -> list[str]:
    return sorted({str(path) for pattern in patterns for path in ROOT.glob(pattern)})
