"""Explain a configuration before it runs: layout, memory, communication, time, and use of data.

The vocabulary size is that of the tokenizer, or of the flags if the tokenizer's files are missing. The epochs of the
training data follow from the number of samples in the token files.

If a configuration is rejected or runs out of memory, the cheapest changes that make it run are searched. Each change is
tested as a user would test it: its flags are parsed and checked, and memory and time are predicted.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config import DEFAULT_SPLIT, ParsedArguments, RunConfig, without_flags
from megatron.core.datasets import (
    IndexedDataset,
    count_samples,
    idx_path,
    parse_blend,
    parse_split,
    plan_epochs,
    split_boundaries,
)
from megatron.core.errors import ConfigurationError, InputError
from megatron.core.parallel_config import ParallelSizes
from megatron.core.pipeline_parallel import (
    Durations,
    StagePlace,
    Timeline,
    build_schedule,
    simulate,
    with_deferred_grads,
)
from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from megatron.planner.choice import (
    LAYOUT_FLAGS,
    RECOMPUTE_FLAGS,
    VIRTUAL_FLAGS,
    as_typed,
    has_flag,
    replaced,
    whole_value,
)
from megatron.planner.communication import step_traffic
from megatron.planner.gpu import Gpu
from megatron.planner.implementations import Implementation
from megatron.planner.memory import stage_state
from megatron.planner.plan import DEEPEP_AS_ALLTOALL, Plan, step_flops
from megatron.planner.prediction import Prediction, least_used_bytes, plan_refusals, predict, usable_bytes
from megatron.planner.step_time import StepTime
from megatron.training import ModelSize, model_size


@dataclass(frozen=True)
class DataSetNeed:
    """Training part of one data set: its tokens and samples, the samples that the run reads, and the epochs."""

    prefix: str
    tokens: int
    samples: int
    samples_wanted: int
    epochs: int


@dataclass(frozen=True)
class DataNeed:
    """Samples and tokens that a run trains on, its data sets, and the reason if the data sets are not known."""

    samples: int
    tokens: int
    iterations: int
    data_sets: tuple[DataSetNeed, ...]
    reason: str | None


def data_need(config: RunConfig) -> DataNeed:
    """Return the training data that a run reads; if a file is missing, ``reason`` says so."""
    length, samples = config.data.seq_length, config.train_samples
    iterations = config.train_iters if samples else 0
    sets, reason = _data_sets(config)
    return DataNeed(samples, samples * length, iterations, sets, reason)


def _data_sets(config: RunConfig) -> tuple[tuple[DataSetNeed, ...], str | None]:
    data = config.data
    paths = data.train_data_path or data.data_path
    if data.train_data:
        return (), "--train-data is tokenized when the run starts"
    if data.mock_data or not paths:
        return (), "no data path is set" if not data.mock_data else "the run uses mock data"
    if data.sft:
        return (), "conversations are counted when they are read"
    try:
        blend = parse_blend(paths)
        missing = [prefix for prefix in blend.prefixes if not idx_path(prefix).is_file()]
        if missing:
            return (), f"{idx_path(missing[0])} is missing"
        weights = blend.weights
        sets = [IndexedDataset(prefix) for prefix in blend.prefixes]
        trained = [_training_tokens(config, each) for each in sets]
    except InputError as error:
        return (), "; ".join(str(error).splitlines())
    # Data sets without weights are sampled in proportion to their sizes.
    shares = weights or [max(tokens, 1) for tokens in trained]
    needs = []
    for each, tokens, share in zip(sets, trained, shares):
        wanted = -(-config.train_samples * share // sum(shares))
        epochs = plan_epochs(tokens, data.seq_length, int(wanted)).num_epochs if tokens else 0
        needs.append(DataSetNeed(str(each.prefix), tokens, count_samples(tokens, data.seq_length), int(wanted), epochs))
    return tuple(needs), None


def _training_tokens(config: RunConfig, data_set: IndexedDataset) -> int:
    if config.data.train_data_path:
        return data_set.num_tokens
    part = split_boundaries(parse_split(config.data.split or DEFAULT_SPLIT), len(data_set))[0]
    return 0 if part is None else data_set.count_tokens(part)


_GPT2_SIZE = 50257


def with_known_vocabulary(config: RunConfig) -> RunConfig:
    """Return the configuration with its vocabulary size: that of the tokenizer, or of the flags.

    Raises:
        ConfigurationError: the tokenizer's files are missing and no flag gives the size.
    """
    model = dataclasses.replace(config.model, vocab_size=_vocabulary_size(config))
    return dataclasses.replace(config, model=model)


def _vocabulary_size(config: RunConfig) -> int:
    tokenizer = config.tokenizer
    try:
        return build_tokenizer(**dataclasses.asdict(tokenizer)).vocab_size
    except InputError as error:
        size = tokenizer.padded_vocab_size or tokenizer.vocab_size
        if size is None and tokenizer.tokenizer_type == "GPT2BPETokenizer":
            size = _GPT2_SIZE + tokenizer.extra_vocab_size
        if size is None:
            raise ConfigurationError(
                f"the vocabulary size is not known ({error}); add --vocab-size N or --padded-vocab-size N"
            ) from error
        return size


WANTED = 3
_NO_LIMIT = 1 << 62
_MIB = 2**20
_TP, _PP, _CP = LAYOUT_FLAGS[:3]
_MICRO, _GLOBAL, _SEQUENCE, _GPUS = "--micro-batch-size", "--global-batch-size", "--sequence-parallel", "GPUs"
_FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
_ALTERS = {_GLOBAL: 1, _GPUS: 2}
_SECOND = ("recompute", "sharding", _MICRO, _GLOBAL, _GPUS)
"""Subjects that a second edit may have; the first edit may have any subject."""
_MOST_TRIED = 200
"""Limit on the edits that are parsed, so that the search takes a second or two."""

Read = Callable[[Sequence[str], int], ParsedArguments]
"""Function that parses and checks training flags for a number of ranks; it raises ConfigurationError for problems."""


@dataclass(frozen=True)
class Change:
    """Flags that make a configuration run, and their cost as text.

    ``seconds_per_token`` is GPU time per token, by which changes are ranked. ``alters`` counts the settings that the
    user may not be free to change: the global batch size and the number of GPUs.
    """

    flags: str
    cost: str
    seconds_per_token: float
    alters: int

    def only_adds_to(self, other: Change) -> bool:
        """Return whether this change includes the flags of another one and is not cheaper."""
        return f" {other.flags} " in f" {self.flags} " and other.seconds_per_token <= self.seconds_per_token


@dataclass(frozen=True)
class _Edit:
    """One edit of a command line: its subject, its flags as text, and the command line that results."""

    subject: str
    flags: str
    words: tuple[str, ...]
    world_size: int
    alters: int = 0


def find_changes(
    words: Sequence[str], world_size: int, read: Read, gpu: Gpu, implementation: Implementation
) -> tuple[Change, ...]:
    """Return the cheapest changes that make a configuration run if it is rejected or out of memory, at most `WANTED`.

    Pairs of changes are tried if there are too few single changes, unless some problem remains with every single
    change.
    """
    try:
        plan, lasting = Plan.of(read(words, world_size).config), set[str]()
        time = predict(plan, implementation, gpu, usable=_NO_LIMIT).time
        before = None if time is None else _seconds_per_token(plan, time)
    except ConfigurationError as error:
        before, lasting = None, set(error.problems)
    changes, seen = list[Change](), set[frozenset[str]]()
    edits = list(_edits(_Edit("", "", tuple(words), world_size)))
    second = (edit for first in edits for edit in _edits(first) if edit.subject.split()[-1] in _SECOND)
    for edit in itertools.chain(edits, second):
        is_single = len(edit.subject.split()) == 1
        if len(seen) >= _MOST_TRIED or ((len(changes) >= WANTED or lasting) and not is_single):
            break
        key = frozenset((*as_typed(edit.words), str(edit.world_size)))
        if key in seen or not _may_be(edit):
            continue
        seen.add(key)
        try:
            change = _try(edit, before, read, gpu, implementation)
        except ConfigurationError as error:
            lasting.intersection_update(error.problems)
            continue
        lasting.clear()
        if change is not None and not any(change.only_adds_to(other) for other in changes):
            changes = [*(other for other in changes if not other.only_adds_to(change)), change]
    changes.sort(key=lambda change: (change.alters, change.seconds_per_token))
    return tuple(changes[:WANTED])


def _edits(before: _Edit) -> Iterator[_Edit]:
    """Yield edits of each subject that is not edited yet."""
    for subject, flags, words, world_size in _single_edits(before.words, before.world_size):
        if subject not in before.subject.split():
            alters = before.alters + _ALTERS.get(subject, 0)
            yield _Edit(
                f"{before.subject} {subject}".strip(), f"{before.flags} {flags}".strip(), words, world_size, alters
            )


def _single_edits(words: tuple[str, ...], world: int) -> Iterator[tuple[str, str, tuple[str, ...], int]]:
    """Yield subject, flags as typed, command line, and number of ranks of each single edit."""
    bare = tuple(without_flags(words, RECOMPUTE_FLAGS))
    for recompute in (_FULL, ("--recompute-granularity", "selective")):
        yield "recompute", " ".join(recompute), (*bare, *recompute), world
    sharding = ("--data-parallel-sharding-strategy", "optim_grads")
    yield "sharding", " ".join(sharding), replaced(words, *sharding), world
    micro = whole_value(words, _MICRO, 1)
    sizes = {size: whole_value(words, size, 1) for size in (_TP, _PP, _CP)}
    for flag, most in ((_TP, 8), (_PP, 16), (_CP, 8)):
        for size in range(1, most + 1):
            if size != sizes[flag]:
                sequence = (_SEQUENCE,) if flag == _TP and size > 1 and not has_flag(words, _SEQUENCE) else ()
                given = " ".join((flag, str(size), *sequence))
                yield flag, given, (*replaced(words, flag, str(size)), *sequence), world
    for size in sorted({1, micro // 2} - {0, micro}):
        yield _MICRO, f"{_MICRO} {size}", replaced(words, _MICRO, str(size)), world
    if has_flag(words, *VIRTUAL_FLAGS):
        yield "virtual", "(no virtual stages)", tuple(without_flags(words, VIRTUAL_FLAGS)), world
    for flag in (_SEQUENCE, "--fp8-format", "--fp4-format", "--cpu-offloading", "--pipeline-schedule"):
        if has_flag(words, flag):
            yield flag, f"(no {flag})", tuple(without_flags(words, (flag,))), world
    copy = math.prod(sizes.values())
    batch, step = whole_value(words, _GLOBAL, 0), micro * max(1, world // copy)
    if batch % step:
        for size in sorted({max(step, batch // step * step), (batch // step + 1) * step}):
            yield _GLOBAL, f"{_GLOBAL} {size}", replaced(words, _GLOBAL, str(size)), world
    wholes = {world // copy * copy, (world // copy + 1) * copy} - {0}
    for size in (2 * world, 4 * world, 8 * world) if world % copy == 0 else sorted(wholes):
        yield _GPUS, f"({size} GPUs instead of {world})", words, size


def _may_be(edit: _Edit) -> bool:
    """Return whether the parallel sizes and the batch size divide, which is quick to check before flags are parsed."""
    copy = math.prod(whole_value(edit.words, flag, 1) for flag in (_TP, _PP, _CP))
    if edit.world_size % copy:
        return False
    batch = whole_value(edit.words, _GLOBAL, 0)
    return batch % (whole_value(edit.words, _MICRO, 1) * (edit.world_size // copy)) == 0


def _try(edit: _Edit, before: float | None, read: Read, gpu: Gpu, implementation: Implementation) -> Change | None:
    """Return the change that an edit makes, or None if the edited run does not fit or is not supported.

    Raises:
        ConfigurationError: the flags are invalid.
    """
    plan = Plan.of(read(edit.words, edit.world_size).config)
    if plan_refusals(plan, implementation, gpu):
        return None
    states = [stage_state(plan, stage, implementation) for stage in range(plan.parallel_sizes.pp)]
    if least_used_bytes(states) > usable_bytes(gpu):
        # Most edits of a model that is far too large end here. Tracing their layers would take minutes.
        return None
    prediction = predict(plan, implementation, gpu, states=states)
    if prediction.time is None or prediction.used_bytes is None:
        return None
    seconds = _seconds_per_token(plan, prediction.time)
    speed = f"{1e3 * prediction.time.total:.0f} ms per step"
    if before is not None:
        speed += f", {100 * (seconds / before - 1):+.1f} % GPU time per token"
    margin = (usable_bytes(gpu) - prediction.used_bytes) // _MIB
    return Change(edit.flags, f"{speed}; {margin} MiB left", seconds, edit.alters)


def _seconds_per_token(plan: Plan, time: StepTime) -> float:
    """Return the GPU-seconds per token."""
    return time.total * plan.parallel_sizes.world_size / (plan.global_batch_size * plan.seq_length)


_DRAWN_ROUNDS = 4
"""Rounds of a schedule that are simulated; later rounds repeat them."""


@dataclass(frozen=True)
class GroupTraffic:
    """Messages of a rank over one of its groups per step; bytes are those of the full tensors."""

    operation: str
    axes: tuple[str, ...]
    calls: int
    num_bytes: int


@dataclass(frozen=True)
class Explanation:
    """Everything that is known about a configuration before it runs.

    ``timeline`` simulates the first rounds of the schedule with the predicted times. ``bubble`` is the bubble of the
    full step as a share of busy time. ``traffic`` is that of the first rank of each pipeline stage. ``flops`` are the
    FLOPs per step of all ranks, without recomputation.
    """

    config: RunConfig
    plan: Plan
    gpu: Gpu
    implementation: Implementation
    notes: tuple[str, ...]
    size: ModelSize
    prediction: Prediction
    timeline: Timeline
    bubble: float
    traffic: tuple[tuple[GroupTraffic, ...], ...]
    flops: float
    data: DataNeed

    @property
    def sizes(self) -> ParallelSizes:
        return self.plan.parallel_sizes

    @property
    def usable(self) -> int:
        return usable_bytes(self.gpu)

    @property
    def tokens_per_second(self) -> float | None:
        """Return the tokens per second of all ranks, or None if no time is predicted."""
        time = self.prediction.time
        return None if time is None else self.plan.global_batch_size * self.plan.seq_length / time.total

    def to_json(self, changes: Sequence[Change] = ()) -> dict[str, Any]:
        """Return everything as JSON-ready values, with the changes that would make the run possible.

        Memory is in bytes, time in seconds.
        """
        plan, prediction = self.plan, self.prediction
        return {
            "world_size": self.sizes.world_size,
            "parallel_sizes": dict(self.sizes.grid),
            "ranks": [
                {**self.sizes.place(rank), **self.sizes.expert_place(rank)} for rank in range(self.sizes.world_size)
            ],
            "stages": [
                {
                    "stage": stage,
                    "chunks": [dataclasses.asdict(chunk) for chunk in plan.stage_layout.chunks(stage)],
                    "parameters": self.size.shards[stage],
                    "trained_parameters": self.size.trained[stage],
                    "memory": dataclasses.asdict(prediction.stages[stage]) if prediction.stages else None,
                    "traffic": [dataclasses.asdict(each) for each in self.traffic[stage]],
                }
                for stage in range(self.sizes.pp)
            ],
            "parameters": self.size.block + self.size.embedding,
            "vocab_size": plan.model.vocab_size,
            "padded_vocab_size": plan.model.padded_vocab_size,
            "micro_batch_size": plan.micro_batch_size,
            "global_batch_size": plan.global_batch_size,
            "num_microbatches": plan.num_microbatches,
            "tokens_per_step": plan.global_batch_size * plan.seq_length,
            "data": dataclasses.asdict(self.data),
            "pipeline_schedule": plan.pipeline_schedule,
            "bubble": self.bubble,
            "flops_per_step": self.flops,
            "flops_per_step_and_gpu": self.flops / self.sizes.world_size,
            "gpu": self.gpu.name,
            "implementation": self.implementation.name,
            "expert_imbalance": self.implementation.expert_imbalance,
            "outcome": prediction.outcome,
            "reason": prediction.reason,
            "used_bytes": prediction.used_bytes,
            "usable_bytes": self.usable,
            "time": None if prediction.time is None else _time_as_json(prediction.time),
            "seconds_per_step": None if prediction.time is None else prediction.time.total,
            "tokens_per_second": self.tokens_per_second,
            "tflops_per_gpu": prediction.tflops,
            "notes": list(self.notes),
            "changes": [dataclasses.asdict(change) for change in changes],
        }


def explain(config: RunConfig, notes: Sequence[str], gpu: Gpu, implementation: Implementation) -> Explanation:
    """Return the explanation of a resolved configuration with a known vocabulary, on ranks of a GPU type."""
    plan = Plan.of(config)
    prediction = predict(plan, implementation, gpu)
    timeline, bubble = _pipeline(config, plan, prediction)
    return Explanation(
        config=config,
        plan=plan,
        gpu=gpu,
        implementation=implementation,
        notes=(*notes, DEEPEP_AS_ALLTOALL) if config.model.moe.asks_for_deepep else tuple(notes),
        size=model_size(config),
        prediction=prediction,
        timeline=timeline,
        bubble=bubble,
        traffic=tuple(_traffic(config, gpu, stage) for stage in range(plan.parallel_sizes.pp)),
        flops=step_flops(plan),
        data=data_need(config),
    )


def first_rank(sizes: ParallelSizes, stage: int) -> int:
    return stage * (sizes.world_size // sizes.pp)


def _traffic(config: RunConfig, gpu: Gpu, stage: int) -> tuple[GroupTraffic, ...]:
    traffic = step_traffic(config, first_rank(config.parallel_sizes, stage), gpu.capability)
    return tuple(
        GroupTraffic(operation, axes, volume.num_calls, volume.num_bytes)
        for (operation, axes), volume in sorted(traffic.items(), key=lambda item: -item[1].num_bytes)
    )


def _time_as_json(time: StepTime) -> dict[str, Any]:
    """Return the parts of a step's time; the JSON key ``neighbours`` keeps its British spelling for its readers."""
    parts = dataclasses.asdict(time)
    return {"neighbours" if name == "neighbors" else name: value for name, value in parts.items()}


