"""Traces see what layers save and compute, as the closed forms do, and what is planted in a layer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.planner.simulation.fake_cuda import find_compiler

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="a simulated GPU needs a C++ compiler here")

PROGRAM = """
import contextlib, io, json, sys
from pathlib import Path
from megatron.planner.simulation.fake_cuda import load_fake_cuda
load_fake_cuda()
import torch
torch.set_num_threads(1)
import torch.nn.functional as F
from megatron.cli import explain
from megatron.cli import plan as plan_command
from megatron.core.layer_output import LayerOutput
from megatron.core.models.gpt import chunk_parameters
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.core.precision import dtype_from_name
from megatron.core.tensor_parallel.sharded_layers import make_parameter, replicated_spec
from megatron.core.transformer.mlp import FeedForward
from megatron.cli.planner_arguments import read_planned_run
from megatron.planner import memory
from megatron.planner import trace_store
from megatron.planner.plan import Plan
from tests.closed_forms.saved_activations import saved_bytes

folder, words, cases = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
results = {}
store = trace_store.TraceStore(folder / "plain")
memory.default_store = lambda: store

def explained():
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert explain.main([*words, "--json"]) == 0
    return json.loads(output.getvalue())

def planned():
    table = folder / "table.json"
    with contextlib.redirect_stdout(io.StringIO()):
        assert plan_command.main([*words, "--gpus", "1", "--precision", "bf16", "--json", str(table)]) == 0
    ranked = json.loads(table.read_text())["ranked"]
    return {each["micro_batch_size"]: each for each in ranked if each["recompute"] == "none"}[2]

results["plain"], results["plain plan"] = explained(), planned()
results["saved"] = {}
for name, (flags, world_size) in cases.items():
    plan = Plan.of(read_planned_run([*words, *flags], world_size).config)
    trace = memory.layer_trace(plan, (9, 0), 1)
    closed = sum(saved_bytes(plan.model, plan.seq_length, plan.micro_batch_size, 1).values())
    results["saved"][name] = [trace.memory.kept, closed]

build, forward = FeedForward.__init__, FeedForward.forward

def build_with_gate(self, config, tp, device, *args, **kwargs):
    build(self, config, tp, device, *args, **kwargs)
    shape = config.hidden_size, config.hidden_size
    spec = replicated_spec("gate", shape, tp, partial_gradient=False)
    self.gate = make_parameter(shape, spec, dtype_from_name(config.params_dtype), device)

def forward_with_gate(self, x):
    output = forward(self, x)
    return LayerOutput(output.hidden * torch.sigmoid(F.linear(x, self.gate)), output.losses)

FeedForward.__init__, FeedForward.forward = build_with_gate, forward_with_gate
chunk_parameters._built.clear()
store = trace_store.TraceStore(folder / "gated")
results["gated"], results["gated plan"] = explained(), planned()
print(json.dumps(results))
"""
WORDS = (
    *("--num-layers", "4", "--hidden-size", "1024", "--num-attention-heads", "8", "--ffn-hidden-size", "4096"),
    *("--seq-length", "2048", "--max-position-embeddings", "2048", "--micro-batch-size", "2"),
    *("--global-batch-size", "8", "--train-iters", "2", "--lr", "1e-4", "--mock-data", "--vocab-size", "32000"),
    *("--tokenizer-type", "NullTokenizer", "--bf16", "--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm"),
    *("--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"),
)
HALVED = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
AGAIN = ("--recompute-granularity", "selective", "--recompute-modules")
CASES: dict[str, tuple[tuple[str, ...], int]] = {
    "whole": ((), 1),
    "halved": (HALVED, 2),
    "norms again": ((*HALVED, *AGAIN, "core_attn", "layernorm"), 2),
    "gathered keys": (("--context-parallel-size", "2", "--cp-comm-type", "all_gather"), 2),
    "tensorwise": ((*HALVED, "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"), 2),
    "adapters": (("--lora-rank", "8", "--load", "somewhere", "--finetune"), 1),
    "experts": (
        (
            *("--num-experts", "8", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "512"),
            *("--moe-token-dispatcher-type", "alltoall", "--expert-model-parallel-size", "2"),
        ),
        2,
    ),
}
ROWS, HIDDEN, LAYERS, MICROBATCHES = 2 * 2048, 1024, 4, 4


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("traces")
    command = [sys.executable, "-c", PROGRAM, str(folder), json.dumps(WORDS), json.dumps(CASES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", CASES)
def test_layers_keep_what_the_closed_form_says(results: dict[str, Any], case: str) -> None:
    traced, closed = results["saved"][case]
    assert traced == pytest.approx(closed, rel=0.01)


def test_a_new_saved_tensor_is_kept_by_every_layer_without_an_edit_of_the_planner(results: dict[str, Any]) -> None:
    """The gate saves its own output and that of the feed-forward; its input is saved already."""
    (plain,), (gated,) = results["plain"]["stages"], results["gated"]["stages"]
    more = gated["memory"]["activations"] - plain["memory"]["activations"]
    assert more == pytest.approx(LAYERS * 2 * ROWS * HIDDEN * 2, rel=0.01)


def test_a_new_parameter_is_counted_without_an_edit_of_the_planner(results: dict[str, Any]) -> None:
    (plain,), (gated,) = results["plain"]["stages"], results["gated"]["stages"]
    more = gated["parameters"] - plain["parameters"]
    assert more == LAYERS * HIDDEN**2
    assert gated["memory"]["optimizer"] - plain["memory"]["optimizer"] == 12 * more


def test_a_new_gemm_takes_its_time_without_an_edit_of_the_planner(results: dict[str, Any]) -> None:
    """Forward, and for the gradients of both operands."""
    plain, gated = (results[name]["time"]["layer"]["products"] for name in ("plain", "gated"))
    flops = 3 * 2 * ROWS * HIDDEN**2
    assert flops / 989e12 < gated - plain < 3 * flops / 989e12


def test_a_new_tensor_and_a_new_gemm_change_the_plan_without_an_edit_of_the_planner(results: dict[str, Any]) -> None:
    plain, gated = results["plain plan"], results["gated plan"]
    saved, state = LAYERS * 2 * ROWS * HIDDEN * 2, LAYERS * HIDDEN**2 * (2 + 4 + 12)
    assert gated["used_mib"] - plain["used_mib"] > 0.99 * (saved + state) / 2**20
    flops = MICROBATCHES * LAYERS * 3 * 2 * ROWS * HIDDEN**2
    assert gated["ms_per_step"] - plain["ms_per_step"] > 1e3 * flops / 989e12
