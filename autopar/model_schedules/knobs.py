"""Options of the shipped schedules."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Knobs:
    """Options of a shipped schedule.

    Directives over a mesh axis of one device have no effect.

    Attributes:
        tensor_axis: the mesh axis over which layers are split; the last one by default. Its size is
            the degree of tensor parallelism.
        batch_axis: the mesh axis over which the batch is split, if any. `autopar.build` takes the
            same axis.
        sequence_parallel: whether activations between split layers are split by tokens (Korthikanti
            et al., arXiv 2205.05198).
        vocabulary_parallel: whether embedding and logits are split by tokens of the vocabulary.
        flash_attention: whether attention is computed block by block, without storing its scores.
        checkpoint_ratio: the fraction of the blocks, starting with the first one, that the backward
            pass recomputes.
        pipeline_stages: the number of pipeline stages, each a run of blocks, for
            `autopar.build(backend="auto")`.
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
