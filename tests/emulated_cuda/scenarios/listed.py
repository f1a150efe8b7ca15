"""The scenarios: small trainings and other commands, each of which takes other CUDA paths."""

from __future__ import annotations

from dataclasses import replace

from tests.emulated_cuda.scenarios.running import Launch, Scenario

PROGRAMS = "tests/emulated_cuda/scenarios/programs"
MODEL = (
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32"),
    *("--max-position-embeddings", "32", "--tokenizer-type", "NullTokenizer", "--vocab-size", "63"),
    *("--hidden-dropout", "0", "--attention-dropout", "0"),
)
TRAINING = (
    *MODEL,
    *("--micro-batch-size", "1", "--global-batch-size", "4", "--train-iters", "3", "--lr", "1e-3"),
    *("--lr-decay-style", "constant", "--mock-data", "--eval-iters", "0", "--log-interval", "1"),
    *("--ddp-bucket-size", "4000"),
)
_ROPE = "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear"
_OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
_SHARDS = "--data-parallel-sharding-strategy"
_EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --num-layers 2 --swiglu --disable-bias-linear"
_OFFLOADS = "--optimizer-cpu-offload --optimizer-offload-fraction 1.0"
_TENSOR = "--tensor-model-parallel-size 2"
_STAGES = "--pipeline-model-parallel-size 2"
_SHORT = "--train-iters 1 --global-batch-size 1 --num-layers 1 --seq-length 16 --max-position-embeddings 16"
_BLOCKS = "--seq-length 128 --max-position-embeddings 128 --hidden-size 64 --reset-attention-mask"
_CONTEXT = f"--context-parallel-size 2 {_ROPE}"


def training(name: str, flags: str, ranks: int = 1, *more: Launch, triton: bool = False) -> Scenario:
    """Return the scenario of one training with more flags, and of launches after it."""
    return Scenario(name, (launch(flags, ranks), *more), triton)


def launch(flags: str, ranks: int = 1, *statuses: int) -> Launch:
    """Return a start of a training with more flags; what is given twice has the last value."""
    metrics = () if "--metrics-jsonl" in flags else ("--metrics-jsonl", "{folder}/metrics.jsonl")
    return Launch((*TRAINING, *metrics, *flags.split()), ranks, statuses=statuses)


def program(name: str, file: str, ranks: int = 1, *arguments: str) -> Scenario:
    """Return the scenario of a program of this package."""
    return Scenario(name, (Launch(arguments, ranks, f"{PROGRAMS}/{file}"),))


def faulty(name: str, fault: str, flags: str, ranks: int, *statuses: int) -> Scenario:
    """Return the scenario of a training into which a fault is injected."""
    arguments = (*TRAINING, "--metrics-jsonl", "{folder}/metrics.jsonl", *flags.split())
    launches = (Launch((fault, *arguments), ranks, f"{PROGRAMS}/faulty_training.py", statuses),)
    return Scenario(name, launches)


def with_package(name: str, flags: str) -> Scenario:
    """Return the scenario of a training with a stand-in for a package that is built for CUDA."""
    plain = launch(flags)
    arguments = (name, *plain.arguments)
    return Scenario(f"stand-in for {name}", (Launch(arguments, program=f"{PROGRAMS}/with_package.py"),))


