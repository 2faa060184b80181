"""A Ray cluster of four raylets on this machine, and the workers there, which tests share as far as they can.

A test that is marked `hosts(number, devices of each)` has the fixture of that name; those that want as many run one after the other.
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
        if (
            "raylets" in item.fixturenames
        ):  # they are started by forks that execute another program at once
            item.add_marker(pytest.mark.filterwarnings("ignore:os.fork"))


def _size(item):
    marker = item.get_closest_marker("hosts")
    return () if marker is None else marker.args


def pytest_runtest_teardown(item, nextitem):
    """Workers end with the last test here: others run in this process."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        session.current.leave()


@pytest.fixture(scope="session")
def raylets():
    """The cluster, which this process has joined."""
    pytest.importorskip("ray")
    from autopar.testing import raylets

    os.environ.setdefault("AUTOPAR_SILENCE_SECONDS", "60")  # machines are busy
    with raylets(4) as cluster:
        yield cluster


@pytest.fixture
def hosts(request, raylets):
    """The hosts that the test is marked with; workers that are there are kept, without what other tests left there."""
    from tests.autopar.hosts.workers import joined

    gc.collect()
    return joined(*request.node.get_closest_marker("hosts").args)


@pytest.fixture(autouse=True)
def _in_this_process(request, monkeypatch):
    """Tests without raylets run here, also while other tests' workers are there."""
    if "raylets" in request.fixturenames:
        yield
        return
    monkeypatch.setattr(session, "current", session.Session())
    joined = backend()
    use_backend(LOCAL)
    yield
    use_backend(joined)
