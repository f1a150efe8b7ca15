"""transformer-engine's attention and norms where they are asked for and found; our own kernels everywhere else."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.ops import transformer_engine
from megatron.core.ops.attention_backend import SDPA, AttentionCall, select_attention_core
from megatron.core.ops.attention_pattern import CAUSAL, AttentionPattern
from megatron.core.ops.dot_product_attention import AttentionInputs, plain_attention
from megatron.core.ops.dropout import AttentionDropout, DropoutKeys, DropoutSamples
from megatron.core.ops.transformer_engine import load_transformer_engine, why_no_transformer_engine
from megatron.core.process_group import single_rank_group
from megatron.core.transformer import attention
from megatron.core.transformer.attention import describe_attention
from megatron.core.transformer.decoder_config import DecoderConfig
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.transformer_layer import TransformerLayer

STAND_IN = (Path(__file__).parent / "transformer_engine_stand_in.py").read_text()
ENGINE = "transformer-engine"
LENGTH = 128
BOTH, WINDOW = AttentionPattern(is_causal=False), AttentionPattern(window=5)
DOCUMENTS = AttentionPattern(document_ids=torch.zeros(2, LENGTH))
MASK = AttentionPattern(mask=torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool))
CALL = AttentionCall(torch.bfloat16, 16, LENGTH, LENGTH, CAUSAL)


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let every test look for the package anew, and leave none of its modules behind."""
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, None)  # so that the old state comes back, whatever is imported
        monkeypatch.delitem(sys.modules, name)
    load_transformer_engine.cache_clear()
    yield
    load_transformer_engine.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, source: str) -> None:
    """Put a package named transformer_engine, with this module ``pytorch``, before every other."""
    package = folder / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "pytorch.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Install the stand-in, and return the list of what it is asked for."""
    install(monkeypatch, tmp_path, STAND_IN)
    assert load_transformer_engine() is not None
    made: list[dict[str, Any]] = sys.modules["transformer_engine.pytorch"].calls
    return made


BROKEN = {
    "shared object": ("raise OSError('libtransformer_engine.so: cannot open shared object file')", "cannot open"),
    "half of it": ("raise AssertionError('Could not find `transformer-engine` PyPI package.')", "Could not find"),
    "needed package": ("import surely_not_installed_package", "surely_not_installed_package"),
    "old version": (STAND_IN.replace("class RMSNorm", "class OtherNorm"), "RMSNorm"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_package_means_one_warning_and_our_own_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    source, reason = BROKEN[kind]
    install(monkeypatch, tmp_path, source)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cores = [select_attention_core("auto", "cuda", None, "transformer_engine") for _ in range(5)]
        assert why_no_transformer_engine("bfloat16", "cuda") == "the package cannot be imported"
    assert {core.choose(CALL).name for core in cores} == {SDPA}
    (warning,) = caught
    assert "transformer-engine is installed but cannot be used" in str(warning.message)
    assert reason in str(warning.message)


def test_an_absent_package_makes_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [_Absent(), *sys.meta_path])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select_attention_core("auto", "cuda", None, "transformer_engine").choose(CALL).name == SDPA
        assert why_no_transformer_engine("bfloat16", "cuda") == "the package cannot be imported"


class _Absent:
    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "transformer_engine":
            raise ModuleNotFoundError("No module named 'transformer_engine'", name="transformer_engine")


def test_why_it_is_not_used(calls: list[dict[str, Any]]) -> None:
    assert why_no_transformer_engine("bfloat16", "cpu") == "it needs CUDA"
    assert why_no_transformer_engine("float32", "cuda") == "it needs --bf16 or --fp16"
    assert why_no_transformer_engine("float16", "cuda:3") is None


TAKEN = [CALL, replace(CALL, has_groups=True), replace(CALL, has_dropout=True), replace(CALL, dtype=torch.float16)]
TAKEN += [replace(CALL, pattern=BOTH), replace(CALL, pattern=WINDOW), replace(CALL, head_dim=128)]
LEFT = [
    replace(CALL, pattern=DOCUMENTS),
    replace(CALL, pattern=DOCUMENTS.within(5)),
    replace(CALL, pattern=MASK),
    replace(CALL, has_softcap=True),
    replace(CALL, pattern=WINDOW, has_dropout=True),
    replace(CALL, pattern=BOTH.within(5)),
    replace(CALL, dtype=torch.float32),
    replace(CALL, dtype=torch.float64),
    replace(CALL, head_dim=136),
    replace(CALL, head_dim=20),
    # A prompt of any length, one that goes on, a part of the sequence under context parallelism.
    replace(CALL, num_queries=LENGTH + 64, num_keys=LENGTH + 64),
    replace(CALL, num_keys=2 * LENGTH),
    replace(CALL, pattern=CAUSAL.part(range(LENGTH), range(2 * LENGTH)), num_keys=2 * LENGTH),
]


@pytest.mark.parametrize("call", [*TAKEN, *LEFT])
def test_what_it_cannot_do_goes_to_our_own_kernels(calls: list[dict[str, Any]], call: AttentionCall) -> None:
    softcap = 30.0 if call.has_softcap else None
    engine = select_attention_core("auto", "cuda", softcap, "transformer_engine").choose(call).name
    ours = select_attention_core("auto", "cuda", softcap).choose(call).name
    assert engine == (ENGINE if call in TAKEN else ours)
    assert ours != ENGINE


def test_another_backend_is_obeyed_and_old_devices_have_no_kernel_of_it(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def name(backend: str, device: str) -> str:
        return select_attention_core(backend, device, None, "transformer_engine").choose(CALL).name

    assert name("auto", "cuda") == ENGINE
    assert ENGINE not in {name(backend, "cuda") for backend in ("flash", "fused", "unfused", "local")}
    assert name("auto", "cpu") == SDPA
    for capability, is_deterministic, has_kernel in (
        ((7, 5), False, False),
        ((9, 0), True, True),
        ((10, 0), False, True),
        ((10, 0), True, False),
    ):
        monkeypatch.setattr("megatron.core.ops.attention_backend.compute_capability", lambda _, c=capability: c)
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda d=is_deterministic: d)
        assert (name("auto", "cuda") == ENGINE) is has_kernel


def test_nothing_is_imported_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, STAND_IN)
    select_attention_core("auto", "cuda")
    make_norm("RMSNorm", torch.bfloat16, device="cpu")
    assert "transformer_engine" not in sys.modules


