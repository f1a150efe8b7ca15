"""The converter between Hugging Face folders and other formats: byte for byte, experts and every family.

Three families by default, all of them in the long tests.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM

from megatron.checkpoint import conversion
from megatron.checkpoint.comparison import ConversionMismatchError
from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource
from megatron.checkpoint.formats.native import NativeSource
from megatron.cli import diff_checkpoints, inspect_checkpoint
from megatron.config.run_config import RunConfig
from megatron.core.errors import ConfigurationError
from tests.e2e.test_convert import run_converter
from tests.e2e.test_resume_layouts import assert_same_content
from tests.e2e.toy_run import TRAINING, newest, toy_args
from tests.harness.forked_training import fork_training
from tests.unit.checkpoint.formats.huggingface.tiny_models import (
    KINDS,
    edit_config,
    folder_bytes,
    save_model,
    tokens_of,
)
from tests.unit.checkpoint.small_checkpoint import small_common, write_small


@pytest.mark.default(1)
@pytest.mark.parametrize("kind", ["gpt2", "llama31", "qwen_tied"])
def test_there_and_back_is_byte_equal_with_logits_checked(kind: str, tmp_path: Path) -> None:
    save_model(kind, tmp_path / "hf")
    to_native = run_converter(
        tmp_path / "hf",
        tmp_path / "native",
        "--loader hf --saver megatron --target-tensor-parallel-size 2 --target-pipeline-parallel-size 1 --test-logits",
    )
    assert (tmp_path / "native" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert any("within" in line and "transformers package" in line for line in to_native)
    native = NativeSource(tmp_path / "native" / "release")
    config = RunConfig.from_dict(native.common["config"])
    assert config.model.tensor_model_parallel_size == 2
    native.close()
    to_hf = run_converter(tmp_path / "native", tmp_path / "back", "--loader megatron --saver hf --test-logits")
    assert sum("logits of 24 tokens" in line for line in to_hf) == 2
    assert folder_bytes(tmp_path / "back") == folder_bytes(tmp_path / "hf")


def test_a_model_type_that_transformers_does_not_know_is_compared_by_its_architecture(tmp_path: Path) -> None:
    """As Kimi-K2's, whose folder has code of its own, which is not run."""
    save_model("moonlight", tmp_path / "hf")
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    edit_config(tmp_path / "hf", lambda values: values.update(model_type="kimi_k2", auto_map=code))
    run_converter(tmp_path / "hf", tmp_path / "native", "--loader hf --saver megatron --test-logits")
    lines = run_converter(tmp_path / "native", tmp_path / "back", "--saver hf --test-logits")
    assert any("transformers package" in line for line in lines)
    assert folder_bytes(tmp_path / "back") == folder_bytes(tmp_path / "hf")


def test_tokenizer_and_generation_settings_cross_megatrons_format(tmp_path: Path) -> None:
    save_model("llama31", tmp_path / "hf")
    engine = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    engine.save(str(tmp_path / "hf" / "tokenizer.json"))
    (tmp_path / "hf" / "tokenizer_config.json").write_text('{"tokenizer_class":  "PreTrainedTokenizerFast"}')
    run_converter(tmp_path / "hf", tmp_path / "mcore", "--loader hf --saver torch --no-verify")
    run_converter(tmp_path / "mcore", tmp_path / "back", "--loader torch --saver hf --no-verify")
    before, after = (folder_bytes(tmp_path / name) for name in ("hf", "back"))
    assert {name for name in after if before.get(name) != after[name]} == {"config.json"}
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert after[name] == before[name]
    ends = [json.loads(folder["config.json"])["eos_token_id"] for folder in (before, after)]
    assert ends[0] == ends[1]


def test_weights_become_another_type(tmp_path: Path) -> None:
    save_model("qwen_untied", tmp_path / "hf")
    run_converter(tmp_path / "hf", tmp_path / "native", "--loader llama_mistral --checkpoint-type hf --bf16")
    run_converter(tmp_path / "native", tmp_path / "back", "--saver hf")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    old, new = HuggingFaceSource(tmp_path / "hf"), HuggingFaceSource(tmp_path / "back")
    for name in old.tensors:
        assert old.read(name).bfloat16().equal(new.read(name)), name
    old.close()
    new.close()


