"""Sessions join and leave a Ray cluster: addresses, clusters of the user, `uv run`, tokens."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.hosts import session
from autopar.hosts.environment import free_port
from autopar.hosts.errors import HostsError
from autopar.hosts.ray_private import runtime_env_of_workers, without_uv_hook
from autopar.hosts.session import Session, check_address
from tests.autopar.hosts.workers import is_alive, until

ray = pytest.importorskip("ray")

# --- without a cluster


@pytest.fixture
def ray_init_calls(monkeypatch) -> Iterator[list[Any]]:
    """Simulate a process outside of any cluster; yield the arguments of its calls of `ray.init`."""
    calls: list[Any] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: calls.append(options))
    yield calls
    assert session.hosts() is None


def test_an_address_where_no_process_listens_is_refused(ray_init_calls):
    port = free_port()
    with pytest.raises(
        HostsError,
        match=rf"no Ray cluster at 127\.0\.0\.1:{port} \(.*refused\): start one with `ray",
    ):
        autopar.init(cluster="ray", cluster_address=f"127.0.0.1:{port}")
    assert not ray_init_calls


@pytest.mark.parametrize("address", ["6379", "somewhere", "10.0.0.1:", "10.0.0.1:port"])
def test_a_malformed_address_is_refused(ray_init_calls, address):
    with pytest.raises(
        HostsError,
        match=rf"no Ray cluster at {address} \(.* is no address, expected host:port, such",
    ):
        autopar.init(cluster="ray", cluster_address=address)
    assert not ray_init_calls


def test_a_missing_cluster_is_an_error(ray_init_calls, monkeypatch):
    from ray._private import services

    monkeypatch.setattr(services, "find_gcs_addresses", set)
    monkeypatch.setattr(services, "find_bootstrap_address", lambda _: None)
    for address in (None, "auto"):
        with pytest.raises(
            HostsError,
            match=r"no Ray cluster at the default address \(Could not find any running Ray",
        ):
            autopar.init(cluster="ray", cluster_address=address)
    assert not ray_init_calls


def test_a_cluster_that_has_ended_is_an_error(ray_init_calls, monkeypatch):
    from ray._private import services

    port = free_port()
    monkeypatch.setattr(services, "find_gcs_addresses", set)
    monkeypatch.setattr(services, "find_bootstrap_address", lambda _: f"127.0.0.1:{port}")
    with pytest.raises(HostsError, match=r"no Ray cluster at the default address \(.*refused\)"):
        autopar.init(cluster="ray")
    assert not ray_init_calls


def test_a_wrong_address_in_the_environment_is_refused(ray_init_calls, monkeypatch):
    port = free_port()
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    with pytest.raises(HostsError, match=rf"no Ray cluster at 127\.0\.0\.1:{port} "):
        autopar.init(cluster="ray")
    assert not ray_init_calls


def test_a_session_leaves_only_the_cluster_that_it_joined(monkeypatch):
    jobs, shutdowns = ["01", "01", "02"], []

    class Context:
        gcs_address = "127.0.0.1:6379"

        def get_job_id(self) -> str:
            return jobs.pop(0)

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", Context)
    monkeypatch.setattr(ray, "shutdown", lambda: shutdowns.append(True))
    current = Session(ray_job="01")
    current.leave()
    assert shutdowns == [True]
    current.leave()
    assert shutdowns == [True]
    Session(ray_job="00").leave()
    assert shutdowns == [True]


UV_RUN = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"


@pytest.mark.parametrize(("variable", "is_on"), [(None, False), ("1", True)])
def test_rays_uv_hook_is_off_unless_the_user_sets_its_variable(monkeypatch, variable, is_on):
    from ray._private import ray_constants

    monkeypatch.setattr(ray_constants, UV_RUN, True)
    monkeypatch.delenv(UV_RUN, raising=False)
    if variable is not None:
        monkeypatch.setenv(UV_RUN, variable)
    with without_uv_hook():
        assert getattr(ray_constants, UV_RUN) is is_on
    assert getattr(ray_constants, UV_RUN) is True
    assert os.environ.get(UV_RUN) == variable


def test_workers_run_the_drivers_python_instead_of_uv(monkeypatch):
    job, variables = {"py_executable": "/opt/uv run --python 3.12 python"}, {"NPROC": "2"}
    monkeypatch.delenv(UV_RUN, raising=False)
    runtime_env = runtime_env_of_workers(job, variables)
    assert runtime_env["py_executable"] == sys.executable
    assert runtime_env["env_vars"]["NPROC"] == "2"
    assert os.getcwd() in runtime_env["env_vars"]["PYTHONPATH"].split(os.pathsep)
    for job_env in ({}, {"py_executable": "python3.12"}):
        assert runtime_env_of_workers(job_env, variables) == {"env_vars": variables}
    monkeypatch.setenv(UV_RUN, "1")
    assert runtime_env_of_workers(job, variables) == {"env_vars": variables}


def test_importing_autopar_changes_no_environment_variable():
    program = (
        "import os; before = dict(os.environ); import autopar; assert dict(os.environ) == before"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


# --- on a Ray cluster


def test_an_address_of_another_cluster_is_refused_while_one_is_joined(raylets):
    with pytest.raises(
        ValueError,
        match=r"cluster_address='127\.0\.0\.1:1', but this process has joined the Ray cluster",
    ):
        autopar.init(cluster="ray", cluster_address="127.0.0.1:1")
    check_address(raylets.address)
    host, port = raylets.address.split(":")
    check_address(f"{socket.getfqdn(host)}:{port}")


def run_with_uv(
    program: str, folder: Path, **environment: str
) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """Run a program with `uv run` in a folder; return the words of each line that it prints."""
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("needs uv")
    root = Path(autopar.__file__).parents[1]
    variables: Mapping[str, str] = {
        **{
            name: value
            for name, value in os.environ.items()
            if name != "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
        },
        "XLA_FLAGS": "",
        "PYTHONPATH": str(root),
        **environment,
    }
    shutil.copy(root / ".python-version", folder)  # pyenv's uv needs a version to run
    command = [uv, "run", "--no-project", sys.executable, "-W", "ignore", "-c", program]
    completed = subprocess.run(
        command, cwd=folder, env=variables, text=True, capture_output=True, timeout=400
    )
    return completed, [line.split() for line in completed.stdout.splitlines()]


FAILING_PROGRAM = """
import sys, ray
ray.init(address="{address}", log_to_driver=False)  # with Ray's hook for uv run
import jax, autopar
from autopar.hosts import session
autopar.init(cluster="ray", num_nodes=2, num_devices_per_node=1)
hosts = session.hosts()
print(*(worker["pid"] for worker in hosts.ask_all("environment")), flush=True)
pythons = [hosts.on_worker(host, lambda _: __import__("sys").executable) for host in range(2)]
print(*pythons, flush=True)
method = autopar.ShardParallel(devices=2)
step = autopar.parallelize(lambda state, batch: state + batch.sum(), method=method)
total = step(1.0, jax.numpy.arange(4.0))
print(hosts.reservation.group.id.hex(), f"{{total:.1f}}", flush=True)
raise ValueError("of the user")
"""


@pytest.mark.slow
def test_workers_of_a_program_that_raises_under_uv_run_end(raylets, tmp_path):
    from ray.util import placement_group_table

    autopar.shutdown()
    completed, lines = run_with_uv(FAILING_PROGRAM.format(address=raylets.address), tmp_path)
    assert "ValueError: of the user" in completed.stderr, completed.stderr
    assert completed.returncode == 1
    worker_pids, pythons, (group, value) = lines
    assert len(worker_pids) == 2
    assert set(pythons) == {sys.executable}
    assert value == "7.0"
    assert until(lambda: not any(map(is_alive, map(int, worker_pids))))
    assert until(lambda: placement_group_table()[group]["state"] == "REMOVED")


PROGRAM_WITH_TOKENS = """
import sys, ray, autopar, jax
ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
autopar.init(cluster="ray", num_devices_per_node=2)
print(autopar.hosts.session.hosts().on_worker(0, lambda _: sys.executable))
step = autopar.parallelize(lambda state, batch: state + batch.sum(), method=autopar.ShardParallel())
print(f"{step(1.0, jax.numpy.arange(4.0)):.1f}")
autopar.shutdown()
print(ray.is_initialized())
ray.shutdown()
"""


@pytest.mark.slow
def test_a_step_runs_under_uv_run_with_an_authentication_token(tmp_path):
    completed, lines = run_with_uv(
        PROGRAM_WITH_TOKENS, tmp_path, HOME=str(tmp_path), RAY_AUTH_MODE="token", RAY_ADDRESS=""
    )
    assert completed.returncode == 0, completed.stderr
    assert lines == [[sys.executable], ["7.0"], ["True"]]
    assert (tmp_path / ".ray" / "auth_token").read_text()
