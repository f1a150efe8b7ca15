"""A mixture of experts against reference numbers made with NVIDIA's own code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.layer_output import AuxiliaryLoss
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.process_group import single_rank_group
from megatron.core.sharding import ParamSpec, spec_of
from megatron.core.transformer.moe.expert_layer import loads_of
from tests.golden.test_model_golden import model_settings
from tests.golden.test_optimizer_golden import optimizer_config
from tests.golden.test_training_golden import FLAGS as DENSE_FLAGS
from tests.golden.test_training_golden import FOLDER as DENSE_FOLDER
from tests.harness.closeness import assert_gradients_close, assert_tensors_close
from tests.harness.faults import Faults
from tests.harness.forked_training import fork_training
from tests.harness.toy_model import load_global_weights, make_model

FOLDER = Path(__file__).parent / "moe"
TOLERANCE = 1e-5
NAMES = ("mixtral", "mtp", "deepseek", "capacity", "clamped", "further_experts")
LATENT = ("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_", "v_head_dim", "rope_type")
YARN = ("rotary_scaling_factor", "original_max_position_embeddings", "beta_", "mscale")


def moe_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of our configuration that a reference model is of."""
    shape = config["transformer_config"]
    further = {name: value for name, value in shape.items() if name.startswith(("mtp_", *LATENT, *YARN))}
    if "num_moe_experts" not in shape:
        return model_settings(config) | further
    kinds, coefficients = shape["moe_router_load_balancing_type"], shape["moe_aux_loss_coeff"]
    given = {name: value for name, value in shape.items() if name.startswith("moe_") and name != "moe_grouped_gemm"}
    return (
        model_settings(config)
        | further
        | given
        | {
            "num_experts": shape["num_moe_experts"],
            "moe_layer_freq": str(shape.get("moe_layer_freq", 1)),
            "moe_router_load_balancing_type": tuple(kinds) if isinstance(kinds, list) else (kinds,),
            "moe_aux_loss_coeff": tuple(coefficients) if isinstance(kinds, list) else (coefficients,),
        }
    )


def reference_tensor(reference: Any, kind: str, spec: ParamSpec) -> np.ndarray:
    """Return a whole tensor of a reference; there each expert has tensors of its own."""
    if spec.name.endswith(".expert_bias"):
        return np.zeros(spec.global_shape, dtype=np.float32)
    if ".experts." not in spec.name:
        return reference[f"{kind}/{spec.name}"]
    before, after = spec.name.split(".experts.")
    return np.stack(
        [reference[f"{kind}/{before}.experts.local_experts.{i}.{after}"] for i in range(spec.global_shape[0])]
    )


def load_reference(path: Path, dtype: str = "float32") -> tuple[Any, GPTModel]:
    """Return reference numbers, and our model with their weights."""
    reference = np.load(path)
    settings = moe_settings(json.loads(str(reference["config"])))
    model = make_model(single_rank_group(), **settings, params_dtype=dtype)
    load_global_weights(model, lambda spec: reference_tensor(reference, "w", spec))
    return reference, model


def weighted(losses: list[AuxiliaryLoss]) -> torch.Tensor:
    """Return the sum of auxiliary losses as training weighs them."""
    return torch.tensor(0.0) + sum(loss.coefficient * loss.loss_sum / loss.num_tokens for loss in losses)


def check_model(path: Path) -> None:
    """Hold logits, losses and gradients against a reference."""
    reference, model = load_reference(path)
    tokens, labels, positions, mask = (
        torch.from_numpy(reference[key]) for key in ("tokens", "labels", "position_ids", "loss_mask")
    )
    with torch.no_grad():
        logits = model(tokens, positions).transpose(0, 1).numpy()
    found: list[AuxiliaryLoss] = []
    losses = model(tokens, positions, labels=labels, losses=found)
    loss = (losses * mask).sum() / mask.sum()
    (loss + weighted(found)).backward()
    if reference["logits"].size > 1:  # That of MTP modules has none.
        assert_tensors_close(logits, reference["logits"], TOLERANCE, "logits")
    assert_tensors_close(losses.detach().numpy(), reference["per_token_loss"], TOLERANCE, "per-token loss")
    assert loss.item() == pytest.approx(float(reference["loss"]), rel=TOLERANCE, abs=0.0)
    specs = {spec_of(parameter).name: (spec_of(parameter), parameter.grad) for parameter in model.parameters()}
    gradients = {key: grad.numpy() for key, (_, grad) in specs.items() if grad is not None}
    expected = {key: reference_tensor(reference, "g", spec) for key, (spec, _) in specs.items() if key in gradients}
    assert_gradients_close(gradients, expected, TOLERANCE)


