"""What every contestant of the step benchmark computes: model size, data, hyper-parameters.

Imports nothing but NumPy, so that it runs in the environment of any contestant.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Hold the sizes and hyper-parameters of the measured training.

    ``ffn_hidden_size`` is the width of a feed-forward that a token goes through, 0 for four times the hidden size: an
    expert has a ``router_topk``-th of it. Gated layers have no biases. Rotary positions come with RMSNorm. Only this
    project's layers can be compiled.
    """

    num_layers: int = 6
    hidden_size: int = 384
    num_attention_heads: int = 6
    seq_length: int = 256
    micro_batch_size: int = 8
    vocab_size: int = 50257
    padded_vocab_size: int = 50304
    ffn_hidden_size: int = 0
    is_gated: bool = False
    is_rotary: bool = False
    is_compiled: bool = False
    num_experts: int = 0
    router_topk: int = 2
    dtype: str = "float32"
    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    fused_adam: bool = True
    learning_rate: float = 3.0e-4
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1.0e-8
    weight_decay: float = 0.1
    clip_grad: float = 1.0
    init_method_std: float = 0.02
    seed: int = 1234

    @property
    def active_width(self) -> int:
        """Return the width of all feed-forwards of a layer that a token goes through."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def expert_width(self) -> int:
        """Return the width of one expert."""
        return self.active_width // self.router_topk

    @property
    def tokens_per_step(self) -> int:
        """Return how many tokens one step trains on."""
        return self.micro_batch_size * self.seq_length

    def sample(self, index: int) -> NDArray[np.int64]:
        """Return the tokens of one sample, label of the last position included.

        Token frequencies fall as in text (about 1/rank), so that there is something to learn in a few steps.

        Shapes: ``-> [seq_length + 1]``.
        """
        uniform = np.random.default_rng((self.seed, index)).random(self.seq_length + 1)
        tokens = np.minimum(np.exp(uniform * np.log(self.vocab_size)) - 1, self.vocab_size - 1)
        return np.asarray(tokens, np.int64)


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one option for every field of ``Workload``."""
    for field in dataclasses.fields(Workload):
        flag = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default)
        else:
            parser.add_argument(flag, type=type(field.default), default=field.default)


def workload_of(arguments: argparse.Namespace) -> Workload:
    """Return the workload that parsed options describe."""
    return Workload(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Workload)})


def workload_options(workload: Workload) -> list[str]:
    """Return the command-line options that describe a workload."""
    options = []
    for name, value in dataclasses.asdict(workload).items():
        flag = name.replace("_", "-")
        options += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return options
