"""Convert a checkpoint between layouts and formats, one tensor at a time, and verify the result."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence

from megatron.checkpoint import FORMATS, ConversionRequest, Target, Upcycling
from megatron.cli.arguments import (
    Parser,
    add_told_settings,
    declare_checkpoint_folder,
    declare_script,
    exit_status_of,
    local_folder,
    stored_folder,
    told_settings,
)

_CHECKPOINT_DECIDES = "the checkpoint's own configuration sets it"
NO_EFFECT: dict[str, tuple[bool, str]] = {
    "--megatron-path": (True, "Megatron-LM is not needed"),
    "--max-queue-size": (True, "one process reads and writes one tensor at a time"),
    "--no-checking": (False, "names and shapes are always checked; --no-verify skips the verification of the result"),
    "--loader-transformer-impl": (True, "the key names of both kinds of layers are supported"),
    "--saver-transformer-impl": (
        True,
        "the result has the key names of its source, or the key names of Megatron's local layers",
    ),
    "--model-size": (True, _CHECKPOINT_DECIDES),
    "--position-embedding-type": (True, _CHECKPOINT_DECIDES),
    "--use-mcore-models": (False, "there is only one model type"),
    "--sequential-save": (False, "tensors are always written one at a time"),
}
"""Flags of Megatron-LM's converter that have no effect: whether the flag takes a value, and why it has no effect."""
SINGLE_ONLY = ("--target-expert-tensor-parallel-size",)
"""Flags of Megatron-LM's converter that accept only the value 1."""

_EXPLAIN = "--explain-family"
_UPCYCLE = "--moe-use-upcycling"
TOKENIZER_FLAGS = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")


def build_parser() -> Parser:
    """Declare the flags."""
    parser = Parser(
        prog="convert.py",
        description=__doc__,
        epilog="Format names: --loader megatron detects native, torch or torch_dist. --saver megatron writes the "
        "format that --loader megatron detected, otherwise native. core, mcore and legacy are aliases of torch, "
        "llama_mistral is an alias of hf. See docs/converting.md.",
        allow_abbrev=False,
    )
    declare_script(parser)
    parser.add_argument("--model-type", choices=("GPT",), default="GPT", help="kind of model (GPT)")
    names = ", ".join(FORMATS)
    parser.add_argument("--loader", default="megatron", metavar="NAME", help=f"format to read: {names} (megatron)")
    parser.add_argument("--saver", default="megatron", metavar="NAME", help=f"format to write: {names} (megatron)")
    source = "folder of the checkpoint; with --loader hf also org/name or org/name@revision on the Hugging Face Hub"
    declare_checkpoint_folder(parser, "--load-dir", "--load", help=source, type=stored_folder)
    parser.add_argument("--save-dir", "--save", required=True, type=local_folder, metavar="DIR", help="folder to write")
    _declare_explanation(parser)
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to convert (the latest)")
    layout = parser.add_argument_group("layout of the result (by default the layout of the checkpoint)")
    layout.add_argument("--target-tensor-parallel-size", type=int, metavar="N", help="tensor-parallel size")
    layout.add_argument("--target-pipeline-parallel-size", type=int, metavar="N", help="number of pipeline stages")
    layout.add_argument("--target-expert-parallel-size", type=int, metavar="N", help="expert-parallel size")
    layout.add_argument(
        "--target-num-layers-per-virtual-pipeline-stage", type=int, metavar="N", help="layers per virtual stage"
    )
    layout.add_argument(
        "--make-vocab-size-divisible-by", type=int, metavar="N", help="pad the vocabulary to a multiple of N x TP"
    )
    content = parser.add_argument_group("content of the result")
    content.add_argument("--no-save-optim", action="store_true", help="do not write the optimizer state")
    content.add_argument(
        "--ema", action="store_true", help="write the EMA of the weights (--ema-decay) instead of the weights"
    )
    content.add_argument("--merge-lora", action="store_true", help="merge LoRA adapters into the base weights")
    content.add_argument(
        "--base-model",
        type=local_folder,
        metavar="DIR",
        help="base model of PEFT adapters (by default from adapter_config.json), or the unquantized weights for "
        "--merge-lora",
    )
    dtype = content.add_mutually_exclusive_group()
    dtype.add_argument(
        "--bf16", action="store_true", help="convert the weights to bfloat16 and drop the optimizer state"
    )
    dtype.add_argument(
        "--fp16", action="store_true", help="convert the weights to float16 and drop the optimizer state"
    )
    content.add_argument(
        "--true-vocab-size",
        type=int,
        metavar="N",
        help="vocabulary size without padding rows, for a Megatron-LM checkpoint",
    )
    content.add_argument("--tokenizer-type", metavar="TYPE", help="tokenizer to record (the checkpoint's own)")
    content.add_argument("--tokenizer-model", metavar="PATH", help="model file, or folder with tokenizer.json")
    content.add_argument("--vocab-file", metavar="FILE", help="vocabulary (GPT2BPETokenizer)")
    content.add_argument("--merge-file", metavar="FILE", help="byte-pair merges (GPT2BPETokenizer)")
    experts = parser.add_argument_group("upcycling of a dense model to experts that compute the same function")
    experts.add_argument(
        _UPCYCLE, action="store_true", help="replace every feed-forward layer by experts, and drop the optimizer state"
    )
    experts.add_argument("--num-experts", type=int, metavar="N", help="number of experts per layer")
    experts.add_argument("--moe-router-topk", type=int, metavar="K", help="number of experts per token (2)")
    experts.add_argument(
        "--moe-upcycling-granularity",
        type=int,
        metavar="G",
        help="width of the dense layer divided by an expert's (1); N and K are multiples of it",
    )
    add_told_settings(parser)
    check = parser.add_argument_group("verification")
    check.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="read the result back, compare every tensor bitwise and, if one side is Hugging Face, compare the logits "
        "(on)",
    )
    check.add_argument(
        "--test-logits",
        action="store_true",
        help="also compare the logits with those of the transformers package; needs host memory for the whole model in "
        "float32",
    )
    parser.add_argument("--checkpoint-type", choices=("hf", "meta"), help=argparse.SUPPRESS)
    return parser


