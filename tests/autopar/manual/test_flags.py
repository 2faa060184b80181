"""Unknown XLA flags and values of the wrong type are refused before XLA aborts."""

import pytest

from autopar.manual import XlaFlagError, check_xla_flags


def test_flags_that_jaxlib_knows_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    check_xla_flags()
    monkeypatch.delenv("XLA_FLAGS")
    check_xla_flags()


def test_every_unknown_flag_is_named_with_the_nearest_known_one() -> None:
    flags = (
        "--xla_gpu_enable_async_collectives=true --xla_force_host_platform_device_count=2 "
        "--xla_gpu_enable_triton_gem=1"
    )
    with pytest.raises(XlaFlagError) as error:
        check_xla_flags(flags)
    message = str(error.value)
    assert f"would abort on XLA_FLAGS={flags!r}" in message
    for unknown, nearest in [
        ("--xla_gpu_enable_triton_gem", "--xla_gpu_enable_triton_gemm"),
        ("--xla_gpu_enable_async_collectives", "--xla_gpu_disable_async_collectives"),
    ]:
        assert f"knows no {unknown}, the nearest is {nearest};" in message
    assert "knows no --xla_force_host" not in message


def test_a_value_of_the_wrong_type_is_named() -> None:
    with pytest.raises(
        XlaFlagError,
        match="--xla_gpu_autotune_level doesn't take the value 'high'; give it one of its",
    ):
        check_xla_flags("--xla_gpu_autotune_level=high")
