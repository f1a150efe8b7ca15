"""FlashAttention where it is found; a broken one means one warning and torch's attention."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.core.ops.attention_backend import (
    SDPA,
    AttentionCall,
    describe_missing_flash,
    load_flash_attention,
    load_flash_attention_3,
    select_attention_core,
)
from megatron.core.ops.attention_pattern import CAUSAL, AttentionPattern
from megatron.core.ops.dot_product_attention import AttentionInputs, fused_attention, plain_attention
from megatron.core.ops.dropout import AttentionDropout, DropoutKeys, DropoutSamples
from megatron.core.transformer.decoder_config import DecoderConfig


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Let every test look for the package anew."""
    for load in (load_flash_attention, load_flash_attention_3):
        load.cache_clear()
    yield
    for load in (load_flash_attention, load_flash_attention_3):
        load.cache_clear()
    for name in ("flash_attn", "flash_attn_interface"):
        sys.modules.pop(name, None)


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
    assert {core.kernels[0].name for core in cores} == {SDPA}
    assert len(caught) == 1
    message = str(caught[0].message)
    assert "flash-attn is installed but cannot be used" in message
    assert reason in message


def test_absent_package_is_passed_over_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select_attention_core("auto", "cuda").kernels[0].name == SDPA


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
    config = DecoderConfig(
        num_layers=2, hidden_size=12, num_attention_heads=3, attention_backend=backend, params_dtype=dtype
    )
    line = describe_missing_flash(config.attention_backend, config.params_dtype, device_type)
    assert line == (expected and f"flash-attn is not used, because {expected}; torch's attention is used instead")


def test_nothing_is_said_where_it_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, STAND_IN)
    config = DecoderConfig(
        num_layers=2, hidden_size=12, num_attention_heads=3, use_flash_attn=True, params_dtype="bfloat16"
    )
    assert describe_missing_flash(config.attention_backend, config.params_dtype, "cuda") is None


STAND_IN = (Path(__file__).parent / "flash_attn_stand_in.py").read_text()
PATTERNS = {
    "causal": CAUSAL,
    "both directions": AttentionPattern(is_causal=False),
    "window": AttentionPattern(window=3),
    "window in both directions": AttentionPattern(is_causal=False, window=3),
}


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("num_queries", [7, 4])
@pytest.mark.parametrize("name", PATTERNS)
def test_package_computes_what_plain_attention_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, num_queries: int, softcap: float | None
) -> None:
    install(monkeypatch, tmp_path, STAND_IN)
    core = select_attention_core("auto", "cuda", softcap)
    generator = torch.Generator().manual_seed(4)
    query, key, value = (
        torch.randn(length, 3, heads, 8, generator=generator).bfloat16().requires_grad_()
        for length, heads in ((num_queries, 4), (7, 2), (7, 2))
    )
    output = core(AttentionInputs(query, key, value, PATTERNS[name]))
    assert sys.modules["flash_attn"].calls == [
        {"q": (3, num_queries, 4, 8), "k": (3, 7, 2, 8), "dropout_p": 0.0, "causal": PATTERNS[name].is_causal}
    ]
    exact = plain_attention(AttentionInputs(query.double(), key.double(), value.double(), PATTERNS[name]), softcap)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), exact, rtol=0.02, atol=0.02)
    grads = (torch.autograd.grad(out.double().square().sum(), (query, key, value)) for out in (output, exact))
    for ours, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0.05, atol=0.05)


