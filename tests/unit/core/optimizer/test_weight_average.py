"""The average of the weights: what it follows, when it does not, and the model that has it for a while."""

from __future__ import annotations

import pytest
import torch

from tests.unit.core.optimizer.test_optimizer import build, poisoned_step, train_step

DECAY = 0.75


def averages(optimizer: object) -> dict[str, torch.Tensor]:
    state = optimizer.sharded_state()  # type: ignore[attr-defined]
    return {name: tensor.clone() for name, (_, tensor) in state.items() if name.startswith("optimizer.ema.")}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [{}, {"optimizer_cpu_offload": True}, {"use_precision_aware_optimizer": True, "exp_avg_sq_dtype": "fp8"}],
    ids=["plain", "offload", "narrow"],
)
def test_the_average_follows_the_main_parameters(dtype: torch.dtype, options: dict[str, object]) -> None:
    if dtype is torch.float64 and "exp_avg_sq_dtype" in options:
        options = {}
    ddp, optimizer = build(dtype, ema_decay=DECAY, **options)
    expected = {name: parameter.detach().clone() for name, parameter in ddp.module.named_parameters()}
    names = {name: parameter.spec.name for name, parameter in ddp.module.named_parameters()}
    for step in range(3):
        train_step(ddp, optimizer, step)
        state = optimizer.sharded_state()
        for name, before in expected.items():
            main = state.get(f"optimizer.main_param.{names[name]}", (None, dict(ddp.module.named_parameters())[name]))[
                1
            ]
            expected[name] = before.to(main.dtype).lerp(main.detach(), 1.0 - DECAY)
    found = averages(optimizer)
    assert {tensor.dtype for tensor in found.values()} == {torch.float64 if dtype is torch.float64 else torch.float32}
    for name, average in expected.items():
        torch.testing.assert_close(found[f"optimizer.ema.{names[name]}"].view(average.shape), average)


def test_a_skipped_step_moves_no_average() -> None:
    ddp, optimizer = build(torch.float32, check=False, ema_decay=DECAY)
    train_step(ddp, optimizer, 0)
    before = averages(optimizer)
    assert not poisoned_step(ddp, optimizer, float("nan")).success
    assert all(torch.equal(tensor, before[name]) for name, tensor in averages(optimizer).items())


def test_the_model_has_the_average_inside_and_trains_on_as_if_it_never_had() -> None:
    (ddp, optimizer), (other_ddp, other) = (build(torch.bfloat16, ema_decay=decay) for decay in (DECAY, None))
    train_step(ddp, optimizer, 0)
    train_step(other_ddp, other, 0)
    found = averages(optimizer)
    with optimizer.averaged_weights():
        for parameter in ddp.module.parameters():
            average = found[f"optimizer.ema.{parameter.spec.name}"].view(parameter.shape)
            assert torch.equal(parameter, average.to(torch.bfloat16))
    assert train_step(ddp, optimizer, 1) == train_step(other_ddp, other, 1)
    assert all(torch.equal(a, b) for a, b in zip(ddp.parameters(), other_ddp.parameters(), strict=True))
    assert not other.has_average


def test_weights_that_were_loaded_alone_begin_the_average_anew() -> None:
    ddp, optimizer = build(torch.float32, ema_decay=DECAY)
    train_step(ddp, optimizer, 0)
    with torch.no_grad():
        for parameter in ddp.module.parameters():
            parameter.fill_(3.0)
    optimizer.reload_main_params()
    assert all(bool((average == 3.0).all()) for average in averages(optimizer).values())


def test_other_ranks_gather_the_average_and_afterwards_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp, optimizer = build(torch.float32, ema_decay=DECAY)
    train_step(ddp, optimizer, 0)
    events: list[tuple[str, float]] = []

    def first() -> float:
        return ddp.module.fc2[0, 0].item()

    for name in ("start_param_gather", "finish_param_gather"):
        monkeypatch.setattr(ddp, name, lambda name=name: events.append((name, first())))
    weight = first()
    with optimizer.averaged_weights():
        average = first()
        inside = len(events)
    assert average != weight
    assert events[:inside] == [
        ("finish_param_gather", weight),
        ("start_param_gather", average),
        ("finish_param_gather", average),
    ]
    assert events[inside:] == [("start_param_gather", weight), ("finish_param_gather", weight)]
