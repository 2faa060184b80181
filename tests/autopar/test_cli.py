"""The command line prints plans and clusters."""

from typer.testing import CliRunner

import autopar
from autopar.cli import app
from simulator.hardware.cluster import cluster_names, heterogeneous_cluster_names
from tests.steps import mlp_args, mlp_step


def run(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "200"})


def test_a_saved_plan_is_shown(tmp_path):
    plan = autopar.plan_step(mlp_step, mlp_args(), cluster="p3.16xlarge", mesh_shape=(8,))
    plan.save(tmp_path / "plan.json")
    result = run("show", tmp_path / "plan.json")
    assert result.exit_code == 0
    assert "0/params/params/Dense_0/kernel" in result.output


def test_a_file_without_a_plan_is_a_usage_error(tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    result = run("show", tmp_path / "plan.json")
    assert result.exit_code == 2
    assert "plan of version None" in result.output


def test_clusters_are_listed():
    result = run("clusters")
    assert result.exit_code == 0
    assert all(name in result.output for name in cluster_names() + heterogeneous_cluster_names())
    assert "1 x 8 Tesla V100-SXM2-16GB + 1 x 8 NVIDIA A100-SXM4-40GB" in result.output
