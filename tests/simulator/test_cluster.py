"""Cluster files: the shipped ones load, and errors name file, field and expected value."""

import re
from pathlib import Path

import pytest
import yaml

from simulator.costs.collective_model import CollectiveModel
from simulator.hardware.cluster import Cluster
from simulator.hardware.cluster_paths import cluster_files, cluster_names
from simulator.hardware.collective_profile import SizeCurve
from simulator.hardware.description import ClusterError
from simulator.hardware.device import device_names
from tests.simulator.toy_clusters import DEVICE

CLUSTER = {
    "name": "toy",
    "description": "two hosts of four",
    "source": "made up",
    "device": DEVICE,
    "hosts": 2,
    "devices_per_host": 4,
    "nics_per_host": 2,
    "collective_launch_us": 0,
    "intra_host": {"bandwidth_gb_per_s": 100, "latency_us": 0},
    "inter_host": {"bandwidth_gb_per_s": 10, "latency_us": 0},
}


def load(folder: Path, **changes: object) -> Cluster:
    path = folder / "toy.yaml"
    fields = {key: value for key, value in (CLUSTER | changes).items() if value != "left out"}
    path.write_text(yaml.safe_dump(fields))
    return Cluster.load(path)


@pytest.mark.parametrize("name", cluster_names())
def test_every_shipped_cluster_loads_and_has_the_name_of_its_file(name: str) -> None:
    cluster = Cluster.load(name)
    assert cluster.name == name
    assert (cluster.device.xla_target is None) == (cluster.device.kind == "cpu")


def test_a_dozen_clusters_of_gpus_are_shipped() -> None:
    gpus = [
        cluster for cluster in map(Cluster.load, cluster_names()) if cluster.device.kind == "gpu"
    ]
    assert len(gpus) >= 12
    assert all(cluster.source and cluster.device.source for cluster in gpus)
    line_rates = {  # nominal Gb/s of a host's NICs; clusters reach 0.9 to 0.97 of it
        "dgx_h200": 3200,
        "p4d.24xlarge": 400,
        "p4de.24xlarge": 400,
        "p5.48xlarge": 3200,
        "p5en.48xlarge": 3200,
        "a3-highgpu-8g": 800,
        "a100_pcie_4": 100,
        "gb200_nvl72": 72 * 400,
    }
    for name, rate in line_rates.items():
        cluster = Cluster.load(name)
        assert cluster.inter_host is not None
        assert (
            0.89 < 8 * cluster.nics_per_host * cluster.inter_host.bandwidth_gb_per_s / rate < 0.97
        )


def test_links_of_newer_hosts_are_faster() -> None:
    seconds = {
        name: CollectiveModel(cluster).seconds(
            "all_reduce", 2**30, CollectiveModel(cluster).ring(4)
        )
        for name in ("a100_pcie_4", "dgx_a100_80", "gb200_nvl72")
        for cluster in [Cluster.load(name)]
    }
    assert seconds["a100_pcie_4"] > 5 * seconds["dgx_a100_80"] > 10 * seconds["gb200_nvl72"]


def test_the_clusters_of_the_sweep_are_shipped() -> None:
    assert {"p3.16xlarge", "dgx_a100_80", "dgx_h100", "h200", "cpu-virtual"} <= set(cluster_names())
    assert [Cluster.load(name).num_devices for name in ("p3.16xlarge", "h200", "cpu-virtual")] == [
        8,
        1,
        8,
    ]


def test_a_device_is_given_by_name_by_file_or_inline(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(DEVICE))
    assert load(tmp_path, device="mine.yaml") == load(tmp_path)
    assert load(tmp_path, device="v100_sxm2_16gb").device == Cluster.load("p3.16xlarge").device


def test_profiles_are_given_by_name_by_file_or_inline(tmp_path: Path) -> None:
    a100 = Cluster.load("dgx_a100_80")
    assert a100.collectives is not None
    (tmp_path / "links.yaml").write_text(
        yaml.safe_dump(a100.collectives.model_dump(exclude_none=True))
    )
    (tmp_path / "kernels.yaml").write_text(yaml.safe_dump(a100.device.kernels.model_dump()))
    left_out = {"intra_host": "left out", "collective_launch_us": "left out"}
    for links in ("a100", "links.yaml", a100.collectives.model_dump()):
        measured = load(tmp_path, collectives=links, **left_out)
        assert (measured.collectives, measured.link) == (a100.collectives, a100.link)
    for kernels in ("a100_sxm4_80gb", "kernels.yaml", a100.device.kernels.model_dump()):
        assert (
            load(tmp_path, device=DEVICE | {"kernels": kernels}).device.kernels
            == a100.device.kernels
        )


