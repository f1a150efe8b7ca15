"""AdamW's whole update by one interpreted Triton program, against torch's kernels, at several shardings."""

from __future__ import annotations

import pytest
import torch

from megatron.core.errors import ConfigurationError
from megatron.core.main_grad import main_grad_of
from megatron.core.optimizer.optimizer import StepOutcome
from megatron.core.optimizer.update_bucket import UpdateBucket
from tests.distributed.core.optimizer.toy_training import GATHER, GRADS, IN_STEP, OPTIM, WEIGHTS, Options, Run, build
from tests.harness.graph_stand_in import RerunBackend
from tests.unit.core.ops.interpreted import close, cpu_runs_on_triton, interpret, needs_triton

pytestmark = needs_triton


def build_fused(options: Options, dtype: torch.dtype, settings: Options) -> Run:
    with cpu_runs_on_triton():
        run = build(options, dtype=dtype, optimizer=settings)
    assert all(bucket._flat is not None for bucket in run.optimizer._on_device)
    return run


def num_runs(bucket: UpdateBucket) -> int:
    assert bucket._flat is not None
    return len(bucket._flat._runs)


def state_of(run: Run) -> dict[str, torch.Tensor]:
    return {name: tensor for name, (_, tensor) in run.optimizer.sharded_state().items()}


def check_training(options: Options, dtype: torch.dtype, settings: Options) -> None:
    twin, fused = build(options, dtype=dtype, optimizer=settings), build_fused(options, dtype, settings)
    buckets = fused.optimizer._on_device
    if options == OPTIM:
        assert [num_runs(bucket) for bucket in buckets] == [1]
    for number in range(3):
        outcomes = [run.step(number) for run in (twin, fused)]
        assert all(outcome.success for outcome in outcomes)
        # The interpreter cuts weights down to bfloat16, which the next step's gradients see.
        is_equal = number == 0 or dtype is not torch.bfloat16
        assert outcomes[0].grad_norm == pytest.approx(outcomes[1].grad_norm, rel=1e-5 if is_equal else 3e-2)
        if is_equal:
            for mine, theirs in zip(state_of(fused).values(), state_of(twin).values(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-6)
        for mine, theirs in zip(fused.parameters().values(), twin.parameters().values(), strict=True):
            close(mine, theirs, units=8 if is_equal else 16)
    assert fused.optimizer.scalar_state() == twin.optimizer.scalar_state()
    assert float(fused.optimizer._on_device[0].inner.num_updates) == 3.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)])
@pytest.mark.parametrize("options", [{}, OPTIM, GRADS], ids=["replicated", "optim", "optim_grads"])
def test_training_equals_torchs_kernels(options: Options, dtype: torch.dtype) -> None:
    interpret(check_training, options, dtype, {"initial_loss_scale": 1024.0}, world_size=2)


@pytest.mark.long
@pytest.mark.parametrize("options", [GATHER, IN_STEP, WEIGHTS], ids=["gather", "in_step", "weights"])
def test_training_equals_torchs_kernels_with_gathers(options: Options) -> None:
    interpret(check_training, OPTIM | options if options is not WEIGHTS else options, torch.bfloat16, {}, world_size=2)


def spoil(run: Run) -> StepOutcome:
    """Make a step whose gradients are not finite."""
    run.ddp.zero_grad_buffer()
    for parameter in run.ddp.parameters():
        main_grad = main_grad_of(parameter)
        assert main_grad is not None
        main_grad.fill_if_empty()
        main_grad.tensor.fill_(float("inf"))
    return run.optimizer.step()


def check_skipped_and_resumed() -> None:
    settings: Options = {"log_num_zeros_in_grad": False}
    run = build_fused({"check_for_nan_in_loss_and_grad": False}, torch.bfloat16, settings)
    run.step(0)
    before = {name: tensor.clone() for name, tensor in (state_of(run) | run.parameters()).items()}
    assert not spoil(run).success
    after = state_of(run) | run.parameters()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert float(run.optimizer._on_device[0].inner.num_updates) == 1.0
    resumed = build_fused({"check_for_nan_in_loss_and_grad": False}, torch.bfloat16, settings)
    with torch.no_grad():
        for mine, theirs in zip(state_of(resumed).values(), state_of(run).values(), strict=True):
            mine.copy_(theirs)
        for mine, theirs in zip(resumed.ddp.parameters(), run.ddp.parameters(), strict=True):
            mine.copy_(theirs)
    resumed.optimizer.load_scalar_state(run.optimizer.scalar_state())
    for each in (run, resumed):
        each.step(1)
    expected = state_of(run) | run.parameters()
    actual = state_of(resumed) | resumed.parameters()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_a_bad_gradient_changes_nothing_and_a_resumed_run_continues() -> None:
    interpret(check_skipped_and_resumed)


def check_rates() -> None:
    for settings in ({"clip_grad_matrices": 1.0}, {"param_group_overrides": ("fc*:lr_mult=2",)}, {"optimizer": "sgd"}):
        with cpu_runs_on_triton():
            run = build({}, dtype=torch.bfloat16, optimizer=settings)
        assert all(bucket._flat is None for bucket in run.optimizer._on_device)


def test_other_rules_and_several_rates_are_left_to_torch() -> None:
    interpret(check_rates)


def check_graphs(options: Options, dtype: torch.dtype, settings: Options) -> None:
    eager, captured = (build_fused(options, dtype, settings) for _ in range(2))
    backend = RerunBackend()
    captured.optimizer.capture_steps(backend, 1)
    results = []
    for run in (eager, captured):
        outcomes = []
        for number in range(5):
            # The rates and the loss scale change, also after the capture in the second step.
            run.optimizer.set_learning_rate(0.01 / (1 + number), 0.1 + 0.01 * number)
            skips = number == 2 and dtype is torch.float16
            outcomes.append(spoil(run) if skips else run.step(number))
        results.append((outcomes, run.optimizer.loss_scale, state_of(run), run.parameters()))
    (outcomes, scale, *tensors), (own_outcomes, own_scale, *own_tensors) = results
    assert own_outcomes == outcomes
    assert own_scale == scale
    assert scale == (512.0 if dtype is torch.float16 else 1.0)
    for mine, theirs in zip(own_tensors, tensors, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    # The norm, the clipping, the moving average, and the updates before each all-gather.
    num_updates = len(captured.optimizer._gathers) if options == OPTIM | IN_STEP else 1
    assert [graph.num_replays for graph in backend.graphs] == [4] * (3 + num_updates)


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.long)])
@pytest.mark.parametrize("options", [OPTIM | IN_STEP, pytest.param({}, marks=pytest.mark.long)], ids=["gathers", "all"])
def test_captured_steps_equal_eager_steps(options: Options, dtype: torch.dtype) -> None:
    settings = {"initial_loss_scale": 1024.0, "hysteresis": 1, "ema_decay": 0.9, "log_num_zeros_in_grad": True}
    interpret(check_graphs, options, dtype, settings, world_size=2)


def check_rejected() -> None:
    for settings in ({"param_group_overrides": ("fc*:lr_mult=2",)}, {"optimizer": "sgd"}):
        with cpu_runs_on_triton():
            run = build({}, dtype=torch.bfloat16, optimizer=settings)
        with pytest.raises(ConfigurationError, match="only the fused kernel of Adam, with one learning rate"):
            run.optimizer.capture_steps(RerunBackend(), 1)


def test_updates_with_numbers_of_the_host_are_not_captured() -> None:
    interpret(check_rejected)
