#!/usr/bin/env bash
# Continue the training of a Hugging Face model with the shape of Qwen2.5 7B on your own text. Variables: MODEL (its
# folder), DATA (an output prefix of tools/preprocess_data.py with its tokenizer), SAVE. The first call starts from the
# weights of MODEL; later calls resume from SAVE.
# Written for 8 GPUs of 80 GB. Further flags override these: examples/qwen2.5_7b.sh --train-iters 1000
set -euo pipefail

save=${SAVE:-checkpoints/qwen2.5-7b}
if [ -e "$save/latest_checkpointed_iteration.txt" ]; then
    start=(--load "$save")
else
    start=(--load "${MODEL:?the folder of a Hugging Face model}" --finetune)
fi

exec megatron train --nproc "${NPROC:-8}" --use-checkpoint-args \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "${MODEL:?the folder of a Hugging Face model}" \
    --padded-vocab-size "${ROWS:-152064}" \
    --tensor-model-parallel-size 2 --sequence-parallel \
    --data-path "${DATA:?the prefix of token files}" --split 99,1,0 \
    --seq-length 4096 --micro-batch-size 1 --global-batch-size 256 --train-iters 10000 \
    --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --lr-warmup-iters 200 \
    --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 \
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
    --log-interval 10 --eval-interval 500 --eval-iters 10 \
    "${start[@]}" --save "$save" --save-interval 500 "$@"