def test_kinds_without_measurements_use_the_all_reduce_curve_or_the_link(tmp_path: Path) -> None:
    link = Cluster.load("dgx_a100_80").intra_host
    curve = SizeCurve(launch_us=1, hop_us=1, half_size_mb=1, bandwidth_gb_per_s=1)
    profile = {"gpu": "toy", "source": "made up", "all_reduce": curve.model_dump()}
    measured = load(tmp_path, collectives=profile | {"link": load(tmp_path).link.model_dump()})
    assert measured.curves.curve("all_gather") == curve
    implied = measured.curves.curve("collective_permute")
    assert (
        implied.bandwidth_gb_per_s
        == measured.intra_host.bandwidth_gb_per_s
        != curve.bandwidth_gb_per_s
    )
    assert load(tmp_path).curves.curve("all_reduce") == implied
    assert (
        Cluster.load("dgx_a100_80").curves.curve("collective_permute").bandwidth_gb_per_s
        == link.bandwidth_gb_per_s
    )


def test_devices_are_numbered_by_host_and_spread_over_nics(tmp_path: Path) -> None:
    cluster = load(tmp_path)
    assert [cluster.host_of(i) for i in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [cluster.nic_of(i) for i in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    with pytest.raises(ClusterError, match=r"device 8 is not in cluster 'toy': it has 8 devices"):
        cluster.host_of(8)


def test_sub_clusters_are_parts_of_a_host_or_whole_hosts(tmp_path: Path) -> None:
    cluster = load(tmp_path)
    half = cluster.first_devices(2)
    assert (half.hosts, half.devices_per_host, half.nics_per_host) == (1, 2, 1)
    assert cluster.first_devices(8) == cluster
    assert cluster.with_size(hosts=16).num_devices == 64
    for count, text in (
        (6, "6 devices are not whole hosts of 4"),
        (9, "9 devices asked of 'toy', which has 8"),
    ):
        with pytest.raises(ClusterError, match=text):
            cluster.first_devices(count)
    with pytest.raises(ClusterError, match="has 4 devices per host, not 5"):
        cluster.with_size(devices_per_host=5)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hosts": "left out"}, "hosts: missing; expected a whole number"),
        (
            {"intra_host": "left out"},
            "intra_host: missing; expected a section with bandwidth_gb_per_s, ",
        ),
        ({"hosts": -2}, "hosts: given -2; expected greater than 0"),
        ({"hosts": "two"}, "hosts: given 'two'; expected a whole number"),
        ({"hosts": True}, "hosts: given True; expected a whole number"),
        ({"rails": 1}, "rails: given 1; expected true or false"),
        ({"name": 5}, "name: given 5; expected a text"),
        ({"inter_host": 5}, "inter_host: given 5; expected a section with bandwidth_gb_per_s, "),
        ({"inter_host": "left out"}, "inter_host: missing, but there are 2 hosts"),
        (
            {"device_per_host": 8},
            "device_per_host: unknown field (given 8); did you mean 'devices_per_host'? "
            "valid: name, ",
        ),
        (
            {"intra_host": {"bandwith_gb_per_s": 5, "bandwidth_gb_per_s": 5, "latency_us": 0}},
            "intra_host.bandwith_gb_per_s: unknown field (given 5); "
            "did you mean 'bandwidth_gb_per_s'? "
            "valid: bandwidth_gb_per_s, latency_us, half_size_mb",
        ),
        (
            {"device": DEVICE | {"peak_tflop_per_s": {"bfloat16": 989}}},
            "device.peak_tflop_per_s: unknown type 'bfloat16'; did you mean 'bf16'? "
            "expected HLO's names: pred, ",
        ),
        (
            {"device": DEVICE | {"peak_tflop_per_s": {"fp8": 989}}},
            "device.peak_tflop_per_s: unknown type 'fp8'; ",
        ),
        (
            {
                "device": DEVICE
                | {"kernels": DEVICE["kernels"] | {"efficiency_by_dtype": {"Float32": 0.5}}}
            },
            "device.kernels.efficiency_by_dtype: unknown type 'Float32'; did you mean 'f32'?",
        ),
        (  # names of earlier versions
            {"intra_host": {"slowdown": 1.2, "bandwidth_gb_per_s": 5, "latency_us": 0}},
            "intra_host.slowdown: unknown field (given 1.2); "
            "it is called 'contention_factor' now; valid: ",
        ),
        (
            {"processes": {"at_once": 2.0}},
            "processes.at_once: unknown field (given 2.0); "
            "it is called 'concurrent_instructions' now; ",
        ),
        (  # wrong units
            {"intra_host": {"bandwidth_gbit_per_s": 200, "latency_us": 0}},
            "intra_host.bandwidth_gbit_per_s: unknown field (given 200); "
            "did you mean 'bandwidth_gb_per_s'?",
        ),
        (
            {"intra_host": {"bandwidth_gb_per_s": "25 GB/s", "latency_us": 0}},
            "intra_host.bandwidth_gb_per_s: given '25 GB/s'; expected a number",
        ),
        (
            {"inter_host": {"bandwidth_gb_per_s": float("nan"), "latency_us": 0}},
            "inter_host.bandwidth_gb_per_s: given nan; expected a finite number",
        ),
        (
            {"device": DEVICE | {"memory_gb": -16}},
            "device.memory_gb: given -16; expected greater than 0",
        ),
        (
            {"device": DEVICE | {"kernels": {"efficiency": 1.0, "memory_efficiency": 85}}},
            "device.kernels.memory_efficiency: given 85; expected less than or equal to 1",
        ),
        (
            {"device": DEVICE | {"kernels": "v1000"}},
            "kernels: unknown profile 'v1000'; expected one of a100_sxm4_80gb, ",
        ),
        (
            {"collectives": "v1000"},
            "collectives: unknown profile 'v1000'; expected one of a100, b200, gb200, h100, h200, "
            "a path to a .yaml file, or the fields themselves",
        ),
        (
            {"device": DEVICE | {"peak_tflop_per_s": {"f32": "fast"}}},
            "device.peak_tflop_per_s.f32: given 'fast'; expected a number",
        ),
        (
            {"device": DEVICE | {"reserve_gb": 20.0}},
            "device.reserve_gb: given 20.0, expected less than memory_gb, which is 16",
        ),
        (
            {"device": "v1000"},
            f"device: unknown device 'v1000'; expected one of {', '.join(device_names())}",
        ),
    ],
)
def test_the_error_of_a_wrong_field_has_file_field_and_expectation(
    tmp_path: Path, changes: dict[str, object], expected: str
) -> None:
    with pytest.raises(
        ClusterError, match=rf"toy\.yaml: (2 errors: .* \(2\) )?{re.escape(expected)}"
    ):
        load(tmp_path, **changes)


