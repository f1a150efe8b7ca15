"""FlashAttention 3 and 4 in torch's registry, with implementations registered for CPU tensors by the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import attention as torch_attention
from torch.nn.attention import flex_attention as flex_module

from megatron.core.config_base import from_fields
from megatron.core.errors import ConfigurationError
from megatron.core.ops import attention_backend, attention_block, flash_implementation, flex_attention
from megatron.core.ops.attention_backend import SDPA, AttentionCall, describe_missing_flash, select_attention_core
from megatron.core.ops.attention_block import AttentionBlocks, BlockMask, takes_cudnn
from megatron.core.ops.attention_pattern import CAUSAL, AttentionPattern
from megatron.core.ops.dot_product_attention import AttentionInputs, plain_attention
from megatron.core.ops.flash_implementation import (
    FlashShape,
    activate_flash_implementation,
    active_flash_implementation,
)
from megatron.core.ops.flex_attention import load_flash_flex_attention
from megatron.core.process_group import single_rank_group
from megatron.core.transformer import attention
from megatron.core.transformer.attention import describe_attention
from megatron.core.transformer.decoder_config import DecoderConfig
from tests.harness.toy_model import load_global_weights, make_batch, make_model
from tests.unit.core.ops.flash_implementation_stand_in import CALLS, Registered

SHAPE = FlashShape(torch.bfloat16, 64, 64)
CALL = AttentionCall(torch.bfloat16, 64, 128, 128, CAUSAL)


def absent(module: str) -> Callable[[], Registered]:
    def register() -> Registered:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    return register


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Callable[[], Registered]]]:
    """Replace torch's registry; by default both versions are registered and their packages absent."""
    known = {"FA3": absent("flash_attn_interface"), "FA4": absent("flash_attn")}
    monkeypatch.setattr(torch_attention._registry, "_FLASH_ATTENTION_IMPLS", known)
    use_gpu(monkeypatch, (10, 0))
    CALLS.clear()
    yield known
    activate_flash_implementation("auto", "cuda", SHAPE)
    assert torch_attention.current_flash_attention_impl() is None


def use_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    for module in (flash_implementation, attention_backend, attention_block):
        monkeypatch.setattr(module, "compute_capability", lambda device: capability)


@pytest.mark.parametrize(
    ("backend", "capability", "installed", "expected"),
    [
        ("flash", (10, 0), ("FA3", "FA4"), "FA4"),
        ("flash", (9, 0), ("FA3", "FA4"), "FA3"),
        ("flash", (9, 0), ("FA4",), "FA4"),
        ("flash", (8, 0), ("FA3", "FA4"), None),
        ("flash", (10, 0), (), None),
        ("fa4", (9, 0), ("FA3", "FA4"), "FA4"),
        ("fa3", (9, 0), ("FA3",), "FA3"),
        ("auto", (10, 0), ("FA3", "FA4"), None),
        ("fused", (9, 0), ("FA3", "FA4"), None),
    ],
)
def test_backend_and_gpu_select_an_installed_version(
    monkeypatch: pytest.MonkeyPatch,
    registry: dict[str, Callable[[], Registered]],
    backend: str,
    capability: tuple[int, int],
    installed: tuple[str, ...],
    expected: str | None,
) -> None:
    registry.update(dict.fromkeys(installed, Registered))
    use_gpu(monkeypatch, capability)
    activate_flash_implementation(backend, "cuda", SHAPE)
    assert torch_attention.current_flash_attention_impl() == expected
    name = select_attention_core(backend, "cuda").choose(CALL).name
    titles = {"FA3": "FlashAttention 3", "FA4": "FlashAttention 4"}
    assert name == (SDPA if expected is None else f"torch's flash kernel ({titles[expected]})")
    if backend == "flash":
        line = describe_missing_flash("flash", "bfloat16", "cuda")
        assert (line is None) == (expected is not None)


