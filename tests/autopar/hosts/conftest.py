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
    places = [
        place for place, item in enumerate(items) if Path(__file__).parent in item.path.parents
    ]
    for place, item in zip(
        places, sorted((items[place] for place in places), key=_size), strict=True
    ):
        items[place] = item
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
    """A cluster that this process has joined."""
    pytest.importorskip("ray")
    from autopar.testing import raylets

    os.environ.setdefault("AUTOPAR_SILENCE_SECONDS", "60")  # machines may be busy
    with raylets(4) as cluster:
        yield cluster


@pytest.fixture
def hosts(request, raylets):
    """The hosts of the test's mark. Running workers are reused, after arrays of other tests are freed."""
    from tests.autopar.hosts.workers import joined

    gc.collect()
    return joined(*request.node.get_closest_marker("hosts").args)


@pytest.fixture(autouse=True)
def _in_this_process(request, monkeypatch):
    """Run tests without raylets in this process, even while workers of other tests run."""
    if "raylets" in request.fixturenames:
        yield
        return
    monkeypatch.setattr(session, "current", session.Session())
    joined = backend()
    use_backend(LOCAL)
    yield
    use_backend(joined)