def test_all_wrong_fields_are_in_one_error(tmp_path: Path) -> None:
    with pytest.raises(ClusterError) as error:
        load(tmp_path, hosts=-1, devices_per_host="left out")
    assert str(error.value).endswith(
        "toy.yaml: 2 errors: (1) hosts: given -1; expected greater than 0"
        " (2) devices_per_host: missing; expected a whole number"
    )


def test_of_many_wrong_fields_the_first_ten_are_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r": 12 errors: \(1\) .* \(11\) 2 more$"):
        load(tmp_path, **{f"field_{number}": 1 for number in range(12)})


def test_errors_of_a_device_file_name_it(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(DEVICE | {"cores": 0}))
    with pytest.raises(ClusterError, match=r"mine\.yaml: cores: given 0; expected greater than 0"):
        load(tmp_path, device="mine.yaml")
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump({name: value for name, value in DEVICE.items() if name != "kind"})
    )
    with pytest.raises(ClusterError, match=r"kind: missing; expected 'gpu' or 'cpu'"):
        load(tmp_path, device="mine.yaml")


def test_the_error_of_an_unknown_name_lists_the_clusters() -> None:
    with pytest.raises(
        ClusterError,
        match=r"unknown cluster 'p4'; expected one of .*dgx_a100_80.*p3\.16xlarge.*path",
    ):
        Cluster.load("p4")


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, "can't be read"), ("a: [1", "is not YAML"), ("- 8", r"given \[8\], expected fields")],
)
def test_a_file_without_fields_is_refused(tmp_path: Path, text: str | None, expected: str) -> None:
    path = tmp_path / "bad.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ClusterError, match=expected):
        Cluster.load(path)


def test_a_cluster_is_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Cluster.load("h200").hosts = 2  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("name", cluster_names())
def test_a_shipped_cluster_has_its_own_file_and_that_of_its_device(name):
    own, device = cluster_files(name)
    assert own.stem == name
    assert yaml.safe_load(device.read_text())["name"] == Cluster.load(name).device.name


def test_a_cluster_with_an_inline_device_has_one_file(tmp_path):
    own, device = cluster_files("p3.16xlarge")
    fields = yaml.safe_load(own.read_text())
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(fields | {"device": yaml.safe_load(device.read_text())}))
    assert cluster_files(path) == (path,)
    path.write_text(yaml.safe_dump(fields | {"device": "gpu.yaml"}))
    assert cluster_files(path) == (path, tmp_path / "gpu.yaml")
