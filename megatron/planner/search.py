"""Search all layouts of a model on a number of GPUs: rejected, out of memory, or ranked by step time.

Uneven pipeline splits give the last stage fewer layers, since it also has the output layer.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from megatron.config import RunConfig
from megatron.core.errors import ConfigurationError
from megatron.core.models.gpt import GPTConfig
from megatron.planner.bounds import Bounds
from megatron.planner.choice import RECOMPUTES, ZERO_BUBBLE, Choice
from megatron.planner.communication import GPUS_A_MACHINE
from megatron.planner.gpu import Gpu
from megatron.planner.implementations import Implementation
from megatron.planner.memory import ModelPieces, StageState, model_pieces, stage_memory, stage_state
from megatron.planner.plan import Plan, layer_kinds, step_flops
from megatron.planner.prediction import (
    HOPPER_MACHINES,
    Prediction,
    least_used_bytes,
    plan_refusals,
    predict,
    usable_bytes,
)
from megatron.planner.trace_store import UntraceableError, trace_in_this_process


def output_layers(model: GPTConfig) -> float:
    """Return the work of the output layer and the MTP modules in units of one layer, without core attention."""
    numbers = range(model.num_layers)
    width: float = sum(map(model.ffn_size_of, numbers)) / model.num_layers
    if model.moe.num_experts is not None:
        # Only the experts to which a token is routed.
        of_experts = model.moe.moe_router_topk * model.moe.moe_ffn_hidden_size
        of_experts = of_experts * model.expert_input_size // model.hidden_size
        of_experts += model.moe.moe_shared_expert_intermediate_size or 0
        share = sum(model.moe_layers) / model.num_layers
        width = round(share * of_experts + (1.0 - share) * width)
    ffn = width * (3 if model.is_gated else 2)
    has_keys = [source is None for source in model.key_value_sources]
    own = [model.of_layer(number) for number in numbers]
    widths = (
        2 * each.query_projection_size + has * (each.kv_projection_size + each.value_projection_size)
        for each, has in zip(own, has_keys, strict=True)
    )
    attention = sum(widths) / len(own)
    further, layer = model.mtp.mtp_depth, ffn + attention
    # Each MTP module has a layer, an output layer, and a linear layer that joins its two inputs.
    return ((1 + further) * model.padded_vocab_size + further * (layer + 2 * model.hidden_size)) / layer


def balanced_splits(model: GPTConfig, pp: int, even: int) -> Iterator[tuple[int, ...]]:
    """Yield layers per global stage that balance the ranks' work, with one chunk per rank and with two.

    Remaining layers go to the later ranks, except the last one, since the first ranks have the most micro-batches in
    flight. Nothing is yielded if a chunk would have no layer, or if the result is the split with ``even`` layers on
    every rank.
    """
    if pp < 2:
        return
    layers, output = model.num_layers, output_layers(model)
    last = min(range(1, layers // pp + 2), key=lambda count: max(-(-(layers - count) // (pp - 1)), count + output))
    base, over = divmod(layers - last, pp - 1)
    ranks = [*(base + (rank >= pp - 1 - over) for rank in range(pp - 1)), last]
    if min(ranks) < 1 or set(ranks) == {even}:
        return
    yield tuple(ranks)
    if min(ranks) > 1:
        yield (*(count // 2 for count in ranks), *(count - count // 2 for count in ranks))


_MOST_CHUNKS, _MOST_CONTEXT, _MOST_EXPERT_RANKS, _LARGEST_MICRO_BATCH = 10, 16, 64, 16
_MIB = 2**20

FindProblems = Callable[[RunConfig], Sequence[str]]
"""Function that returns the reasons why a resolved configuration cannot run, one line each."""


@dataclass(frozen=True)
class Candidate:
    """A choice that fits, with its prediction.

    ``mfu`` is the model FLOPs utilization: the share of the dense peak of the precision, with causal attention counted
    as half.
    """

    choice: Choice
    config: RunConfig
    prediction: Prediction
    seconds: float
    tokens_per_second: float
    mfu: float
    margin_bytes: int


@dataclass(frozen=True)
class Dropped:
    """A choice that is not ranked, and why: ``kind`` is ``refused``, ``oom``, ``at the limit`` or ``slower``."""

    choice: Choice
    kind: str
    reason: str


@dataclass
class Search:
    """Results of a layout search, and the state that its choices share.

    ``num_predicted`` counts the choices whose memory and time were computed. ``states`` caches the memory of stages
    between steps, and ``pieces`` the memory of the model's pieces. ``bounds`` drop slow choices early without losing
    any of the ``wanted`` fastest ones; without bounds all choices are predicted. ``enough`` is the step time of the
    slowest wanted choice among the choices that were predicted first.
    """

    candidates: list[Candidate] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    num_predicted: int = 0
    states: dict[tuple[object, ...], Sequence[StageState]] = field(default_factory=dict)
    pieces: dict[tuple[object, ...], ModelPieces] = field(default_factory=dict)
    bounds: Bounds | None = None
    wanted: int = 1
    enough: float = math.inf

    @property
    def slowest_wanted(self) -> float:
        """Return the step time of the slowest of the ``wanted`` candidates, or infinity if there are too few."""
        fastest = heapq.nsmallest(self.wanted, (each.seconds for each in self.candidates))
        return min(self.enough, fastest[-1] if len(fastest) == self.wanted else math.inf)

    @property
    def ranked(self) -> Sequence[Candidate]:
        """Return the candidates, fastest first; of equally fast ones, the one with more free memory first."""
        return sorted(self.candidates, key=lambda each: (each.seconds, -each.margin_bytes))

    @property
    def num_choices(self) -> int:
        return len(self.candidates) + len(self.dropped)


@dataclass(frozen=True)
class _Layout:
    """A layout that may fit, with the smallest micro-batch, and the shardings and micro-batch sizes to try.

    ``least_seconds`` is a lower bound of the step time of all these choices. ``problems`` returns the problems that the
    run's own checks find.
    """

    choice: Choice
    config: RunConfig
    plan: Plan
    shardings: tuple[str, ...]
    sizes: tuple[int, ...]
    problems: Callable[[], Sequence[str]]
    least_seconds: float = 0.0


def search(
    config: RunConfig,
    gpu: Gpu,
    implementation: Implementation,
    precisions: Sequence[str],
    find_problems: FindProblems,
    tried: Callable[[int, int], None] = lambda done, total: None,
    wanted: int | None = None,
) -> Search:
    """Search the layouts of a configuration's model and global batch on its number of ranks.

    ``tried`` is called with the number of layouts tried so far and the number of all layouts. If ``wanted`` is given,
    choices whose lower bound is above the time of the ``wanted`` fastest choices are dropped as slower, without a
    prediction.
    """
    trace_in_this_process()
    found = Search(bounds=None if wanted is None else Bounds(gpu, implementation), wanted=wanted or 1)
    choices = list(_layouts(config, precisions, has_zero_bubble=implementation.schedules_zero_bubble))
    layouts, done = list[_Layout](), 0
    for choice in choices:
        layout = _layout(found, config, choice, gpu, implementation, find_problems)
        if layout is not None:
            layouts.append(layout)
            continue
        done += 1
        tried(done, len(choices))
    if found.bounds is not None:
        layouts = _bounded(found, config, layouts, gpu, implementation, find_problems)
    for layout in layouts:
        _try_layout(found, config, layout, gpu, implementation, find_problems)
        done += 1
        tried(done, len(choices))
    return found


def _bounded(
    found: Search,
    config: RunConfig,
    layouts: Sequence[_Layout],
    gpu: Gpu,
    implementation: Implementation,
    find_problems: FindProblems,
) -> list[_Layout]:
    """Return the layouts with their lower bounds, fastest first.

    To get a tight limit, layouts that need no further traces are predicted first: one sample per micro-batch, no
    context parallelism, the default schedule, no recompute. Then layouts with the tensor-parallel size and precision of
    the fastest one are predicted. Later, layouts whose bound is above this limit are dropped.
    """
    assert found.bounds is not None
    traced = Search(states=found.states, pieces=found.pieces, bounds=found.bounds, wanted=found.wanted)
    for layout in layouts:
        if layout.choice.cp == 1 and not layout.choice.schedule:
            one = dataclasses.replace(layout, sizes=tuple(size for size in layout.sizes if size == 1))
            _try_layout(traced, config, one, gpu, implementation, find_problems, RECOMPUTES[:1])
    found.enough = traced.slowest_wanted
    bounded = [
        dataclasses.replace(layout, least_seconds=_least_seconds(found, layout, implementation)) for layout in layouts
    ]
    bounded.sort(key=lambda each: each.least_seconds)
    if traced.candidates:
        best = traced.ranked[0].choice
        alike = Search(
            states=found.states, pieces=found.pieces, bounds=found.bounds, wanted=found.wanted, enough=found.enough
        )
        for layout in bounded:
            choice = layout.choice
            if (choice.tp, choice.precision, choice.schedule) == (best.tp, best.precision, ""):
                _try_layout(alike, config, layout, gpu, implementation, find_problems, RECOMPUTES[:1])
        found.enough = alike.slowest_wanted
    return bounded


def _least_seconds(found: Search, layout: _Layout, implementation: Implementation) -> float:
    """Return a lower bound of the step time of a layout's choices; it may be less tight if it is above the limit.

    It is 0 if the layout cannot be traced. The reason is noted when the layout is tried.
    """
    assert found.bounds is not None
    choice = dataclasses.replace(layout.choice, sharding=layout.shardings[0])
    states = _states(found, lambda: layout.plan, choice, implementation)
    sized = (dataclasses.replace(layout.plan, micro_batch_size=size) for size in layout.sizes)
    try:
        return min((found.bounds.seconds(each, states, found.enough) for each in sized), default=0.0)
    except UntraceableError:
        return 0.0


def _layouts(config: RunConfig, precisions: Sequence[str], *, has_zero_bubble: bool) -> Iterator[Choice]:
    """Yield a choice for each layout and precision, with the smallest micro-batch and no recompute."""
    world, layers = config.world_size, config.model.num_layers
    for tp in _divisors(world, GPUS_A_MACHINE):
        for pp in _divisors(world // tp, layers + 2):
            for cp in _divisors(world // (tp * pp), _MOST_CONTEXT):
                counts_ends = layers % pp != 0 and (layers + 2) % pp == 0
                per_rank = (layers + 2 * counts_ends) // pp
                chunk_numbers = _divisors(per_rank, _MOST_CHUNKS) if pp > 1 else [1]
                even = per_rank if per_rank * pp == layers else 0
                splits = list(balanced_splits(config.model, pp, even))
                cuts: list[tuple[int, tuple[int, ...], str]] = []
                if even or counts_ends or not splits:
                    cuts += [(chunks, (), "") for chunks in chunk_numbers]
                cuts += [(len(split) // pp, split, "") for split in splits]
                if pp > 1 and has_zero_bubble:
                    cuts += [(1, split, ZERO_BUBBLE) for chunks, split, _ in list(cuts) if chunks == 1]
                spread = _expert_sizes(config.model, world // pp)
                for (chunks, split, schedule), precision, ep in itertools.product(cuts, precisions, spread):
                    yield Choice(
                        tp=tp,
                        pp=pp,
                        cp=cp,
                        chunks=chunks,
                        counts_ends=counts_ends and not split,
                        micro_batch_size=1,
                        recompute=RECOMPUTES[0],
                        sharding="optim" if world > tp * pp else "no_shard",
                        precision=precision,
                        split=split,
                        schedule=schedule,
                        ep=ep,
                    )


def _expert_sizes(model: GPTConfig, ranks_of_stage: int) -> Sequence[int | None]:
    """Return the possible expert-parallel sizes within a stage; None for a dense model."""
    if model.moe.num_experts is None:
        return (None,)
    return _divisors(math.gcd(model.moe.num_experts, ranks_of_stage), _MOST_EXPERT_RANKS)


def _layout(
    found: Search,
    config: RunConfig,
    layout: Choice,
    gpu: Gpu,
    implementation: Implementation,
    find_problems: FindProblems,
) -> _Layout | None:
    """Return a layout that may fit, or None after noting why it is rejected or out of memory."""
    first = layout.apply(config)
    try:
        plan = Plan.of(first)
    except ConfigurationError as error:
        found.dropped.append(Dropped(layout, "refused", "; ".join(error.problems)))
        return None
    refusals = plan_refusals(plan, implementation, gpu)
    if refusals:
        found.dropped.append(Dropped(layout, "refused", "; ".join(refusals)))
        return None
    shardings: tuple[str, ...] = ("optim", "optim_grads") if layout.sharding == "optim" else (layout.sharding,)
    try:
        shardings = tuple(each for each in shardings if _has_room(found, config, layout, each, gpu, implementation))
    except ConfigurationError as error:  # of a part that is only known once the model is built
        found.dropped.append(Dropped(layout, "refused", "; ".join(error.problems)))
        return None
    if not shardings:
        return None
    sizes = tuple(size for size in _powers(_LARGEST_MICRO_BATCH) if _divides(config, plan, size))
    return _Layout(layout, first, plan, shardings, sizes, _asked_once(find_problems, first))


def _try_layout(
    found: Search,
    config: RunConfig,
    layout: _Layout,
    gpu: Gpu,
    implementation: Implementation,
    find_problems: FindProblems,
    recomputes: Sequence[str] = RECOMPUTES,
) -> None:
    """Try a layout with every micro-batch size; gradients are sharded if sharding the optimizer state is not enough."""
    if layout.least_seconds > found.slowest_wanted:
        found.dropped.append(Dropped(layout.choice, "slower", _at_least(layout.least_seconds)))
        return
    # The run's own checks take longer than the bounds.
    if layout.problems():
        found.dropped.append(Dropped(layout.choice, "refused", "; ".join(layout.problems())))
        return
    roomy: set[int] = set()
    for sharding in layout.shardings:
        wanted = [size for size in layout.sizes if size not in roomy]
        if wanted:
            choice = dataclasses.replace(layout.choice, sharding=sharding)
            known = (layout.config, layout.plan) if choice == layout.choice else None
            rest = choice, wanted, gpu, implementation, find_problems, known, recomputes
            try:
                roomy |= _try_batches(found, config, *rest)
            except UntraceableError as error:
                found.dropped.append(Dropped(choice, "refused", str(error)))
                return


def _has_room(
    found: Search, config: RunConfig, layout: Choice, sharding: str, gpu: Gpu, implementation: Implementation
) -> bool:
    """Return whether the memory between steps fits with a sharding; if not, note it."""
    choice, usable = dataclasses.replace(layout, sharding=sharding), usable_bytes(gpu)
    states = _states(found, lambda: Plan.of(choice.apply(config)), choice, implementation)
    least = least_used_bytes(states)
    if least > usable:
        reason = f"weights, gradients and optimizer alone need {least // _MIB} of {usable // _MIB} MiB"
        found.dropped.append(Dropped(choice, "oom", reason))
    return least <= usable


def _states(
    found: Search, make_plan: Callable[[], Plan], choice: Choice, implementation: Implementation
) -> Sequence[StageState]:
    """Return the memory of the stages between steps; it does not depend on the context-parallel size."""
    key = (
        *(choice.tp, choice.pp, choice.ep, choice.chunks, choice.counts_ends, choice.split),
        *(choice.sharding, choice.precision, choice.schedule),
    )
    if key not in found.states:
        found.states[key] = _states_of(make_plan(), implementation)
    return found.states[key]


def _states_of(plan: Plan, implementation: Implementation) -> Sequence[StageState]:
    """Return the memory of the stages between steps, computed once for stages with the same kinds of layers."""
    kinds = layer_kinds(plan.model, plan.seq_length)
    states: dict[Hashable, StageState] = {}
    of_stages = []
    for stage in range(plan.parallel_sizes.pp):
        contents = tuple(
            (chunk.has_embedding, chunk.has_loss, *(kinds[number] for number in chunk.layer_numbers))
            for chunk in plan.stage_layout.chunks(stage)
        )
        if contents not in states:
            states[contents] = stage_state(plan, stage, implementation)
        of_stages.append(states[contents])
    return of_stages


def _pieces(found: Search, plan: Plan, choice: Choice, gpu: Gpu, implementation: Implementation) -> ModelPieces:
    """Return the memory of a model's pieces per micro-batch; it does not depend on pipeline splits or sharding."""
    key = _pieces_key(choice)
    if key not in found.pieces:
        found.pieces[key] = model_pieces(plan, implementation, gpu)
    return found.pieces[key]


