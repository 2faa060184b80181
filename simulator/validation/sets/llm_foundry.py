"""MosaicML llm-foundry (Apache-2.0): MPT models under FSDP on A100 and H100."""

from collections.abc import Iterator
from pathlib import Path

from simulator.transformer import Execution, Transformer, predict
from simulator.validation.cases import Case, PublishedSet
from simulator.validation.sets.published_rows import PUBLISHED, look_up, machine, records

_MPT_SIZES = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
"""Layers, hidden size and heads."""

_ATTENTION_ROWS = {("a100_80gb", "125m", 32768), ("h100_80gb", "1b", 65536)}
"""GPU, model and sequence length of the rows to which the speed of fused attention is fitted."""


def llm_foundry(folder: Path = PUBLISHED) -> Iterator[Case]:
    """Yield the steps of MPT models."""
    clusters = {"h100_80gb": "dgx_h100", "a100_80gb": "dgx_a100_80", "a100_40gb": "dgx_a100_40"}
    shipped = records("llm_foundry_fsdp")
    for row in records("llm_foundry_fsdp", folder=folder):
        layers, hidden, heads = look_up(row.model, _MPT_SIZES, "model")
        model = Transformer(
            layers=layers,
            hidden=hidden,
            heads=heads,
            seq=row.seqlen,
            vocab=50368,
            attention="flash",
            dropout=False,
            biases=False,
            precision="f8" if row.precision == "amp_fp8" else "bf16",
        )
        execution = Execution(
            data=row.gpus,
            microbatch=row.mbs,
            global_batch=row.gbs,
            zero=3 if row.sharding == "FULL_SHARD" else 2,
            recompute="full" if row.act_ckpt else "none",
            gradient_bytes=2 if row.mp_mode == "PURE" else 4,
            communicated_gradient_bytes=2,
            overlap_gradients=True,
            # gathered in 32 bits (get_mixed_precision in github.com/mosaicml/composer, early 2023,
            # composer/trainer/mosaic_fsdp.py), so that embeddings and residual sums have 32 bits;
            # norms cast their inputs (LPLayerNorm in llmfoundry/models/layers/norm.py)
            autocast=row.mp_mode == "DEFAULT",
        )
        where = machine(look_up(row.gpu, clusters, "GPU"), row.gpus)
        yield Case.of_step(
            f"{row.model} seq {row.seqlen} on {row.gpus} {row.gpu} {row.precision}",
            row.gbs * row.seqlen / row.tok_s,
            predict(model, execution, where),
            fitted=(row.gpu, row.model, row.seqlen) in _ATTENTION_ROWS and row in shipped,
        )


LLM_FOUNDRY = PublishedSet(
    name="llm-foundry",
    title="MosaicML llm-foundry, FSDP",
    unit="s",
    source="llm-foundry (Apache-2.0), A100-40, A100-80, H100",
    cases=llm_foundry,
    target=0.12,
    note=(
        "fused attention of the first generation, whose speed is fitted to two rows with long "
        "sequences; rows of mixed precision DEFAULT have parameters and a residual stream of 32 "
        "bits, which torch.autocast casts"
    ),
    files=("llm_foundry_fsdp",),
)
