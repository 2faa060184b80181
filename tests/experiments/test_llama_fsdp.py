"""A Llama with cuDNN's attention compiles without a GPU, and both predictions agree."""

import pytest

from experiments.validation.llama_fsdp import compare


@pytest.mark.slow
def test_compiled_and_closed_form_predictions_agree_on_fsdp_with_cudnn_attention() -> None:
    (row,) = compare(layers=4, kinds=("mlp",))
    assert row.compiled.unmodelled_kernels == {}
    assert row.compiled.seconds == pytest.approx(row.formula.seconds, rel=0.2)
