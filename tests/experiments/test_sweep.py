import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.sweep import make_sweep

DEFAULT = Path(__file__).parents[2] / "experiments/config/default.yaml"


@pytest.fixture
def config() -> Any:
    """The default configuration, to be spoilt."""
    return copy.deepcopy(yaml.safe_load(DEFAULT.read_text()))


def test_the_default_sweep_covers_models_meshes_and_strategies(config: Any) -> None:
    sweep = make_sweep(config)
    platforms = {"simulated": {"p3.16xlarge", "dgx_a100_80"}, "measured": {"cpu-virtual"}}
    for source, jobs in sweep.jobs.items():
        assert {job.platform for job in jobs.values()} == platforms[source]
        assert {(job.model, job.mesh) for job in jobs.values() if job.platform != "dgx_a100_80"} == {
            (model, mesh) for model in ("mlp", "gpt") for mesh in ((1,), (2,), (4,), (8,), (2, 4))
        }
    assert [job.mesh for job in sweep.jobs["simulated"].values() if job.platform == "dgx_a100_80"] == [(8,)]
    assert sweep["p3.16xlarge/gpt-125M/2x4"].strategies == (
        "data",
        "zero2",
        "zero3",
        "shard",
        "pipeline",
        "manual_tensor_2d",
        "manual_megatron",
        "schedule_megatron",
        "schedule_attention",
    )
    a100 = sweep["dgx_a100_80/gpt-350M/8"].strategies
    assert {"shard", "schedule_megatron", "schedule_attention"} <= set(a100)
    assert not any(name.startswith("schedule") for name in sweep["p3.16xlarge/mlp-2048/8"].strategies)
    assert "measured/cpu-virtual/mlp-reduced/8" in sweep.cells
    assert "simulated/p3.16xlarge/gpt-125M" in sweep.figures


def test_serial_runs_on_one_device_and_pmap_along_one_axis(config: Any) -> None:
    jobs = make_sweep(config).jobs["simulated"].values()
    assert {job.mesh for job in jobs if "serial" in job.strategies} == {(1,)}
    assert {job.mesh for job in jobs if "pmap" in job.strategies} == {(1,), (2,), (4,), (8,)}


def test_a_misspelt_key_lists_the_valid_ones(config: Any) -> None:
    config["strategy"] = config.pop("strategies")
    with pytest.raises(
        ValueError,
        match=r"unknown key 'strategy'; did you mean 'strategies'.*valid: collectives, measure, meshes, models",
    ):
        make_sweep(config)


def test_a_misspelt_key_says_where_it_is(config: Any) -> None:
    config["platforms"][1]["clusters"] = "cpu-virtual"
    with pytest.raises(ValueError, match=r"at platforms\.1: unknown key 'clusters'; did you mean 'cluster'"):
        make_sweep(config)


def test_a_value_of_the_wrong_kind_says_where_it_is(config: Any) -> None:
    config["meshes"][0] = [0]
    with pytest.raises(ValueError, match=r"at meshes\.0\.0: 0 is less than the minimum of 1"):
        make_sweep(config)


def test_an_unknown_strategy_lists_the_known_ones(config: Any) -> None:
    config["strategies"].append("zero4")
    with pytest.raises(
        ValueError, match=r"unknown strategy 'zero4'; did you mean 'zero[23]'\? \(valid: data, heuristic, manual_data,"
    ):
        make_sweep(config)


def test_an_unknown_model_lists_the_known_ones(config: Any) -> None:
    config["models"]["gtp"] = config["models"].pop("gpt")
    with pytest.raises(
        ValueError, match=r"unknown model 'gtp'; did you mean 'gpt'\? \(valid: .*gpt, llama, lstm, mlp.*\)"
    ):
        make_sweep(config)


def test_an_unknown_size_lists_the_known_ones(config: Any) -> None:
    config["platforms"][0]["models"]["gpt"] = "125B"
    with pytest.raises(
        ValueError, match=r"unknown size of gpt '125B'; did you mean '125M'\? \(valid: 125M, 350M, reduced\)"
    ):
        make_sweep(config)


def test_an_unknown_cluster_lists_the_known_ones(config: Any) -> None:
    config["platforms"][0]["cluster"] = "p3.16xl"
    with pytest.raises(ValueError, match=r"unknown cluster 'p3.16xl'.*p3\.16xlarge"):
        make_sweep(config)


def test_a_mesh_larger_than_the_cluster_is_refused_before_anything_runs(config: Any) -> None:
    config["meshes"] = [[4, 4]]
    with pytest.raises(ValueError, match=r"mesh \(4, 4\) has 16 devices, but p3.16xlarge only 8"):
        make_sweep(config)


def test_a_cluster_of_ones_own_is_named_by_its_file(config: Any, tmp_path: Path) -> None:
    shipped = DEFAULT.parents[2] / "simulator/clusters/p3.16xlarge.yaml"
    own = tmp_path / "ours.yaml"
    own.write_text(shipped.read_text())
    config["platforms"] = [{"cluster": str(own), "source": "simulated", "models": {"mlp": "reduced"}}]
    assert "simulated/ours/mlp-reduced/2x4" in make_sweep(config).cells


def test_two_clusters_of_the_same_name_are_refused(config: Any, tmp_path: Path) -> None:
    shipped = DEFAULT.parents[2] / "simulator/clusters/p3.16xlarge.yaml"
    config["platforms"] = []
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "ours.yaml").write_text(shipped.read_text())
        cluster = str(tmp_path / folder / "ours.yaml")
        config["platforms"].append({"cluster": cluster, "source": "simulated", "models": {"mlp": "reduced"}})
    with pytest.raises(ValueError, match="two clusters are called 'ours'"):
        make_sweep(config)