def _pieces_key(choice: Choice) -> tuple[object, ...]:
    return (
        *(choice.tp, choice.cp, choice.ep, choice.precision, choice.recompute, choice.micro_batch_size),
        choice.schedule == ZERO_BUBBLE,
    )


def _try_batches(
    found: Search,
    config: RunConfig,
    layout: Choice,
    sizes: Iterable[int],
    gpu: Gpu,
    implementation: Implementation,
    find_problems: FindProblems,
    known: tuple[RunConfig, Plan] | None,
    recomputes: Sequence[str],
) -> set[int]:
    """Try micro-batch sizes of a layout and sharding, each with the least recompute that fits.

    ``known`` is the checked configuration and plan of ``layout``, if they exist. Return the sizes for which other
    shardings need not be tried: those that fit without recompute, and those that are too slow without recompute.
    """
    first = known[0] if known else layout.apply(config)
    plan, roomy = known[1] if known else Plan.of(first), set[int]()
    problems_of_first = _no_problems if known else _asked_once(find_problems, first)
    states = _states(found, lambda: plan, layout, implementation)
    # A configuration has many fields. One is made per recompute granularity, not per micro-batch size.
    of_recompute = {RECOMPUTES[0]: (first, plan, problems_of_first)}
    too_large: set[str] = set()
    for size in sizes:
        fits, slower = None, None
        for recompute in recomputes:
            choice = dataclasses.replace(layout, micro_batch_size=size, recompute=recompute)
            if fits is not None:
                found.dropped.append(Dropped(choice, "slower", f"recompute {fits} fits already"))
                continue
            if recompute in too_large:
                found.dropped.append(Dropped(choice, "oom", "a smaller micro-batch needs too much memory"))
                continue
            if recompute not in of_recompute:
                applied = choice.apply(config)
                once = _asked_once(find_problems, applied)
                of_recompute[recompute] = applied, Plan.of(applied, plan.stage_layout), once
            applied, of_size, problems = of_recompute[recompute]
            of_size = dataclasses.replace(of_size, micro_batch_size=size)
            most = found.slowest_wanted
            least = 0.0 if found.bounds is None else found.bounds.seconds(of_size, states, most)
            if least > most:
                # More recompute is slower still.
                found.dropped.append(Dropped(choice, "slower", _at_least(least)))
                slower = recompute
                break
            failed = _try_choice(found, applied, of_size, choice, gpu, implementation, states, problems)
            if failed is None:
                fits = recompute
            elif failed == "oom":
                too_large.add(recompute)
        if fits is None and slower is None:
            break
        # Another sharding may leave memory for less recompute, unless that is too slow.
        if RECOMPUTES[0] in (fits, slower):
            roomy.add(size)
    return roomy


