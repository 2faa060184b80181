"""Handles show the modules, parameters and directives of a model or of any part of it."""

import numpy as np
import pytest

from autopar.directives import DirectiveError
from autopar.directives.definitions import directive_names
from autopar.directives.handle import Handle
from tests.autopar.directives.scheduled_models import mlp_schedule, scheduled, tensor_parallel
from tests.models import Transformer

TOKENS = np.zeros((2, 8), int)


def test_printing_a_schedule_prints_the_modules_with_their_directives() -> None:
    sch = mlp_schedule()
    tensor_parallel(sch)
    assert str(sch) == sch.mod
    assert str(sch["linear1"]).splitlines() == [
        "(linear1): Dense(bias=float32[32], kernel=float32[32, 32])",
        "  .shard(param=kernel, axis=1, mesh_axis=x)",
        "  .shard(param=bias, axis=0, mesh_axis=x)",
        "  .sync(mode=bwd_post, op=all_reduce, mesh_axis=x)",
    ]
    assert repr(sch["linear*"]) == "Handle(linear1, linear2)"


def test_every_module_has_its_own_tree_and_schedules() -> None:
    sch = scheduled(Transformer(layers=1), TOKENS, mesh=1)
    block = sch["block_0/attention"]
    lines = [line.split(":")[0] for line in block.mod.splitlines()]
    assert lines[0] == "(attention)"
    # the other line is of a scope that jnp.einsum opens
    assert {"  (q)", "  (k)", "  (v)", "  (out)"} <= set(lines[1:])
    paths = [path for path in sch.modules.by_path if path.startswith("block_0/attention")]
    assert list(block.named_schedules()) == paths
    assert len(paths) == len(lines)
    assert block.named_schedules()["block_0/attention/q"].paths == ("block_0/attention/q",)
    assert list(sch["block_0/[qu]*"].named_schedules()) == ["block_0/up"]
    assert list(sch.named_schedules()) == list(sch.modules.by_path)


def test_the_text_of_a_module_has_its_own_equations() -> None:
    sch = mlp_schedule(mesh=1)
    sch["linear1"].decompose()
    sch.trace()
    sch["linear1"].checkpoint()
    sch.fuse(sch["linear1"].find("linear1/add"), name="bias")
    equations = sch["linear1"].mod.split("\n\n")[1].splitlines()
    assert equations[0].startswith("linear1/dot_general = dot_general(arg0, linear1/kernel)")
    assert equations[-1].startswith("linear1/add = bias_0(")
    assert "linear2(...)" in sch.mod
    assert "linear2" not in sch["linear1"].mod


def test_every_primitive_is_listed_and_can_be_called() -> None:
    listed = mlp_schedule(mesh=1)["linear1"].list_primitives()
    assert set(listed) == {*directive_names(), "find", "replace_all"}
    assert all(callable(getattr(Handle, name)) for name in listed)
    other_attributes = {"mod", "named_schedules", "list_primitives", "subgraph", "shapes"}
    assert {name for name in vars(Handle) if not name.startswith("_")} - other_attributes == set(
        listed
    )


def test_the_error_of_an_unknown_parameter_names_the_nearest() -> None:
    with pytest.raises(
        DirectiveError,
        match="no parameter 'kernal' in linear1, which has bias, kernel; near it: kernel",
    ):
        mlp_schedule()["linear1"].shard("kernal", axis=0)
