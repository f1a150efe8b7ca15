"""How many floating-point operations a model's training step needs, counted from its matrix products.

Narayanan et al. 2021, https://arxiv.org/abs/2104.04473.
"""

from __future__ import annotations

from megatron.core.models.gpt.gpt_config import GPTConfig


def forward_flops_per_sequence(config: GPTConfig, seq_length: int) -> float:
    """Return the operations of one forward pass over one sequence; a multiply-add counts as two.

    Causal attention counts the half of the score matrix that is used. Norms, activations and the embedding lookup are
    left out: together they are far below one per cent.
    """
    hidden, queries, keys = config.hidden_size, config.query_projection_size, config.kv_projection_size
    projections = hidden * (queries + 2 * keys) + queries * hidden
    core = 2 * queries * seq_length / 2
    mlp = hidden * config.ffn_hidden_size * (3 if config.swiglu else 2)
    per_token = config.num_layers * (projections + core + mlp) + hidden * config.padded_vocab_size
    return 2.0 * seq_length * per_token


def training_flops_per_sequence(config: GPTConfig, seq_length: int) -> float:
    """Return the operations of forward and backward over one sequence; recomputed activations do not count."""
    return 3.0 * forward_flops_per_sequence(config, seq_length)
