"""The names, shapes, order and shards of Mamba-2, gated delta-net and experts in the files are those of megatron-core.

``MEGATRON_CORE_PYTHON`` names an interpreter that has megatron-core 0.16.1 and torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.formats.megatron.torch_dist_metadata import read_metadata
from tests.unit.checkpoint.formats.megatron.memory_source import MemorySource
from tests.unit.checkpoint.formats.megatron.test_hybrid import DELTA, EXPERTS, MAMBA, write

SCRIPT = Path(__file__).with_name("hybrid_of_megatron_core.py")
PYTHON = os.environ.get("MEGATRON_CORE_PYTHON")
_SEPARATE = re.compile(r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")


@pytest.mark.long
@pytest.mark.skipif(PYTHON is None, reason="MEGATRON_CORE_PYTHON names no interpreter that has megatron-core")
def test_mixers_have_the_tensors_of_megatron_core(tmp_path: Path) -> None:
    assert PYTHON is not None
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    theirs = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{")))
    experts = write(MemorySource(dataclasses.replace(EXPERTS, tensor_model_parallel_size=2)), tmp_path / "E", "torch")
    (path, *_) = experts.rglob("mp_rank_01*/model_optim_rng.pt")
    prefix, found = "decoder.layers.1.mlp.", torch.load(path, weights_only=False)["model"]
    layer = [(key.removeprefix(prefix), value) for key, value in found.items() if key.startswith(prefix)]
    # The script has separate experts, and Transformer Engine's layers in the files grouped ones.
    names = [(_SEPARATE.sub(r"experts.\2.weight\1", name), shape) for name, shape in theirs["experts"]]
    assert sorted(names[3:]) == sorted((name, list(value.shape)) for name, value in layer[5:] if value is not None)
    ours = [(name, list(value.shape)) for name, value in layer if value is not None]
    assert ours[:3] == names[:3]
    for kind, model, mixer in (("mamba", MAMBA, "mixer"), ("delta", DELTA, "self_attention")):
        source = MemorySource(dataclasses.replace(model, tensor_model_parallel_size=2), has_optimizer=False)
        prefix = f"decoder.layers.0.{mixer}."
        folder = write(source, tmp_path / kind / "torch", "torch")
        stored = torch.load(folder / "mp_rank_01" / "model_optim_rng.pt", weights_only=False)["model"]
        # The norm before the mixer belongs to Transformer Engine's linear layer, which the script does not have.
        ours = [
            [key.removeprefix(prefix), list(value.shape)]
            for key, value in stored.items()
            if key.startswith(prefix) and value is not None and ".layer_norm_" not in key
        ]
        assert ours == theirs[kind]["parameters"]
        entries = read_metadata(write(source, tmp_path / kind / "torch_dist", "torch_dist")).tensors
        shapes = {
            key.removeprefix(prefix): list(entry.shape)
            for key, entry in entries.items()
            if key.startswith(prefix) and ".layer_norm_" not in key
        }
        assert shapes == {key: shape for key, (shape, _) in theirs[kind]["sharded"].items()}
        for key, (shape, offset) in theirs[kind]["sharded"].items():
            # The second of two ranks has the second half of every part.
            assert all(start in (0, size // 2) for start, size in zip(offset, shape)), key
            assert offset[0] == shape[0] // 2 or not key.startswith(("in_proj", "conv1d")), key
