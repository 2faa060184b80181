"""The default configuration is a sweep, and mistakes in one are errors before anything runs."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.sweep import make_sweep

DEFAULT = Path(__file__).parents[2] / "experiments/config/default.yaml"


@pytest.fixture
def config() -> Any:
    """Return the default configuration, for tests to change."""
    return copy.deepcopy(yaml.safe_load(DEFAULT.read_text()))


def test_the_default_sweep_covers_models_meshes_and_strategies(config: Any) -> None:
    sweep = make_sweep(config)
    platforms = {"simulated": {"p3.16xlarge", "dgx_a100_80"}, "measured": {"cpu-virtual"}}
    jobs = list(sweep.jobs.values())
    for source, names in platforms.items():
        assert {job.platform for job in jobs if job.source == source} == names
    for platform in ("p3.16xlarge", "cpu-virtual"):
        assert {(job.model, job.mesh) for job in jobs if job.platform == platform} == {
            (model, mesh) for model in ("mlp", "gpt") for mesh in ((1,), (2,), (4,), (8,), (2, 4))
        }
    assert [job.mesh for job in jobs if job.platform == "dgx_a100_80"] == [(8,)]
    assert sweep.jobs["simulated/p3.16xlarge/gpt-125M/2x4"].strategies == (
        "data",
        "zero2",
        "zero3",
        "shard",
        "pipeline",
        "pipeshard",
        "manual_tensor_2d",
        "manual_megatron",
        "schedule_megatron",
        "schedule_attention",
    )
    a100 = sweep.jobs["simulated/dgx_a100_80/gpt-350M/8"].strategies
    assert {"shard", "schedule_megatron", "schedule_attention"} <= set(a100)
    assert not any(
        name.startswith("schedule")
        for name in sweep.jobs["simulated/p3.16xlarge/mlp-2048/8"].strategies
    )
    assert "measured/cpu-virtual/mlp-reduced/8/shard" in sweep.cells
    assert sweep.figures["simulated/dgx_a100_80/gpt-350M"] == ["simulated/dgx_a100_80/gpt-350M/8"]


def test_serial_runs_on_one_device_and_pmap_along_one_axis(config: Any) -> None:
    jobs = make_sweep(config).jobs.values()
    assert {job.mesh for job in jobs if "serial" in job.strategies} == {(1,)}
    assert {job.mesh for job in jobs if "pmap" in job.strategies} == {(1,), (2,), (4,), (8,)}


def test_a_misspelt_key_lists_the_valid_ones(config: Any) -> None:
    config["strategy"] = config.pop("strategies")
    with pytest.raises(
        ValueError,
        match=r"unknown key 'strategy'; did you mean 'strategies'.*valid: collectives, measure, ",
    ):
        make_sweep(config)


def test_a_misspelt_key_says_where_it_is(config: Any) -> None:
    config["platforms"][1]["clusters"] = "cpu-virtual"
    with pytest.raises(
        ValueError, match=r"at platforms\.1: unknown key 'clusters'; did you mean 'cluster'"
    ):
        make_sweep(config)


def test_a_value_of_the_wrong_kind_says_where_it_is(config: Any) -> None:
    config["meshes"][0] = [0]
    with pytest.raises(ValueError, match=r"at meshes\.0\.0: 0 is less than the minimum of 1"):
        make_sweep(config)


def test_an_unknown_strategy_lists_the_known_ones(config: Any) -> None:
    config["strategies"].append("zero4")
    with pytest.raises(
        ValueError,
        match=r"unknown strategy 'zero4'; did you mean 'zero[23]'\? \(valid: data, heuristic, ",
    ):
        make_sweep(config)


def test_an_unknown_model_lists_the_known_ones(config: Any) -> None:
    config["models"]["gtp"] = config["models"].pop("gpt")
    with pytest.raises(
        ValueError,
        match=r"unknown model 'gtp'; did you mean 'gpt'\? \(valid: .*gpt, llama, lstm, mlp.*\)",
    ):
        make_sweep(config)


def test_an_unknown_size_lists_the_known_ones(config: Any) -> None:
    config["platforms"][0]["models"]["gpt"] = "125B"
    with pytest.raises(
        ValueError,
        match=r"unknown size of gpt '125B'; did you mean '125M'\? \(valid: 125M, 350M, reduced\)",
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
    shipped = DEFAULT.parents[2] / "simulator/hardware/clusters/p3.16xlarge.yaml"
    own = tmp_path / "ours.yaml"
    own.write_text(shipped.read_text())
    config["platforms"] = [
        {"cluster": str(own), "source": "simulated", "models": {"mlp": "reduced"}}
    ]
    assert "simulated/ours/mlp-reduced/2x4" in make_sweep(config).jobs


def test_two_clusters_of_the_same_name_are_refused(config: Any, tmp_path: Path) -> None:
    shipped = DEFAULT.parents[2] / "simulator/hardware/clusters/p3.16xlarge.yaml"
    config["platforms"] = []
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "ours.yaml").write_text(shipped.read_text())
        cluster = str(tmp_path / folder / "ours.yaml")
        config["platforms"].append(
            {"cluster": cluster, "source": "simulated", "models": {"mlp": "reduced"}}
        )
    with pytest.raises(ValueError, match="two clusters are called 'ours'"):
        make_sweep(config)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("models.mlp.reduced.dim", "256", "model mlp: dim: given '256'; expected a valid integer"),
        ("models.mlp.reduced.dim", True, "model mlp: dim: given True; expected a valid integer"),
        (
            "models.mlp.reduced.batch_size",
            0,
            "model mlp: batch_size: given 0; expected a whole number of 1 to",
        ),
        (
            "models.gpt.reduced.compute_dtype",
            "float8",
            "model gpt: compute_dtype: given 'float8'; expected 'float32', ",
        ),
        (
            "models.gpt.reduced.num_heads",
            7,
            "model gpt: num_heads: given 7; expected a divisor of hidden_size, which is 128",
        ),
        ("models.mlp", {}, "at models.mlp: {} should be non-empty"),
        (
            "models.mlp",
            {2048: {}},
            "models.mlp: a key 2048; expected a text, in quotes where it is a number",
        ),
        ("models.mlp.re/duced", {}, "at models.mlp: a size called 're/duced'; expected letters"),
        ("strategies", [], "at strategies: [] should be non-empty"),
        ("strategies", ["shard", "shard"], "has non-unique elements"),
        (
            "strategies",
            ["serial"],
            "at platforms.1: none of the strategies serial runs any of its models",
        ),
        ("meshes.0", [1.0], "at meshes.0.0: 1.0 is not of type 'integer'"),
        ("platforms.0.models", {}, "at platforms.0.models: {} should be non-empty"),
        ("platforms.0.meshes", [[3, 4]], "mesh (3, 4) has 12 devices, but p3.16xlarge only 8"),
        (
            "platforms.2.source",
            "simulated",
            "cpu-virtual can't be simulated: 'one of 8 virtual CPU devices' has no xla_target",
        ),
        ("collectives.cluster", "cpu-virtul", "unknown cluster 'cpu-virtul'"),
        ("collectives.group_sizes", [2, 16], "a group of 16 devices, but cpu-virtual has 8"),
        ("collectives.group_sizes", [2, 2], "has non-unique elements"),
        (
            "collectives.sizes_kib",
            [float("inf")],
            "at collectives.sizes_kib.0: inf is not of type 'number'",
        ),
        (
            "collectives.sizes_kib",
            [1],
            "3 group_sizes and 1 sizes_kib; expected 5 combinations at least",
        ),
        ("collectives.sizes_kib", [1, 1e12], "given 1000000000000.0, which is more than the"),
        ("measure.repeat", 2.0, "at measure.repeat: 2.0 is not of type 'integer'"),
        ("published", "nowhere.yaml", "nowhere.yaml: can't be read"),
        (
            "published",
            "experiments/config/smoke.yaml",
            "experiments/config/smoke.yaml, at the top level: ",
        ),
    ],
)
def test_a_mistake_is_an_error_before_anything_runs(
    config: Any, path: str, value: Any, message: str
) -> None:
    *sections, last = path.split(".")
    inner = config
    for section in sections:
        inner = inner[int(section) if isinstance(inner, list) else section]
    inner[int(last) if isinstance(inner, list) else last] = value
    with pytest.raises(ValueError, match=re.escape(message)):
        make_sweep(config)


def test_a_mesh_of_parts_of_hosts_is_refused(config: Any, tmp_path: Path) -> None:
    fields = yaml.safe_load(
        (DEFAULT.parents[2] / "simulator/hardware/clusters/dgx_a100_80.yaml").read_text()
    )
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(fields | {"hosts": 2}))
    config["platforms"] = [
        {"cluster": str(tmp_path / "two.yaml"), "source": "simulated", "models": {"mlp": "reduced"}}
    ]
    config["meshes"] = [[12]]
    with pytest.raises(ValueError, match="12 devices are not whole hosts of 8"):
        make_sweep(config)
