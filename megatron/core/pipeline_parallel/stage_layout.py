"""Pipeline stage layout: the layers of each stage, and the stages of the embedding and the loss. Imports no torch.

The notation of --pipeline-model-parallel-layout: ``E`` embedding, ``t`` layer, ``m`` MTP module, ``L`` loss, ``|``
between stages.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.errors import ConfigurationError, choices
from megatron.core.parallel_config import ParallelConfig

_TOKENS = re.compile(r"\s+|,|(?P<item>[EtmL|()])|\*\s*(?P<count>\d+)|(?P<wrong>.)", re.DOTALL)
_FLAG = "--pipeline-model-parallel-layout"
_MAX_EXPANDED_LENGTH = 100_000


def parse_layout(text: str, num_layers: int) -> tuple[str, ...]:
    """Parse a layout into its stages, each a string of ``E``, ``t``, ``m`` and ``L``.

    ``x*3`` repeats a letter or a bar, and ``(tt|)*4`` a group, which may be nested. Commas and spaces are ignored. A
    stage may be empty. ``Et|(tt|)*2L`` has four stages, the last of which has only the loss. All MTP modules are on one
    stage, after the layers.

    Raises:
        ConfigurationError: the layout cannot be parsed, or does not consist of the embedding first, ``num_layers``
            layers, MTP modules, and the loss last.
    """
    expanded = _expand(text)
    stages = tuple(expanded.split("|"))
    problems = []
    if expanded.count("E") != 1 or not expanded.startswith("E"):
        problems.append(f"{_FLAG} {text!r} must contain the embedding E once, at its beginning")
    if expanded.count("L") != 1 or not expanded.endswith("L"):
        problems.append(f"{_FLAG} {text!r} must contain the loss L once, at its end")
    if expanded.count("t") != num_layers:
        problems.append(f"{_FLAG} {text!r} has {expanded.count('t')} layers, but --num-layers is {num_layers}")
    if "t" in expanded.partition("m")[2]:
        problems.append(f"{_FLAG} {text!r} has a layer t after an MTP module m; write m after the last t")
    if sum("m" in stage for stage in stages) > 1:
        problems.append(f"{_FLAG} {text!r} has MTP modules m on several stages; write all of them on one stage")
    if problems:
        raise ConfigurationError(problems)
    return stages


def mtp_modules_per_stage(layout: str) -> tuple[int, ...]:
    """Return how many MTP modules a valid layout names on each stage."""
    return tuple(stage.count("m") for stage in _expand(layout).split("|"))


def _expand(text: str) -> str:
    """Expand all repetitions."""
    # One list of items for each open parenthesis; a repetition acts on the last item.
    open_groups: list[list[str]] = [[]]
    length = 0
    for match in _TOKENS.finditer(text):
        item, count = match["item"], match["count"]
        items = open_groups[-1]
        if match["wrong"] is not None:
            raise ConfigurationError(
                f"{_FLAG} {text!r} has {match['wrong']!r} at character {match.start() + 1}; write E (embedding), "
                "t (layer), m (MTP module), L (loss), | (next stage), (…) and *number"
            )
        if item == "(":
            open_groups.append([])
        elif item == ")":
            if len(open_groups) == 1:
                raise ConfigurationError(f"{_FLAG} {text!r} has a closing parenthesis without an opening parenthesis")
            open_groups.pop()
            open_groups[-1].append("".join(items))
        elif item is not None:
            items.append(item)
        elif count is not None:
            if not items:
                raise ConfigurationError(f"{_FLAG} {text!r} has nothing to repeat at character {match.start() + 1}")
            length = len(items[-1]) * int(count)
            if length > _MAX_EXPANDED_LENGTH:
                raise ConfigurationError(f"{_FLAG} {text!r} expands to {length} items; use fewer")
            items[-1] *= int(count)
    if len(open_groups) > 1:
        raise ConfigurationError(f"{_FLAG} {text!r} has an opening parenthesis without a closing parenthesis")
    return "".join(open_groups[0])


@dataclass(frozen=True)
class StageContents:
    """Contents of one model chunk.

    ``layer_numbers`` are global and start at 0. ``has_loss`` includes the final norm and the output layer.
    """

    layer_numbers: tuple[int, ...] = ()
    has_embedding: bool = False
    has_loss: bool = False


@dataclass(frozen=True)
class StageLayout:
    """Contents of every global stage: chunk ``c`` of rank ``r`` is global stage ``c * pp + r``."""

    pp: int
    stages: tuple[StageContents, ...]

    @property
    def num_chunks(self) -> int:
        return len(self.stages) // self.pp

    def contents(self, rank: int, chunk: int = 0) -> StageContents:
        return self.stages[chunk * self.pp + rank]

    def chunks(self, rank: int) -> tuple[StageContents, ...]:
        return self.stages[rank :: self.pp]

    def describe(self) -> str:
        """Format the layout in the notation of --pipeline-model-parallel-layout."""
        return "|".join("E" * s.has_embedding + "t" * len(s.layer_numbers) + "L" * s.has_loss for s in self.stages)


def plan_stage_layout(config: ParallelConfig, num_layers: int, layout: str | None = None) -> StageLayout:
    """Distribute the layers over the stages according to the configuration.

    The default is an even split, in which the embedding and the loss can count as one layer each. If the number of
    layers on the first or the last rank is given, the rest are split evenly. ``layout`` (the value of
    --pipeline-model-parallel-layout) specifies every stage. A rank's layers are divided evenly over its chunks.

    Raises:
        ConfigurationError: there is no such split; lists every problem, with values that would work.
    """
    problems = list(_conflicts(config, layout))
    if num_layers < 1:
        problems.append(f"--num-layers {num_layers} is not a number of layers; use 1 or more")
    if config.pipeline_model_parallel_size < 1:
        problems.append(f"--pipeline-model-parallel-size {config.pipeline_model_parallel_size} must be 1 or more")
    if problems:
        raise ConfigurationError(problems)
    if layout is not None:
        counts, problems = _explicit_counts(config, num_layers, layout)
    else:
        counts, problems = _spread(config, num_layers)
    if problems:
        raise ConfigurationError(problems)
    return _number_layers(config.pipeline_model_parallel_size, tuple(counts))


def layout_problems(config: ParallelConfig, num_layers: int, layout: str | None = None) -> tuple[str, ...]:
    """Return why the layers cannot be distributed according to the configuration, one line per problem."""
    try:
        plan_stage_layout(config, num_layers, layout)
    except ConfigurationError as error:
        return error.problems
    return ()


# A search for the fastest layout requests the same layouts thousands of times.
@functools.lru_cache(maxsize=1024)
def _number_layers(pp: int, counts: tuple[int, ...]) -> StageLayout:
    stages, start = [], 0
    for stage, count in enumerate(counts):
        layers = tuple(range(start, start + count))
        stages.append(StageContents(layers, has_embedding=stage == 0, has_loss=stage == len(counts) - 1))
        start += count
    return StageLayout(pp, tuple(stages))


def _conflicts(config: ParallelConfig, layout: str | None) -> list[str]:
    """Return the conflicts between flags."""
    problems = []
    uneven = {
        "--decoder-first-pipeline-num-layers": config.decoder_first_pipeline_num_layers is not None,
        "--decoder-last-pipeline-num-layers": config.decoder_last_pipeline_num_layers is not None,
    }
    counting = {
        "--account-for-embedding-in-pipeline-split": config.account_for_embedding_in_pipeline_split,
        "--account-for-loss-in-pipeline-split": config.account_for_loss_in_pipeline_split,
    }
    virtual = {"--num-layers-per-virtual-pipeline-stage": config.num_layers_per_virtual_pipeline_stage is not None}
    chunks = {"--num-virtual-stages-per-pipeline-rank": config.num_virtual_stages_per_pipeline_rank is not None}

    def given(flags: dict[str, bool]) -> str:
        return " and ".join(name for name, is_given in flags.items() if is_given)

    others = given(uneven | counting | virtual)
    if layout is not None and others:
        problems.append(f"--pipeline-model-parallel-layout sets the stage of every layer; omit {others}")
    if given(uneven) and given(counting):
        problems.append(f"{given(counting)} requires an even split; omit {given(uneven)} or {given(counting)}")
    if given(uneven) and given(virtual):
        problems.append(
            f"--num-layers-per-virtual-pipeline-stage requires an even split; with {given(uneven)} use "
            "--num-virtual-stages-per-pipeline-rank"
        )
    if given(virtual) and given(chunks):
        problems.append(f"{given(virtual)} and {given(chunks)} set the same thing; omit one of them")
    return problems


def _explicit_counts(config: ParallelConfig, num_layers: int, layout: str) -> tuple[list[int], list[str]]:
    pp, chunks = config.pipeline_model_parallel_size, config.num_virtual_stages_per_pipeline_rank
    stages = parse_layout(layout, num_layers)
    problems = []
    if len(stages) % pp:
        below = len(stages) // pp * pp
        multiples = f"{below} or {below + pp}" if below else str(pp)
        problems.append(
            f"--pipeline-model-parallel-layout has {len(stages)} stages, not a multiple of "
            f"--pipeline-model-parallel-size {pp}; write {multiples} stages, or use a pipeline size of "
            f"{_listed(_divisors(len(stages)))}"
        )
    elif chunks is not None and len(stages) != pp * chunks:
        problems.append(
            f"--pipeline-model-parallel-layout has {len(stages) // pp} stages for each of {pp} ranks, but "
            f"--num-virtual-stages-per-pipeline-rank is {chunks}; use {len(stages) // pp} or omit it"
        )
    return [stage.count("t") for stage in stages], problems


def _spread(config: ParallelConfig, num_layers: int) -> tuple[list[int], list[str]]:
    """Return the number of layers of every global stage."""
    pp = config.pipeline_model_parallel_size
    first, last = config.decoder_first_pipeline_num_layers, config.decoder_last_pipeline_num_layers
    if first is not None or last is not None:
        per_rank, problems = _spread_unevenly(pp, num_layers, first, last)
        extras = ""
    else:
        counted = config.account_for_embedding_in_pipeline_split + config.account_for_loss_in_pipeline_split
        extras = f" and {counted} for the embedding and the loss" if counted else ""
        per_rank, problems = _spread_evenly(pp, num_layers, counted, extras)
    if problems:
        return [], problems
    chunks, problems = _num_chunks(config, per_rank)
    if problems:
        return [], problems
    counts = [per_rank[stage % pp] // chunks for stage in range(pp * chunks)]
    counts[0] -= config.account_for_embedding_in_pipeline_split
    counts[-1] -= config.account_for_loss_in_pipeline_split
    if min(counts) < 0:
        problems.append(
            f"{num_layers} layers{extras} leave a stage with {min(counts)} layers; raise --num-layers, or omit "
            "--account-for-embedding-in-pipeline-split or --account-for-loss-in-pipeline-split"
        )
    return counts, problems


def _spread_evenly(pp: int, num_layers: int, counted: int, extras: str) -> tuple[list[int], list[str]]:
    total = num_layers + counted
    if total % pp == 0:
        return [total // pp] * pp, []
    below = total // pp * pp - counted
    numbers = [number for number in (below, below + pp) if number > 0]
    return [], [
        f"cannot split {num_layers} layers{extras} evenly over --pipeline-model-parallel-size {pp} stages; use a "
        f"pipeline size of {_listed(_divisors(total))}, --num-layers {_listed(numbers)}, or set the split with "
        "--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers or --pipeline-model-parallel-layout"
    ]


def _spread_unevenly(pp: int, num_layers: int, first: int | None, last: int | None) -> tuple[list[int], list[str]]:
    problems = [
        f"{name} {value} must be 1 or more"
        for name, value in (
            ("--decoder-first-pipeline-num-layers", first),
            ("--decoder-last-pipeline-num-layers", last),
        )
        if value is not None and value < 1
    ]
    given = (first is not None) + (last is not None)
    if pp < 2:
        problems.append(
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers split layers over stages, but "
            f"--pipeline-model-parallel-size is {pp}; use 2 or more, or omit them"
        )
    if problems:
        return [], problems
    middle, rest = pp - given, num_layers - (first or 0) - (last or 0)
    fits = rest == 0 if middle == 0 else rest > 0 and rest % middle == 0
    if not fits:
        said = " and ".join(
            f"--decoder-{name}-pipeline-num-layers {value}"
            for name, value in (("first", first), ("last", last))
            if value is not None
        )
        flag = "--decoder-last-pipeline-num-layers" if last is not None else "--decoder-first-pipeline-num-layers"
        other = (first or 0) if last is not None else 0
        lowest = max(middle, 1) if middle else 0
        values = [v for v in range(1, num_layers - other + 1) if _leaves_even_rest(num_layers - other - v, middle)]
        rule = f"minimum {lowest}, and a multiple of {middle}" if middle else "0 required"
        return [], [
            f"{said}: cannot split the remaining {rest} of {num_layers} layers over {middle} other stages ({rule}); "
            + (f"use {flag} {_listed(values)}" if values else "lower the pipeline size or raise --num-layers")
        ]
    each = rest // middle if middle else 0
    head = [each if first is None else first]
    tail = [each if last is None else last]
    return head + [each] * (pp - 2) + tail, []


def _leaves_even_rest(rest: int, middle: int) -> bool:
    return rest == 0 if middle == 0 else rest > 0 and rest % middle == 0


def _num_chunks(config: ParallelConfig, per_rank: Sequence[int]) -> tuple[int, list[str]]:
    """Return the number of chunks into which each rank's layers are divided."""
    per_stage, chunks = config.num_layers_per_virtual_pipeline_stage, config.num_virtual_stages_per_pipeline_rank
    if per_stage is not None:
        if per_stage < 1 or per_rank[0] % per_stage:
            return 0, [
                f"--num-layers-per-virtual-pipeline-stage {per_stage} does not divide the {per_rank[0]} layers of a "
                f"pipeline rank; use {_listed(_divisors(per_rank[0]))}"
            ]
        return per_rank[0] // per_stage, []
    if chunks is None:
        return 1, []
    shared = [d for d in _divisors(max(per_rank)) if all(count % d == 0 for count in per_rank)]
    if chunks not in shared:
        counts = ", ".join(map(str, dict.fromkeys(per_rank)))
        return 0, [
            f"--num-virtual-stages-per-pipeline-rank {chunks} does not divide the {counts} layers of the pipeline "
            f"ranks; use {_listed(shared)}"
        ]
    return chunks, []


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _listed(numbers: Sequence[int]) -> str:
    """Format numbers as alternatives; the middle of a long list is left out."""
    shown = [str(number) for number in numbers]
    if len(shown) > 12:
        shown = [*shown[:6], "…", *shown[-3:]]
    return choices(shown) if len(shown) < 2 else f"{choices(shown[:-1])} or {shown[-1]}"
