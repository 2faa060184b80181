"""The same eight virtual devices as for the tests."""

from tests.conftest import *  # noqa: F403
