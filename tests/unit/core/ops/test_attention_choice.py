"""Which kernel computes what on CUDA; memory that is linear in the sequence, and no wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.config_base import from_fields
from megatron.core.context_parallel.partition import chunks_of
from megatron.core.ops import attention_backend
from megatron.core.ops.attention_backend import SDPA, STEP_BY_STEP, AttentionCall, select_attention_core
from megatron.core.ops.attention_pattern import CAUSAL, AttentionPattern
from megatron.core.ops.dot_product_attention import AttentionInputs
from megatron.core.transformer.attention import describe_attention
from megatron.core.transformer.decoder_config import DecoderConfig
from megatron.core.transformer.hybrid_config import HybridConfig

LENGTH, BATCH, HEADS, GROUPS, WIDTH = 1024, 2, 4, 2, 32
DOCUMENTS = AttentionPattern(document_ids=torch.zeros(BATCH, LENGTH))
WINDOW, BOTH = AttentionPattern(window=100), AttentionPattern(is_causal=False)
MASK = AttentionPattern(mask=torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool))
CALL = AttentionCall(torch.bfloat16, WIDTH, LENGTH, LENGTH, CAUSAL, has_groups=True)
FLASH, FLEX, MASKED = "torch's flash kernel", "FlexAttention", f"{SDPA} with a mask"


def flex_stand_in(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    assert options["enable_gqa"] == (key.shape[1] != query.shape[1])
    return torch.empty_like(query)


@pytest.fixture(autouse=True)
def with_flex_and_without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_backend, "load_flex_attention", lambda: flex_stand_in)
    monkeypatch.setattr(attention_backend, "load_flash_attention", lambda *, is_deterministic: None)
    monkeypatch.setattr(attention_backend, "load_flash_attention_3", lambda: None)


CHOICES = [
    (CALL, SDPA),
    (replace(CALL, has_dropout=True), SDPA),
    (replace(CALL, num_queries=1), SDPA),
    (replace(CALL, pattern=BOTH, num_queries=128), SDPA),
    # The end of a prompt, and a context-parallel rank's chunk.
    (replace(CALL, num_queries=128), FLASH),
    (replace(CALL, pattern=WINDOW, has_dropout=True), FLASH),
    (replace(CALL, pattern=DOCUMENTS), FLEX),
    (replace(CALL, pattern=DOCUMENTS.within(100)), FLEX),
    (replace(CALL, has_softcap=True), FLEX),
    (replace(CALL, pattern=WINDOW, has_softcap=True), FLEX),
    (replace(CALL, pattern=BOTH.within(100).part(range(256), range(1024)), num_queries=256), FLEX),
    (replace(CALL, pattern=DOCUMENTS, has_dropout=True), MASKED),
    (replace(CALL, pattern=DOCUMENTS, num_queries=100, num_keys=100), MASKED),
    (replace(CALL, pattern=DOCUMENTS, num_queries=128, num_keys=200), MASKED),
    (replace(CALL, pattern=DOCUMENTS, num_queries=100, num_keys=256), MASKED),
    (replace(CALL, pattern=MASK), MASKED),
    (replace(CALL, has_softcap=True, num_queries=1), STEP_BY_STEP),
    (replace(CALL, has_softcap=True, has_dropout=True), STEP_BY_STEP),
    # Without a kernel for groups, key-value heads are repeated rather than all scores kept.
    (replace(CALL, dtype=torch.float32), MASKED),
    (replace(CALL, dtype=torch.float32, has_groups=False), SDPA),
    (replace(CALL, dtype=torch.float32, pattern=DOCUMENTS), FLEX),
    (replace(CALL, dtype=torch.float64, pattern=DOCUMENTS), MASKED),
    (replace(CALL, head_dim=20, pattern=WINDOW), FLEX),
]


@pytest.mark.parametrize(("call", "expected"), CHOICES)
def test_kernels_on_cuda(call: AttentionCall, expected: str) -> None:
    softcap = 30.0 if call.has_softcap else None
    assert select_attention_core("auto", "cuda", softcap).choose(call).name == expected
    assert select_attention_core("unfused", "cuda", softcap).choose(call).name == STEP_BY_STEP
    on_cpu = STEP_BY_STEP if call.has_softcap else SDPA
    assert select_attention_core("auto", "cpu", softcap).choose(call).name == on_cpu


def test_without_triton_a_mask_takes_the_place_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_backend, "load_flex_attention", lambda: None)
    assert select_attention_core("auto", "cuda").choose(replace(CALL, pattern=DOCUMENTS)).name == MASKED


@pytest.mark.parametrize(
    ("capability", "head_dim", "expected"),
    [((9, 0), 256, SDPA), ((8, 6), 192, SDPA), ((8, 6), 256, MASKED), ((7, 5), 64, MASKED)],
)
def test_older_devices_have_no_flash_kernel_for_groups(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], head_dim: int, expected: str
) -> None:
    monkeypatch.setattr(attention_backend, "compute_capability", lambda device: capability)
    assert select_attention_core("auto", "cuda").choose(replace(CALL, head_dim=head_dim)).name == expected


class _Largest(TorchDispatchMode):
    """Record the most elements that a result had."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


