"""Random steps in random microbatches by random methods equal one device, or are refused.

Refusals name the line of the step, so that its author knows what to change.
"""

import random
import warnings

import jax
import numpy as np
import pytest

import autopar
from autopar.layering.layer_clustering import NoLayersError
from autopar.runtime import local_executable
from autopar.sharding.pins import ShardingError
from autopar.sharding.selection_problem import InfeasibleError
from autopar.tracing.step_traces import TraceError
from tests.fuzz import random_operations, random_steps
from tests.fuzz.eager_tasks import eager_tasks
from tests.fuzz.outcomes import Outcomes
from tests.fuzz.random_operations import ARGS, BATCH_ARGNUMS
from tests.fuzz.random_steps import CHUNKS, AccumulatingStep, RandomStep

pytestmark = pytest.mark.fuzz

REFUSALS = ShardingError, InfeasibleError, TraceError, NoLayersError
SCHEDULES = "gpipe", "1f1b", "1f1b_overlap_friendly", "zero_bubble_h1"
SCHEDULES_OF_CHUNKS = "interleaved_1f1b", "zero_bubble_v", "dualpipe_v"


def pipeline(draw, devices, stages, count):
    """A pipeline by a random schedule, some of which have two stages on each submesh."""
    schedule = draw.choice((*SCHEDULES, *SCHEDULES_OF_CHUNKS))
    if schedule in SCHEDULES_OF_CHUNKS:
        return autopar.PipeshardParallel(
            2,
            max(count, 4),  # "dualpipe_v" needs two microbatches for each submesh
            pipeline_schedule=schedule,
            layer_option=autopar.AutoLayerOption(4),
            num_chunks=2,
        )
    return autopar.PipeshardParallel(
        devices,
        count,
        pipeline_schedule=schedule,
        layer_option=autopar.AutoLayerOption(stages),
        stage_option=autopar.UniformStageOption(stages),
    )


def method_of_single_devices(seed):
    """A random method whose stages are on one device each."""
    draw = random.Random(seed + 2)
    count = draw.choice((2, 4, 4, 8, 16))
    if draw.random() < 0.6:
        return autopar.ShardParallel(1, count)
    stages = draw.choice((2, 3))
    return pipeline(draw, stages, stages, count)


def method_of_several_devices(seed):
    """A random method that shards."""
    draw = random.Random(seed + 2)
    count = draw.choice((2, 4))
    kind = draw.randrange(4)
    if kind == 3:
        return pipeline(draw, 4, 2, count)
    methods = (autopar.DataParallel, autopar.Zero3Parallel, autopar.ShardParallel)
    return methods[kind]((2, 2) if kind == 2 else 2, count)


def compared(got, wanted):
    """What differs, beside the largest of its kind; "right" if nothing does."""
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if a.shape != b.shape:
            return f"WRONG {jax.tree_util.keystr(path)}: shape {a.shape} for {b.shape}"
        scale = max(1.0, np.abs(b).max(initial=0.0, where=np.isfinite(b)))
        if not np.allclose(a, b, rtol=2e-3, atol=1e-3 * scale, equal_nan=True):
            return f"WRONG {jax.tree_util.keystr(path)}: {a.ravel()[:3]} for {b.ravel()[:3]}"
    return "right"


def outcome_of(step, method):
    """What becomes of a step."""
    try:
        jax.eval_shape(step, *ARGS)
    except (TypeError, ValueError):
        return "no step"  # a loss of all examples may be none of a single one
    parallel = autopar.parallelize(
        step, method=method, batch_argnums=BATCH_ARGNUMS, donate_argnums=()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            got = parallel(*ARGS)
        except autopar.MicrobatchError as refused:
            sources = random_steps.__file__, random_operations.__file__
            named = any(source in str(refused) for source in sources)
            return "refused" if named else f"UNNAMED {refused}"
    with jax.disable_jit():
        return compared(got, step(*ARGS))


@pytest.mark.parametrize("part", range(8))
def test_random_steps_in_microbatches_are_right_or_refused(part, monkeypatch, record_property):
    monkeypatch.setattr(local_executable, "compile_tasks", eager_tasks)
    outcomes = Outcomes()
    for seed in range(250 * part, 250 * (part + 1)):
        method = method_of_single_devices(seed)
        outcomes.add(
            f"seed {seed}",
            lambda seed=seed, method=method: outcome_of(RandomStep(seed), method),
            REFUSALS,
            120,
        )
    record_property(f"outcomes of random steps, part {part}", dict(outcomes.counts))
    jax.clear_caches()
    assert not outcomes.faults, "\n".join(outcomes.faults[:20])
    assert outcomes.counts["right"] > 50


def test_random_steps_that_accumulate_are_right_or_refused(monkeypatch, record_property):
    monkeypatch.setattr(local_executable, "compile_tasks", eager_tasks)
    outcomes = Outcomes()
    for seed in range(2200, 2400):
        draw = random.Random(seed + 2)
        stages = draw.choice((2, 3))
        method = pipeline(draw, stages, stages, CHUNKS)
        outcomes.add(
            f"seed {seed}",
            lambda seed=seed, method=method: outcome_of(AccumulatingStep(seed), method),
            REFUSALS,
            120,
        )
    record_property("outcomes of random steps that accumulate", dict(outcomes.counts))
    jax.clear_caches()
    assert not outcomes.faults, "\n".join(outcomes.faults[:20])
    assert outcomes.counts["right"] > 100


def test_random_steps_on_several_devices_are_right_or_refused(record_property):
    outcomes = Outcomes()
    for seed in range(2000, 2100):
        method = method_of_several_devices(seed)
        outcomes.add(
            f"seed {seed}",
            lambda seed=seed, method=method: outcome_of(RandomStep(seed), method),
            REFUSALS,
            120,
        )
        jax.clear_caches()
    record_property("outcomes of random steps on several devices", dict(outcomes.counts))
    assert not outcomes.faults, "\n".join(outcomes.faults[:20])
    assert outcomes.counts["right"] > 20
