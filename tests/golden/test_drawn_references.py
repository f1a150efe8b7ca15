"""Models drawn by chance against megatron-core itself: experts, latent attention, further tokens, dense ones.

``MEGATRON_CORE_PYTHON`` names an interpreter that has megatron-core 0.16.1 and torch.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.golden.test_moe_golden import TOLERANCE, check_model, train_ten_steps

SCRIPT = Path(__file__).with_name("make_references.py")
PYTHON = os.environ.get("MEGATRON_CORE_PYTHON")
SEEDS = range(7, 23)
MOST_ROUNDING = 5e-5
"""How far float32 may be from float64 after ten steps, relatively."""
AUXILIARY = ("aux_loss", "seq_aux_loss", "global_aux_loss")


def draw_attention(draw: random.Random) -> dict[str, Any]:
    if draw.random() < 0.5:
        return {"num_query_groups": draw.choice([1, 2, 4]), "qk_layernorm": draw.random() < 0.3}
    widths = {"kv_lora_rank": 20, "qk_head_dim": 12, "qk_pos_emb_head_dim": 8, "v_head_dim": draw.choice([10, 24])}
    shape = widths | {"multi_latent_attention": True, "rotary_base": 10000, "qk_layernorm": draw.random() < 0.7}
    shape |= {"q_lora_rank": 24} if draw.random() < 0.5 else {}
    if draw.random() < 0.5:
        return shape | {"rope_type": "rope"}
    stretch = {"rotary_scaling_factor": draw.choice([4.0, 40.0]), "original_max_position_embeddings": 16}
    return shape | stretch | {"rope_type": "yarn", "beta_fast": 16, "mscale": 0.707, "mscale_all_dim": 1.0}


def draw_experts(draw: random.Random, has_biases: bool) -> dict[str, Any]:
    number = draw.choice([4, 8, 16])
    topk = min(draw.choice([1, 2, 3, 4, 8]), number)
    kinds = draw.sample(AUXILIARY, draw.randint(1, 3))
    shape: dict[str, Any] = {
        "num_moe_experts": number,
        "moe_ffn_hidden_size": draw.choice([24, 40]),
        "moe_router_topk": topk,
        "moe_token_dispatcher_type": "alltoall",
        "moe_layer_freq": draw.choice([1, 2, [0, 1], [1, 0]]),
        "moe_router_score_function": draw.choice(["softmax", "sigmoid"]),
        "moe_router_load_balancing_type": kinds,
        "moe_aux_loss_coeff": [draw.choice([0.1, 0.001]) for _ in kinds],
        "moe_z_loss_coeff": draw.choice([None, 0.01]),
        "moe_router_topk_scaling_factor": draw.choice([None, 2.5]),
    }
    is_softmax = shape["moe_router_score_function"] == "softmax"
    if is_softmax and (topk == 1 or draw.random() < 0.5):
        shape["moe_router_pre_softmax"] = True
    if 1 < topk <= number // 2 and draw.random() < 0.5:
        shape |= {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
    if not is_softmax and draw.random() < 0.5:
        shape |= {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.01}
    elif draw.random() < 0.3:
        shape |= {"moe_expert_capacity_factor": draw.choice([0.5, 1.0, 4.0])}
        shape["moe_pad_expert_input_to_capacity"] = draw.random() < 0.5
    if not has_biases and draw.random() < 0.6:
        shape |= {"moe_shared_expert_intermediate_size": 56, "moe_shared_expert_gate": draw.random() < 0.5}
    return {name: value for name, value in shape.items() if value is not None}


def draw_case(seed: int) -> dict[str, Any]:
    """Return a model without what rounding decides: gradients that would be zero, and limits near what is limited."""
    draw = random.Random(seed)
    activation = draw.choice(["silu", "quick_gelu", "gelu", "squared_relu"])
    has_biases = draw.random() < 0.3
    shape: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": draw.choice([48, 64]),
        "num_attention_heads": 4,
        "ffn_hidden_size": draw.choice([48, 80]),
        "normalization": draw.choice(["RMSNorm", "LayerNorm"]),
        "layernorm_epsilon": draw.choice([1e-5, 1e-6]),
        "activation_func": activation,
        "gated_linear_unit": activation in ("silu", "quick_gelu"),
        "add_bias_linear": has_biases,
        **draw_attention(draw),
    }
    if activation == "quick_gelu":
        shape |= {"glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0}
    if draw.random() < 0.7:
        shape |= draw_experts(draw, has_biases)
    elif not shape.get("multi_latent_attention"):
        shape |= {
            "window_size": [4, 0],
            "layernorm_zero_centered_gamma": True,
            "rotary_interleaved": draw.random() < 0.5,
        }
    if draw.random() < 0.4:
        shape |= {"mtp_num_layers": draw.choice([1, 2]), "mtp_loss_scaling_factor": 0.3}
    model = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": draw.random() < 0.5}
    return {"name": f"drawn-{seed}", "seed": seed, "transformer_config": shape, "gpt_model": model}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the numbers of every drawn model."""
    folder = tmp_path_factory.mktemp("drawn")
    cases = folder / "cases.json"
    cases.write_text(json.dumps([draw_case(seed) for seed in SEEDS]))
    assert PYTHON is not None
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [PYTHON, str(SCRIPT), str(cases), str(folder)], capture_output=True, text=True, cwd=folder, env=environment
    )
    assert run.returncode == 0, run.stderr
    return folder


@pytest.mark.long
@pytest.mark.skipif(PYTHON is None, reason="MEGATRON_CORE_PYTHON names no interpreter that has megatron-core")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_model_computes_what_megatron_core_does(drawn: Path, seed: int) -> None:
    path = drawn / f"drawn-{seed}.npz"
    check_model(path)
    check_ten_steps_beside_float64(path)


def check_ten_steps_beside_float64(path: Path) -> None:
    """Hold losses and gradient norms against the reference, and it against the same steps in float64.

    Adam divides a gradient by its own size: where one is as small as its epsilon, rounding moves the weight by a part
    of the rate (in drawn model 7 that of one element of the word embedding, in the second step). Where the reference
    is further from float64 than the tolerance, ours may be as far from the reference.
    """
    reference = np.load(path)
    found, exact = train_ten_steps(path), train_ten_steps(path, "float64")
    for name, values, in_float64 in zip(("train/loss", "train/grad_norm"), found, exact, strict=True):
        given = reference[name]
        rounding = np.abs(given - in_float64)
        assert (rounding <= MOST_ROUNDING * np.abs(given)).all(), (name, rounding / np.abs(given))
        off = np.abs(given - values)
        assert (off <= np.maximum(TOLERANCE * np.abs(given), rounding)).all(), (name, off / np.abs(given))