@pytest.fixture
def shapes_alone() -> Iterator[None]:
    """Compute with shapes alone; reading a value, for which the host would wait on CUDA, raises."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        yield


@pytest.mark.usefixtures("shapes_alone")
@pytest.mark.parametrize("rank", [None, 0, 1])
@pytest.mark.parametrize("name", ["causal", "documents", "documents in both directions", "window"])
def test_memory_is_linear_in_the_sequence_and_the_host_does_not_wait(name: str, rank: int | None) -> None:
    """``rank`` is one of two whose keys and values were gathered, or None where a rank has the whole sequence."""
    length = 4096
    query, key = (torch.empty(length, BATCH, n, WIDTH, dtype=torch.bfloat16) for n in (HEADS, GROUPS))
    ids = torch.empty(BATCH, length, dtype=torch.int64)
    whole = {
        "causal": CAUSAL,
        "documents": AttentionPattern(document_ids=ids),
        "documents in both directions": AttentionPattern(is_causal=False, document_ids=ids),
        "window": WINDOW,
    }[name]
    core = select_attention_core("auto", "cuda")
    parts = [(range(length), range(length))]
    if rank is not None:
        chunk = length // 4
        ends = [(index + 1) * chunk for index in chunks_of(rank, 2)]
        parts = [(range(end - chunk, end), range(end if whole.is_causal else length)) for end in ends]
    with _Largest() as largest:
        for queries, keys in parts:
            output = core(
                AttentionInputs(*(query[: len(queries)], key[: len(keys)], key[: len(keys)], whole.part(queries, keys)))
            )
            assert output.shape == (len(queries), BATCH, HEADS, WIDTH)
    assert largest.elements <= query.numel() < length * length


DESCRIPTIONS = [
    ({}, "cpu", False, f"attention kernel: {SDPA}"),
    ({"attention_backend": "unfused"}, "cuda", False, f"attention kernel: {STEP_BY_STEP}"),
    ({"attn_logit_softcapping": 30.0}, "cpu", False, f"attention kernel: {STEP_BY_STEP}"),
    ({}, "cuda", True, "attention kernel: FlexAttention"),
    (
        {"attn_logit_softcapping": 30.0, "window_size": "31,0", "window_attn_skip_freq": "2"},
        "cuda",
        False,
        "attention kernel: FlexAttention",
    ),
    (
        {"window_size": "31,0", "window_attn_skip_freq": "3"},
        "cuda",
        False,
        f"attention kernels: {FLASH} (2 layers); {SDPA} (1 layers)",
    ),
    (
        {"context_parallel_size": 2, "cp_comm_type": ("p2p", "all_gather", "a2a")},
        "cuda",
        False,
        f"attention kernels: torch's flash kernel, block by block (1 layers); {FLASH} (1 layers); {SDPA} (1 layers)",
    ),
    # A window as long as the sequence is none.
    ({"window_size": f"{LENGTH - 1},0"}, "cuda", False, f"attention kernel: {SDPA}"),
    ({"window_size": f"{LENGTH - 2},0"}, "cuda", False, f"attention kernel: {FLASH}"),
    (
        {"context_parallel_size": 2},
        "cuda",
        True,
        "attention kernel: step by step, block by block",
    ),
    # Layers of attention and Mamba-2 in parallel have an attention kernel, and Mamba-2 layers have none.
    ({"hybrid": HybridConfig(hybrid_override_pattern="PM-")}, "cuda", False, f"attention kernel: {SDPA}"),
    (
        {"hybrid": HybridConfig(hybrid_override_pattern="M--")},
        "cuda",
        False,
        "attention kernel: none, because no layer has attention",
    ),
]


@pytest.mark.parametrize(("options", "device", "has_documents", "expected"), DESCRIPTIONS)
def test_one_line_names_the_kernels(options: dict[str, Any], device: str, has_documents: bool, expected: str) -> None:
    config = from_fields(
        DecoderConfig,
        **{
            "num_layers": 3,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "attention_dropout": 0.0,
            "params_dtype": "bfloat16",
            **options,
        },
    )
    assert describe_attention(config, device, LENGTH, has_documents=has_documents) == expected
