"""Compilation for absent GPUs, and properties of its HLO as `simulator.hlo` parses it."""

import os
import shutil
import subprocess
import sys
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import autopar
from autopar import _plugins
from autopar.lowering.target import TargetExecutable, compile_for, target_devices, target_mesh
from experiments.models import MLP
from simulator.hardware.cluster import Cluster, ClusterError
from simulator.hardware.cluster_paths import cluster_names
from simulator.hlo import parse_hlo
from simulator.work import Kernel, Loop, Work, work_of
from tests.tiers import tiers

CLUSTERS = {name: Cluster.load(name) for name in sorted(cluster_names(), reverse=True)}
OF_DEVICE = {cluster.device.name: name for name, cluster in CLUSTERS.items()}
# one cluster for each kind of GPU
GPU_CLUSTERS = [name for name in OF_DEVICE.values() if CLUSTERS[name].device.kind == "gpu"]
WIDTHS = (32, 128, 64, 32)
BATCH = 64
KERNELS = list(pairwise(WIDTHS))
PARAMETER_BYTES = 4 * sum(rows * columns + columns for rows, columns in KERNELS)


def loss(params, x):
    for kernel, bias in params:
        x = jnp.tanh(x @ kernel + bias)
    return jnp.mean(x**2)


def step(params, x, axis=None):
    """Run a step of gradient descent for an MLP with biases."""
    grads = jax.grad(loss)(params, x)
    if axis:
        grads = jax.lax.pmean(grads, axis)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def abstract(place=lambda *_: None):
    """Return abstract (params, x); `place` maps "replicated" and "batch" to shardings."""
    whole, split = place("replicated"), place("batch")
    make = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    params = [(make(shape, sharding=whole), make(shape[1:], sharding=whole)) for shape in KERNELS]
    return params, make((BATCH, WIDTHS[0]), sharding=split)


def shipped(name: str) -> Cluster:
    """Return a shipped cluster, or its first 8 devices if it has more."""
    cluster = Cluster.load(name)
    return cluster.first_devices(min(8, cluster.num_devices))


@cache
def data_parallel(name: str) -> TargetExecutable:
    cluster = shipped(name)
    mesh = target_mesh(cluster, (cluster.num_devices,), ("x",))
    specs = {"replicated": PartitionSpec(), "batch": PartitionSpec("x")}
    args = abstract(lambda which: NamedSharding(mesh, specs[which]))
    return compile_for(jax.jit(step, donate_argnums=0), args, cluster)


def total_work(executable: TargetExecutable) -> Work:
    return work_of(parse_hlo(executable.hlo_text))


@pytest.mark.parametrize("name", tiers(GPU_CLUSTERS))
def test_every_shipped_cluster_compiles_a_step(name):
    executable = data_parallel(name)
    devices = shipped(name).num_devices
    assert executable.num_devices == devices
    assert executable.memory.arguments == PARAMETER_BYTES + 4 * BATCH * WIDTHS[0] // devices
    assert executable.memory.aliased == PARAMETER_BYTES  # donated
    assert executable.compile_seconds > 0
    program = executable.program
    assert program.meshes == (tuple(range(devices)),)
    assert program.memory == (executable.memory,)


@pytest.mark.parametrize("name", tiers(GPU_CLUSTERS))
def test_a_step_takes_six_flops_per_parameter_and_row_but_for_the_gradient_of_the_input(name):
    rows = BATCH // shipped(name).num_devices
    sizes = [rows_ * columns for rows_, columns in KERNELS]
    assert sum(total_work(data_parallel(name)).flops.values()) == rows * (
        6 * sum(sizes) - 2 * sizes[0]
    )


@pytest.mark.parametrize(
    "name", tiers([name for name in GPU_CLUSTERS if CLUSTERS[name].num_devices > 1])
)
def test_data_parallelism_all_reduces_every_gradient_once(name):
    assert total_work(data_parallel(name)).collectives == {"all_reduce": PARAMETER_BYTES}


