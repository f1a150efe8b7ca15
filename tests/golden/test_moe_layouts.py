"""Experts, latent attention and further tokens at every kind of layout against numbers made with NVIDIA's own code."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import pretrain_gpt
from megatron.checkpoint.train_state import TrainState
from megatron.config.arguments import resolve_arguments
from megatron.config.run_config import RunConfig
from megatron.core.collectives import all_gather_last_dim
from megatron.core.config_base import with_fields
from megatron.core.context_parallel.partition import positions_of
from megatron.core.datasets.batch import Batch
from megatron.core.datasets.gpt_dataset import GPTSample
from megatron.core.device import Device
from megatron.core.layer_output import AuxiliaryLoss, LayerOutput
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.executor import ChunkResult, MicrobatchLoss
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.core.process_group import Group, single_rank_group
from megatron.core.timers import Timers
from megatron.core.transformer.moe.expert_layer import ExpertLayer
from megatron.core.transformer.moe.expert_router import ExpertRouter, Routing
from megatron.core.transformer.moe.routing import TokenRows
from megatron.core.weight_prefetch import alloc_storage
from megatron.training.batch_source import BatchSource
from megatron.training.initialize import Runtime, make_runtime
from megatron.training.model_setup import ModelAndOptimizer, build_model_and_optimizer
from megatron.training.training_step import BegunStep, TrainingStep
from megatron.verification.cells import Layout
from megatron.verification.model_cells import ExpertLayout
from megatron.verification.run_cell import Fragment, compare, gradient_floor, gradient_fragments
from megatron.verification.training_cells import fully_sharded
from tests.golden.test_moe_golden import FOLDER, TOLERANCE, moe_settings, reference_tensor
from tests.harness.closeness import assert_tensors_close
from tests.harness.distributed import run_distributed
from tests.harness.toy_model import load_global_weights, make_model
from tests.unit.core.transformer.moe.test_expert_layer import plain_twin

NUM_STEPS, BATCH = 10, 2
RECIPE = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--ffn-hidden-size", "48"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--mock-data", "--eval-iters", "0"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "127", "--make-vocab-size-divisible-by", "1"),
    *("--hidden-dropout", "0", "--attention-dropout", "0", "--distributed-backend", "gloo"),
    *("--micro-batch-size", str(BATCH), "--train-iters", str(NUM_STEPS), "--lr-decay-iters", str(NUM_STEPS)),
    *("--lr", "0.01", "--min-lr", "0.001", "--lr-decay-style", "cosine", "--lr-warmup-iters", "3"),
    *("--weight-decay", "0.1", "--clip-grad", "1.0", "--adam-beta1", "0.9", "--adam-beta2", "0.95"),
)
EXPERTS = ("--num-experts", "8", "--moe-ffn-hidden-size", "48")
LAYOUTS = {
    "one": ExpertLayout(),
    "ep2": ExpertLayout(dp=2, ep=2, sharding="optim"),
    "ep4": ExpertLayout(dp=4, ep=4, sharding="optim"),
    "tp2-ep2": ExpertLayout(tp=2, dp=2, ep=2, sequence_parallel=True, sharding="optim"),
    "ep2-pp2": ExpertLayout(pp=2, dp=2, ep=2, sharding="optim"),
    "ep2-cp2": ExpertLayout(cp=2, dp=2, ep=2, sharding="optim"),
    "fsdp-ep2": ExpertLayout(dp=2, ep=2, sharding="optim_grads_params"),
    "etp1-tp2": ExpertLayout(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True, sharding="optim", dispatcher="allgather"),
    "etp1-tp2-ep4": ExpertLayout(tp=2, dp=2, ep=4, etp=1, sequence_parallel=True, sharding="optim"),
    "dp4-sharded": fully_sharded(ExpertLayout(dp=4)),
    "ep2-sharded": fully_sharded(ExpertLayout(dp=4, ep=2), overlap=True),
    "tp2-ep2-sharded": fully_sharded(ExpertLayout(tp=2, dp=2, ep=2, sequence_parallel=True)),
    "etp1-tp2-sharded": fully_sharded(ExpertLayout(tp=2, dp=4, ep=2, etp=1, sequence_parallel=True), overlap=True),
    "ep2-pp2-sharded": fully_sharded(ExpertLayout(pp=2, dp=4, ep=2)),
    "ep2-cp2-sharded": fully_sharded(ExpertLayout(cp=2, dp=2, ep=2), overlap=True),
}
DENSE_LAYOUTS = {
    "tp2-pp2": Layout(tp=2, pp=2, sequence_parallel=True),
    "pp2-cp2": Layout(pp=2, cp=2),
    "tp2-dp2-sharded": Layout(tp=2, dp=2, sequence_parallel=True, sharding="optim", overlap=True),
    "dp2-sharded-weights": fully_sharded(Layout(dp=2), overlap=True),
    "tp2-pp2-sharded-weights": fully_sharded(Layout(tp=2, pp=2, dp=2, sequence_parallel=True)),
}
Routes = dict[tuple[int, int], list[int]]
"""The experts of each token of the first batch, by layer and number of the token."""


class ReferenceBatches:
    """Give a reference's first batch and those of its ten steps; every data-parallel rank gets the whole of each."""

    def __init__(self, reference: Any, copies: int) -> None:
        self._reference, self._copies = reference, copies

    def __len__(self) -> int:
        return (NUM_STEPS + 1) * BATCH * self._copies

    def source_of(self, index: int) -> str:
        return "a reference"

    def __getitem__(self, index: int) -> GPTSample:
        batch, row = index // (BATCH * self._copies), index % BATCH
        tokens, labels = (
            (self._reference[name] if batch == 0 else self._reference[f"train/{name}"][batch - 1])[row].astype(np.int64)
            for name in ("tokens", "labels")
        )
        mask = self._reference["loss_mask"][row] if batch == 0 else np.ones(len(tokens))
        places = np.arange(len(tokens))
        return GPTSample(
            tokens=tokens,
            labels=labels,
            loss_mask=mask.astype(np.float32),
            position_ids=places,
            document_ids=np.zeros_like(places),
        )


