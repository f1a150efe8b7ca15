"""State in few bytes: what is stored, how exact it is, and an optimizer that keeps it so."""

from __future__ import annotations

import functools

import pytest
import torch

from megatron.core.optimizer import optimizer as optimizer_module
from megatron.core.optimizer import quantized_state
from megatron.core.optimizer.quantized_state import (
    QuantizedState,
    RemainderTensor,
    ScaledTensor,
    make_moment,
    random_words,
)
from megatron.core.optimizer.update_bucket import cut_into_buckets
from tests.unit.core.optimizer.test_optimizer import build, poisoned_step, train_step

NARROW: dict[str, object] = {"use_precision_aware_optimizer": True, "clip_grad": 0.3, "weight_decay": 0.1}
EXACTNESS = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-4}
"""Half a unit in the last place, relative to a number that is well within the range."""
BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}


def numbers(count: int = 1000) -> torch.Tensor:
    """Return numbers of both signs over many orders of magnitude, alike within a block of 128."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.logspace(-30, 30, -(-count // 128)).repeat_interleave(128)[:count]
    return sizes * (1.0 + torch.rand(count, generator=generator)) * torch.randn(count, generator=generator).sign()


def stored(values: torch.Tensor, dtype: str, decay: float = 0.9, *, is_second: bool = False) -> QuantizedState:
    compact = make_moment(values.clone(), dtype, decay, is_second=is_second)
    assert compact is not None
    return compact


def test_the_limits_of_each_dtype_are_those_of_torch() -> None:
    for dtype, half_unit in quantized_state._HALF_UNIT.items():
        assert half_unit == torch.finfo(dtype).eps / 2
    for dtype, smallest in quantized_state._SMALLEST.items():
        assert smallest == torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    for dtype, exponent in quantized_state._LARGEST_EXPONENT.items():
        assert 2.0**exponent <= torch.finfo(dtype).max < 2.0 ** (exponent + 1)
    assert quantized_state._HALF_UNIT.keys() == set(quantized_state.STATE_DTYPES.values()) - {torch.float32}


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
def test_rounding_errors_are_those_of_the_type_at_any_magnitude(dtype: str) -> None:
    values = numbers()
    error = (stored(values, dtype).decoded().double() - values.double()).abs() / values.double().abs()
    assert 0.2 * EXACTNESS[dtype] < error.max().item() <= EXACTNESS[dtype]


@pytest.mark.parametrize(("dtype", "is_second"), [("bf16", False), ("fp16", False), ("fp8", False), ("fp8", True)])
def test_storing_what_was_read_changes_no_bit(dtype: str, is_second: bool) -> None:
    spread = torch.randn(20_000, generator=torch.Generator().manual_seed(2)) ** 5
    values = torch.cat((numbers(), spread, torch.zeros(300), torch.tensor([1e-45, 3e38])))
    compact = stored(values.abs() if is_second else values, dtype, is_second=is_second)
    once, held = compact.decoded(), [tensor.clone() for tensor in compact.held()]
    compact.open()
    assert torch.equal(compact.tensor, once)
    compact.close()
    assert compact.tensor.numel() == 0
    assert torch.equal(compact.decoded(), once)
    if dtype == "bf16":
        assert all(torch.equal(a, b) for a, b in zip(compact.held(), held, strict=True))


@pytest.mark.parametrize(("dtype", "is_second"), [("fp16", False), ("fp8", False), ("fp8", True), ("bf16", True)])
def test_a_shard_is_stored_as_in_the_whole(dtype: str, is_second: bool) -> None:
    """Blocks do not depend on where data parallelism cuts, at multiples of their length."""
    values = torch.randn(700, generator=torch.Generator().manual_seed(3)) ** 3
    values = values.abs() if is_second else values
    parts = [
        stored(part, dtype, 0.999, is_second=is_second).decoded()
        for part in (values[:256], values[256:640], values[640:])
    ]
    assert torch.equal(torch.cat(parts), stored(values, dtype, 0.999, is_second=is_second).decoded())


def test_no_second_moment_becomes_zero() -> None:
    values = torch.tensor([1.0, 1e-20, 0.0])
    assert stored(values, "fp16").decoded()[1] == 0
    assert (stored(values, "fp16", is_second=True).decoded() > 0).tolist() == [True, True, False]
    assert (stored(values, "fp8", is_second=True).decoded() > 0).tolist() == [True, True, False]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
def test_bytes_stored_equal_the_closed_form(dtype: str) -> None:
    compact = stored(torch.ones(1000), dtype)
    scales = 0 if dtype == "bf16" else 8
    assert sum(tensor.nbytes for tensor in compact.held()) == 1000 * BYTES[dtype] + scales


def test_fp32_is_stored_as_it_is() -> None:
    assert make_moment(torch.ones(3), "fp32", 0.9, is_second=True) is None


def followed(compact: QuantizedState, decay: float, gradients: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Return a second moment that has followed squares of gradients, one row an update, and was stored after each."""
    for count, gradient in enumerate(gradients, first + 1):
        compact.open()
        compact.tensor.lerp_(gradient.square(), 1.0 - decay)
        compact.close(count)
    return compact.decoded()


