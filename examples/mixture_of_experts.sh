#!/usr/bin/env bash
# Train a small mixture of experts: 8 experts per layer, 2 per token, sharded over 4 ranks.
# Variables: DATA (an output prefix of tools/preprocess_data.py), VOCAB and MERGES (GPT-2's files), SAVE.
# Written for 8 GPUs of 40 GB. Further flags override these: examples/mixture_of_experts.sh --train-iters 1000
set -euo pipefail

exec megatron train --nproc "${NPROC:-8}" \
    --num-layers 12 --hidden-size 768 --num-attention-heads 12 --max-position-embeddings 1024 \
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
    --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 \
    --moe-token-dispatcher-type alltoall --expert-model-parallel-size 4 \
    --data-path "${DATA:?the prefix of token files}" --split 99,1,0 \
    --tokenizer-type GPT2BPETokenizer --vocab-file "${VOCAB:?vocab.json}" --merge-file "${MERGES:?merges.txt}" \
    --seq-length 1024 --micro-batch-size 8 --global-batch-size 256 --train-iters 50000 \
    --lr 4e-4 --min-lr 4e-5 --lr-decay-style cosine --lr-warmup-iters 1000 \
    --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 --hidden-dropout 0 --attention-dropout 0 \
    --bf16 --use-distributed-optimizer --log-interval 10 --eval-interval 1000 --eval-iters 20 \
    --save "${SAVE:-checkpoints/experts}" --load "${SAVE:-checkpoints/experts}" --save-interval 1000 "$@"
