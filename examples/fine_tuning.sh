#!/usr/bin/env bash
# Fine-tune a Hugging Face model on conversations, and export it. Variables: MODEL (its folder, with a chat template), TRAIN
# (jsonl, one conversation per line), SAVE, EXPORTED (a new folder for transformers, vLLM, SGLang).
# Written for Qwen2.5-0.5B-Instruct on 2 GPUs of 24 GB. Further flags override these: examples/fine_tuning.sh --train-iters 100
set -euo pipefail

save=${SAVE:-checkpoints/answers}
megatron train --nproc "${NPROC:-2}" \
    --sft --train-data-path "${TRAIN:?jsonl with one conversation per line}" \
    --load "${MODEL:?the folder of a Hugging Face model}" --finetune --use-checkpoint-args \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$MODEL" --padded-vocab-size "${ROWS:-151936}" \
    --tensor-model-parallel-size 2 --sequence-parallel \
    --seq-length 4096 --micro-batch-size 1 --global-batch-size 32 --train-iters 500 \
    --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --lr-warmup-fraction 0.03 --clip-grad 1.0 --bf16 \
    --log-interval 10 --eval-iters 0 --save "$save" --save-interval 100 "$@"
megatron convert --saver hf --load-dir "$save" --save-dir "${EXPORTED:-exported}"
