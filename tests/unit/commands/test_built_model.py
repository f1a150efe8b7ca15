"""The planned number of parameters is compared with the model that the code builds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron.commands.arguments.built_model import difference_from_built
from megatron.commands.arguments.planned_run import read_planned_run
from megatron.commands.planning import explain
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_sizes import ParallelSizes
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.tensor_parallel.layers import make_parameter, replicated_spec
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.norm import Norm
from megatron.planning.theoretical_memory import model_size
from megatron.training.config.sources.preset import preset_names

MODEL = (
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--ffn-hidden-size", "96"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--micro-batch-size", "2", "--global-batch-size", "8"),
    *("--train-iters", "2", "--lr", "1e-4", "--mock-data", "--vocab-size", "1000", "--tokenizer-type", "NullTokenizer"),
)
NO_GROUP = describe_parallel_state(0, 1, ParallelSizes()).tp
LAYOUTS = {
    "one": ((), 1),
    "tp2 pp2": (("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"), 4),
    "fsdp": (("--data-parallel-sharding-strategy", "optim_grads_params", "--use-distributed-optimizer"), 4),
    "experts": (
        (
            *("--num-experts", "4", "--moe-ffn-hidden-size", "48", "--disable-bias-linear", "--moe-router-topk", "2"),
            *("--expert-model-parallel-size", "2"),
        ),
        2,
    ),
    "adapters": (("--lora-rank", "4"), 1),
}


def warning_of(layout: str) -> str | None:
    flags, world_size = LAYOUTS[layout]
    config = read_planned_run((*MODEL, *flags), world_size).config
    return difference_from_built(config, model_size(config))


def add_parameter(monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module], size: int) -> None:
    build: Callable[..., None] = kind.__init__

    @functools.wraps(build)
    def build_with_more(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        if kind is not GPTModel:
            spec = replicated_spec("gate", (size,), NO_GROUP, partial_gradient=False)
            self.gate = make_parameter((size,), spec, torch.float32, "meta")
        else:
            # One that no description goes with, as a first try has it.
            self.gate = nn.Parameter(torch.empty(size, device="meta"))

    monkeypatch.setattr(kind, "__init__", build_with_more)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_model_as_it_is_has_the_planned_parameters(layout: str) -> None:
    assert warning_of(layout) is None


@pytest.mark.parametrize("layout", ["one", "tp2 pp2", "fsdp"])
@pytest.mark.parametrize(
    ("kind", "in_layer", "in_model"),
    [(SelfAttention, 1, 0), (MLP, 1, 0), (Norm, 2, 1), (GPTModel, 0, 1)],
    ids=["attention", "feed-forward", "norm", "model"],
)
def test_a_new_parameter_is_told_of(
    monkeypatch: pytest.MonkeyPatch, layout: str, kind: type[nn.Module], in_layer: int, in_model: int
) -> None:
    add_parameter(monkeypatch, kind, 1234)
    warning = warning_of(layout)
    assert warning is not None
    assert warning.startswith("WARNING: the model that the code builds has other parameters than planned: ")
    assert "\n" not in warning
    stages = 2 if "pp2" in layout else 1
    for stage in range(stages):
        # A model is a chunk of a stage; its last norm is on the last one.
        more = in_layer * 4 // stages + (in_model if kind is GPTModel or stage == stages - 1 else 0)
        assert f"on each rank of stage {stage} (planned: " in warning
        assert f", +{more * 1234})" in warning


def test_a_model_that_cannot_be_built_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        raise TypeError("gate has no\nwidth")

    monkeypatch.setattr(MLP, "__init__", fail)
    assert warning_of("one") == (
        "WARNING: the planned parameters are not checked: building the model raises TypeError: gate has no width"
    )


def test_explain_prints_the_warning_behind_the_explanation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain.main(MODEL) == 0
    assert capsys.readouterr().err == ""
    add_parameter(monkeypatch, SelfAttention, 10)
    assert explain.main(MODEL) == 0
    assert "(planned: " in capsys.readouterr().err


@pytest.mark.parametrize("name", preset_names())
def test_presets_have_the_planned_parameters(name: str) -> None:
    config = read_planned_run(("--model-preset", name, *MODEL[12:]), 1).config
    assert difference_from_built(config, model_size(config)) is None
