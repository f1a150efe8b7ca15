"""What several recipes promise: other formats reject by name, the planner counts, and layouts agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import pretrain_gpt
from megatron.checkpoint.formats.huggingface.model_export import write_hugging_face
from megatron.checkpoint.formats.megatron.torch_dist_writer import write_torch_dist
from megatron.checkpoint.formats.megatron.torch_format import write_megatron_torch
from megatron.cli.planner_arguments import read_planned_run
from megatron.config.arguments import resolve_arguments
from megatron.core.errors import ConfigurationError
from megatron.planner.communication import step_traffic
from megatron.planner.explanation import explain
from megatron.planner.gpu import H100
from megatron.planner.implementations import NATIVE
from megatron.verification.cells import Layout, make_cell
from megatron.verification.collective_recorder import record_step
from megatron.verification.run_cell import resolve_cell
from megatron.verification.verifier import Verifier
from megatron.verification.worker_pool import WorkerPool
from tests.unit.checkpoint.formats.megatron.memory_source import MemorySource


def check_rejected(words: Sequence[str], text: str) -> None:
    """Check that a command line has one problem, in one line with this text."""
    with pytest.raises(ConfigurationError) as caught:
        resolve_arguments(words, 1)
    _check_problem(caught.value, text)


def check_other_formats(flags: Sequence[str], more: Sequence[str], feature: str) -> None:
    """Check that the formats of Megatron and of Hugging Face reject a model by name, each in one line."""
    source = MemorySource(resolve_arguments([*flags, *more], 1).config.model, has_optimizer=False)
    for write in (write_megatron_torch, write_torch_dist):
        with pytest.raises(ConfigurationError) as caught:
            write(source, Path("megatron_folder"), 3)
        _check_problem(caught.value, " ".join(more))
    with pytest.raises(ConfigurationError) as caught:
        write_hugging_face(source, Path("model_folder"))
    _check_problem(caught.value, feature)
    check_rejected([*flags, "--save", "x", "--ckpt-format", "torch", *more], " ".join(more))


def check_feature(flags: Sequence[str], flag: str, parameters: Mapping[int, int]) -> None:
    """Check a feature of layers: the planner counts it, layouts agree, and other formats reject it.

    ``parameters`` are those that it adds to one layer whose feed-forward has 2 matrices, or 3 with a gate.
    """
    for gated, added in ((), parameters[2]), (("--swiglu", "--ffn-hidden-size", "96"), parameters[3]):
        reports = []
        for more in ((), (flag,)):
            parsed = read_planned_run([*flags, *gated, *more], 1)
            reports.append(explain(parsed.config, parsed.notes, H100, NATIVE).to_json())
        plain, own = reports
        assert own["parameters"] == plain["parameters"] + parsed.config.model.num_layers * added
        for part in ("weights", "activations"):
            assert own["stages"][0]["memory"][part] > plain["stages"][0]["memory"][part], part
        assert own["seconds_per_step"] > plain["seconds_per_step"]
    name = flag.removeprefix("--").replace("-", "_")
    check_other_formats(flags, [flag], f"{name} True")
    parts = (pretrain_gpt.provide_model, pretrain_gpt.forward_step)
    with WorkerPool(2) as pool:
        for layout in (Layout(tp=2), Layout(tp=2, sequence_parallel=True)):
            report = Verifier(pool, *parts).check(make_cell("llama", layout, extra=[flag], num_layers=1))
            assert report.outcome == "passed", report.describe()
    sharded = make_cell("gpt2", Layout(tp=2, dp=2, sharding="optim"), extra=[flag], num_layers=1)
    config = resolve_cell(sharded.flags, 4, "float32")
    assert record_step(config, 0, *parts) == step_traffic(config, 0, (9, 0))


def _check_problem(error: ConfigurationError, text: str) -> None:
    (problem,) = error.problems
    assert text in problem
    assert "\n" not in problem
