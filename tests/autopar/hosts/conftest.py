"""A Ray cluster of four raylets on this machine, whose workers tests share.

A test with the mark `hosts(number, devices of each)` uses the fixture `hosts`. Tests with the same
mark run one after another, so that they share the workers.
"""

import gc
import os
from pathlib import Path

import pytest

from autopar.hosts import session
from autopar.runtime.local_backend import LOCAL, backend, use_backend


def pytest_collection_modifyitems(items):
    positions = [
        position
        for position, item in enumerate(items)
        if Path(__file__).parent in item.path.parents
    ]
    for position, item in zip(
        positions, sorted((items[position] for position in positions), key=_size), strict=True
    ):
        items[position] = item
        if "raylets" in item.fixturenames:  # a raylet starts with fork and exec
            item.add_marker(pytest.mark.filterwarnings("ignore:os.fork"))


def _size(item):
    marker = item.get_closest_marker("hosts")
    return () if marker is None else marker.args


def pytest_runtest_teardown(item, nextitem):
    """End the workers after the last test of this folder; other tests run in this process."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        session.current.leave()


@pytest.fixture(scope="session")
def raylets():
    """Yield a cluster that this process has joined."""
    pytest.importorskip("ray")
    from autopar.testing import raylets

    os.environ.setdefault("AUTOPAR_SILENCE_SECONDS", "60")  # a busy machine may be slow to answer
    with raylets(4) as cluster:
        yield cluster


@pytest.fixture
def hosts(request, raylets):
    """Return the hosts of the test's mark.

    Running workers are reused, after arrays of other tests are freed.
    """
    from tests.autopar.hosts.workers import join_hosts

    gc.collect()
    return join_hosts(*request.node.get_closest_marker("hosts").args)


@pytest.fixture(autouse=True)
def _in_this_process(request, monkeypatch):
    """Run tests without raylets in this process, even while workers of other tests run."""
    if "raylets" in request.fixturenames:
        yield
        return
    monkeypatch.setattr(session, "current", session.Session())
    outer_backend = backend()
    use_backend(LOCAL)
    yield
    use_backend(outer_backend)