@dataclass
class Seen:
    """Hold what a rank saw; logits and losses of the first batch by position, on the last stage."""

    logits: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    token_losses: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    routes: Routes = field(default_factory=dict)
    gradients: list[Fragment] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


def weigh(reference: Any, config: RunConfig, runtime: Runtime, contents: StageContents) -> GPTModel:
    """Return a model chunk with the reference's weights."""
    model = pretrain_gpt.provide_model(config, runtime, contents)
    for parameter in model.parameters():
        alloc_storage(parameter)
    load_global_weights(model, lambda spec: reference_tensor(reference, "w", spec))
    return model


def forward_step(seen: Seen, batch: Batch, model: GPTModel, hidden: torch.Tensor | None) -> ChunkResult:
    """Return the masked loss as training does; further tokens all count, as in the reference."""
    found: list[AuxiliaryLoss] = []
    output = model(batch.tokens, batch.position_ids, labels=batch.labels, hidden=hidden, losses=found)
    if not model.post_process:
        return LayerOutput(output, tuple(found))
    assert batch.loss_mask is not None
    assert batch.num_tokens is not None
    if not seen.token_losses:
        length = output.shape[1] * model.cp.size
        seen.token_losses.append((positions_of(model.cp.rank, model.cp.size, length).numpy(), output.detach().numpy()))
    return MicrobatchLoss((output * batch.loss_mask).sum(), batch.num_tokens / model.cp.size, found)


def watch(parts: ModelAndOptimizer, seen: Seen, num_layers: int) -> list[Any]:
    """Keep the logits and the routes of what the chunks compute next; return what ends that."""
    handles = []

    def see_logits(cp: Group, tp: Group, module: Any, inputs: Any, output: torch.Tensor) -> None:
        logits = all_gather_last_dim(output.detach(), tp).transpose(0, 1)
        places = positions_of(cp.rank, cp.size, logits.shape[1] * cp.size)
        seen.logits.append((places.numpy(), logits.numpy().copy()))

    def see_routes(layer: int, module: ExpertRouter, inputs: tuple[torch.Tensor, TokenRows], output: Routing) -> None:
        rows = inputs[1]
        numbers = rows.positions(module.groups.cp, torch.device("cpu")).tolist()
        seen.routes |= {(layer, number): experts for number, experts in zip(numbers, output.indices.tolist())}

    for chunk in parts.chunks:
        if chunk.output_layer is not None:
            handles.append(chunk.output_layer.register_forward_hook(functools.partial(see_logits, chunk.cp, chunk.tp)))
        for name, module in chunk.named_modules():
            if isinstance(module, ExpertLayer) and not name.startswith("mtp."):
                layer = int(name.split(".")[name.split(".").index("layers") + 1])
                handles.append(module.router.register_forward_hook(functools.partial(see_routes, layer)))
    return handles


