"""Eight virtual CPU devices stand in for eight GPUs; set before JAX starts."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

from hypothesis import settings

settings.register_profile("autopar", deadline=None, derandomize=True)  # shared machines are slow, and tests repeatable
settings.load_profile("autopar")
