"""Layer clustering cuts a step where few bytes cross, as in golden cases and by brute force."""

import json
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autopar.layering.layer_clustering import (
    EPS,
    MIN_HEAVY,
    NoLayersError,
    after_heavy,
    cluster_layers,
    received_bytes,
)

INSTANCES = json.loads((Path(__file__).parents[2] / "golden" / "layer_clusters.json").read_text())[
    "instances"
]


def from_rows(rows):
    """Convert the golden file's `received`, rows by start, to columns by stop."""
    return lambda: (
        np.array([rows[start][stop - start - 1] for start in range(stop)])
        for stop in range(1, len(rows) + 1)
    )


@pytest.mark.parametrize(
    "golden", INSTANCES, ids=lambda x: f"{len(x['flops'])}-{x['num_layers']}-{x['eps']}"
)
def test_clustering_finds_the_recorded_optimum(golden):
    flops, rows = np.array(golden["flops"]), golden["received"]
    assert (flops > 0).tolist() == [bool(heavy) for heavy in golden["heavy"]]
    arguments = flops, from_rows(rows), golden["num_layers"], golden["eps"]
    if golden["bottleneck"] is None:
        with pytest.raises(NoLayersError, match="use a larger eps"):
            cluster_layers(*arguments)
        return
    stops = cluster_layers(*arguments)
    assert max(rows[a][b - a - 1] for a, b in pairwise((0, *stops))) == golden["bottleneck"]


def bytes_received(values, start: int, stop: int) -> float:
    return sum(
        size
        for producer, size, users in values
        if producer < start and any(start <= user < stop for user in users)
    )


@st.composite
def graphs(draw):
    """Draw the work of equations, and values as (producing equation, bytes, users)."""
    size = draw(st.integers(1, 9))
    values = []
    for producer in range(size - 1):
        users = draw(st.lists(st.integers(producer + 1, size - 1), unique=True, max_size=3))
        values.append((producer, float(draw(st.integers(0, 9))), sorted(users)))
    return np.array(draw(st.lists(st.integers(0, 4), min_size=size, max_size=size)), float), values


@given(graphs())
def test_received_bytes_are_those_of_values_produced_before_the_layer(graph):
    flops, values = graph
    for stop, column in enumerate(received_bytes(len(flops), values)(), start=1):
        assert column.tolist() == [bytes_received(values, start, stop) for start in range(stop)]


@given(graphs(), st.integers(1, 4), st.sampled_from([0.0, 0.2, 1.0]))
def test_clustering_finds_the_optimum_of_brute_force(graph, num_layers, eps):
    flops, values = graph
    heavy = flops > 0
    assume(num_layers <= heavy.sum())
    least, share = min(MIN_HEAVY, heavy.sum() // num_layers), (1 + eps) * flops.sum() / num_layers
    candidates = []
    for cut in combinations(range(1, len(flops)), num_layers - 1):
        layers = list(pairwise((0, *cut, len(flops))))
        counts = [heavy[a:b].sum() for a, b in layers]
        work = [flops[a:b].sum() for a, b in layers]
        if all(
            n >= least and (w <= share * (1 + 1e-9) or n == least)
            for n, w in zip(counts, work, strict=True)
        ):
            candidates.append(
                (max(bytes_received(values, a, b) for a, b in layers), sum(w * w for w in work))
            )
    received = received_bytes(len(flops), values)
    if not candidates:
        with pytest.raises(NoLayersError):
            cluster_layers(flops, received, num_layers, eps)
        return
    layers = list(pairwise((0, *cluster_layers(flops, received, num_layers, eps))))
    most = max(bytes_received(values, a, b) for a, b in layers)
    work = [flops[a:b].sum() for a, b in layers]
    assert (most, sum(w * w for w in work)) == min(candidates)


@given(graphs(), st.integers(1, 4))
def test_work_that_is_too_uneven_is_divided_as_evenly_as_it_can_be(graph, num_layers):
    flops, values = graph
    heavies = int((flops > 0).sum())
    assume(num_layers <= heavies)
    received = received_bytes(len(flops), values)
    stops = cluster_layers(flops, received, num_layers)
    least, usual = min(MIN_HEAVY, heavies // num_layers), (1 + EPS) * flops.sum() / num_layers
    most = []
    for cut in combinations(range(1, len(flops)), num_layers - 1):
        parts = [flops[a:b] for a, b in pairwise((0, *cut, len(flops)))]
        if all((part > 0).sum() >= least for part in parts):
            large = [part.sum() for part in parts if (part > 0).sum() > least]
            most.append(max(large, default=0.0))
    parts = [flops[a:b] for a, b in pairwise((0, *stops))]
    large = [part.sum() for part in parts if (part > 0).sum() > least]
    assert max(large, default=0.0) <= max(usual, min(most)) * (1 + 1e-6)


def test_a_stack_of_blocks_is_cut_between_blocks():
    """10 bytes are live inside a block, 1 byte between blocks."""
    blocks, size = 4, 6
    values = [(e, 1.0 if e % size == size - 1 else 10.0, [e + 1]) for e in range(blocks * size - 1)]
    received = received_bytes(blocks * size, values)
    assert cluster_layers(np.ones(blocks * size), received, blocks, eps=0.5) == (6, 12, 18, 24)


def test_more_layers_than_heavy_equations_are_refused():
    with pytest.raises(NoLayersError, match=r"3 layers asked of 2 heavy .*; use 1 to 2"):
        cluster_layers(np.array([1.0, 0.0, 1.0]), received_bytes(3, []), 3)
    with pytest.raises(NoLayersError, match=r"2 layers asked of 1 heavy .*; use 1 layer, and no"):
        cluster_layers(np.array([1.0, 0.0]), received_bytes(2, []), 2)
    with pytest.raises(NoLayersError, match=r"use a method without a pipeline$"):
        cluster_layers(np.zeros(3), received_bytes(3, []), 2, line_of="step.py:{}".format)


def test_the_error_of_too_few_heavy_equations_names_their_lines():
    flops = np.array([1.0, 0.0, 1.0])
    with pytest.raises(NoLayersError, match=r"the equations are at step\.py:0, step\.py:2$"):
        cluster_layers(flops, received_bytes(3, []), 3, line_of="step.py:{}".format)


def test_equations_that_depend_on_heavy_ones_are_layers_if_there_are_too_few_of_these():
    flops = np.array([0.0, 1.0, 0.0, 0.0, 1.0])
    values = [(0, 1.0, [1]), (1, 1.0, [2]), (2, 1.0, [3]), (3, 1.0, [4])]
    light = after_heavy(flops > 0, values)
    assert light.tolist() == [False, True, True, True, True]
    received = received_bytes(5, values)
    assert cluster_layers(flops, received, 2, light=light) == cluster_layers(flops, received, 2)
    assert cluster_layers(flops, received, 4, light=light) == (2, 3, 4, 5)
    with pytest.raises(NoLayersError, match=r"5 layers asked of 4 equations, .*; use 1 to 4"):
        cluster_layers(flops, received, 5, light=light)
