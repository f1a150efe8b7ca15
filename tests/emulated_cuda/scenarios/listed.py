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
_GRAPHS = "--cuda-graph-impl local --cuda-graph-warmup-steps 1 --train-iters 4"
_FP8 = "--bf16 --fp8-format hybrid --fp8-recipe"
_E4M3 = "--bf16 --fp8-format e4m3 --fp8-recipe"
_WIDE = "--hidden-size 128 --num-layers 1 --train-iters 2"
_LONG = "--seq-length 128 --max-position-embeddings 128 --hidden-size 64 --global-batch-size 2 --train-iters 2"
_GROUPED = f"{_ROPE} --group-query-attention --num-query-groups 2"
_WINDOWS = "--window-size 8,0 --window-attn-skip-freq 2"
_DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1 --attention-backend unfused"
_MTP = "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.5"
_LATENT = (
    "--position-embedding-type rope --multi-latent-attention --kv-lora-rank 10 --qk-head-dim 8 --qk-pos-emb-head-dim 8 "
    "--num-query-groups 4 --v-head-dim 16 --q-lora-rank 12 --qk-layernorm --swiglu --normalization RMSNorm "
    "--disable-bias-linear"
)
_MIXERS = (
    "--normalization RMSNorm --disable-bias-linear --no-position-embedding --mamba-state-dim 6 --mamba-head-dim 8 "
    "--mamba-num-groups 2 --linear-key-head-dim 4 --linear-value-head-dim 8 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4"
)
_HYBRID = f"{_MIXERS} --hybrid-override-pattern M*G- --num-layers 4"
_BOTH = f"{_MIXERS} --hybrid-override-pattern PKG- --num-layers 4"
_SHARED = "--context-parallel-size 2"
_STATES = f"{_SHARED} --recurrent-cp-comm-type all_gather"
# Rows of the projections that FP8 and NVFP4 take.
_PADDED = (
    "--hidden-size 64 --mamba-num-heads 16 --mamba-state-dim 4 --linear-key-head-dim 16 --linear-num-value-heads 16 "
    "--linear-value-head-dim 8"
)
_PADDED_KDA = f"{_PADDED} --linear-value-head-dim 32 --linear-num-value-heads 32"
_CHUNKS = "--cross-entropy-loss-fusion --cross-entropy-fusion-impl linear"
_SENT = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
_NARROW = (
    "--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16 --main-params-dtype fp16 --exp-avg-dtype bf16 "
    "--exp-avg-sq-dtype fp8"
)
_OVERLAPPED_OFFLOAD = f"{_OFFLOADS} --overlap-cpu-optimizer-d2h-h2d"
# So much memory that a share of what is free differs where the other rank has a GPU's.
_LITTLE, _MUCH = 48 << 20, 80 << 30


def training(name: str, flags: str, ranks: int = 1, *more: Launch, triton: bool = False, gpu: str = "h100") -> Scenario:
    """Return the scenario of one training with more flags, and of launches after it."""
    return Scenario(name, (launch(flags, ranks), *more), triton, gpu)


