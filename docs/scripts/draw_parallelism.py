"""Draw how each kind of parallelism divides the work; with --check, only compare.

python docs/scripts/draw_parallelism.py

The drawings are made from the code that divides the work: ranks and groups from the parallel state, boxes of matrices
from the ``ParamSpec`` of each parameter, stages from the stage layout, buckets and shards from the parameter layout,
chunks of sequences from the partition, and schedules from the simulator. They are in ``docs/images/*.svg``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.core.config_base import from_fields  # noqa: E402
from megatron.core.context_parallel.partition import chunks_of  # noqa: E402
from megatron.core.device import Device  # noqa: E402
from megatron.core.distributed.param_layout import plan_layout  # noqa: E402
from megatron.core.models.gpt.gpt_config import GPTConfig  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.parallel_config import ParallelConfig, ParallelSizes  # noqa: E402
from megatron.core.parallel_state import ExpertGroups, ParallelState, describe_parallel_state  # noqa: E402
from megatron.core.pipeline_parallel.schedule_actions import build_schedule  # noqa: E402
from megatron.core.pipeline_parallel.simulator import Durations, simulate  # noqa: E402
from megatron.core.pipeline_parallel.stage_layout import plan_stage_layout  # noqa: E402
from megatron.core.sharding import Box, ParamSpec, spec_of  # noqa: E402
from megatron.core.tensor_parallel.random import RngStreams  # noqa: E402
from megatron.planner.pipeline_chart import draw_svg  # noqa: E402

IMAGES = ROOT / "docs" / "images"
CELL = 34
SHARED = "#d9d9d9"


def color(number: int) -> str:
    """Return the color of a rank or group, which differs from the colors of its neighbors."""
    return f"hsl({(205 + 137 * number) % 360}, 62%, 72%)"


def text(x: float, y: float, words: str, *, size: int = 12, anchor: str = "start") -> str:
    """Return a line of text at its baseline."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}">{escape(words)}</text>'


def cell(x: float, y: float, width: float, height: float, fill: str, words: str = "") -> str:
    """Return a rectangle with words in its middle."""
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="white"/>'
    return shape + (text(x + width / 2, y + height / 2 + 4, words, anchor="middle") if words else "")