def train(name: str, flags: tuple[str, ...], world_size: int) -> Seen:
    """Compute the first batch, and train ten steps on the others."""
    reference = np.load(FOLDER / f"{name}.npz")
    given = json.loads(str(reference["config"]))
    config = resolve_arguments((*RECIPE, *flags), world_size).config
    settings = moe_settings(given)
    settings.pop("moe_token_dispatcher_type", None)
    config = dataclasses.replace(config, model=with_fields(config.model, **settings))
    runtime = make_runtime(config, Device("cpu"))
    parts = build_model_and_optimizer(config, runtime, functools.partial(weigh, reference), log=lambda line: None)
    seen, state = Seen(), TrainState()

    def copy_first_gradients() -> None:
        if not seen.gradients:
            seen.gradients = gradient_fragments(parts, runtime.state.rank)

    step = TrainingStep(config, runtime, parts, functools.partial(forward_step, seen), Timers(), copy_first_gradients)
    size = BATCH * runtime.state.dp.size
    first = BegunStep(0.0, 0, 0, size, None, 0.0, None, 1.0)
    source = BatchSource(ReferenceBatches(reference, runtime.state.dp.size), config, runtime, 128, 0)
    with contextlib.closing(source):
        handles = watch(parts, seen, config.model.num_layers)
        step.compute(source, first)
        for handle in handles:
            handle.remove()
        for number in range(NUM_STEPS):
            with contextlib.ExitStack() as stack:
                if number == 0 and parts.expert_loads is not None:
                    # The reference's first step counts what its experts were given of the batch before, too.
                    parts.expert_loads.begin_step = lambda: None  # type: ignore[method-assign]
                    stack.callback(delattr, parts.expert_loads, "begin_step")
                report, _ = step.run(state, source, size, None)
            seen.losses.append(report.lm_loss)
            seen.norms.append(report.grad_norm or 0.0)
            seen.rates.append(report.learning_rate)
    return seen


def run(name: str, layout: Layout) -> list[Seen]:
    experts = EXPERTS if isinstance(layout, ExpertLayout) else ()
    size = ("--global-batch-size", str(BATCH * layout.dp))
    flags = (*experts, *size, *layout.to_flags(2))
    if layout.world_size == 1:
        return [train(name, flags, 1)]
    return run_distributed(layout.world_size, train, name, flags, layout.world_size, timeout_s=90.0)


@functools.cache
def routes_of_twin(name: str) -> Routes:
    """Return the experts that a plain float64 twin chooses, token by token."""
    reference = np.load(FOLDER / f"{name}.npz")
    model = make_model(
        single_rank_group(), params_dtype="float64", **moe_settings(json.loads(str(reference["config"])))
    )
    load_global_weights(model, lambda spec: reference_tensor(reference, "w", spec))
    routes: Routes = {}

    def see(layer: int, module: ExpertRouter, inputs: tuple[torch.Tensor, TokenRows]) -> None:
        logits = F.linear(inputs[0], module.weight, module.bias).detach().numpy()
        for number, row in enumerate(logits):
            routes[layer, number] = plain_twin(row, None, module.config.moe)[0]

    for layer, block in model.decoder.layers.items():
        if isinstance(block.mlp, ExpertLayer):
            block.mlp.router.register_forward_pre_hook(functools.partial(see, int(layer)))
    with torch.no_grad():
        model(torch.from_numpy(reference["tokens"]), torch.from_numpy(reference["position_ids"]))
    return routes


def check(name: str, ranks: list[Seen]) -> None:
    """Hold what the ranks saw against the reference, and their routes against the twin's."""
    reference = np.load(FOLDER / f"{name}.npz")
    routes: Routes = {}
    positions = set[int]()
    for seen in ranks:
        routes |= seen.routes
        for places, losses in seen.token_losses:
            positions |= set(places.tolist())
            assert_tensors_close(losses, reference["per_token_loss"][:, places], TOLERANCE, "per-token loss")
        for places, logits in seen.logits if reference["logits"].size > 1 else ():
            assert_tensors_close(logits, reference["logits"][:, places], TOLERANCE, "logits")
        np.testing.assert_allclose(seen.losses, reference["train/loss"], rtol=TOLERANCE, atol=0.0)
        np.testing.assert_allclose(seen.norms, reference["train/grad_norm"], rtol=TOLERANCE, atol=0.0)
        np.testing.assert_allclose(seen.rates, reference["train/lr"], rtol=TOLERANCE, atol=0.0)
    assert positions == set(range(32))
    assert routes == routes_of_twin(name)
    fragments = [fragment for seen in ranks for fragment in seen.gradients]
    expected = {part.name: reference_tensor(reference, "g", part) for part in fragments}
    wrong, _ = compare(fragments, expected, TOLERANCE, gradient_floor(expected))
    assert not wrong, [mismatch.describe() for mismatch in wrong]


_LONG = pytest.mark.long
DEFAULT = {("deepseek", "etp1-tp2")}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if (name, layout) in DEFAULT else _LONG)
        for name in ("mixtral", "deepseek")
        for layout in LAYOUTS
    ],
)
def test_experts_at_a_layout_meet_reference_numbers(name: str, layout: str) -> None:
    check(name, run(name, LAYOUTS[layout]))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "layout"), [("clamped", "tp2-ep2"), ("further_experts", "ep2-pp2"), ("further_experts", "fsdp-ep2")]
)
def test_further_choices_at_a_layout_meet_reference_numbers(name: str, layout: str) -> None:
    check(name, run(name, LAYOUTS[layout]))


@pytest.mark.long
@pytest.mark.parametrize("layout", DENSE_LAYOUTS)
def test_further_tokens_at_a_layout_meet_reference_numbers(layout: str) -> None:
    check("mtp", run("mtp", DENSE_LAYOUTS[layout]))
