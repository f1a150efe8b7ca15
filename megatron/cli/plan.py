"""Search the fastest layout of a model for a number of GPUs, without a GPU.

python tools/plan.py --model-preset llama3.1-70b --gpus 64 --gpu h100-80gb --seq-length 8192 --global-batch-size 1024

Flags of pretrain_gpt.py can replace or modify the preset. Flags for the layout, recomputation, sharding, precision and
micro-batch size are ignored, since these settings are searched; with --fp4-format all layouts are in NVFP4. The launch
command of the best layout is printed. With --sensitivity the search is repeated with other GPU memory, sequence
lengths, batch sizes and numbers of GPUs.

python tools/plan.py --evaluate RUNS.json --output PREDICTIONS.json

python tools/plan.py --compare A.toml B.toml --gpus 64 [--gpu TYPE] [TRAINING-FLAGS]

A.toml and B.toml are files for --config of pretrain_gpt.py. Training flags apply to each. A table compares their
layouts, memory and time.

RUNS.json contains one record per run, as benchmarks/planner/measured_runs.json does. Every run is predicted for the
implementation and GPU type of its record, or for --implementation and --gpu. The errors are printed by model. A record
that is not of a training run is reported and skipped; the exit status is then 1, or 2 if no record remains.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.cli.arguments import Parser, declare_script, exit_status_of
from megatron.cli.planner_arguments import (
    HELP,
    add_imbalance,
    check_agreement,
    check_imbalance,
    check_world_size,
    describe_verified,
    find_platform,
    prepare_to_verify,
    read_planned_run,
    verify_fitting_plan,
    write_text,
)
from megatron.config import ParsedArguments, preset_names, preset_words, without_flags
from megatron.config.checks import find_problems
from megatron.core.console import waiting
from megatron.core.errors import ConfigurationError, DataError, MegatronError
from megatron.planner import (
    GPUS,
    IMPLEMENTATIONS,
    NATIVE,
    SEARCHED_FLAGS,
    Candidate,
    Choice,
    Recommendation,
    Search,
    Variation,
    describe_changes,
    describe_comparison,
    describe_errors,
    describe_experts,
    describe_ranking,
    describe_sensitivities,
    evaluate,
    explain,
    find_changes,
    find_implementation,
    find_sensitivity,
    has_flag,
    lacks_format,
    launch_command,
    ranking_json,
    read_runs,
    recommend,
    to_page,
    trace_in_this_process,
    variations,
)
from megatron.planner.search import search
from megatron.training import keep_arguments

if TYPE_CHECKING:
    from megatron.config import RunConfig
    from megatron.planner import Gpu, Implementation, VerifiedStage

_DEFAULT_GPU, _DEFAULT_IMPLEMENTATION = "h100-80gb", NATIVE.name
_DEFAULT_PRECISION, _DEFAULT_TOP = "both", 10
_OF_PLANS = (
    *("model_preset", "gpus", "precision", "train_tokens", "top", "json", "html", "verify", "compare", "sensitivity"),
    "expert_imbalance",
)
"""Arguments that cannot be combined with --evaluate."""
_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_ITERATIONS = 1000
"""Default length of a run."""
_MOST_ITERATIONS = 10**9
"""Maximum number of iterations, at which the number of samples still fits in an integer for any batch size."""
_OF_SEARCHES = ("precision", "train_tokens", "top", "json", "html", "verify", "sensitivity")
"""Arguments that cannot be combined with --compare."""
_PARSED_RANKS = 5
"""Maximum number of choices whose command lines are tried, best first, until one is valid."""


@dataclass(frozen=True)
class _Best:
    """Proposed choice, its command line with the flags that are recommended for it, and the results of its dry run."""

    choice: Choice
    parsed: ParsedArguments
    command: str
    recommended: tuple[Recommendation, ...]
    verified: tuple[VerifiedStage, ...]


def build_parser() -> Parser:
    """Declare the flags."""
    parser = Parser(
        prog="plan.py",
        usage="%(prog)s [--model-preset NAME] [TRAINING-FLAGS] --gpus N [--gpu TYPE] [--precision bf16|fp8|both] "
        "[--train-tokens N] [--sensitivity] [--verify]\n   or: %(prog)s --compare A.toml B.toml --gpus N [--gpu TYPE] "
        "[TRAINING-FLAGS]\n   or: %(prog)s --evaluate RUNS.json [--output PREDICTIONS.json] [--gpu TYPE]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    declare_script(parser, before=trace_in_this_process)
    parser.add_argument("--model-preset", metavar="NAME", help=f"one of {', '.join(preset_names())}")
    parser.add_argument("--gpus", "--world-size", type=int, metavar="N", help="number of GPUs")
    parser.add_argument("--precision", choices=("bf16", "fp8", "both"), help="GEMM precision to search (both)")
    parser.add_argument(
        "--train-tokens", metavar="N", help="tokens of the whole run, such as 300B, to print its duration in days"
    )
    parser.add_argument("--top", type=int, metavar="N", help="number of layouts to print (10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every layout and its outcome to this file")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write an HTML page about the best layout to this file"
    )
    parser.add_argument("--verify", action="store_true", default=None, help=HELP)
    parser.add_argument(
        "--sensitivity",
        action="store_true",
        default=None,
        help="search again with other GPU memory, sequence lengths, batch sizes and numbers of GPUs (a minute or more)",
    )
    parser.add_argument(
        "--compare", nargs="+", type=Path, metavar="FILE", help="compare configuration files (files for --config)"
    )
    parser.add_argument("--evaluate", type=Path, metavar="FILE", help="predict the measured runs in this file")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the predictions of --evaluate to this file")
    parser.add_argument(
        "--implementation",
        metavar="NAME",
        help=f"one of {', '.join(IMPLEMENTATIONS)} ({NATIVE.name}; with --evaluate, the record's)",
    )
    parser.add_argument(
        "--gpu",
        metavar="TYPE",
        help=f"one of {', '.join(GPUS)}, or a file of tools/calibrate.py (h100-80gb; with --evaluate, the record's)",
    )
    parser.add_deprecated_value("--implementation", "ours", NATIVE.name)
    add_imbalance(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status.

    The status is 2 for an invalid file or flag.
    """
    parser = build_parser()
    arguments, training_flags = parser.parse_known_args(argv)
    if arguments.evaluate is None:
        if arguments.output is not None:
            parser.error("--output is supported only with --evaluate; use --json or --html to write a plan")
        if arguments.compare is not None:
            given = _flags_of(arguments, _OF_SEARCHES)
            if given:
                parser.error(f"--compare is not supported with {', '.join(given)}; omit one of them")
            return exit_status_of(functools.partial(compare_files, arguments, training_flags))
        return exit_status_of(functools.partial(plan_run, arguments, training_flags))
    of_plans = _flags_of(arguments, _OF_PLANS)
    if of_plans:
        parser.error(f"--evaluate is not supported with {', '.join(of_plans)}; omit one of them")
    if training_flags:
        parser.error(f"--evaluate does not accept training flags: {' '.join(training_flags)}; omit them")
    return exit_status_of(functools.partial(evaluate_file, arguments))


