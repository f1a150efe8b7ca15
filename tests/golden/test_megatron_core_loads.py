"""What a run saves with --ckpt-format torch_dist, megatron-core's own loader takes: weights, moments and step.

``MEGATRON_CORE_PYTHON`` names an interpreter that has megatron-core 0.16.1 and torch.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.formats.megatron.torch_dist_source import TorchDistSource
from tests.e2e.toy_run import newest, toy_args
from tests.harness.forked_training import fork_training

SCRIPT = Path(__file__).with_name("load_with_megatron_core.py")
PYTHON = os.environ.get("MEGATRON_CORE_PYTHON")
LAYOUTS = {
    "plain": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "distributed": (4, "--tensor-model-parallel-size 2 --use-distributed-optimizer --swiglu"),
    "experts": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 --swiglu "
        "--disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 24 "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
    ),
}


def with_experts_stacked(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return values with one tensor for the experts of a layer, which megatron-core has in order."""
    found: dict[str, torch.Tensor] = {}
    for name, each in values.items():
        module, is_expert, rest = name.partition(".local_experts.")
        if not is_expert:
            found[name] = each
            continue
        stacked = f"{module}.{rest.partition('.')[2]}"
        found[stacked] = torch.cat([found[stacked], each[None]]) if stacked in found else each[None]
    return found


@pytest.mark.long
@pytest.mark.skipif(PYTHON is None, reason="MEGATRON_CORE_PYTHON names no interpreter that has megatron-core")
@pytest.mark.parametrize("kind", LAYOUTS)
def test_megatron_core_loads_what_a_run_saved(kind: str, tmp_path: Path) -> None:
    processes, layout = LAYOUTS[kind]
    words = "--ckpt-format torch_dist --train-iters 4 --untie-embeddings-and-output-weights --eval-interval 100"
    fork_training(toy_args(tmp_path, words, layout), processes).check()
    folder = newest(tmp_path / "checkpoints")
    assert PYTHON is not None
    command = [PYTHON, str(SCRIPT), str(folder), str(tmp_path / "loaded.pt"), kind]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    loaded = torch.load(tmp_path / "loaded.pt", weights_only=False)
    assert (loaded["step"], loaded["iteration"]) == (4.0, 4)
    source = TorchDistSource(folder)
    values_of = with_experts_stacked(loaded["values"])
    assert values_of.keys() == source.tensors.keys()
    for name, values in values_of.items():
        ours = source.read(name)
        assert torch.equal(values[: ours.shape[0]], ours), name
        assert not values[ours.shape[0] :].any(), name
