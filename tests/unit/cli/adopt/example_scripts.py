"""Launch scripts in the style of those that users of other trainers have."""

from __future__ import annotations

# Pai-Megatron-Patch: everything by position, flags gathered in strings, the command in a string that is evaluated.
PAI = r"""#!/bin/bash
set -e
ENV=$1
HERE="$( cd "$( dirname "$0" )" && pwd )"
ROOT=$( dirname $( dirname ${HERE}))
export PYTHONPATH=${ROOT}:$PYTHONPATH
if [ -z ${DATASET_KIND} ];then
    DATASET_KIND="idxmap"
fi
if [ $ENV = dsw ]; then
    MASTER_PORT=$(shuf -n 1 -i 10000-65535)
    NNODES=1
    NODE_RANK=0
    GPUS=8
elif [ $ENV = dlc ]; then
    NNODES=${WORLD_SIZE}
    NODE_RANK=${RANK}
    GPUS=${GPUS_OF_CONTAINER}
fi
if [ -z ${VP} ]; then
    vp_options=""
else
    vp_options=" \
        --num-layers-per-virtual-pipeline-stage ${VP}"
fi
LAUNCH="--nproc_per_node $GPUS --nnodes $NNODES --node_rank $NODE_RANK --master_port $MASTER_PORT"
SIZE=$2
BATCH=$3
GLOBAL=$4
TP=$5
SP=$6
AC=$7
LOAD=$8
TOKENS=$9
OUT=${10}
if [ $SIZE = 0.5B ]; then
NUM_LAYERS=24
HIDDEN=896
HEADS=14
FFN=4864
gqa_options=" \
                    --group-query-attention \
                    --num-query-groups 2"
tie_option=""
elif [ $SIZE = 7B ]; then
NUM_LAYERS=28
HIDDEN=3584
HEADS=28
FFN=18944
gqa_options=" \
                    --group-query-attention \
                    --num-query-groups 4"
tie_option=" \
        --untie-embeddings-and-output-weights \
        "
fi
OVERLAP=$(( ($TP > 1) ? 1 : 0 ))
comm_option="\
    --overlap-grad-reduce \
    --overlap-param-gather"
if [ $OVERLAP -eq 1 ]; then
    comm_option="\
        --tp-comm-overlap \
        $comm_option"
fi
if [ $AC = full ]; then
    _check=$(( ($NUM_LAYERS / $TP) % 1 ))
    if [ $_check != 0 ]; then
        echo "the layers must be a multiple"
        exit -1
    fi
    ac_options=" \
                    --recompute-method uniform \
            --recompute-num-layers 1 \
                    --recompute-granularity full"
elif [ $AC = none ]; then
    ac_options=" \
    "
fi
if [ $SP = true ] && [ $TP -gt 1 ]; then
    sp_options=" \
                    --sequence-parallel"
fi
if [ $LOAD != none ]; then
    load_options=" \
            --load $LOAD"
fi
TRAIN_ITERS=$(( ${TOKENS} / ${GLOBAL} / 4096 ))
NAME="run-${SIZE}-tp-${TP}"
mkdir -p "${OUT}/tensorboard/"
current_time=$(date "+%Y.%m.%d-%H.%M.%S")
megatron_options="  \
        --save ${OUT}/checkpoint/${NAME} \
        --lr 1e-5 \
        --min-lr 1e-6 \
        --lr-decay-style cosine \
        --train-iters ${TRAIN_ITERS} \
        --micro-batch-size ${BATCH} \
        --global-batch-size ${GLOBAL} \
        --num-layers ${NUM_LAYERS} \
        --hidden-size ${HIDDEN} \
        --num-attention-heads ${HEADS} \
        --ffn-hidden-size ${FFN} \
        --seq-length 4096 \
        --max-position-embeddings 32768 \
        --max-padding-length 4096 \
        --eval-iters 10 \
        --tensorboard-dir ${OUT}/tensorboard/${NAME}_${current_time} \
        --tensor-model-parallel-size ${TP} \
        --extra-vocab-size 293 \
        --patch-tokenizer-type Qwen2Tokenizer \
        --dataset MMAP \
        --data-path ${OUT}/data_text_document --split 99,1,0 \
        --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --add-qkv-bias \
        --train-mode pretrain \
        "
run_cmd="torchrun $LAUNCH ../qwen2/pretrain_qwen.py
 ${megatron_options} ${load_options} ${ac_options} \
 ${sp_options} ${gqa_options} ${comm_option} ${tie_option} ${vp_options} --bf16"

echo ${run_cmd}
eval ${run_cmd}
set +x
"""