def plan_run(arguments: argparse.Namespace, training_flags: Sequence[str]) -> None:
    """Rank all layouts and print the launch command of the best.

    Raises:
        ConfigurationError: the flags are invalid, no layout fits, or a file cannot be written.
    """
    if arguments.gpus is None:
        raise ConfigurationError("--gpus is missing; pass the number of GPUs to plan for, or --evaluate RUNS.json")
    top = _DEFAULT_TOP if arguments.top is None else arguments.top
    if top < 1:
        raise ConfigurationError(f"--top {top} is not positive; pass the number of layouts to print")
    check_world_size("--gpus", arguments.gpus)
    gpu = find_platform(arguments.gpu or _DEFAULT_GPU)
    name = arguments.implementation or _DEFAULT_IMPLEMENTATION
    implementation = find_implementation(name, arguments.expert_imbalance)
    if arguments.verify:
        prepare_to_verify(implementation)
    tokens = None if arguments.train_tokens is None else _number(arguments.train_tokens)
    if arguments.precision == "fp8" and not gpu.float8_flops:
        raise ConfigurationError(f"--precision fp8: {gpu.name} does not support FP8 GEMMs; use --precision bf16")
    typed = {word.partition("=")[0] for word in training_flags}
    preset = without_flags(preset_words(arguments.model_preset), typed) if arguments.model_preset else ()
    if not has_flag(training_flags, "--global-batch-size", "--step-batch-size-schedule"):
        raise ConfigurationError("--global-batch-size is missing; pass the number of samples per step")
    words = _complete((*preset, *training_flags), tokens)
    # Parsed for one rank, without the flags of the layout, which is searched.
    base = read_planned_run(_without_layout(words), 1)
    check_imbalance(arguments.expert_imbalance, base.config.model)
    config = dataclasses.replace(base.config, world_size=arguments.gpus)
    keep_arguments(config)
    if config.model.fp8.fp4_format is None:
        both = ("bf16", "fp8") if gpu.float8_flops else ("bf16",)
        precision = arguments.precision or _DEFAULT_PRECISION
        precisions = both if precision == "both" else (precision,)
    else:
        _check_nvfp4(arguments, training_flags, gpu, implementation)
        precisions = ("nvfp4",)
    with waiting("searching layouts") as tried:
        problems = functools.partial(find_problems, needs_files=False)
        found = search(config, gpu, implementation, precisions, problems, tried, max(top, _PARSED_RANKS))

    further: dict[str, Any] = {"expert_imbalance": implementation.expert_imbalance}

    def write_json() -> None:
        if arguments.json is not None:
            write_text("--json", arguments.json, json.dumps(ranking_json(found, tokens) | further, indent=1) + "\n")

    write_json()
    table = "\n".join(describe_ranking(found, found.ranked[:top], tokens))
    print(table)
    if arguments.expert_imbalance is not None:
        print("\n".join(describe_experts(config.model, implementation.expert_imbalance)))
    searched = [flag for flag in SEARCHED_FLAGS if has_flag(training_flags, flag)]
    if searched:
        print(f"searched instead of taken from the command line: {', '.join(searched)}")
    best = _best(
        *(found, words, arguments.gpus),
        functools.partial(recommend, read=read_planned_run, gpu=gpu, implementation=implementation),
        functools.partial(verify_fitting_plan, gpu=gpu) if arguments.verify else None,
    )
    if best is None:
        with waiting("searching for changes that would fit"):
            leanest = _leanest(words, arguments.gpus)
            changes = find_changes(leanest, arguments.gpus, read_planned_run, gpu, implementation)
        told = "; ".join(describe_changes(changes)) or "no single change helps: use more GPUs or more memory"
        raise ConfigurationError(f"no layout fits on {arguments.gpus} x {gpu.name}; changes that would fit: {told}")
    print(f"\nthe best, {best.choice.describe()}:\n{best.command}")
    for recommended in best.recommended:
        print(recommended.describe())
    further["recommended"] = [each.to_json() for each in best.recommended]
    write_json()
    for note in best.parsed.notes:
        print(note)
    if arguments.sensitivity:

        def best_of(variation: Variation) -> Candidate | None:
            varied = read_planned_run((*_without_layout(words), *variation.words), 1).config
            varied = dataclasses.replace(varied, world_size=variation.world_size)
            ranked = search(varied, variation.gpu, implementation, precisions, problems, wanted=1).ranked
            return ranked[0] if ranked else None

        with waiting("searching layouts of other runs"):
            sensitivities = [find_sensitivity(each, best_of) for each in variations(config, gpu)]
        further["sensitivities"] = [each.to_json() for each in sensitivities]
        write_json()
        shown = "\n".join(describe_sensitivities(sensitivities))
        print(f"\n{shown}")
        table += f"\n\n{shown}"
    if arguments.verify:
        further["verified"] = [each.to_json() for each in best.verified]
        write_json()
        comparison = "\n".join(describe_verified(best.verified))
        print(f"\n{comparison}")
        table += f"\n\n{comparison}"
    if arguments.html is not None:
        explanation = explain(best.parsed.config, best.parsed.notes, gpu, implementation)
        write_text("--html", arguments.html, to_page(explanation, (), table))
    check_agreement(best.verified)


