"""Jobs on a worker of this process: instructions, results as on one device, and memory."""

import gc
import weakref
from collections import defaultdict
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

import autopar
from autopar.hosts.errors import StepFailedError
from autopar.hosts.job_export import export_job
from autopar.hosts.worker import Worker
from autopar.lowering.job import Array, Job, worker_groups
from autopar.lowering.job_description import JobDescription
from autopar.lowering.planned import PlannedStep
from autopar.planning.method_planning import trace_for
from autopar.runtime import carriers
from autopar.runtime.loaded_job import LoadedJob
from experiments.local_steps import initial_args
from experiments.models import MLP
from tests.autopar.hosts.workers import pipeline
from tests.autopar.pipeline.stack_steps import stack_batch, stack_params, stack_step
from tests.steps import mlp_args, mlp_step, model_step, serial
from tests.tiers import tiers


def describe_job(method: Any, step: Any, args: Any, donated: bool = True) -> JobDescription:
    plan = autopar.plan_step(step, args, method=method, cluster="cpu-virtual", mesh_shape=(8,))
    traced = trace_for(plan, step, args, (1,))
    donated_leaves = frozenset(range(len(jax.tree.leaves(args[0])))) if donated else frozenset()
    return export_job(PlannedStep(traced, plan), "cpu", donated_leaves)


class Driver:
    """One worker with all devices of this process."""

    def __init__(self, description: JobDescription) -> None:
        self.description, self.worker = description, Worker(0, [range(8)], "127.0.0.1")
        self.worker.start()
        self.worker.load(0, description.job)
        self._keys, self._tag = iter(range(10**6)), 0

    def steps(self, args: Any, count: int) -> list[np.ndarray]:
        """Return the results of the last of `count` steps."""
        leaves, num_state = jax.tree.leaves(args), len(jax.tree.leaves(args[0]))
        keys: dict[int, int] = {}
        for i, leaf in enumerate(leaves[:num_state]):
            keys[i] = next(self._keys)
            self.worker.put(keys[i], np.asarray(leaf), self.description.inputs[i].place)
        batch = list(range(num_state, len(leaves)))
        result_keys: dict[int, int] = {}
        for _ in range(count):
            old_keys = result_keys
            result_keys = {o: next(self._keys) for o in range(len(self.description.outputs))}
            state_keys = {i: old_keys.get(i, keys[i]) for i in range(num_state)}
            freed = [key for o, key in old_keys.items() if o >= num_state]
            batch_leaves = [np.asarray(leaves[i]) for i in batch]
            self.worker.do(
                None,
                freed,
                False,
                "run",
                0,
                self._tag,
                state_keys,
                result_keys,
                batch,
                *batch_leaves,
            )
            self._tag += len(self.description.job.deliveries)
        return [
            self.gather(key, output)
            for key, output in zip(result_keys.values(), self.description.outputs, strict=True)
        ]

    def gather(self, key: int, array: Any) -> np.ndarray:
        assert isinstance(array, Array)
        value = np.full(array.shape, -1, array.dtype)
        for index, part in self.worker.fetch(key):
            value[index] = part
        return value


def serial_results(step: Any, args: Any, count: int) -> list[np.ndarray]:
    state, batch = args
    result = None
    for _ in range(count):
        state, result = serial(step, state, batch)
    return [np.asarray(leaf) for leaf in jax.tree.leaves((state, result))]


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
def test_a_pipeline_equals_one_device(options):
    if "num_chunks" in options:
        options = options | {"pipeline_schedule": "interleaved_1f1b"}
    args = stack_params(), stack_batch()
    results = Driver(
        describe_job(pipeline(4 if "num_chunks" in options else 2, **options), stack_step, args)
    ).steps(args, 3)
    for actual, expected in zip(results, serial_results(stack_step, args, 3), strict=True):
        assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_a_step_on_one_mesh_equals_one_device():
    args = mlp_args()
    driver = Driver(describe_job(autopar.ShardParallel(num_micro_batches=2), mlp_step, args))
    for actual, expected in zip(
        driver.steps(args, 2), serial_results(mlp_step, args, 2), strict=True
    ):
        assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@cache
def stack_job(meshes: int) -> JobDescription:
    """Return the job of a pipeline, which several tests run."""
    return describe_job(pipeline(meshes), stack_step, (stack_params(), stack_batch()))