def prepared(
    name: str,
    preparations: str,
    flags: str,
    ranks: int = 1,
    *,
    triton: bool = False,
    gpu: str = "h100",
    memory: tuple[int, ...] = (),
) -> Scenario:
    """Return the scenario of one training in processes that `programs.prepared` has prepared."""
    plain = launch(flags, ranks)
    if "external" in flags or "data-path" in flags:
        plain = replace(plain, arguments=tuple(word for word in plain.arguments if word != "--mock-data"))
    arguments = (preparations, *plain.arguments)
    changed = replace(plain, arguments=arguments, program=f"{PROGRAMS}/prepared.py", memory=memory)
    return Scenario(name, (changed,), triton, gpu)


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
    training("documents", "--bf16 --reset-attention-mask --reset-position-ids --eod-mask-loss"),
    training("precision-aware optimizer", f"--bf16 --use-precision-aware-optimizer {_OVERLAPS}", 2),
    training("average of weights", f"--ema-decay 0.9 {_OVERLAPS} --eval-iters 1 --eval-interval 2", 2),
    training(
        "average of weights, optimizer offload",
        "--ema-decay 0.9 --use-distributed-optimizer --optimizer-cpu-offload --eval-iters 1 --eval-interval 2",
        2,
    ),
    training("norms of layers", f"--log-layer-norms 1 --log-max-attention-logit {_OVERLAPS}", 2),
    training("empty cache", "--empty-unused-memory-level 2 --log-memory-interval 1 --log-device-memory-used"),
    training("hang watchdog", "--hang-timeout-seconds 60", 2),
    training("stragglers", "--log-straggler --log-interval 1", 2),
    training("timers", "--timing-log-level 2 --timing-log-option all --log-throughput", 2),
    training("data parallel", "", 2),
    training("gradients overlapped", "--overlap-grad-reduce --bf16", 2),
    training("distributed optimizer", _OVERLAPS, 2),
    training(
        "distributed optimizer, per-token loss",
        f"{_OVERLAPS} --calculate-per-token-loss --bf16 --save {{folder}}/saved --save-interval 1 --no-save-optim",
        2,
    ),
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
        "tensor parallel, overlapped by rings of four",
        "--tensor-model-parallel-size 4 --sequence-parallel --tp-comm-overlap --tp-comm-overlap-impl ring "
        "--tp-comm-overlap-rs-dgrad --bf16 --num-layers 1",
        4,
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
    training("pipeline", f"{_STAGES} --eval-iters 1 --eval-interval 2", 2),
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
    training("keys gathered", f"{_CONTEXT} --cp-comm-type all_gather --attention-dropout 0.1", 2),
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
        "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-overlap --moe-ffn-hidden-size 12",
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
    training(
        "texts sampled, experts with capacity, tensor parallel",
        f"{_EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel --moe-token-dispatcher-type alltoall "
        "--moe-expert-capacity-factor 1.0 --moe-token-drop-policy probs --bf16 "
        "--generate-interval 1 --generate-prompts 3 --sample-tokens 3",
        2,
    ),
    training("texts sampled", "--generate-interval 1 --generate-prompts 3 --sample-tokens 3"),
    training(
        "texts sampled, parameters gathered late",
        f"--generate-interval 1 --generate-prompts 3 --sample-tokens 3 {_OVERLAPS}",
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
    faulty("a rank hangs", "sleep_at=5", "--hang-timeout-seconds 3", 2, 1, 1),
    Scenario("more processes than devices", (Launch(TRAINING, statuses=(2,), variables={"LOCAL_WORLD_SIZE": "5"}),)),
    Scenario("local ranks in another order", (replace(launch(_OVERLAPS, 2), local_ranks=(1, 0)),)),
    faulty("a loss is not a number", "nan_loss_at=3", "--rerun-mode validate_results", 1, 1),
    training("profile for nsys", "--profile --profile-step-start 1 --profile-step-end 2"),
    training("memory history", "--record-memory-history --memory-snapshot-path {folder}/memory.pickle"),
    training("schedule recorded", f"{_STAGES} --record-schedule {{folder}}/schedule.json", 2),
    training("same bits", f"--deterministic-mode --bf16 {_ROPE}"),
    training("attention sinks", f"--softmax-type learnable {_ROPE}"),
    training("attention in a window", f"--window-size 8,0 {_ROPE}"),
    training("attention sinks, bf16", f"--softmax-type learnable {_ROPE} --bf16"),
    training("attention sinks, off by one", f"--softmax-type off-by-one {_ROPE} --bf16"),
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
        "tensor parallel, fp8, overlapped by symmetric memory",
        f"{_TENSOR} --sequence-parallel --tp-comm-overlap --tp-comm-overlap-impl symmetric-memory "
        f"--tp-comm-overlap-rs-dgrad {_FP8} delayed",
        2,
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
    program("copies of several dtypes", "mixed_copies.py"),
    program("copies staged for a save", "staged_copies.py"),
    program("sharded weights freed before they were used", "abandoned_weights.py", 2),
    program("offloaded weights left before they were used", "abandoned_offload.py"),
    program("activations fetched before they were dropped", "abandoned_activations.py"),
    program("weights without a forward pass", "weights_without_forward.py", 4),
    program("links of three stages", "links.py", 3, "{folder}"),
    program("groups shut down while a rank waits", "given_up_links.py", 2),
    program("results after communication was given up", "given_up_results.py", 2),
    program("gradients in another order on each rank", "orders_of_gradients.py", 2),
    program("parameters that not every rank uses", "unused_parameters.py", 2),
    program("shards without elements", "shards_without_elements.py", 4),
    program("cell of the verifier", "cell.py", 2, "{folder}/cell.jsonl", *_OVERLAPS.split()),
    program("cell of the verifier, dropout", "cell.py", 2, "{folder}/cell.jsonl", "--attention-dropout", "0.1"),
    program("a capture while another thread asks", "captured_beside_thread.py", 1, "{folder}/told.jsonl"),
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
    program("inference, tensor parallel stages", "inference.py", 4, "{folder}/inference.jsonl", "2", "2", "apart"),
    program("requests served, stages", "service.py", 2, "{folder}/answers.jsonl", "2", "1"),
    program("requests served, tensor parallel", "service.py", 2, "{folder}/answers.jsonl", "1", "2"),
    training("Triton: GELU and dropout", f"{_SHORT} --bf16 --hidden-dropout 0.1", triton=True),
    training("Triton: GELU in GEMMs", f"{_SHORT} --bf16 --gemm-activation-fusion", triton=True),
    training(
        "Triton: GELU in GEMMs, tensor parallel",
        f"{_SHORT} --gemm-activation-fusion {_TENSOR} --sequence-parallel",
        2,
        triton=True,
    ),
    training("Triton: GELU in GEMMs on an A100", f"{_SHORT} --bf16 --gemm-activation-fusion", triton=True, gpu="a100"),
    training(
        "Triton: AdamW of shards", f"{_SHORT} --bf16 --train-iters 2 {_OVERLAPS} --global-batch-size 2", 2, triton=True
    ),
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

_GRAPHED = (
    training("Triton: graphs, one micro-batch", f"{_SHORT} {_GRAPHS} --bf16", triton=True),
    training(
        "results read after the next launch",
        f"--bf16 {_OVERLAPS} --overlap-step-results --rerun-mode disabled --log-interval 5 --train-iters 6",
        2,
    ),
    training(
        "Triton: optimizer graphs",
        f"{_SHORT} --train-iters 4 --bf16 {_OVERLAPS} --optimizer-cuda-graph --cuda-graph-warmup-steps 1",
        2,
        triton=True,
    ),
    training(
        "Triton: graphs of the loss, one micro-batch", f"{_SHORT} {_GRAPHS} --loss-cuda-graph --bf16", triton=True
    ),
    training("Triton: graphs, fp8", f"{_SHORT} {_GRAPHS} {_FP8} delayed {_ROPE}", triton=True),
    training("graphs, fp8 delayed", f"{_GRAPHS} {_FP8} delayed --fp8-amax-history-len 2 --train-iters 7"),
    training("graphs, fp8 by blocks", f"{_GRAPHS} {_E4M3} blockwise {_WIDE} --train-iters 4"),
    training("graphs, ring of keys", f"{_GRAPHS} {_CONTEXT} --cp-comm-type p2p", 2),
    training("graphs, ring of keys, bf16", f"{_GRAPHS} {_CONTEXT} --cp-comm-type p2p --bf16", 2),
    training("graphs, keys gathered", f"{_GRAPHS} {_CONTEXT} --cp-comm-type all_gather --bf16", 2),
    training("graphs, pipeline", f"{_GRAPHS} {_STAGES} --num-layers 4", 2),
    training(
        "graphs, interleaved pipeline, weight gradients delayed",
        f"{_GRAPHS} {_STAGES} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1 --delay-wgrad-compute --bf16",
        2,
    ),
    training(
        "graphs, zero-bubble pipeline",
        f"{_GRAPHS} {_STAGES} --num-layers 4 --pipeline-schedule zero-bubble {_OVERLAPS} --global-batch-size 8",
        4,
    ),
    training("graphs, distributed optimizer", f"{_GRAPHS} {_OVERLAPS} --num-layers 3", 2),
    training("graphs, distributed optimizer, one micro-batch", f"{_GRAPHS} {_OVERLAPS} --global-batch-size 2", 2),
    training(
        "graphs, weight gradients delayed, one micro-batch",
        f"{_GRAPHS} {_STAGES} {_OVERLAPS} --num-layers 4 --delay-wgrad-compute --global-batch-size 2",
        4,
    ),
    training("graphs, attention dropout", f"{_GRAPHS} {_DROPOUT} --bf16"),
    training("graphs, attention sinks, off by one", f"{_GRAPHS} --softmax-type off-by-one {_ROPE} --bf16"),
    training("graphs, tensor parallel", f"{_GRAPHS} {_TENSOR} --sequence-parallel --bf16", 2),
    training("graphs of the loss", f"{_GRAPHS} --loss-cuda-graph --hidden-dropout 0.1 --bf16 {_OVERLAPS}", 2),
    training("graphs of the loss, chunks, pipeline", f"{_GRAPHS} --loss-cuda-graph {_CHUNKS} {_STAGES}", 2),
    training("graphs, evaluation", f"{_GRAPHS} --eval-iters 1 --eval-interval 2 --global-batch-size 1"),
    training("graphs, optimizer offload", f"{_GRAPHS} --bf16 {_OVERLAPPED_OFFLOAD}"),
)
_IN_FP8 = (
    training("fp8, rows", f"{_FP8} rowwise {_WIDE}"),
    training("fp8, rows, on a B200", f"{_FP8} rowwise {_WIDE}", gpu="b200"),
    training("fp8, blocks of 32, on a B200", f"{_E4M3} mxfp8 {_WIDE} {_ROPE}", gpu="b200"),
    training("fp8, blocks of 128", f"{_E4M3} blockwise {_WIDE} {_ROPE}"),
    training("fp8, blocks of 128, on a B200", f"{_E4M3} blockwise {_WIDE}", gpu="b200"),
    training("fp8 on an A100", f"{_FP8} tensorwise", gpu="a100"),
    training("fp8, rows, tensor parallel", f"{_FP8} rowwise {_WIDE} {_TENSOR} --sequence-parallel", 2),
    training(
        "fp8, blocks of 32, tensor parallel", f"{_E4M3} mxfp8 {_WIDE} {_TENSOR} --sequence-parallel", 2, gpu="b200"
    ),
    training(
        "fp8, blocks of 128, tensor parallel",
        f"{_E4M3} blockwise {_WIDE} --ffn-hidden-size 256 {_TENSOR} --sequence-parallel",
        2,
    ),
    training("fp8, some layers in bf16", f"{_FP8} tensorwise --no-fp8-wgrad --first-last-layers-bf16 --num-layers 3"),
    training(
        "fp8, delayed, saved and resumed",
        f"{_FP8} delayed --save {{folder}}/saved --save-interval 2",
        1,
        launch(
            f"{_FP8} delayed --save {{folder}}/saved --load {{folder}}/saved --train-iters 5 "
            "--metrics-jsonl {folder}/resumed.jsonl"
        ),
    ),
    training(
        "fp8, delayed, recomputed",
        f"{_FP8} delayed --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
        "--rerun-mode validate_results --check-for-spiky-loss",
    ),
    training("fp8, delayed, pipeline", f"{_FP8} delayed {_STAGES} --num-layers 4 --delay-wgrad-compute", 2),
    training("experts in fp8, delayed, exchanged", f"{_EXPERTS} {_FP8} delayed {_SENT}", 2),
    training("experts in fp8, rows", f"{_EXPERTS} {_FP8} rowwise --add-qkv-bias"),
    training("experts in fp8 on a B200", f"{_EXPERTS} {_E4M3} mxfp8 --hidden-size 64", gpu="b200"),
    training("Triton: fp8, rows", f"{_SHORT} {_FP8} rowwise", triton=True),
    training("Triton: experts in fp8, rows", f"{_EXPERTS} {_SHORT} {_E4M3} rowwise --moe-grouped-gemm", triton=True),
    training("Triton: fp8, blocks of 128", f"{_SHORT} {_FP8} blockwise {_ROPE}", triton=True),
    training(
        "Triton: fp8, rows, tensor parallel",
        f"{_SHORT} {_FP8} rowwise {_ROPE} --seq-length 32 --max-position-embeddings 32 {_TENSOR} --sequence-parallel",
        2,
        triton=True,
    ),
    training(
        "Triton: fp8, scales in tiles, tensor parallel",
        f"{_SHORT} {_E4M3} mxfp8 --hidden-size 128 --ffn-hidden-size 256 --seq-length 256 "
        f"--max-position-embeddings 256 {_TENSOR} --sequence-parallel",
        2,
        triton=True,
        gpu="b200",
    ),
    training("Triton: fp8 on an A100", f"{_SHORT} {_FP8} tensorwise", triton=True, gpu="a100"),
    training("Triton: fp8 on a B200", f"{_SHORT} {_E4M3} mxfp8 --hidden-size 64", triton=True, gpu="b200"),
    training("fp8 parameters gathered, delayed", f"{_FP8} delayed --fp8-param-gather {_OVERLAPS} --num-layers 3", 2),
)
_BY_TRITON = (
    prepared("blend of data sets", "two-data-sets", "--data-path 0.7 first 0.3 second --split 100,0,0 --bf16"),
    prepared(
        "Triton: small parts, GELU and dropout",
        "small-programs",
        f"{_SHORT} --bf16 --hidden-dropout 0.1 --hidden-size 24 --num-attention-heads 3 --apply-layernorm-1p",
        triton=True,
    ),
    prepared(
        "Triton: small parts, norms of queries and keys",
        "small-programs",
        f"{_SHORT} --fp16 {_GROUPED} --qk-layernorm --add-qkv-bias --micro-batch-size 2 --global-batch-size 2",
        triton=True,
    ),
    prepared(
        "Triton: small parts, float32",
        "small-programs",
        f"{_SHORT} --position-embedding-type rope --geglu --normalization RMSNorm --micro-batch-size 2 "
        "--global-batch-size 2",
        triton=True,
    ),
    prepared(
        "Triton: small parts, two ranks",
        "small-programs",
        f"{_SHORT} --bf16 {_TENSOR} --sequence-parallel --hidden-dropout 0.1 --squared-relu",
        2,
        triton=True,
    ),
    prepared(
        "Triton: small parts, fp8",
        "small-programs",
        f"{_SHORT} {_FP8} delayed --train-iters 2 --micro-batch-size 2 --global-batch-size 2",
        triton=True,
    ),
    prepared("Triton: float64", "float64", f"{_SHORT} --hidden-dropout 0.1 --train-iters 2", triton=True),
    prepared("Triton: float64, rotary positions", "float64", f"{_SHORT} {_ROPE} --train-iters 2", triton=True),
    prepared(
        "float64",
        "float64",
        f"{_ROPE} {_OVERLAPS} --overlap-param-gather-with-optimizer-step {_STAGES} --num-layers 4 "
        "--num-layers-per-virtual-pipeline-stage 1",
        4,
    ),
    training("Triton: experts", f"{_SHORT} {_EXPERTS} --num-layers 1 --bf16 --moe-grouped-gemm", triton=True),
    training("Triton: activations recomputed", f"{_SHORT} {_ROPE} --bf16 --recompute-activations", triton=True),
)
_ATTENTION = (
    prepared("FlexAttention, window", "no-programs", f"{_LONG} {_GROUPED} --window-size 40,0 --bf16", triton=True),
    prepared(
        "FlexAttention, capped scores", "no-programs", f"{_LONG} {_GROUPED} --attn-logit-softcapping 20", triton=True
    ),
    prepared("FlexAttention, documents", "no-programs", f"{_LONG} {_ROPE} --reset-attention-mask --bf16", triton=True),
    prepared(
        "FlexAttention, sinks",
        "no-programs",
        f"{_LONG} {_ROPE} --softmax-type learnable --window-size 40,0 --bf16",
        triton=True,
    ),
    training("attention sinks, grouped keys, bf16", f"--softmax-type learnable {_GROUPED} --bf16"),
    training("attention sinks, dropout", f"--softmax-type learnable {_ROPE} --bf16 --attention-dropout 0.1"),
    training("attention sinks in a window, bf16", f"--softmax-type learnable {_ROPE} --bf16 {_WINDOWS}"),
    training("ring of keys, overlapped, bf16", f"{_CONTEXT} --cp-comm-type p2p --bf16 {_OVERLAPS}", 2),
    training("ring of keys, documents, bf16", f"{_CONTEXT} --cp-comm-type p2p --bf16 --reset-attention-mask", 2),
    training("ring of keys, sinks", f"{_CONTEXT} --cp-comm-type p2p --softmax-type learnable --bf16", 2),
    training(
        "ring of keys, documents and dropout", f"{_CONTEXT} --cp-comm-type p2p --reset-attention-mask {_DROPOUT}", 2
    ),
    training(
        "keys gathered, documents and dropout",
        f"{_CONTEXT} --cp-comm-type all_gather --reset-attention-mask {_DROPOUT}",
        2,
    ),
    training("heads exchanged, dropout", f"{_CONTEXT} --cp-comm-type a2a --bf16 {_DROPOUT}", 2),
    training("ring of keys in windows", f"{_CONTEXT} --cp-comm-type p2p {_WINDOWS} --attn-logit-softcapping 5", 2),
    training(
        "ring of keys of four ranks",
        f"{_ROPE} --context-parallel-size 4 --cp-comm-type p2p --bf16 --num-layers 1 --train-iters 2",
        4,
    ),
    training(
        "ring of keys of four ranks, documents",
        f"{_ROPE} --context-parallel-size 4 --cp-comm-type p2p --reset-attention-mask --num-layers 1 --train-iters 2",
        4,
    ),
    training("ring of keys on a B200", f"{_CONTEXT} --cp-comm-type p2p --bf16", 2, gpu="b200"),
    prepared("ring of keys by cuDNN", "cudnn", f"{_CONTEXT} --cp-comm-type p2p --bf16", 2),
    prepared("attention by cuDNN", "cudnn", f"{_ROPE} --bf16"),
    prepared("ring of keys, small blocks", "small", f"{_CONTEXT} --cp-comm-type p2p --hidden-dropout 0.1", 2),
    prepared("flash-attn", "flash-attn", f"{_GROUPED} --bf16 --use-flash-attn --attention-dropout 0.1 {_WINDOWS}"),
    prepared("flash-attn, documents", "flash-attn", f"{_ROPE} --bf16 --use-flash-attn --reset-attention-mask"),
    prepared("flash-attn, same bits", "flash-attn", f"{_ROPE} --bf16 --use-flash-attn --deterministic-mode"),
    prepared(
        "transformer-engine",
        "transformer-engine",
        f"{_LONG} {_GROUPED} --bf16 --transformer-impl transformer_engine --micro-batch-size 2",
    ),
    training("heads of 20 channels", f"--bf16 {_GROUPED} {_WINDOWS} --hidden-size 80"),
    training("heads of 20 channels, sinks", f"--bf16 {_ROPE} --softmax-type learnable --hidden-size 80"),
    training("heads of 20 channels, ring of keys", f"--bf16 {_CONTEXT} --cp-comm-type p2p --hidden-size 80", 2),
    training("same bits on a B200", f"--deterministic-mode --bf16 {_ROPE}", gpu="b200"),
    training("attention step by step", f"--bf16 {_GROUPED} {_DROPOUT}"),
    training("latent attention", f"{_LATENT} --bf16 {_TENSOR} --sequence-parallel", 2),
    training("latent attention, narrower values", f"{_LATENT} --v-head-dim 8 --bf16"),
    training("latent attention, ring of keys", f"{_LATENT} --context-parallel-size 2 --cp-comm-type p2p", 2),
    training(
        "latent attention, stretched",
        f"{_LATENT} --rotary-scaling-factor 4 --original-max-position-embeddings 8 --mscale 0.8 --mscale-all-dim 0.5 "
        f"{_MTP} --untie-embeddings-and-output-weights",
    ),
)
_MODELS = (
    training("MTP", f"{_GROUPED} {_MTP} {_STAGES} --num-layers 4 --bf16", 2),
    training("MTP, tensor parallel", f"{_ROPE} {_MTP} {_TENSOR} --sequence-parallel --z-loss-coeff 0.05", 2),
    training(
        "norms before and after",
        f"{_GROUPED} --norm-placement sandwich --apply-layernorm-1p --scale-embeddings --qk-layernorm {_WINDOWS} "
        "--rotary-base-local 500 --final-logit-softcapping 3 --query-pre-attn-scalar 9 --bf16",
    ),
    training(
        "norms across heads",
        f"{_GROUPED} --norm-placement post --qk-layernorm --qk-layernorm-across-heads {_TENSOR} --sequence-parallel "
        "--untie-embeddings-and-output-weights",
        2,
    ),
    training(
        "residuals in parallel",
        "--position-embedding-type rope --rotary-percent 0.5 --use-parallel-residual --bf16 --hidden-dropout 0.1",
    ),
    training(
        "a shared group of keys", f"{_ROPE} --group-query-attention --num-query-groups 1 {_TENSOR} --add-qkv-bias", 2
    ),
    training("widths scaled", "--use-mup --mup-width-mult 3 --mup-embedding-mult 2 --mup-output-mult 1.5 --bf16"),
    training("limited gates", f"{_ROPE} --glu-linear-offset 1 --activation-func-clamp-value 0.5 --bf16"),
    training(
        "parts recomputed",
        f"{_ROPE} --bf16 --hidden-dropout 0.1 --recompute-granularity selective "
        "--recompute-modules core_attn layernorm mlp",
    ),
    training(
        "parts recomputed, experts",
        f"{_EXPERTS} {_SENT} --recompute-granularity selective "
        "--recompute-modules moe_act moe shared_experts layernorm --moe-shared-expert-intermediate-size 16",
        2,
    ),
    training(
        "saved inputs distributed",
        f"{_TENSOR} --distribute-saved-activations --recompute-granularity full --recompute-method block "
        "--recompute-num-layers 1 --hidden-dropout 0.1",
        2,
    ),
    training("lora, tensor parallel", f"--lora-rank 4 --lora-dropout 0.2 {_TENSOR} --bf16", 2),
    training("lora, sequence parallel", f"--lora-rank 4 --lora-dropout 0.2 {_TENSOR} --sequence-parallel", 2),
    training(
        "lora of experts", f"{_EXPERTS} {_SENT} --lora-rank 3 --lora-target-modules linear_fc1 linear_fc2 --bf16", 2
    ),
    training("tensor parallel, dropout", f"{_TENSOR} --sequence-parallel {_DROPOUT} --bf16 {_OVERLAPS}", 4),
    training(
        "tensor and context parallel",
        f"{_CONTEXT} --cp-comm-type p2p {_TENSOR} --sequence-parallel --bf16 --hidden-size 48",
        4,
    ),
    training("tensor parallel stages", f"{_STAGES} {_TENSOR} --sequence-parallel --bf16", 4),
    training(
        "stages and replicas", f"{_STAGES} {_OVERLAPS} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1", 4
    ),
    training("four stages", "--pipeline-model-parallel-size 4 --num-layers 4 --global-batch-size 8 --bf16", 4),
    training(
        "three stages, interleaved",
        "--pipeline-model-parallel-size 3 --num-layers 6 --num-layers-per-virtual-pipeline-stage 1 "
        "--global-batch-size 6 --bf16",
        3,
    ),
    training(
        "interleaved pipeline, groups of more micro-batches than stages",
        f"{_STAGES} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 8 "
        "--microbatch-group-size-per-virtual-pipeline-stage 4",
        2,
    ),
    training("context parallel stages", f"{_STAGES} {_CONTEXT} --cp-comm-type p2p --bf16", 4),
    training(
        "tensor parallel, symmetric memory",
        f"{_TENSOR} --sequence-parallel --tp-comm-overlap --tp-comm-overlap-impl symmetric-memory --bf16",
        2,
    ),
)
_OF_EXPERTS = (
    training("experts, overlapped", f"{_EXPERTS} --bf16 --moe-grouped-gemm {_OVERLAPS}", 2),
    training("experts, gradients sharded", f"{_EXPERTS} --bf16 --moe-grouped-gemm {_SHARDS} optim_grads", 2),
    training(
        "experts exchanged, overlapped", f"{_EXPERTS} --bf16 --moe-grouped-gemm {_SENT} {_OVERLAPS} --num-layers 3", 4
    ),
    training("experts, fully sharded", f"{_EXPERTS} {_SENT} {_SHARDS} optim_grads_params {_OVERLAPS} --bf16", 4),
    training("experts with biases", f"{_EXPERTS} {_SENT}".replace("--swiglu --disable-bias-linear", ""), 2),
    training(
        "experts, losses of sequences",
        f"{_EXPERTS} {_SENT} --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01 --moe-router-pre-softmax "
        "--moe-router-load-balancing-type seq_aux_loss --bf16",
        2,
    ),
    training(
        "experts, losses of batches",
        f"{_EXPERTS} {_SENT} --moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type global_aux_loss "
        "--moe-router-dtype fp64",
        2,
    ),
    training(
        "experts, losses, stages",
        f"{_EXPERTS} {_STAGES} --moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type aux_loss --num-layers 4 "
        "--moe-layer-freq [0]*2+[1]*2",
        2,
    ),
    training(
        "experts in groups",
        f"{_EXPERTS} {_SENT} --moe-router-score-function sigmoid --moe-router-num-groups 2 --moe-router-group-topk 1 "
        "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.02 --moe-router-topk-scaling-factor 1.5 "
        "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate",
        2,
    ),
    training(
        "experts, tokens dropped",
        f"{_EXPERTS} {_SENT} --moe-expert-capacity-factor 0.75 --moe-router-load-balancing-type none --bf16 "
        "--eval-iters 1 --eval-interval 2 --moe-token-drop-policy position",
        2,
    ),
    training(
        "experts at random",
        f"{_EXPERTS} {_TENSOR} --expert-tensor-parallel-size 1 --moe-router-force-load-balancing "
        "--moe-token-dispatcher-type alltoall --hidden-dropout 0.1",
        2,
    ),
    training(
        "experts cut by tensor parallelism",
        f"{_EXPERTS} {_TENSOR} --sequence-parallel --moe-token-dispatcher-type allgather --bf16",
        2,
    ),
    training(
        "experts on a B200",
        f"{_EXPERTS} --bf16 --moe-grouped-gemm --num-experts 16 --moe-router-topk 1 --moe-router-pre-softmax",
        gpu="b200",
    ),
    training(
        "experts of more ranks than tokens",
        f"{_EXPERTS} --bf16 --moe-grouped-gemm --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall "
        "--moe-router-topk 1 --moe-router-pre-softmax --seq-length 2 --overlap-grad-reduce",
        4,
    ),
    training(
        "ranks without tokens",
        f"{_EXPERTS} --tensor-model-parallel-size 4 --expert-tensor-parallel-size 1 --seq-length 5 "
        "--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type aux_loss",
        4,
    ),
    training("experts on an A100", f"{_EXPERTS} --bf16 --moe-grouped-gemm {_SENT}", 2, gpu="a100"),
)
_UPDATES = (
    prepared(
        "muon, rounds",
        "small",
        f"--optimizer muon {_OVERLAPS} {_ROPE} --hidden-size 64 --bf16",
        2,
        memory=(_LITTLE, _MUCH),
    ),
    prepared(
        "muon, replicas",
        "small",
        f"--optimizer muon --muon-nesterov {_GROUPED} --hidden-size 64",
        2,
        memory=(_MUCH, _LITTLE),
    ),
    prepared(
        "muon, tensor parallel",
        "small",
        f"--optimizer muon {_TENSOR} --sequence-parallel --hidden-size 64",
        2,
        memory=(_LITTLE, _MUCH),
    ),
    training("muon of experts", f"--optimizer muon {_EXPERTS} {_SENT} --use-distributed-optimizer --bf16", 4),
    training(
        "muon, kinds of gradients",
        f"--optimizer muon --muon-scalar-optimizer lion {_TENSOR} --clip-grad-matrices 0.3 --clip-grad-embeddings 0.1 "
        "--clip-grad-vectors 0.02 --log-num-zeros-in-grad",
        2,
    ),
    prepared("lion, pieces", "small", f"--optimizer lion --lr 1e-4 {_OVERLAPS} --bf16", 2),
    training("sgd", f"--optimizer sgd {_OVERLAPS}", 2),
    training("narrow state", f"{_NARROW} {_OVERLAPS} --log-params-norm --log-num-zeros-in-grad", 2),
    training(
        "narrow state, saved and resumed",
        f"{_NARROW} --save {{folder}}/saved --save-interval 2",
        1,
        launch(
            f"{_NARROW} --save {{folder}}/saved --load {{folder}}/saved --train-iters 5 "
            "--metrics-jsonl {folder}/resumed.jsonl"
        ),
    ),
    training(
        "gradients clipped by kind",
        f"{_OVERLAPS} --clip-grad-matrices 0.3 --clip-grad-embeddings 0.1 --clip-grad-vectors 0.02 "
        "--param-group-overrides *.mlp.*:lr_mult=0.25,wd_mult=0 --decoupled-lr 3e-2 --bf16",
        2,
    ),
    training(
        "overflows", f"--fp16 --initial-loss-scale 4294967296 --hysteresis 1 --loss-scale-window 2 {_OVERLAPS}", 2
    ),
    training("overflows, optimizer offload", f"--fp16 --initial-loss-scale 4294967296 --hysteresis 1 {_OFFLOADS}"),
    training(
        "fp16, saved and resumed",
        f"--fp16 --initial-loss-scale 1024 --save {{folder}}/saved --save-interval 2 --hidden-dropout 0.1 {_TENSOR}",
        2,
        launch(
            f"--fp16 --initial-loss-scale 1024 --load {{folder}}/saved --train-iters 5 --hidden-dropout 0.1 {_TENSOR} "
            "--metrics-jsonl {folder}/resumed.jsonl",
            2,
        ),
    ),
    prepared("optimizer offload, replicas", "small", f"--bf16 {_OVERLAPPED_OFFLOAD} {_OVERLAPS} --hidden-size 64", 2),
    prepared("optimizer offload, fp16", "small", f"--fp16 --initial-loss-scale 1024 {_OFFLOADS}"),
    prepared(
        "optimizer offload of chosen size",
        "small",
        "--bf16 --optimizer-cpu-offload --optimizer-offload-policy auto --optimizer-offload-auto-threshold 1000000 "
        f"{_OVERLAPS} --hidden-size 64",
        2,
        memory=(_LITTLE, _MUCH),
    ),
    training(
        "optimizer offload, saved and resumed",
        f"--bf16 {_OVERLAPPED_OFFLOAD} --save {{folder}}/saved --save-interval 2 --async-save",
        1,
        launch(
            f"--bf16 {_OVERLAPPED_OFFLOAD} --load {{folder}}/saved --train-iters 5 "
            "--metrics-jsonl {folder}/resumed.jsonl"
        ),
    ),
    prepared(
        "copies of the state, small pieces",
        "small",
        f"--inprocess-restart --non-persistent-save-interval 1 --replication {_OVERLAPS} --bf16 --hidden-size 64",
        2,
        memory=(_LITTLE, _MUCH),
    ),
    prepared(
        "small pieces everywhere",
        "small",
        f"{_OVERLAPS} --log-max-attention-logit --check-weight-hash-across-dp-replicas-interval 1 --hidden-dropout 0.1 "
        "--save {folder}/saved --save-interval 2 --async-save --generate-interval 2 --generate-prompts 3 "
        "--sample-tokens 3",
        2,
        memory=(_LITTLE, _MUCH),
    ),
)
_HOST = (
    training(
        "activation offload, adapters", "--lora-rank 4 --cpu-offloading --cpu-offloading-num-layers 2 --num-layers 3"
    ),
    prepared(
        "activation offload, small blocks",
        "small",
        f"--cpu-offloading --cpu-offloading-num-layers 2 --num-layers 3 --bf16 {_ROPE} --hidden-dropout 0.1",
    ),
    training(
        "activation offload, stages",
        f"{_STAGES} --num-layers 4 --cpu-offloading --cpu-offloading-num-layers 1 --bf16",
        2,
    ),
    training(
        "weight offload, adapters",
        f"{_STAGES} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1 --cpu-offloading --lora-rank 4 "
        "--cpu-offloading-num-layers 1 --cpu-offloading-weights",
        2,
    ),
    training(
        "weight offload, evaluation",
        "--cpu-offloading --cpu-offloading-num-layers 2 --cpu-offloading-weights --num-layers 3 --bf16 "
        "--eval-iters 1 --eval-interval 1",
        2,
    ),
    training(
        "weight offload, recomputed",
        "--cpu-offloading --cpu-offloading-num-layers 3 --cpu-offloading-weights --num-layers 3 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    training(
        "weight offload, groups recomputed",
        "--cpu-offloading --cpu-offloading-num-layers 3 --cpu-offloading-weights --num-layers 4 --bf16 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    ),
    training(
        "fully sharded, groups recomputed",
        f"{_SHARDS} optim_grads_params {_OVERLAPS} --num-layers 4 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        2,
    ),
    program("offloaded activations that are not used", "unused_activations.py"),
    prepared(
        "samples of the caller", "own-samples", "--dataloader-type external --global-batch-size 16 --train-iters 2"
    ),
    prepared(
        "samples of the caller, tensor parallel",
        "own-samples",
        f"--dataloader-type external --global-batch-size 32 --train-iters 2 {_TENSOR}",
        4,
    ),
    training("many micro-batches", "--global-batch-size 24 --train-iters 2 --num-workers 4 --bf16"),
    training("a growing batch", f"--rampup-batch-size 2 2 6 --global-batch-size 6 {_OVERLAPS}", 2),
    training(
        "fully sharded, recomputed",
        f"{_SHARDS} optim_grads_params {_OVERLAPS} --num-layers 3 --bf16 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        2,
    ),
    training(
        "fully sharded, instances",
        f"{_SHARDS} optim_grads_params {_OVERLAPS} --num-distributed-optimizer-instances 2",
        4,
    ),
    training("fully sharded stages", f"{_SHARDS} optim_grads_params {_OVERLAPS} {_STAGES} --num-layers 4", 4),
    training(
        "fully sharded, texts sampled",
        f"{_SHARDS} optim_grads_params {_OVERLAPS} --generate-interval 1 --generate-prompts 3 --sample-tokens 3",
        2,
    ),
    training("fully sharded, fp8", f"{_SHARDS} optim_grads_params {_FP8} tensorwise {_OVERLAPS}", 2),
    training("gradients sharded, adapters", f"{_SHARDS} optim_grads --lora-rank 4 {_OVERLAPS}", 2),
    training("gradients compared", "--log-num-zeros-in-grad --bf16 --log-params-norm", 2),
)
_REPLICAS = (
    training(
        "flash dropout, replicas, saved and resumed",
        "--bf16 --attention-dropout 0.1 --hidden-dropout 0.1 --recompute-activations --save {folder}/saved "
        "--save-interval 2 --use-distributed-optimizer",
        2,
        launch(
            "--bf16 --attention-dropout 0.1 --hidden-dropout 0.1 --recompute-activations --load {folder}/saved "
            "--train-iters 5 --use-distributed-optimizer --metrics-jsonl {folder}/resumed.jsonl",
            2,
        ),
    ),
    training(
        "dropout, stages and tensor parallelism",
        f"{_STAGES} {_TENSOR} --bf16 --attention-dropout 0.1 --hidden-dropout 0.1 --pipeline-schedule zero-bubble "
        "--num-layers 4",
        4,
    ),
    training("experts exchanged by stages", f"{_EXPERTS} {_SENT} {_STAGES} --num-layers 4 --bf16 {_OVERLAPS}", 4),
    training("timers of all ranks", f"--timing-log-level 2 --timing-log-option minmax {_STAGES}", 2),
    training("averages in collectives", f"{_OVERLAPS} --ddp-average-in-collective --bf16", 2),
    training("averages in collectives, gradients sharded", f"{_SHARDS} optim_grads --ddp-average-in-collective", 2),
    training(
        "fp8 parameters gathered with the step",
        f"{_FP8} tensorwise --fp8-param-gather {_OVERLAPS} --overlap-param-gather-with-optimizer-step {_STAGES} "
        "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1",
        4,
    ),
    training("replicas' gradients compared", "--check-gradient-hash-across-dp-replicas-interval 1 --bf16", 2),
    training(
        "fully sharded, untied",
        f"{_SHARDS} optim_grads_params {_OVERLAPS} --untie-embeddings-and-output-weights --bf16 --generate-interval 1 "
        "--generate-prompts 3 --sample-tokens 3",
        2,
    ),
    training(
        "fully sharded, saved and resumed",
        f"{_SHARDS} optim_grads_params {_OVERLAPS} --untie-embeddings-and-output-weights --bf16 "
        "--save {folder}/saved --save-interval 2 --async-save",
        2,
        launch(
            f"{_SHARDS} optim_grads_params {_OVERLAPS} --untie-embeddings-and-output-weights --bf16 --train-iters 5 "
            "--load {folder}/saved --metrics-jsonl {folder}/resumed.jsonl",
            2,
        ),
    ),
    training("sums in float32", f"--bf16 --disable-bf16-reduced-precision-matmul --manual-gc {_GROUPED}"),
    program("inference in windows", "inference.py", 1, "{folder}/inference.jsonl", "1", "1", "windows"),
    program("inference in windows, stages", "inference.py", 2, "{folder}/inference.jsonl", "2", "1", "windows"),
    prepared("communications of a device", "look-at-device", f"{_OVERLAPS} --hang-timeout-seconds 0 --bf16", 2),
    prepared("messages of a device", "look-at-device", f"{_STAGES} --hang-timeout-seconds 0", 2),
    training(
        "latent attention, recomputed",
        f"{_LATENT} --recompute-granularity selective --recompute-modules core_attn mla_up_proj --bf16",
    ),
    training(
        "narrow state of another kind",
        f"{_NARROW} --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16 --main-params-dtype fp32 {_OVERLAPS}",
        2,
    ),
    training(
        "narrow state in 16 bits",
        f"{_NARROW} --exp-avg-dtype fp16 --exp-avg-sq-dtype bf16 --main-grads-dtype fp32 --num-layers 1",
    ),
    faulty("a loss is not a number, fp8", "nan_loss_at=6", f"--rerun-mode validate_results {_FP8} delayed", 1, 1),
    training("gradients without fusion", f"--no-gradient-accumulation-fusion --bf16 {_OVERLAPS}", 2),
    training("constant loss scale", "--fp16 --loss-scale 128"),
    training(
        "fine-tuned",
        "--save {folder}/saved --save-interval 3 --bf16",
        1,
        launch(f"--finetune --load {{folder}}/saved --bf16 {_OVERLAPS} --metrics-jsonl {{folder}}/tuned.jsonl", 2),
    ),
    training("MTP, ring of keys", f"{_CONTEXT} {_MTP} --cp-comm-type p2p --reset-attention-mask {_DROPOUT}", 2),
    training("MTP in fp8", f"{_FP8} tensorwise {_ROPE} {_MTP} --fp8-param-gather {_OVERLAPS}", 2),
    training(
        "parameters of experts gathered in fp8", f"{_EXPERTS} {_FP8} tensorwise --fp8-param-gather {_OVERLAPS}", 2
    ),
    training(
        "lora of parts",
        f"{_GROUPED} --lora-rank 3 --lora-dropout 0.2 {_TENSOR} --sequence-parallel --bf16 "
        "--lora-target-modules q_proj v_proj o_proj gate_proj up_proj down_proj",
        2,
    ),
    training(
        "experts with capacity, ring of keys",
        f"{_EXPERTS} {_CONTEXT} --moe-expert-capacity-factor 1.0 --moe-token-drop-policy position --bf16 "
        "--moe-token-dispatcher-type alltoall --cp-comm-type p2p",
        2,
    ),
    training(
        "experts scored by sigmoid, losses",
        f"{_EXPERTS} --moe-router-score-function sigmoid --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01 "
        f"--moe-router-load-balancing-type aux_loss {_OVERLAPS}",
        2,
    ),
    training("rotary positions scaled", f"{_ROPE} --use-rope-scaling --bf16"),
    training("timers, graphs", f"--timing-log-level 2 {_GRAPHS}"),
)
_RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_BIASED_EXPERTS = _EXPERTS.replace("--swiglu --disable-bias-linear", "")
_VIRTUAL = f"{_STAGES} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
_INTERLEAVED_ROPE = f"{_ROPE} --rotary-interleaved --rotary-base 500 --no-rope-freq 2"
_YARN = (
    f"{_ROPE} --rope-type yarn --rotary-scaling-factor 4 --original-max-position-embeddings 8 --beta-fast 8 "
    "--beta-slow 2 --no-yarn-correction-range-round-to-int"
)
_SLICES = f"{_LATENT} --qk-pos-emb-head-dim 16 --kv-lora-rank 16 --q-lora-rank 16".replace("--qk-layernorm ", "")


def resumed(name: str, flags: str, ranks: int = 1, load: str = "", *, preparations: str = "") -> Scenario:
    """Return the scenario of a training that saves, and of a second process that resumes it with more flags."""
    folders = "--save {folder}/saved --save-interval 2"
    first = launch(f"{flags} {folders}", ranks)
    more = f"--load {{folder}}/saved --train-iters 5 --metrics-jsonl {{folder}}/resumed.jsonl {load}"
    launches: tuple[Launch, ...] = (first, launch(f"{flags} {folders} {more}", ranks))
    if preparations:
        file = f"{PROGRAMS}/prepared.py"
        launches = tuple(replace(each, arguments=(preparations, *each.arguments), program=file) for each in launches)
    return Scenario(name, launches)


_FLAGS = (
    training("rotary positions, interleaved", f"{_INTERLEAVED_ROPE} --bf16 --kv-channels 12 --norm-epsilon 1e-3"),
    training(
        "Triton: rotary positions, interleaved",
        f"{_SHORT} {_INTERLEAVED_ROPE} --bf16 --qk-layernorm --no-rope-freq [0,1] --num-layers 2",
        triton=True,
    ),
    training("rotary positions, YaRN", f"{_YARN} --bf16 --mscale 0.8"),
    training(
        "rotary positions, other scaling",
        f"{_ROPE} --use-rope-scaling --rope-scaling-factor 4 --rope-scaling-low-freq-factor 1 "
        "--rope-scaling-high-freq-factor 3 --rope-scaling-original-max-position-embeddings 16",
    ),
    training(
        "rotary positions, interpolated",
        "--use-rotary-position-embeddings --no-position-embedding --rotary-seq-len-interpolation-factor 2 "
        "--quick-geglu "
        "--disable-qkv-bias --bf16",
    ),
    training("no positions", "--no-position-embedding --attention-head-type multiquery --openai-gelu --bf16"),
    training(
        "residuals after norms",
        "--apply-residual-connection-post-layernorm --no-bias-gelu-fusion --bf16 --hidden-dropout 0.1",
    ),
    training(
        "widths scaled from a base",
        "--use-mup --mup-base-hidden-size 16 --mup-base-head-dim 4 --mup-attn-scale-power 0.5 --bf16 "
        "--make-vocab-size-divisible-by 16",
    ),
    training(
        "fp8, delayed, other scales",
        f"{_FP8} delayed --fp8-margin 1 --fp8-interval 2 --fp8-amax-compute-algo most_recent --fp8-amax-history-len 4 "
        "--train-iters 6",
    ),
    training(
        "fp8, delayed, layers at the ends in bf16",
        f"{_FP8} delayed --first-last-layers-bf16 --num-layers-at-start-in-bf16 2 --num-layers-at-end-in-bf16 1 "
        f"{_STAGES} --num-layers 6",
        2,
    ),
    training(
        "virtual stages by number", f"{_STAGES} --num-layers 4 --num-virtual-stages-per-pipeline-rank 2 --bf16", 2
    ),
    training(
        "pipeline of a layout",
        "--pipeline-model-parallel-size 2 --num-layers 4 --pipeline-model-parallel-layout Et|tt|t|L --bf16",
        2,
    ),
    training(
        "pipeline, uneven",
        f"{_STAGES} --num-layers 3 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 2",
        2,
    ),
    training(
        "pipeline, embedding and loss counted",
        f"{_STAGES} --num-layers 2 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
        2,
    ),
    training(
        "pipeline, some output weights deferred",
        f"{_STAGES} --defer-embedding-wgrad-compute --wgrad-deferral-limit 2 --untie-embeddings-and-output-weights "
        "--bf16",
        2,
    ),
    training(
        "tensor parallel, gathered before rings",
        f"{_TENSOR} --sequence-parallel --tp-comm-overlap --tp-comm-overlap-impl ring --disable-tp-comm-overlap-ag",
        2,
    ),
    training(
        "tensor parallel, reduced after rings",
        f"{_TENSOR} --sequence-parallel --tp-comm-overlap --tp-comm-overlap-impl auto --disable-tp-comm-overlap-rs "
        "--bf16",
        2,
    ),
    training(
        "experts, float32 router",
        f"{_EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type flex --moe-router-dtype fp32 --bf16 "
        "--moe-expert-capacity-factor 0.75 --moe-token-drop-policy probs --moe-layer-recompute",
        2,
    ),
    training("attention, fused", f"{_ROPE} --bf16 --attention-backend fused"),
    training("attention, local", f"{_ROPE} --bf16 --attention-backend local --attention-dropout 0.1"),
    training(
        "batch sizes by steps", f"--step-batch-size-schedule 0:2,128:4 --global-batch-size 4 --bf16 {_OVERLAPS}", 2
    ),
    training(
        "warm-up, stable and decay",
        "--lr-decay-style WSD --lr-warmup-iters 1 --lr-wsd-decay-iters 2 --lr-wsd-decay-style cosine --train-iters 5 "
        "--lr-decay-iters 5 --exit-interval 4 --weight-decay 0.1 --adam-beta1 0.8 --adam-beta2 0.9 --adam-eps 1e-6",
    ),
    training("only evaluated", "--skip-train --eval-iters 2 --bf16"),
    training("compiled", f"--compile --bf16 --hidden-dropout 0.1 {_ROPE}"),
    training(
        "lion, other betas",
        "--optimizer lion --lr 1e-4 --lion-beta1 0.8 --lion-beta2 0.9 --weight-decay 0.1 --clip-grad 0.1 --bf16",
    ),
    training("sgd, momentum", f"--optimizer sgd --sgd-momentum 0.5 {_OVERLAPS} --bf16 --clip-grad 0", 2),
    training(
        "muon, other products",
        f"--optimizer dist_muon --muon-momentum 0.8 --muon-num-ns-steps 3 --muon-coefficient-type simple "
        "--muon-scale-mode unit_rms_norm --muon-extra-scale-factor 0.2 --muon-fp32-matmul-prec high "
        "--muon-no-split-qkv "
        f"--weight-decay 0.1 {_GROUPED} {_OVERLAPS} --bf16",
        2,
    ),
    training(
        "muon, shapes scaled", f"--optimizer muon --muon-scale-mode shape_scaling --muon-fp32-matmul-prec low {_ROPE}"
    ),
    training(
        "hybrid Adam",
        f"--bf16 --optimizer hybridadam --optimizer-offload-policy static --optimizer-offload-fraction 0.5 {_OVERLAPS} "
        "--use-torch-optimizer-for-cpu-offload",
        2,
    ),
    training("gradients in bf16", f"--bf16 --grad-reduce-in-bf16 {_OVERLAPS} --num-layers 3", 2),
    training("gradients in bf16, sharded", f"--bf16 --grad-reduce-in-bf16 {_SHARDS} optim_grads {_OVERLAPS}", 2),
    training("gradients in bf16, experts", f"--bf16 --grad-reduce-in-bf16 {_EXPERTS} {_SENT} {_OVERLAPS}", 4),
    training("not checked for NaN", f"--no-check-for-nan-in-loss-and-grad {_OVERLAPS} --bf16", 2),
    training("fully sharded, torch's flag", "--use-torch-fsdp2 --bf16 --clip-grad 0.1 --log-num-zeros-in-grad", 2),
    training("fully sharded, Megatron's flag", f"--use-megatron-fsdp {_OVERLAPS} --bf16 --log-params-norm", 2),
    training("samples in a cycle", f"--dataloader-type cyclic {_OVERLAPS}", 2),
    training("all of the validation set", f"--full-validation --eval-interval 2 --eval-iters 1 --bf16 {_OVERLAPS}", 2),
    training("samples passed over", "--iterations-to-skip 1 --bf16"),
    Scenario(
        "a spike rewound",
        (
            launch(
                "--spike-policy rewind --spike-window 8 --train-iters 11 --spike-threshold 0.1 --max-spikes 1 "
                "--save {folder}/saved --save-interval 2 --checkpoint-validation-steps 1 --bf16",
                1,
                1,
            ),
        ),
    ),
    training(
        "written to TensorBoard",
        "--tensorboard-dir {folder}/board --log-timers-to-tensorboard --bf16 "
        "--log-validation-ppl-to-tensorboard --log-memory-to-tensorboard --eval-iters 1 --eval-interval 2",
    ),
    training(
        "lora scaled", "--lora-rank 4 --lora-alpha 3 --bf16 --init-method-std 0.05 --embedding-init-method-std 0.1"
    ),
)
_PAIRS = (
    program("copies of the state loaded", "restored_copies.py", 3),
    *(
        training(f"three replicas, {name}", f"--global-batch-size 6 {flags}", 3)
        for name, flags in (
            ("gradients overlapped", f"--bf16 {_OVERLAPS} --ddp-average-in-collective"),
            ("distributed optimizer", f"--bf16 {_OVERLAPS} --log-params-norm"),
            ("gradients sharded", f"{_SHARDS} optim_grads {_OVERLAPS} --bf16"),
            ("fully sharded", f"{_SHARDS} optim_grads_params {_OVERLAPS} --fp16 --initial-loss-scale 1024"),
            ("gradients in bf16", f"--bf16 --grad-reduce-in-bf16 {_OVERLAPS} {_EXPERTS}"),
            ("muon", f"--optimizer muon {_ROPE} --bf16 {_OVERLAPS}"),
        )
    ),
    training(
        "experts exchanged by three ranks",
        f"{_EXPERTS} --num-experts 6 --expert-model-parallel-size 3 --moe-token-dispatcher-type alltoall "
        f"--global-batch-size 6 --bf16 {_OVERLAPS}",
        3,
    ),
    training(
        "three tensor-parallel ranks",
        "--tensor-model-parallel-size 3 --hidden-size 48 --num-attention-heads 6 "
        f"--sequence-parallel --seq-length 48 --max-position-embeddings 48 --bf16 {_DROPOUT}",
        3,
    ),
    training(
        "ring of keys of three ranks",
        f"{_ROPE} --context-parallel-size 3 --seq-length 48 --max-position-embeddings 48 --cp-comm-type p2p --bf16",
        3,
    ),
    training(
        "fp16, micro-batches accumulated by the experts",
        f"{_EXPERTS} {_SENT} --fp16 --initial-loss-scale 65536 {_OVERLAPS}",
        2,
    ),
    training(
        "texts sampled, stages", f"--generate-interval 1 --generate-prompts 3 --sample-tokens 3 {_STAGES} --bf16", 2
    ),
    training(
        "texts sampled, virtual stages",
        f"--generate-interval 1 --generate-prompts 3 --sample-tokens 3 {_VIRTUAL} {_OVERLAPS}",
        4,
    ),
    training(
        "texts sampled, latent attention and experts",
        f"--generate-interval 1 --generate-prompts 3 --sample-tokens 3 {_LATENT} {_EXPERTS} {_SENT} --bf16",
        2,
    ),
    training(
        "texts sampled, ring of keys",
        f"--generate-interval 2 --generate-prompts 3 --sample-tokens 3 {_CONTEXT} --bf16",
        2,
    ),
    training(
        "results compared", f"--rerun-mode report_stats --bf16 --hidden-dropout 0.1 {_OVERLAPS} --train-iters 4", 2
    ),
    training(
        "results compared, experts in fp8",
        f"--rerun-mode report_stats {_EXPERTS} {_FP8} delayed --moe-aux-loss-coeff 0.1",
    ),
    Scenario(
        "a transient error",
        (
            launch(
                "--rerun-mode validate_results --error-injection-rate 2 --error-injection-type transient_error "
                f"{_EXPERTS} --moe-aux-loss-coeff 0.1 --bf16 --train-iters 6 "
                "--result-rejected-tracker-filename {folder}/rejected.txt",
                1,
                1,
            ),
        ),
    ),
    training(
        "a right result suspected",
        f"--rerun-mode validate_results --error-injection-rate 2 --error-injection-type correct_result {_OVERLAPS} "
        "--bf16 --train-iters 6 --hidden-dropout 0.1",
        2,
    ),
    training(
        "lora, a shared group of keys",
        f"{_ROPE} --group-query-attention --num-query-groups 1 {_TENSOR} --bf16 "
        "--lora-rank 4 --lora-target-modules q_proj k_proj v_proj o_proj",
        2,
    ),
    training("lora of the shared expert", f"{_EXPERTS} --lora-rank 4 --moe-shared-expert-intermediate-size 16 --bf16"),
    training("logits watched in windows", f"--log-max-attention-logit {_GROUPED} {_WINDOWS} --reset-attention-mask"),
    *(
        prepared(
            f"experts, padding, losses of kind {kind}",
            "padded-samples",
            f"{_EXPERTS} {flags} --dataloader-type external --train-iters 2 --moe-aux-loss-coeff 0.1 "
            f"--moe-z-loss-coeff 0.01 --moe-router-load-balancing-type {kind}",
            2,
        )
        for kind, flags in (
            ("seq_aux_loss", f"{_SENT} --bf16"),
            (
                "aux_loss",
                f"{_TENSOR} --sequence-parallel --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall "
                "--moe-expert-capacity-factor 1.0",
            ),
            ("global_aux_loss", f"{_CONTEXT} --cp-comm-type p2p --bf16"),
        )
    ),
    prepared("apex", "apex", f"--bf16 {_OVERLAPS}", 2),
    prepared("apex, fp16, overflows", "apex", "--fp16 --initial-loss-scale 4294967296 --hysteresis 1"),
    prepared(
        "apex gathered with the step",
        "apex",
        f"--bf16 {_OVERLAPS} --overlap-param-gather-with-optimizer-step {_VIRTUAL}",
        4,
    ),
    resumed("apex, saved and resumed", f"--bf16 --async-save {_OVERLAPS}", 2, preparations="apex"),
    training("optimizer offload, lion", f"--optimizer lion --lr 1e-4 --bf16 {_OVERLAPPED_OFFLOAD}"),
    training("optimizer offload, sgd", f"--optimizer sgd --sgd-momentum 0.5 --bf16 {_OVERLAPPED_OFFLOAD}"),
    training("attention sinks, step by step", f"--softmax-type learnable {_GROUPED} --bf16 {_DROPOUT}"),
    training("attention sinks, documents", f"--softmax-type off-by-one {_ROPE} --bf16 --reset-attention-mask"),
    prepared(
        "FlexAttention, documents in windows",
        "no-programs",
        f"{_LONG} {_GROUPED} --window-size 40,0 --reset-attention-mask --bf16 --global-batch-size 4",
        triton=True,
    ),
    prepared(
        "FlexAttention, documents, micro-batches of two",
        "no-programs",
        f"{_LONG} {_GROUPED} --reset-attention-mask --bf16 --micro-batch-size 2 {_RECOMPUTED}",
        triton=True,
    ),
    training(
        "experts, instances of the optimizer",
        f"{_EXPERTS} {_SENT} {_OVERLAPS} --num-distributed-optimizer-instances 2 --bf16",
        4,
    ),
    training(
        "experts in fp8 with biases", f"{_FP8} tensorwise {_EXPERTS}".replace("--swiglu --disable-bias-linear", "")
    ),
    training("experts in fp8, no weight gradients", f"{_EXPERTS} {_FP8} tensorwise --no-fp8-wgrad {_SENT}", 2),
    training(
        "experts in fp8, many",
        f"{_EXPERTS} {_FP8} tensorwise --num-experts 16 --seq-length 16 --no-gradient-accumulation-fusion",
    ),
    prepared(
        "experts, middles filled in",
        "two-data-sets",
        f"{_EXPERTS} {_SENT} --data-path first --split 100,0,0 --fim-rate 0.9 --fim-spm-rate 0.5 --fim-prefix-token 60 "
        "--fim-middle-token 61 --fim-suffix-token 62 --fim-fragment-rate 0.5 --fim-split-sample 5 "
        "--moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01 --moe-router-load-balancing-type seq_aux_loss",
        2,
    ),
    prepared(
        "experts over DeepEP",
        "deepep",
        f"{_EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type flex --moe-router-dtype fp32 --bf16 "
        "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-overlap --moe-expert-capacity-factor 0.75",
        2,
    ),
    prepared("transformer-engine, LayerNorm", "transformer-engine", "--bf16 --transformer-impl transformer_engine"),
    faulty("a replica drifts", "drift_at=3", "--check-weight-hash-across-dp-replicas-interval 1", 2, 1, 1),
    faulty("a large gradient", "nan_gradient_at=6", f"--bf16 --rerun-mode validate_results {_OVERLAPS}", 2, 1, 1),
    *(
        program(
            f"inference, {kind}, on {pp * tp}",
            "inference.py",
            pp * tp,
            "{folder}/inference.jsonl",
            str(pp),
            str(tp),
            kind,
        )
        for kind, pp, tp in (
            ("grouped", 1, 2),
            ("sinks", 2, 1),
            ("latent", 1, 1),
            ("experts", 1, 1),
            ("small", 2, 1),
            ("poisoned", 1, 1),
            ("poisoned", 2, 2),
        )
    ),
    *(
        resumed(f"written late, {name}", f"--async-save {flags}", ranks, preparations="late-writes")
        for name, flags, ranks in (
            ("dropout", f"--bf16 --hidden-dropout 0.1 {_OVERLAPS}", 2),
            ("fp8", f"{_FP8} delayed --fp8-amax-history-len 3", 1),
            ("torch_dist, fp8", f"--ckpt-format torch_dist {_FP8} delayed --fp8-amax-history-len 3", 1),
            ("torch format, fp16", "--ckpt-format torch --fp16 --initial-loss-scale 4096 --loss-scale-window 2", 1),
            ("narrow state", f"{_NARROW} {_OVERLAPS}", 2),
            ("experts", f"{_EXPERTS} --bf16 --moe-router-enable-expert-bias --moe-router-score-function sigmoid", 1),
            ("optimizer offload", f"--bf16 {_OVERLAPPED_OFFLOAD}", 1),
            ("fully sharded", f"{_SHARDS} optim_grads_params {_OVERLAPS} --bf16", 2),
            ("muon", "--optimizer muon --ema-decay 0.9", 1),
        )
    ),
    resumed("torch_dist, saved and resumed", f"--ckpt-format torch_dist --async-save --bf16 {_OVERLAPS}", 2),
    resumed("torch_dist, fp8, saved and resumed", f"--ckpt-format torch_dist --async-save {_FP8} delayed", 1),
    resumed("torch format, saved and resumed", f"--ckpt-format torch --bf16 --hidden-dropout 0.1 {_TENSOR}", 2),
    resumed("torch format, optimizer offload", f"--ckpt-format torch --bf16 {_OVERLAPPED_OFFLOAD} --async-save"),
    resumed("weights alone resumed", "--bf16 --no-save-rng --hidden-dropout 0.1", 1, "--no-load-optim --no-load-rng"),
    resumed("muon, saved and resumed", f"--optimizer muon {_OVERLAPS} {_ROPE} --bf16", 2),
    resumed("lion, saved and resumed", f"--optimizer lion --lr 1e-4 {_OVERLAPS} --bf16 --async-save", 2),
    resumed("average of weights, saved and resumed", f"--ema-decay 0.9 {_OVERLAPS} --bf16 --eval-iters 1", 2),
    resumed(
        "experts, saved and resumed",
        f"{_EXPERTS} {_SENT} --bf16 --moe-router-enable-expert-bias --moe-router-score-function sigmoid --async-save",
        2,
    ),
    resumed("lora, saved and resumed", f"--lora-rank 4 --lora-dropout 0.2 {_TENSOR} --bf16", 2),
    resumed("interleaved pipeline, saved and resumed", f"{_VIRTUAL} --bf16 --hidden-dropout 0.1 --async-save", 2),
    resumed(
        "ring of keys, saved and resumed", f"{_CONTEXT} --cp-comm-type p2p --bf16 {_OVERLAPS} --hidden-dropout 0.1", 2
    ),
    resumed("gradients sharded, saved and resumed", f"{_SHARDS} optim_grads {_OVERLAPS} --bf16 --async-save", 2),
    resumed(
        "weight offload, saved and resumed",
        "--cpu-offloading --cpu-offloading-num-layers 3 --cpu-offloading-weights --num-layers 3 --bf16 --async-save",
    ),
    resumed("graphs, saved and resumed", f"{_GRAPHS} --hidden-dropout 0.1 --bf16 --async-save", 1, "--train-iters 6"),
    resumed(
        "MTP and fp8 parameters, saved and resumed",
        f"{_FP8} tensorwise --fp8-param-gather {_OVERLAPS} {_ROPE} {_MTP}",
        2,
    ),
    training("graphs, dropout", f"{_GRAPHS} --hidden-dropout 0.1 --bf16 --global-batch-size 3"),
    training(
        "graphs, norms across heads",
        f"{_GRAPHS} {_GROUPED} --qk-layernorm --qk-layernorm-across-heads --norm-placement post {_TENSOR}",
        2,
    ),
    training("graphs, norms of layers", f"{_GRAPHS} --log-layer-norms 1 --bf16 --log-params-norm"),
    training("graphs, windows", f"{_GRAPHS} {_GROUPED} {_WINDOWS} --attn-logit-softcapping 5"),
    training("graphs, heads exchanged", f"{_GRAPHS} {_CONTEXT} --cp-comm-type a2a --bf16", 2),
    training(
        "graphs, fp8 by tensors, tensor parallel", f"{_GRAPHS} {_FP8} tensorwise {_TENSOR} --sequence-parallel", 2
    ),
    training("graphs, fp8 by rows", f"{_GRAPHS} {_FP8} rowwise {_WIDE} --train-iters 4"),
    training(
        "graphs, parts recomputed",
        f"{_GRAPHS} --recompute-granularity selective --recompute-modules core_attn layernorm mlp --hidden-dropout 0.1",
    ),
    training("graphs, optimizer in fp8", f"{_GRAPHS} {_NARROW} {_OVERLAPS}", 2),
    training("graphs, hang watchdog", f"{_GRAPHS} {_TENSOR} --hang-timeout-seconds 60", 2),
    training("graphs, results validated again", f"{_GRAPHS} --rerun-mode validate_results --train-iters 5"),
    training("graphs, workers", f"{_GRAPHS} --num-workers 2 --bf16 --empty-unused-memory-level 2"),
    training(
        "graphs, rings of tensor parallelism",
        f"{_GRAPHS} {_TENSOR} --sequence-parallel --tp-comm-overlap --tp-comm-overlap-impl ring",
        2,
    ),
    training("graphs, gradients in bf16", f"{_GRAPHS} --bf16 --grad-reduce-in-bf16 {_OVERLAPS}", 2),
    training("recomputed, ring of keys", f"{_CONTEXT} --cp-comm-type p2p --bf16 {_RECOMPUTED} --hidden-dropout 0.1", 2),
    training("recomputed, heads exchanged", f"{_CONTEXT} --cp-comm-type a2a --recompute-activations {_DROPOUT}", 2),
    training("recomputed, interleaved pipeline", f"{_VIRTUAL} {_RECOMPUTED} --hidden-dropout 0.1 --bf16", 2),
    training(
        "recomputed, zero-bubble pipeline",
        f"{_STAGES} --num-layers 4 --pipeline-schedule zero-bubble {_RECOMPUTED} {_DROPOUT}",
        2,
    ),
    training("recomputed, experts", f"{_EXPERTS} {_SENT} {_RECOMPUTED} --bf16 --moe-aux-loss-coeff 0.1", 2),
    training("recomputed, MTP", f"{_ROPE} {_MTP} {_RECOMPUTED} --bf16 --hidden-dropout 0.1"),
    training("recomputed, lora", f"--lora-rank 4 --lora-dropout 0.2 {_RECOMPUTED} --bf16"),
    training("recomputed, fp8 by tensors", f"{_FP8} tensorwise {_ROPE} {_RECOMPUTED} {_TENSOR} --sequence-parallel", 2),
    training("ring of keys, interleaved pipeline", f"{_CONTEXT} {_VIRTUAL} --cp-comm-type p2p --bf16", 4),
    training(
        "ring of keys, evaluation",
        f"{_CONTEXT} --cp-comm-type p2p --bf16 --eval-iters 2 --eval-interval 2 "
        "--calculate-per-token-loss --eod-mask-loss",
        2,
    ),
    training(
        "ring of keys, fully sharded",
        f"{_CONTEXT} --cp-comm-type p2p --bf16 {_SHARDS} optim_grads_params {_OVERLAPS}",
        2,
    ),
    training("ring of keys, experts exchanged", f"{_EXPERTS} {_CONTEXT} {_SENT} --cp-comm-type p2p --bf16", 2),
    training("ring of keys, dropout by kernels", f"{_CONTEXT} --cp-comm-type p2p --bf16 --attention-dropout 0.1", 2),
    training("keys gathered, sinks", f"{_CONTEXT} --cp-comm-type all_gather --softmax-type learnable --bf16", 2),
    training("keys gathered in windows", f"{_CONTEXT} --cp-comm-type all_gather {_WINDOWS} --bf16", 2),
    training("heads exchanged, sinks", f"{_CONTEXT} --cp-comm-type a2a --softmax-type off-by-one --bf16", 2),
    training("heads exchanged, latent attention", f"{_LATENT} --context-parallel-size 2 --cp-comm-type a2a --bf16", 2),
    training("heads exchanged, documents", f"{_CONTEXT} --cp-comm-type a2a --reset-attention-mask --bf16", 2),
    training("ring of keys, fp8", f"{_CONTEXT} --cp-comm-type p2p {_FP8} delayed", 2),
    training(
        "ring of keys, activation offload",
        f"{_CONTEXT} --cp-comm-type p2p --bf16 --cpu-offloading --cpu-offloading-num-layers 1 --num-layers 3",
        2,
    ),
    training("interleaved pipeline, fp16", f"{_VIRTUAL} --fp16 --initial-loss-scale 65536 {_OVERLAPS}", 4),
    training("interleaved pipeline, fp8", f"{_VIRTUAL} {_FP8} delayed --fp8-param-gather {_OVERLAPS}", 4),
    training("interleaved pipeline, experts", f"{_EXPERTS} {_VIRTUAL} --bf16 --moe-aux-loss-coeff 0.1", 2),
    training("interleaved pipeline, lora", f"{_VIRTUAL} --lora-rank 4 --bf16", 2),
    training(
        "interleaved pipeline, evaluation", f"{_VIRTUAL} --eval-iters 2 --eval-interval 2 --bf16 {_MTP} {_ROPE}", 2
    ),
    training(
        "zero-bubble pipeline, experts",
        f"{_EXPERTS} {_STAGES} --num-layers 4 --pipeline-schedule zero-bubble --bf16",
        2,
    ),
    training(
        "zero-bubble pipeline, fp8", f"{_FP8} delayed {_STAGES} --num-layers 4 --pipeline-schedule zero-bubble", 2
    ),
    training("fully sharded, MTP", f"{_SHARDS} optim_grads_params {_ROPE} {_MTP} {_OVERLAPS} --bf16", 2),
    training("fully sharded, muon", f"{_SHARDS} optim_grads_params --optimizer muon {_OVERLAPS} --bf16", 2),
    training("fully sharded, latent attention", f"{_SHARDS} optim_grads_params {_LATENT} {_OVERLAPS} --bf16", 2),
    training(
        "fully sharded, fp16", f"{_SHARDS} optim_grads_params --fp16 --initial-loss-scale 4294967296 {_OVERLAPS}", 2
    ),
    training(
        "fully sharded, tensor parallel",
        f"{_SHARDS} optim_grads_params {_TENSOR} --sequence-parallel --bf16 {_OVERLAPS}",
        4,
    ),
    training("fully sharded, optimizer offload", f"{_SHARDS} optim_grads_params --bf16 {_OVERLAPPED_OFFLOAD}", 2),
    training("gradients sharded, experts", f"{_EXPERTS} {_SENT} {_SHARDS} optim_grads {_OVERLAPS} --bf16", 4),
    training("average of weights, narrow state", f"--ema-decay 0.9 {_NARROW} --eval-iters 1 --eval-interval 1"),
    training(
        "activation offload, fp8",
        f"{_FP8} tensorwise {_ROPE} --cpu-offloading --cpu-offloading-num-layers 2 --num-layers 3",
    ),
    training(
        "activation offload, latent attention",
        f"{_LATENT} --bf16 --cpu-offloading --cpu-offloading-num-layers 2 --num-layers 3",
    ),
    training(
        "latent attention of slices, fp8",
        f"{_SLICES} {_FP8} tensorwise --hidden-size 64",
    ),
    training(
        "Triton: latent attention of slices, fp8",
        f"{_SHORT} {_SLICES} {_FP8} tensorwise",
        triton=True,
    ),
    training("latent attention, experts", f"{_LATENT} {_EXPERTS} --bf16 --moe-shared-expert-intermediate-size 16"),
    training(
        "Triton: rotary positions of part of the heads",
        f"{_SHORT} --position-embedding-type rope --rotary-percent 0.25 --bf16 --hidden-dropout 0.1",
        triton=True,
    ),
    training(
        "norms of layers, stages and experts",
        f"{_EXPERTS} {_STAGES} --log-layer-norms 1 --log-max-attention-logit --log-params-norm "
        "--log-num-zeros-in-grad --num-layers 4 --bf16",
        2,
    ),
    training(
        "graphs, three warm-up steps", f"{_GRAPHS} --cuda-graph-warmup-steps 3 --train-iters 5 --bf16 {_OVERLAPS}", 2
    ),
    training(
        "Triton: graphs, one micro-batch, two warm-up steps",
        f"{_SHORT} {_GRAPHS} --cuda-graph-warmup-steps 2 --bf16",
        triton=True,
    ),
    training(
        "Triton: graphs, small model of rotary positions",
        f"{_SHORT} {_GRAPHS} --cuda-graph-warmup-steps 2 --bf16 {_ROPE} --global-batch-size 2 --add-qkv-bias "
        "--hidden-dropout 0.1",
        triton=True,
    ),
    *(
        training(
            f"{optimizer} gathered with the step",
            f"--optimizer {optimizer} --bf16 {_OVERLAPS} --overlap-param-gather-with-optimizer-step {_VIRTUAL}",
            4,
        )
        for optimizer in ("lion", "sgd")
    ),
    training(
        "narrow state gathered with the step",
        f"{_NARROW} {_OVERLAPS} --overlap-param-gather-with-optimizer-step {_VIRTUAL}",
        4,
    ),
    training(
        "average of weights, gathered with the step",
        f"--ema-decay 0.9 --fp16 --initial-loss-scale 1024 {_OVERLAPS} "
        f"--overlap-param-gather-with-optimizer-step {_VIRTUAL} --eval-iters 1 --eval-interval 1",
        4,
    ),
    prepared(
        "transformer-engine on one rank",
        "transformer-engine-of-rank-0",
        f"{_GROUPED} --bf16 --transformer-impl transformer_engine",
        2,
    ),
    prepared(
        "transformer-engine, norms of heads",
        "transformer-engine",
        f"{_GROUPED} --bf16 --transformer-impl transformer_engine --qk-layernorm --apply-layernorm-1p",
    ),
    prepared(
        "a rank without peers", "no-peers-of-rank-1", f"{_TENSOR} --sequence-parallel --tp-comm-overlap --bf16", 2
    ),
    prepared(
        "sets of files",
        "two-data-sets",
        "--train-data-path first --valid-data-path second --eval-iters 1 --eval-interval 1 "
        f"--no-mmap-bin-files --bf16 {_OVERLAPS} --data-cache-path cache --reset-position-ids --eod-mask-loss",
        2,
    ),
    prepared(
        "more validation sets",
        "two-data-sets",
        "--data-path first --split 80,20,0 --extra-valid-datalist second.txt --extra-valid-data-samples 2 "
        "--eval-iters 1 --eval-interval 2 --bf16",
    ),
    prepared(
        "middles filled in",
        "two-data-sets",
        "--data-path first --split 100,0,0 --fim-rate 0.5 --fim-spm-rate 0.5 --fim-prefix-token 60 "
        "--fim-middle-token 61 --fim-suffix-token 62 --bf16",
    ),
)
_MIXED = (
    training("hybrid", _HYBRID),
    training("hybrid, tensor parallel", f"{_HYBRID} {_TENSOR} --sequence-parallel", 2),
    training(
        "hybrid, stages, parts recomputed",
        f"{_HYBRID} {_STAGES} --recompute-granularity selective --recompute-modules core_attn layernorm mlp --bf16",
        2,
    ),
    training(
        "hybrid, weight offload", f"{_HYBRID} --cpu-offloading --cpu-offloading-num-layers 2 --cpu-offloading-weights"
    ),
    training(
        "hybrid, attention and Mamba-2 in parallel",
        f"{_MIXERS} --mamba-num-groups 1 --hybrid-override-pattern PG --num-layers 2 --mamba-norm before-gate "
        f"--mamba-multipliers 1 2 1 1 1 --mamba-dt-lower-limit 0.01 {_TENSOR} --sequence-parallel --bf16",
        2,
    ),
    prepared(
        "Triton: chunks, Mamba-2",
        "small-programs",
        f"{_SHORT} --normalization RMSNorm --disable-bias-linear --no-position-embedding --hybrid-override-pattern MM "
        "--mamba-state-dim 6 --mamba-head-dim 8 --mamba-num-groups 2 --num-layers 2 --mamba-norm before-gate "
        "--seq-length 24 --max-position-embeddings 24 --reset-attention-mask --bf16",
        triton=True,
    ),
    prepared("hybrid, documents in small parts", "small", f"{_HYBRID} --reset-attention-mask --bf16"),
    prepared(
        "Triton: small parts, hybrid",
        "small-programs",
        f"{_SHORT} {_MIXERS} --hybrid-override-pattern MG --num-layers 2 --reset-attention-mask",
        triton=True,
    ),
    prepared(
        "Triton: chunks, gated delta-net and KDA",
        "small-programs",
        f"{_SHORT} --normalization RMSNorm --disable-bias-linear --no-position-embedding --hybrid-override-pattern GK "
        "--linear-key-head-dim 4 --linear-value-head-dim 8 --linear-num-key-heads 2 --linear-num-value-heads 4 "
        "--num-layers 2 --seq-length 24 --max-position-embeddings 24 --reset-attention-mask --bf16",
        triton=True,
    ),
    training("hybrid, ring of keys", f"{_HYBRID} {_SHARED} --bf16", 2),
    training(
        "hybrid, heads exchanged, stages",
        f"{_HYBRID} --mamba-num-groups 1 {_SHARED} --cp-comm-type a2a {_STAGES} --reset-attention-mask --bf16 "
        "--recompute-granularity selective",
        4,
    ),
    training("graphs, hybrid", f"{_GRAPHS} {_HYBRID} --bf16"),
    training("graphs, KDA and attention with Mamba-2", f"{_GRAPHS} {_BOTH} --bf16"),
    training("attention with Mamba-2, heads exchanged", f"{_BOTH} {_SHARED} --lora-rank 2 --lora-dropout 0.1", 2),
    training(
        "hybrid, states passed, stages",
        f"{_BOTH} --mamba-num-groups 1 {_STATES} {_STAGES} --reset-attention-mask --bf16 "
        "--recompute-granularity selective",
        4,
    ),
    training("graphs, hybrid, states passed", f"{_GRAPHS} {_HYBRID} {_STATES} --cp-comm-type a2a --bf16", 2),
    training("graphs, hybrid, heads exchanged", f"{_GRAPHS} {_HYBRID} {_SHARED} --cp-comm-type a2a --bf16", 2),
    training("hybrid, fp8 delayed", f"{_HYBRID} {_PADDED} {_FP8} delayed"),
    training("KDA and attention with Mamba-2, fp8 delayed", f"{_BOTH} {_PADDED_KDA} {_FP8} delayed"),
    training("hybrid, nvfp4 on a B200", f"{_HYBRID} {_PADDED} --bf16 --fp4-format e2m1", gpu="b200"),
    training("KDA and attention with Mamba-2, nvfp4", f"{_BOTH} {_PADDED_KDA} --bf16 --fp4-format e2m1", gpu="b200"),
    training("gated attention", f"{_GROUPED} --attention-output-gate {_TENSOR} --sequence-parallel", 2),
)
_KERNELS = (
    training(
        "query and key weights clipped",
        f"{_CONTEXT} --qk-clip --qk-clip-threshold 0.05 --log-max-attention-logit {_OVERLAPS}",
        2,
    ),
    training(
        "query and key weights clipped, bf16", f"{_GROUPED} --qk-clip --qk-clip-threshold 0.05 --bf16 {_TENSOR}", 2
    ),
    training("user buffers of NCCL", f"{_OVERLAPS} --use-nccl-ub", 2),
    training("user buffers of NCCL, unsharded", "--use-nccl-ub --disable-symmetric-registration", 2),
    prepared("logits in chunks", "small", f"{_CHUNKS} --z-loss-coeff 0.05"),
    prepared("logits in chunks, tensor parallel", "small", f"{_CHUNKS} {_TENSOR} --sequence-parallel --bf16", 2),
    prepared(
        "Triton: logits in chunks, tensor parallel",
        "small-programs,small",
        f"{_SHORT} {_CHUNKS} --z-loss-coeff 0.05 {_TENSOR} --sequence-parallel --bf16",
        2,
        triton=True,
    ),
    training("graphs, logits in chunks", f"{_GRAPHS} {_CHUNKS}"),
    training("nvfp4 on a B200", f"--bf16 --fp4-format e2m1 {_WIDE}", gpu="b200"),
    training(
        "Triton: nvfp4 on a B200",
        f"{_SHORT} --bf16 --fp4-format e2m1 --hidden-size 128 --seq-length 32 --max-position-embeddings 32",
        triton=True,
        gpu="b200",
    ),
    prepared("Triton: small parts, fp8 by rows", "small-programs", f"{_SHORT} {_FP8} rowwise", triton=True),
    prepared(
        "Triton: small parts, experts exchanged",
        "small-programs",
        f"{_SHORT} {_EXPERTS} --num-layers 1 --bf16 --moe-grouped-gemm {_SENT} --global-batch-size 2",
        2,
        triton=True,
    ),
)
SCENARIOS += (
    *_REPLICAS,
    *_GRAPHED,
    *_IN_FP8,
    *_BY_TRITON,
    *_ATTENTION,
    *_MODELS,
    *_MIXED,
    *_KERNELS,
    *_OF_EXPERTS,
    *_UPDATES,
    *_HOST,
    *_FLAGS,
    *_PAIRS,
)