@pytest.mark.parametrize(("dtype", "decay"), [("fp8", 0.95), ("fp8", 0.99), ("bf16", 0.999)])
def test_a_second_moment_that_stalls_when_rounded_to_the_nearest_is_followed_by_chance(
    dtype: str, decay: float
) -> None:
    """Gradients have become ten times smaller: their second moment falls to a hundredth."""
    num_updates = round(6 / (1 - decay))
    generator = torch.Generator().manual_seed(4)
    gradients = 0.1 * torch.randn(num_updates, 512, generator=generator)
    exact = torch.ones(512)
    for gradient in gradients:
        exact.lerp_(gradient.square(), 1.0 - decay)
    nearest = ScaledTensor(torch.ones(512), torch.float8_e4m3fn, keeps_positive=True)
    stalled = followed(nearest, decay, gradients) if dtype == "fp8" else torch.ones(512)
    if dtype == "bf16":
        for gradient in gradients:
            stalled = stalled.lerp(gradient.square(), 1.0 - decay).bfloat16().float()
    assert stalled.min().item() > 0.3
    found = followed(stored(torch.ones(512), dtype, decay, is_second=True), decay, gradients)
    assert found.mean().item() == pytest.approx(exact.mean().item(), rel=0.1)
    # The roots are what an update is divided by.
    error = (found / exact).sqrt() - 1.0
    assert error.square().mean().sqrt().item() < (0.3 if dtype == "fp8" else 0.1)


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_the_mean_of_what_may_be_stored_is_the_second_moment(dtype: str) -> None:
    values = 10.0 ** torch.linspace(-3, 3, 256)
    compact, total = stored(values, dtype, 0.999, is_second=True), torch.zeros(256)
    for count in range(400):
        compact.encode(values, count)
        total += compact.decoded()
    torch.testing.assert_close(total / 400, values, rtol=0.03, atol=0.0)


def test_a_moment_without_gradients_falls_on_and_what_is_zero_stays() -> None:
    compact = stored(torch.tensor([1.0, 0.0]), "fp8", 0.95, is_second=True)
    fallen, zero = followed(compact, 0.95, torch.zeros(200, 2)).tolist()
    assert zero == 0.0
    # Exactly 3.5e-5; rounded to the nearest it would have stayed at 1.
    assert 3e-6 < fallen < 3e-4


def test_weights_and_remainders_are_the_whole_main_parameter() -> None:
    values = torch.cat((numbers(4000), torch.randn(4000), torch.tensor([0.0, -0.0])))
    weights = torch.empty(values.numel(), dtype=torch.bfloat16)
    compact = RemainderTensor(values.clone(), weights)
    assert torch.equal(weights, values.bfloat16())
    assert torch.equal(compact.decoded(), values)
    assert [tensor.nbytes for tensor in compact.held()] == [2 * values.numel()]


