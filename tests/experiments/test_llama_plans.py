"""Plans of a Llama are no slower than FSDP with tensor parallelism by hand."""

from dataclasses import replace

import pytest

from experiments.validation.llama_plans import LLAMA_8B, strategy_rows


@pytest.mark.slow
def test_a_plan_is_no_slower_than_degrees_by_hand_when_planned_and_compiled() -> None:
    rows = {
        (row.strategy, row.recompute): row
        for row in strategy_rows(replace(LLAMA_8B, layers=2), [16])
    }
    assert {strategy for strategy, _ in rows} == {"FSDP x TP by hand", "plan, 16 x 8"}
    for recompute in ("mlp", "full"):
        ours, by_hand = (
            rows[strategy, recompute] for strategy in ("plan, 16 x 8", "FSDP x TP by hand")
        )
        assert ours.planned_s <= by_hand.planned_s
        assert ours.compiled_s <= by_hand.compiled_s
