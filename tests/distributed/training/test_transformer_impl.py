"""--transformer-impl: what a run says and records where it cannot have transformer-engine's layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.config.arguments import resolve_arguments
from megatron.core.device import Device
from megatron.training import model_setup
from megatron.training.initialize import make_runtime
from megatron.training.model_setup import with_transformer_impl
from tests.e2e.toy_run import toy_args
from tests.harness.distributed import run_distributed
from tests.harness.forked_training import fork_training
from tests.unit.training.config.command_lines import MINIMAL

FLAG = "--transformer-impl transformer_engine"


def line(reason: str) -> str:
    return f"transformer-engine is not used, since {reason}: this project's own layers take its place"


def chosen(flags: str, reason: str | None, world_size: int = 1) -> tuple[str, list[str]]:
    """Return what this rank's model has and what is said, where transformer-engine is kept back by a reason."""
    config = resolve_arguments([*MINIMAL, *flags.split()], world_size).config
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(model_setup, "why_no_transformer_engine", lambda dtype, device: reason)
        config = with_transformer_impl(config, make_runtime(config, Device("cpu")), lines.append)
    return config.model.transformer_impl, lines


def test_where_it_works_nothing_is_said() -> None:
    assert chosen(FLAG, None) == ("transformer_engine", [])


def test_where_it_does_not_work_one_line_says_why() -> None:
    assert chosen(FLAG, "it needs CUDA") == ("local", [line("it needs CUDA")])


@pytest.mark.parametrize("flags", ["", "--transformer-impl local"])
def test_who_does_not_ask_for_it_is_told_nothing(flags: str) -> None:
    assert chosen(flags, "it needs CUDA") == ("local", [])


def chosen_where_the_second_lacks_it(flags: str) -> tuple[str, list[str]]:
    lacks_it = torch.distributed.get_rank() == 1
    return chosen(flags, "the package cannot be imported" if lacks_it else None, 2)


def test_ranks_agree() -> None:
    first, second = run_distributed(2, chosen_where_the_second_lacks_it, FLAG)
    assert first == ("local", [line("another process of this run cannot import the package")])
    assert second == ("local", [line("the package cannot be imported")])


def test_a_run_says_it_and_its_checkpoint_has_what_it_used(tmp_path: Path) -> None:
    flags = "--train-iters 1 --lr-warmup-iters 0 --bf16 --ckpt-format torch"
    run = fork_training(toy_args(tmp_path, flags, FLAG)).check()
    assert run.stdout.count(line("it needs CUDA")) == 1
    file = tmp_path / "checkpoints" / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt"
    assert torch.load(file, weights_only=False)["args"].transformer_impl == "local"