def test_pmap_compiles_to_the_same_work_as_data_parallelism():
    cluster = Cluster.load("p3.16xlarge")
    devices = target_devices(cluster)
    params, x = abstract()
    params, x = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((8, *leaf.shape), leaf.dtype), (params, x)
    )
    x = jax.ShapeDtypeStruct((8, BATCH // 8, WIDTHS[0]), x.dtype)
    mapped = jax.pmap(partial(step, axis="i"), axis_name="i", devices=devices)
    executable = compile_for(mapped, (params, x), cluster)
    expected = data_parallel("p3.16xlarge")
    assert executable.num_devices == 8
    assert total_work(executable).flops == total_work(expected).flops
    assert total_work(executable).collectives == total_work(expected).collectives
    assert executable.memory.aliased == 0  # not donated


def test_part_of_a_host_is_enough_for_a_small_mesh():
    cluster = Cluster.load("p3.16xlarge")
    mesh = target_mesh(cluster, (2, 1), ("a", "b"))
    assert [device.id for device in mesh.devices.flat] == [0, 1]
    assert mesh.axis_types == (jax.sharding.AxisType.Auto,) * 2
    x = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("a")))
    assert compile_for(jax.jit(lambda x: x + 1), (x,), cluster).num_devices == 2


def test_kernels_are_compiled_once_for_a_gpu(monkeypatch, tmp_path):
    folder = SimpleNamespace(name=str(tmp_path / "kernels"))
    monkeypatch.setattr("autopar.lowering.target._kernel_folder", lambda: folder)

    def compiled(fun, name):
        mesh = target_mesh(cluster := Cluster.load(name), (1,), ("a",))
        x = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
        executable = compile_for(jax.jit(fun), (x,), cluster)
        return executable, [f.stat().st_size for f in Path(folder.name).iterdir()]

    first, (size,) = compiled(lambda x: x + 1, "p3.16xlarge")
    again, sizes = compiled(lambda x: x + 1, "p3.16xlarge")
    assert total_work(again) == total_work(first)
    assert sizes == [size]
    _, (more,) = compiled(jnp.tanh, "p3.16xlarge")
    assert more > size
    assert len(compiled(lambda x: x + 1, "dgx_h100")[1]) == 2
    shutil.rmtree(folder.name)
    assert len(compiled(lambda x: x + 1, "p3.16xlarge")[1]) == 1


def test_a_mesh_over_hosts_has_whole_hosts():
    cluster = Cluster.load("p3.16xlarge").with_size(hosts=2)
    assert [device.process_index for device in target_devices(cluster)] == [0] * 8 + [1] * 8
    with pytest.raises(ClusterError, match="whole hosts"):
        target_devices(cluster, 12)


@pytest.mark.parametrize("on_host", [1, 2])
def test_results_in_host_memory_take_no_memory_of_donated_arguments(on_host):
    cluster = Cluster.load("dgx_a100_80")
    host, device = jax.memory.Space.Host, jax.memory.Space.Device

    def update(parameters, *moments):
        moments = [*moments]
        moments[on_host - 1] = jax.device_put(jax.device_put(moments[on_host - 1], host), device)
        moments = [0.9 * moment + parameters for moment in moments]
        parameters = parameters - moments[0] * moments[1]
        moments[on_host - 1] = jax.device_put(moments[on_host - 1], host)
        return parameters, *moments

    sharding = NamedSharding(target_mesh(cluster, (8,), ("x",)), PartitionSpec("x"))
    array = jax.ShapeDtypeStruct((8 * 4096,), jnp.float32, sharding=sharding)
    jitted = jax.jit(update, donate_argnums=(0, 3 - on_host), out_shardings=sharding)
    memory = compile_for(jitted, (array,) * 3, cluster, on_host=[on_host]).memory
    assert memory.arguments == memory.aliased == 2 * 4 * 4096


def test_target_devices_are_the_same_objects_each_time():
    first, second = (target_devices(Cluster.load("p3.16xlarge")) for _ in range(2))
    assert first == second


def test_sorting_compiles_without_a_driver():
    cluster = Cluster.load("p3.16xlarge")
    one = NamedSharding(target_mesh(cluster, (1,), ("x",)), PartitionSpec())
    x = jax.ShapeDtypeStruct((1 << 18,), jnp.float32, sharding=one)
    (kernel,) = (op for op in parse_hlo(compile_for(jax.jit(jnp.sort), (x,), cluster).hlo_text))
    assert isinstance(kernel, Kernel)
    # four passes, each of which reads keys, and writes keys and their original positions
    assert kernel.bytes == 4 * (4 + 4 + 4) * (1 << 18)