def test_a_run_becomes_a_model_folder_without_its_optimizer(tmp_path: Path) -> None:
    write_small(tmp_path / "run", small_common("--no-bias-gelu-fusion"))
    lines = run_converter(tmp_path / "run", tmp_path / "hf", "--saver hf --test-logits")
    assert any("without optimizer state" in line for line in lines)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == 101
    assert not list(tmp_path.glob(".*"))


def test_settings_that_change_the_model_are_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model("llama31", tmp_path / "hf")
    run_converter(tmp_path / "hf", tmp_path / "native", "--loader hf")
    right = conversion.check_result

    def check(view: Any, result: Any, **options: Any) -> None:
        edit_config(result.folder, lambda values: values["rope_parameters"].update(factor=2.0))
        right(view, HuggingFaceSource(result.folder), **options)

    monkeypatch.setattr(conversion, "check_result", check)
    with pytest.raises(ConversionMismatchError, match="logits differ from the logits of the source checkpoint"):
        run_converter(tmp_path / "native", tmp_path / "back", "--saver hf")
    assert not (tmp_path / "back").exists()


def test_a_model_that_was_trained_further_keeps_the_small_files_of_its_folder(tmp_path: Path) -> None:
    save_model("llama31", tmp_path / "hf")
    run_converter(tmp_path / "hf", tmp_path / "native", "--loader hf --saver megatron")
    shape = "--use-checkpoint-args --finetune --vocab-size 100 --seq-length 24 --train-iters 1 --lr-warmup-iters 0"
    words = [
        *toy_args(tmp_path, "--mock-data", save=False, data=False),
        "--save",
        str(tmp_path / "run"),
        "--load",
        str(tmp_path / "native"),
    ]
    shaped_by_flags = ("--num-layers", "--hidden-size", "--num-attention-heads", "--max-position-embeddings")
    for name in shaped_by_flags:
        start = words.index(name)
        del words[start : start + 2]
    fork_training([*words, *shape.split()]).check()
    run_converter(tmp_path / "run", tmp_path / "back", "--saver hf")
    before, after = (folder_bytes(tmp_path / name) for name in ("hf", "back"))
    assert before.keys() == after.keys()
    assert "generation_config.json" in after
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {name for name in before if name.endswith(".safetensors")}


GOLDEN = Path(__file__).parents[1] / "golden"
LAYOUT = "--target-tensor-parallel-size 2 --target-pipeline-parallel-size 3 --target-expert-parallel-size 2"


def test_mixtral_crosses_megatrons_files_at_another_layout(tmp_path: Path) -> None:
    save_model("mixtral", tmp_path / "hf")
    run_converter(tmp_path / "hf", tmp_path / "torch", f"--loader hf --saver torch {LAYOUT}")
    folders = {path.parent.name for path in (tmp_path / "torch").glob("release/*/*.pt")}
    assert folders == {f"mp_rank_0{t}_00{p}_00{e}" for t in range(2) for p in range(3) for e in range(2)}
    run_converter(tmp_path / "torch", tmp_path / "one", "--saver torch --target-expert-parallel-size 1")
    assert len(list((tmp_path / "one").glob("release/*/*.pt"))) == 6
    run_converter(tmp_path / "one", tmp_path / "again", "--saver hf")
    weights = "model.safetensors"
    assert folder_bytes(tmp_path / "again")[weights] == folder_bytes(tmp_path / "hf")[weights]
    assert HuggingFaceSource(tmp_path / "again").config.moe.num_experts == 4