@pytest.mark.parametrize("pattern", [CAUSAL, BOTH, WINDOW], ids=["causal", "both directions", "window"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_its_attention_computes_what_plain_attention_does(
    calls: list[dict[str, Any]], pattern: AttentionPattern, groups: int
) -> None:
    core = select_attention_core("auto", "cuda", None, "transformer_engine")
    generator = torch.Generator().manual_seed(4)
    query, key, value = (
        torch.randn(LENGTH, 3, heads, 8, generator=generator).bfloat16().requires_grad_()
        for heads in (4, groups, groups)
    )
    output = core(AttentionInputs(query, key, value, pattern))
    mask = "causal" if pattern.is_causal else "no_mask"
    assert calls == [{"kind": "attention", "dropout": 0.0, "mask": mask}]
    exact = plain_attention(AttentionInputs(query.double(), key.double(), value.double(), pattern))
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), exact, rtol=0.02, atol=0.02)
    grads = (torch.autograd.grad(out.double().square().sum(), (query, key, value)) for out in (output, exact))
    for ours, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0.05, atol=0.05)


def test_its_dropout_is_seeded_by_the_keys_and_leaves_the_generator_alone(calls: list[dict[str, Any]]) -> None:
    core = select_attention_core("auto", "cuda", None, "transformer_engine")
    low = [torch.randn(LENGTH, 3, 4, 8).bfloat16() for _ in range(3)]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second, again = (core(AttentionInputs(*low, CAUSAL, dropout_of(iteration, 0.25))) for iteration in (0, 1, 0))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert torch.equal(torch.rand(3), expected)
    core(AttentionInputs(*low, CAUSAL))
    assert [call["dropout"] for call in calls] == [0.25, 0.25, 0.25, 0.0]


