"""Attention backends: an order of preference per device, from which each call takes the first supported kernel.

The flash-attn packages, version 3 and version 2, are loaded here if they are installed and work. `flash_implementation`
replaces torch's flash kernel by version 3 or 4.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from megatron.core.device import compute_capability
from megatron.core.ops.attention_block import has_flash_kernel
from megatron.core.ops.attention_pattern import AttentionPattern
from megatron.core.ops.attention_sinks import attend_in_blocks, torch_flash_with_sinks
from megatron.core.ops.dot_product_attention import (
    AttentionCore,
    AttentionInputs,
    batched_attention,
    drawing_as,
    fused_attention,
    masked_attention,
    plain_attention,
    torch_flash_attention,
)
from megatron.core.ops.flash_implementation import active_flash_implementation
from megatron.core.ops.flex_attention import (
    BLOCK_SIZE,
    BlockMaskCache,
    attend_by_blocks,
    load_flash_flex_attention,
    load_flex_attention,
)
from megatron.core.ops.transformer_engine import TransformerEngine, transformer_engine_for

_BROKEN = (ImportError, OSError, AttributeError, RuntimeError)


class FlashAttention(Protocol):
    """Attention by a flash-attn package, in float16 or bfloat16 on CUDA."""

    def __call__(self, inputs: AttentionInputs, softcap: float | None) -> torch.Tensor:
        """Return the attention output, with scores soft-capped; queries are the last positions of the keys."""


@functools.cache
def load_flash_attention(*, is_deterministic: bool = False) -> FlashAttention | None:
    """Return attention by flash-attn 2, or None if the package is unavailable.

    ``is_deterministic`` requests bitwise reproducible gradients: by default the backward pass accumulates the query
    gradient in a nondeterministic order. Versions before 2.4.1 do not support this, and None is returned. An installed
    package that cannot be imported (a broken shared object, a missing dependency) causes one warning, independent of
    the number of layers.
    """
    return _load_package("flash_attn", "flash-attn", takes_dropout=True, is_deterministic=is_deterministic)


@functools.cache
def load_flash_attention_3() -> FlashAttention | None:
    """Return attention by flash-attn 3, which has no dropout, or None if the package is unavailable.

    Its backward pass is not reproducible, even in deterministic mode (Dao-AILab/flash-attention #2244). A broken
    package causes one warning.
    """
    return _load_package("flash_attn_interface", "flash-attn 3", takes_dropout=False, is_deterministic=False)


def _load_package(
    module_name: str, package: str, *, takes_dropout: bool, is_deterministic: bool
) -> FlashAttention | None:
    try:
        module: ModuleType = importlib.import_module(module_name)
        flash_attn_func: Callable[..., Any] = module.flash_attn_func
    except _BROKEN as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == module_name
        if not is_absent:
            warnings.warn(
                f"{package} is installed but cannot be used, so torch's attention is used: {error}", stacklevel=3
            )
        return None
    if is_deterministic and "deterministic" not in inspect.signature(flash_attn_func).parameters:
        return None

    def flash_attention(inputs: AttentionInputs, softcap: float | None) -> torch.Tensor:
        assert inputs.sinks is None, "the packages have no sinks"
        is_causal, window = inputs.pattern.is_causal, inputs.pattern.window
        options: dict[str, Any] = {"causal": is_causal}
        if takes_dropout:
            options["dropout_p"] = inputs.dropout_probability
        if is_deterministic:
            options["deterministic"] = True
        if window is not None:
            options["window_size"] = (window - 1, 0 if is_causal else -1)
        if softcap is not None:
            options["softcap"] = softcap
        with drawing_as(inputs.dropout, inputs.query.device):
            context = flash_attn_func(*(tensor.transpose(0, 1) for tensor in inputs.heads), **options)
        # Early versions of flash-attn 3 also return the log-sum-exp.
        output: torch.Tensor = context[0] if isinstance(context, tuple) else context
        return output.transpose(0, 1)

    return flash_attention


PLAIN_BACKENDS = ("unfused", "local")
"""Values of ``--attention-backend`` that select attention without fused kernels."""
_FLASH_BACKENDS = ("flash", "fa3", "fa4")
"""Values of ``--attention-backend`` with which torch's flash operators may use FlashAttention 3 or 4."""

SDPA = "torch's scaled_dot_product_attention"
STEP_BY_STEP = "unfused, with all scores in memory"
IN_BLOCKS = "torch's flash kernel where it can, block by block"
_HALF = (torch.float16, torch.bfloat16)
_HOPPER = 9
_FIRST_WITH_FLASH = (8, 0)
_BLACKWELL = (10, 0)
_NARROWEST_FLEX_HEAD = 16
_WIDEST_ENGINE_HEAD = 128
_ENGINE_LENGTHS = 128
_MAX_LENGTH_PER_WIDTH = 2


@dataclass(frozen=True)
class AttentionCall:
    """Properties of an attention call that determine which kernels support it.

    ``value_dim`` is the width of values, or None if it is that of queries and keys.
    """

    dtype: torch.dtype
    head_dim: int
    num_queries: int
    num_keys: int
    pattern: AttentionPattern
    has_groups: bool = False
    has_dropout: bool = False
    has_softcap: bool = False
    has_sinks: bool = False
    value_dim: int | None = None

    @property
    def is_half(self) -> bool:
        return self.dtype in _HALF

    @property
    def is_dense(self) -> bool:
        """Return whether causality and window are the only rules, and the queries are the keys' last positions."""
        pattern = self.pattern
        return pattern.document_ids is None and pattern.mask is None and pattern.first_query is None

    @property
    def is_common(self) -> bool:
        """Return whether scaled_dot_product_attention supports the call without a mask."""
        has_own_rule = not self.pattern.is_causal or self.num_queries in (1, self.num_keys)
        return self.pattern.is_plain and has_own_rule and not self.has_softcap


@dataclass(frozen=True)
class AttentionKernel:
    """An attention kernel with its name, a predicate of supported calls, and its implementation.

    Calls with sinks are passed to it only if it ``takes_sinks``. Values that are narrower than queries and keys are
    padded with zeros unless it ``takes_narrow_values``.
    """

    name: str
    can: Callable[[AttentionCall], bool]
    compute: AttentionCore
    takes_sinks: bool = False
    takes_narrow_values: bool = False


@dataclass(frozen=True)
class AttentionKernels:
    """Core attention that uses the first supporting kernel for each call; the last kernel supports every call."""

    kernels: tuple[AttentionKernel, ...]
    has_softcap: bool = False

    def __call__(self, inputs: AttentionInputs) -> torch.Tensor:
        """Compute the attention output like any `AttentionCore`."""
        query = inputs.query
        call = AttentionCall(
            *(query.dtype, query.shape[3], inputs.num_queries, inputs.num_keys, inputs.pattern),
            has_groups=inputs.has_groups,
            has_dropout=inputs.dropout is not None,
            has_softcap=self.has_softcap,
            has_sinks=inputs.sinks is not None,
            value_dim=inputs.value.shape[3],
        )
        kernel = self.choose(call)
        missing = query.shape[3] - inputs.value.shape[3]
        if missing and not kernel.takes_narrow_values:
            context = kernel.compute(replace(inputs, value=F.pad(inputs.value, (0, missing))))[..., :-missing]
        else:
            context = kernel.compute(inputs)
        blind = inputs.pattern.blind
        return context if blind is None else context.masked_fill(blind.T[..., None, None], 0.0)

    def choose(self, call: AttentionCall) -> AttentionKernel:
        """Return the first kernel that supports a call."""
        return next(
            kernel for kernel in self.kernels if (kernel.takes_sinks or not call.has_sinks) and kernel.can(call)
        )


def select_attention_core(
    backend: str, device: torch.device | str, softcap: float | None = None, transformer_impl: str = "local"
) -> AttentionKernels:
    """Return the core attention that ``--attention-backend`` selects on this device.

    With ``auto`` the kernel of ``--transformer-impl`` has the highest priority.
    """
    plain = AttentionKernel(
        STEP_BY_STEP,
        lambda call: True,
        plain_attention if softcap is None else partial(plain_attention, softcap=softcap),
        takes_sinks=True,
    )
    if backend in PLAIN_BACKENDS:
        return AttentionKernels((plain,), softcap is not None)
    device = torch.device(device)
    if device.type != "cuda":
        sdpa = AttentionKernel(SDPA, lambda call: not call.has_softcap, fused_attention)
        first = (_BATCHED,) if backend == "auto" else ()
        return AttentionKernels((*first, sdpa, _IN_BLOCKS, plain), softcap is not None)
    packages = _packages(device, softcap) if backend in ("auto", "flash") else []
    if backend in _FLASH_BACKENDS:
        packages = [*_activated(device), *packages]
    if backend == "auto" and (engine := transformer_engine_for(transformer_impl, device)) is not None:
        packages = [*_kernels_of_engine(engine, device), *packages]
    of_torch = _kernels_of_torch(device, softcap)
    if backend == "fa4":
        of_torch = [*_flash_flex(device), *of_torch]
    return AttentionKernels((*packages, *of_torch, _IN_BLOCKS, plain), softcap is not None)


def _is_short(call: AttentionCall) -> bool:
    """Return whether the weights of a plain call take at most the memory of queries and keys."""
    has_rule = call.is_common and not (call.has_dropout or call.has_softcap or call.has_groups)
    has_lengths = 1 < call.num_queries == call.num_keys <= _MAX_LENGTH_PER_WIDTH * call.head_dim
    return has_rule and has_lengths and call.dtype in (torch.float32, torch.float64)


_BATCHED = AttentionKernel("batched GEMMs", _is_short, batched_attention, takes_narrow_values=True)
_IN_BLOCKS = AttentionKernel(
    IN_BLOCKS, lambda call: call.has_sinks and not call.has_softcap, attend_in_blocks, takes_sinks=True
)


def _activated(device: torch.device) -> list[AttentionKernel]:
    implementation, capability = active_flash_implementation(), compute_capability(device)
    if implementation is None:
        return []

    def fits(call: AttentionCall) -> bool:
        # Another model of the process may have been built with another backend since.
        is_active = active_flash_implementation() is implementation
        has_rule = call.is_half and call.is_dense and not call.has_dropout and not call.has_softcap
        value_dim = call.head_dim if call.value_dim is None else call.value_dim
        return is_active and has_rule and implementation.takes_widths(call.head_dim, value_dim, capability)

    return [AttentionKernel(implementation.kernel, fits, torch_flash_attention, takes_narrow_values=True)]


def _flash_flex(device: torch.device) -> list[AttentionKernel]:
    """Return FlexAttention on FlashAttention 4's kernels, for packed documents."""
    implementation, capability = active_flash_implementation(), compute_capability(device)
    flex = None if implementation is None or implementation.name != "FA4" else load_flash_flex_attention()
    if implementation is None or flex is None:
        return []
    # A thread block on Blackwell computes two blocks of 128 queries.
    query_block_size = 2 * BLOCK_SIZE if capability is None or capability >= _BLACKWELL else BLOCK_SIZE

    def fits(call: AttentionCall) -> bool:
        # The kernel has no gradient of the log-sum-exp, which sinks need, and none that is deterministic.
        has_kernel = call.is_half and implementation.takes_widths(call.head_dim, call.head_dim, capability)
        is_active = active_flash_implementation() is implementation
        has_rule = call.pattern.document_ids is not None and not call.has_softcap
        is_reproducible = not torch.are_deterministic_algorithms_enabled()
        is_whole = call.num_queries % query_block_size == 0
        return is_active and has_kernel and has_rule and is_reproducible and is_whole and _fits_flex(call)

    compute = partial(attend_by_blocks, flex, BlockMaskCache(BLOCK_SIZE, query_block_size), softcap=None)
    return [AttentionKernel(f"FlexAttention ({implementation.title})", fits, compute)]


def has_flash_package(device: torch.device | str) -> bool:
    return bool(_packages(torch.device(device), None))


def describe_missing_flash(
    attention_backend: str, params_dtype: str, device: torch.device | str, *, has_sinks: bool = False
) -> str | None:
    """Return one line with the reason why FlashAttention, which was requested, is not used on this device, or None."""
    if attention_backend != "flash":
        return None
    if torch.device(device).type != "cuda":
        reason = "it needs CUDA"
    elif params_dtype not in ("float16", "bfloat16"):
        reason = "it needs --bf16 or --fp16"
    elif has_sinks:
        reason = "it does not support attention sinks"
    elif active_flash_implementation() is not None or has_flash_package(device):
        return None
    elif torch.are_deterministic_algorithms_enabled():
        reason = "--deterministic-mode needs flash-attn 2.4.1 or newer, of version 2"
    else:
        reason = "the package cannot be imported"
    return f"flash-attn is not used, because {reason}; torch's attention is used instead"


def _kernels_of_engine(engine: TransformerEngine, device: torch.device) -> list[AttentionKernel]:
    capability = compute_capability(device) or _FIRST_WITH_FLASH
    # On Blackwell cuDNN 9.18 is the first version with deterministic kernels, and only without dropout.
    has_no_kernel = torch.are_deterministic_algorithms_enabled() and capability >= _BLACKWELL
    if has_no_kernel or capability < _FIRST_WITH_FLASH:
        return []

    return [AttentionKernel("transformer-engine", _fits_engine, engine.attend)]


def _fits_engine(call: AttentionCall) -> bool:
    """Return whether cuDNN supports the call; otherwise transformer-engine might materialize all scores.

    cuDNN builds a plan for each new length, so it is not used for prompts of arbitrary length.
    """
    has_shape = call.num_queries == call.num_keys and call.num_queries % _ENGINE_LENGTHS == 0
    has_width = call.head_dim % 8 == 0 and call.head_dim <= _WIDEST_ENGINE_HEAD
    has_window = call.pattern.window is not None
    has_rule = call.is_dense and not (has_window and (call.has_dropout or not call.pattern.is_causal))
    return call.is_half and has_shape and has_width and has_rule and not call.has_softcap


def _packages(device: torch.device, softcap: float | None) -> list[AttentionKernel]:
    def fits(call: AttentionCall) -> bool:
        # For packed documents these packages need the number of documents, which only the device knows.
        return call.is_half and call.is_dense and call.head_dim <= 256

    capability = compute_capability(device)
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    is_hopper = capability is None or capability[0] == _HOPPER
    kernels = []
    if is_hopper and not is_deterministic and (version_3 := load_flash_attention_3()) is not None:
        can = _without_dropout(fits)
        kernels.append(AttentionKernel("flash-attn 3", can, partial(version_3, softcap=softcap)))
    is_ampere = capability is None or capability >= _FIRST_WITH_FLASH
    if is_ampere and (version_2 := load_flash_attention(is_deterministic=is_deterministic)) is not None:
        can = fits if softcap is None else _without_dropout(fits)
        kernels.append(AttentionKernel("flash-attn 2", can, partial(version_2, softcap=softcap)))
    return kernels


def _kernels_of_torch(device: torch.device, softcap: float | None) -> list[AttentionKernel]:
    capability = compute_capability(device)

    def fits_flash(call: AttentionCall) -> bool:
        has_no_dropout = active_flash_implementation() is None or not call.has_dropout
        return call.is_half and has_no_dropout and has_flash_kernel(capability, call.head_dim)

    def fits_dense(call: AttentionCall) -> bool:
        return fits_flash(call) and call.is_dense and not call.has_softcap

    kernels = [
        # With GQA and without a flash kernel it would materialize all scores.
        AttentionKernel(
            SDPA, lambda call: call.is_common and (not call.has_groups or fits_flash(call)), fused_attention
        ),
        AttentionKernel(
            "torch's flash kernel",
            fits_dense,
            torch_flash_attention,
        ),
        AttentionKernel(
            "torch's flash kernel with sinks",
            lambda call: call.has_sinks and fits_dense(call),
            torch_flash_with_sinks,
            takes_sinks=True,
        ),
    ]
    flex = load_flex_attention()
    if flex is not None:
        compute = partial(attend_by_blocks, flex, BlockMaskCache(), softcap=softcap)
        kernels.append(AttentionKernel("FlexAttention", _fits_flex, compute, takes_sinks=True))
    kernels.append(AttentionKernel(f"{SDPA} with a mask", lambda call: not call.has_softcap, masked_attention))
    return kernels


def _fits_flex(call: AttentionCall) -> bool:
    """Return whether FlexAttention supports the call, excluding prompts, as it is compiled per length."""
    is_whole = call.num_queries % BLOCK_SIZE == 0 and call.num_keys % BLOCK_SIZE == 0
    has_format = call.is_half or call.dtype == torch.float32
    has_rule = not call.is_dense or call.pattern.window is not None or call.has_softcap or call.has_sinks
    is_able = call.pattern.mask is None and not call.has_dropout and call.head_dim >= _NARROWEST_FLEX_HEAD
    return is_whole and has_format and has_rule and is_able


def _without_dropout(can: Callable[[AttentionCall], bool]) -> Callable[[AttentionCall], bool]:
    return lambda call: can(call) and not call.has_dropout