@pytest.mark.parametrize(
    ("backend", "device", "capability", "shape", "reason"),
    [
        ("fa4", "cuda", (10, 0), SHAPE, "FlashAttention 4 needs the package flash-attn-4 (flash_attn.cute), which "),
        ("fa3", "cuda", (10, 0), SHAPE, "needs a GPU of compute capability 9.x; this GPU has 10.0"),
        ("fa4", "cuda", (8, 0), SHAPE, "needs a GPU of compute capability 9.x or 10.x; this GPU has 8.0"),
        ("fa4", "cpu", (10, 0), SHAPE, "FlashAttention 4 needs CUDA"),
        ("fa4", "cuda", (10, 0), FlashShape(torch.float32, 64, 64), "needs --bf16 or --fp16"),
        (
            "fa4",
            "cuda",
            (10, 0),
            FlashShape(torch.bfloat16, 64, 64, True),
            "no attention dropout; use --attention-backend",
        ),
        ("fa4", "cuda", (10, 0), FlashShape(torch.bfloat16, 192, 192), "keys of width 192 and values of width 192"),
        ("fa4", "cuda", (9, 0), FlashShape(torch.bfloat16, 192, 128), "keys of width 192 and values of width 128"),
    ],
)
def test_version_that_was_named_and_is_not_there_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    device: str,
    capability: tuple[int, int],
    shape: FlashShape,
    reason: str,
) -> None:
    use_gpu(monkeypatch, capability)
    with pytest.raises(ConfigurationError, match=rf"^--attention-backend {backend}: FlashAttention \d ") as caught:
        activate_flash_implementation(backend, device, shape)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_torch_without_the_registry_has_only_its_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        name for name in dir(torch_attention) if name.endswith(("_flash_attention_impl", "_flash_attention_impls"))
    ]
    assert len(names) == 5
    with monkeypatch.context() as older:
        for name in names:
            older.delattr(torch_attention, name)
        activate_flash_implementation("flash", "cuda", SHAPE)
        assert active_flash_implementation() is None
        with pytest.raises(ConfigurationError, match=r"this is torch \d"):
            activate_flash_implementation("fa4", "cuda", SHAPE)


def test_broken_package_means_a_warning(registry: dict[str, Callable[[], Registered]]) -> None:
    def register() -> Registered:
        raise RuntimeError("Module does not expose FA4 kernels")

    registry["FA4"] = register
    with pytest.warns(UserWarning, match="flash-attn-4 .* is installed but cannot be used: Module does not expose"):
        activate_flash_implementation("flash", "cuda", SHAPE)
    assert active_flash_implementation() is None


@pytest.mark.parametrize("is_hopper", [True, False])
def test_deterministic_mode_takes_version_4_on_blackwell_only(
    monkeypatch: pytest.MonkeyPatch, registry: dict[str, Callable[[], Registered]], is_hopper: bool
) -> None:
    registry.update(FA3=Registered, FA4=Registered)
    use_gpu(monkeypatch, (9, 0) if is_hopper else (10, 0))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    activate_flash_implementation("flash", "cuda", SHAPE)
    assert torch_attention.current_flash_attention_impl() == (None if is_hopper else "FA4")


def test_model_with_another_backend_restores_torchs_kernel(registry: dict[str, Callable[[], Registered]]) -> None:
    registry["FA4"] = Registered
    activate_flash_implementation("fa4", "cuda", SHAPE)
    earlier = select_attention_core("fa4", "cuda")
    activate_flash_implementation("auto", "cuda", SHAPE)
    assert active_flash_implementation() is None
    assert earlier.choose(CALL).name == SDPA
    # A script may have activated one itself.
    torch_attention.activate_flash_attention_impl("FA4")
    activate_flash_implementation("auto", "cuda", SHAPE)
    assert torch_attention.current_flash_attention_impl() == "FA4"
    torch_attention.restore_flash_attention_impl()