def svg(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """Return an SVG document with a title above its parts, which begin 40 pixels below the top."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="sans-serif" fill="#222">'
    )
    paper = f'<rect width="{width:g}" height="{height:g}" fill="white"/>'
    return "\n".join([head, paper, text(14, 24, title, size=15), *parts, "</svg>"]) + "\n"


def rank_grid() -> str:
    """Draw sixteen ranks once for each kind of process group; ranks of one color form a group."""
    sizes = ParallelSizes(pp=2, dp=2, cp=2, tp=2)
    states = [describe_parallel_state(rank, sizes.world_size, sizes) for rank in range(sizes.world_size)]
    panels: dict[str, Callable[[ParallelState], tuple[int, ...]]] = {
        "TP: shards of each matrix": lambda state: state.tp.ranks,
        "CP: parts of each sequence": lambda state: state.cp.ranks,
        "DP: different samples": lambda state: state.dp.ranks,
        "PP: different layers": lambda state: state.pp.ranks,
        "DP × CP: gradient reduction": lambda state: state.dp_cp.ranks,
        "PP × TP: one model replica": lambda state: state.model_parallel.ranks,
    }
    parts = []
    for number, (title, group_of) in enumerate(panels.items()):
        left, top = 80 + number % 3 * 260, 62 + number // 3 * 222
        parts.append(text(left - 40, top - 2, title, size=13))
        for rank, state in enumerate(states):
            place, groups = state.place, sorted({group_of(each) for each in states})
            x = left + (2 * place["cp"] + place["tp"]) * CELL
            y = top + 26 + (2 * place["pp"] + place["dp"]) * CELL
            parts.append(cell(x, y, CELL, CELL, color(groups.index(group_of(state))), str(rank)))
            if place["pp"] == place["dp"] == 0:
                parts.append(text(x + CELL / 2, top + 20, f"{place['cp']},{place['tp']}", size=10, anchor="middle"))
            if place["cp"] == place["tp"] == 0:
                parts.append(text(left - 6, y + 21, f"{place['pp']},{place['dp']}", size=10, anchor="end"))
        parts.append(text(left + 4 * CELL + 8, top + 20, "cp,tp", size=10))
        parts.append(text(left - 6, top + 40 + 4 * CELL, "pp,dp", size=10, anchor="end"))
    return svg(800, 500, "16 ranks: PP 2 × DP 2 × CP 2 × TP 2. Ranks of one color form a process group.", parts)


def specs_of(config: GPTConfig, state: ParallelState) -> dict[str, ParamSpec]:
    """Return the ``ParamSpec`` of each parameter of a rank; the model is on the meta device."""
    rng = RngStreams(Device("cpu"), 0, state.place)
    model = GPTModel(config, state.tp, rng, seed=None, device="meta", experts=ExpertGroups.of(state))
    return {spec.name: spec for spec in map(spec_of, model.parameters())}


def small_model(**fields: object) -> GPTConfig:
    """Return a small model with the architecture of Llama, so that each box of a matrix can be drawn."""
    shape: dict[str, object] = {
        "num_layers": 1, "hidden_size": 64, "num_attention_heads": 8, "group_query_attention": True,
        "num_query_groups": 4, "ffn_hidden_size": 96, "swiglu": True, "add_bias_linear": False,
        "normalization": "RMSNorm", "position_embedding_type": "rope", "vocab_size": 112,
        "make_vocab_size_divisible_by": 28, "max_position_embeddings": 64,
    }  # fmt: skip
    return from_fields(GPTConfig, **(shape | fields))


def draw_box(x: float, y: float, box: Box, scale: float, fill: str, words: str = "") -> str:
    """Draw a box of a matrix, or of a vector as a thin line; rows go down."""
    row, column = (*box.offset, 0)[:2] if len(box.offset) == 1 else box.offset[-2:]
    rows, columns = (*box.shape, 4)[:2] if len(box.shape) == 1 else box.shape[-2:]
    return cell(x + column * scale, y + row * scale, columns * scale, rows * scale, fill, words)


def sharded_matrices() -> str:
    """Draw the shards of a layer's matrices on four tensor-parallel ranks."""
    sizes = ParallelSizes(tp=4)
    config = small_model(tensor_model_parallel_size=4)
    held = [specs_of(config, describe_parallel_state(rank, 4, sizes)) for rank in range(4)]
    parts, x, scale = [], 20.0, 1.5
    layers = ("word_embeddings", "input_layernorm", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    for layer in layers:
        (name,) = [name for name in held[0] if f"{layer}." in name]
        whole = held[0][name]
        is_shared = "tp" in whole.replicated_axes
        parts.append(text(x, 62, layer, size=11))
        parts.append(text(x, 78, f"{list(whole.global_shape)}", size=10))
        for rank, specs in enumerate(held):
            for shard in specs[name].shards:
                words = "" if is_shared or len(whole.global_shape) == 1 or shard.global_box.shape[0] < 10 else str(rank)
                fill = SHARED if is_shared else color(rank)
                parts.append(draw_box(x, 90, shard.global_box, scale, fill, words))
        x += max(125.0, (whole.global_shape[-1] if len(whole.global_shape) > 1 else 4) * scale + 25)
    legend = [part for rank in range(4) for part in legend_entry(20 + 90 * rank, 396, color(rank), f"rank {rank}")]
    legend += legend_entry(380, 396, SHARED, "replicated on every rank")
    title = "Shards of the embedding and of one layer on 4 tensor-parallel ranks (rows × columns)"
    return svg(x, 424, title, [*parts, *legend])


def legend_entry(x: float, y: float, fill: str, words: str) -> list[str]:
    """Return a patch of color and its meaning."""
    return [cell(x, y, 14, 14, fill), text(x + 20, y + 12, words)]


def experts() -> str:
    """Draw eight ranks in the grid of experts, and the ranks that hold each shard of four experts."""
    sizes = ParallelSizes(dp=4, tp=2, ep=2, etp=2)
    config = small_model(
        num_experts=4, moe_ffn_hidden_size=48, tensor_model_parallel_size=2, sequence_parallel=True,
        expert_model_parallel_size=2, expert_tensor_parallel_size=2,
    )  # fmt: skip
    states = [describe_parallel_state(rank, 8, sizes) for rank in range(8)]
    held = [specs_of(config, state) for state in states]
    (name,) = [name for name, spec in held[0].items() if spec.is_expert and "fc2" in name]
    whole = held[0][name].global_shape
    holders: dict[Box, list[int]] = {}
    for rank, specs in enumerate(held):
        for shard in specs[name].shards:
            for expert in range(shard.global_box.shape[0]):
                offset, shape = shard.global_box.offset, shard.global_box.shape
                box = Box((offset[0] + expert, *offset[1:]), (1, *shape[1:]))
                holders.setdefault(box, []).append(rank)
    parts, sets = [], sorted({tuple(ranks) for ranks in holders.values()})
    for rank, state in enumerate(states):
        left = 20 + (rank % 2) * CELL + (rank // 2) * (2 * CELL + 16)
        parts.append(cell(left, 70, CELL, CELL, color(sets.index(state.expert_dp.ranks)), str(rank)))
        if rank % 2 == 0:
            parts.append(text(left, 62, f"DP {state.place['dp']}", size=11))
    parts.append(text(20, 122, "Ranks of one color hold the same shards of the same experts (EDP 2)"))
    scale = 1.9
    for box, ranks in sorted(holders.items(), key=lambda item: item[0].offset):
        x = 20 + box.offset[0] * (whole[2] * scale + 40)
        fill = color(sets.index(tuple(ranks)))
        parts.append(draw_box(x, 156, box, scale, fill, " ".join(map(str, ranks))))
        if not any(box.offset[1:]):
            parts.append(text(x, 148, f"expert {box.offset[0]}, {list(whole[1:])}", size=11))
    title = "8 ranks, DP 4 × TP 2; experts: EDP 2 × EP 2 × ETP 2. linear_fc2 of each expert"
    return svg(660, 156 + whole[1] * scale + 20, title, parts)


def pipeline_stages() -> str:
    """Draw eight layers on the ranks of a pipeline, with one model chunk per rank and with two."""
    parts = []
    for number, chunks in enumerate((1, 2)):
        config = ParallelConfig(
            pipeline_model_parallel_size=4, num_virtual_stages_per_pipeline_rank=chunks if chunks > 1 else None
        )
        layout = plan_stage_layout(config, 8)
        top = 56 + number * 190
        words = f"{chunks} model chunk{'s' * (chunks > 1)} per rank: {layout.describe()}"
        parts.append(text(14, top + 4, words, size=13))
        for rank in range(4):
            parts.append(text(14, top + 36 + rank * CELL, f"rank {rank}"))
            for chunk, stage in enumerate(layout.chunks(rank)):
                names = [(0, "E")] * stage.has_embedding + [(layer + 1, str(layer)) for layer in stage.layer_numbers]
                names += [(9, "L")] * stage.has_loss
                for column, name in names:
                    x = 74 + column * CELL
                    parts.append(cell(x, top + 15 + rank * CELL, CELL, CELL, color(rank + 4 * chunk), name))
    return svg(430, 420, "8 layers on 4 pipeline ranks (E: embedding, L: loss)", parts)


def schedule(name: str, chunks: int) -> str:
    """Draw a pipeline schedule of four ranks and eight micro-batches; a pass through one of n chunks takes 1/n."""
    part = 1 / chunks
    durations = Durations(forward=part, backward=2 * part, backward_input=part, backward_weight=part)
    return draw_svg(simulate(build_schedule(name, 4, 8, chunks), chunks, durations), 1300)


def sharded_optimizer() -> str:
    """Draw the flat gradient buffer of a layer, its buckets, and the four shards of each bucket."""
    state = describe_parallel_state(0, 1)
    specs = list(specs_of(small_model(), state).values())
    sizes = [Box((), spec.global_shape).num_elements for spec in specs]
    layout = plan_layout(sizes, bucket_size=9000, num_shards=4)
    scale = 1000 / layout.num_elements
    parts = []
    for row, words in enumerate(("parameters", "buckets", "shard of rank")):
        parts.append(text(14, 72 + row * 50, words))
    for each in layout.ranges:
        name = specs[each.index].name.split(".")[-2]
        width = each.num_elements * scale
        words = name if width > 7 * len(name) else ""
        parts.append(cell(110 + each.position * scale, 50, max(width, 1), CELL, SHARED, words))
    for number, bucket in enumerate(layout.buckets):
        width = bucket.num_elements * scale
        parts.append(cell(110 + bucket.start * scale, 100, width, CELL, "#bfbfbf", str(number) if width > 20 else ""))
        for rank in range(4):
            start, end = bucket.shard(rank, 4)
            width = (end - start) * scale
            words = str(rank) if width > 12 else ""
            parts.append(cell(110 + start * scale, 150, width, CELL, color(rank), words))
    title = f"A flat gradient buffer of {layout.num_elements:,} elements, last layer first: buckets and their 4 shards"
    return svg(1130, 204, title, parts)


def context_chunks(size: int = 4) -> str:
    """Draw the part of causal attention that each rank computes; all ranks compute equally many pairs of chunks."""
    owner = {chunk: rank for rank in range(size) for chunk in chunks_of(rank, size)}
    parts, work = [], dict.fromkeys(range(size), 0.0)
    for query, rank in owner.items():
        parts.append(text(86, 114 + query * CELL, f"chunk {query}", anchor="end"))
        parts.append(cell(96, 92 + query * CELL, CELL, CELL, color(rank), str(rank)))
        parts.append(text(160 + (query + 0.5) * CELL, 82, str(query), anchor="middle"))
        for key in range(2 * size):
            is_seen = key <= query
            work[rank] += 0.5 if key == query else float(is_seen)
            fill = color(rank) if is_seen else "#f4f4f4"
            parts.append(cell(160 + key * CELL, 92 + query * CELL, CELL, CELL, fill, "½" if key == query else ""))
    parts.append(text(96, 64, "rank"))
    parts.append(text(160, 64, "keys of chunk"))
    left = 180 + 2 * size * CELL
    for rank in range(size):
        chunks = " and ".join(map(str, chunks_of(rank, size)))
        entry = f"rank {rank}: chunks {chunks}, {work[rank]:g} pairs of chunks"
        parts += legend_entry(left, 96 + 26 * rank, color(rank), entry)
    height = 110 + 2 * size * CELL
    title = f"Causal attention over {2 * size} chunks of a sequence on {size} context-parallel ranks"
    return svg(left + 270, height, title, parts)


DRAWINGS: dict[str, Callable[[], str]] = {
    "rank_grid": rank_grid,
    "sharded_matrices": sharded_matrices,
    "experts": experts,
    "pipeline_stages": pipeline_stages,
    "schedule_1f1b": lambda: schedule("1f1b", 1),
    "schedule_interleaved": lambda: schedule("interleaved", 2),
    "schedule_zero_bubble": lambda: schedule("zero-bubble", 1),
    "sharded_optimizer": sharded_optimizer,
    "context_chunks": context_chunks,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the drawings, or compare them, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a drawing is out of date")
    is_check = parser.parse_args(argv).check
    stale = []
    for name, draw in DRAWINGS.items():
        path, drawn = IMAGES / f"{name}.svg", draw()
        if is_check and not (path.is_file() and path.read_text(encoding="utf-8") == drawn):
            stale.append(path.name)
        elif not is_check:
            path.write_text(drawn, encoding="utf-8")
    if stale:
        print(f"{', '.join(stale)}: out of date; run python docs/scripts/draw_parallelism.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
