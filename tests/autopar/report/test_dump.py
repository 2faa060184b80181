"""A debug dump has all files of an executable, with the contents that their names say."""

from functools import cache

import pytest

import autopar
from autopar.plan import Plan
from simulator.hardware.cluster import Cluster
from tests.steps import mlp_args, mlp_step

ARGS = mlp_args((64, 64), 32, 64)
STEP_SUFFIXES = (
    "_plan.json",
    "_plan.txt",
    "_program.txt",
    "_stages.txt",
    "_input_placement_specs.txt",
    "_output_placement_specs.txt",
)
STAGE_SUFFIXES = (
    "parallelism.txt",
    "strategies.txt",
    "resharding_tasks.txt",
    "annotated.mlir",
    "partitioned.hlo",
    "hlo",
    "mem_usage.txt",
)


def suffixes(num_stages: int) -> list[str]:
    """Return the suffixes of the files of a pipeline."""
    stages = [f"_stage_{stage}.{end}" for stage in range(num_stages) for end in STAGE_SUFFIXES]
    return [*STEP_SUFFIXES, *stages]


def made_by(method):
    return autopar.parallelize(mlp_step, method=method).get_executable(*ARGS)


@cache
def executable():
    return made_by(autopar.Zero3Parallel((4,)))


def test_files_are_named_after_the_step(tmp_path):
    endings = [*STEP_SUFFIXES, "_traced.mlir", *suffixes(1)[len(STEP_SUFFIXES) :]]
    paths = executable().dump_debug_info(tmp_path / "debug" / "run", name="step")
    assert sorted(p.name for p in (tmp_path / "debug" / "run").iterdir()) == sorted(
        f"step{e}" for e in endings
    )
    assert [p.name for p in paths] == [f"step{ending}" for ending in endings]
    text = {ending: path.read_text() for ending, path in zip(endings, paths, strict=True)}
    assert Plan.from_json(text["_plan.json"]) == executable().plan
    assert text["_stage_0.parallelism.txt"].startswith("ZeRO-3 (mesh x=4)\n")
    assert (
        "1/x: PlacementSpec(float32[32,64], P('x', None) on mesh 0)\n"
        in text["_input_placement_specs.txt"]
    )
    assert (
        "result/1: PlacementSpec(float32[], P() on mesh 0)\n" in text["_output_placement_specs.txt"]
    )
    assert "all_gather of 16,384 bytes over x" in text["_stage_0.resharding_tasks.txt"]
    assert "#0 jvp(MLP)/Dense_0/dot_general" in text["_stage_0.strategies.txt"]
    total = executable().get_total_allocation_size()
    assert text["_stage_0.mem_usage.txt"].startswith(
        f"task 0S\ntotal_allocation_size: {total / 2**30:.3f} GiB ({total:,} bytes)"
    )
    assert text["_stage_0.hlo"].strip() == executable().get_hlo_text().strip()


def test_a_second_dump_replaces_the_first(tmp_path):
    first = executable().dump_debug_info(tmp_path)
    first[0].write_text("old")
    assert executable().dump_debug_info(str(tmp_path)) == first
    assert first[0].read_text() != "old"


def test_programs_are_those_of_their_stage():
    traced, annotated, partitioned, optimized = (
        executable().get_hlo_text(status)
        for status in ("traced", "annotated", "partitioned", "optimized")
    )
    assert "stablehlo.dot_general" in traced
    assert "sharding_constraint" not in traced
    assert "sdy.sharding_constraint" in annotated
    assert "all-gather" in partitioned
    assert "is_scheduled=true" not in partitioned
    assert "all-gather" in optimized
    assert "is_scheduled=true" in optimized
    assert executable().get_hlo_text() == optimized


def test_one_device_has_nothing_to_partition():
    text = made_by(autopar.ShardParallel((1,))).get_hlo_text("partitioned")
    assert text.startswith("HloModule")


def test_an_unknown_status_is_refused():
    with pytest.raises(
        ValueError,
        match="unknown status 'final'; expected one of traced, annotated, partitioned, optimized",
    ):
        executable().get_hlo_text("final")  # pyright: ignore[reportArgumentType]


def test_a_folder_that_can_not_be_made_is_refused(tmp_path):
    taken = tmp_path / "file"
    taken.write_text("mine")
    with pytest.raises(ValueError, match=r"can't write debug info to .*file.*give a folder"):
        executable().dump_debug_info(taken)
    with pytest.raises(ValueError, match=r"can't write debug info to .*below"):
        executable().dump_debug_info(taken / "below")
    assert taken.read_text() == "mine"
    with pytest.raises(ValueError, match="can't start a file name"):
        executable().dump_debug_info(tmp_path, name="a/b")


def test_reasons_that_are_not_known_do_not_stop_a_dump(tmp_path):
    own = Cluster.load("dgx_a100_80").model_copy(update={"name": "ours"})
    each = made_by(autopar.DataParallel((4,), cluster=own))
    each.dump_debug_info(tmp_path, name="s")
    assert (
        (tmp_path / "s_stage_0.strategies.txt")
        .read_text()
        .startswith("not known: the plan is for cluster 'ours'")
    )
