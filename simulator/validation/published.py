"""The published sets of measurements, in the order of the report.

Their rows are in `data/published` and `data/steps`, the origins of these in `data/README.md`.
"""

from simulator.validation.cases import PublishedSet
from simulator.validation.sets import (
    alpa,
    korthikanti,
    llm_foundry,
    megatron,
    simumax,
    steps,
    vtrain,
)

PUBLISHED_SETS: tuple[PublishedSet, ...] = (
    korthikanti.KORTHIKANTI_TABLE_5,
    korthikanti.KORTHIKANTI_TABLE_4,
    megatron.SC21_PTD,
    megatron.SC21_ZERO3,
    vtrain.VTRAIN_MULTI_NODE,
    vtrain.VTRAIN_SINGLE_NODE,
    llm_foundry.LLM_FOUNDRY,
    megatron.MEGATRON_CORE,
    megatron.MT_NLG,
    simumax.SIMUMAX_TIME,
    alpa.ALPA_FIGURE_7,
    korthikanti.KORTHIKANTI_FIGURE_1,
    korthikanti.KORTHIKANTI_FIGURE_7,
    simumax.SIMUMAX_MEMORY,
    *steps.STEP_SETS,
)
"""All published sets."""
