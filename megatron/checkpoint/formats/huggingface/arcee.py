"""Arcee: Llama's layers with an MLP without a gate."""

from __future__ import annotations

from megatron.checkpoint.formats.huggingface.llama import LlamaFamily


class ArceeFamily(LlamaFamily):
    """Arcee (``ArceeForCausalLM``), with squared ReLU."""

    model_type = "arcee"
    architecture = "ArceeForCausalLM"
    default_positions = 4096
    default_epsilon = 1e-5
    activation = ("hidden_act", "relu2", "squared_relu")
    mlp_names = ("up_proj", "down_proj")