@pytest.mark.long
def test_a_run_with_spread_experts_becomes_megatrons_files_and_comes_back(tmp_path: Path) -> None:
    words = "--num-experts 4 --moe-router-topk 2 --moe-layer-freq 2 --mock-data --train-iters 2 --lr-warmup-iters 0"
    run = toy_args(tmp_path, f"{words} --eval-iters 0", "--expert-model-parallel-size 2", data=False)
    fork_training(run, 2).check()
    trained = newest(tmp_path / "checkpoints").parent
    lines = run_converter(trained, tmp_path / "torch", "--saver torch")
    assert any("with optimizer state" in line for line in lines)
    assert len(list((tmp_path / "torch").glob("iter_0000002/mp_rank_00_00?/*.pt"))) == 2
    run_converter(tmp_path / "torch", tmp_path / "native", "--saver native")
    assert_same_content(newest(tmp_path / "native"), newest(tmp_path / "checkpoints"))


@pytest.mark.long
def test_layouts_of_experts_are_converted_compared_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spread = GOLDEN / "experts" / "ep2"
    start = spread / "torch" / "iter_0000002"
    sizes = "--target-tensor-parallel-size 2 --target-pipeline-parallel-size 2 --target-expert-parallel-size 4"
    run_converter(start, tmp_path / "a", f"--saver torch {sizes}")
    run_converter(tmp_path / "a", tmp_path / "b", "--saver torch_dist --target-expert-parallel-size 1")
    run_converter(tmp_path / "b", tmp_path / "c", "--saver native --target-tensor-parallel-size 1")
    for folder in (spread / "torch_dist" / "iter_0000002", *(tmp_path / name for name in "abc")):
        assert diff_checkpoints.main([str(start), str(folder), "--weights-only"]) == 0, folder
        assert diff_checkpoints.main([str(start), str(folder)]) == 0, folder
    capsys.readouterr()
    assert inspect_checkpoint.main([str(tmp_path / "a"), "--verify", "--all"]) == 0
    shown = capsys.readouterr().out
    assert "expert_model_parallel_size: 4" in shown
    assert re.search(r"optimizer\.exp_avg\.decoder\.layers\.1\.mlp\.experts\.linear_fc1\.weight +4x16x16 ", shown)
    path = next((tmp_path / "a").rglob("mp_rank_01_001_003/model_optim_rng.pt"))
    content = torch.load(path, weights_only=False)
    content["model"]["decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight"][2, 3] += 1.0
    torch.save(content, path)
    assert diff_checkpoints.main([str(start), str(tmp_path / "a")]) == 1
    assert "model.decoder.layers.1.mlp.experts.linear_fc2.weight: 1 of 512" in capsys.readouterr().out


def test_experts_that_cannot_be_spread_so_are_refused(tmp_path: Path) -> None:
    save_model("mixtral", tmp_path / "hf")
    with pytest.raises(ConfigurationError, match="3 does not divide 4 experts; sizes that work: 1, 2, 4"):
        run_converter(tmp_path / "hf", tmp_path / "a", "--loader hf --saver torch --target-expert-parallel-size 3")
    save_model("llama_tied", tmp_path / "dense")
    with pytest.raises(ConfigurationError, match="the model has no experts; omit it"):
        run_converter(tmp_path / "dense", tmp_path / "b", "--loader hf --saver torch --target-expert-parallel-size 2")


UPCYCLED = "--moe-use-upcycling --num-experts 8 --moe-router-topk 4"


def test_a_dense_folder_is_upcycled_to_a_folder_of_experts(tmp_path: Path) -> None:
    save_model("llama_tied", tmp_path / "dense")
    (tmp_path / "dense" / "tokenizer_config.json").write_text("{}")
    flags = f"--loader hf --saver hf {UPCYCLED} --moe-upcycling-granularity 2 --test-logits"
    lines = run_converter(tmp_path / "dense", tmp_path / "experts", flags)
    assert sum("of the logits of the dense model" in line for line in lines) == 1
    settings = json.loads((tmp_path / "experts" / "config.json").read_text())
    assert settings["architectures"] == ["MixtralForCausalLM"]
    sizes = ("num_local_experts", "num_experts_per_tok", "intermediate_size")
    assert [settings[name] for name in sizes] == [8, 4, 44]
    assert (tmp_path / "experts" / "tokenizer_config.json").read_text() == "{}"
    tokens = tokens_of("llama_tied", 2, 30)
    options = {"dtype": torch.float64, "experts_implementation": "eager"}  # torch has no grouped GEMM in float64
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name, **options) for name in ("dense", "experts")]
    dense, experts = (model(tokens).logits.detach() for model in models)
    assert float((dense - experts).abs().max() / dense.abs().max()) < 1e-6


