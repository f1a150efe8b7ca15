#!/usr/bin/env bash
# Quickstart: install, prepare text, train a small Llama-shaped GPT with tensor parallelism, stop halfway, resume, and
# generate text. Takes a few minutes on two CPU cores; uses GPUs if there are any.
#
# Output folder: quickstart-run/, or RUN. Environment: .venv, or VENV.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${VENV:-.venv}
run=${RUN:-quickstart-run}
iterations=${ITERATIONS:-400}
prompt=${PROMPT:-"Return the number of"}

beating=
quiet() {
    if [ -n "$beating" ]; then
        kill "$beating" 2>/dev/null || true
        wait "$beating" 2>/dev/null || true
        beating=
    fi
}
trap quiet EXIT

# Print the title of a step, then its elapsed time every few seconds, with the size of a folder if one is given.
step() {
    quiet
    printf '\n== %s\n' "$1"
    {
        seconds=0
        # The sleep that is left behind must not keep a pipe open.
        while sleep 10 </dev/null >/dev/null 2>&1; do
            seconds=$((seconds + 10))
            size=
            if [ $# -gt 1 ] && [ -d "$2" ]; then size=", $(du -sm "$2" 2>/dev/null | cut -f 1) MB in $2"; fi
            printf '   ... %d s%s\n' "$seconds" "$size"
        done
    } &
    beating=$!
}

step "1/6 environment: $venv (about 1 GB with a CPU build of torch, several GB with CUDA)" "$venv"
bash requirements/install.sh "$venv" runtime
python="$venv/bin/python"
# One thread per process: two processes on two cores are faster than four threads on two cores.
export OMP_NUM_THREADS=1

gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
case $gpus in
    0) processes=2 tensor=2 backend=gloo where="2 CPU processes" ;;
    1) processes=1 tensor=1 backend=nccl where="1 GPU" ;;
    2 | 3) processes=2 tensor=2 backend=nccl where="2 GPUs" ;;
    *) processes=4 tensor=2 backend=nccl where="4 GPUs" ;;
esac
torchrun() { "$python" -m torch.distributed.run --standalone --nproc_per_node "$processes" "$@"; }

step "2/6 text: the documentation that comes with Python, and a vocabulary for it"
rm -rf "$run"
mkdir -p "$run"
"$python" examples/prepare_quickstart_text.py --output-dir "$run"
tokenizer=(--tokenizer-type GPT2BPETokenizer --vocab-file "$run/vocab.json" --merge-file "$run/merges.txt")

step "3/6 tokens: tools/preprocess_data.py"
"$python" tools/preprocess_data.py --input "$run/quickstart.jsonl" --output-prefix "$run/quickstart" \
    "${tokenizer[@]}" --append-eod --workers 2

# Run the training command. Its whole output goes to training.log, the main columns of the main lines to the terminal.
train() {
    local shown='^ \[.*iteration|loss at iteration|^ > number of parameters|successfully|^ sample at'
    local left_out='consumed samples|elapsed time per iteration|global batch size|loss scale|number of [a-z]+ iterations'
    torchrun pretrain_gpt.py \
        --tensor-model-parallel-size "$tensor" --distributed-backend "$backend" \
        --num-layers 4 --hidden-size 128 --ffn-hidden-size 344 --num-attention-heads 4 \
        --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
        --seq-length 128 --max-position-embeddings 128 --init-method-std 0.05 \
        --data-path "$run/quickstart_text_document" --split 90,5,5 "${tokenizer[@]}" \
        --micro-batch-size $((16 * tensor / processes)) --global-batch-size 16 --train-iters "$iterations" \
        --lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 --adam-beta2 0.95 \
        --weight-decay 0.1 --clip-grad 1.0 --hidden-dropout 0 --attention-dropout 0 \
        --log-interval 50 --eval-interval 100 --eval-iters 5 \
        --generate-interval 100 --generate-prompts "$prompt" --sample-tokens 24 \
        --save "$run/checkpoint" --load "$run/checkpoint" --save-interval 100 \
        "$@" 2>&1 | tee -a "$run/training.log" | grep --line-buffered -E "$shown" |
        sed -u -E "s/^ \\[[^]]*\\]//; s/ ($left_out)[^|]*\\|//g" || {
        echo "training failed; the end of $run/training.log:" >&2
        tail -n 40 "$run/training.log" >&2
        exit 1
    }
}

half=$((iterations / 2))
step "4/6 training on $where, tensor parallel size $tensor; stops at iteration $half of $iterations"
train --exit-interval "$half"

step "5/6 the same command again: resumes at iteration $half, ends at iteration $iterations"
train

step "6/6 generation from the checkpoint"
torchrun tools/text_generation_cli.py --load "$run/checkpoint" --prompt "$prompt" \
    --tokens-to-generate 60 --temperature 0.8 --top-k 40

quiet
printf '\n== done\n'
"$python" - "$run/checkpoint/metrics.jsonl" <<'PYTHON'
import json
import sys

with open(sys.argv[1], encoding="utf-8") as file:
    lines = [json.loads(line) for line in file]
training = [line for line in lines if "split" not in line]
validation = [line for line in lines if line.get("split") == "validation"]
first, last = training[0], training[-1]
loss = sum(line["lm_loss"] for line in training[-20:]) / len(training[-20:])
print(f"training loss:   {first['lm_loss']:.3f} at iteration {first['iteration']}"
      f" -> {loss:.3f}, the mean up to iteration {last['iteration']}")
print(f"validation loss: {validation[0]['lm_loss']:.3f} at iteration {validation[0]['iteration']}"
      f" -> {validation[-1]['lm_loss']:.3f} at iteration {validation[-1]['iteration']}")
if not loss < first["lm_loss"] - 1.0:
    sys.exit("the loss did not fall: something is wrong with this run")
PYTHON
"$python" -m megatron plot "$run/checkpoint" --output "$run/quickstart.html"
echo "curves and generated samples: $run/quickstart.html"
echo "text, data, checkpoints, metrics and the log: $run/"
