"""Damaged and forged checkpoints of every format are read or refused in one line: no crash, no hang, little memory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import save_file

from megatron.checkpoint.stored_checkpoint import open_checkpoint
from megatron.core.dist_checkpointing import index
from megatron.core.errors import InputError
from tests.harness.bounded import bad_cases
from tests.harness.mutations import (
    mutated_json,
    mutated_pickle,
    mutated_safetensors,
    mutated_torch_file,
)

GOLDEN = Path(__file__).parents[2] / "golden"
Mutate = Callable[[bytes, Random], bytes]


def forged_index(data: bytes, draw: Random) -> bytes:
    """Mutate a native index; two in three get the checksum that fits."""
    changed = mutated_json(data, draw)
    try:
        content = json.loads(changed)
        if draw.random() < 0.67:
            rest = {name: value for name, value in content.items() if name not in ("checksum", "format_version")}
            content["checksum"] = index._content_checksum(rest)
        return json.dumps(content).encode()
    except (ValueError, AttributeError, TypeError, RecursionError):
        return changed


FORMATS: dict[str, tuple[str, dict[str, Mutate]]] = {
    "native": ("checkpoints/native_tp2_pp2_distributed/iter_0000004", {"index.json": forged_index}),
    "native-shard": (
        "checkpoints/native_tp2_pp2_distributed/iter_0000004",
        {"shard_00000.safetensors": mutated_safetensors},
    ),
    "torch": (
        "checkpoints/pp2_vpp2_fp32_distributed/iter_0000002",
        {
            "mp_rank_00_000/model_optim_rng.pt": mutated_torch_file,
            "mp_rank_00_001/distrib_optim.pt": mutated_torch_file,
        },
    ),
    "torch_dist": (
        "torch_dist/dp_zero_gather_scatter/iter_0000002",
        {".metadata": mutated_pickle, "common.pt": mutated_torch_file, "__0_0.distcp": mutated_torch_file},
    ),
    "hf": ("", {"config.json": mutated_json, "model.safetensors": mutated_safetensors}),
}


def write_gpt2(folder: Path) -> None:
    """Write a Hugging Face folder of a GPT-2 with one layer."""
    width, words = 8, 12
    shapes = {"wte.weight": (words, width), "wpe.weight": (16, width), "ln_f.weight": (width,), "ln_f.bias": (width,)}
    parts = {"attn.c_attn": 3 * width, "attn.c_proj": width, "mlp.c_fc": 4 * width, "mlp.c_proj": width}
    for name, size in parts.items():
        shapes[f"h.0.{name}.weight"] = (4 * width if name == "mlp.c_proj" else width, size)
        shapes[f"h.0.{name}.bias"] = (size,)
    shapes |= {f"h.0.ln_{n}.{kind}": (width,) for n in (1, 2) for kind in ("weight", "bias")}
    folder.mkdir()
    save_file({name: torch.rand(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    settings = {"n_embd": width, "n_head": 2, "n_layer": 1, "n_positions": 16, "vocab_size": words, "n_inner": None}
    settings |= {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new"}
    (folder / "config.json").write_text(json.dumps(settings))


def attempts(name: str, tmp_path: Path) -> Callable[[int], None]:
    """Return what reads all of a checkpoint in which one file is mutated."""
    source, targets = FORMATS[name]
    folder = tmp_path / "checkpoint"
    if source:
        shutil.copytree(GOLDEN / source, folder)
    else:
        write_gpt2(folder)
    original = {file: (folder / file).read_bytes() for file in targets}

    def attempt(number: int) -> None:
        draw = Random(f"{name} {number}")
        file = draw.choice(sorted(targets))
        # Another file, not other bytes: what is still mapped of the last case must not change.
        new = folder / f"{file}.new"
        new.write_bytes(targets[file](original[file], draw))
        os.replace(new, folder / file)
        try:
            opened = open_checkpoint(folder, verify=draw.random() < 0.6)
            for tensor in opened.tensors:
                opened.read(tensor)
            opened.close()
        except InputError as error:
            assert str(error)  # noqa: PT017
        finally:
            new.write_bytes(original[file])
            os.replace(new, folder / file)

    attempt(0)  # what is imported late is imported before the forks
    return attempt


@pytest.mark.default(1)
@pytest.mark.parametrize("name", FORMATS)
def test_mutated_checkpoints_are_read_or_refused(name: str, tmp_path: Path) -> None:
    assert bad_cases(attempts(name, tmp_path), 30 if name == "torch_dist" else 70) == []


@pytest.mark.long
@pytest.mark.parametrize("name", FORMATS)
def test_ten_thousand_mutated_checkpoints_are_read_or_refused(name: str, tmp_path: Path) -> None:
    assert bad_cases(attempts(name, tmp_path), 10_000) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"n_layer": 10**9}, "num_layers 1000000000: a number of at most 100000 is expected"),
        ({"n_layer": 99_999}, "99999 layers, but its files contain 16 tensors"),
        ({"n_embd": 2**62}, "a positive whole number up to 2147483647 is expected"),
    ],
)
def test_a_config_of_more_than_the_files_hold_is_refused_before(
    changed: dict[str, int], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    write_gpt2(folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | changed))

    def refuse(_: int) -> None:
        with pytest.raises(InputError) as caught:
            open_checkpoint(folder)
        assert message in str(caught.value), str(caught.value)

    assert bad_cases(refuse, 1) == []
