"""FlashAttention 3 and 4 instead of torch's own flash kernel, which is FlashAttention-2.

``torch.nn.attention.activate_flash_attention_impl`` replaces torch's flash operators for the whole process, so
attention and the blocks of ring attention use the same kernel. Shah et al. 2024, https://arxiv.org/abs/2407.08608.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch.nn import attention as torch_attention

from megatron.core.device import compute_capability
from megatron.core.errors import ConfigurationError

_HALF = (torch.float16, torch.bfloat16)
_BLACKWELL = (10, 0)


@dataclass(frozen=True)
class FlashShape:
    """Properties of a model's attention that determine which implementations support it.

    ``head_dim`` is the width of queries and keys, and ``value_dim`` that of values.
    """

    dtype: torch.dtype
    head_dim: int
    value_dim: int
    has_dropout: bool = False


@dataclass(frozen=True)
class FlashImplementation:
    """An implementation under torch's name for it.

    ``package`` provides it, and ``majors`` are the major compute capabilities that torch accepts for it.
    """

    name: str
    title: str
    package: str
    majors: tuple[int, ...]

    @property
    def kernel(self) -> str:
        """Return the name of torch's flash kernel for log lines."""
        return f"torch's flash kernel ({self.title})"

    def takes_widths(self, head_dim: int, value_dim: int, capability: tuple[int, int] | None) -> bool:
        """Return whether there are forward and backward kernels for these widths on a GPU of this compute capability.

        An unknown compute capability counts as one that supports them.
        """
        if head_dim % 8 != 0 or value_dim % 8 != 0:
            return False
        if self.name == "FA3":
            has_wide_keys = 128 < head_dim <= 192 and 96 < value_dim <= 128
            return head_dim <= 256 and (value_dim == head_dim or has_wide_keys)
        has_latent_widths = (head_dim, value_dim) == (192, 128) and (capability is None or capability >= _BLACKWELL)
        return (head_dim == value_dim and head_dim <= 128) or has_latent_widths

    def why_not(self, shape: FlashShape, device: torch.device) -> str | None:
        """Return why attention of this shape on this device cannot use the implementation, or None."""
        if device.type != "cuda":
            return "needs CUDA"
        if shape.dtype not in _HALF:
            return "needs --bf16 or --fp16"
        if shape.has_dropout:
            return "has no attention dropout"
        capability = compute_capability(device)
        if capability is not None and capability[0] not in self.majors:
            allowed = " or ".join(f"{number}.x" for number in self.majors)
            return f"needs a GPU of compute capability {allowed}; this GPU has {capability[0]}.{capability[1]}"
        is_reproducible = self.name == "FA4" and (capability is None or capability >= _BLACKWELL)
        if torch.are_deterministic_algorithms_enabled() and not is_reproducible:
            return "has no deterministic backward pass on this GPU"
        if not self.takes_widths(shape.head_dim, shape.value_dim, capability):
            return f"has no kernel for heads with keys of width {shape.head_dim} and values of width {shape.value_dim}"
        if not hasattr(torch_attention, "activate_flash_attention_impl"):
            missing = "torch.nn.attention.activate_flash_attention_impl"
            return f"needs a torch that has {missing}; this is torch {torch.__version__}"
        if self.name not in torch_attention.list_flash_attention_impls():
            return f"is not registered in torch {torch.__version__}"
        return None


_IMPLEMENTATIONS = {
    "fa3": FlashImplementation("FA3", "FlashAttention 3", "flash-attn 3 (flash_attn_interface)", (9,)),
    "fa4": FlashImplementation("FA4", "FlashAttention 4", "flash-attn-4 (flash_attn.cute)", (9, 10)),
}
_OWN: list[str] = []
"""The name of the implementation that this module activated, if any."""


def active_flash_implementation() -> FlashImplementation | None:
    """Return the implementation that torch's flash operators use, or None for torch's own."""
    current = getattr(torch_attention, "current_flash_attention_impl", lambda: None)()
    return next((known for known in _IMPLEMENTATIONS.values() if known.name == current), None)


def activate_flash_implementation(backend: str, device: torch.device | str, shape: FlashShape) -> None:
    """Let torch's flash operators use the implementation that ``--attention-backend`` selects.

    ``fa3`` and ``fa4`` require it. ``flash`` uses the newest one that is installed and supports the model: version 3 on
    Hopper, else version 4. Any other backend restores torch's own kernel if an earlier call replaced it.

    Raises:
        ConfigurationError: a required implementation cannot be used; the message says why.
    """
    device = torch.device(device)
    if backend in _IMPLEMENTATIONS:
        chosen = _IMPLEMENTATIONS[backend]
        reason = chosen.why_not(shape, device) or _activate(chosen)
        if reason is not None:
            raise ConfigurationError(
                f"--attention-backend {backend}: {chosen.title} {reason}; use --attention-backend flash instead"
            )
        return
    if backend == "flash":
        for candidate in _IMPLEMENTATIONS.values():
            if candidate.why_not(shape, device) is None and _activate(candidate) is None:
                return
    _restore()


def _activate(implementation: FlashImplementation) -> str | None:
    """Activate an implementation unless it is active; return why its package cannot be used, or None."""
    if active_flash_implementation() is implementation:
        return None
    try:
        torch_attention.activate_flash_attention_impl(implementation.name)
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        is_absent = isinstance(error, ModuleNotFoundError) and str(error.name).startswith("flash_attn")
        if not is_absent:
            warnings.warn(f"{implementation.package} is installed but cannot be used: {error}", stacklevel=3)
        return f"needs the package {implementation.package}, which cannot be imported ({error})"
    _OWN[:] = [implementation.name]
    return None


def _restore() -> None:
    active = active_flash_implementation()
    if active is not None and [active.name] == _OWN:
        torch_attention.restore_flash_attention_impl()
        _OWN.clear()
