"""Evaluate a model on lm-evaluation-harness tasks, or compute the perplexity of texts.

Run with plain python for one process, or under torchrun at any tensor- and pipeline-parallel size: a checkpoint of any
layout is resharded. Tasks are those of the package lm-eval (the extra eval) and of your own task files:

    megatron evaluate checkpoints --tasks my_task --include-path tasks
    megatron evaluate checkpoints --text held_out.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.cli.generation_arguments import Parser, add_model_flags, model_request, run_on_ranks
from megatron.core.console import ProgressBar
from megatron.core.errors import ConfigurationError, DataError, InputError
from megatron.serving import Checkpoint, load_engine, open_checkpoint
from megatron.training import LaunchEnvironment, shut_down

if TYPE_CHECKING:
    from megatron.core.datasets import ChatTemplate
    from megatron.evaluation import HarnessTasks, ModelRanks, TextEncoding

_DEFAULT_LENGTH = 2048
_DEFAULT_SEED = 1234
_DEFAULT_KEY = "text"
_OF_TASKS = ("include_path", "num_fewshot", "limit", "log_samples", "apply_chat_template", "seed")
_OF_TEXTS = ("json_key",)


def build_parser() -> Parser:
    """Declare the flags."""
    parser = Parser(
        prog="evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.hint_for_extra_words = "pass texts with --text FILE … and tasks with --tasks TASK …"
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="task names or files, separated by spaces or commas")
    parser.add_argument(
        "--text", nargs="+", metavar="FILE", help=".jsonl files (one document per line) or text files (one document)"
    )
    parser.add_argument(
        "--output", metavar="FILE", help="JSON file for the results; with --text, one object per document"
    )
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="sequences per batch (16)")
    parser.add_argument("--max-length", type=int, metavar="N", help="context length in tokens (the model's own)")
    tasks = parser.add_argument_group("tasks")
    tasks.add_argument("--include-path", metavar="DIR", help="folder with your own task files (.yaml)")
    tasks.add_argument("--num-fewshot", type=int, metavar="N", help="few-shot examples per question (the task's own)")
    tasks.add_argument("--limit", type=int, metavar="N", help="only the first N questions of each task")
    tasks.add_argument("--log-samples", action="store_true", help="write each question and answer to --output")
    tasks.add_argument(
        "--apply-chat-template",
        action="store_true",
        help="format questions with the tokenizer's chat template",
    )
    tasks.add_argument("--seed", type=int, metavar="N", help="sampling seed (1234)")
    texts = parser.add_argument_group("texts")
    texts.add_argument("--json-key", metavar="KEY", help="JSON key of the text in .jsonl files (text)")
    add_model_flags(parser)
    return parser


def check_arguments(arguments: argparse.Namespace) -> None:
    """Check the values of the flags and report every problem at once.

    Raises:
        ConfigurationError: a value is invalid.
    """
    problems = []
    if arguments.tasks is not None:
        arguments.tasks = [name for word in arguments.tasks for name in word.split(",") if name]
    if not arguments.tasks and not arguments.text:
        problems.append("there is nothing to evaluate; pass --tasks TASK … or --text FILE …")
    if arguments.tasks and arguments.text:
        problems.append("--tasks and --text exclude each other; omit one of them")
    others = _OF_TEXTS if arguments.tasks else _OF_TASKS
    if bool(arguments.tasks) != bool(arguments.text):
        needed = "--text FILE …" if arguments.tasks else "--tasks TASK …"
        problems += [
            f"--{name.replace('_', '-')} has no effect without {needed}; omit it"
            for name in others
            if getattr(arguments, name) not in (None, False)
        ]
    for name in ("batch_size", "max_length", "limit"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            problems.append(f"--{name.replace('_', '-')} {value} is not positive")
    for name in ("num_fewshot", "seed"):
        value = getattr(arguments, name)
        if value is not None and value < 0:
            problems.append(f"--{name.replace('_', '-')} {value} is negative")
    if arguments.log_samples and arguments.output is None:
        problems.append("--log-samples needs an output file; add --output FILE")
    if arguments.output is not None and not Path(arguments.output).absolute().parent.is_dir():
        problems.append(
            f"--output {arguments.output} is in a folder that does not exist; create it, or use a different file"
        )
    if problems:
        raise ConfigurationError(problems)


def most_tokens(asked: int | None, checkpoint: Checkpoint) -> int:
    """Return the context length in tokens.

    Raises:
        ConfigurationError: ``asked`` exceeds the number of learned position embeddings.
    """
    config = checkpoint.config
    has_limit = config.position_embedding_type == "learned_absolute"
    if asked is not None and has_limit and asked > config.max_position_embeddings:
        raise ConfigurationError(
            f"--max-length {asked} is greater than the model's {config.max_position_embeddings} learned positions; "
            "lower it"
        )
    return asked or config.max_position_embeddings or _DEFAULT_LENGTH


def run(arguments: argparse.Namespace, launch: LaunchEnvironment) -> None:
    """Evaluate and print the results.

    Raises:
        InputError: a flag, a task, a text or the checkpoint is invalid.
    """
    check_arguments(arguments)
    model = model_request(arguments)
    tasks = _load_tasks(arguments) if arguments.tasks and launch.rank == 0 else None
    checkpoint = open_checkpoint(model, launch)
    max_length = most_tokens(arguments.max_length, checkpoint)
    template = _template(checkpoint) if arguments.apply_chat_template else None
    from megatron.evaluation import ModelRanks, TextEncoding

    encoding = TextEncoding(checkpoint.tokenizer)
    try:
        engine = load_engine(checkpoint, launch)
        state = engine.state
        bar = ProgressBar()
        ranks = ModelRanks(engine, encoding, state.world, state.dp, arguments.batch_size, show=bar.show)

        def drive() -> None:
            if tasks is None:
                _measure_texts(arguments, ranks, encoding, max_length, bar)
            else:
                _run_tasks(arguments, tasks, ranks, encoding, max_length, bar, template)

        ranks.lead(drive)
    finally:
        shut_down()


def _load_tasks(arguments: argparse.Namespace) -> HarnessTasks:
    from megatron.evaluation import HarnessTasks, TaskChoice

    return HarnessTasks(
        TaskChoice(tuple(arguments.tasks), arguments.include_path, arguments.num_fewshot, arguments.limit)
    )


def _template(checkpoint: Checkpoint) -> ChatTemplate:
    try:
        template = checkpoint.chat_template(None)
    except DataError as error:
        raise DataError(f"--apply-chat-template: {error}; leave it out, or fix that template") from error
    if template is None:
        raise DataError("--apply-chat-template: the tokenizer's files hold no chat template; leave it out, or add one")
    return template


def _run_tasks(
    arguments: argparse.Namespace,
    tasks: HarnessTasks,
    ranks: ModelRanks,
    encoding: TextEncoding,
    max_length: int,
    bar: ProgressBar,
    template: ChatTemplate | None,
) -> None:
    from megatron.evaluation import HarnessModel, table_of

    form = None if template is None else template.render_prompt
    model = HarnessModel(ranks, encoding, max_length, form, _DEFAULT_SEED if arguments.seed is None else arguments.seed)
    results = tasks.run(model, with_samples=arguments.log_samples)
    bar.clear()
    print(table_of(results), flush=True)
    if arguments.output is not None:
        _write(arguments.output, [json.dumps(results, indent=2, default=str, ensure_ascii=False)])


def _measure_texts(
    arguments: argparse.Namespace, ranks: ModelRanks, encoding: TextEncoding, max_length: int, bar: ProgressBar
) -> None:
    from megatron.evaluation import in_all, measure_texts, read_documents

    documents = list(read_documents(arguments.text, arguments.json_key or _DEFAULT_KEY))
    if not documents:
        raise InputError(f"--text {' '.join(arguments.text)} contains no document")
    found = []
    for each in measure_texts(ranks, encoding, documents, max_length):
        found.append(each)
        bar.clear()
        print(f"{each.name} | tokens: {each.num_tokens} | perplexity: {each.perplexity:.4f} |", flush=True)
    total = in_all(found)
    print(
        f"{total.name} | tokens: {total.num_tokens} | loss: {-total.log_likelihood / max(total.num_tokens, 1):.6f} | "
        f"perplexity: {total.perplexity:.4f} | bits per byte: {total.bits_per_byte:.6f} |",
        flush=True,
    )
    if arguments.output is not None:
        _write(arguments.output, [json.dumps(each.as_json(), ensure_ascii=False) for each in [*found, total]])


def _write(path: str, lines: Sequence[str]) -> None:
    try:
        Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write --output {path}: {error.strerror}; use a different file") from error


def main(argv: list[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status."""
    return run_on_ranks(build_parser(), run, argv)
