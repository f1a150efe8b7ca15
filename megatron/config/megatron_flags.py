"""Flags of Megatron-LM without a field: flags without effect, and unsupported flags.

Every known flag sets a field, is accepted with a note why it has no effect, or is rejected by name with "not supported
yet". This file has the tables of the last two kinds. All other flags are unknown.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.config.run_config import RunConfig

Arity = int | str
"""Number of values that a flag takes: 0, 1 or "+"."""


@dataclasses.dataclass(frozen=True)
class NoEffect:
    """Flag without effect; ``reason`` completes "--flag has no effect: ...".

    Values in ``quiet`` match the actual behavior and produce no note. If ``accepted`` is given, other values would
    change results and are rejected as unsupported. The field ``excluded`` is the opposite of the flag.
    """

    arity: Arity
    reason: str
    quiet: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    excluded: str | None = None


FUSIONS = {
    "--no-masked-softmax-fusion": "masked_softmax_fusion",
    "--no-bias-swiglu-fusion": "bias_swiglu_fusion",
    "--no-bias-dropout-fusion": "bias_dropout_fusion",
    "--no-rope-fusion": "apply_rope_fusion",
}
"""Megatron's argument of each switch without effect that turns a fusion off."""


def unused_fusions(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return Megatron's arguments of the fusions that the given switches turn off."""
    return tuple(argument for name, argument in FUSIONS.items() if TABLE_PREFIX + name in given)


@dataclasses.dataclass(frozen=True)
class NotSupported:
    """Flag of an unsupported feature; its ``default`` value is accepted without a note.

    If ``instead`` is empty, `refusal_reason` suggests an alternative.
    """

    arity: Arity
    default: str | None = None
    instead: str = ""


_TOKEN_FILES = ("mmap", "lazy", "cached", "infer")
_FUSION = "results are the same with and without this fusion"
_ONE_LOGGER = "one-logger is not supported"
_CKPT_FORMAT = "--ckpt-format sets the format to write, and the format to load is detected"
_WRITERS = "the checkpoint format determines what each rank writes"
_TP_OVERLAP = "tensor-parallel communication always overlaps with the wgrad GEMM if the device can"

NO_EFFECT: dict[str, NoEffect] = {
    # data
    "--data-impl": NoEffect(1, "token files are always memory-mapped .bin/.idx pairs", accepted=_TOKEN_FILES),
    "--dataset-impl": NoEffect(1, "token files are always memory-mapped .bin/.idx pairs", accepted=_TOKEN_FILES),
    "--mmap-warmup": NoEffect(0, "token files are read on demand"),
    "--num-dataset-builder-threads": NoEffect(1, "each index is built once, by the first rank of a node", quiet=("1",)),
    "--no-data-sharding": NoEffect(0, "the order of samples does not depend on the data-parallel size"),
    "--trust-remote-code": NoEffect(0, "custom code of tokenizers and models is never run"),
    "--legacy-tokenizer": NoEffect(0, "there is only one implementation of each tokenizer"),
    "--allow-ambiguous-pad-tokens": NoEffect(0, "padding is always excluded from the loss"),
    "--mid-level-dataset-surplus": NoEffect(
        1, "the surplus of a blend's data sets is fixed at 0.005", accepted=("0.005",)
    ),
    "--no-create-attention-mask-in-dataloader": NoEffect(0, "attention is causal without a mask in the data"),
    # the model and its kernels
    "--apply-query-key-layer-scaling": NoEffect(0, "attention scores cannot overflow in float16"),
    "--use-mcore-models": NoEffect(0, "there is only one implementation of each model"),
    "--transformer-type": NoEffect(1, "there is only one implementation of each model", accepted=("megatron",)),
    "--attention-softmax-in-fp32": NoEffect(0, "the attention softmax is always computed in float32"),
    "--no-masked-softmax-fusion": NoEffect(0, _FUSION),
    "--no-bias-swiglu-fusion": NoEffect(0, _FUSION),
    "--no-bias-dropout-fusion": NoEffect(0, _FUSION),
    "--no-rope-fusion": NoEffect(0, _FUSION),
    "--moe-grouped-gemm": NoEffect(0, "experts always use grouped GEMM"),
    "--moe-use-legacy-grouped-gemm": NoEffect(0, "there is only one implementation of grouped GEMM"),
    "--moe-permute-fusion": NoEffect(0, _FUSION),
    "--moe-router-fusion": NoEffect(0, _FUSION),
    "--moe-enable-deepep": NoEffect(0, "--moe-token-dispatcher-type flex uses DeepEP without it"),
    "--moe-hybridep-num-sms": NoEffect(1, "HybridEP is not used"),
    "--mla-down-proj-fusion": NoEffect(0, _FUSION),
    "--cache-mla-latents": NoEffect(0, "generation with MLA always caches the latent vectors"),
    "--cross-entropy-loss-fusion": NoEffect(0, _FUSION),
    "--no-persist-layer-norm": NoEffect(0, _FUSION),
    "--memory-efficient-layer-norm": NoEffect(0, _FUSION),
    "--disable-jit-fuser": NoEffect(0, _FUSION),
    "--cpu-offloading-activations": NoEffect(0, "--cpu-offloading offloads activations by default"),
    "--no-cpu-offloading-weights": NoEffect(
        0, "weights are not offloaded unless --cpu-offloading-weights is set", excluded="cpu_offloading_weights"
    ),
    "--use-cpu-initialization": NoEffect(0, "initial weights do not depend on the device"),
    "--no-initialization": NoEffect(0, "weights are initialized before a checkpoint replaces them"),
    "--init-model-with-meta-device": NoEffect(0, "initial weights do not depend on how they are allocated"),
    "--moe-per-layer-logging": NoEffect(0, "metrics.jsonl and TensorBoard always have the expert load per layer"),
    "--enable-experimental": NoEffect(0, "it enables no feature"),
    "--test-mode": NoEffect(0, "it is used only in Megatron-LM's own tests"),
    "--onnx-safe": NoEffect(1, "nothing is exported to ONNX"),
    "--muon-tp-mode": NoEffect(
        1, "the rank that owns a matrix updates it as a whole", accepted=("distributed", "duplicated")
    ),
    "--te-rng-tracker": NoEffect(0, "random number streams do not depend on transformer-engine"),
    "--inference-rng-tracker": NoEffect(0, "random number streams do not depend on inference"),
    # parallelism
    "--DDP-impl": NoEffect(1, "there is only one implementation of data parallelism", accepted=("local", "torch")),
    "--no-async-tensor-model-parallel-allreduce": NoEffect(0, _TP_OVERLAP),
    "--accumulate-allreduce-grads-in-fp32": NoEffect(
        0,
        "gradients of half-precision parameters are accumulated in float32 unless --grad-reduce-in-bf16 is set",
        excluded="grad_reduce_in_bf16",
    ),
    "--tp-comm-bootstrap-backend": NoEffect(1, "overlapped communication uses the existing process groups"),
    "--no-async-tensor-model-parallel-allreduce-in-layernorm": NoEffect(0, _TP_OVERLAP),
    "--no-contiguous-buffers-in-local-ddp": NoEffect(0, "gradients are always in contiguous buffers"),
    "--no-scatter-gather-tensors-in-pipeline": NoEffect(0, "each rank sends only its own part to the next stage"),
    "--overlap-p2p-communication": NoEffect(0, "it is the default; --no-overlap-p2p-communication turns it off"),
    "--overlap-p2p-communication-warmup-flush": NoEffect(0, "communication overlaps with compute in all phases"),
    "--no-align-grad-reduce": NoEffect(0, "each pipeline stage reduces its own gradients"),
    "--no-align-param-gather": NoEffect(0, "each pipeline stage gathers its own parameters"),
    "--lazy-mpu-init": NoEffect(1, "process groups are created at start-up"),
    "--high-priority-stream-groups": NoEffect("+", "all communicators have high-priority streams"),
    "--use-sharp": NoEffect(0, "communicators use NCCL's settings"),
    "--disable-gloo-process-groups": NoEffect(0, "only the required process groups are created"),
    "--enable-gloo-process-groups": NoEffect(0, "only the required process groups are created"),
    # checkpoints
    "--flash-save": NoEffect(0, _WRITERS),
    "--flash-load": NoEffect(0, "each rank always reads only its part of a checkpoint"),
    "--use-dist-ckpt": NoEffect(0, _CKPT_FORMAT),
    "--dist-ckpt-format": NoEffect(1, _CKPT_FORMAT, accepted=("torch_dist",)),
    "--auto-detect-ckpt-format": NoEffect(0, "the format of a checkpoint is always detected"),
    "--ckpt-fully-parallel-save": NoEffect(0, _WRITERS),
    "--no-ckpt-fully-parallel-save": NoEffect(0, _WRITERS),
    "--ckpt-fully-parallel-load": NoEffect(0, "loading is always distributed over the ranks"),
    "--ckpt-assume-constant-structure": NoEffect(
        0, ("the native format caches the save plan; the other formats plan each save")
    ),
    "--use-persistent-ckpt-worker": NoEffect(0, "--async-save uses a thread per rank"),
    "--dist-ckpt-save-pre-mcore-014": NoEffect(0, "there is only one version of torch_dist checkpoints"),
    "--dist-ckpt-optim-fully-reshardable": NoEffect(0, "the optimizer's state can always be resharded"),
    "--no-use-tokenizer-model-from-checkpoint-args": NoEffect(0, "training takes its tokenizer from the command line"),
    # running and reporting
    "--no-manual-gc-eval": NoEffect(0, "evaluations do not run the garbage collector"),
    "--log-timers-to-console": NoEffect(0, "--timing-log-level controls timers on the console"),
    "--no-barrier-with-level-1-timing": NoEffect(0, "timers use no barriers"),
    "--no-barrier-with-L1-time": NoEffect(0, "timers use no barriers"),
    "--logging-level": NoEffect(1, "there is only one log level"),
    "--train-sync-interval": NoEffect(1, "a reduction synchronizes the ranks in each iteration"),
    "--enable-one-logger": NoEffect(0, _ONE_LOGGER),
    "--no-one-logger": NoEffect(0, _ONE_LOGGER),
    "--one-logger-project": NoEffect(1, _ONE_LOGGER),
    "--one-logger-run-name": NoEffect(1, _ONE_LOGGER),
    "--one-logger-async": NoEffect(0, _ONE_LOGGER),
    "--app-tag-run-name": NoEffect(1, _ONE_LOGGER),
    "--app-tag-run-version": NoEffect(1, _ONE_LOGGER),
    "--disable-straggler-on-startup": NoEffect(
        0, "stragglers are only detected with --log-straggler", excluded="log_straggler"
    ),
}

_SWITCHES = [
    "--use-legacy-models",
    "--fp8-dot-product-attention",
    "--fp8-multi-head-attention",
    "--use-tp-pp-dp-mapping",
    "--use-ring-exchange-p2p",
    "--standalone-embedding-stage",
    "--init-method-xavier-uniform",
    "--fp32-residual-connection",
    "--qk-l2-norm",
    "--moe-extended-tp",
    "--fp4-param-gather",
    "--moe-router-padding-for-fp8",
    "--moe-router-padding-for-quantization",
    "--moe-apply-probs-on-input",
    "--moe-enable-routing-replay",
    "--overlap-moe-expert-parallel-comm",
    "--log-energy",
    "--adlr-autoresume",
    "--decrease-batch-size-if-needed",
    "--multiple-validation-sets",
    "--renormalize-blend-weights",
    "--calc-ft-timeouts",
    "--enable-ft-package",
    "--use-mp-args-from-checkpoint-args",
    "--reuse-grad-buf-for-mxfp8-param-ag",
    "--no-mmap-index-files",
]

NOT_SUPPORTED: dict[str, NotSupported] = {
    **{switch: NotSupported(0) for switch in _SWITCHES},
    "--data-parallel-random-init": NotSupported(0),
    "--fp16-lm-cross-entropy": NotSupported(0, instead="omit it: the loss is computed in float32"),
    # parallelism
    "--pipeline-model-parallel-split-rank": NotSupported(1),
    # other models
    "--moe-input-jitter-eps": NotSupported(1),
    "--moe-use-upcycling": NotSupported(0, instead="use megatron convert --moe-use-upcycling, and load the result"),
    "--rotary-scale-factor": NotSupported(
        1, "1", instead="use --rotary-seq-len-interpolation-factor to divide positions"
    ),
    "--spec": NotSupported("+"),
    "--external-cuda-graph": NotSupported(0, instead="use --cuda-graph-impl local"),
    "--cuda-graph-scope": NotSupported("+", "full", instead="omit it: --cuda-graph-impl local captures whole layers"),
    "--fp4-recipe": NotSupported(1, "nvfp4"),
    "--fp4-quantizer-factory": NotSupported(1),
    # training
    "--adlr-autoresume-interval": NotSupported(1, "1000"),
    "--yaml-cfg": NotSupported(1),
    "--s3-cache-path": NotSupported(1),
    "--object-storage-cache-path": NotSupported(1),
    # checkpoints
    "--ckpt-convert-format": NotSupported(1),
    "--ckpt-convert-save": NotSupported(1),
    "--ckpt-convert-update-legacy-dist-opt-format": NotSupported(0),
    "--non-persistent-ckpt-type": NotSupported(1, "local"),
    "--non-persistent-global-ckpt-dir": NotSupported(1),
    "--non-persistent-local-ckpt-algo": NotSupported(1, "fully_parallel"),
    "--replication-factor": NotSupported(1, "2"),
    # reporting
    "--straggler-ctrlr-port": NotSupported(1, "65535"),
}


_EXPERTS = "omit it: experts are built without it (docs/mixture_of_experts.md)"
_WATCH = "monitor the run with the log, --metrics-jsonl and --timing-log-level"
_LOCAL_COPIES = (
    "--non-persistent-save-interval N keeps checkpoint copies of type local in host memory for --inprocess-restart; "
    "--save-interval N --keep-last M saves often and keeps only the newest M checkpoints"
)
_RESTART = "start the run again with the same flags: it resumes from its newest checkpoint"

REASONS: tuple[tuple[str, str], ...] = (
    ("--moe-extended-tp", "use --expert-tensor-parallel-size, or --expert-model-parallel-size"),
    ("--moe-router-padding-for-", "omit it: FP8 GEMMs of experts accept any number of tokens"),
    ("--moe-", _EXPERTS),
    ("--overlap-moe-", _EXPERTS),
    ("--fp4-param-gather", "weights are gathered in the model's precision; omit it"),
    ("--fp4-", "--fp4-format e2m1 always uses the recipe nvfp4; omit it"),
    ("--use-legacy-models", "there is only one implementation of each model; omit it"),
    ("--fp8-", "attention runs in the model's precision; omit it: the linear layers still use FP8"),
    ("--use-tp-pp-dp-mapping", "the rank order is tensor, data, pipeline; omit it"),
    ("--use-ring-exchange-p2p", "it requires a custom torch; omit it: stages use send and receive"),
    ("--standalone-embedding-stage", "use --pipeline-model-parallel-layout, such as 'E|t*4|t*4L'"),
    ("--pipeline-model-parallel-split-rank", "it applies only to encoder-decoder models; omit it"),
    ("--reuse-grad-buf-for-mxfp8-param-ag", "gradients and gathered weights use separate buffers; omit it"),
    ("--init-method-xavier-uniform", "weights are initialized from a normal distribution: use --init-method-std"),
    (
        "--fp32-residual-connection",
        "the residual has the model's precision; omit --bf16 or --fp16 for float32",
    ),
    ("--qk-l2-norm", "use --qk-layernorm with --normalization RMSNorm, whose weights are learned"),
    (
        "--spec",
        "flags define the model, and --transformer-impl selects the kernels; docs/how_to_add.md explains how to add a "
        "layer type",
    ),
    ("--straggler-ctrlr-port", "--log-straggler runs all the time, at almost no cost; omit the port"),
    ("--log-energy", _WATCH),
    ("--adlr-autoresume", f"{_RESTART} (--exit-duration-in-mins ends it in time)"),
    ("--calc-ft-timeouts", _RESTART),
    ("--enable-ft-package", _RESTART),
    ("--decrease-batch-size-if-needed", "a batch size that is not divisible is rejected with the nearest valid one"),
    (
        "--multiple-validation-sets",
        "use --extra-valid-datalist PREFIX for each set, with --extra-valid-data-names NAME",
    ),
    ("--renormalize-blend-weights", "a blend uses the weights as passed and a surplus of 0.005; omit it"),
    ("--use-mp-args-from-checkpoint-args", "pass the parallelism flags: a checkpoint can be loaded with any layout"),
    ("--no-mmap-index-files", "index files are always memory-mapped; --no-mmap-bin-files applies to token files"),
    ("--data-parallel-random-init", "data-parallel replicas start with the same weights; omit it"),
    ("--yaml-cfg", "pass its values as flags; --print-config shows what a command line resolves to"),
    ("--s3-cache-path", "omit it: each node caches .idx files in ~/.cache/megatron"),
    ("--object-storage-cache-path", "omit it: each node caches .idx files in ~/.cache/megatron"),
    ("--ckpt-convert-", "use tools/checkpoint/convert.py"),
    ("--non-persistent-", _LOCAL_COPIES),
    ("--replication", _LOCAL_COPIES),
)


def refusal_reason(flag: str) -> str:
    """Return the alternative to an unsupported flag; empty if none is known."""
    return next((reason for beginning, reason in REASONS if flag.startswith(beginning)), "")


TABLE_PREFIX = "flag:"
"""Prefix of the name under which the parser stores the words of a flag without a field."""

_NO_MASK = "--no-create-attention-mask-in-dataloader"


def table_flags(given: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the notes and problems for the given flags of the two tables."""
    notes, problems = [], []
    for name, note in NO_EFFECT.items():
        words: list[str] | None = given.get(TABLE_PREFIX + name)
        if words is None or (words and all(_is_among(word, note.quiet) for word in words)):
            continue
        typed = " ".join([name, *words])
        if note.accepted and not all(_is_among(word, note.accepted) for word in words):
            problems.append(f"{typed} is not supported yet; possible: {', '.join(note.accepted)}")
        elif note.excluded is not None and note.excluded in given:
            problems.append(f"{typed} and --{note.excluded.replace('_', '-')} exclude each other; omit one of them")
        else:
            notes.append(f"{typed} has no effect: {note.reason}")
    for name, refused in NOT_SUPPORTED.items():
        words = given.get(TABLE_PREFIX + name)
        if words is None:
            continue
        if len(words) == 1 and refused.default is not None and _is_among(words[0], (refused.default,)):
            continue
        problems.append(f"{' '.join([name, *words])} is not supported yet; {refused.instead or refusal_reason(name)}")
    return notes, problems


def cut_at_documents(given: Mapping[str, Any], config: RunConfig) -> RunConfig:
    """Keep attention within documents for flags with this meaning in Pai-Megatron-Patch.

    --patch-tokenizer-type identifies its scripts.
    """
    if not (_is_packed_by_patch(given, config) and config.data.reset_position_ids):
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, reset_attention_mask=True))


def _is_packed_by_patch(given: Mapping[str, Any], config: RunConfig) -> bool:
    is_unmasked = TABLE_PREFIX + _NO_MASK in given and "reset_attention_mask" not in given
    return is_unmasked and config.tokenizer.patch_tokenizer_type is not None


def packing_notes(given: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Return notes on attention between documents if Megatron-LM and Pai-Megatron-Patch differ."""
    data = config.data
    if TABLE_PREFIX + _NO_MASK not in given:
        return []
    if data.reset_attention_mask and _is_packed_by_patch(given, config):
        return [
            f"--reset-position-ids also limits attention to each document, as Pai-Megatron-Patch does with {_NO_MASK}: "
            "--reset-attention-mask is added"
        ]
    if data.reset_attention_mask:
        return [
            (
                "--reset-attention-mask limits attention to each document here; Megatron-LM would ignore it with "
                f"{_NO_MASK}"
            )
        ]
    if data.reset_position_ids:
        return [
            "--reset-position-ids restarts positions at each document, but attention crosses documents, as in "
            "Megatron-LM; add --reset-attention-mask to limit attention to each document, as Pai-Megatron-Patch does"
        ]
    return []


def _is_among(word: str, values: Sequence[str]) -> bool:
    return any(same_value(word, value) for value in values)


def same_value(word: str, other: str) -> bool:
    """Return whether two words are equal, as texts or as numbers."""
    return word == other or (_number(word) is not None and _number(word) == _number(other))


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


_TABLE = Path(__file__).with_name("foreign_flags.tsv")
_SEVERAL_TRAINERS = "several trainers"


@dataclasses.dataclass(frozen=True)
class ForeignFlag:
    """Flag of another trainer.

    ``becomes`` has the equivalent flags, with ``{}`` for the values; it is empty if the flag is dropped. The first flag
    is the equivalent, and the others are flags that it requires, unless the command has them. ``needs_decision``: the
    results change in a way that the user must accept.
    """

    flag: str
    arity: int | str
    becomes: str
    trainer: str
    needs_decision: bool
    change: str


@functools.cache
def foreign_flags() -> Mapping[str, ForeignFlag]:
    """Return the table by flag, or by flag and value."""
    rows = [line.split("\t") for line in _TABLE.read_text(encoding="utf-8").splitlines()[1:]]
    return {
        flag: ForeignFlag(flag, int(values) if values.isdigit() else values, becomes, trainer, decide == "yes", change)
        for flag, values, becomes, trainer, decide, change in rows
    }


def foreign_flag(name: str, values: tuple[str, ...] = ()) -> ForeignFlag | None:
    """Return the entry of a flag with these values; an entry for the value precedes the flag's entry."""
    table = foreign_flags()
    for key in (" ".join((name, *values)), name):
        if key in table:
            return table[key]
    beginnings = (key for key in table if key.endswith("*") and name.startswith(key[:-1]))
    return next((table[key] for key in beginnings), None)


_STRAY = "unexpected value {!r}; a value must follow its flag"
_SHORT = 7
_CLOSE, _CLOSE_WHERE_SHORT = 0.8, 0.85
"""Minimum similarity of names: ``hiden-size`` has 0.95 to ``hidden-size``, ``deepspeed`` 0.62 to ``seed``."""


def unknown_flags(words: Sequence[str], known: Collection[str], argv: Sequence[str]) -> Iterator[str]:
    """Yield a problem for each unknown word of a command line.

    Words after an unknown flag are its values. An unknown word right after a known flag is a value of a switch.
    """
    before = {word: flag for flag, word in itertools.pairwise(argv) if flag in known}
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if not word.startswith("-"):
            yield switch_with_value(before[word]) if word in before else _STRAY.format(word)
            continue
        name, has_value, value = word.partition("=")
        values = [value] if has_value else []
        while place < len(words) and not words[place].startswith("-"):
            values.append(words[place])
            place += 1
        foreign = foreign_flag(name, tuple(values)) or foreign_flag(name.replace("_", "-"), tuple(values))
        yield foreign_answer(name, values, foreign) if foreign else _unknown(name, known)


def switch_with_value(name: str) -> str:
    """Return the error message for a value after a switch."""
    return f"{name} is a switch and takes no value; pass {name} without a value, or omit it"


def foreign_answer(name: str, values: Sequence[str], foreign: ForeignFlag) -> str:
    """Return the message with the equivalent of another trainer's flag or value, or why there is none."""
    typed = " ".join((name, *values))
    if foreign.trainer != _SEVERAL_TRAINERS:
        typed += f" (of {foreign.trainer})"
    change = foreign.change.removeprefix("nothing: ")
    if foreign.needs_decision and not foreign.becomes:
        return f"{typed} is not supported: {change}"
    if not foreign.becomes:
        return f"unknown flag {typed}; omit it: {change}"
    instead = foreign.becomes.replace("{}", " ".join(values) or "VALUE")
    kind = "value" if " " in foreign.flag and instead.startswith(name) else "flag"
    return f"unknown {kind} {typed}; use {instead}" + (f": {change}" if foreign.needs_decision else "")


def _unknown(name: str, known: Collection[str]) -> str:
    bare = {flag.lstrip("-"): flag for flag in known}
    typed = name.lstrip("-").replace("_", "-").lower()
    cutoff = _CLOSE_WHERE_SHORT if len(typed) <= _SHORT else _CLOSE
    nearest = difflib.get_close_matches(typed, bare, n=1, cutoff=cutoff)
    return f"unknown flag {name}" + (f"; did you mean {bare[nearest[0]]}?" if nearest else "; see --help")
