"""FlashAttention where it is found; a broken one means one warning and torch's attention."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.core.kernels.attention_pattern import CAUSAL, AttentionPattern
from megatron.core.kernels.dot_product_attention import (
    describe_missing_flash,
    fused_attention,
    plain_attention,
    select_attention_core,
)
from megatron.core.kernels.dropout_keys import DropoutKeys, DropoutSamples
from megatron.core.kernels.flash_attn import load_flash_attention
from megatron.core.transformer.transformer_config import TransformerConfig


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Let every test look for the package anew."""
    load_flash_attention.cache_clear()
    yield
    load_flash_attention.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, source: str) -> None:
    """Put a module named flash_attn before every other."""
    (folder / "flash_attn.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)


class _Absent:
    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "flash_attn":
            raise ModuleNotFoundError("No module named 'flash_attn'", name="flash_attn")


def hide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    monkeypatch.setattr(sys, "meta_path", [_Absent(), *sys.meta_path])


BROKEN = {
    "shared object": ("raise OSError('flash_attn_2_cuda.so: cannot open shared object file')", "cannot open shared"),
    "symbol": ("raise ImportError('undefined symbol: _ZN3c104cuda')", "undefined symbol"),
    "needed package": ("import surely_not_installed_package", "surely_not_installed_package"),
    "runtime": ("raise RuntimeError('no kernel image')", "no kernel image"),
    "old version": ("flash_attn_unpadded_func = None", "flash_attn_func"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_package_means_one_warning_and_the_fallback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    source, reason = BROKEN[kind]
    install(monkeypatch, tmp_path, source)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cores = [select_attention_core("auto", "cuda") for _ in range(24)]
    assert all(core is fused_attention for core in cores)
    assert len(caught) == 1
    message = str(caught[0].message)
    assert "flash-attn is installed but cannot be used" in message
    assert reason in message


def test_absent_package_is_passed_over_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select_attention_core("auto", "cuda") is fused_attention


@pytest.mark.parametrize(
    ("backend", "device_type", "dtype", "expected"),
    [
        ("flash", "cuda", "bfloat16", "the package cannot be imported"),
        ("flash", "cuda", "float32", "it needs --bf16 or --fp16"),
        ("flash", "cpu", "bfloat16", "it needs CUDA"),
        ("auto", "cuda", "bfloat16", None),
        ("auto", "cpu", "float32", None),
    ],
)
def test_one_line_says_why_it_is_not_used_where_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, backend: str, device_type: str, dtype: str, expected: str | None
) -> None:
    hide(monkeypatch)
    config = TransformerConfig(
        num_layers=2, hidden_size=12, num_attention_heads=3, attention_backend=backend, params_dtype=dtype
    )
    line = describe_missing_flash(config.attention_backend, config.params_dtype, device_type)
    assert line == (expected and f"flash-attn is not used, since {expected}: torch's own attention takes its place")


def test_nothing_is_said_where_it_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, WORKING)
    config = TransformerConfig(
        num_layers=2, hidden_size=12, num_attention_heads=3, use_flash_attn=True, params_dtype="bfloat16"
    )
    assert describe_missing_flash(config.attention_backend, config.params_dtype, "cuda") is None


WORKING = """
import torch

calls, drawn = [], []


def flash_attn_func(query, key, value, dropout_p, causal):
    calls.append((tuple(query.shape), tuple(key.shape), dropout_p, causal))
    drawn.append(torch.rand(4).tolist())
    return torch.nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
"""


def test_working_package_gets_batch_first_tensors_in_low_precision_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, WORKING)
    core = select_attention_core("auto", "cuda")
    calls = sys.modules["flash_attn"].calls
    query, key = torch.randn(7, 3, 4, 6), torch.randn(7, 3, 2, 6)
    output = core(query, key, key, CAUSAL, None)
    assert calls == []
    torch.testing.assert_close(output, plain_attention(query, key, key, CAUSAL, None))
    low = core(query.bfloat16(), key.bfloat16(), key.bfloat16(), CAUSAL, None)
    assert calls == [((3, 7, 4, 6), (3, 7, 2, 6), 0.0, True)]
    torch.testing.assert_close(low.float(), output, rtol=0.05, atol=0.05)
    mask = torch.ones(1, 1, 7, 7, dtype=torch.bool).tril()
    core(query.bfloat16(), key.bfloat16(), key.bfloat16(), AttentionPattern(mask=mask), None)
    assert len(calls) == 1


def test_dropout_of_the_package_is_seeded_by_the_keys_and_leaves_the_generator_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, WORKING)
    core = select_attention_core("auto", "cuda")
    query = torch.randn(7, 3, 4, 6).bfloat16()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    for iteration in (0, 1, 0):
        samples = DropoutSamples.at(1, iteration, 0, 3, "cpu")
        keys = DropoutKeys(samples, torch.arange(7), slice(None), range(1))
        core(query, query, query, CAUSAL, keys.of_attention(0, 0.2, range(4)))
    package = sys.modules["flash_attn"]
    assert [probability for _, _, probability, _ in package.calls] == [0.2] * 3
    assert package.drawn[0] == package.drawn[2] != package.drawn[1]
    assert torch.equal(torch.rand(3), expected)