def dropout_of(iteration: int, probability: float) -> AttentionDropout:
    samples = DropoutSamples.at(1, iteration, 0, 3, "cpu")
    return DropoutKeys(samples, torch.arange(LENGTH), slice(None), range(1)).of_attention(0, probability, range(4))


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Let a CPU be a device that transformer-engine works on."""
    monkeypatch.setattr(transformer_engine, "_DEVICE", "cpu")
    return calls


def make_norm(kind: str, dtype: torch.dtype, impl: str = "local", device: str = "cpu", **options: Any) -> Norm:
    settings: dict[str, Any] = {"epsilon": 0.3, "partial_gradient": False, "centered_weight": False, **options}
    norm = Norm(kind, 24, tp=single_rank_group(), dtype=dtype, device=device, transformer_impl=impl, **settings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(24, generator=generator))
    return norm


@pytest.mark.parametrize("centered_weight", [False, True])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_its_norms_compute_what_ours_do_on_our_own_weights(
    on_cpu: list[dict[str, Any]], kind: str, centered_weight: bool
) -> None:
    engine = make_norm(kind, torch.bfloat16, "transformer_engine", centered_weight=centered_weight)
    exact = make_norm(kind, torch.float64, centered_weight=centered_weight)
    exact.load_state_dict(engine.state_dict())
    assert [name for name, _ in engine.named_parameters()] == [name for name, _ in exact.named_parameters()]
    # Heads, as parts of longer rows.
    values = torch.randn(5, 3, 2, 24, generator=torch.Generator().manual_seed(2)).bfloat16()
    inputs = [values.detach().to(dtype, copy=True).requires_grad_() for dtype in (torch.bfloat16, torch.float64)]
    outputs = [norm(x[:, :, 1]) for norm, x in zip((engine, exact), inputs, strict=True)]
    assert on_cpu == [{"kind": kind}]
    assert outputs[0].dtype == torch.bfloat16
    torch.testing.assert_close(outputs[0].double(), outputs[1], rtol=0.01, atol=0.01)
    for output in outputs:
        output.double().square().sum().backward()
    pairs = zip((inputs[0], *engine.parameters()), (inputs[1], *exact.parameters()), strict=True)
    for ours, wanted in pairs:
        assert ours.grad is not None
        assert wanted.grad is not None
        torch.testing.assert_close(ours.grad.double(), wanted.grad, rtol=0.05, atol=0.05)


def test_weights_that_are_replaced_are_the_ones_that_count(on_cpu: list[dict[str, Any]]) -> None:
    norm = make_norm("RMSNorm", torch.bfloat16, "transformer_engine")
    x = torch.ones(2, 24, dtype=torch.bfloat16)
    norm.weight = torch.nn.Parameter(torch.zeros(24, dtype=torch.bfloat16))
    assert norm(x).count_nonzero() == 0
    norm(x).sum().backward()
    assert norm.weight.grad is not None


def test_other_formats_and_other_norms_are_ours(on_cpu: list[dict[str, Any]]) -> None:
    x = torch.randn(4, 24)
    single = make_norm("LayerNorm", torch.float32, "transformer_engine")
    assert torch.equal(single(x), make_norm("LayerNorm", torch.float32)(x))
    half = make_norm("RMSNorm", torch.bfloat16, "transformer_engine")
    assert torch.equal(half(x), make_norm("RMSNorm", torch.bfloat16)(x))
    assert make_norm("MeanAbsNorm", torch.bfloat16, "transformer_engine").of_engine is None
    assert on_cpu == []


OPTIONS: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "qk_layernorm": True,
    "params_dtype": "bfloat16",
    "transformer_impl": "transformer_engine",
}


def test_a_layer_has_its_attention_and_norms_and_its_own_parameters(
    on_cpu: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    impls: list[str] = []

    def select(backend: str, device: object, softcap: float | None, transformer_impl: str) -> Any:
        impls.append(transformer_impl)
        return select_attention_core(backend, "cpu", softcap)

    monkeypatch.setattr(attention, "select_attention_core", select)
    config = DecoderConfig(**OPTIONS)
    configs = (config, replace(config, transformer_impl="local"))
    layers = [TransformerLayer(each, 0, single_rank_group(), "cpu") for each in configs]
    norms = [module for module in layers[0].modules() if isinstance(module, Norm)]
    assert len(norms) == 4
    assert all(norm.of_engine is not None for norm in norms)
    assert impls == ["transformer_engine", "local"]
    shapes = [{name: tensor.shape for name, tensor in layer.state_dict().items()} for layer in layers]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("options", "has_documents", "expected"),
    [
        ({}, False, "attention kernel: transformer-engine"),
        ({"window_size": "31,0", "attention_dropout": 0.0}, False, "attention kernel: transformer-engine"),
        (
            {"window_size": "31,0", "window_attn_skip_freq": "3"},
            False,
            "attention kernels: torch's flash kernel (2 layers); transformer-engine (1 layers)",
        ),
        ({}, True, f"attention kernel: {SDPA} with a mask"),
        ({"transformer_impl": "local"}, False, f"attention kernel: {SDPA}"),
    ],
)
def test_the_line_of_the_kernels_names_it(
    calls: list[dict[str, Any]], options: dict[str, Any], has_documents: bool, expected: str
) -> None:
    config = DecoderConfig(**{**OPTIONS, **options})
    assert describe_attention(config, "cuda", 1024, has_documents=has_documents) == expected