@pytest.mark.parametrize(
    "flags",
    [
        "--openai-gelu",
        pytest.param("--swiglu --position-embedding-type rope --mtp-num-layers 1", marks=pytest.mark.long),
    ],
)
def test_an_upcycled_model_starts_at_the_dense_loss_and_is_trained(flags: str, tmp_path: Path) -> None:
    write_small(tmp_path / "dense", small_common(flags, has_optimizer=False))
    sizes = "--target-tensor-parallel-size 2 --target-pipeline-parallel-size 2 --target-expert-parallel-size 2"
    run_converter(tmp_path / "dense", tmp_path / "experts", f"--saver torch {UPCYCLED} {sizes}")
    assert len(list((tmp_path / "experts").rglob("*.pt"))) == 8
    words = """
        --use-checkpoint-args --finetune --tokenizer-type NullTokenizer --vocab-size 100 --seq-length 20 --mock-data
        --train-iters 4 --lr-warmup-iters 0 --eval-iters 0 --distributed-backend gloo
    """
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --moe-aux-loss-coeff 1e-2"
    shared = [*TRAINING.split(), *words.split()]
    folders = (f"--load {tmp_path / name} --save {tmp_path / name}_run".split() for name in ("dense", "experts"))
    dense = fork_training([*shared, *next(folders)]).check()
    experts = fork_training([*shared, *next(folders), *layout.split(), *SPREAD.split()], 4).check()
    assert experts.losses()[0] == pytest.approx(dense.losses()[0], rel=1e-6)
    assert experts.losses()[-1] < experts.losses()[0]
    assert experts.iterations()[0]["load_balancing_loss"] > 0


FLAGS = """
    --use-checkpoint-args --finetune --tokenizer-type NullTokenizer --seq-length 24 --train-iters 5
    --lr-warmup-iters 0 --mock-data --eval-iters 0 --distributed-backend gloo
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
"""
TRAINED = ("gemma3",)
"""Norms on both sides and windows; experts are in other default tests."""
OTHERS = (
    *("gpt2", "neo", "llama31", "llama_mlp_bias", "qwen_untied", "phi3_longrope"),
    *("mixtral", "neox", "phi3", "qwen3", "mistral", "olmo2", "gemma2", "qwen3_moe", "olmoe", "deepseek"),
    *("gpt_oss", "olmo3", "smollm3", "gemma", "qwen2_moe", "seed_oss", "glm4", "arcee", "starcoder2", "exaone4"),
    *("helium", "ernie4_5", "stablelm", "stablelm_parallel", "glm4_moe", "flex_olmo", "granite", "granite_moe"),
    *("cohere", "cohere2", "olmo", "phi", "falcon_multi_query", "falcon_two_norms", "nanochat", "deepseek_v2"),
    *("deepseek_v2_groups", "moonlight", "ministral", "ministral3", "solar_open", "glm4_moe_lite", "exaone_moe"),
    *("gptj", "codegen", "gpt_bigcode", "persimmon", "bloomz", "mpt_1b", "opt_125m", "xglm_7b", "qwen3_next"),
    *("bamba", "granite_hybrid", "granite_hybrid_dense", "nemotron_h", "falcon_h1", "falcon_h1_norm", "apertus"),
    "nemotron_h_latent",
    *("hunyuan_dense", "hunyuan_moe", "minimax_m2", "phimoe", "dots1", "nemotron", "ernie4_5_moe"),
    *("qwen3_5", "qwen3_5_moe", "kimi_linear", "jais2"),
    *("gemma4", "gemma4_values", "gemma4_moe", "gemma4_e2b"),
    *("deepseek_v32", "glm_moe_dsa"),
)
SPREAD = "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1"


