"""Text from Hugging Face folders and from Megatron's torch folders, by the tools that users run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch

from megatron.checkpoint.formats.huggingface.model_export import write_hugging_face
from megatron.checkpoint.formats.megatron.torch_dist_writer import write_torch_dist
from megatron.checkpoint.formats.megatron.torch_format import MegatronTorchSource, write_megatron_torch
from megatron.checkpoint.formats.native import NativeSource
from megatron.core.inference.sampling_config import SamplingConfig
from tests.e2e.test_text_generation import (
    GPT2_SHAPE,
    NULL_TOKENIZER,
    byte_level_flags,
    call_tool,
    expected_text,
    run_tool,
    save,
)

QWEN_SHAPE = (
    "--num-layers 3 --hidden-size 24 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 44 --swiglu --normalization RMSNorm --disable-bias-linear --add-qkv-bias --seq-length 32 "
    "--max-position-embeddings 32 --position-embedding-type rope --untie-embeddings-and-output-weights"
)


def hugging_face_folder(folder: Path, flags: str) -> Path:
    save(folder / "native", flags)
    source = NativeSource(folder / "native" / "iter_0000010")
    write_hugging_face(source, folder / "hf")
    source.close()
    return folder / "hf"


def test_a_hugging_face_folder_brings_its_tokenizer(tmp_path: Path, monkeypatch, capsys) -> None:
    flags = f"{GPT2_SHAPE} {byte_level_flags(tmp_path)}"
    words = ("--load-hf", hugging_face_folder(tmp_path, flags), "--prompt", "hello, wörld", "--greedy")
    status, out, _ = call_tool(monkeypatch, capsys, *words, "--tokens-to-generate", "12")
    assert (status, out) == (0, expected_text(flags, "hello, wörld", 12) + "\n")


def test_a_hugging_face_folder_without_a_tokenizer_takes_ids(tmp_path: Path, monkeypatch, capsys) -> None:
    flags = f"{QWEN_SHAPE} {NULL_TOKENIZER}"
    words = ("--load-hf", hugging_face_folder(tmp_path, flags), "--prompt", "3 14 15", "--greedy")
    status, out, _ = call_tool(monkeypatch, capsys, *words, "--tokens-to-generate", "9")
    assert (status, out) == (0, expected_text(flags, "3 14 15", 9) + "\n")


@pytest.mark.long
def test_a_hugging_face_folder_is_cut_over_processes(tmp_path: Path) -> None:
    flags = f"{QWEN_SHAPE} {NULL_TOKENIZER}"
    words = ("--load-hf", hugging_face_folder(tmp_path, flags), "--prompt", "3 14 15", "--tokens-to-generate", "9")
    result = run_tool(*words, "--greedy", "--tensor-model-parallel-size", "2", nproc=2).check()
    assert result.stdout == expected_text(flags, "3 14 15", 9) + "\n"


def megatron_folder(
    folder: Path,
    flags: str,
    iteration: int | Literal["release"] = 10,
    write: Callable[..., Path] = write_megatron_torch,
) -> Path:
    save(folder / "native", flags)
    source = NativeSource(folder / "native" / "iter_0000010")
    write(source, folder / "megatron", iteration)
    source.close()
    return folder / "megatron"


@pytest.mark.parametrize("write", [write_megatron_torch, write_torch_dist])
def test_megatrons_files_with_ids_for_text(write: Callable[..., Path], tmp_path: Path, monkeypatch, capsys) -> None:
    flags = f"{QWEN_SHAPE} {NULL_TOKENIZER}"
    folder = megatron_folder(tmp_path, flags, write=write)
    words = ("--load", folder, "--prompt", "3 14 15", "--tokens-to-generate", "9", "--greedy")
    assert call_tool(monkeypatch, capsys, *words) == (0, expected_text(flags, "3 14 15", 9) + "\n", "")


def test_rows_that_pad_megatrons_vocabulary_are_not_chosen(tmp_path: Path, monkeypatch, capsys) -> None:
    """Megatron's own files do not tell how many of their rows are padding: the tokenizer does."""
    flags = f"{GPT2_SHAPE} {byte_level_flags(tmp_path)}"
    folder = megatron_folder(tmp_path, flags, "release")
    (file,) = folder.rglob("model_optim_rng.pt")
    values = torch.load(file, weights_only=False)
    del values["args"].true_vocab_size
    torch.save(values, file)
    shutil.rmtree(folder / "release" / "tokenizer")
    source = MegatronTorchSource(folder / "release")
    assert source.tensors["model.embedding.word_embeddings.weight"].global_shape[0] == 384
    source.close()
    words = ("--load", folder, "--prompt", "hello, wörld", "--tokens-to-generate", "20")
    words += tuple(byte_level_flags(tmp_path).split())
    status, out, _ = call_tool(monkeypatch, capsys, *words, "--temperature", "50", "--seed", "3")
    drawn = SamplingConfig(temperature=50.0, seed=3)
    assert (status, out) == (0, expected_text(flags, "hello, wörld", 20, drawn) + "\n")


def test_a_damaged_file_of_megatrons_is_named(tmp_path: Path, monkeypatch, capsys) -> None:
    folder = megatron_folder(tmp_path, f"{QWEN_SHAPE} {NULL_TOKENIZER}")
    (file,) = folder.rglob("model_optim_rng.pt")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    status, out, err = call_tool(monkeypatch, capsys, "--load", folder, "--prompt", "5", "--tokens-to-generate", "5")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert str(file) in err
