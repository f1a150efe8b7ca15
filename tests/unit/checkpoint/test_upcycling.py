"""An upcycled model computes the dense model's function, with copies and with groups of slices."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron.checkpoint.checkpoint_source import CheckpointSource
from megatron.checkpoint.conversion_request import Upcycling
from megatron.checkpoint.inference_model import load_model_from, streamed_logits
from megatron.checkpoint.upcycling import UpcycledSource
from megatron.core.device import Device
from megatron.core.errors import ConfigurationError
from megatron.core.parallel_state import describe_parallel_state
from tests.unit.checkpoint.small_checkpoint import MemorySource, small_common, small_source

LLAMA = """
    --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --mtp-num-layers 1
    --untie-embeddings-and-output-weights
"""


def dense(*flags: str, dtype: torch.dtype = torch.float64, has_optimizer: bool = False) -> MemorySource:
    """Return a dense model whose biases and norms are random too."""
    common = small_common(*flags, has_optimizer=has_optimizer)
    common["config"]["model"]["init_method_std"] = 0.3
    source = small_source(common)
    common["config"]["model"]["params_dtype"] = str(dtype).removeprefix("torch.")
    generator = torch.Generator().manual_seed(3)
    for name, values in source.values.items():
        source.values[name] = values.to(dtype)
        if values.dim() == 1:
            source.values[name] += 0.2 * torch.randn(values.shape, generator=generator, dtype=torch.float64).to(dtype)
    return source


@torch.no_grad()
def logits_of(source: CheckpointSource) -> torch.Tensor:
    model = load_model_from(source, describe_parallel_state(0, 1), Device("cpu"))
    tokens = torch.arange(2 * 19).view(2, 19) * 7 % 101
    return model(tokens, torch.arange(19).expand_as(tokens))[:, :, :101]


@pytest.mark.parametrize("flags", [LLAMA, "", "--squared-relu", "--geglu"])
@pytest.mark.parametrize("granularity", [1, 2, 4, 5])
def test_logits_are_those_of_the_dense_model(flags: str, granularity: int) -> None:
    source = dense(flags)
    expected = logits_of(source)
    for factor in {1, 2, 4} - ({1} if granularity == 1 else set()):
        view = UpcycledSource(source, Upcycling(4 * granularity, factor * granularity, granularity))
        apart = float((logits_of(view) - expected).abs().max() / expected.abs().max())
        assert apart < 1e-12, factor


@pytest.mark.parametrize("flags", [LLAMA, "--openai-gelu"])
def test_every_top_k_of_copies_in_float32(flags: str) -> None:
    source = dense(flags, dtype=torch.float32)
    tokens = torch.arange(2 * 19).view(2, 19) * 7 % 101
    expected = streamed_logits(source, tokens)
    for topk in range(2, 6):
        apart = (streamed_logits(UpcycledSource(source, Upcycling(5, topk)), tokens) - expected).abs().max()
        assert float(apart / expected.abs().max()) < 1e-6, topk


def test_experts_differ_in_their_routers_and_boxes_are_parts_of_the_whole() -> None:
    source = dense("--swiglu", has_optimizer=True)
    view = UpcycledSource(source, Upcycling(8, 4, 2))
    assert not any(name.startswith("optimizer.") for name in view.tensors)
    assert (view.common["optimizer"], view.common["scheduler"]) == (None, None)
    assert view.common["progress"] == source.common["progress"]
    router = view.read("model.decoder.layers.1.mlp.router.weight")
    assert router.shape == (8, 24)
    assert [router[i].equal(router[i + 1]) for i in range(7)] == [True, False] * 3 + [True]
    assert float(router.std()) == pytest.approx(0.3, rel=0.2)
    for name, info in view.tensors.items():
        whole = view.read(name)
        assert (tuple(whole.shape), whole.dtype) == (info.global_shape, info.dtype)
        offset = tuple(size // 3 for size in info.global_shape)
        shape = tuple(max(size // 2, 1) for size in info.global_shape)
        box = dataclasses.replace(info.whole, offset=offset, shape=shape)
        assert view.read(name, box).equal(whole[box.slices]), name


@pytest.mark.parametrize(
    ("flags", "experts", "expected"),
    [
        ("--num-experts 4", Upcycling(4), "has 4 experts already"),
        ("", Upcycling(9, 3, 3), "--moe-upcycling-granularity 3 does not divide --ffn-hidden-size 40"),
        ("--lora-rank 2", Upcycling(4), "contains LoRA adapters of the dense layers; add --merge-lora"),
    ],
)
def test_a_model_that_cannot_be_upcycled_is_refused(flags: str, experts: Upcycling, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        UpcycledSource(small_source(small_common(flags, has_optimizer=False)), experts)