def _declare_explanation(parser: Parser) -> None:
    parser.add_argument(
        _EXPLAIN,
        type=local_folder,
        metavar="DIR",
        help="convert nothing; print which model family reads this Hugging Face folder, and as which flags, or how its "
        "config.json differs from the most similar supported architecture. No other flag can be given",
    )


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[ConversionRequest, list[str]]:
    """Return the conversion request, and a line for each Megatron-LM converter flag that has no effect.

    A wrong command line prints one line and exits with status 2.
    """
    parser = build_parser()
    for name, (has_value, _) in NO_EFFECT.items():
        parser.add_argument(name, help=argparse.SUPPRESS, action="store" if has_value else "store_true")
    for name in SINGLE_ONLY:
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    parser.typed = sys.argv[1:] if argv is None else argv
    values, extras = parser.parse_known_args(argv)
    parser.typed = ()
    if extras:
        parser.error(_unknown(extras[0], parser))
    for name in ("loader", "saver"):
        given = getattr(values, name)
        if given not in FORMATS:
            nearest = difflib.get_close_matches(given, FORMATS, n=1, cutoff=0.4)
            hint = f"did you mean {nearest[0]}?" if nearest else f"one of {', '.join(FORMATS)}"
            parser.error(f"unknown --{name} {given}; {hint}")
    if FORMATS[values.saver] == "torchtitan":
        parser.error(
            "--saver torchtitan is not supported: torchtitan checkpoints can only be read; use --saver hf, which "
            "torchtitan can load"
        )
    for name in SINGLE_ONLY:
        size = getattr(values, _field(name))
        if size not in (None, 1):
            parser.error(f"{name} {size} is not supported: experts are sharded like the other layers; omit it")
    if values.true_vocab_size is not None and values.true_vocab_size < 1:
        parser.error(
            f"--true-vocab-size {values.true_vocab_size} is not positive; pass the size of the tokenizer's vocabulary"
        )
    if values.merge_lora and FORMATS[values.saver] == "peft":
        parser.error(
            "--merge-lora and --saver peft exclude each other: PEFT folders contain separate adapters; omit one of them"
        )
    if values.checkpoint_type == "meta":
        parser.error(
            "--checkpoint-type meta: Meta's own files cannot be read; use the Hugging Face folder of the model"
        )
    if values.checkpoint_type == "hf" and FORMATS[values.loader] != "hf":
        parser.error(f"--checkpoint-type hf: --loader {values.loader} reads a different format; use --loader hf")
    upcycling = _upcycling(values, parser)
    request = ConversionRequest(
        load_dir=values.load_dir,
        save_dir=values.save_dir,
        loader=values.loader,
        saver=values.saver,
        ckpt_step=values.ckpt_step,
        target=Target(
            tensor_parallel_size=values.target_tensor_parallel_size,
            pipeline_parallel_size=values.target_pipeline_parallel_size,
            expert_parallel_size=values.target_expert_parallel_size,
            num_layers_per_virtual_pipeline_stage=values.target_num_layers_per_virtual_pipeline_stage,
            make_vocab_size_divisible_by=values.make_vocab_size_divisible_by,
            params_dtype="bfloat16" if values.bf16 else "float16" if values.fp16 else None,
            keeps_optimizer=not values.no_save_optim,
        ),
        true_vocab_size=values.true_vocab_size,
        tokenizer={name: value for name in TOKENIZER_FLAGS if (value := getattr(values, name)) is not None},
        told=told_settings(values),
        verify=values.verify,
        test_logits=values.test_logits,
        merges_adapters=values.merge_lora,
        takes_averages=values.ema,
        base_model=values.base_model,
        upcycling=upcycling,
    )
    return request, [
        f"{name} has no effect: {reason}" for name, (_, reason) in NO_EFFECT.items() if getattr(values, _field(name))
    ]


