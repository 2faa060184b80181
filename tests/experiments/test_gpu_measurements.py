"""Steps and kernels on a GPU are timed, predicted and written, whatever fails or is left out."""

import io
import json
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from autopar.calibrate import Effort
from experiments.measurements import gpu, kernel_profiling
from experiments.measurements.kernel_profiling import Launch
from experiments.models import GPT
from simulator.calibration.fit_cluster import Convolution
from simulator.hardware.cluster import Cluster
from simulator.work import Gemm, Kernel, Loop

EFFORT = Effort(
    (16, 256, 4096, 65536),
    (8,),
    (32, 64),
    (Convolution(1, 4, 4), Convolution(1, 8, 8)),
    ("float32",),
    1e-3,
)
TINY = GPT(1, 32, 2, sequence_length=16, vocab_size=64, batch_size=4)


def quiet() -> Console:
    return Console(file=io.StringIO())


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    out = tmp_path_factory.mktemp("gpu")
    return gpu.run(
        out, [TINY], ["bfloat16"], repeat=2, budget=1000, effort=EFFORT, console=quiet()
    ), out


@pytest.mark.slow
def test_a_step_is_timed_and_predicted_with_either_device_and_from_either_program(measured):
    table, out = measured
    (row,) = table.to_dict("records")
    assert (row["model"], row["size"], row["dtype"]) == ("GPT", "1 x 32, batch 4", "bfloat16")
    assert row["parameters"] == TINY.num_parameters
    for name in gpu.PREDICTED:
        assert row[name] > 0
        assert row[f"{name}_error"] == pytest.approx(row[name] / row["measured"] - 1)
    for program in ("compiled", "analytic"):
        assert row[f"{program}_calibrated"] != pytest.approx(row[f"{program}_shipped"], rel=1e-3)
    assert row["analytic_memory_bytes"] == pytest.approx(row["memory_bytes"], rel=0.5)
    pd.testing.assert_frame_equal(pd.read_csv(out / "gpu.csv"), table, rtol=1e-4)


@pytest.mark.slow
def test_what_there_is_to_know_is_beside_the_table(measured):
    _, out = measured
    beside = json.loads((out / "gpu.json").read_text())
    assert (beside["device"], beside["driver"], beside["repeats"]) == ("cpu", None, 2)
    assert beside["complete"]
    assert beside["not_measured"] == []
    assert {"jax", "jaxlib", "flax", "optax", "python"} <= set(beside["versions"])
    assert Cluster.load(out / "gpu_cluster.yaml").provenance is not None
    assert sorted(path.name for path in out.iterdir()) == [
        "gpu.csv",
        "gpu.json",
        "gpu_cluster.yaml",
    ]


@pytest.mark.slow
def test_results_are_printed(measured):
    console = Console(file=io.StringIO(), width=220)
    console.print(gpu.table_of(measured[0]))
    assert isinstance(console.file, io.StringIO)
    assert "GPT, 1 x 32, batch 4" in console.file.getvalue()


def test_steps_that_there_is_no_time_for_are_named(tmp_path):
    here, dtypes = Cluster.load("cpu-virtual"), ["float32", "float16"]
    table = gpu.run(
        tmp_path, [TINY], dtypes, repeat=1, budget=0.0, calibrated=here, console=quiet()
    )
    beside = json.loads((tmp_path / "gpu.json").read_text())
    assert table.empty
    assert not beside["complete"]
    assert beside["not_measured"] == [
        "GPT, 1 x 32, batch 4, float32",
        "GPT, 1 x 32, batch 4, float16",
    ]


def test_a_step_that_fails_does_not_take_the_others_with_it(tmp_path, monkeypatch):
    def measure(model, *_, least):
        if model.dtype == "float32":
            raise ValueError("no room")
        return gpu.GpuStep("GPT", "1", model.dtype, 1, 1.0, 0.0, 1.1, 1.2, 0.9, 0.8, 10, 10, 0, 1.0)

    monkeypatch.setattr(gpu, "measure", measure)
    here, dtypes = Cluster.load("cpu-virtual"), ["float32", "float16"]
    table = gpu.run(
        tmp_path, [TINY], dtypes, repeat=1, budget=1000, calibrated=here, console=quiet()
    )
    beside = json.loads((tmp_path / "gpu.json").read_text())
    assert list(table["dtype"]) == ["float16"]
    assert beside["failed"] == {"GPT, 1 x 32, batch 4, float32": "ValueError: no room"}


PRODUCT = Kernel("custom-call.1", "gemm", 2e9, 6e6, "bf16", Gemm(1000, 1000, 1000))
ADD = Kernel("loop_add_fusion.7", "memory", 0.0, 4e6)


def test_what_libraries_launch_beside_a_kernel_counts_for_it():
    names = (
        "loop_add_fusion_2",
        "Memset 0",
        "nvjet_sm90_splitK",
        "void cublasLt::splitKreduce_kernel<32>",
        "loop_add_fusion_2",
    )
    steps = [
        [Launch(name, 10.0**place * times) for place, name in enumerate(names)]
        for times in (1, 2, 7)
    ]
    assert kernel_profiling.seconds_of((ADD, PRODUCT, ADD), steps) == pytest.approx(
        [2, 2220, 20000]
    )
    with pytest.raises(
        ValueError, match="3 kernels were launched in a step, and the program has 2"
    ):
        kernel_profiling.seconds_of((ADD, PRODUCT), steps)
    with pytest.raises(ValueError, match="one after the other; this one has Loop"):
        kernel_profiling.seconds_of((ADD, Loop(3, (PRODUCT,))), steps)


def test_kernels_that_are_alike_share_a_row():
    table = kernel_profiling.table_of(
        "a step", (ADD, PRODUCT, ADD), [2e-6, 9e-6, 4e-6], Cluster.load("dgx_h100")
    )
    assert table["kernel"].tolist() == ["loop_add_fusion", "custom-call"]
    assert table["count"].tolist() == [2, 1]
    assert table["measured_us"].tolist() == pytest.approx([3, 9])
    assert table["product"].tolist() == ["", "1x1000x1000x1000"]
    assert (table["predicted_us"] > 0).all()


def test_committed_measurements_of_kernels_add_up_to_those_of_steps():
    folder = Path(kernel_profiling.__file__).parent / "h100"
    steps, single = (pd.read_csv(folder / name) for name in ("gpu.csv", "kernels.csv"))
    names = steps["model"] + ", " + steps["size"] + ", " + steps["dtype"]
    measured = steps["measured"].groupby(names).median()
    added = (single["count"] * single["measured_us"]).groupby(single["step"]).sum() / 1e6
    assert len(added) == 7
    assert (added / measured[added.index]).between(0.95, 1.05).all()