@pytest.mark.default
@pytest.mark.parametrize("name", NAMES)
def test_model_of_experts_meets_reference_numbers(name: str) -> None:
    check_model(FOLDER / f"{name}.npz")


def train_ten_steps(path: Path, dtype: str = "float32") -> tuple[list[float], list[float]]:
    """Return the losses and gradient norms of ten optimizer steps on the reference's batches, in one process."""
    reference, module = load_reference(path, dtype)
    settings = json.loads(str(reference["config"]))["optimizer"]
    state = describe_parallel_state(0, 1)
    chunk = DistributedDataParallel(module, DistributedDataParallelConfig(), state)
    optimizer = MegatronOptimizer(optimizer_config(settings), [chunk], state)
    loads = loads_of([module], module.config, state)
    if loads is not None:
        # The reference's first step counts what its experts were given of the batch before, too.
        first, labels = torch.from_numpy(reference["tokens"]), torch.from_numpy(reference["labels"])
        module(first, torch.arange(first.shape[1]).expand_as(first), labels=labels, losses=[])
    losses, norms = [], []
    for tokens, labels, rate in zip(reference["train/tokens"], reference["train/labels"], reference["train/lr"]):
        tokens, labels = (torch.from_numpy(ids.astype(np.int64)) for ids in (tokens, labels))
        optimizer.set_learning_rate(float(rate), settings["wd"])
        chunk.zero_grad_buffer()
        if loads is not None and losses:
            loads.begin_step()
        found: list[AuxiliaryLoss] = []
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        loss = module(tokens, positions, labels=labels, losses=found).mean()
        (loss + weighted(found)).backward()
        finalize_model_grads([chunk], state)
        outcome = optimizer.step()
        if loads is not None:
            loads.move_biases(loads.collect(torch.device("cpu")))
        losses.append(loss.item())
        norms.append(outcome.grad_norm or 0.0)
    return losses, norms


def check_ten_steps(path: Path) -> None:
    """Hold the losses and gradient norms of ten steps against a reference."""
    losses, norms = train_ten_steps(path)
    reference = np.load(path)
    np.testing.assert_allclose(losses, reference["train/loss"], rtol=TOLERANCE, atol=0.0)
    np.testing.assert_allclose(norms, reference["train/grad_norm"], rtol=TOLERANCE, atol=0.0)


@pytest.mark.default(3)
@pytest.mark.parametrize("name", NAMES)
def test_ten_steps_of_experts_meet_reference_numbers(name: str) -> None:
    check_ten_steps(FOLDER / f"{name}.npz")


FLAGS = """
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 --ffn-hidden-size 48 --group-query-attention
    --num-query-groups 2 --swiglu --normalization RMSNorm --norm-epsilon 1e-6 --position-embedding-type rope
    --untie-embeddings-and-output-weights --disable-bias-linear
"""


@pytest.mark.parametrize(
    ("num_processes", "layout"),
    [
        pytest.param(1, "", id="one-process", marks=pytest.mark.long),
        pytest.param(
            2,
            "--expert-model-parallel-size 2 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 "
            "--sequence-parallel --moe-token-dispatcher-type alltoall",
            id="tp2-ep2",
        ),
    ],
)
def test_training_of_experts_meets_reference_numbers(num_processes: int, layout: str, tmp_path: Path) -> None:
    reference, ours = np.load(FOLDER / "mixtral_init.npz"), {}
    experts = sorted({name.split(".local_experts.")[0] for name in reference.files if ".local_experts." in name})
    for name in experts:
        for kind in ("linear_fc1.weight", "linear_fc2.weight"):
            ours[f"{name}.{kind}"] = np.stack([reference[f"{name}.local_experts.{i}.{kind}"] for i in range(8)])
    ours |= {name: reference[name] for name in reference.files if ".local_experts." not in name}
    np.savez(tmp_path / "weights.npz", **ours)
    files = ["--data-path", DENSE_FOLDER / "t_u16", "--data-cache-path", tmp_path / "cache"]
    args = [*DENSE_FLAGS.split(), *FLAGS.split(), *files, "--metrics-jsonl", tmp_path / "metrics.jsonl"]
    weights = Faults(weights=str(tmp_path / "weights.npz"))
    iterations = fork_training([*args, *layout.split()], num_processes, weights).check().iterations()
    expected = [json.loads(line) for line in (FOLDER / "mixtral.jsonl").read_text().splitlines()]
    assert len(iterations) == len(expected) == 10
    for mine, theirs in zip(iterations, expected):
        assert mine["lm_loss"] == pytest.approx(theirs["loss"]["lm loss"], rel=TOLERANCE, abs=0.0)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=TOLERANCE, abs=0.0)
