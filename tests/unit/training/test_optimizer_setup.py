"""How much of the optimizer is offloaded by the policy auto, the line that says so, and what is rejected."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import pretrain_gpt
from megatron.config.arguments import parse_arguments
from megatron.config.run_config import RunConfig
from megatron.core.available_host_memory import HostRoom
from megatron.core.device import Device
from megatron.core.errors import ConfigurationError
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.parallel_state import create_parallel_state
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.core.tensor_parallel.random import RngStreams
from megatron.training.initialize import Runtime
from megatron.training.model_setup import _check_buffers, build_model_and_optimizer
from megatron.training.theoretical_memory_usage import activation_bytes

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --train-iters 9 --lr 1e-3 --mock-data --seq-length 12 "
    "--max-position-embeddings 12 --micro-batch-size 3 --tokenizer-type NullTokenizer --vocab-size 52 --bf16"
)
NUM_PARAMETERS = 25_856
AUTO = f"{FLAGS} --optimizer hybridadam --optimizer-offload-policy auto --optimizer-offload-auto-threshold 1000"


@dataclass(frozen=True)
class TightDevice(Device):
    """Have so much memory and no more."""

    device_bytes: int | None = None
    host_bytes: int | None = None

    def free_bytes(self) -> int | None:
        return self.device_bytes

    def host_room(self) -> HostRoom | None:
        return None if self.host_bytes is None else HostRoom(self.host_bytes, 1)


def build(flags: str, device_bytes: int | None, host_bytes: int | None = None) -> tuple[MegatronOptimizer, str]:
    """Return the optimizer of a run on a device, and what the run said of it."""
    config = parse_arguments(flags.split())
    device = TightDevice("cpu", 0, device_bytes, host_bytes)
    state = create_parallel_state()
    lines: list[str] = []
    parts = build_model_and_optimizer(
        config, Runtime(device, state, RngStreams(device, 1, state.place)), pretrain_gpt.provide_model, lines.append
    )
    return parts.optimizer, "".join(line for line in lines if "optimizer offload" in line)


def share_on_host(optimizer: MegatronOptimizer) -> float:
    on_host = sum(bucket.num_elements for bucket in optimizer.offload.buckets) if optimizer.offload else 0
    return on_host / NUM_PARAMETERS


@pytest.mark.parametrize(
    ("state_that_fits", "share"), [(2.0, 0.0), (1.0, 0.0), (0.605, 0.4), (0.125, 0.88), (0.0, 1.0), (-3.0, 1.0)]
)
@pytest.mark.parametrize(("types", "bytes_an_element"), [("", 12), ("--exp-avg-dtype bf16 --exp-avg-sq-dtype fp16", 8)])
def test_auto_offloads_what_does_not_fit(
    state_that_fits: float, share: float, types: str, bytes_an_element: int
) -> None:
    flags = f"{AUTO} --use-precision-aware-optimizer {types}"
    activations = activation_bytes(parse_arguments(flags.split()), 0)
    room = round(state_that_fits * bytes_an_element * NUM_PARAMETERS)
    optimizer, line = build(flags, room + activations + 1000)
    assert share_on_host(optimizer) == pytest.approx(share, abs=128 / NUM_PARAMETERS)
    assert line.startswith(f"optimizer offload: {share:.0%} of the main parameters and the optimizer's state, ")
    assert "GiB of device memory are free, for" in line


def test_a_device_without_memory_of_its_own_offloads_everything() -> None:
    optimizer, line = build(AUTO, None)
    assert share_on_host(optimizer) == 1.0
    assert line.endswith("--optimizer-offload-policy auto: this device has no memory of its own)")


def test_nothing_is_said_without_offload() -> None:
    optimizer, line = build(FLAGS, 10)
    assert (optimizer.offload, line) == (None, "")


def test_too_little_host_memory_is_refused_with_what_is_needed() -> None:
    """What the policy auto has chosen is looked at when it is known."""
    needed = 12 * NUM_PARAMETERS
    assert build(AUTO, None, needed)[0].offload is not None
    with pytest.raises(ConfigurationError) as refused:
        build(AUTO, None, needed // 2)
    (line,) = refused.value.problems
    start = "offload needs an estimated 0.0 GiB of host memory per process (0.0 GiB of the optimizer)"
    assert line.startswith(start)
    assert line.endswith("; --optimizer-offload-policy static --optimizer-offload-fraction 0.5 would fit")


def test_this_machine_says_what_memory_it_has() -> None:
    """A CPU has no memory beside the machine's."""
    device = Device("cpu")
    assert device.free_bytes() is None
    room = device.host_room()
    assert room is not None
    assert 2**20 < room.available < 2**50


def test_the_parameters_are_counted_right() -> None:
    optimizer, _ = build(FLAGS, None)
    assert sum(bucket.num_elements for bucket in optimizer._on_device) == NUM_PARAMETERS
    assert {tensor.dtype for tensor in optimizer.held_tensors()} == {torch.float32}


def test_a_pattern_that_matches_no_parameter_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"\*\.experts\.\*: no trained parameter matches"):
        build(f"{FLAGS} --param-group-overrides *.mlp.*:lr_mult=2 *.experts.*:lr_mult=2", None)


def test_muon_is_refused_for_a_model_without_matrices() -> None:
    def provide_frozen(config: RunConfig, runtime: Runtime, contents: StageContents) -> GPTModel:
        model = pretrain_gpt.provide_model(config, runtime, contents)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("linear" not in name or parameter.dim() == 1)
        return model

    config = parse_arguments(f"{FLAGS} --optimizer muon".split())
    state = create_parallel_state()
    device = Device("cpu")
    runtime = Runtime(device, state, RngStreams(device, 1, state.place))
    with pytest.raises(ConfigurationError, match="this model trains none; use --optimizer adam"):
        build_model_and_optimizer(config, runtime, provide_frozen, lambda line: None)


@pytest.mark.parametrize(
    ("flags", "is_persistent", "is_rejected"),
    [(["--save", "s"], True, True), (["--save", "s"], False, False), ([], True, False)],
)
def test_a_persistent_buffer_is_rejected_if_checkpoints_are_saved(
    flags: list[str], is_persistent: bool, is_rejected: bool
) -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    model[0].register_buffer("nothing", None)
    model[0].register_buffer("running_mean", torch.zeros(3), persistent=is_persistent)
    expected = pytest.raises(ConfigurationError, match=r"^0\.running_mean is a persistent buffer")
    with expected if is_rejected else nullcontext():
        _check_buffers(parse_arguments([*FLAGS.split(), *flags]), [model])
