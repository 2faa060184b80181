"""Seconds of importing autopar in a new process, beside those of importing JAX alone."""

import subprocess
import sys

import pytest


@pytest.mark.benchmark(group="import")
@pytest.mark.parametrize("package", ["jax", "autopar"])
def test_import(benchmark, package):
    command = [sys.executable, "-c", f"import {package}"]
    benchmark.pedantic(subprocess.run, (command,), {"check": True}, rounds=5, warmup_rounds=1)