def test_each_mesh_executes_the_instructions_of_the_program_in_order(monkeypatch):
    args = stack_params(), stack_batch()
    description = stack_job(4)
    executed = defaultdict(list)
    execute = LoadedJob.execute

    def spy(self, mesh, instruction, values, tag):
        executed[mesh].append(instruction)
        execute(self, mesh, instruction, values, tag)

    monkeypatch.setattr(LoadedJob, "execute", spy)
    Driver(description).steps(args, 1)
    order = [
        [instruction for number, instruction in description.job.order if number == mesh]
        for mesh in range(4)
    ]
    assert [executed[mesh] for mesh in range(4)] == order


def test_a_job_is_divided_among_workers():
    job: Job = stack_job(4).job
    parts = [job.of(range(start, start + 4)) for start in (0, 4)]
    assert [{mesh for mesh, _ in part.order} for part in parts] == [{0, 1}, {2, 3}]
    assert sum(len(part.order) for part in parts) == len(job.order)
    assert all(
        set(part.programs) == {call.program for call in part.calls.values()} for part in parts
    )
    assert {delivery for part in parts for delivery in part.deliveries} == set(job.deliveries)


def test_hosts_that_share_a_stage_form_a_process_group():
    job = stack_job(2).job
    assert worker_groups(job.meshes, {device: device // 4 for device in range(8)}) == frozenset()
    assert worker_groups(job.meshes, {device: device // 2 for device in range(8)}) == {
        (0, 1),
        (2, 3),
    }
    with pytest.raises(ValueError, match=r"host 1 .* hosts .* and .* whole hosts"):
        worker_groups(job.meshes, {device: device // 3 for device in range(8)})


def test_a_worker_stores_only_the_results_of_the_last_step():
    args = stack_params(), stack_batch()
    driver = Driver(stack_job(2))
    driver.steps(args, 3)
    assert len(driver.worker.array_keys()) == len(driver.description.outputs)


def test_an_unloaded_job_is_freed():
    args = stack_params(), stack_batch()
    driver = Driver(stack_job(2))
    driver.steps(args, 1)
    job = weakref.ref(driver.worker.jobs[0])
    driver.worker.do(None, [], False, "unload", 0)
    gc.collect()
    assert not driver.worker.jobs
    assert job() is None


@pytest.mark.slow
def test_sent_values_outlive_the_donation_of_their_memory(monkeypatch):
    model = MLP(8, 4, 16)
    step = model_step(model)
    args = initial_args(model)
    sent_arrays: list[jax.Array] = []
    device_put = jax.device_put

    def spy(arrays, destinations):
        sent_arrays.extend(arrays if isinstance(arrays, list) else ())
        return device_put(arrays, destinations)

    monkeypatch.setattr(carriers.jax, "device_put", spy)
    driver = Driver(describe_job(pipeline(2, layer_option=autopar.AutoLayerOption(2)), step, args))
    driver.steps(args, 2)
    carried_inputs = [
        name for name, _ in driver.description.job.deliveries if name.startswith("in")
    ]
    assert carried_inputs  # Adam's count, which both stages read and one updates
    assert sent_arrays
    assert not any(array.is_deleted() for array in sent_arrays)


def test_the_error_of_an_instruction_names_its_mesh():
    args = stack_params(), stack_batch()
    driver = Driver(stack_job(2))
    name, to = next(iter(driver.description.job.deliveries))

    def raise_error(*_):
        raise MemoryError("no room")

    driver.worker.jobs[0].carriers[name, to].receive = raise_error  # pyright: ignore
    with pytest.raises(
        StepFailedError,
        match=rf"host 0, mesh {to}, instruction 'recv {name}.*': MemoryError: no room",
    ):
        driver.steps(args, 1)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: jax.debug.print("{}", x), "debug_print"),
        (
            lambda x: jax.lax.cond(x > 0, lambda: jax.pure_callback(np.asarray, x, x), lambda: x),
            "pure_callback",
        ),
    ],
)
def test_steps_that_call_python_are_refused(call: Any, name: str) -> None:
    def step(params: Any, batch: Any) -> Any:
        params, loss = stack_step(params, batch)
        result = call(loss)
        return params, loss if result is None else result

    with pytest.raises(ValueError, match=rf"step calls Python by {name} \(.*test_worker.py:"):
        describe_job(autopar.ShardParallel(), step, (stack_params(), stack_batch()))