def test_package_is_given_dropout_but_no_documents_no_masks_and_no_float32(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, STAND_IN)
    core = select_attention_core("auto", "cuda")
    calls = sys.modules["flash_attn"].calls
    query, key = torch.randn(7, 3, 4, 6), torch.randn(7, 3, 2, 6)
    output = core(AttentionInputs(query, key, key, CAUSAL))
    torch.testing.assert_close(output, plain_attention(AttentionInputs(query, key, key, CAUSAL)))
    low = query.bfloat16(), key.bfloat16(), key.bfloat16()
    mask = torch.ones(1, 1, 7, 7, dtype=torch.bool).tril()
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1]]).expand(3, -1)
    for pattern in (AttentionPattern(mask=mask), AttentionPattern(document_ids=documents)):
        given = core(AttentionInputs(*low, pattern))
        wanted = plain_attention(AttentionInputs(query, key, key, pattern))
        torch.testing.assert_close(given.float(), wanted, rtol=0.05, atol=0.05)
    assert calls == []
    core(AttentionInputs(*low, CAUSAL, dropout_of(0, 0.25)))
    assert [call["dropout_p"] for call in calls] == [0.25]


def test_dropout_of_the_package_is_seeded_by_the_keys_and_leaves_the_generator_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, STAND_IN)
    core = select_attention_core("auto", "cuda")
    low = [torch.randn(7, 3, 4, 8).bfloat16() for _ in range(3)]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second, again = (core(AttentionInputs(*low, CAUSAL, dropout_of(iteration, 0.2))) for iteration in (0, 1, 0))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert torch.equal(torch.rand(3), expected)


def dropout_of(iteration: int, probability: float) -> AttentionDropout:
    samples = DropoutSamples.at(1, iteration, 0, 3, "cpu")
    return DropoutKeys(samples, torch.arange(7), slice(None), range(1)).of_attention(0, probability, range(4))


def test_version_3_comes_first_and_dropout_is_left_to_version_2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, STAND_IN)
    (tmp_path / "flash_attn_interface.py").write_text(VERSION_3)
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    core = select_attention_core("flash", "cuda")
    low = [torch.randn(7, 3, 4, 8).bfloat16() for _ in range(3)]
    output = core(AttentionInputs(*low, CAUSAL))
    torch.testing.assert_close(output, fused_attention(AttentionInputs(*low, CAUSAL)))
    assert sys.modules["flash_attn"].calls == []
    core(AttentionInputs(*low, CAUSAL, dropout_of(0, 0.1)))
    assert len(sys.modules["flash_attn"].calls) == 1
    for capability, expected in (((9, 0), "flash-attn 3"), ((8, 0), "flash-attn 2"), ((7, 5), SDPA)):
        monkeypatch.setattr("megatron.core.ops.attention_backend.compute_capability", lambda _, c=capability: c)
        call = AttentionCall(torch.bfloat16, 8, 7, 7, CAUSAL)
        assert select_attention_core("auto", "cuda").choose(call).name == expected


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Ask torch, and so every package, for algorithms that give the same bits again."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_packages_give_the_same_bits_again_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By default both add to the gradient of queries in any order; of version 3 that is so with its option too."""
    install(monkeypatch, tmp_path, STAND_IN)
    (tmp_path / "flash_attn_interface.py").write_text(VERSION_3)
    core = select_attention_core("auto", "cuda")
    core(AttentionInputs(*(torch.randn(7, 3, 4, 8).bfloat16() for _ in range(3)), CAUSAL))
    assert sys.modules["flash_attn"].calls == [
        {"q": (3, 7, 4, 8), "k": (3, 7, 4, 8), "dropout_p": 0.0, "causal": True, "deterministic": True}
    ]
    load_flash_attention.cache_clear()
    install(
        monkeypatch, tmp_path, STAND_IN.replace("    deterministic=False,\n", "").replace("if deterministic", "if 0")
    )
    assert select_attention_core("auto", "cuda").kernels[0].name == SDPA
    assert describe_missing_flash("flash", "bfloat16", "cuda") == (
        "flash-attn is not used, because --deterministic-mode needs flash-attn 2.4.1 or newer, of version 2; torch's "
        "attention is used instead"
    )


VERSION_3 = """
import torch


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, window_size=(-1, -1), softcap=0.0):
    heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
    output = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)
    return output, torch.zeros(1)
"""