def _at_least(seconds: float) -> str:
    return f"a step takes at least {1e3 * seconds:.0f} ms"


def _no_problems() -> Sequence[str]:
    return ()


def _asked_once(find_problems: FindProblems, config: RunConfig) -> Callable[[], Sequence[str]]:
    """Return a function that checks a configuration on its first call and caches the result."""
    return functools.cache(lambda: find_problems(config))


def _try_choice(
    found: Search,
    config: RunConfig,
    plan: Plan,
    choice: Choice,
    gpu: Gpu,
    implementation: Implementation,
    states: Sequence[StageState],
    problems: Callable[[], Sequence[str]],
) -> str | None:
    """Predict one choice, and return None if it fits, or the kind of reason why it is dropped.

    ``config`` has all settings of the choice except the micro-batch size. ``problems`` returns the problems that the
    run's own checks find.
    """
    usable = usable_bytes(gpu)
    if found.bounds is not None and implementation.is_traced:
        least = found.bounds.first_stage_bytes(plan, states[0])
        whole = found.pieces.get(_pieces_key(dataclasses.replace(choice, recompute=RECOMPUTES[0])))
        if choice.recompute == "selective" and whole is not None:
            least = max(least, found.bounds.selective_bytes(plan, states[0], whole))
        least += HOPPER_MACHINES.held_bytes
        if least > usable:
            return _drop(found, choice, "oom", f"stage 0 needs at least {least // _MIB} of {usable // _MIB} MiB")
    found.num_predicted += 1
    # The first stage has the most micro-batches in flight, so most choices that are out of memory fail there.
    pieces = _pieces(found, plan, choice, gpu, implementation)
    first = stage_memory(plan, 0, implementation, pieces, states[0]).total + HOPPER_MACHINES.held_bytes
    if first > usable:
        return _drop(found, choice, "oom", f"stage 0 needs {first // _MIB} of {usable // _MIB} MiB")
    # Stages between the second and the last have the same number of layers as the second, and less in flight.
    looked_at = sorted({0, min(1, choice.pp - 1), choice.pp - 1, *_uneven_stages(plan, choice)})
    prediction = predict(plan, implementation, gpu, states=states, looked_at=looked_at, pieces=pieces)
    if prediction.time is None or prediction.used_bytes is None:
        kind = "oom" if prediction.outcome == "oom" else "refused"
        return _drop(found, choice, kind, prediction.reason or prediction.outcome)
    if prediction.reason is not None:
        return _drop(found, choice, "at the limit", prediction.reason)
    # A choice that does not fit need not be checked, which takes longer.
    if problems():
        return _drop(found, choice, "refused", "; ".join(problems()))
    seconds, flops = prediction.time.total, step_flops(plan)
    peak = {"fp8": gpu.float8_flops, "nvfp4": gpu.float4_flops}.get(choice.precision, gpu.half_flops)
    found.candidates.append(
        Candidate(
            choice=choice,
            config=choice.with_micro_batch(config),
            prediction=prediction,
            seconds=seconds,
            tokens_per_second=plan.global_batch_size * plan.seq_length / seconds,
            mfu=flops / seconds / config.world_size / peak,
            margin_bytes=usable - prediction.used_bytes,
        )
    )
    return None


def _drop(found: Search, choice: Choice, kind: str, reason: str) -> str:
    """Record a dropped choice, and return the kind of reason."""
    found.dropped.append(Dropped(choice, kind, reason))
    return kind


def _uneven_stages(plan: Plan, choice: Choice) -> Iterator[int]:
    """Yield the middle stages that can have the most memory: more layers, or the most deferred gradients."""
    if choice.schedule == ZERO_BUBBLE:
        yield max(0, choice.pp - 2)
    if choice.split:
        layers = [
            sum(len(chunk.layer_numbers) for chunk in plan.stage_layout.chunks(stage)) for stage in range(choice.pp)
        ]
        yield from (layers.index(count) for count in set(layers))


def _divides(config: RunConfig, plan: Plan, size: int) -> bool:
    return config.training.global_batch_size % (size * plan.parallel_sizes.dp) == 0


def _powers(most: int) -> list[int]:
    return [2**number for number in range(most.bit_length())]


def _divisors(number: int, most: int) -> list[int]:
    return [size for size in range(1, min(number, most) + 1) if number % size == 0]
