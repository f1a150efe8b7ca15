"""Triton kernel of AdamW: scaling, moments, update, and the rounded copy for the model in one pass over memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def adamw_program(
    gradient: tl.tensor,
    parameter: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    rounded: tl.tensor,
    is_second: tl.tensor,
    is_wanted: tl.tensor,
    multiplier: tl.tensor,
    corrections: tl.tensor,
    num_elements: tl.tensor,
    learning_rate: tl.tensor,
    first_decay: tl.tensor,
    second_decay: tl.tensor,
    rest1: tl.tensor,
    beta2: tl.tensor,
    rest2: tl.tensor,
    eps: tl.tensor,
    rates: tl.tensor,
    GRAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update one block if ``is_wanted``; elements of each ``GRAIN`` with ``is_second`` have the second weight decay.

    With ``rates``, the learning rate and the two weight decays are read from the device instead of the arguments.
    """
    if rates is not None:
        rate = tl.load(rates)
        learning_rate = rate.to(tl.float32)
        first_decay = (rate * tl.load(rates + 1)).to(tl.float32)
        second_decay = (rate * tl.load(rates + 2)).to(tl.float32)
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (offset < num_elements) & (tl.load(is_wanted) != 0)
    g = tl.load(gradient + offset, mask=inside, other=0.0).to(tl.float32) * tl.load(multiplier).to(tl.float32)
    p = tl.load(parameter + offset, mask=inside, other=0.0)
    decay = first_decay
    if is_second is not None:
        decay = tl.where(tl.load(is_second + offset // GRAIN, mask=inside, other=0) != 0, second_decay, first_decay)
    p -= decay * p
    m = tl.load(exp_avg + offset, mask=inside, other=0.0)
    m += rest1 * (g - m)
    v = beta2 * tl.load(exp_avg_sq + offset, mask=inside, other=0.0) + rest2 * g * g
    step_size = learning_rate / tl.load(corrections).to(tl.float32)
    root_scale = 1.0 / tl.sqrt_rn(tl.load(corrections + 1).to(tl.float32))
    p -= tl.div_rn(step_size * m, tl.sqrt_rn(v) * root_scale + eps)
    tl.store(exp_avg + offset, m, mask=inside)
    tl.store(exp_avg_sq + offset, v, mask=inside)
    tl.store(parameter + offset, p, mask=inside)
    if rounded is not None:
        tl.store(rounded + offset, p.to(rounded.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class AdamWNumbers:
    """Hyperparameters of a step; ``weight_decays`` are at most two, of which each parameter has one."""

    learning_rate: float
    weight_decays: tuple[float, ...]
    betas: tuple[float, float]
    eps: float


def update_adamw(
    gradient: torch.Tensor,
    parameter: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    rounded: torch.Tensor | None,
    is_second: torch.Tensor | None,
    is_wanted: torch.Tensor,
    multiplier: torch.Tensor,
    corrections: torch.Tensor,
    numbers: AdamWNumbers,
    grain: int,
    rates: torch.Tensor | None = None,
) -> None:
    """Update flat parameters and moments in place if ``is_wanted``, and write the parameters to ``rounded``.

    AdamW: Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101. The gradients are multiplied by ``multiplier``
    first. ``corrections`` are 1 - beta^t of both moments. Elements of blocks of ``grain`` with a non-zero ``is_second``
    have the second weight decay. ``rates`` are the learning rate and both weight decays, instead of those of
    ``numbers``. The arithmetic is float32.

    Shapes: ``gradient, rounded: [n]`` of any training dtype, ``parameter, exp_avg, exp_avg_sq: [n]`` float32,
    ``is_second: [ceil(n / grain)]`` uint8, ``is_wanted: []`` bool, ``multiplier: []``, ``corrections: [2]`` and
    ``rates: [3]`` float64.
    """
    first, *others = (numbers.learning_rate * decay for decay in numbers.weight_decays)
    (beta1, beta2), num_elements = numbers.betas, parameter.numel()
    adamw_program[(triton.cdiv(num_elements, _BLOCK),)](
        gradient, parameter, exp_avg, exp_avg_sq, rounded, is_second, is_wanted.view(torch.uint8), multiplier,
        corrections, num_elements, numbers.learning_rate, first, others[0] if others else first, 1.0 - beta1, beta2,
        1.0 - beta2, numbers.eps, rates, GRAIN=grain, BLOCK=_BLOCK,
    )  # fmt: skip