def test_what_cannot_be_exported_is_said_when_training_begins(tmp_path: Path) -> None:
    words = "--mock-data --train-iters 1 --lr-warmup-iters 0 --eval-iters 0 --qk-layernorm"
    run = fork_training(toy_args(tmp_path, words, data=False)).check()
    first, _, rest = run.stdout.partition("checkpoints of this run cannot be converted to Hugging Face models: ")
    assert " iteration " not in first
    assert "the most similar, GPT2LMHeadModel, cannot represent qk_layernorm True" in rest.splitlines()[0]
    assert len(rest.splitlines()[0]) < 300
    run = fork_training(toy_args(tmp_path, words.replace("--qk-layernorm", ""), save=False, data=False)).check()
    assert "Hugging Face" not in run.stdout


@pytest.mark.parametrize("kind", [*TRAINED, *(pytest.param(kind, marks=pytest.mark.long) for kind in OTHERS)])
def test_what_five_steps_at_tp2_pp2_make_is_exported_and_computes_the_same(kind: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"num_hidden_layers": 4}
    if kind in ("gemma2", "gemma3", "gemma4"):
        changes |= {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "tie_word_embeddings": True}
    if kind in ("olmo3", "exaone4", "cohere2", "ministral", "exaone_moe"):
        changes |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
    if kind in ("qwen3_next", "qwen3_5", "qwen3_5_moe", "granite_hybrid", "granite_hybrid_dense"):
        changes |= {"layer_types": ["linear_attention", "full_attention"] * 2}
    if kind == "gemma4_values":
        changes["layer_types"] = ["sliding_attention"] * 2 + ["full_attention"] * 2
        changes["per_layer_config"] = {layer: {"head_dim": 10, "num_key_value_heads": 6} for layer in (2, 3)}
    if kind == "gemma4_e2b":
        changes["layer_types"] = ["sliding_attention", "full_attention"] * 2
    if kind == "kimi_linear":
        changes["linear_attn_config"] = KINDS[kind]["linear_attn_config"] | {
            "kda_layers": [1, 3, 4],
            "full_attn_layers": [2],
        }
    if kind == "neo":
        changes |= {"attention_types": [[["global", "local"], 2]], "num_layers": 4}
    if kind == "glm4_moe_lite":
        changes |= {"mlp_layer_types": ["sparse", "dense"] * 2}
    if kind == "glm_moe_dsa":
        changes |= {"mlp_layer_types": ["sparse", "dense"] * 2, "indexer_types": ["full", "shared"] * 2}
    if kind == "smollm3":
        changes |= {"no_rope_layers": [1, 0, 1, 0]}
    if kind == "gpt_oss":
        changes |= {"num_local_experts": 4}
    save_model(kind, tmp_path / "hf", **changes)
    run_converter(tmp_path / "hf", tmp_path / "native", "--loader hf --saver megatron")
    folders = f"--load {tmp_path / 'native'} --save {tmp_path / 'run'} --vocab-size {KINDS[kind]['vocab_size'] - 1}"
    experts = SPREAD if any("experts" in name and value for name, value in KINDS[kind].items()) else ""
    indexers = "--dsa-indexer-loss-coeff 1e-2" if "index_topk" in KINDS[kind] else ""
    words = f"{folders} {experts} {indexers}".split()
    fork_training([*TRAINING.split(), *FLAGS.split(), *words], 4).check()
    # Bits are compared, and logits with those of AutoModelForCausalLM: within 1e-5.
    lines = run_converter(tmp_path / "run", tmp_path / "back", "--saver hf --test-logits")
    assert any("transformers package" in line for line in lines)
    before, after = folder_bytes(tmp_path / "hf"), folder_bytes(tmp_path / "back")
    assert {name for name in before | after if before.get(name) != after.get(name)} == {"model.safetensors"}
    old, new = HuggingFaceSource(tmp_path / "hf"), HuggingFaceSource(tmp_path / "back")
    trained = [name for name in old.tensors if not name.endswith((".beta", ".eps"))]
    assert [name for name in trained if old.read(name).equal(new.read(name))] == []
