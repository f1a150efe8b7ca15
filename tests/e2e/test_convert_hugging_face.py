"""The converter between Hugging Face folders and ours: byte for byte, logits checked, a wrong result refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from megatron.checkpoint import conversion
from megatron.checkpoint.comparison import ConversionMismatchError
from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource
from megatron.checkpoint.formats.native import NativeSource
from megatron.config.run_config import RunConfig
from tests.e2e.test_convert import run_converter
from tests.e2e.toy_run import toy_args
from tests.harness.forked_training import fork_training
from tests.unit.conversion.small_checkpoint import small_common, write_small
from tests.unit.interop.huggingface.tiny_models import edit_config, folder_bytes, save_model


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
    with pytest.raises(ConversionMismatchError, match="logits differ from those of the checkpoint"):
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