SCENARIOS: tuple[Scenario, ...] = (
    training("one rank", "--bf16"),
    training("one rank, fp16", "--fp16 --initial-loss-scale 65536 --hidden-dropout 0.1 --attention-dropout 0.1"),
    training("graphs", "--cuda-graph-impl local --cuda-graph-warmup-steps 1 --train-iters 4"),
    training(
        "graphs, activations recomputed",
        f"--cuda-graph-impl local --cuda-graph-warmup-steps 1 --train-iters 4 --hidden-dropout 0.1 {_ROPE} "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    training("activation offload", "--cpu-offloading --cpu-offloading-num-layers 1 --num-layers 3"),
    training("activation offload of all layers", "--cpu-offloading --cpu-offloading-num-layers 2 --bf16"),
    training(
        "activation offload, activations recomputed",
        "--cpu-offloading --cpu-offloading-num-layers 2 --num-layers 3 --recompute-granularity selective",
    ),
    training(
        "weight offload", "--cpu-offloading --cpu-offloading-num-layers 2 --cpu-offloading-weights --num-layers 3"
    ),
    training(
        "weight offload without activations",
        "--cpu-offloading --cpu-offloading-num-layers 3 --cpu-offloading-weights --num-layers 3 "
        "--no-cpu-offloading-activations",
    ),
    training("optimizer offload", f"--bf16 {_OFFLOADS}"),
    training("optimizer offload, overlapped", f"--bf16 {_OFFLOADS} --overlap-cpu-optimizer-d2h-h2d"),
    training(
        "half of the optimizer offloaded, overlapped",
        "--bf16 --optimizer-cpu-offload --optimizer-offload-fraction 0.5 --overlap-cpu-optimizer-d2h-h2d "
        f"{_OVERLAPS} --ddp-bucket-size 4000",
        2,
    ),
    training("optimizer offload without pinned memory", f"--bf16 {_OFFLOADS} --no-pin-cpu-grads --no-pin-cpu-params"),
    training("async save", "--save {folder}/saved --save-interval 2 --async-save"),
    training(
        "async save and resume",
        f"--save {{folder}}/saved --save-interval 1 --async-save --bf16 {_OVERLAPS}",
        2,
        launch(
            "--save {folder}/saved --load {folder}/saved --train-iters 5 --async-save --save-interval 1 --bf16 "
            f"{_OVERLAPS} --metrics-jsonl {{folder}}/resumed.jsonl",
            2,
        ),
    ),
    training(
        "evaluation", f"--eval-iters 2 --eval-interval 1 {_OVERLAPS} --log-params-norm --log-num-zeros-in-grad", 2
    ),
    training("fp8", f"--bf16 --fp8-format hybrid --fp8-recipe tensorwise {_ROPE}"),
    training("fp8, delayed", "--bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 2"),
    training("muon", f"--bf16 --optimizer muon {_ROPE}"),
    training("lion", "--optimizer lion --lr 1e-4"),
    training("lora", "--lora-rank 4"),
    Scenario("a spike", (launch("--spike-policy skip --spike-window 8 --train-iters 11 --spike-threshold 0.1", 1, 1),)),
    training(
        "results validated again",
        "--rerun-mode validate_results --check-for-spiky-loss --check-for-large-grads --train-iters 4",
    ),
    training("documents", "--reset-attention-mask --reset-position-ids --eod-mask-loss"),
    training("precision-aware optimizer", f"--bf16 --use-precision-aware-optimizer {_OVERLAPS}", 2),
    training("average of weights", f"--ema-decay 0.9 {_OVERLAPS} --eval-iters 1 --eval-interval 2", 2),
    training("norms of layers", f"--log-layer-norms 1 --log-max-attention-logit {_OVERLAPS}", 2),
    training("empty cache", "--empty-unused-memory-level 2 --log-memory-interval 1 --log-device-memory-used"),
    training("hang watchdog", "--hang-report-seconds 60", 2),
    training("stragglers", "--log-straggler --log-interval 1", 2),
    training("timers", "--timing-log-level 2 --timing-log-option all --log-throughput", 2),
    training("data parallel", "", 2),
    training("gradients overlapped", "--overlap-grad-reduce --bf16", 2),
    training("distributed optimizer", _OVERLAPS, 2),
    training("distributed optimizer, per-token loss", f"{_OVERLAPS} --calculate-per-token-loss --bf16", 2),
    training(
        "gathered with the step",
        f"{_OVERLAPS} --overlap-param-gather-with-optimizer-step --pipeline-model-parallel-size 2 --num-layers 4 "
        "--num-layers-per-virtual-pipeline-stage 1",
        4,
    ),
    training("distributed optimizer without overlap", "--use-distributed-optimizer", 2),
    training("replicas compared", f"{_OVERLAPS} --check-weight-hash-across-dp-replicas-interval 1", 2),
    training("gradients sharded", f"{_SHARDS} optim_grads --bf16", 2),
    training("gradients sharded, overlapped", f"{_SHARDS} optim_grads {_OVERLAPS}", 2),
    training("fully sharded", f"{_SHARDS} optim_grads_params --num-layers 3", 2),
    training("fully sharded, overlapped", f"{_SHARDS} optim_grads_params {_OVERLAPS} --num-layers 3 --bf16", 2),
    training(
        "fully sharded, evaluation and save",
        f"{_SHARDS} optim_grads_params --eval-iters 1 --eval-interval 1 --save {{folder}}/saved --save-interval 2",
        2,
    ),
    training("two instances of the optimizer", f"{_OVERLAPS} --num-distributed-optimizer-instances 2", 4),
    training(
        "fp8 parameters gathered",
        f"--bf16 --fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather {_OVERLAPS}",
        2,
    ),
    training("tensor parallel", f"{_TENSOR} --bf16", 2),
    training("sequence parallel", f"{_TENSOR} --sequence-parallel {_ROPE}", 2),
    training(
        "tensor parallel, overlapped by rings",
        f"{_TENSOR} --sequence-parallel --tp-comm-overlap --tp-comm-overlap-impl ring",
        2,
    ),
    training(
        "tensor parallel, input gradients by rings",
        f"{_TENSOR} --sequence-parallel --tp-comm-overlap --tp-comm-overlap-impl ring --tp-comm-overlap-rs-dgrad",
        2,
    ),
    training(
        "tensor parallel, bulk overlap off",
        f"{_TENSOR} --sequence-parallel --tp-comm-overlap --tp-comm-overlap-impl whole --disable-tp-comm-bulk-dgrad "
        "--disable-tp-comm-bulk-wgrad",
        2,
    ),
    training(
        "tensor parallel, fp8", f"{_TENSOR} --sequence-parallel --bf16 --fp8-format hybrid --fp8-recipe tensorwise", 2
    ),
    training(
        "tensor parallel without sequences, fp8", f"{_TENSOR} --bf16 --fp8-format hybrid --fp8-recipe tensorwise", 2
    ),
    training("pipeline", _STAGES, 2),
    training("pipeline, bf16", f"{_STAGES} --bf16 --num-layers 4", 2),
    training("interleaved pipeline", f"{_STAGES} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1", 2),
    training(
        "interleaved pipeline, no overlap",
        f"{_STAGES} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1 --no-overlap-p2p-communication",
        2,
    ),
    training("zero-bubble pipeline", f"{_STAGES} --num-layers 4 --pipeline-schedule zero-bubble", 2),
    training(
        "pipeline, output weight deferred",
        f"{_STAGES} --defer-embedding-wgrad-compute --untie-embeddings-and-output-weights",
        2,
    ),
    training("pipeline, weight gradients delayed", f"{_STAGES} --num-layers 4 --delay-wgrad-compute", 2),
    training("ring of keys", f"{_CONTEXT} --cp-comm-type p2p", 2),
    training("ring of keys, bf16", f"{_CONTEXT} --cp-comm-type p2p --bf16", 2),
    training("keys gathered", f"{_CONTEXT} --cp-comm-type all_gather", 2),
    training("heads exchanged", f"{_CONTEXT} --cp-comm-type a2a", 2),
    training(
        "heads exchanged, keys in a ring",
        f"{_ROPE} --context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
        4,
    ),
    training("experts", _EXPERTS),
    training("experts exchanged", f"{_EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall", 2),
    training("experts gathered", f"{_EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type allgather", 2),
    training(
        "experts exchanged beside the shared expert",
        f"{_EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --bf16 "
        "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-overlap",
        2,
    ),
    training(
        "experts of tensor-parallel ranks",
        f"{_EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall {_TENSOR} --sequence-parallel "
        "--expert-tensor-parallel-size 1",
        2,
    ),
    training(
        "experts with capacity",
        f"{_EXPERTS} --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity --bf16 "
        "--moe-token-dispatcher-type alltoall",
    ),
    training("texts sampled", "--sample-interval 1 --sample-prompts 3 --sample-tokens 3"),
    training(
        "texts sampled, parameters gathered late",
        f"--sample-interval 1 --sample-prompts 3 --sample-tokens 3 {_OVERLAPS}",
        2,
    ),
    training(
        "copies of the state",
        f"--inprocess-restart --non-persistent-save-interval 1 --replication {_OVERLAPS} --bf16",
        2,
    ),
    faulty("a loss is not a number on two ranks", "nan_loss_at=6", _OVERLAPS, 2, 1, 1),
    faulty("a weight is not a number", "bad_weight_at=3", "--use-distributed-optimizer", 2, 1, 1),
    faulty("a rank fails", "raise_at=3", "", 2, 1, 1),
    faulty("a rank hangs", "sleep_at=5", "--hang-report-seconds 3", 2, 1, 1),
    Scenario("more processes than devices", (Launch(TRAINING, statuses=(2,), variables={"LOCAL_WORLD_SIZE": "5"}),)),
    faulty("a loss is not a number", "nan_loss_at=3", "--rerun-mode validate_results", 1, 1),
    training("profile for nsys", "--profile --profile-step-start 1 --profile-step-end 2"),
    training("memory history", "--record-memory-history --memory-snapshot-path {folder}/memory.pickle"),
    training("schedule recorded", f"{_STAGES} --record-schedule {{folder}}/schedule.json", 2),
    training("same bits", f"--deterministic-mode --bf16 {_ROPE}"),
    training("attention sinks", f"--softmax-type learnable {_ROPE}"),
    training("attention in a window", f"--window-size 8,0 {_ROPE}"),
    training("attention sinks, bf16", f"--softmax-type learnable {_ROPE} --bf16"),
    training("attention in a window, bf16", f"--window-size 8,0 {_ROPE} --bf16"),
    training("scores capped", f"--attn-logit-softcapping 20 {_ROPE}"),
    training("grouped keys, documents", f"--group-query-attention --num-query-groups 2 {_ROPE} --reset-attention-mask"),
    training("flash attention asked for", "--attention-backend flash --bf16"),
    training("flash attention asked for, float32", "--attention-backend flash"),
    training("flash attention asked for, sinks", f"--attention-backend flash --bf16 --softmax-type learnable {_ROPE}"),
    training("flash attention asked for, same bits", "--attention-backend flash --bf16 --deterministic-mode"),
    training("transformer-engine asked for", "--transformer-impl transformer_engine --bf16"),
    training("transformer-engine asked for, float32", "--transformer-impl transformer_engine"),
    *(
        with_package(package, f"--bf16 {_ROPE} {flags}")
        for package, flags in (
            ("flash_attn", "--attention-backend flash --attn-logit-softcapping 20"),
            ("flash_attn_interface", ""),
            (
                "transformer_engine",
                "--transformer-impl transformer_engine --seq-length 128 --max-position-embeddings 128",
            ),
        )
    ),
    training("attention recomputed, dropout", "--recompute-activations --attention-dropout 0.1 --hidden-dropout 0.1"),
    training(
        "tensor parallel, overlap chosen", f"{_TENSOR} --sequence-parallel --tp-comm-overlap --inprocess-restart", 2
    ),
    training(
        "tensor parallel, overlapped by symmetric memory",
        f"{_TENSOR} --sequence-parallel --tp-comm-overlap --tp-comm-overlap-impl symmetric-memory --bf16",
        2,
    ),
    *(
        training(f"fp8, {recipe}", f"--bf16 --fp8-format e4m3 --fp8-recipe {recipe} {_ROPE}")
        for recipe in ("rowwise", "blockwise", "mxfp8")
    ),
    training("gradients in float32, bf16", "--bf16 --overlap-grad-reduce --use-distributed-optimizer --num-layers 3"),
    training("experts in fp8", f"{_EXPERTS} --bf16 --fp8-format hybrid --fp8-recipe tensorwise"),
    *(
        Scenario(name, (replace(launch(flags), program=f"{PROGRAMS}/small_update_buckets.py"),))
        for name, flags in (
            ("optimizer offload, many buckets", f"--bf16 {_OFFLOADS}"),
            ("optimizer offload, many buckets overlapped", f"--bf16 {_OFFLOADS} --overlap-cpu-optimizer-d2h-h2d"),
        )
    ),
    program("copies staged for a save", "staged_copies.py"),
    program("sharded weights freed before they were used", "abandoned_weights.py", 2),
    program("activations fetched before they were dropped", "abandoned_activations.py"),
    program("weights without a forward pass", "weights_without_forward.py", 4),
    program("groups shut down while a rank waits", "given_up_links.py", 2),
    program("cell of the verifier", "cell.py", 2, "{folder}/cell.jsonl", *_OVERLAPS.split()),
    program("cell of the verifier, dropout", "cell.py", 2, "{folder}/cell.jsonl", "--attention-dropout", "0.1"),
    program("measures of a device", "measures.py"),
    program("measures of two devices", "measures.py", 2),
    Scenario(
        "questions, parameters gathered late",
        (
            Launch(
                (
                    *(*TRAINING, "--metrics-jsonl", "{folder}/metrics.jsonl", *_OVERLAPS.split()),
                    *("--eval-tasks", "rows", "--eval-tasks-interval", "1"),
                ),
                2,
                f"{PROGRAMS}/questions.py",
            ),
        ),
    ),
    program("inference", "inference.py", 1, "{folder}/inference.jsonl", "1", "1"),
    program("inference, stages", "inference.py", 2, "{folder}/inference.jsonl", "2", "1"),
    program("inference, tensor parallel", "inference.py", 2, "{folder}/inference.jsonl", "1", "2"),
    training("Triton: GELU and dropout", f"{_SHORT} --bf16 --hidden-dropout 0.1", triton=True),
    training("Triton: rotary positions and SwiGLU", f"{_SHORT} --bf16 {_ROPE}", triton=True),
    training("Triton: rotary positions of normalized heads", f"{_SHORT} --bf16 {_ROPE} --qk-layernorm", triton=True),
    training(
        "Triton: FlexAttention",
        f"{_SHORT} {_BLOCKS} --bf16 {_ROPE}",
        triton=True,
    ),
    training(
        "Triton: FlexAttention, sinks", f"{_SHORT} {_BLOCKS} --bf16 {_ROPE} --softmax-type learnable", triton=True
    ),
    training("Triton: FlexAttention, capped", f"{_SHORT} {_BLOCKS} {_ROPE} --attn-logit-softcapping 20", triton=True),
    training("Triton: fp8", f"{_SHORT} --bf16 --fp8-format hybrid --fp8-recipe tensorwise {_ROPE}", triton=True),
)