# Megatron-LM: arrays.
MEGATRON = r"""#!/bin/bash
# Runs a small model
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=${NUM_NODES:-2}
CHECKPOINT_PATH=$1 #<Specify path>
LOGS=$2
DATA_PATH=${3:-data/corpus_text_document}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr localhost
)
MODEL_ARGS=(
    --use-mcore-models
    --num-layers 4
    --hidden-size 64 # the width
    --num-attention-heads 4
    --seq-length 128
    --max-position-embeddings 128
    --attention-backend auto # Can use (flash/fused/unfused/local)
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size $((WORLD_SIZE * 2))
    --train-iters 500
    --bf16
    --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine
    --wandb-project ${PROJECT:-demo}
    --profile --profile-step-start 4
)
DATA_ARGS=(
    --data-path $DATA_PATH
    --mock-data
    --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt
    --split "'99,1,0'"
)
if [ -n "$DATA_PATH" ] && [ "$DATA_PATH" != mock ]; then
    DATA_ARGS=( "${DATA_ARGS[@]:0:2}" "${DATA_ARGS[@]:3}" )
fi
torchrun ${DISTRIBUTED_ARGS[@]} examples/classes/pretrain_gpt.py \
    ${MODEL_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    ${DATA_ARGS[@]} \
    --save $CHECKPOINT_PATH --tensorboard-dir "$LOGS/tensorboard"
"""

# DeepSpeed-Megatron: its own launcher and flags of several ages.
DEEPSPEED = r"""#!/bin/bash
ZERO_STAGE=1
CONFIG=./ds_config.json
cat <<EOT > $CONFIG
{ "train_batch_size": 8, "zero_optimization": { "stage": $ZERO_STAGE } }
EOT
ds_args=""
ds_args=" --deepspeed ${ds_args}"
ds_args=" --deepspeed_config=$CONFIG ${ds_args}"
ds_args=" --zero-stage=$ZERO_STAGE ${ds_args}"
deepspeed --num_gpus 4 --master_port 29500 pretrain_gpt2.py \
    --model-parallel-size 2 \
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 \
    --batch-size 4 --train-iters 100 --lr 1e-4 --warmup .01 --lr-decay-style cosine \
    --data-path corpus_text_document --data-impl mmap --vocab-file vocab.json --merge-file merges.txt \
    --split 949,50,1 --normalization rmsnorm --num-key-value-heads 2 --checkpoint-activations --fp16 $ds_args
"""

# Two steps in one script: tokens, then training by torch.distributed.launch.
TWO_STEPS = r"""
set -e
for part in a b; do
    python tools/preprocess_data.py --input $part.jsonl --output-prefix $part --vocab-size 100 \
        --tokenizer-type NullTokenizer --append-eod
done
python -m torch.distributed.launch --nproc_per_node 2 --use_env pretrain_gpt.py --num-layers 2 --hidden-size 8 \
    --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 --micro-batch-size 1 --train-iters 3 --lr 1e-3 \
    --mock-data --tokenizer-type NullTokenizer --vocab-size 100
"""

TORCHTITAN = """
[job]
dump_folder = "./outputs"
description = "an example"
[metrics]
log_freq = 5
enable_tensorboard = true
save_tb_folder = "tb"
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/Llama-3.1-8B"
[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8
[lr_scheduler]
warmup_steps = 200
decay_ratio = 0.2
min_lr_factor = 0.1
[training]
local_batch_size = 2
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = 4
tensor_parallel_degree = 2
pipeline_parallel_degree = 1
[checkpoint]
enable = true
folder = "checkpoint"
interval = 500
[activation_checkpoint]
mode = "full"
[something]
else = 3
"""