def _check_nvfp4(
    arguments: argparse.Namespace, training_flags: Sequence[str], gpu: Gpu, implementation: Implementation
) -> None:
    """Check that layouts in NVFP4 can be searched.

    Raises:
        ConfigurationError: another precision is requested too, or the GPU or the implementation has no NVFP4.
    """
    others = [flag for flag in ("--fp8-format", "--fp8-hybrid", "--fp8-e4m3") if has_flag(training_flags, flag)]
    others += [] if arguments.precision is None else [f"--precision {arguments.precision}"]
    if others:
        raise ConfigurationError(f"--fp4-format and {others[0]} exclude each other; omit one of them")
    if not implementation.is_traced:
        raise ConfigurationError(
            f"--fp4-format is not predicted for --implementation {implementation.name}; use {NATIVE.name}"
        )
    if (problem := lacks_format(gpu, in_nvfp4=True)) is not None:
        raise ConfigurationError(f"--fp4-format: {problem}, or omit it")


def compare_files(arguments: argparse.Namespace, training_flags: Sequence[str]) -> None:
    """Print a table of the layouts, memory and times of several configurations.

    Raises:
        ConfigurationError: there are fewer than two files, or the flags or a file are invalid.
    """
    files = arguments.compare
    if len(files) < 2:
        raise ConfigurationError(f"--compare {files[0]} is one file; pass two or more")
    if arguments.gpus is None:
        raise ConfigurationError("--gpus is missing; pass the number of GPUs of the runs")
    check_world_size("--gpus", arguments.gpus)
    gpu = find_platform(arguments.gpu or _DEFAULT_GPU)
    name = arguments.implementation or _DEFAULT_IMPLEMENTATION
    implementation = find_implementation(name, arguments.expert_imbalance)
    trace_in_this_process()
    preset = preset_words(arguments.model_preset) if arguments.model_preset else ()
    explanations = []
    for file in files:
        try:
            parsed = read_planned_run((*preset, *training_flags, "--config", str(file)), arguments.gpus)
        except ConfigurationError as error:
            raise ConfigurationError([f"--compare {file}: {problem}" for problem in error.problems]) from error
        check_imbalance(arguments.expert_imbalance, parsed.config.model)
        explanations.append(explain(parsed.config, parsed.notes, gpu, implementation))
    names = [file.stem for file in files]
    if len(set(names)) < len(names):
        names = list(map(str, files))
    print("\n".join(describe_comparison(names, explanations)))
    for name, explanation in zip(names, explanations):
        if explanation.prediction.reason:
            print(f"{name}: {explanation.prediction.reason}")


