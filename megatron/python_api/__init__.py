"""Python API: a GPT model in the caller's process, over the same parts as the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.python_api.gpt import GPT
    from megatron.python_api.history import TrainingHistory

__getattr__ = lazy_exports(
    __name__,
    {
        "gpt": "GPT",
        "history": "TrainingHistory",
    },
)