def _upcycling(values: argparse.Namespace, parser: Parser) -> Upcycling | None:
    given = {
        "num_experts": values.num_experts,
        "topk": values.moe_router_topk,
        "granularity": values.moe_upcycling_granularity,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if not values.moe_use_upcycling:
        if given:
            flags = {"topk": "--moe-router-topk", "granularity": "--moe-upcycling-granularity"}
            name, value = next(iter(given.items()))
            parser.error(
                f"{flags.get(name, '--num-experts')} {value} changes nothing without {_UPCYCLE}; add {_UPCYCLE}, or "
                "omit it"
            )
        return None
    if "num_experts" not in given:
        parser.error(f"{_UPCYCLE} requires a number of experts; add --num-experts, for example 8")
    if FORMATS[values.saver] == "peft":
        parser.error(f"{_UPCYCLE} and --saver peft exclude each other: PEFT folders contain adapters; use --saver hf")
    upcycling = Upcycling(**given)
    if (problem := upcycling.problem()) is not None:
        parser.error(problem)
    return upcycling


def _unknown(word: str, parser: Parser) -> str:
    if not word.startswith("-"):
        return f"unexpected value {word!r}; a value must follow its flag"
    name = word.split("=", 1)[0]
    known = [option for action in parser._actions for option in action.option_strings]
    nearest = difflib.get_close_matches(name.replace("_", "-"), known, n=1)
    return f"unknown flag {name}" + (f"; did you mean {nearest[0]}?" if nearest else "")


def _field(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def main(argv: list[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status."""
    words = sys.argv[1:] if argv is None else argv
    if any(word.partition("=")[0] == _EXPLAIN for word in words):
        return _explain(words)
    request, notes = parse_arguments(argv)
    # Imported late, so that a wrong flag is reported before torch is imported.
    from megatron.checkpoint import convert

    for note in notes:
        print(note, flush=True)
    return exit_status_of(lambda: convert(request))


def _explain(words: Sequence[str]) -> int:
    """Print the explanation of a model folder and return the exit status."""
    parser = Parser(prog="convert.py", description=__doc__, allow_abbrev=False)
    _declare_explanation(parser)
    values, extras = parser.parse_known_args(words)
    if extras:
        parser.error(f"{_EXPLAIN} converts nothing and takes no other flag; omit {extras[0]}")
    # Imported late: no other use of the command needs the model families here.
    from megatron.checkpoint.formats.huggingface import explain_family

    return exit_status_of(lambda: print("\n".join(explain_family(values.explain_family))))
