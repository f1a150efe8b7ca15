"""Why a flag of Megatron-LM is refused, and what to do: for whole families of flags, known by their beginnings."""

from __future__ import annotations

_EXPERTS = "leave it out: experts are built without it (docs/mixture_of_experts.md)"
_WATCH = "watch the run by its log, --metrics-jsonl and --timing-log-level"
_LOCAL_COPIES = (
    "--non-persistent-save-interval N keeps copies in the machines' memory, of type local, for --inprocess-restart; "
    " --save-interval N --keep-last M saves often and keeps few"
)
_RESTART = "start the run again with the same flags: it goes on from its newest checkpoint"

REASONS: tuple[tuple[str, str], ...] = (
    ("--moe-extended-tp", "use --expert-tensor-parallel-size, or --expert-model-parallel-size"),
    ("--moe-router-padding-for-", "leave it out: products of experts in fp8 take any number of tokens"),
    ("--moe-", _EXPERTS),
    ("--overlap-moe-", _EXPERTS),
    ("--use-legacy-models", "there is one implementation of each model; leave it out"),
    ("--fp8-", "attention is computed in the model's own precision; leave it out: the layers' products stay in fp8"),
    ("--use-tp-pp-dp-mapping", "data-parallel ranks lie between tensor and pipeline ranks; leave it out"),
    ("--use-ring-exchange-p2p", "it is of a torch built for it; leave it out: stages send and receive"),
    ("--standalone-embedding-stage", "use --pipeline-model-parallel-layout, such as 'E|t*4|t*4L'"),
    ("--pipeline-model-parallel-split-rank", "it is of models with an encoder and a decoder; leave it out"),
    ("--reuse-grad-buf-for-mxfp8-param-ag", "gradients and gathered weights have memory of their own; leave it out"),
    ("--init-method-xavier-uniform", "weights are drawn from a normal distribution: use --init-method-std"),
    (
        "--fp32-residual-connection",
        "the residual stream has the model's precision: leave --bf16 or --fp16 out for float32",
    ),
    ("--qk-l2-norm", "use --qk-layernorm with --normalization RMSNorm, whose weights are learned"),
    ("--qk-clip", "weights of queries and keys are not clipped; leave it out, or use --qk-layernorm"),
    ("--attention-output-gate", "attention's output has no gate; leave it out"),
    (
        "--spec",
        "models are built from their flags, and --transformer-impl says whose layers they take; docs/how_to_add.md "
        "says how to add a layer kind",
    ),
    ("--straggler-ctrlr-port", "--log-straggler is on for the whole run: it costs next to nothing; leave the port out"),
    ("--log-energy", _WATCH),
    ("--adlr-autoresume", f"{_RESTART} (--exit-duration-in-mins ends it in time)"),
    ("--calc-ft-timeouts", _RESTART),
    ("--enable-ft-package", _RESTART),
    ("--decrease-batch-size-if-needed", "a batch size that does not divide is refused with the nearest one that does"),
    (
        "--multiple-validation-sets",
        "use --extra-valid-datalist PREFIX for each set, with --extra-valid-data-names NAME",
    ),
    ("--renormalize-blend-weights", "a blend's sets have their weights, and a surplus of 0.005; leave it out"),
    ("--use-mp-args-from-checkpoint-args", "give the layout's flags: a checkpoint loads at every layout"),
    ("--no-mmap-index-files", "index files are mapped into memory; --no-mmap-bin-files is about the tokens"),
    ("--data-parallel-random-init", "the copies of a model begin with the same weights; leave it out"),
    ("--yaml-cfg", "give its values as flags; --print-config shows what a command line resolves to"),
    ("--s3-cache-path", "leave it out: each machine keeps copies of .idx in ~/.cache/megatron"),
    ("--object-storage-cache-path", "leave it out: each machine keeps copies of .idx in ~/.cache/megatron"),
    ("--ckpt-convert-", "use tools/checkpoint/convert.py"),
    ("--non-persistent-", _LOCAL_COPIES),
    ("--replication", _LOCAL_COPIES),
)


def refusal_reason(flag: str) -> str:
    """Return what to do in place of a flag that is not supported; empty where nothing is known of it."""
    return next((reason for beginning, reason in REASONS if flag.startswith(beginning)), "")