def test_a_scan_becomes_a_loop():
    cluster = Cluster.load("p3.16xlarge")
    one = NamedSharding(target_mesh(cluster, (1,), ("x",)), PartitionSpec())
    make = partial(jax.ShapeDtypeStruct, dtype=jnp.float32, sharding=one)

    def forward(weights, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    executable = compile_for(jax.jit(forward), (make((3, 64, 64)), make((16, 64))), cluster)
    assert [op.count for op in parse_hlo(executable.hlo_text) if isinstance(op, Loop)] == [3]
    assert sum(total_work(executable).flops.values()) == 3 * 2 * 16 * 64 * 64


# Errors of the target


def test_a_cpu_cluster_can_not_be_compiled_for():
    with pytest.raises(ClusterError, match="no xla_target"):
        target_mesh(Cluster.load("cpu-virtual"), (2,), ("x",))


def test_a_mesh_larger_than_the_cluster_is_refused():
    with pytest.raises(ClusterError, match="16 devices"):
        target_mesh(Cluster.load("p3.16xlarge"), (4, 4), ("x", "y"))


def test_a_mesh_needs_a_name_for_each_axis():
    with pytest.raises(ValueError, match="2 axes but 1 names"):
        target_mesh(Cluster.load("p3.16xlarge"), (2, 4), ("x",))


def test_a_step_for_the_devices_present_is_refused():
    with pytest.raises(ValueError, match="target_mesh"):
        compile_for(
            jax.jit(lambda x: x + 1),
            (jax.ShapeDtypeStruct((4,), jnp.float32),),
            Cluster.load("p3.16xlarge"),
        )


def test_without_the_compiler_the_error_names_the_missing_wheel_and_the_extra(monkeypatch):
    monkeypatch.setattr(_plugins, "_installed", lambda module: module != "nvidia.cuda_nvcc")
    with pytest.raises(ImportError, match=r"needs nvidia-cuda-nvcc-cu12,.*'autopar\[compile\]'"):
        _plugins._compiler.__wrapped__()


# Nothing is printed without a GPU


def starts_plugin(monkeypatch, *, gpu: bool, installed: set[str]) -> bool:
    """Return whether the CUDA 12 plugin can start after `silence_idle_plugin` on such a machine."""
    plugin = _plugins._plugin()
    started = []
    monkeypatch.setattr(plugin, "initialize", lambda: started.append(True))
    monkeypatch.setattr(_plugins, "_GPU_FILES", (os.devnull,) if gpu else ())
    monkeypatch.setattr(
        _plugins, "_installed", lambda module: module in installed | {"jax_plugins.xla_cuda12"}
    )
    _plugins.silence_idle_plugin()
    plugin.initialize()
    return bool(started)


def test_the_plugin_starts_only_where_it_can_run(monkeypatch):
    cuda12, cuda13 = {"jax_cuda12_plugin"}, {"jax_plugins.xla_cuda13"}
    starts = partial(starts_plugin, monkeypatch)
    assert starts(gpu=True, installed=cuda12)
    assert not starts(gpu=True, installed=cuda13)
    assert not starts(gpu=True, installed=cuda12 | cuda13)
    assert not starts(gpu=True, installed=set())
    assert not starts(gpu=False, installed=cuda12)


COMPILE = """
from autopar.lowering.target import compile_for, target_devices
from simulator.hardware.cluster import Cluster
cluster = Cluster.load("p3.16xlarge")
one = jax.sharding.SingleDeviceSharding(target_devices(cluster, 1)[0])
x = jax.ShapeDtypeStruct((4,), "float32", sharding=one)
compile_for(jax.jit(lambda x: x + 1), (x,), cluster)
"""


@pytest.mark.parametrize(
    ("platforms", "then"), [pytest.param(None, "", marks=pytest.mark.slow), ("cpu", COMPILE)]
)
def test_importing_autopar_and_compiling_for_a_cluster_print_nothing(platforms, then):
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "XLA_", "TF_"))
    }
    if platforms:
        env["JAX_PLATFORMS"] = platforms
    code = f"import autopar, jax; jax.devices()\n{then}"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout + done.stderr == ""


def predicted_seconds() -> float:
    model = MLP(dim=1024, num_layers=2, batch_size=1024)
    args = model.abstract_args()
    plan = autopar.plan_step(
        model.train_step,
        args,
        method=autopar.DataParallel(),
        cluster="p3.16xlarge",
        mesh_shape=(8,),
    )
    return autopar.simulate(model.train_step, args, plan, "p3.16xlarge").makespan


@pytest.mark.slow
def test_xla_flags_affect_compilation_for_a_cluster():
    code = f"from {__name__} import predicted_seconds; print(predicted_seconds())"
    env = {**os.environ, "XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=true"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 0.9 * predicted_seconds()
