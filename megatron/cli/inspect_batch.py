"""Print the samples of one training step: text, document, file and position in the blend.

megatron inspect-batch checkpoints --step 1000

The folder holds the checkpoints of the run. The step may be in the past or in the future. The hash of the samples is
compared with the hash in the run's metrics file.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.cli.arguments import Parser, declare_checkpoint_folder, declare_script, exit_status_of, stored_folder
from megatron.core.errors import TokenizerError, TrainingError
from megatron.core.tokenizers import NullTokenizer, Tokenizer, load_recorded_tokenizer
from megatron.training import StepPosition, find_step

_SHOWN_CHARACTERS = 300


def build_parser() -> Parser:
    """Declare the flags."""
    parser = Parser(
        prog="inspect_batch.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    declare_checkpoint_folder(parser, "--load", help="checkpoint folder of the run", type=stored_folder)
    declare_script(parser)
    parser.add_argument("--step", type=int, required=True, metavar="N", help="step (iteration) to show, counted from 1")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="checkpoint to use (the first after the step)")
    parser.add_argument("--metrics-jsonl", type=Path, metavar="FILE", help="metrics of the run (DIR/metrics.jsonl)")
    parser.add_argument("--max-samples", type=int, metavar="N", help="maximum number of samples to show (all)")
    parser.add_argument(
        "--width", type=int, default=_SHOWN_CHARACTERS, metavar="N", help="characters per text, 0 for all (300)"
    )
    parser.add_argument("--tokens", action="store_true", help="also show the token ids")
    parser.add_argument("--json", action="store_true", help="print one JSON object for the step, then one per sample")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status.

    The status is 1 if the samples differ from the metrics file.
    """
    return exit_status_of(functools.partial(inspect_batch, build_parser().parse_args(argv)))


def inspect_batch(arguments: argparse.Namespace) -> None:
    """Print the samples of one step.

    Raises:
        TrainingError: the hash of the samples differs from the hash in the metrics file.
    """
    position = find_step(arguments.load, arguments.step, arguments.ckpt_step, arguments.metrics_jsonl)
    tokenizer = _tokenizer_of(position)
    from megatron.training import StepSamples

    samples = StepSamples(position, tokenizer, _warn)
    end = position.first_sample + position.num_samples
    step = {
        "step": position.step,
        "first_sample": position.first_sample,
        "global_batch_size": position.num_samples,
        "sample_ids_hash": samples.hash,
        "recorded_hash": position.recorded_hash,
        "checkpoint": str(position.run.folder),
    }
    if arguments.json:
        print(json.dumps(step))
    else:
        print(f"step {position.step}: samples {position.first_sample} to {end - 1} of the run in {arguments.load}")
        print(f"sample_ids_hash {samples.hash} ({_describe_comparison(position, samples.hash)})")
    for number, sample in enumerate(samples):
        if arguments.max_samples is not None and number >= arguments.max_samples:
            break
        values = _describe(sample, tokenizer, arguments.tokens)
        print(json.dumps(values)) if arguments.json else _print_sample(values, arguments.width)
    if position.recorded_hash not in (None, samples.hash):
        raise TrainingError(
            f"step {position.step} was not trained on these samples: the metrics file has the hash "
            f"{position.recorded_hash}, but the data has the hash {samples.hash}; restore the data and the "
            "configuration of the run"
        )


def _describe_comparison(position: StepPosition, sample_hash: str) -> str:
    if position.recorded_hash is None:
        return "the metrics file does not have the step"
    return "equal to the metrics file's" if sample_hash == position.recorded_hash else "NOT equal to the metrics file's"


def _tokenizer_of(position: StepPosition) -> Tokenizer:
    """Load the tokenizer that the checkpoint records; if there is none, token ids are shown instead of text."""
    try:
        return load_recorded_tokenizer(position.run.folder)
    except TokenizerError as error:
        _warn(f"{error}; showing token ids")
        return NullTokenizer(position.run.config.model.vocab_size)


def _describe(sample: Any, tokenizer: Tokenizer, with_tokens: bool) -> dict[str, Any]:
    place = sample.place
    ids = [int(sample.sample["tokens"][0]), *sample.sample["labels"].tolist()]
    values: dict[str, Any] = {
        "sample": sample.sample_id,
        "microbatch": sample.microbatch,
        "data_parallel_rank": sample.data_parallel_rank,
        "data_set": place.data_set,
        "weight": sample.weight,
        "prefix": place.prefix,
        "sample_of_data_set": place.sample,
        "row": place.row,
        "num_tokens": len(ids),
        "pieces": list(_describe_pieces(sample, ids, tokenizer)),
    }
    return values | ({"tokens": ids} if with_tokens else {})


def _describe_pieces(sample: Any, ids: list[int], tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Yield each document's piece of the sample, with its text; one piece without a file for mock data."""
    if not sample.place.pieces:
        yield {"text": tokenizer.detokenize(ids)}
        return
    start = 0
    for piece in sample.place.pieces:
        length = piece.end - piece.begin
        yield {
            "file": f"{sample.place.prefix}.bin",
            "byte_offset": piece.byte_offset,
            "document": piece.document,
            "sequence": piece.sequence,
            "first_token": piece.begin,
            "end_token": piece.end,
            "text": tokenizer.detokenize(ids[start : start + length]),
        }
        start += length


def _print_sample(values: dict[str, Any], width: int) -> None:
    share = "" if values["weight"] is None else f" (weight {values['weight']:.4g})"
    print(
        f"\nsample {values['sample']}: micro-batch {values['microbatch']}, data-parallel rank "
        f"{values['data_parallel_rank']}; data set {values['data_set']}{share}: {values['prefix']}, its sample "
        f"{values['sample_of_data_set']} (row {values['row']}), {values['num_tokens']} tokens"
    )
    for piece in values["pieces"]:
        if "file" in piece:
            print(
                f"  document {piece['document']} (sequence {piece['sequence']}), tokens {piece['first_token']} to "
                f"{piece['end_token'] - 1}, {piece['file']} at byte {piece['byte_offset']}"
            )
        text = piece["text"]
        cut = text if not width or len(text) <= width else f"{text[:width]}…"
        print(f"    {cut!r}")
    if "tokens" in values:
        print(f"  token ids {' '.join(map(str, values['tokens']))}")


def _warn(line: str) -> None:
    print(line.strip(), file=sys.stderr)
