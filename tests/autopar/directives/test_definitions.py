"""Directives survive JSON, and regions are arranged in an order in which they can run."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.core import Var

from autopar.directives import DirectiveSchedule
from autopar.directives.definitions import (
    Annotate,
    Checkpoint,
    CutPipelineStage,
    Decompose,
    DirectiveError,
    ForkRng,
    Fuse,
    Replace,
    Shard,
    Sync,
    Trace,
    describe,
    directive_names,
)
from autopar.directives.equation_regions import RegionNode, arrange_regions
from tests.autopar.directives.scheduled_models import scheduled
from tests.models import Transformer

TEXT = st.text(max_size=5)
SYNC = st.builds(
    Sync,
    path=TEXT,
    mode=st.sampled_from(["fwd_pre", "fwd_post", "bwd_post"]),
    op=TEXT,
    axis=st.none() | st.integers(),
    mesh_axis=TEXT,
    backward=st.sampled_from([None, "scatter", "reduce_scatter"]),
)
NOTES = st.lists(st.tuples(TEXT, TEXT | st.integers() | st.booleans())).map(tuple)
DIRECTIVE = st.one_of(
    SYNC,
    st.builds(Annotate, path=TEXT, param=TEXT, notes=NOTES),
    *(
        st.builds(directive_type)
        for directive_type in (
            Shard,
            Decompose,
            Trace,
            Fuse,
            Replace,
            Checkpoint,
            CutPipelineStage,
            ForkRng,
        )
    ),
)


@given(st.lists(DIRECTIVE, max_size=4))
def test_schedules_survive_json(directives: list) -> None:
    schedule = DirectiveSchedule(tuple(directives))
    assert DirectiveSchedule.from_json(schedule.to_json()) == schedule
    assert hash(DirectiveSchedule.from_json(schedule.to_json())) == hash(schedule)
    assert all(
        describe(directive).startswith(directive.kind) and directive.kind in directive_names()
        for directive in directives
    )


GRAPH = scheduled(Transformer(layers=1), np.zeros((1, 3), int), mesh=1).graph


@given(st.sets(st.sampled_from([node.name for node in GRAPH.nodes]), min_size=1, max_size=6))
def test_arranged_regions_compute_every_value_before_it_is_read(names: set[str]) -> None:
    """A region is refused where an equation outside reads part of it and feeds the rest."""
    region = Fuse("", tuple(names), "xla", "fused")
    try:
        units = arrange_regions(GRAPH, [(region, frozenset(names))])
    except DirectiveError:
        return
    computed: set[Var] = {*GRAPH.params, *GRAPH.args, *GRAPH.constants}
    order = [
        node for unit in units for node in (unit.nodes if isinstance(unit, RegionNode) else (unit,))
    ]
    assert sorted(node.name for node in order) == sorted(GRAPH.by_name)
    for node in order:
        assert {atom for atom in node.eqn.invars if isinstance(atom, Var)} <= computed
        computed.update(node.eqn.outvars)
    positions = [position for position, node in enumerate(order) if node.name in names]
    assert positions == list(range(positions[0], positions[0] + len(names)))
