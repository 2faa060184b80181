"""Registered costs of kernels: checks of what users give, and their use in compiled programs."""

from collections.abc import Sequence
from typing import Any

import pytest

from simulator import KernelCost, kernel_costs, register_kernel_cost
from simulator.array_type import Array
from simulator.hlo import HloError
from simulator.kernel_costs import KernelCostError
from simulator.work import Kernel
from tests.simulator.test_hlo import parse


@pytest.fixture(autouse=True)
def _own_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_costs, "_COSTS", {})


def norm_cost(operands: Sequence[Array], results: Sequence[Array]) -> KernelCost:
    return KernelCost(5 * operands[0].size, operands[0].num_bytes + results[0].num_bytes)


def call(target: str, config: str = "") -> Kernel:
    (kernel,) = parse(
        "%x = bf16[8,16] parameter(0)",
        f'%n = (bf16[8,16], f32[8]) custom-call(%x), custom_call_target="{target}"{config}',
    )
    return kernel


def test_a_custom_call_has_the_cost_registered_for_its_target() -> None:
    register_kernel_cost("te_norm_forward_ffi", norm_cost)
    assert call("te_norm_forward_ffi") == Kernel("n", "memory", 5 * 128, 512, "bf16")


def test_a_custom_call_without_a_cost_is_named_and_priced_by_its_bytes() -> None:
    kernel = call("te_norm_forward_ffi")
    moved = 2 * 256 + 4 * 8
    assert kernel == Kernel(
        "n", "memory", 0.0, moved, "bf16", unmodelled="custom-call te_norm_forward_ffi"
    )


STATED = '{"name":"norm","flops":7,"bytes":9,"kind":"gemm","dtype":"bf16"}'


def test_a_call_that_states_its_cost_has_it_unless_another_is_registered() -> None:
    stated = f", backend_config={STATED}"
    assert call("autopar$kernel", stated) == Kernel("n", "gemm", 7, 9, "bf16")
    register_kernel_cost("norm", norm_cost)
    assert call("autopar$kernel", stated) == Kernel("n", "memory", 5 * 128, 512, "bf16")


def test_a_call_that_states_only_its_name_is_unmodelled() -> None:
    kernel = call("autopar$kernel", ', backend_config={"name":"norm"}')
    assert kernel.unmodelled == "custom-call norm"


def test_a_call_that_states_a_wrong_cost_is_an_error() -> None:
    with pytest.raises(HloError, match=r"states no cost: .*flops is -1"):
        call("autopar$kernel", f", backend_config={STATED.replace('7', '-1')}")


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"flops": -1.0, "bytes": 1.0}, ValueError, r"flops is -1.0; expected a finite number"),
        ({"flops": 1.0, "bytes": float("nan")}, ValueError, r"bytes is nan; expected"),
        ({"flops": "many", "bytes": 1.0}, TypeError, r"flops is 'many'; expected a number"),
        ({"flops": 1, "bytes": True}, TypeError, r"bytes is True; expected a number"),
        ({"flops": 1, "bytes": 1, "kind": "matmul"}, ValueError, r"'matmul'; expected one of 'ge"),
    ],
)
def test_a_cost_has_numbers_and_a_kind(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        KernelCost(**fields)


@pytest.mark.parametrize(
    ("name", "cost", "error", "message"),
    [
        (3, norm_cost, TypeError, r"name of a kernel is 3; expected a string"),
        ("", norm_cost, ValueError, r"name of a kernel is empty"),
        ("norm", KernelCost(1, 1), TypeError, r"expected a function of operands and results"),
    ],
)
def test_a_registration_has_a_name_and_a_function(
    name: Any, cost: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        register_kernel_cost(name, cost)


def test_a_kernel_is_registered_once() -> None:
    register_kernel_cost("norm", norm_cost)
    with pytest.raises(ValueError, match="'norm' has a cost already; register it once"):
        register_kernel_cost("norm", norm_cost)


def test_a_function_that_returns_no_cost_is_an_error() -> None:
    register_kernel_cost("norm", lambda operands, results: 3.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(KernelCostError, match=r"'norm' returned 3.0; expected a KernelCost"):
        call("norm")


def test_the_error_of_a_function_names_its_kernel() -> None:
    register_kernel_cost("norm", lambda operands, results: norm_cost(operands[5:], results))
    with pytest.raises(KernelCostError, match=r"'norm' failed for \[Array.*IndexError"):
        call("norm")
