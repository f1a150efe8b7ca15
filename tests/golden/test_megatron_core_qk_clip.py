"""QK-clip scales the rows of query and key weights as megatron-core does.

``MEGATRON_CORE_PYTHON`` names an interpreter that has megatron-core 0.16.1 and torch.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.transformer.qk_clip import QueryKeyClip
from tests.unit.core.transformer.test_qk_clip import HEADS, WIDTH, WORLD, make

SCRIPT = Path(__file__).with_name("qk_clip_of_megatron_core.py")
PYTHON = os.environ.get("MEGATRON_CORE_PYTHON")
LOGITS = {"grouped": [8.0, 30.0, 2.0, 1.0], "latent": [8.0, 30.0, 2.0, 7.0]}
SIZES: dict[str, dict[str, int]] = {
    "grouped": {
        "num_query_groups_per_partition": 2,
        "query_projection_size": HEADS * WIDTH,
        "kv_projection_size": 2 * WIDTH,
    },
    "latent": {"qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 5},
}
WEIGHTS = {"grouped": ("linear_qkv",), "latent": ("linear_q_up_proj", "linear_kv_up_proj")}


@pytest.mark.skipif(PYTHON is None, reason="MEGATRON_CORE_PYTHON names no interpreter that has megatron-core")
@torch.no_grad()
def test_rows_are_scaled_as_by_megatron_core(tmp_path: Path) -> None:
    assert PYTHON is not None
    given: dict[str, Any] = {"config": {"qk_clip_threshold": 5.0, "qk_clip_alpha": 0.3}}
    ours = {}
    for kind, logits in LOGITS.items():
        layer, config, _ = make(kind, **given["config"])
        weights = {name: layer.get_submodule(name).get_parameter("weight") for name in WEIGHTS[kind]}
        stored = {name: weight.tolist() for name, weight in weights.items()}
        given[kind] = {"logits": logits, "sizes": SIZES[kind], "weights": stored}
        clip = QueryKeyClip([layer], config, WORLD, "cpu")
        clip._largest[0] = torch.tensor(logits).view(config.num_query_groups, -1).amax(dim=1)
        for weight, factors in clip.row_factors():
            weight *= factors[:, None]
        ours[kind] = weights
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [PYTHON, str(SCRIPT), json.dumps(given)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    theirs = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{")))
    for kind, weights in ours.items():
        for name, weight in weights.items():
            expected = torch.tensor(theirs[kind][name], dtype=torch.float64)
            torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=0)
            assert not torch.equal(weight, torch.tensor(given[kind]["weights"][name], dtype=torch.float64))