@pytest.mark.parametrize("pattern", [CAUSAL, AttentionPattern(window=3), AttentionPattern(is_causal=False)], ids=str)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (192, 128)])
@pytest.mark.parametrize("num_queries", [7, 4])
def test_kernel_computes_what_plain_attention_does(
    registry: dict[str, Callable[[], Registered]],
    pattern: AttentionPattern,
    head_dim: int,
    value_dim: int,
    num_queries: int,
) -> None:
    registry["FA4"] = Registered
    activate_flash_implementation("flash", "cuda", FlashShape(torch.bfloat16, head_dim, value_dim))
    core = select_attention_core("flash", "cuda")
    generator = torch.Generator().manual_seed(4)
    query, key, value = (
        torch.randn(length, 3, count, width, generator=generator).bfloat16().requires_grad_()
        for length, count, width in ((num_queries, 4, head_dim), (7, 2, head_dim), (7, 2, value_dim))
    )
    output = core(AttentionInputs(query, key, value, pattern))
    exact = plain_attention(AttentionInputs(query.double(), key.double(), value.double(), pattern))
    torch.testing.assert_close(output.double(), exact, rtol=0.02, atol=0.02)
    grads = (torch.autograd.grad(out.double().square().sum(), (query, key, value)) for out in (output, exact))
    for ours, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0.05, atol=0.1)
    # Values keep their width.
    assert [(name, (3, num_queries, 4, head_dim), (3, 7, 2, value_dim)) for name in ("forward", "backward")] == CALLS


def test_narrow_values_are_padded_for_other_kernels() -> None:
    query, key, value = (torch.randn(6, 2, 4, width) for width in (24, 24, 16))
    output = select_attention_core("auto", "cpu")(AttentionInputs(query, key, value, CAUSAL))
    exact = plain_attention(AttentionInputs(query, key, value, CAUSAL))
    torch.testing.assert_close(output, exact)


def test_blocks_of_a_ring_use_the_active_version(
    monkeypatch: pytest.MonkeyPatch, registry: dict[str, Callable[[], Registered]]
) -> None:
    registry["FA4"] = Registered
    cuda = torch.empty(1, 2, 4, 64, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *heads, **options: 3, raising=False)

    class OnCuda:
        """A tensor of which only the device and the shape are read."""

        device = torch.device("cuda")
        shape = cuda.shape

    heads: Any = OnCuda()
    assert takes_cudnn(heads, heads, heads, BlockMask(is_causal=True))
    activate_flash_implementation("fa4", "cuda", SHAPE)
    assert not takes_cudnn(heads, heads, heads, BlockMask(is_causal=True))
    for width, expected in ((64, True), (128, True), (192, False), (256, False), (60, False)):
        has = AttentionBlocks().has_kernel("cuda", torch.bfloat16, width, has_mask=False, has_dropout=False)
        assert has is expected, width


