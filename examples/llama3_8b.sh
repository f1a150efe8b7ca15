#!/usr/bin/env bash
# Pretrain a model with the shape of Llama 3.1 8B. Variables: DATA (an output prefix of tools/preprocess_data.py with the
# same tokenizer), TOKENIZER (a Hugging Face folder with the model's tokenizer), SAVE.
# Written for 8 GPUs of 80 GB. Further flags override these: examples/llama3_8b.sh --train-iters 1000
set -euo pipefail

exec megatron train --nproc "${NPROC:-8}" --model-preset llama3.1-8b \
    --tensor-model-parallel-size 2 --sequence-parallel \
    --data-path "${DATA:?the prefix of token files}" --split 99,1,0 \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "${TOKENIZER:?a folder with the tokenizer}" \
    --seq-length 8192 --micro-batch-size 1 --global-batch-size 128 --train-iters 100000 \
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000 \
    --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 \
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
    --log-interval 10 --eval-interval 1000 --eval-iters 10 \
    --save "${SAVE:-checkpoints/llama3-8b}" --load "${SAVE:-checkpoints/llama3-8b}" --save-interval 500 "$@"
