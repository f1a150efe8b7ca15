#!/usr/bin/env bash
# Train GPT-2 345M from scratch. Variables: DATA (an output prefix of tools/preprocess_data.py), VOCAB and MERGES (GPT-2's
# files), SAVE.
# Written for 8 GPUs of 40 GB. Further flags override these: examples/gpt2_345m.sh --train-iters 1000
set -euo pipefail

exec megatron train --nproc "${NPROC:-8}" --model-preset gpt2-345m \
    --data-path "${DATA:?the prefix of token files}" --split 99,1,0 \
    --tokenizer-type GPT2BPETokenizer --vocab-file "${VOCAB:?vocab.json}" --merge-file "${MERGES:?merges.txt}" \
    --seq-length 1024 --micro-batch-size 8 --global-batch-size 512 --train-iters 100000 \
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000 \
    --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 --hidden-dropout 0 --attention-dropout 0 \
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
    --log-interval 10 --eval-interval 1000 --eval-iters 20 \
    --save "${SAVE:-checkpoints/gpt2-345m}" --load "${SAVE:-checkpoints/gpt2-345m}" --save-interval 1000 "$@"
