"""Run a Hugging Face model folder in the transformers package."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron.core.errors import InputError


@torch.no_grad()
def transformers_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits that the transformers package computes in float32; nothing is downloaded, no code is loaded.

    Shapes: ``tokens: [b, s] -> [b, s, v]`` float32.

    Raises:
        InputError: the package is not installed.
    """
    try:
        from transformers import AutoModelForCausalLM
    except (ImportError, OSError) as error:
        raise InputError(
            f"--test-logits needs the transformers package ({error}); install it, or leave the flag out"
        ) from error
    model = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, dtype=torch.float32
    )
    model.train(False)
    logits: torch.Tensor = model(tokens, use_cache=False).logits
    return logits
