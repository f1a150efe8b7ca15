"""Randomly drawn layouts and sizes."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from dataclasses import replace

from megatron.verification.cells import (
    DATA,
    EXCHANGES,
    MAX_WORLD_SIZE,
    RECOMPUTE,
    SHAPES,
    SHARDING,
    Cell,
    Layout,
    make_cell,
)
from megatron.verification.model_cells import (
    ATTENTION_SHAPES,
    DISPATCHERS,
    EXPERT_SHAPES,
    LATENT_SHAPES,
    PREDICTION_SHAPES,
    ExpertLayout,
    make_expert_cell,
)
from megatron.verification.training_cells import (
    CLIPPING,
    FUSED_LORA,
    GROUPS,
    LORA,
    MUON,
    MUP,
    STILL,
    UNSPLIT_MUON,
    WEIGHTS,
    Z_LOSS,
    hybrid,
    with_optimizer_on_host,
)


def fuzz(seed: int, count: int) -> list[Cell]:
    """Draw ``count`` random configurations, some of which must be rejected.

    Each configuration depends only on the seed and its number. Every fourth model is a MoE model, and every fourth one
    has MLA, MTP, attention sinks or layers without positions. Some layouts with data parallelism use FSDP, and some
    have several instances of the distributed optimizer. Some configurations have another recipe than Adam on all
    weights.
    """
    cells = []
    for number in range(count):
        cell = _draw(random.Random(f"{seed}/{number}"), number)
        cell = _draw_copies(cell, random.Random(f"{seed}/{number}/sharding"))
        cells.append(_draw_recipe(cell, random.Random(f"{seed}/{number}/recipe")))
    return cells


_SHARE_OF_WILD = 0.15
"""Fraction of the random configurations whose sizes are drawn independently of the layout."""

_STRATEGY = "--data-parallel-sharding-strategy"
_SHARE_OF_SHARDED = 0.7
"""Fraction of the configurations with sharded optimizer state that have sharded weights or several instances."""

_RECIPES = (MUON, UNSPLIT_MUON, Z_LOSS, GROUPS, CLIPPING, MUP)
_WITHOUT_ADAPTERS = ("--mtp-num-layers", "--multi-latent-attention", WEIGHTS)
"""Flags that are incompatible with low-rank adapters."""
_SHARE_OF_RECIPES = 0.3
"""Fraction of the random configurations with one of these recipes, or with the optimizer state on the host."""

_LATENT_EXPERTS = ("mixtral", "gpt2-experts", "deepseek-experts")
"""MoE shapes that support MLA, which has rotary positions (see "dropping") and no QKV bias."""


def _draw(generator: random.Random, number: int) -> Cell:
    if number % 4 == 3:
        return _draw_experts(generator, number)
    if number % 4 == 1:
        return _draw_special(generator, number)
    layout = _draw_layout(generator)
    shape = generator.choice(tuple(SHAPES))
    data = generator.choice(tuple(DATA))
    is_wild = generator.random() < _SHARE_OF_WILD
    extra = _draw_sizes(generator) if is_wild else _draw_fitting_sizes(generator, layout, SHAPES[shape])
    cell = make_cell(shape, layout, data, extra, num_layers=int(extra[1]))
    return replace(cell, name=f"#{number} {shape} {data} {layout.name} {' '.join(extra)}")


def _draw_copies(cell: Cell, generator: random.Random) -> Cell:
    """Redraw the sharding strategy and the number of instances."""
    flags = list(cell.layout_flags)
    place = flags.index(_STRATEGY) + 1 if _STRATEGY in flags else None
    if place is None or generator.random() >= _SHARE_OF_SHARDED:
        return cell
    if generator.random() < 0.7:
        name = cell.name.replace(f"-{flags[place]}", f"-{WEIGHTS}", 1)
        flags[place] = WEIGHTS
        cell = replace(cell, name=name, layout_flags=tuple(flags))
    tp, pp = _size(flags, "--tensor-model-parallel-size"), _size(flags, "--pipeline-model-parallel-size")
    of_expert = _size(flags, "--expert-model-parallel-size") * _size(flags, "--expert-tensor-parallel-size", tp)
    stage = cell.world_size // pp
    alike = math.gcd(stage // tp, stage // of_expert)
    fitting = [number for number in range(2, stage // tp) if alike % number == 0]
    return hybrid(cell, generator.choice(fitting)) if fitting and generator.random() < 0.8 else cell


def _draw_recipe(cell: Cell, generator: random.Random) -> Cell:
    """Draw another optimizer, loss or rates, adapters instead of all weights, or the optimizer state on the host."""
    if generator.random() >= _SHARE_OF_RECIPES:
        return cell
    if generator.random() < 0.15:
        return with_optimizer_on_host(cell)
    recipes = list(_RECIPES)
    if not any(flag in cell.flags for flag in _WITHOUT_ADAPTERS):
        still = STILL if "--moe-router-enable-expert-bias" in cell.flags else ()
        recipes += [(*LORA, *still), (*MUON, *LORA, *still)] if "--num-experts" in cell.flags else [LORA, FUSED_LORA]
    recipe = generator.choice(recipes)
    return replace(cell, name=f"{cell.name} {' '.join(recipe)}", model_flags=(*cell.model_flags, *recipe))


def _size(flags: Sequence[str], name: str, otherwise: int = 1) -> int:
    return int(flags[flags.index(name) + 1]) if name in flags else otherwise


def _draw_special(generator: random.Random, number: int) -> Cell:
    """Draw a model with MLA, with MTP, with both, or with attention sinks or layers without positions."""
    layout = _draw_layout(generator)
    shape = generator.choice((*LATENT_SHAPES, *PREDICTION_SHAPES, *ATTENTION_SHAPES))
    if shape in LATENT_SHAPES and generator.random() < 0.3:
        layout = replace(layout, recompute=("selective", "mla_up_proj", "mlp"))
    data = generator.choice(tuple(DATA))
    flags = (LATENT_SHAPES | PREDICTION_SHAPES | ATTENTION_SHAPES)[shape]
    if shape in LATENT_SHAPES:
        sizes = _draw_fitting_sizes(generator, layout, ())
        # Every head has its own key.
        sizes = (*sizes, "--num-query-groups", sizes[3], *_draw_further(generator))
    else:
        sizes = _draw_fitting_sizes(generator, layout, flags)
    cell = make_cell("gpt2", layout, data, (*flags, *sizes), num_layers=int(sizes[1]))
    return replace(cell, name=f"#{number} {shape} {data} {layout.name} {' '.join(sizes)}")


def _draw_further(generator: random.Random) -> tuple[str, ...]:
    return ("--mtp-num-layers", generator.choice("12")) if generator.random() < 0.4 else ()


def _draw_experts(generator: random.Random, number: int) -> Cell:
    """Draw a MoE model and its expert parallelism; some layouts do not fit and are rejected."""
    shape = generator.choice(tuple(EXPERT_SHAPES))
    drawn = _draw_layout(generator)
    ranks = drawn.tp * drawn.cp * drawn.dp
    layout = ExpertLayout(
        **{field.name: getattr(drawn, field.name) for field in dataclasses.fields(drawn)},
        ep=generator.choice([n for n in (1, 2, 4, 8) if n <= ranks]),
        etp=generator.choice((None, None, 1, 2)),
        dispatcher="alltoall" if shape == "dropping" else generator.choice(DISPATCHERS),
    )
    if generator.random() < 0.3:
        parts = ["moe_act", "core_attn", "layernorm", "moe"]
        parts += ["shared_experts"] if "--moe-shared-expert-intermediate-size" in EXPERT_SHAPES[shape] else []
        layout = replace(layout, recompute=("selective", *generator.sample(parts, 2)))
    # The shapes' lists select the MoE layers among four layers.
    batch = layout.dp * generator.randint(1, 12 // layout.dp)
    data = generator.choice(tuple(DATA))
    is_latent = shape in _LATENT_EXPERTS and generator.random() < 0.4
    extra = (*(LATENT_SHAPES["latent"] if is_latent else ()), *_draw_further(generator))
    cell = make_expert_cell(shape, layout, data, (*_sizes(4, 4, 6, 1, batch, 24), *extra))
    return replace(cell, name=f"#{number} {cell.name}")


def _draw_layout(generator: random.Random) -> Layout:
    while True:
        pp = generator.choice((1, 1, 2, 2, 3, 4))
        virtual_stages = generator.choice((1, 1, 2, 3)) if pp > 1 or generator.random() < 0.05 else 1
        layout = Layout(
            tp=generator.choice((1, 1, 2, 2, 3, 4)),
            sequence_parallel=generator.random() < 0.5,
            pp=pp,
            virtual_stages=virtual_stages,
            schedule="zero-bubble" if virtual_stages == 1 and generator.random() < 0.25 else None,
            cp=generator.choice((1, 1, 2, 3, 4)),
            cp_comm_type=generator.choice(EXCHANGES),
            dp=generator.choice((1, 2, 3, 4)),
            sharding=generator.choice(SHARDING),
            overlap=generator.random() < 0.5,
            recompute=generator.choice(RECOMPUTE),
        )
        if layout.tp == 1 and layout.sequence_parallel and generator.random() < 0.9:
            layout = replace(layout, sequence_parallel=False)
        if layout.world_size <= MAX_WORLD_SIZE:
            return layout


def _sizes(layers: int, heads: int, width: int, micro_batch: int, batch: int, length: int) -> tuple[str, ...]:
    return (
        *("--num-layers", str(layers), "--num-attention-heads", str(heads), "--hidden-size", str(heads * width)),
        *("--ffn-hidden-size", "48", "--micro-batch-size", str(micro_batch), "--global-batch-size", str(batch)),
        *("--seq-length", str(length), "--max-position-embeddings", str(length)),
    )


def _draw_sizes(generator: random.Random) -> tuple[str, ...]:
    return _sizes(
        generator.choice((2, 3, 4, 6)),
        generator.choice((2, 4, 6)),
        generator.choice((4, 6)),
        generator.choice((1, 2)),
        generator.choice((4, 6, 8, 12)),
        generator.choice((12, 16, 24)),
    )


def _draw_fitting_sizes(generator: random.Random, layout: Layout, flags: tuple[str, ...]) -> tuple[str, ...]:
    """Draw sizes that the layout divides evenly; a shape's number of key-value heads may still not fit."""
    groups = int(flags[flags.index("--num-query-groups") + 1]) if "--num-query-groups" in flags else 1
    heads = math.lcm(layout.tp, groups)
    if layout.cp > 1 and layout.cp_comm_type == "a2a":
        heads = layout.tp * math.lcm(max(groups // layout.tp, 1), layout.cp)
        heads = math.lcm(heads, groups)
    chunks = layout.pp * layout.virtual_stages
    micro_batch = generator.choice((1, 1, 2))
    unit = 2 * layout.cp * (layout.tp if layout.sequence_parallel else 1)
    return _sizes(
        chunks * generator.randint(1, max(1, 6 // chunks)),
        heads * generator.randint(1, max(1, 4 // heads)),
        generator.choice((4, 6)),
        micro_batch,
        micro_batch * layout.dp * generator.randint(1, max(1, 12 // (micro_batch * layout.dp))),
        unit * generator.randint(1, max(1, 24 // unit)),
    )
