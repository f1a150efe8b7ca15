"""Draw a pipeline schedule, planned or recorded, with its bubble and its memory.

python tools/visualize_pipeline.py --pipeline-model-parallel-size 4 --num-microbatches 8 --schedule zero-bubble
"""

from __future__ import annotations

import argparse
import shutil
from colorsys import hsv_to_rgb
from pathlib import Path

from megatron.cli.arguments import Parser
from megatron.cli.drawing import BarRow, add_drawing_arguments, chosen_format, put_text, write_png
from megatron.core.errors import ConfigurationError, InputError
from megatron.core.pipeline_parallel import (
    SCHEDULES,
    Durations,
    Pass,
    StagePlace,
    Timeline,
    build_schedule,
    default_schedule,
    read_timeline,
    simulate,
    with_deferred_grads,
)
from megatron.planner import HUES, LETTERS, draw_svg, label, rows_of, summary, title

OUTPUT_WEIGHT_HELP = "duration of the output layer's weight gradient within a backward pass (a quarter of it)"
LEGEND = "F forward   B backward (of the input where W follows)   W backward of the weights   "
LARGEST = 1 << 22


def build_parser() -> Parser:
    """Build the command's parser."""
    parser = Parser(prog="visualize_pipeline.py", description=__doc__, allow_abbrev=False)
    plan = parser.add_argument_group("plan")
    plan.add_argument("--pipeline-model-parallel-size", type=int, default=4, help="pipeline-parallel size (4)")
    plan.add_argument("--num-virtual-stages-per-pipeline-rank", type=int, default=1, help="model chunks per rank (1)")
    plan.add_argument("--num-microbatches", type=int, help="micro-batches per iteration, instead of the batch sizes")
    plan.add_argument("--global-batch-size", type=int, help="samples per iteration")
    plan.add_argument("--micro-batch-size", type=int, default=1, help="samples per micro-batch (1)")
    plan.add_argument("--data-parallel-size", type=int, default=1, help="data-parallel size (1)")
    plan.add_argument("--schedule", choices=tuple(SCHEDULES), help="pipeline schedule (the default of training)")
    plan.add_argument(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        type=int,
        help="consecutive micro-batches per model chunk (about the pipeline size)",
    )
    for name, value in (("forward", 1.0), ("backward", 2.0), ("backward-input", 1.0), ("backward-weight", 1.0)):
        plan.add_argument(
            f"--{name}-time", type=float, default=value, help=f"duration of a {name} pass of a chunk ({value})"
        )
    plan.add_argument("--transfer-time", type=float, default=0.0, help="duration of a transfer between ranks (0.0)")
    plan.add_argument("--output-weight-time", type=float, help=OUTPUT_WEIGHT_HELP)
    plan.add_argument("--delay-wgrad-compute", action="store_true", help="split each backward pass (B, W)")
    plan.add_argument(
        "--defer-embedding-wgrad-compute",
        action="store_true",
        help="defer the gradients of the output layer's weight (O) to the end",
    )
    plan.add_argument("--wgrad-deferral-limit", type=int, default=0, help="number of deferred micro-batches (0: all)")
    parser.add_argument("--recorded", type=Path, metavar="FILE", help="draw a recorded run instead of a plan")
    add_drawing_arguments(parser)
    parser.add_argument("--width", type=int, help="width of the text in columns, or of the drawing in pixels")
    return parser


def plan_timeline(arguments: argparse.Namespace) -> tuple[Timeline, str]:
    """Simulate a schedule; return its timeline and a sentence on the time saved by deferred weight gradients.

    Raises:
        ConfigurationError: the arguments are invalid, with all reasons.
    """
    pp, chunks = arguments.pipeline_model_parallel_size, arguments.num_virtual_stages_per_pipeline_rank
    times = {
        name: getattr(arguments, f"{name}_time")
        for name in ("forward", "backward", "backward_input", "backward_weight", "transfer")
    }
    output_weight = times["backward"] / 4 if arguments.output_weight_time is None else arguments.output_weight_time
    times["output_weight"] = output_weight
    problems = [
        f"--{name} {value} must be 1 or more"
        for name, value in (
            ("pipeline-model-parallel-size", pp),
            ("num-virtual-stages-per-pipeline-rank", chunks),
            ("micro-batch-size", arguments.micro_batch_size),
            ("data-parallel-size", arguments.data_parallel_size),
        )
        if value < 1
    ]
    problems += [
        f"--{name.replace('_', '-')}-time {time} must be a number of 0 or more"
        for name, time in times.items()
        if not 0 <= time < float("inf")
    ]
    if output_weight > times["backward"]:
        problems.append(
            f"--output-weight-time {output_weight} must be less than --backward-time {times['backward']}, because it "
            "is a part of it"
        )
    if arguments.wgrad_deferral_limit < 0:
        problems.append(f"--wgrad-deferral-limit {arguments.wgrad_deferral_limit} must be 0 or more")
    if problems:
        raise ConfigurationError(problems)
    num_microbatches = count_microbatches(arguments)
    if pp * chunks * num_microbatches > LARGEST:
        raise ConfigurationError(
            f"{pp} ranks x {chunks} chunks x {num_microbatches} micro-batches are more than {LARGEST} passes; use fewer"
        )
    name = arguments.schedule or default_schedule(pp, chunks)
    group_size = arguments.microbatch_group_size_per_virtual_pipeline_stage
    schedule = build_schedule(name, pp, num_microbatches, chunks, group_size)
    plain = simulate(schedule, chunks, Durations(**times))
    delays, defers = arguments.delay_wgrad_compute, arguments.defer_embedding_wgrad_compute
    if not delays and not defers:
        return plain, ""
    deferred = simulate(
        [
            with_deferred_grads(
                actions,
                StagePlace(pp, rank, chunks),
                delays=delays,
                defers=defers,
                max_microbatches=arguments.wgrad_deferral_limit,
            )
            for rank, actions in enumerate(schedule)
        ],
        chunks,
        Durations(**times),
    )
    flag, letter = ("--delay-wgrad-compute", "W") if delays else ("--defer-embedding-wgrad-compute", "O")
    saved = plain.makespan - deferred.makespan
    return (
        deferred,
        f"{flag} saves {saved:g} of {plain.makespan:g} time units: {letter} runs at the same time as other ranks' "
        "passes",
    )


