import ast
from pathlib import Path

import pytest

from experiments.sources import COLLECTIVES, PREDICT, ROOT, RUN, cluster_files, sources


def names(rule: str) -> set[str]:
    return {str(Path(path).relative_to(ROOT)) for path in sources(rule)}


def imports(path: str) -> set[str]:
    """Paths of the project's modules that one imports."""
    tree = ast.parse((ROOT / path).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    return {f"{name.replace('.', '/')}.py" for name in modules if (ROOT / f"{name.replace('.', '/')}.py").exists()}


def test_editing_the_clock_reruns_simulations_but_neither_plans_nor_measurements() -> None:
    assert "simulator/engine.py" in names("simulate")
    assert "simulator/engine.py" not in names("plan") | names("measure")


def test_editing_what_things_cost_reruns_plans() -> None:
    assert {"simulator/topology.py", "simulator/compute.py", "simulator/costs.py"} <= names("plan")


def test_editing_the_planner_or_a_model_reruns_plans() -> None:
    assert {"autopar/ir/graph.py", "autopar/sharding/solver.py", "experiments/models/gpt.py"} <= names("plan")


def test_every_module_is_a_source_of_some_rule() -> None:
    modules = {
        str(path.relative_to(ROOT)) for package in ("autopar", "simulator") for path in (ROOT / package).rglob("*.py")
    }
    assert modules <= names("plan") | names("measure") | names("simulate")


def test_collectives_are_timed_again_when_what_they_are_timed_and_fitted_with_changes() -> None:
    timed, fitted = "experiments/measurements/collectives.py", "simulator/calibration/fit_collectives.py"
    needed = imports(timed) | imports(fitted) | imports("simulator/calibration/fit_profiles.py") | {timed, fitted}
    assert "simulator/collective_profile.py" in needed
    assert needed <= names("collectives")


@pytest.mark.parametrize("pattern", [*RUN, *PREDICT, *COLLECTIVES])
def test_every_named_source_exists(pattern: str) -> None:
    assert list(ROOT.glob(pattern))


def test_a_cluster_depends_on_its_own_files() -> None:
    assert [Path(path).name for path in cluster_files("p3.16xlarge")] == ["p3.16xlarge.yaml", "v100_sxm2_16gb.yaml"]
