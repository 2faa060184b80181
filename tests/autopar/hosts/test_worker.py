"""Jobs on a worker of this process: instructions, results as on one device, and memory."""

import gc
import weakref
from collections import defaultdict
from typing import Any

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

import autopar
from autopar.hosts import delivery
from autopar.hosts.job_export import export_job
from autopar.hosts.worker import InstructionError, Worker
from autopar.lowering.job import Array, Job, worker_groups
from autopar.lowering.job_description import JobDescription
from autopar.lowering.planned import PlannedStep
from autopar.planning.method_planning import trace_for
from autopar.runtime.loaded_job import LoadedJob
from experiments.models import MLP
from experiments.scripts.measure_cells import initial_args
from tests.autopar.pipeline.stack_steps import stack_batch, stack_params, stack_step
from tests.steps import mlp_args, mlp_step, serial
from tests.tiers import tiers


def prepared(method: Any, step: Any, args: Any, donated: bool = True) -> JobDescription:
    plan = autopar.plan_step(step, args, method=method, cluster="cpu-virtual", mesh_shape=(8,))
    traced = trace_for(plan, step, args, (1,))
    used_up = frozenset(range(len(jax.tree.leaves(args[0])))) if donated else frozenset()
    return export_job(PlannedStep(traced, plan), "cpu", used_up)


class Driver:
    """One worker with all devices of this process."""

    def __init__(self, found: JobDescription) -> None:
        self.found, self.worker = found, Worker(0, [range(8)], "127.0.0.1")
        self.worker.start()
        self.worker.load(0, found.job)
        self._keys, self._tag = iter(range(10**6)), 0

    def steps(self, args: Any, count: int) -> list[np.ndarray]:
        """Return the results of the last of several steps."""
        leaves, num_state = jax.tree.leaves(args), len(jax.tree.leaves(args[0]))
        keys: dict[int, int] = {}
        for i, leaf in enumerate(leaves[:num_state]):
            keys[i] = next(self._keys)
            self.worker.put(keys[i], np.asarray(leaf), self.found.inputs[i].place)
        batch = list(range(num_state, len(leaves)))
        made: dict[int, int] = {}
        for _ in range(count):
            old, made = made, {o: next(self._keys) for o in range(len(self.found.outputs))}
            kept = {i: old.get(i, keys[i]) for i in range(num_state)}
            freed = [key for o, key in old.items() if o >= num_state]
            given = [np.asarray(leaves[i]) for i in batch]
            self.worker.do(None, freed, "run", 0, self._tag, kept, made, batch, *given)
            self._tag += len(self.found.job.deliveries)
        return [
            self.whole(key, each)
            for key, each in zip(made.values(), self.found.outputs, strict=True)
        ]

    def whole(self, key: int, array: Any) -> np.ndarray:
        assert isinstance(array, Array)
        value = np.full(array.shape, -1, array.dtype)
        for index, part in self.worker.fetch(key):
            value[index] = part
        return value


def one_device(step: Any, args: Any, count: int) -> list[np.ndarray]:
    state, batch = args
    result = None
    for _ in range(count):
        state, result = serial(step, state, batch)
    return [np.asarray(leaf) for leaf in jax.tree.leaves((state, result))]


def pipeline(stages: int, **options: Any) -> autopar.PipeshardParallel:
    return autopar.PipeshardParallel(
        num_micro_batches=4, stage_option=autopar.UniformStageOption(stages), **options
    )


@pytest.mark.parametrize(
    "options",
    tiers(
        [
            *({"pipeline_schedule": name} for name in ("1f1b", "gpipe", "zero_bubble_h1")),
            {"num_chunks": 2},
        ]
    ),
    ids=str,
)
def test_a_pipeline_computes_what_one_device_does(options):
    if "num_chunks" in options:
        options = options | {"pipeline_schedule": "interleaved_1f1b"}
    args = stack_params(), stack_batch()
    found = Driver(
        prepared(pipeline(4 if "num_chunks" in options else 2, **options), stack_step, args)
    ).steps(args, 3)
    for mine, expected in zip(found, one_device(stack_step, args, 3), strict=True):
        assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)


