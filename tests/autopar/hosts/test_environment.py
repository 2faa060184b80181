"""Checks before hosts are used: versions, devices, ports, environment variables."""

import importlib
import os
import shutil
import socket
from collections.abc import Iterator

import jax
import pytest

import autopar
from autopar.hosts import environment, reservation, session, worker_processes
from autopar.hosts.driver import RayHosts
from autopar.hosts.environment import (
    check_versions,
    free_port,
    leave_gpus,
    variables_of_worker,
    versions,
)
from autopar.hosts.errors import HostsError, PortTakenError
from autopar.hosts.worker import ProcessGroup, Worker

DRIVER_VERSIONS = {
    "Python": "3.12",
    "jax": "0.11.2",
    "jaxlib": "0.11.2",
    "numpy": "2.4.0",
    "flax": "0.12.12",
    "autopar": "0.1.0",
}


@pytest.fixture
def port_in_use() -> Iterator[int]:
    """Yield a port that is in use."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        yield other.getsockname()[1]


# --- without Ray


def test_versions_of_all_packages_that_programs_depend_on_are_compared():
    assert set(versions()) == set(DRIVER_VERSIONS)
    assert versions()["jax"] == jax.__version__
    check_versions(1, "10.0.0.2", DRIVER_VERSIONS, dict(DRIVER_VERSIONS))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"jaxlib": "0.10.0"},
            r"has jaxlib 0\.10\.0 \(the driver: 0\.11\.2\); pip install jaxlib==0\.11\.2 there",
        ),
        (
            {"flax": "not installed"},
            r"has flax not installed \(the driver: 0\.12\.12\); pip install flax==0\.12\.12",
        ),
        (
            {"Python": "3.13"},
            r"has Python 3\.13 \(the driver: 3\.12\); run it with Python 3\.12 there",
        ),
        (
            {"Python": "3.13", "autopar": "0.2"},
            r"; run it with Python 3\.12 and pip install autopar==0\.1\.0 there",
        ),
    ],
)
def test_the_error_of_another_version_names_the_host_and_what_to_install(changes, message):
    with pytest.raises(HostsError, match=rf"host 1 \(10\.0\.0\.2\) .*{message}"):
        check_versions(1, "10.0.0.2", DRIVER_VERSIONS, DRIVER_VERSIONS | changes)


def test_the_error_of_too_few_devices_names_the_host():
    with pytest.raises(
        HostsError, match=r"host 0 has 8 cpu devices that JAX can use, but autopar.init asked for 9"
    ):
        Worker(0, [range(9)], "127.0.0.1").start()


def test_the_error_of_a_missing_accelerator_names_the_host(monkeypatch):
    def devices() -> list:
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(
        HostsError,
        match=r"host 1 \(127\.0\.0\.1\) has no accelerator .*backend 'cuda'; install autopar\[",
    ):
        Worker(1, [range(4), range(4, 8)], "127.0.0.1").start()


def test_an_address_of_another_host_is_refused():
    with pytest.raises(
        HostsError, match=r"host 0 can't listen for transfers on its address 203\.0\.113\.9"
    ):
        Worker(0, [range(8)], "203.0.113.9").start()


def test_a_port_in_use_is_refused_before_jax_starts(port_in_use):
    assert free_port() != port_in_use
    with pytest.raises(
        PortTakenError, match=rf"host 0: port {port_in_use}, for JAX's coordinator .* can't be used"
    ):
        Worker(0, [range(4), range(4, 8)], "127.0.0.1").start(
            ProcessGroup((0, 1), f"127.0.0.1:{port_in_use}")
        )


def test_the_driver_leaves_gpus_to_the_workers(monkeypatch):
    updates: list[tuple[str, str]] = []
    monkeypatch.setattr(jax.config, "update", lambda *update: updates.append(update))
    monkeypatch.setattr(environment, "backends_started", lambda: False)
    leave_gpus()
    assert updates == [("jax_platforms", "cpu")]
    monkeypatch.setattr(environment, "backends_started", lambda: True)
    leave_gpus()  # the driver is on the CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.warns(
        UserWarning,
        match=r"has JAX on a GPU, .* set JAX_PLATFORMS=cpu for it, or call autopar\.init",
    ):
        leave_gpus()
    assert len(updates) == 1


# --- on a Ray cluster


@pytest.mark.slow
@pytest.mark.hosts(2, 1)
def test_a_port_in_use_is_replaced_by_another(hosts, port_in_use, monkeypatch):
    original = RayHosts.free_port
    ports = iter([port_in_use])
    monkeypatch.setattr(
        RayHosts, "free_port", lambda self, host: next(ports, None) or original(self, host)
    )
    # workers that wait for a coordinator are ended and restarted
    hosts.form_groups(frozenset({(0, 1)}))
    assert list(ports) == []
    assert hosts.ask(hosts.owner, "array_keys") == [frozenset()] * 2


@pytest.mark.parametrize(
    ("flags", "platform", "expected"),
    [
        ("", "cuda", {}),
        ("", "cpu", {"NPROC": "12", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}),
        ("--xla_force_host_platform_device_count=8", "cuda", {}),
        (
            "--xla_a=1 --xla_force_host_platform_device_count=8 --xla_b=2",
            "cpu",
            {
                "NPROC": "12",
                "XLA_FLAGS": "--xla_a=1 --xla_b=2 --xla_force_host_platform_device_count=4",
            },
        ),
        ("--xla_a=1", "cuda", {"XLA_FLAGS": "--xla_a=1"}),
    ],
)
def test_workers_get_the_xla_flags_of_the_driver_with_their_number_of_devices(
    monkeypatch, flags, platform, expected
):
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert variables_of_worker(platform, 4) == {"JAX_PLATFORMS": platform} | expected


@pytest.mark.slow
@pytest.mark.hosts(2, 1)
def test_xla_flags_are_set_on_workers(hosts):
    flags = hosts.on_worker(1, lambda _: __import__("os").environ["XLA_FLAGS"]).split()
    expected = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1").split()
    assert len(expected) > 1
    assert set(flags) == set(expected)


@pytest.mark.slow
@pytest.mark.usefixtures("raylets")
def test_hosts_with_other_versions_are_refused(monkeypatch):
    monkeypatch.setattr(worker_processes, "versions", lambda: versions() | {"flax": "0.0.1"})
    with pytest.raises(
        HostsError,
        match=r"host 0 \(.*\) has flax .* \(the driver: 0\.0\.1\); pip install flax==0\.0\.1",
    ):
        autopar.init(cluster="ray", num_nodes=1, num_devices_per_node=1)
    assert session.hosts() is None


@pytest.mark.slow
@pytest.mark.usefixtures("raylets")
def test_a_host_that_lacks_a_package_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lacking.py").write_text(
        "from autopar.hosts import worker\nclass Worker(worker.Worker): pass\n"
    )
    monkeypatch.setattr(reservation, "Worker", importlib.import_module("lacking").Worker)
    shutil.rmtree(tmp_path)
    message = (
        r"host 0 \(.*\) can't run a worker: ModuleNotFoundError: No module named 'lacking'; "
        r"install the driver's version there"
    )
    with pytest.raises(HostsError, match=message):
        autopar.init(cluster="ray", num_nodes=1, num_devices_per_node=1)
