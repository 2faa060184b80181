"""XLA is held to the memory budget of a plan."""

from dataclasses import replace

import pytest

import autopar
from autopar.lowering.memory_limit import compile_on
from experiments.validation.fidelity import MODELS


@pytest.fixture(scope="module")
def model():
    return replace(MODELS["bert"], num_layers=1)


@pytest.fixture(scope="module")
def args(model):
    return model.abstract_args()


def compiled_bytes(model, args, plan):
    program = autopar.compile_step(
        model.train_step, args, plan, "dgx_h100", donate_argnums=(0,), fidelity="compiled"
    )
    return max(memory.total for memory in program.memory)


def test_a_program_that_hides_collectives_is_held_to_the_budget(model, args):
    method = autopar.Zero3Parallel((8,))
    plan = autopar.plan_step(model.train_step, args, method=method, cluster="dgx_h100")
    assert plan.memory_budget is None
    unlimited = compiled_bytes(model, args, plan)
    budget = 0.9 * unlimited
    limited = compiled_bytes(model, args, plan.model_copy(update={"memory_budget": budget}))
    assert limited <= budget < unlimited


def test_the_budget_of_a_method_is_part_of_its_plan(model, args):
    method = autopar.ShardParallel((8,), memory_budget=20e9)
    plan = autopar.plan_step(model.train_step, args, method=method, cluster="dgx_h100")
    assert plan.memory_budget == 20e9
    assert autopar.Plan.from_json(plan.to_json()) == plan


class FakeLowered:
    """Stands for a program of a GPU, of which the tests have none."""

    def __init__(self, totals):
        self.totals = totals
        self.options = []

    def compile(self, compiler_options=None):
        options = compiler_options or {}
        key = options.get("xla_gpu_memory_limit_slop_factor")
        if "xla_gpu_disable_async_collectives" in options:
            key = "none early" if key is None else f"none early, {key}"
        self.options.append(key)
        return FakeCompiled(self.totals[key])


class FakeCompiled:
    def __init__(self, total):
        self.total = total

    def memory_analysis(self):
        return FakeAnalysis(self.total)


class FakeAnalysis:
    argument_size_in_bytes = 1000
    output_size_in_bytes = 1000
    alias_size_in_bytes = 1000

    def __init__(self, total):
        self.temp_size_in_bytes = total - 1000


class FakeDevice:
    def __init__(self, platform):
        self.platform = platform

    def memory_stats(self):
        return {"bytes_limit": 11_000}


@pytest.mark.parametrize(
    ("totals", "expected", "tried"),
    [
        ({None: 2900}, 2900, [None]),
        ({None: 3500, 20: 3000}, 3000, [None, 20]),
        ({None: 3500, 20: 3200, 0: 2500}, 2500, [None, 20, 0]),
        (
            {None: 3500, 20: 3200, 0: 3300, "none early": 2900},
            2900,
            [None, 20, 0, "none early"],
        ),
        (
            {None: 3500, 20: 3200, 0: 3300, "none early": 3250, "none early, 0": 3270},
            3200,
            [None, 20, 0, "none early", "none early, 0"],
        ),
    ],
)
def test_the_first_executable_within_the_budget_is_kept(totals, expected, tried):
    lowered = FakeLowered(totals)
    assert compile_on(lowered, 3000, FakeDevice("gpu")).total == expected
    assert lowered.options == tried


def test_the_budget_is_no_limit_on_a_cpu():
    lowered = FakeLowered({None: 3500})
    assert compile_on(lowered, 3000, FakeDevice("cpu")).total == 3500
    assert lowered.options == [None]