def test_the_middle_between_two_weights_may_lose_one_unit_and_no_more() -> None:
    # In the very middle bfloat16 rounds to the even neighbor: the first down, the second up, and so below zero.
    middles = torch.tensor([1.0 + 2**-8, 1.0 + 3 * 2**-8, -1.0 - 2**-8])
    compact = RemainderTensor(middles.clone(), weights := torch.empty(3, dtype=torch.bfloat16))
    unit = 2.0**-23
    assert compact.decoded().tolist() == [1.0 + 2**-8 - unit, 1.0 + 3 * 2**-8, -1.0 - 2**-8 + unit]
    before = weights.clone()
    compact.open()
    compact.close()
    assert torch.equal(weights, before)


@pytest.fixture
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    small = functools.partial(cut_into_buckets, max_elements=128)
    monkeypatch.setattr(optimizer_module, "cut_into_buckets", small)


def trained(dtype: torch.dtype, num_steps: int = 6, **options: object) -> tuple[list[object], list[torch.Tensor]]:
    ddp, optimizer = build(dtype, **options)
    outcomes: list[object] = [train_step(ddp, optimizer, index) for index in range(num_steps)]
    return outcomes, [parameter.detach().clone() for parameter in ddp.parameters()]


@pytest.mark.usefixtures("_small_buckets")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload", [False, True])
def test_fp32_everywhere_computes_the_same_bits(dtype: torch.dtype, offload: bool) -> None:
    expected = trained(dtype, **{**NARROW, "use_precision_aware_optimizer": False})
    found = trained(dtype, **NARROW, optimizer_cpu_offload=offload, optimizer_offload_fraction=0.5)
    assert found[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


@pytest.mark.usefixtures("_small_buckets")
def test_main_parameters_of_two_bytes_compute_the_same_weights() -> None:
    """No main parameter of these lies in the middle of two weights."""
    expected = trained(torch.bfloat16, **{**NARROW, "use_precision_aware_optimizer": False})
    found = trained(torch.bfloat16, **NARROW, main_params_dtype="fp16")
    assert found[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


@pytest.mark.usefixtures("_small_buckets")
@pytest.mark.parametrize(
    ("types", "tolerance"),
    [
        ({"exp_avg_dtype": "fp16", "exp_avg_sq_dtype": "fp16"}, 1e-4),
        ({"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}, 1e-3),
        ({"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16"}, 2e-2),
        ({"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}, 1e-1),
    ],
)
@pytest.mark.parametrize("offload", [False, True])
def test_narrow_moments_train_close_to_float64(types: dict[str, object], tolerance: float, offload: bool) -> None:
    """Six steps of 0.01 move a weight by about 0.06; the bounds are a share of that."""
    plain = {**NARROW, "use_precision_aware_optimizer": False, "adam_beta2": 0.95}
    _, expected = trained(torch.float64, **plain)
    _, found = trained(torch.float32, **NARROW, adam_beta2=0.95, **types, optimizer_cpu_offload=offload)
    distance = max((a.double() - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    assert 0.0 < distance < 0.06 * tolerance * 3
    exact = max((a.double() - b).abs().max().item() for a, b in zip(trained(torch.float32, **plain)[1], expected))
    assert distance > exact


@pytest.mark.parametrize(
    ("types", "bytes_an_element"),
    [
        ({}, 12.0),
        ({"main_params_dtype": "fp16"}, 10.0),
        ({"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}, 8.0),
        ({"main_params_dtype": "fp16", "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16"}, 5.0),
        ({"main_params_dtype": "fp16", "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}, 4.0),
    ],
)
def test_bytes_of_the_state_fall_as_promised(types: dict[str, object], bytes_an_element: float) -> None:
    ddp, optimizer = build(torch.bfloat16, **NARROW, **types)
    train_step(ddp, optimizer, 0)
    num_elements = sum(parameter.numel() for parameter in ddp.parameters())
    num_blocks = sum(-(-parameter.numel() // 128) for parameter in ddp.parameters())
    num_scaled = sum(dtype in ("fp16", "fp8") for name, dtype in types.items() if name.startswith("exp_avg"))
    held = sum(tensor.nbytes for tensor in optimizer.held_tensors())
    assert held == bytes_an_element * num_elements + num_scaled * num_blocks


@pytest.mark.parametrize("offload", [False, True])
def test_a_skipped_step_changes_no_bit(offload: bool) -> None:
    types = {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}
    types |= {} if offload else {"main_params_dtype": "fp16"}
    ddp, optimizer = build(torch.bfloat16, check=False, **NARROW, **types, optimizer_cpu_offload=offload)
    train_step(ddp, optimizer, 0)
    before = [tensor.clone() for tensor in (*optimizer.held_tensors(), *ddp.parameters())]
    assert not poisoned_step(ddp, optimizer, float("nan")).success
    after = (*optimizer.held_tensors(), *ddp.parameters())
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("second", ["fp16", "fp8"])
def test_a_checkpoint_holds_float32_and_is_stored_again_when_loaded(second: str) -> None:
    types = {"main_params_dtype": "fp16", "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": second}
    ddp, optimizer = build(torch.bfloat16, **NARROW, **types)
    train_step(ddp, optimizer, 0)
    saved = {name: tensor.clone() for name, (_, tensor) in optimizer.sharded_state().items()}
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    other_ddp, other = build(torch.bfloat16, **NARROW, **types)
    with torch.no_grad():
        for ours, theirs in zip(other_ddp.parameters(), ddp.parameters(), strict=True):
            ours.copy_(theirs)
    for name, (_, tensor) in other.sharded_state().items():
        tensor.copy_(saved[name])
    other.load_scalar_state(optimizer.scalar_state())
    assert train_step(ddp, optimizer, 1) == train_step(other_ddp, other, 1)
    assert all(torch.equal(a, b) for a, b in zip(other_ddp.parameters(), ddp.parameters(), strict=True))
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(other.held_tensors(), optimizer.held_tensors(), strict=True)
    )
    assert other.params_norm() == optimizer.params_norm()


def test_scales_are_powers_of_two_at_both_ends_of_the_range() -> None:
    for value in (3.4e38, 1e-38, 1e-44):
        compact = ScaledTensor(torch.full((128,), value), torch.float16)
        assert compact.decoded()[0].item() == pytest.approx(value, rel=2e-3 if value > 1e-40 else 0.2)


@pytest.mark.parametrize("dtype", ["fp16", "fp8"])
def test_a_scale_is_the_smallest_power_of_two_that_a_block_does_not_exceed(dtype: str) -> None:
    largest = torch.tensor([1.0, 0.75, 0.5, 1.0000001, 1.5, 2.0])
    blocks = torch.zeros(6, 128)
    blocks[:, 5] = -largest
    scaled, exponents = stored(blocks.view(-1), dtype).held()
    assert scaled.float().abs().max() == {"fp16": 2.0**15, "fp8": 2.0**8}[dtype]
    assert (exponents - exponents[0]).flatten().tolist() == [0, 0, -1, 1, 1, 1]


def test_the_random_bits_are_those_of_every_release() -> None:
    """A resumed run rounds as it would have without the interruption, also after an update of this package."""
    values = torch.linspace(-3.0, 5.0, 256).view(2, 128)
    words = random_words(values, 7)
    raw = values.view(torch.int32)
    for block, lane in ((0, 0), (0, 127), (1, 0), (1, 64)):
        word = int(raw[block, lane]) ^ (lane * 0x9E3779B1 + 7 * 0x85EBCA6B)
        for factor in (0x7FEB352D, 0x846CA68B):
            word &= 0xFFFFFFFF
            word = (word ^ (word >> 16)) * factor
        assert int(words[block, lane]) == (word & 0xFFFFFFFF) >> 16