@pytest.mark.parametrize(("capability", "query_block"), [((10, 0), 256), ((9, 0), 128)])
def test_version_4_computes_packed_documents_by_flex_attention(
    monkeypatch: pytest.MonkeyPatch,
    registry: dict[str, Callable[[], Registered]],
    capability: tuple[int, int],
    query_block: int,
) -> None:
    seen: list[dict[str, Any]] = []

    def flex(*heads: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append(options)
        output: torch.Tensor = flex_module.flex_attention(*heads, **options)
        return output

    monkeypatch.setattr(flex_module, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(flex_module, "_warn_once", lambda *args, **options: None)
    load_flash_flex_attention.cache_clear()
    with monkeypatch.context() as loading:
        loading.setattr(torch, "compile", lambda function, **options: flex)
        loading.setattr(flex_attention, "load_flex_attention", lambda: flex)
        assert load_flash_flex_attention() is not None
    use_gpu(monkeypatch, capability)
    registry["FA4"] = Registered
    activate_flash_implementation("fa4", "cuda", FlashShape(torch.bfloat16, 16, 16))
    core = select_attention_core("fa4", "cuda")
    load_flash_flex_attention.cache_clear()
    ids = (torch.arange(512) // 100).expand(2, -1)
    query, key, value = (torch.randn(512, 2, heads, 16).bfloat16().requires_grad_() for heads in (4, 2, 2))
    output = core(AttentionInputs(query, key, value, AttentionPattern(document_ids=ids)))
    exact = plain_attention(
        AttentionInputs(query.double(), key.double(), value.double(), AttentionPattern(document_ids=ids))
    )
    torch.testing.assert_close(output.double(), exact, rtol=0.02, atol=0.02)
    grads = (torch.autograd.grad(out.double().square().sum(), (query, key, value)) for out in (output, exact))
    for ours, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0.05, atol=0.1)
    (options,) = seen
    assert options["kernel_options"]["BACKEND"] == "FLASH"
    assert (query_block, 128) == options["block_mask"].BLOCK_SIZE


@pytest.mark.parametrize(
    ("backend", "changes", "is_flash"),
    [
        ("fa4", {}, True),
        ("flash", {}, False),
        ("fa4", {"has_sinks": True}, False),
        ("fa4", {"has_dropout": True}, False),
        ("fa4", {"has_softcap": True}, False),
        ("fa4", {"num_queries": 384, "num_keys": 384}, False),
        ("fa4", {"head_dim": 192}, False),
        ("fa4", {"dtype": torch.float32}, False),
    ],
)
def test_flex_attention_uses_version_4_only_for_what_it_supports(
    monkeypatch: pytest.MonkeyPatch,
    registry: dict[str, Callable[[], Registered]],
    backend: str,
    changes: dict[str, Any],
    is_flash: bool,
) -> None:
    for name in ("load_flex_attention", "load_flash_flex_attention"):
        monkeypatch.setattr(attention_backend, name, lambda: plain_attention)
    registry["FA4"] = Registered
    activate_flash_implementation(backend, "cuda", SHAPE)
    documents = AttentionPattern(document_ids=torch.zeros(1, 512, dtype=torch.int64))
    call = replace(AttentionCall(torch.bfloat16, 64, 512, 512, documents), **changes)
    core = select_attention_core(backend, "cuda", 30.0 if call.has_softcap else None)
    assert (core.choose(call).name == "FlexAttention (FlashAttention 4)") is is_flash


LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "params_dtype": "bfloat16",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}


def latent_gradients(**options: Any) -> list[torch.Tensor]:
    model = make_model(single_rank_group(), position_embedding_type="rope", **LATENT, **options)
    load_global_weights(model)
    tokens, labels, positions, _ = make_batch(6, 2, 53)
    model(tokens, positions, labels=labels).float().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_latent_attention_gives_the_kernel_values_of_their_width(
    monkeypatch: pytest.MonkeyPatch, registry: dict[str, Callable[[], Registered]]
) -> None:
    expected = latent_gradients(attention_backend="unfused")
    registry["FA4"] = Registered
    monkeypatch.setattr(
        attention,
        "activate_flash_implementation",
        lambda backend, device, shape: activate_flash_implementation(backend, "cuda", shape),
    )
    monkeypatch.setattr(
        attention,
        "select_attention_core",
        lambda backend, device, *others: select_attention_core(backend, "cuda", *others),
    )
    actual = latent_gradients(attention_backend="fa4")
    assert [
        *[("forward", (2, 6, 4, 192), (2, 6, 4, 128))] * 2,
        *[("backward", (2, 6, 4, 192), (2, 6, 4, 128))] * 2,
    ] == CALLS
    assert len(actual) == len(expected)
    for ours, wanted in zip(actual, expected):
        torch.testing.assert_close(ours, wanted, rtol=0.05, atol=0.02 * float(wanted.abs().max()) + 1e-6)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "attention kernel: torch's flash kernel (FlashAttention 4)"),
        ({"context_parallel_size": 2}, "attention kernel: torch's flash kernel (FlashAttention 4), block by block"),
        (LATENT, "attention kernel: torch's flash kernel (FlashAttention 4)"),
    ],
)
def test_log_names_the_version(
    registry: dict[str, Callable[[], Registered]], options: dict[str, Any], expected: str
) -> None:
    registry["FA4"] = Registered
    shape = {"num_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "attention_dropout": 0.0}
    config = from_fields(
        DecoderConfig, **{**shape, "params_dtype": "bfloat16", "attention_backend": "flash", **options}
    )
    activate_flash_implementation("flash", "cuda", FlashShape(torch.bfloat16, config.head_width, config.value_width))
    assert describe_attention(config, "cuda", 1024, has_documents=False) == expected
