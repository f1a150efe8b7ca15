"""Checkpoints of experts that megatron-core wrote: read whole from both formats, and written as they were.

``MEGATRON_CORE_PYTHON`` names an interpreter that has megatron-core 0.16.1, torch and psutil; without it the cases that
lie in the repository are read alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.comparison import compare_sources
from megatron.checkpoint.formats.megatron.torch_dist_source import TorchDistSource
from megatron.checkpoint.formats.megatron.torch_dist_writer import write_torch_dist
from megatron.checkpoint.formats.megatron.torch_format import MegatronTorchSource, write_megatron_torch
from tests.golden.test_megatron_checkpoints import compare_folders
from tests.harness.torch_loader import read_with_torch

SMALL = Path(__file__).parent / "experts"
PYTHON = os.environ.get("MEGATRON_CORE_PYTHON")
ITERATION = "iter_0000002"
CASES = {
    "tp2_etp1_distributed": (2, "tp=2 etp=1 ep=2 distributed=True"),
    "pp2_ep2_bf16": (4, "pp=2 ep=2 precision=bfloat16 bias=True dense_layers=1"),
    "tp2_ep2_bf16_distributed": (4, "tp=2 ep=2 precision=bfloat16 distributed=True"),
    "singleton": (2, "ep=2 singleton=True distributed=True"),
    "dp_reshardable": (4, "tp=2 ep=2 sharding=dp_reshardable distributed=True"),
    "latent": (2, "tp=2 latent=True mtp=1 dense_layers=1"),
    "latent_distributed": (2, "ep=2 latent=True mtp=1 precision=bfloat16 distributed=True"),
    "without_expert_parallelism": (2, "tp=2 distributed=True dense_layers=1"),
}


def open_both(folder: Path) -> tuple[MegatronTorchSource, TorchDistSource]:
    # All 32 rows of the vocabulary are taken for real ones: padding would come back as zeros.
    torch_files = MegatronTorchSource(folder / "torch" / ITERATION, vocab_size=32)
    torch_dist = TorchDistSource(folder / "torch_dist" / ITERATION, vocab_size=32)
    return torch_files, torch_dist


def check(folder: Path, tmp_path: Path) -> None:
    """Hold both formats of a case against each other, and against what is written from them."""
    torch_files, torch_dist = open_both(folder)
    torch_dist.check_storages()
    assert any(name.startswith("optimizer.exp_avg_sq.decoder.layers.1.mlp.experts.") for name in torch_dist.tensors)
    same(torch_dist, torch_files)
    compare_folders(folder / "torch" / ITERATION, write_megatron_torch(torch_files, tmp_path / "torch", 2))
    written = TorchDistSource(write_torch_dist(torch_files, tmp_path / "torch_dist", 2), vocab_size=32)
    same(written, torch_files)
    if folder.name in ("ep2", "pp2_ep2_bf16"):
        theirs, ours = (keys_of(source) for source in (torch_dist, written))
        assert ours == theirs


def keys_of(source: TorchDistSource) -> dict[str, tuple[int, ...]]:
    """Return what is stored under which key, norms under the names that all layers of experts have."""
    tensors = {key: entry.shape for key, entry in source.metadata.tensors.items()}
    tensors |= dict.fromkeys(source.metadata.objects, ())
    return {key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."): shape for key, shape in tensors.items()}


def same(ours: TorchDistSource, theirs: MegatronTorchSource) -> None:
    assert ours.tensors == theirs.tensors
    assert not [found for found in compare_sources(ours, theirs) if not found.is_equal]
    for key in ("optimizer", "scheduler"):
        assert ours.common[key] == theirs.common[key], key


def test_both_formats_of_experts_hold_the_same_and_are_written_as_they_were(tmp_path: Path) -> None:
    check(SMALL / "ep2", tmp_path)


def test_torch_reads_what_is_written_of_experts(tmp_path: Path) -> None:
    source = MegatronTorchSource(SMALL / "tp2_ep2_bf16_distributed" / "torch" / ITERATION, vocab_size=32)
    compare_folders(source.folder, write_megatron_torch(source, tmp_path / "torch", 2))
    written = write_torch_dist(source, tmp_path / "torch_dist", 2)
    same(TorchDistSource(written, vocab_size=32), source)
    values = read_with_torch(written)
    expert = "decoder.layers.{}mlp.experts.{}linear_fc1.weight"
    for kind, native in (("optimizer.state.exp_avg.", "optimizer.exp_avg."), ("", "model.")):
        stacked = values[kind + expert.format("", "experts.")]
        for layer in (0, 1):
            assert torch.equal(stacked[layer], source.read(native + expert.format(f"{layer}.", "")))


def torchrun(folder: Path, case: str) -> Path:
    """Let megatron-core write a case."""
    processes, words = CASES[case]
    assert PYTHON is not None
    scripts = folder / "scripts"
    scripts.mkdir()
    for name in ("save_with_megatron_core.py", "load_with_megatron_core.py"):
        shutil.copy(Path(__file__).with_name(name), scripts / name)
    launch = [PYTHON, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [*launch, str(scripts / "save_with_megatron_core.py"), str(folder / case), *words.split()]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    return folder / case


@pytest.mark.long
@pytest.mark.skipif(PYTHON is None, reason="MEGATRON_CORE_PYTHON names no interpreter that has megatron-core")
@pytest.mark.parametrize("case", CASES)
def test_every_form_of_experts_that_megatron_core_writes_is_read_and_written(case: str, tmp_path: Path) -> None:
    check(torchrun(tmp_path, case), tmp_path / "ours")