def test_a_step_on_one_mesh_computes_what_one_device_does():
    args = mlp_args()
    driver = Driver(prepared(autopar.ShardParallel(num_micro_batches=2), mlp_step, args))
    for mine, expected in zip(driver.steps(args, 2), one_device(mlp_step, args, 2), strict=True):
        assert_allclose(mine, expected, rtol=1e-4, atol=1e-5)


def test_each_mesh_executes_the_instructions_of_the_program_in_order(monkeypatch):
    args = stack_params(), stack_batch()
    found = prepared(pipeline(4), stack_step, args)
    done = defaultdict(list)
    execute = LoadedJob.execute

    def spy(self, mesh, instruction, values, tag):
        done[mesh].append(instruction)
        execute(self, mesh, instruction, values, tag)

    monkeypatch.setattr(LoadedJob, "execute", spy)
    Driver(found).steps(args, 1)
    order = [[each for of_mesh, each in found.job.order if of_mesh == mesh] for mesh in range(4)]
    assert [done[mesh] for mesh in range(4)] == order


def test_a_worker_gets_only_its_part_of_a_job():
    args = stack_params(), stack_batch()
    job: Job = prepared(pipeline(4), stack_step, args).job
    parts = [job.of(range(start, start + 4)) for start in (0, 4)]
    assert [{mesh for mesh, _ in part.order} for part in parts] == [{0, 1}, {2, 3}]
    assert sum(len(part.order) for part in parts) == len(job.order)
    assert all(
        set(part.programs) == {call.program for call in part.calls.values()} for part in parts
    )
    assert {at for part in parts for at in part.deliveries} == set(job.deliveries)


def test_hosts_form_groups_where_stages_span_them():
    args = stack_params(), stack_batch()
    job = prepared(pipeline(2), stack_step, args).job
    assert worker_groups(job.meshes, {device: device // 4 for device in range(8)}) == frozenset()
    assert worker_groups(job.meshes, {device: device // 2 for device in range(8)}) == {
        (0, 1),
        (2, 3),
    }
    with pytest.raises(ValueError, match=r"host 1 .* hosts .* and .* whole hosts"):
        worker_groups(job.meshes, {device: device // 3 for device in range(8)})


def test_a_worker_stores_only_what_the_step_returned():
    args = stack_params(), stack_batch()
    driver = Driver(prepared(pipeline(2), stack_step, args))
    driver.steps(args, 3)
    assert driver.worker.num_arrays() == len(driver.found.outputs)


def test_a_job_that_is_unloaded_is_garbage():
    args = stack_params(), stack_batch()
    driver = Driver(prepared(pipeline(2), stack_step, args))
    driver.steps(args, 1)
    loaded = weakref.ref(driver.worker.jobs[0])
    driver.worker.do(None, [], "unload", 0)
    gc.collect()
    assert driver.worker.num_jobs() == 0
    assert loaded() is None


@pytest.mark.slow
def test_sent_values_outlive_the_donation_of_their_memory(monkeypatch):
    model = MLP(8, 4, 16)

    def step(state, batch):
        return model.train_step(state, batch, autopar.value_and_grad)

    args = initial_args(model)
    offered: list[jax.Array] = []
    place = jax.device_put

    def spy(arrays, places):
        offered.extend(arrays if isinstance(arrays, list) else ())
        return place(arrays, places)

    monkeypatch.setattr(delivery.jax, "device_put", spy)
    driver = Driver(prepared(pipeline(2, layer_option=autopar.AutoLayerOption(2)), step, args))
    driver.steps(args, 2)
    carried = [name for name, _ in driver.found.job.deliveries if name.startswith("in")]
    assert carried  # Adam's count, which both stages read and one updates
    assert offered
    assert not any(array.is_deleted() for array in offered)


def test_the_error_of_an_instruction_names_its_mesh():
    args = stack_params(), stack_batch()
    driver = Driver(prepared(pipeline(2), stack_step, args))
    name, to = next(iter(driver.found.job.deliveries))

    def fails(*_):
        raise MemoryError("no room")

    driver.worker.jobs[0].carriers[name, to].receive = fails  # pyright: ignore
    with pytest.raises(
        InstructionError,
        match=rf"host 0, mesh {to}, instruction recv {name}.*: MemoryError: no room",
    ):
        driver.steps(args, 1)
