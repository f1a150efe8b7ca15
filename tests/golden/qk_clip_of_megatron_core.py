"""Print what QK-clip of megatron-core makes of the weights of a grouped and of a latent attention, as JSON.

Run under an interpreter that has megatron-core 0.16.1.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention


def clipped(kind: Any, config: dict[str, Any], logits: list[float], weights: dict[str, Any], **sizes: int) -> Any:
    """Return the weights of a layer after its method, which needs no more of it than this."""
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.config = SimpleNamespace(qk_clip=True, q_lora_rank=1, **config)
    layer.core_attention = SimpleNamespace(current_max_attn_logits=torch.tensor(logits, dtype=torch.float64))
    layer.num_attention_heads_per_partition, layer.cache_mla_latents = len(logits), False
    for name, size in sizes.items():
        setattr(layer, name, size)
    for name, values in weights.items():
        setattr(layer, name, SimpleNamespace(weight=torch.tensor(values, dtype=torch.float64)))
    layer.clip_qk()
    return {name: getattr(layer, name).weight.tolist() for name in weights}


def main() -> None:
    given = json.loads(sys.argv[1])
    own = given["grouped"]
    grouped = clipped(SelfAttention, given["config"], own["logits"], own["weights"], **own["sizes"])
    own = given["latent"]
    latent = clipped(MLASelfAttention, given["config"] | own["sizes"], own["logits"], own["weights"])
    print(json.dumps({"grouped": grouped, "latent": latent}))


main()
