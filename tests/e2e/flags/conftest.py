"""The files that the trials of flags name: a trained run, a spoiled one, lists of data, tokenizers."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.e2e.flags.flag_trials import PLAIN
from tests.e2e.toy_run import DATA, toy_args
from tests.harness.forked_training import fork_training
from tests.unit.config.command_lines import write_data_set


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the files by the names that `flag_values.tsv` gives them."""
    folder = tmp_path_factory.mktemp("files")
    _write_tokenizers(folder)
    write_data_set(folder / "zeros", lengths=(30,) * 200)
    (folder / "list.txt").write_text(str(DATA))
    (folder / "lists.json").write_text(json.dumps({key: [str(DATA)] for key in ("train", "valid", "test")}))
    (folder / "nccl.yaml").write_text("dp_cp:\n  max_ctas: 8\n")
    (folder / "overlap.yaml").write_text("qkv_fprop:\n  method: bulk\n")
    (folder / "run.toml").write_text("hidden_dropout = 0.4\n")
    turns = [{"prompt": "one two"[:length], "completion": "three"} for length in (3, 7, 5, 1)]
    (folder / "chat.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    run = toy_args(folder / "trained", PLAIN, "--save-interval 1 --norm-epsilon 1e-3")
    fork_training(run).check()
    trained = folder / "trained" / "checkpoints"
    return {
        "files": folder,
        "data": DATA,
        "trained": trained,
        "spoiled": _spoiled(trained, folder / "spoiled"),
    }


def _spoiled(checkpoints: Path, folder: Path) -> Path:
    """Return a copy of which one value is another."""
    shutil.copytree(checkpoints, folder)
    path = folder / "iter_0000002" / "shard_00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return folder


def _write_tokenizers(folder: Path) -> None:
    """Write small vocabularies: GPT-2's files, a Hugging Face folder, SentencePiece's model, TikTokenizer's file."""
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary = {**alphabet, "<|endoftext|>": len(alphabet)}
    (folder / "gpt2").mkdir()
    (folder / "gpt2" / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "gpt2" / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    (folder / "model").mkdir()
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>"}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["one two three four five"] * 10),
        model_prefix=str(folder / "pieces"),
        vocab_size=280,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(bytes([rank])).decode(), "token_str": ""} for rank in range(256)
    ]
    (folder / "tiktoken.json").write_text(json.dumps(entries), encoding="utf-8")