def evaluate_file(arguments: argparse.Namespace) -> None:
    """Predict the measured runs in a file, write the predictions and print the errors; skip records of other kinds.

    Raises:
        DataError: the file does not contain measured runs, or none of its records is of a training run.
        ConfigurationError: a name is unknown, or the predictions cannot be written.
        MegatronError: predictions were written, and some records were skipped.
    """
    trace_in_this_process()
    implementation = None if arguments.implementation is None else find_implementation(arguments.implementation)
    gpu = None if arguments.gpu is None else find_platform(arguments.gpu)
    left_out: list[DataError] = []
    evaluated = evaluate(read_runs(arguments.evaluate, left_out), implementation, gpu, left_out=left_out)
    if left_out and not evaluated:
        more = f" (and {len(left_out) - 1} records more)" if len(left_out) > 1 else ""
        raise DataError(f"{left_out[0]}{more}")
    if arguments.output is not None:
        predictions = {"runs": [each.to_json() for each in evaluated]}
        write_text("--output", arguments.output, json.dumps(predictions, indent=1) + "\n")
    print("\n".join(describe_errors(evaluated)))
    for error in left_out:
        print(f"WARNING: skipped: {error}", file=sys.stderr)
    if left_out:
        raise MegatronError(
            f"{len(left_out)} of {len(evaluated) + len(left_out)} records of {arguments.evaluate} were skipped (see "
            "the warnings above); complete or remove them"
        )


