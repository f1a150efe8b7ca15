"""Train with a stand-in for a package that is built for CUDA: flash_attn, flash_attn_interface or transformer_engine.

The package's name is in front of the flags. The stand-ins have the packages' signatures and compute with torch.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

import pretrain_gpt
from megatron.training.exit_reason import run_program
from tests.emulated_cuda.environment import REPOSITORY

ENGINE = REPOSITORY / "tests/unit/core/ops/transformer_engine_stand_in.py"


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, softcap: float) -> torch.Tensor:
    """Return the attention output of queries, keys and values.

    Shapes: ``q: [b, s, n, d]``, ``k, v: [b, s, g, d]`` ``-> [b, s, n, d]``.
    """
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / math.sqrt(q.shape[-1])
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return (scores.softmax(-1) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)).transpose(1, 2)


def flash_attn_2(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    causal: bool = False,
    softcap: float = 0.0,
    deterministic: bool = False,
) -> torch.Tensor:
    """Return attention by the signature of flash-attn 2, without dropout."""
    assert dropout_p == 0.0
    return attend(q, k, v, causal, softcap).to(q.dtype)


def flash_attn_3(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softcap: float = 0.0
) -> torch.Tensor:
    """Return attention by the signature of flash-attn 3."""
    return attend(q, k, v, causal, softcap).to(q.dtype)


def install(name: str) -> None:
    """Let imports find the stand-in of a package.

    Raises:
        KeyError: there is no stand-in of this name.
    """
    package = ModuleType(name)
    package.__spec__ = ModuleSpec(name, None)
    sys.modules[name] = package
    if name == "transformer_engine":
        spec = importlib.util.spec_from_file_location(f"{name}.pytorch", ENGINE)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        functions = {"flash_attn": flash_attn_2, "flash_attn_interface": flash_attn_3}
        package.flash_attn_func = functions[name]  # type: ignore[attr-defined]


if __name__ == "__main__":
    install(sys.argv[1])
    run_program(lambda: pretrain_gpt.main(sys.argv[2:]))
