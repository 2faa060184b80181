"""Eight virtual CPU devices stand in for eight GPUs; set before JAX starts."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join([
    os.environ.get("XLA_FLAGS", ""),
    "--xla_force_host_platform_device_count=8",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",  # on a busy machine a device may come late to a collective
])  # fmt: skip

from hypothesis import settings

settings.register_profile("autopar", deadline=None, derandomize=True)  # shared machines are slow, and tests repeatable
settings.load_profile("autopar")