def _flags_of(arguments: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Return those flags of ``names`` that the command line contains."""
    return [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) is not None]


def _complete(words: Sequence[str], tokens: int | None) -> tuple[str, ...]:
    """Add the settings that a run requires and planning does not: data, learning rate and length.

    Raises:
        ConfigurationError: the flags are invalid.
    """
    added: list[str] = []
    if not any(word.split("=")[0].endswith(("data-path", "data-args-path", "--mock-data")) for word in words):
        added.append("--mock-data")
    if not has_flag(words, "--lr"):
        added += ["--lr", "3e-4"]
    completed = (*words, *added)
    if has_flag(words, "--train-iters", "--train-samples"):
        return completed
    if tokens is None:
        return (*completed, "--train-iters", str(_ITERATIONS))
    # The number of tokens is an upper bound of the iterations, used until the tokens per step are known.
    most = str(min(tokens, _MOST_ITERATIONS))
    config = read_planned_run(_without_layout((*completed, "--train-iters", most)), 1).config
    tokens_per_step = config.data.seq_length * config.training.global_batch_size
    return (*completed, "--train-iters", str(max(1, tokens // tokens_per_step)))


def _without_layout(words: Sequence[str]) -> tuple[str, ...]:
    return (*without_flags(words, SEARCHED_FLAGS), "--bf16", "--micro-batch-size", "1")


def _leanest(words: Sequence[str], world_size: int) -> tuple[str, ...]:
    """Add the layout that needs the least memory per GPU on nodes of eight GPUs."""
    size = min(8, world_size)
    choice = Choice(
        tp=size,
        pp=1,
        cp=1,
        chunks=1,
        counts_ends=False,
        micro_batch_size=1,
        recompute="full",
        sharding="optim_grads" if world_size > size else "no_shard",
        precision="bf16",
    )
    return choice.words(words)


def _best(
    found: Search,
    words: Sequence[str],
    world_size: int,
    recommend_for: Callable[[Sequence[str], int], tuple[Recommendation, ...]],
    verify: Callable[[RunConfig], Sequence[VerifiedStage]] | None,
) -> _Best | None:
    """Return the fastest choice whose command line is valid and whose dry run fits in memory; None if nothing fits.

    The command line has the recommended flags too.

    Raises:
        ConfigurationError: all of the first few choices are invalid, with the reasons.
    """
    problems: list[str] = []
    for each in found.ranked[:_PARSED_RANKS]:
        chosen = each.choice.words(words)
        try:
            read_planned_run(chosen, world_size)
            recommended = recommend_for(chosen, world_size)
            chosen = (*chosen, *itertools.chain.from_iterable(each.flags for each in recommended))
            parsed = read_planned_run(chosen, world_size)
            verified = () if verify is None else tuple(verify(parsed.config))
        except ConfigurationError as error:
            problems += error.problems
        else:
            return _Best(each.choice, parsed, launch_command(chosen, world_size), recommended, verified)
    if problems:
        raise ConfigurationError(problems)
    return None


def _number(text: str) -> int:
    """Parse a number of tokens, which may end in K, M, B or T.

    Raises:
        ConfigurationError: the text is not a number of tokens.
    """
    unit = _UNITS.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    try:
        number = float(digits) * unit
    except ValueError:
        number = 0.0
    if not 1 <= number < 1e18:
        raise ConfigurationError(f"--train-tokens {text} is not a number of tokens; use a number such as 300B or 15T")
    return int(number)
