"""What one chooses about a shipped schedule."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Knobs:
    """How much of what a shipped schedule does. On a mesh axis of one device the directives about it do nothing.

    Attributes:
        tensor_axis: the mesh axis over which layers are split; the last one by default. Its size is the degree.
        batch_axis: the mesh axis over which the batch is split, if any; `autopar.build` is told the same.
        sequence_parallel: between split layers the tokens are split, too (Korthikanti et al., arXiv 2205.05198).
        vocabulary_parallel: embedding and logits are split by tokens of the vocabulary.
        flash_attention: attention is computed block by block, its scores never kept.
        checkpoint_ratio: the part of the blocks, from the first on, that are computed again in the backward pass.
        pipeline_stages: runs of blocks that become stages of a pipeline, for `autopar.build(backend="auto")`.
    """

    tensor_axis: str | None = None
    batch_axis: str | None = None
    sequence_parallel: bool = False
    vocabulary_parallel: bool = False
    flash_attention: bool = False
    checkpoint_ratio: float = 0.0
    pipeline_stages: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.checkpoint_ratio <= 1:
            raise ValueError(
                f"checkpoint_ratio is {self.checkpoint_ratio}, expected a part between 0 and 1"
            )
        if self.pipeline_stages < 1:
            raise ValueError(f"pipeline_stages is {self.pipeline_stages}, expected at least 1")
