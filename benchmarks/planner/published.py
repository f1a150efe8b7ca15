"""What makers published of their own implementations, as records of measured runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.planner.evaluation import Fields, Measured, MeasuredRun

_LLAMA = {
    "num_query_groups": 8,
    "padded_vocab_size": 128256,
    "swiglu": True,
    "head_dim": 128,
    "max_position_embeddings": 131072,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama3.1-8b": {
        **_LLAMA,
        "num_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "ffn_hidden_size": 14336,
    },
    "llama3.1-70b": {
        **_LLAMA,
        "num_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "ffn_hidden_size": 28672,
    },
    "llama3.1-405b": {
        **_LLAMA,
        "num_layers": 126,
        "hidden_size": 16384,
        "num_attention_heads": 128,
        "ffn_hidden_size": 53248,
    },
    "qwen3-30b-a3b": {
        "num_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_query_groups": 4,
        "head_dim": 128,
        "ffn_hidden_size": 6144,
        "padded_vocab_size": 151936,
        "swiglu": True,
        "max_position_embeddings": 40960,
        "num_experts": 128,
        "moe_router_topk": 8,
        "moe_ffn_hidden_size": 768,
    },
    "gpt-oss-120b": {
        "num_layers": 36,
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "num_query_groups": 8,
        "head_dim": 64,
        "ffn_hidden_size": 2880,
        "padded_vocab_size": 201088,
        "swiglu": True,
        "linear_bias": True,
        "max_position_embeddings": 131072,
        "num_experts": 128,
        "moe_router_topk": 4,
        "moe_ffn_hidden_size": 2880,
    },
}


_NO_LIMIT_MIB = 10**6
"""Rows with experts do not say what they compute again to fit: their time is predicted as if nothing had to."""


def published_records(path: Path) -> Sequence[MeasuredRun]:
    """Return the rows whose time is scored; torchtitan's are of GPUs that are not known."""
    rows = json.loads(path.read_text())["runs"]
    return [_record(row) for row in rows if row["model"] in SHAPES and "techniques" not in row]


def _record(row: dict[str, Any]) -> MeasuredRun:
    shape = {**SHAPES[row["model"]], "name": row["model"], "seq_length": row["seq_length"]}
    tokens = row["global_batch"] * row["seq_length"]
    # 126 layers are two short of stages of equal length: the embedding and the loss stand for one each.
    is_short = shape["num_layers"] % (row["pp"] * (row["vp"] or 1)) != 0
    values = {
        "id": row["id"],
        "model": shape,
        "precision": row["precision"],
        "world_size": row["gpus"],
        "tp": row["tp"],
        "pp": row["pp"],
        "cp": row["cp"],
        "ep": row["ep"],
        "vpp": row["vp"],
        "fsdp": row.get("fsdp") or None,
        "micro_batch": row["micro_batch"],
        "global_batch": row["global_batch"],
        "hardware": {"gpu": row["gpu"], **({"mem_total_mib": _NO_LIMIT_MIB} if "num_experts" in shape else {})},
        "software": {"framework": f"Megatron Bridge {row['release']}"},
        "account_for_embedding_in_pipeline_split": is_short,
        "account_for_loss_in_pipeline_split": is_short,
    }
    milliseconds = 1e3 * tokens / (row["tokens_per_s_per_gpu"] * row["gpus"])
    measured = Measured("ok", None, milliseconds, scores_memory=False, scores_time=True, scores_outcome=True)
    fields = Fields(values, row["id"])
    return MeasuredRun(row["id"], row["model"], fields, measured, shows_allocator=False)
