"""Tables of training steps: rows with wrong cells, and the scenarios of rows of each framework."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from simulator.cli import app
from simulator.files import FileError
from simulator.transformer import EAGER
from simulator.validation.cases import Case
from simulator.validation.report import Comparison
from simulator.validation.sets.steps import STEP_SETS, STEPS, is_fitted, sets_of_rows, step_cases
from simulator.validation.step_notes import notes_of
from simulator.validation.step_recompute import recomputation_of
from simulator.validation.step_rows import COLUMNS, BadRow, StepRow, StepRowError, read_step_table
from simulator.validation.step_scenarios import StepScenario, scenario_of
from tests.simulator.test_transformer_experts import active_parameters

HEADER = "model,gpu,gpus,layers,hidden,ffn,heads,kv_heads,vocab,seq,tp,pp,vp,dp,micro_batch,"
HEADER += "global_batch,recompute,zero,precision,step_s,memory_gb,outcome,framework,notes"
LLAMA = "llama3-8b,H100,16,32,4096,14336,32,8,128256,8192,2,2,4,4,1,64,none,1,bf16,5.0,60,ok,NeMo,"


def row_with(**changes: Any) -> StepRow:
    fields = {
        "line": 1,
        "model": "llama3-8b",
        "gpu": "H100",
        "gpus": 8,
        "layers": 32,
        "hidden": 4096,
        "ffn": 14336,
        "heads": 32,
        "kv_heads": 8,
        "vocab": 128256,
        "seq": 8192,
        "micro_batch": 1,
        "global_batch": 128,
        "framework": "NeMo",
    }
    return StepRow(**fields | changes)


def first_row(file: str, framework: str) -> StepScenario:
    rows = read_step_table(STEPS / f"{file}.csv").rows
    row = next(
        row for row in rows if isinstance(row, StepRow) and row.framework.startswith(framework)
    )
    return scenario_of(row)


def write_rows(folder: Path, *rows: str, header: str = HEADER) -> Path:
    path = folder / "own.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def test_a_row_has_the_values_of_its_cells(tmp_path: Path) -> None:
    (row,) = read_step_table(write_rows(tmp_path, LLAMA)).rows
    assert isinstance(row, StepRow)
    assert (row.line, row.layers, row.step_s, row.cp, row.sequence_parallel) == (
        1,
        32,
        5.0,
        1,
        None,
    )
    assert row.name == "llama3-8b 16 H100 bf16 tp2 pp2 vp4 mb1 #1"


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("H100,16,32,", "H100,16,a,", "column layers: given 'a', expected a whole number of at"),
        ("H100,16,32,", "H100,16,32.5,", "column layers: given '32.5', expected a whole number"),
        ("H100,16,32,", "H100,,32,", "column gpus: empty; each row must have it"),
        (",5.0,60,", ",-5,60,", "column step_s: given '-5', expected a number above 0"),
        (",none,1,", ",none,4,", "column zero: given '4', expected 0, 1, 2 or 3"),
        (",NeMo,", ",NeMo", "given 23 cells, expected 24, as in the header"),
        (",NeMo,", ",NeMo,,", "given 25 cells, expected 24, as in the header"),
    ],
)
def test_a_wrong_cell_refuses_its_row_alone(tmp_path: Path, old: str, new: str, why: str) -> None:
    good, bad = read_step_table(write_rows(tmp_path, LLAMA, LLAMA.replace(old, new))).rows
    assert isinstance(good, StepRow)
    assert isinstance(bad, BadRow)
    assert (bad.line, why in bad.why) == (2, True)


def test_a_table_without_a_column_that_it_needs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"no column hidden; given \['model', .*expected some of"):
        read_step_table(write_rows(tmp_path, header=HEADER.replace("hidden,", "")))
    unmeasured = "model,gpu,gpus,layers,hidden,heads,vocab,seq"
    with pytest.raises(FileError, match="no column step_s or"):
        read_step_table(write_rows(tmp_path, header=unmeasured))


def test_a_table_with_a_column_twice_or_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="column tp is given 2 times; expected once"):
        read_step_table(write_rows(tmp_path, f"{LLAMA},4", header=f"{HEADER},tp"))
    with pytest.raises(FileError, match="no rows below the header; expected a row for each step"):
        read_step_table(write_rows(tmp_path))


def test_a_table_of_a_spreadsheet_may_start_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = write_rows(tmp_path, LLAMA)
    rows = read_step_table(path).rows
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_step_table(path).rows == rows


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"hidden": None}, "column hidden: empty; a prediction needs it"),
        ({"gpu": "TPU"}, "column gpu: given 'TPU', expected one of A100"),
        ({"tp": 3}, r"column gpus: given 8, expected a multiple of tp \* pp \* cp, which is 3"),
        ({"dp": 4}, r"column dp: given 4, expected gpus / \(tp \* pp \* cp\), which is 8"),
        ({"precision": "int4"}, "column precision: given 'int4', expected one of bf16"),
        ({"recompute": "some"}, "column recompute: given 'some', expected none, selective"),
        (
            {"notes": "FSDP over 5 GPUs"},
            r"column notes: sharding over 5 GPUs, expected a divisor of gpus / \(tp \* pp\), which"
            " is 8",
        ),
    ],
)
def test_a_row_that_scenarios_cannot_express_says_why(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(StepRowError, match=why):
        scenario_of(row_with(**changes))


def test_the_reference_lists_every_column() -> None:
    text = (Path(__file__).parents[2] / "docs/reference/measured-steps.md").read_text()
    assert all(f"`{column}`" in text for column in COLUMNS)


def test_degrees_of_a_row_become_those_of_its_execution() -> None:
    scenario = scenario_of(row_with(gpus=64, tp=2, pp=2, vp=4, cp=2, recompute="full", zero=1))
    execution = scenario.execution
    assert (execution.tensor, execution.pipeline, execution.interleave) == (2, 2, 4)
    assert (execution.context, execution.data, execution.microbatch) == (2, 8, 1)
    assert (execution.recompute, execution.zero, execution.sequence_parallel) == ("full", 1, True)
    assert scenario.machine.cluster.num_devices == 64


ATTENTION = ("queries", "keys", "values", "output")


@pytest.mark.parametrize(
    ("text", "kind", "saved"),
    [
        ("none", "none", ()),
        ("Full", "full", ()),
        ("selective", "selective", ()),
        ("selective op", "unsaved", ("queries", "values", "context", "gate")),
        ("selective_op", "unsaved", ("queries", "values", "context", "gate")),
        ("remat SAVE_QKV_OUT_PROJ", "unsaved", ATTENTION),
        ("save_dot_except_mlp", "unsaved", ATTENTION),
        ("save_dot_except_mlpwi", "unsaved", ATTENTION),
        ("save_dot_with_context_except_mlp", "unsaved", (*ATTENTION, "context")),
        ("save_qkv_proj", "unsaved", ("queries", "keys", "values")),
        ("remat SAVE_DOT_ONLY", "unsaved", (*ATTENTION, "gate", "up")),
        ("minimal_flash", "unsaved", (*ATTENTION, "gate", "up", "context")),
        ("nothing_saveable", "unsaved", ()),
        ("selective (op)", "unsaved", ("queries", "values", "context", "gate")),
        ("remat_policy=save_qkv_proj", "unsaved", ("queries", "keys", "values")),
        ("qkv_proj_offloaded", "unsaved", ("queries", "keys", "values")),
        ("dot_except_mlp", "unsaved", ATTENTION),
        ("full activation recomputation", "full", ()),
        ("True", "full", ()),
        # the column says what is recomputed, a policy what is saved
        ("everything", "full", ()),
        ("nothing", "none", ()),
        ("remat_policy: everything", "none", ()),
        ("remat_policy: nothing", "unsaved", ()),
        ("save_everything", "none", ()),
    ],
)
def test_recomputation_has_the_names_of_each_framework(
    text: str, kind: str, saved: tuple[str, ...]
) -> None:
    recomputation = recomputation_of(row_with(recompute=text))
    assert recomputation is not None
    assert recomputation.fields == {"recompute": kind, "saved": saved, "recomputed": ()}


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("core_attn", ("core_attn",)),
        ("moe_act, layernorm", ("layernorm", "moe_act")),
        ("core_attn+layernorm", ("core_attn", "layernorm")),
        ("moe;core_attn", ("core_attn", "moe")),
        ("selective (core_attn)", ("core_attn",)),
        ("[moe_act, mla_up_proj]", ("mla_up_proj", "moe_act")),
        ("recompute shared_experts mlp", ("mlp", "shared_experts")),
    ],
)
def test_recomputed_modules_have_their_names_in_megatron(
    text: str, modules: tuple[str, ...]
) -> None:
    recomputation = recomputation_of(row_with(recompute=text))
    assert recomputation is not None
    fields = {"recompute": "modules", "saved": (), "recomputed": modules}
    assert recomputation.fields == fields


def test_an_empty_cell_says_nothing_about_recomputation() -> None:
    assert recomputation_of(row_with(recompute="")) is None


def test_an_unknown_policy_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(StepRowError, match=r"given 'save_some_proj', expected .*save_qkv_proj"):
        recomputation_of(row_with(recompute="save_some_proj"))


def test_full_recomputation_leaves_out_what_jax_and_pytorch_do_not_read() -> None:
    kinds = {
        name: scenario_of(row_with(recompute="full", framework=name, zero=3)).execution.recompute
        for name in ("NeMo", "NeMo AutoModel", "MaxText", "Pax (JAX)", "torchtitan")
    }
    assert kinds == {
        "NeMo": "full",
        "NeMo AutoModel": "full",
        "MaxText": "unsaved",
        "Pax (JAX)": "unsaved",
        "torchtitan": "unsaved",
    }


def test_torchtitan_saves_attention_alone_where_products_have_8_bits() -> None:
    titan = {"framework": "torchtitan", "zero": 3, "recompute": "selective op"}
    assert scenario_of(row_with(**titan, precision="fp8")).execution.saved == ("context",)
    assert scenario_of(row_with(**titan | {"recompute": "selective"})) == scenario_of(
        row_with(**titan)
    )
    assert "gate" in scenario_of(row_with(**titan)).execution.saved


def test_fsdp_of_xla_that_does_not_fit_recomputes_what_lets_it_fit() -> None:
    sizes = {"layers": 96, "hidden": 12288, "ffn": 49152, "heads": 96, "kv_heads": 96}
    large = sizes | {"model": "gpt3-175b", "gpus": 256, "micro_batch": 6, "global_batch": 1536}
    fields = large | {"seq": 2048, "framework": "Pax (JAX)", "zero": 3}
    whole = scenario_of(row_with(**fields)).execution
    assert (whole.recompute, whole.saved) == ("unsaved", ())
    assert "up" in scenario_of(row_with(**fields | {"layers": 4})).execution.saved
    maxtext = fields | {"layers": 4, "framework": "MaxText"}
    assert scenario_of(row_with(**maxtext)).execution.recompute == "none"
    said = scenario_of(row_with(**fields | {"recompute": "SAVE_DOT_ONLY"}))
    assert "up" in said.execution.saved


def test_pax_runs_as_the_recipes_of_each_of_its_sources() -> None:
    sizes = {"layers": 24, "hidden": 4096, "ffn": 16384, "heads": 32, "kv_heads": 32, "seq": 2048}
    fields = sizes | {"model": "gpt3-5b", "framework": "Pax (JAX)", "zero": 3}
    pipelined = scenario_of(row_with(**fields, source="github.com/NVIDIA/dgxc-benchmarking@v24.11"))
    assert pipelined.execution.copies_shards
    toolbox = fields | {"source": "github.com/NVIDIA/JAX-Toolbox@ddf1b991^"}
    by_xla = scenario_of(row_with(**toolbox))
    assert (by_xla.model.attention, by_xla.model.dropout) == ("naive", False)
    assert "softmax_by_xla" in by_xla.execution.composed
    engine = scenario_of(row_with(**toolbox | {"notes": "flash attention; Transformer Engine"}))
    assert engine.model.attention == "flash2"
    assert not engine.execution.copies_shards


def test_tables_of_t5_and_vision_transformers_have_an_encoder_and_no_causal_mask() -> None:
    sizes = {"layers": 48, "hidden": 2048, "ffn": 5120, "heads": 32, "kv_heads": None, "seq": 512}
    t5 = scenario_of(row_with(model="t5-v1.1-xl", framework="T5X (JAX)", **sizes))
    assert t5.model.encoder is not None
    assert (t5.model.layers, t5.model.encoder.layers) == (24, 24)
    assert (t5.model.seq, t5.model.encoder.seq, t5.model.head_width) == (128, 512, 64)
    assert (t5.execution.zero, t5.execution.overlap_gradients) == (0, False)
    image = {"layers": 48, "hidden": 1664, "ffn": 8192, "heads": 16, "kv_heads": None, "seq": 257}
    vit = scenario_of(row_with(model="vit-g14", framework="t5x ViT (JAX)", **image, vocab=None))
    assert (vit.model.causal, vit.model.vocab) == (False, 3 * 14 * 14)


def test_a_table_leaves_out_what_frameworks_always_do() -> None:
    pipeline = row_with(framework="NeMo AutoModel", gpus=64, pp=4, zero=3)
    assert scenario_of(pipeline).execution.zero == 2
    experts = {"model": "gpt-oss-120b", "framework": "NeMo AutoModel", "gpus": 64, "zero": 3}
    sizes = {name: None for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab")}
    row = row_with(**experts | sizes | {"notes": "TE + DeepEP"})
    assert scenario_of(row).execution.expert == 64
    assert scenario_of(row_with(**experts | sizes)).execution.expert == 1
    titan = {"framework": "torchtitan", "zero": 3, "micro_batch": 2}
    assert "activation" in scenario_of(row_with(**titan)).execution.composed
    compiled = row_with(**titan | {"notes": "torch.compile"})
    assert scenario_of(compiled).execution.composed == ("complex_rotary",)
    assert (
        "activation" in scenario_of(row_with(**titan | {"notes": "no compile"})).execution.composed
    )
    old = row_with(gpu="V100-16GB", framework="Megatron-LM", precision="fp16")
    assert scenario_of(old).model.attention == "naive"


def test_layers_that_predict_further_tokens_leave_fewer_layers_to_the_last_stage() -> None:
    sizes = {name: None for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab")}
    recipe = {"model": "deepseek-v3", "framework": "Megatron-Bridge", "gpus": 256, "gpu": "GB200"}
    row = row_with(**sizes | recipe | {"pp": 4, "vp": 4, "ep": 64, "precision": "mxfp8"})
    assert scenario_of(row).execution.stage_layers == (4,) * 15 + (1,)
    whole = row_with(**sizes | recipe | {"ep": 64, "precision": "mxfp8", "global_batch": 256})
    assert scenario_of(whole).execution.stage_layers is None


def test_stages_of_aleph_alpha_count_the_embedding_and_the_head_as_layers() -> None:
    layout = {"framework": "Aleph Alpha scaling", "gpu": "A100", "gpus": 64, "layers": 40}
    stages = [scenario_of(row_with(**layout | {"pp": pp})).execution for pp in (1, 2, 4)]
    layers = [execution.stage_layers for execution in stages]
    assert layers == [None, (20, 20), (10, 11, 10, 9)]
    assert stages[0].separate_gates
    assert [execution.messages for execution in stages] == [2, 2, 4]
    assert stages[0].gradient_copy_bytes == 24
    assert stages[0].all_reduces_gradients
    assert scenario_of(row_with(**layout | {"pp": 2, "vp": 2})).execution.stage_layers is None


def test_last_stages_of_internevo_have_one_layer_more() -> None:
    table = {"framework": "InternEvo", "gpus": 12, "layers": 32, "global_batch": 24}
    stages = [scenario_of(row_with(**table | {"pp": pp})).execution for pp in (1, 3, 4, 6)]
    layers = [execution.stage_layers for execution in stages]
    assert layers == [None, (10, 11, 11), (8, 8, 8, 8), (5, 5, 5, 5, 6, 6)]
    assert (stages[0].all_reduces_gradients, stages[0].gradient_copy_bytes) == (True, 8)
    assert stages[0].gradient_buffer_bytes == 2**31


def test_oneflow_computes_the_loss_in_16_bits_and_has_buffers_for_two_pipelines() -> None:
    old = {"framework": "OneFlow", "gpu": "V100-16GB", "precision": "fp16", "gpus": 16}
    one, tensor, pipeline = (
        scenario_of(row_with(**old | degrees)).execution for degrees in ({}, {"tp": 2}, {"pp": 4})
    )
    assert one.loss_in_16_bits
    assert not tensor.loss_in_16_bits
    assert pipeline.spare_microbatches == 4


def test_oneflow_overlaps_sends_and_without_tensor_parallelism_gradients() -> None:
    old = {"framework": "OneFlow", "gpu": "V100-16GB", "precision": "fp16", "gpus": 16}
    data, tensor = (scenario_of(row_with(**old | {"tp": tp})).execution for tp in (1, 2))
    assert (data.overlap_gradients, tensor.overlap_gradients) == (True, False)
    assert data.overlap_sends
    assert tensor.overlap_sends


ALL_MODULES = ("moe", "layernorm", "core_attn", "moe_act")


def test_recipes_of_megatron_bridge_say_what_experts_and_attention_do() -> None:
    sizes = {name: None for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab")}
    bridge = sizes | {"framework": "Megatron-Bridge", "gpus": 64, "ep": 64, "gpu": "GB300"}

    def scenario(model: str, precision: str, **changes: Any) -> StepScenario:
        return scenario_of(row_with(**bridge | {"model": model, "precision": precision} | changes))

    sixteen, eight = scenario("gpt-oss-120b", "bf16"), scenario("gpt-oss-120b", "mxfp8")
    assert (sixteen.execution.dispatch, eight.execution.dispatch) == ("all_to_all", "deduplicated")
    assert sixteen.model.experts_section.biases
    assert not eight.model.experts_section.biases
    assert sixteen.model.experts_section.clamped
    assert not eight.model.experts_section.clamped
    automodel = scenario("gpt-oss-120b", "bf16", framework="NeMo AutoModel", ep=8)
    assert not automodel.model.experts_section.clamped
    assert sixteen.execution.composed == eight.execution.composed == ("rotary",)
    assert automodel.execution.composed == ()
    assert sixteen.model.attention == "cudnn"
    four = scenario("Nemotron_3_Super", "nvfp4")
    assert four.model.layers_in_16_bits == 15
    assert scenario("Nemotron_3_Super", "mxfp8").model.layers_in_16_bits == 0
    qwen = {"ep": 8, "notes": "26.06 container"}
    assert scenario("qwen3-30b-a3b", "mxfp8", **qwen).model.attention == "cudnn_f8"
    assert scenario("qwen3-30b-a3b", "mxfp8", ep=8).model.attention == "cudnn"
    assert scenario("qwen3-30b-a3b", "mxfp8", ep=8).model.head_norms
    super_ = {"model": "Nemotron_3_Super", "precision": "mxfp8", "gpu": "GB200"}
    assert scenario(**super_).execution.recomputed == ALL_MODULES
    assert scenario(**super_, tp=2).execution.recompute == "none"
    for given, parts in (
        (super_, ("mixer", "router")),
        ({"model": "qwen3-30b-a3b", "precision": "mxfp8", "ep": 8}, ("router",)),
        ({"model": "qwen3-30b-a3b", "precision": "fp8", "gpu": "H100", "ep": 8}, ()),
        ({"model": "gpt-oss-120b", "precision": "bf16", "gpu": "GB200"}, ()),
        ({"model": "gpt-oss-120b", "precision": "bf16", "framework": "NeMo 25.07"}, ()),
    ):
        assert scenario(**given).machine.backend.captured == parts
    nano = {"model": "Nemotron_3_Nano", "precision": "fp8", "gpu": "H100", "ep": 8}
    assert scenario(**nano).execution.recomputed == ALL_MODULES
    assert scenario(**nano, recompute="none").execution.recompute == "none"
    assert scenario(**nano, recompute="save_qkv_proj").execution.recompute == "unsaved"
    # whichever way the model, the GPU and the precision are spelled
    spelled = scenario("Qwen3 MoE 30B A3B", "FP8 MX", gpu="NVIDIA GB300", **qwen)
    assert spelled == scenario("qwen3-30b-a3b", "mxfp8", gpu="GB300", **qwen)


def test_each_framework_has_its_architecture_kernels_and_network() -> None:
    layouts = first_row("layouts_a100_oom", "Aleph Alpha")
    assert (layouts.model.gated, layouts.model.tied, layouts.model.attention) == (
        (True, False, "flash2")
    )
    assert layouts.execution.zero == 1
    gpt = first_row("dlperf_gpt_v100", "OneFlow")
    assert (gpt.model.gated, gpt.model.tied, gpt.model.precision) == (False, True, "f16")
    assert gpt.machine.cluster.nics_per_host == 1
    roce = first_row("internevo_a100_roce", "InternEvo")
    assert roce.machine.cluster.nics_per_host == 4
    assert roce.machine.cluster.inter_host is not None
    assert roce.machine.cluster.inter_host.bandwidth_gb_per_s == pytest.approx(0.967 * 12.5)
    fp8 = first_row("nemo_24.07-25.07", "NeMo 24.07")
    assert fp8.model.precision == "f8"
    relu = notes_of(row_with(notes="squared-relu MLP (two matrices), sequence parallel"))
    assert (relu.squared_relu, relu.sequence_parallel) == (True, True)
    assert notes_of(row_with(notes="FSDP over 8 GPUs x DP 4")).shards == 8


@pytest.mark.slow
def test_every_shipped_row_is_predicted_or_refused_with_a_reason() -> None:
    for published in STEP_SETS:
        rows = list(published.cases())
        assert rows
        assert all(row.name for row in rows)


def test_a_file_of_steps_is_compared_by_the_command(tmp_path: Path) -> None:
    oom = LLAMA.replace(",5.0,60,ok,", ",,,OOM Error,")
    other = LLAMA.replace("NeMo", "MaxText").replace(",60,", ",600,")
    path = write_rows(tmp_path, LLAMA, oom, other, LLAMA.replace("H100,16", "H100,x"))
    run = CliRunner().invoke
    result = run(app, ["validate", "--data", str(path), "--json"])
    assert result.exit_code == 0
    steps, memory = json.loads(result.stdout)
    assert (steps["count"], steps["unpredicted"]) == (2, 1)
    assert steps["out_of_memory"]["misses"] + steps["out_of_memory"]["hits"] == 1
    assert (memory["count"], memory["unit"]) == (1, "GB")
    assert "column memory_gb: given 600" in memory["rows_without_prediction"][0]["why"]
    table = run(app, ["validate", "--data", str(path), "--by", "framework"])
    assert "own MaxText" in table.stdout
    assert "row 4" in table.output
    unknown = run(app, ["validate", "--data", str(path), "--by", "color"])
    assert unknown.exit_code == 2
    assert "unknown column 'color'" in unknown.output


def test_a_framework_that_is_not_known_is_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path, LLAMA, LLAMA.replace("NeMo", "Ours"), LLAMA.replace("NeMo", ""))
    result = CliRunner().invoke(app, ["validate", "--data", str(path)])
    assert result.stderr.count("is not known, and counts as Megatron-Core") == 1
    assert "framework 'Ours' is not known" in result.stderr


def test_rows_without_a_measurement_are_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path, LLAMA, LLAMA.replace(",5.0,60,", ",,60,"))
    times, memory = (
        Comparison.of(published) for published in sets_of_rows(path, read_step_table(path).rows)
    )
    assert [row.why for row in times.unpredicted] == [
        "columns step_s, tokens_per_s_per_gpu and tflops_per_gpu: empty"
    ]
    assert memory.statistics.count == 2


def test_notes_of_adapters_and_sharding_groups_become_fields() -> None:
    row = row_with(framework="NeMo MLPerf v5.0 LoRA r16", zero=1, notes="zero1=4; micro_num 4")
    scenario = scenario_of(row)
    assert scenario.model.adapters is not None
    assert (scenario.model.adapters.rank, scenario.model.adapters.of) == (16, "attention")
    assert scenario.execution.shards == 4
    bridge = scenario_of(row_with(framework="Megatron-Bridge", notes="LoRA Performance"))
    assert bridge.model.adapters is not None
    assert bridge.model.adapters.of == "qkv"


def test_notes_complete_empty_cells_and_degrees_that_contradict_the_batch() -> None:
    notes = "GPU memory test, micro_num 4, seq not stated (7B_sft config: 2048)"
    row = row_with(gpus=4, pp=4, seq=None, global_batch=None, notes=notes, framework="InternEvo")
    scenario = scenario_of(row)
    assert scenario.model.seq == 2048
    assert scenario.execution.global_batch == 4
    doubted = row_with(gpus=64, tp=2, cp=2, global_batch=8, micro_batch=None, dp=16)
    with pytest.raises(ValueError, match="global_batch: given 8"):
        scenario_of(doubted)
    execution = scenario_of(replace(doubted, notes="table prints DP 4")).execution
    assert (execution.context, execution.data) == (4, 8)


def test_a_row_with_memory_alone_belongs_to_no_set_of_times() -> None:
    times, memory = (
        next(entry for entry in STEP_SETS if entry.name == name)
        for name in ("internevo", "internevo-memory")
    )
    assert (len(list(times.cases())), len(list(memory.cases()))) == (27, 8)


@pytest.mark.parametrize(
    ("model", "total", "active"),
    [
        ("deepseek-v2", 236, 21),
        ("DeepSeek-V2-Lite", 15.7, 2.66),
        ("GLM-4.5", 353, 32),
        ("moonlight-16b", 16, 3),
        ("Llama4 Maverick", 401, 17),
        ("llama-4-scout", 108, 17),
        ("Llama4-E16", 108, 17),
        ("GLM-4.5-Air", 107, 13),
        ("DeepSeekV4 Pro", 1600, 49),
    ],
)
def test_models_with_experts_have_the_parameters_that_their_cards_state(
    model: str, total: int, active: int
) -> None:
    row = row_with(model=model, seq=4096, ep=8, layers=None, heads=None, vocab=None, hidden=None)
    scenario = scenario_of(replace(row, ffn=None, kv_heads=None, framework="Megatron-Bridge"))
    assert scenario.model.parameters / 1e9 == pytest.approx(total, rel=0.01)
    assert active_parameters(scenario.model) / 1e9 == pytest.approx(active, rel=0.06)


@pytest.mark.parametrize(
    ("model", "layers", "total"),
    [("Nemotron-H 8B", 52, 8.1), ("nemotronh_47b", 98, 46.8), ("NemotronH 56B", 118, 56.3)],
)
def test_hybrids_have_the_layers_and_parameters_that_their_cards_state(
    model: str, layers: int, total: float
) -> None:
    sizes = dict.fromkeys(("layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "seq"))
    scenario = scenario_of(row_with(**sizes, model=model, framework="Megatron-Bridge", tp=2))
    assert scenario.model.layers == layers
    assert scenario.model.parameters / 1e9 == pytest.approx(total, rel=0.01)
    assert scenario.machine.backend.captured == ("mixer",)


@pytest.mark.parametrize(
    "model", ["qwen3-next-80b-a3b", "Mixtral 8x3B", "gpt-moe", "llama5-17b-16e"]
)
def test_a_model_that_names_experts_without_known_sizes_is_refused(model: str) -> None:
    with pytest.raises(StepRowError, match=f"given '{model}' with experts"):
        scenario_of(row_with(model=model))


def test_experts_of_automodel_are_divided_where_the_rest_of_a_tensor_group_has_copies() -> None:
    oss = {"model": "gpt-oss-120b", "framework": "NeMo AutoModel", "gpus": 64, "tp": 2}
    sizes = {"layers": None, "hidden": 2880, "ffn": 2880, "heads": 64, "vocab": 201088}
    whole = scenario_of(row_with(**oss | sizes, notes="TE + DeepEP")).execution
    assert (whole.expert, whole.expert_shards) == (64, 1)
    divided = scenario_of(row_with(**oss | sizes, ep=8)).execution
    assert (divided.expert, divided.expert_shards) == (8, 2)


def test_recipes_of_nemo_2_sum_gradients_in_16_bits() -> None:
    sizes = {
        framework: scenario_of(row_with(framework=framework)).execution
        for framework in ("Megatron-Bridge", "NeMo 25.02", "NeMo 25.07", "NeMo 24.07")
    }
    assert [execution.gradient_bytes for execution in sizes.values()] == [2, 2, 2, 4]
    assert {execution.sent_gradient_bytes for execution in sizes.values()} == {2}
    sent = {
        model: scenario_of(row_with(framework="NeMo/Megatron-Core", model=model)).execution
        for model in ("nemotron4-15b", "nemotron4-340b")
    }
    assert [execution.sent_gradient_bytes for execution in sent.values()] == [4, 2]


def test_recipes_of_automodel_recompute_layers_with_consecutive_experts() -> None:
    rows = {"framework": "NeMo AutoModel", "gpus": 64, "ep": 64, "zero": 3}
    rows |= {"layers": 4, "notes": "balanced gate", "vocab": 128000}
    recipe = scenario_of(row_with(**rows, model="deepseek-v3"))
    assert recipe.execution.recompute == "full"
    assert recipe.execution.loss_in_16_bits
    assert recipe.model.experts_section.consecutive
    assert recipe.model.experts_section.max_hosts is None
    said = scenario_of(row_with(**rows, model="deepseek-v3", recompute="none"))
    assert said.execution.recompute == "none"
    small = scenario_of(row_with(**rows | {"ep": 8, "kv_heads": 4}, model="gpt-oss-20b"))
    assert small.execution.recompute == "none"
    routed = scenario_of(row_with(**rows | {"notes": ""}, model="deepseek-v3"))
    assert not routed.model.experts_section.consecutive
    dense = scenario_of(row_with(framework="NeMo AutoModel", zero=3, notes="balanced gate"))
    assert not dense.execution.loss_in_16_bits


def test_deepseek_v4_has_the_parameters_and_nearly_the_flops_that_are_published() -> None:
    sizes = dict.fromkeys(("layers", "hidden", "ffn", "heads", "kv_heads", "vocab"))
    row = row_with(model="DeepSeekV4 Flash", seq=4096, ep=8, framework="NeMo AutoModel", **sizes)
    model = scenario_of(row).model
    assert model.parameters / 1e9 == pytest.approx(284, rel=0.01)
    assert active_parameters(model) / 1e9 == pytest.approx(13, rel=0.06)
    # 748 TFLOP/s at 8,224 tokens/s, in Megatron-Bridge's table, with the indexer of keys
    assert model.flops(1) / 4096 == pytest.approx(748e12 / 8224, rel=0.05)


@pytest.mark.parametrize(
    ("given", "as_if"),
    [
        ("NVIDIA H100 80GB", "H100"),
        ("H100-SXM5", "H100"),
        ("NVIDIA GB200", "GB200"),
        ("h100", "H100"),
        ("Tesla V100-16GB", "V100-16GB"),
        ("DGX-GB200 NVL72", "GB200"),
    ],
)
def test_a_gpu_is_known_by_its_longer_names(given: str, as_if: str) -> None:
    assert scenario_of(row_with(gpu=given)).machine is scenario_of(row_with(gpu=as_if)).machine


@pytest.mark.parametrize(
    ("given", "precision"),
    [
        ("BF16-mixed", "bf16"),
        ("float8 (tensorwise)", "f8"),
        ("FP8_CS", "f8"),
        ("fp8 hybrid", "f8"),
        ("fp8-sc", "f8-block"),
        ("FP8 MX", "mxfp8"),
    ],
)
def test_a_precision_is_known_by_its_longer_names(given: str, precision: str) -> None:
    assert scenario_of(row_with(gpu="B200", precision=given)).model.precision == precision


def test_nemo_has_the_loss_of_transformer_engine_since_2025() -> None:
    compiled = [
        scenario_of(row_with(framework=framework)).execution.compiled_loss
        for framework in ("NeMo 24.07 SFT", "NeMo/Megatron-Core", "NeMo 25.02", "Megatron-LM")
    ]
    assert all(compiled)
    for framework in ("NeMo 25.04", "NeMo MLPerf v5.0", "Megatron-Bridge"):
        execution = scenario_of(row_with(framework=framework)).execution
        assert (execution.compiled_loss, execution.fused_loss) == (False, True)


def test_recipes_without_fused_attention_have_flash_attention() -> None:
    megatron = {"framework": "NeMo/Megatron-Core", "heads": 32}
    attention = {
        model: scenario_of(row_with(**megatron | {"model": model})).model.attention
        for model in ("gpt3-175b", "nemotron4-340b", "nemotron4-15b", "llama3-8b")
    }
    assert list(attention.values()) == ["flash2", "flash2", "cudnn", "cudnn"]
    noted = {"framework": "NeMo", "notes": "NVTE_FUSED_ATTN=0"}
    assert scenario_of(row_with(**noted)).model.attention == "flash2"
    assert scenario_of(row_with(framework="NeMo")).model.attention == "cudnn"
    # software without Transformer Engine has its own attention
    assert scenario_of(row_with(**noted | {"framework": "MaxText"})).model.attention == "cudnn"


def test_rows_of_torchtitan_have_its_kernels_and_sharding() -> None:
    row = row_with(
        framework="torchtitan", zero=3, recompute="selective op", gpus=128, micro_batch=2
    )
    plain = scenario_of(replace(row, global_batch=256, notes="FSDP 128; no compile"))
    compiled = scenario_of(replace(row, global_batch=256, notes="FSDP 8; torch.compile"))
    assert plain.execution.composed == ("complex_rotary", "activation", "norm")
    assert compiled.execution.composed == ("complex_rotary",)
    assert (plain.execution.zero, plain.execution.recompute) == (3, "unsaved")
    assert (plain.execution.shards, compiled.execution.shards) == (128, 8)
    assert plain.execution.sent_gradient_bytes == 4
    assert plain.machine.backend.kernel_us == EAGER.kernel_us
    assert plain.machine.gathered_as("f8").parameter_width == 1
    assert plain.execution.log_softmax_loss
    device = plain.machine.cluster.device
    assert (device.power_limit_w, device.memory_bandwidth_gb_per_s) == (500, 2410)
    assert plain.machine.cluster.name == "grand_teton_roce"
    other = scenario_of(replace(row, global_batch=256, gpu="H200")).machine.cluster
    assert (other.name, other.device.power_limit_w) == ("dgx_h200", 700)


def test_tensor_parallelism_of_torchtitan_divides_norms_and_may_overlap() -> None:
    row = row_with(framework="torchtitan", zero=3, gpus=64, tp=8, notes="torch.compile")
    overlapped = replace(row, notes="torch.compile; async TP")
    executions = [scenario_of(each).execution for each in (row, overlapped)]
    assert [each.sequence_parallel for each in executions] == [True, True]
    assert [each.overlap_tensor for each in executions] == ["none", "all"]
    assert not scenario_of(replace(row, tp=1)).execution.sequence_parallel


def test_rows_to_which_numbers_are_fitted_are_counted(tmp_path: Path) -> None:
    name = "megatron_bridge_25.09-26.08"
    rows = [row for row in read_step_table(STEPS / f"{name}.csv").rows if isinstance(row, StepRow)]
    fitted = [row for row in rows if is_fitted(name, row)]
    assert len([row for row in fitted if row.gpu == "GB300" and "llama" in row.model]) == 15
    assert len([row for row in fitted if "Nemotron_3" in row.model]) == 26
    assert len([row for row in fitted if "llama" not in row.model]) == 69
    # a table of the same name elsewhere has rows of its own
    (tmp_path / f"{name}.csv").write_text((STEPS / f"{name}.csv").read_text())
    cases = step_cases(name, lambda row: "llama3-70b" in row.model, tmp_path)
    assert not any(case.fitted for case in cases if isinstance(case, Case))
