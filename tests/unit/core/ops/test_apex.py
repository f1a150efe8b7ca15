"""Finding apex: present, absent, broken."""

from __future__ import annotations

import builtins
import sys
import types
import warnings
from collections.abc import Callable

import pytest
import torch

from megatron.core.optimizer.inner_optimizer import InnerOptimizer, load_fused_adam
from megatron.core.optimizer.optimizer_config import OptimizerConfig


class FusedAdam(torch.optim.SGD):
    """Stand in for apex's class."""


def fail_with(error: Exception) -> Callable[..., object]:
    real_import = builtins.__import__

    def fake_import(name: str, *args: object, **kwargs: object) -> object:
        if name.startswith("apex"):
            raise error
        return real_import(name, *args, **kwargs)  # type: ignore[arg-type]

    return fake_import


def test_installed_class_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizers = types.ModuleType("apex.optimizers")
    optimizers.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "apex.optimizers", optimizers)
    assert load_fused_adam() is FusedAdam


def test_absence_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "__import__", fail_with(ModuleNotFoundError("No module named 'apex'")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_fused_adam() is None


@pytest.mark.parametrize("error", [OSError("libcudart.so.11"), ImportError("amp_C"), RuntimeError("no device")])
def test_a_broken_installation_is_named_once_and_not_used(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(builtins, "__import__", fail_with(error))
    with pytest.warns(UserWarning, match=str(error)) as caught:
        assert load_fused_adam() is None
    assert len(caught) == 1


def test_on_cpu_torchs_own_adam_is_used() -> None:
    parameter = torch.zeros(3)
    inner = InnerOptimizer(OptimizerConfig(), [([parameter], 1.0)], fused_adam=FusedAdam)
    assert inner.state_of(parameter, "exp_avg").shape == (3,)
    parameter.grad = torch.ones(3)
    inner.set_learning_rate(0.5, 0.0)
    inner.step([parameter], 1.0)
    torch.testing.assert_close(parameter, torch.full((3,), -0.5))