NANOTRON = """
checkpoints:
  checkpoint_interval: 10
  checkpoints_path: checkpoints
  resume_checkpoint_path: null
data_stages:
- data:
    dataset:
      hf_dataset_or_datasets: openwebtext
      hf_dataset_splits: train
    num_loading_workers: 1
    seed: 42
  name: Training
  start_training_step: 1
general:
  project: debug
  run: tiny
  seed: 42
model:
  dtype: bfloat16
  init_method:
    std: 0.025
  make_vocab_size_divisible_by: 1
  model_config:
    hidden_act: silu
    hidden_size: 64
    intermediate_size: 256
    is_llama_config: true
    max_position_embeddings: 256
    num_attention_heads: 4
    num_hidden_layers: 2
    num_key_value_heads: 2
    rms_norm_eps: 1.0e-05
    rope_theta: 10000.0
    rope_scaling: null
    tie_word_embeddings: true
    vocab_size: 256
optimizer:
  accumulate_grad_in_fp32: true
  clip_grad: 1.0
  learning_rate_scheduler:
    learning_rate: 0.0003
    lr_decay_steps: 13
    lr_decay_style: cosine
    lr_warmup_steps: 2
    lr_warmup_style: linear
    min_decay_lr: 1.0e-05
  optimizer_factory:
    adam_beta1: 0.9
    adam_beta2: 0.95
    adam_eps: 1.0e-08
    name: adamW
  weight_decay: 0.01
  zero_stage: 1
parallelism:
  dp: 2
  expert_parallel_size: 1
  pp: 1
  pp_engine: 1f1b
  tp: 2
  tp_mode: REDUCE_SCATTER
tokenizer:
  tokenizer_name_or_path: gpt2
tokens:
  batch_accumulation_per_replica: 3
  limit_val_batches: 4
  micro_batch_size: 2
  sequence_length: 256
  train_steps: 15
  val_check_interval: -1
"""

OLMO_CORE = """{
  "run_name": "example",
  "model": {
    "_CLASS_": "olmo_core.nn.transformer.config.DecoderConfig",
    "d_model": 64, "vocab_size": 100352, "n_layers": 4,
    "block": {
      "_CLASS_": "olmo_core.nn.transformer.config.TransformerBlockConfig",
      "name": "reordered_norm",
      "attention": {"name": "default", "n_heads": 4, "n_kv_heads": null, "bias": false,
        "rope": {"name": "default", "theta": 500000}, "qk_norm": {"name": "rms", "eps": 1e-06}},
      "feed_forward": {"hidden_size": 192, "bias": false},
      "layer_norm": {"name": "rms", "eps": 1e-06, "bias": false}
    }
  },
  "dataset": {"paths": ["a.npy"], "sequence_length": 1024, "tokenizer": {"identifier": "dolma2", "vocab_size": 100278}},
  "data_loader": {"global_batch_size": 65536, "seed": 34521, "num_workers": 4},
  "train_module": {
    "rank_microbatch_size": 4096, "max_sequence_length": 1024, "max_grad_norm": 1.0, "z_loss_multiplier": null,
    "optim": {"_CLASS_": "olmo_core.optim.AdamWConfig", "lr": 0.001, "betas": [0.9, 0.95], "eps": 1e-08,
      "weight_decay": 0.1},
    "scheduler": {"_CLASS_": "olmo_core.optim.CosWithWarmup", "warmup_steps": 100},
    "dp_config": {"name": "hsdp", "param_dtype": "bfloat16", "reduce_dtype": "float32"}
  },
  "trainer": {"save_folder": "runs/example", "metrics_collect_interval": 5,
    "max_duration": {"value": 655360000, "unit": "tokens"},
    "callbacks": {"checkpointer": {"save_interval": 1000, "ephemeral_save_interval": 100}}},
  "init_seed": 12536
}
"""
