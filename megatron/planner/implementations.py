"""The programs whose runs are predicted: what each keeps, and how fast what it calls is.

Every constant names its source. Three times and two amounts of memory are fitted by benchmarks/planner/run.py on the
measured runs in its folder. All others are counted, published, or assumed where they say so. The measured runs do not
tell ``pass_share`` and ``backward_share`` apart well: from 0.44 and 0.62, which the fit gives, to 0.56 and 0.53 the
mean error of a step's time stays between 0.98 and 1.10 %. Of these pairs the last has the smallest worst error, 3.1 %.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron.core.errors import ConfigurationError
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.planner.saved_by_megatron import (
    saved_by_local_layers,
    saved_by_megatron_bridge,
    saved_by_transformer_engine,
)

SavedBytes = Callable[[GPTConfig, int, int, int], Mapping[str, int]]
"""Return by part what a layer keeps of a micro-batch, from (model, sequence length, micro-batch size, layer number)."""


@dataclass(frozen=True, kw_only=True)
class FittedTimes:
    """Hold the constants of time that measured runs decide.

    ``pass_share`` is the part of the memory's bandwidth that passes between products reach, ``backward_share`` what
    the backward pass of attention, with all that surrounds it, reaches of its kernel's published rate on Hopper, and
    ``ring_share`` what attention whose keys travel around a ring reaches of the rate of attention that is whole.
    """

    pass_share: float
    backward_share: float
    ring_share: float


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """Hold one program: what a layer keeps, what is cached, which kernels it calls, what it cannot run.

    ``saved`` describes what a layer of another program keeps; None where the layers are those of this one, which are
    traced. ``is_traced`` says that its loss and its times are traced too.
    ``wide_logit_bytes`` are those of one logit at the fullest moment beside the model's own type,
    ``half_gradient_bytes`` those of an fp16 model's gradient while layers run. Beside fp8 a program may keep no weights
    in 16 bits. One without flash attention has its scores in memory. ``fuses_permutation`` says that tokens
    are sorted by expert in one kernel, ``loops_over_experts`` that each expert's products are launched for themselves
    in 16 bits too. ``expert_imbalance`` is the number of tokens of the most loaded rank divided by the mean: the
    GEMMs of its experts and its token exchanges take that much longer.
    """

    name: str
    saved: SavedBytes | None
    times: FittedTimes
    wide_logit_bytes: int
    half_gradient_bytes: int = 4
    caches_float8_weights: bool = False
    keeps_half_weights: bool = True
    reduces_in_half: bool = False
    has_flash_attention: bool = True
    is_rotation_fused: bool = True
    attention_on_hopper: str = "cudnn"
    waits_for_neighbours: bool = True
    fuses_weight_gradients: bool = True
    offloads_in_pipelines: bool = False
    offloads_beside_recompute: bool = False
    takes_any_microbatches: bool = False
    fuses_permutation: bool = False
    loops_over_experts: bool = False
    schedules_zero_bubble: bool = False
    is_traced: bool = False
    expert_imbalance: float = 1.0


_PUBLISHED = FittedTimes(pass_share=0.85, backward_share=1.0, ring_share=0.85)
"""No run of these kernels is known: bandwidth as BabelStream's, attention as published."""

MEGATRON_TE = Implementation(
    name="megatron-te",
    saved=saved_by_transformer_engine,
    times=FittedTimes(pass_share=0.56, backward_share=0.53, ring_share=0.83),
    wide_logit_bytes=4,
    half_gradient_bytes=2,
    caches_float8_weights=True,
    is_rotation_fused=False,
    fuses_permutation=True,
    loops_over_experts=True,
)
MEGATRON_BRIDGE = dataclasses.replace(
    MEGATRON_TE,
    name="megatron-bridge",
    saved=saved_by_megatron_bridge,
    times=dataclasses.replace(MEGATRON_TE.times, backward_share=1.0),
    is_rotation_fused=True,
    keeps_half_weights=False,
    reduces_in_half=True,
)
"""Megatron Bridge with transformer-engine 2: attention is cuDNN's; assumed are weights in fp8 alone and gradients in
16 bits, without which a published run would not fit."""
MEGATRON_LOCAL = dataclasses.replace(
    MEGATRON_TE,
    name="megatron-local",
    saved=saved_by_local_layers,
    wide_logit_bytes=8,
    has_flash_attention=False,
    fuses_weight_gradients=False,
)
MEGATRON_2020 = dataclasses.replace(MEGATRON_LOCAL, name="megatron-2020", wide_logit_bytes=14)
TORCHTITAN = Implementation(
    name="torchtitan",
    saved=None,
    times=_PUBLISHED,
    wide_logit_bytes=8,
    attention_on_hopper="flash",
    is_rotation_fused=False,
    takes_any_microbatches=True,
    schedules_zero_bubble=True,
)
OURS = Implementation(
    name="ours",
    saved=None,
    is_traced=True,
    times=_PUBLISHED,
    # Triton's cross-entropy writes the gradient over the logits.
    wide_logit_bytes=0,
    waits_for_neighbours=False,
    offloads_in_pipelines=True,
    offloads_beside_recompute=True,
    takes_any_microbatches=True,
    schedules_zero_bubble=True,
)

IMPLEMENTATIONS: Mapping[str, Implementation] = {
    each.name: each for each in (OURS, MEGATRON_TE, MEGATRON_BRIDGE, MEGATRON_LOCAL, MEGATRON_2020, TORCHTITAN)
}
"""Implementations by the names that ``--implementation`` takes."""


def find_implementation(name: str, expert_imbalance: float | None = None) -> Implementation:
    """Return an implementation by name; ``expert_imbalance`` is 1 if it is not given.

    Raises:
        ConfigurationError: nothing is known of this name, or the load of the experts is below the mean.
    """
    if name not in IMPLEMENTATIONS:
        raise ConfigurationError(f"--implementation {name} is not known; possible: {', '.join(IMPLEMENTATIONS)}")
    if expert_imbalance is None:
        return IMPLEMENTATIONS[name]
    if not 1.0 <= expert_imbalance < math.inf:
        raise ConfigurationError(
            f"--expert-imbalance {expert_imbalance:g} is below 1 or not finite; give how many times the mean number of "
            "tokens the most loaded rank gets, such as 1.2"
        )
    return dataclasses.replace(IMPLEMENTATIONS[name], expert_imbalance=expert_imbalance)


def implementation_of_software(description: str, has_flash_attention: bool) -> Implementation:
    """Return the implementation that a run's description of its software means."""
    words = description.lower()
    if "torchtitan" in words:
        return TORCHTITAN
    if not has_flash_attention:
        return MEGATRON_2020 if "2020" in words or "deepspeedexamples" in words else MEGATRON_LOCAL
    return MEGATRON_BRIDGE if "bridge" in words or "nemo" in words else MEGATRON_TE