def count_microbatches(arguments: argparse.Namespace) -> int:
    """Return the number of micro-batches, given or from the batch sizes; by default two per rank.

    Raises:
        ConfigurationError: both are given, or the batch size is not divisible.
    """
    samples, given = arguments.global_batch_size, arguments.num_microbatches
    if samples is None:
        return 2 * arguments.pipeline_model_parallel_size if given is None else int(given)
    if given is not None:
        raise ConfigurationError("--num-microbatches and --global-batch-size are redundant; pass only one of them")
    step = arguments.micro_batch_size * arguments.data_parallel_size
    if samples % step:
        below = samples // step * step
        raise ConfigurationError(
            f"--global-batch-size {samples} is not a multiple of micro-batch({arguments.micro_batch_size}) x "
            f"data-parallel({arguments.data_parallel_size}) = {step}; use "
            + (f"{below} or {below + step}" if below else f"{step}")
        )
    return int(samples // step)


def draw_text(timeline: Timeline, width: int | None, saved: str = "") -> str:
    """Draw a text chart with one line per rank; labels that do not fit are shortened."""
    num_chunks = timeline.num_chunks
    rows = rows_of(timeline)
    head = len(f"rank {timeline.pipeline_size - 1}") + 1
    tail = max((len(summary(timeline, rank)) for rank in range(timeline.pipeline_size)), default=0) + 3
    room = max((width or shutil.get_terminal_size((160, 24)).columns) - head - tail, 20)
    shortest = min((e.end - e.start for row in rows for e in row if e.end > e.start), default=1.0)
    longest_label = max((len(label(event, num_chunks)) for row in rows for event in row), default=1)
    scale = min((longest_label + 1) / shortest, room / timeline.makespan if timeline.makespan > 0 else 1.0)
    lines = [title(timeline)]
    for rank, row in enumerate(rows):
        cells = [" "] * round(timeline.makespan * scale)
        for event in row:
            first, last = (round((time - timeline.start) * scale) for time in (event.start, event.end))
            texts = (label(event, num_chunks), label(event, 1), LETTERS[event.kind])
            text = next((text for text in texts if len(text) < last - first), texts[-1])
            cells[first:last] = text.ljust(last - first, "-")[: last - first]
        lines.append(f"{f'rank {rank}':<{head}}|{''.join(cells)}| {summary(timeline, rank)}")
    has_late = any(event.kind is Pass.OUTPUT_WEIGHT for row in rows for event in row)
    lines.append(LEGEND + ("O backward of the output layer's weight   " if has_late else "") + "blank: idle")
    return "\n".join([*lines, *([saved] if saved else [])]) + "\n"


def bar_rows(timeline: Timeline) -> list[BarRow]:
    """Return one row of bars per rank, with a hue per kind of pass and a shade per chunk."""
    return [
        BarRow(
            f"rank {rank}",
            [(event.start - timeline.start, event.end - event.start) for event in row],
            [hsv_to_rgb(HUES[e.kind] / 360, 0.7 - 0.4 * e.chunk / timeline.num_chunks, 0.85) for e in row],
        )
        for rank, row in enumerate(rows_of(timeline))
    ]


def main(argv: list[str] | None = None) -> int:
    """Draw the schedule and return the exit status."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    output: Path | None = arguments.output
    form = chosen_format(parser, arguments)
    if arguments.width is not None and not 1 <= arguments.width <= LARGEST:
        parser.error(f"--width {arguments.width} is not between 1 and {LARGEST}")
    try:
        saved = ""
        if arguments.recorded is None:
            timeline, saved = plan_timeline(arguments)
        else:
            timeline = read_timeline(arguments.recorded)
        if form == "png":
            assert output is not None
            write_png(output, bar_rows(timeline), title(timeline), width=arguments.width or 1600)
            return 0
        text = (draw_svg if form == "svg" else draw_text)(timeline, arguments.width, saved)
        put_text(text, output)
    except InputError as error:
        parser.exit(2, f"error: {'; '.join(str(error).splitlines())}\n")
    except OSError as error:
        parser.exit(2, f"error: {error.filename} cannot be written: {error.strerror}; change --output\n")
    return 0
