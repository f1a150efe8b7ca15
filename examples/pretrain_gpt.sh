#!/usr/bin/env bash
# Pretrain GPT-2 345M in one process. The variables and most flags are those of Megatron-LM's script of this name.
# Variables: DATA_PATH (an output prefix of tools/preprocess_data.py), CHECKPOINT_PATH, VOCAB_FILE and MERGE_FILE
# (GPT-2's files, by default in the current folder).
# Further flags override these: examples/pretrain_gpt.sh --train-iters 1000
set -euo pipefail

exec python "$(dirname "$0")/../pretrain_gpt.py" \
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 \
    --micro-batch-size 4 --global-batch-size 8 --train-iters 500000 \
    --lr 0.00015 --min-lr 1.0e-5 --lr-decay-style cosine --lr-decay-iters 320000 --lr-warmup-fraction .01 \
    --weight-decay 1e-2 --clip-grad 1.0 --fp16 \
    --data-path "${DATA_PATH:?the prefix of token files}" --split 949,50,1 \
    --vocab-file "${VOCAB_FILE:-gpt2-vocab.json}" --merge-file "${MERGE_FILE:-gpt2-merges.txt}" \
    --save "${CHECKPOINT_PATH:?a folder for checkpoints}" --load "$CHECKPOINT_PATH" --save-interval 10000 \
    --log-interval 100 --eval-interval 1000 --eval-iters 10 "$@"
