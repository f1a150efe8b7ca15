"""A small Llama as torchtitan has it: its names, its folders, and what it computes, with complex rotary positions."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

LAYERS, WIDTH, HEADS, GROUPS, FEED_FORWARD = 3, 48, 6, 2, 88
HEAD_DIM = WIDTH // HEADS
BASE, EPSILON = 700, 3e-4
TOLD: dict[str, Any] = {
    "num_attention_heads": HEADS,
    "rotary_base": BASE,
    "norm_epsilon": EPSILON,
    "max_position_embeddings": 64,
}
"""What the files do not say."""
TOLD_FLAGS = f"--num-attention-heads {HEADS} --rotary-base {BASE} --norm-epsilon {EPSILON} --max-position-embeddings 64"


def make_weights(vocab_size: int = 83, *, is_tied: bool = False) -> dict[str, torch.Tensor]:
    """Return random weights by their names."""
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (vocab_size, WIDTH), "norm.weight": (WIDTH,)}
    if not is_tied:
        shapes["output.weight"] = (vocab_size, WIDTH)
    for layer in range(LAYERS):
        shapes |= {
            f"layers.{layer}.{name}.weight": shape
            for name, shape in {
                "attention.wq": (HEADS * HEAD_DIM, WIDTH),
                "attention.wk": (GROUPS * HEAD_DIM, WIDTH),
                "attention.wv": (GROUPS * HEAD_DIM, WIDTH),
                "attention.wo": (WIDTH, HEADS * HEAD_DIM),
                "feed_forward.w1": (FEED_FORWARD, WIDTH),
                "feed_forward.w2": (WIDTH, FEED_FORWARD),
                "feed_forward.w3": (FEED_FORWARD, WIDTH),
                "attention_norm": (WIDTH,),
                "ffn_norm": (WIDTH,),
            }.items()
        }
    generator = torch.Generator().manual_seed(5)
    noise = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: 1 + 0.2 * values if values.dim() == 1 else 0.25 * values for name, values in noise.items()}


def save_weights(folder: Path, weights: dict[str, torch.Tensor], prefix: str = "") -> Path:
    """Write a folder that holds the model alone."""
    dcp.save({f"{prefix}{name}": values for name, values in weights.items()}, checkpoint_id=folder, no_dist=True)
    return folder


def save_run(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    """Write a folder of a run that goes on: with optimizer, schedule, place in the data, and a buffer of the model."""
    state = {name: {"exp_avg": values * 2, "step": torch.tensor(3.0)} for name, values in weights.items()}
    content: dict[str, Any] = {
        **weights,
        "freqs_cis": torch.ones(64, HEAD_DIM // 2, dtype=torch.complex64),
        "optimizer": {"state": state, "param_groups": {name: {"lr": 1e-3} for name in weights}},
        "lr_scheduler": {"last_epoch": 3},
        "dataloader": {"dp_rank_0": b"anything", "world_size": 1},
        "train_state": {"step": torch.tensor(3), "losses": io.BytesIO(b"more")},
    }
    dcp.save(content, checkpoint_id=folder, no_dist=True)
    return folder


def reference_logits(weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Return the model's logits; a head's channels 2i and 2i + 1 are one complex number, which a position turns.

    Shapes: ``tokens: [b, s] -> [b, s, v]``.
    """
    batch, length = tokens.shape
    frequencies = BASE ** -(torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
    angles = torch.outer(torch.arange(length).double(), frequencies)
    turns = torch.polar(torch.ones_like(angles), angles)[:, None, :]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weights[name].double()

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[name].double().t()

    def rotated(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns).flatten(-2)

    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    x = weights["tok_embeddings.weight"].double()[tokens]
    for layer in range(LAYERS):
        at = f"layers.{layer}"
        y = norm(x, f"{at}.attention_norm.weight")
        query, key, value = (
            linear(y, f"{at}.attention.w{kind}.weight").view(batch, length, -1, HEAD_DIM) for kind in "qkv"
        )
        query, key = rotated(query), rotated(key)
        key, value = (part.repeat_interleave(HEADS // GROUPS, dim=2) for part in (key, value))
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / HEAD_DIM**0.5
        shares = scores.masked_fill(future, float("-inf")).softmax(-1)
        context = torch.einsum("bhqk,bkhd->bqhd", shares, value).flatten(2)
        x = x + linear(context, f"{at}.attention.wo.weight")
        y = norm(x, f"{at}.ffn_norm.weight")
        gate = torch.nn.functional.silu(linear(y, f"{at}.feed_forward.w1.weight"))
        x = x + linear(gate * linear(y, f"{at}.feed_forward.w3.weight"), f"{at}.feed_forward.w2.weight")
    output = "output.weight" if "output.weight" in weights else "tok_embeddings.weight"
    return linear(norm(x, "norm.weight"), output)