def _pipeline(config: RunConfig, plan: Plan, prediction: Prediction) -> tuple[Timeline, float]:
    """Return the timeline of the first rounds of the schedule, and the bubble of all rounds as a share of busy time.

    Each further round takes every rank only the time of its passes.
    """
    model, sizes, chunks = plan.model, plan.parallel_sizes, plan.stage_layout.num_chunks
    total, group = plan.num_microbatches, model.microbatch_group_size_per_virtual_pipeline_stage
    round_size = max(group or 0, sizes.pp)
    drawn = total if total <= _DRAWN_ROUNDS * round_size else _DRAWN_ROUNDS * round_size + total % round_size
    pass_time = 1.0 if prediction.time is None else prediction.time.slowest_stage / chunks / 3.0
    durations = Durations(
        forward=pass_time,
        backward=2 * pass_time,
        backward_input=pass_time,
        backward_weight=pass_time,
        output_weight=pass_time / 2,
    )
    schedule = [
        with_deferred_grads(
            actions,
            StagePlace(sizes.pp, rank, chunks),
            delays=model.delay_wgrad_compute,
            defers=model.defer_embedding_wgrad_compute,
            max_microbatches=model.wgrad_deferral_limit,
        )
        for rank, actions in enumerate(build_schedule(plan.pipeline_schedule, sizes.pp, drawn, chunks, group))
    ]
    timeline = simulate(schedule, chunks, durations)
    busy = 3 * pass_time * chunks
    return timeline, max(0.0, timeline.makespan - drawn * busy) / (total * busy)
