"""Typical mistakes in a command line and the messages that the parser reports.

``python -m tests.unit.config.mistakes`` freezes the messages in frozen_mistakes.json, from which the documentation's
page of error messages is built.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.config.arguments import resolve_arguments
from megatron.core.errors import ConfigurationError
from tests.unit.config.command_lines import write_data_set

FROZEN = Path(__file__).parent / "frozen_mistakes.json"
RIGHT = (
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --micro-batch-size 4 "
    "--train-iters 1000 --lr 6e-4 --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt "
    "--data-path data/text_document --split 98,1,1"
)


@dataclasses.dataclass(frozen=True)
class Mistake:
    """The flags that are added to the valid command line, the flags removed from it, and the number of processes."""

    added: str
    without: tuple[str, ...] = ()
    processes: int = 1

    def answers(self) -> tuple[str, ...]:
        """Return the lines with which the parser rejects the command line in the current folder."""
        words = [*_leave_out(RIGHT.split(), self.without), *shlex.split(self.added)]
        try:
            resolve_arguments(words, self.processes)
        except ConfigurationError as error:
            return error.problems
        return ()


def _leave_out(words: list[str], flags: tuple[str, ...]) -> Iterator[str]:
    is_left_out = False
    for word in words:
        if word.startswith("--"):
            is_left_out = word in flags
        if not is_left_out:
            yield word


MISTAKES = {
    "Typing errors": (
        Mistake("--hiden-size 1024"),
        Mistake("--train_iters 500"),
        Mistake("--num-layer 24"),
        Mistake("--tensor-parallel-size 2"),
        Mistake("-lr 1e-4"),
        Mistake("--swiglu true"),
        Mistake("--bf16=yes"),
        Mistake("--min-lr"),
        Mistake("--lr-decay-style cosin"),
        Mistake("--normalization rmsnorm"),
        Mistake("--optimizer adamw"),
    ),
    "Units": (
        Mistake("--train-iters 500k"),
        Mistake("--seq-length 2,048"),
        Mistake("--global-batch-size 1e3"),
        Mistake("--lr 6e-4x"),
        Mistake("--lr nan"),
        Mistake("--seed 4294967296"),
        Mistake("--lr-warmup-fraction 5"),
        Mistake("--hidden-dropout 10"),
        Mistake("--lr-warmup-samples 4000"),
        Mistake("--train-samples 500000"),
        Mistake("--step-batch-size-schedule '0:16 2.4G:320'"),
    ),
    "Missing": (
        Mistake("", ("--lr",)),
        Mistake("", ("--train-iters",)),
        Mistake("", ("--seq-length",)),
        Mistake("", ("--num-layers",)),
        Mistake("", ("--merge-file",)),
        Mistake("", ("--data-path", "--split")),
        Mistake("--tokenizer-type HuggingFaceTokenizer"),
        Mistake("--patch-tokenizer-type Qwen2Tokenizer", ("--tokenizer-type", "--vocab-file", "--merge-file")),
        Mistake("--vocab-file gpt2-vocab.json"),
        Mistake("--data-path data/text"),
        Mistake("--data-path data/text_document.bin"),
        Mistake("--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-8B"),
        Mistake("--pretrained-checkpoint checkpoints/345m"),
    ),
    "Sizes that do not divide": (
        Mistake("--num-attention-heads 10"),
        Mistake("--tensor-model-parallel-size 8", processes=8),
        Mistake("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", processes=6),
        Mistake("--pipeline-model-parallel-size 5", processes=5),
        Mistake("--global-batch-size 30", processes=2),
        Mistake("--group-query-attention --num-query-groups 5"),
        Mistake("--tensor-model-parallel-size 2 --sequence-parallel --seq-length 1023", processes=2),
        Mistake("--context-parallel-size 2 --seq-length 1022", processes=2),
        Mistake("--global-batch-size 32 --rampup-batch-size 8 16 1000"),
        Mistake(
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4 --num-layers 12", processes=2
        ),
    ),
    "Flags that do not go together": (
        Mistake("--fp16 --bf16"),
        Mistake("--swiglu --squared-relu"),
        Mistake("--mock-data"),
        Mistake("--seq-length 2048 --max-position-embeddings 1024"),
        Mistake("--recompute-granularity full"),
        Mistake("--cuda-graph-impl local"),
        Mistake("--attention-backend fa3 --bf16"),
        Mistake("--attention-backend fa3 --bf16 --attention-dropout 0 --reset-attention-mask"),
        Mistake("--attention-backend fa4 --bf16 --attention-dropout 0 --reset-attention-mask --deterministic-mode"),
        Mistake("--cuda-graph-impl local --attention-dropout 0 --reset-position-ids"),
        Mistake("--cuda-graph-impl local --attention-dropout 0 --log-max-attention-logit"),
        Mistake("--cuda-graph-impl local --attention-dropout 0 --qk-clip"),
        Mistake("--qk-clip --qk-layernorm"),
        Mistake("--qk-clip --optimizer-cpu-offload"),
        Mistake("--disable-symmetric-registration"),
        Mistake("--enable-cuda-graph --attention-dropout 0 --data-parallel-sharding-strategy optim_grads", processes=2),
        Mistake("--external-cuda-graph"),
        Mistake("--loss-cuda-graph"),
        Mistake("--loss-cuda-graph --enable-cuda-graph --attention-dropout 0 --z-loss-coeff 1e-4"),
        Mistake("--optimizer-cuda-graph --optimizer-cpu-offload --decoupled-lr 1e-4"),
        Mistake("--optimizer-cuda-graph --optimizer lion"),
        Mistake("--overlap-step-results"),
        Mistake("--overlap-step-results --rerun-mode disabled --log-params-norm"),
        Mistake("--overlap-step-results --rerun-mode disabled --empty-unused-memory-level 1"),
        Mistake("--recompute-activations --recompute-method uniform"),
        Mistake("--recompute-modules mlp"),
        Mistake("--cpu-offloading"),
        Mistake("--recompute-activations --distribute-saved-activations --tensor-model-parallel-size 2", processes=2),
        Mistake("--lr-decay-style WSD"),
        Mistake("--min-lr 1e-3"),
        Mistake("--lr-warmup-iters 1000"),
        Mistake("--finetune"),
        Mistake("--keep-last 3"),
        Mistake("--spike-policy rewind"),
        Mistake("--spike-policy skip --no-check-for-nan-in-loss-and-grad"),
        Mistake("--spike-policy skip --spike-window 4"),
        Mistake("--spike-threshold 4"),
        Mistake("--spike-policy redo"),
        Mistake("--iterations-to-skip 7 -2"),
        Mistake("--error-injection-rate 100 --rerun-mode disabled"),
        Mistake("--error-injection-type correct_result"),
        Mistake("--check-gradient-hash-across-dp-replicas-interval 10 --use-distributed-optimizer", processes=2),
        Mistake("--use-rope-scaling"),
        Mistake("--grad-reduce-in-bf16"),
        Mistake("--optimizer-cpu-offload --optimizer-offload-fraction 50"),
        Mistake("--param-group-overrides *.mlp.*:lr=0.5"),
        Mistake("--ema-decay 1"),
        Mistake("--ema-decay 0.99 --save checkpoints --ckpt-format torch"),
        Mistake("--clip-grad-vectors 0.1 --optimizer-cpu-offload"),
        Mistake("--use-mup"),
        Mistake("--use-mup --mup-base-hidden-size 8 --optimizer sgd"),
        Mistake("--mup-output-mult 2"),
        Mistake("--exp-avg-dtype bf16"),
        Mistake("--use-precision-aware-optimizer --main-grads-dtype bf16"),
        Mistake("--use-precision-aware-optimizer --main-params-dtype fp16"),
        Mistake("--use-precision-aware-optimizer --main-params-dtype fp16 --bf16 --optimizer-cpu-offload"),
        Mistake("--use-precision-aware-optimizer --exp-avg-dtype bf16 --optimizer sgd"),
        Mistake("--split 0,50,50"),
        Mistake("--split 1000000,1,1"),
        Mistake("--lora-rank 8 --lora-target-modules q_proj qkv"),
        Mistake("--lora-rank 8 --lora-target-modules linear_qkv k_proj"),
        Mistake("--lora-rank 8 --swiglu --lora-target-modules c_attn"),
        Mistake("--lora-alpha 32"),
        Mistake("--lora-rank 8 --save checkpoints --ckpt-format torch_dist"),
        Mistake("--lora-rank 8 --cuda-graph-impl local --attention-dropout 0"),
        Mistake("--lora-rank 8 --decoupled-lr 1e-3"),
        Mistake("--lora-base-quantization nf4"),
        Mistake("--lora-rank 8 --lora-base-quantization nf4 --ffn-hidden-size 3000"),
        Mistake(
            "--lora-rank 8 --lora-base-quantization nf4 --num-attention-heads 8 --tensor-model-parallel-size 8",
            processes=8,
        ),
        Mistake("--lora-rank 8 --lora-base-quantization nf4 --bf16 --fp8-format hybrid"),
        Mistake(
            "--lora-rank 8 --lora-base-quantization nf4 --cpu-offloading --cpu-offloading-num-layers 1 "
            "--cpu-offloading-weights"
        ),
        Mistake("--lora-rank 8 --no-lora-double-quantization"),
    ),
    "Other trainers": (
        Mistake("--deepspeed_config ds.json"),
        Mistake("--batch-size 8"),
        Mistake("--checkpoint-activations --recompute-granularity selective"),
        Mistake("--epochs 3"),
        Mistake("--train-data corpus.json", ("--data-path",)),
        Mistake("--learning_rate 6e-4"),
        Mistake("--gradient-accumulation-steps 8"),
        Mistake("--n_embd 768"),
        Mistake("--fp8-hybrid"),
        Mistake("--num-experts 8 --moe-router-topk 9"),
        Mistake("--optimizer cpu_adam"),
        Mistake("--optimizer muon --optimizer-cpu-offload"),
        Mistake("--optimizer lion --ckpt-format torch --save checkpoints"),
        Mistake("--train-mode finetune"),
        Mistake("--dataset JSON-SFT"),
        Mistake("--fim-spm-rate 0.3"),
    ),
}


@contextlib.contextmanager
def workplace() -> Iterator[None]:
    """Change to a temporary folder with the files that the valid command line names."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        write_data_set(Path(folder) / "data" / "text_document", lengths=(700,) * 100)
        for name in ("vocab.json", "merges.txt"):
            (Path(folder) / name).write_text("{}")
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def messages() -> dict[str, Any]:
    """Return the valid command line, and the mistakes by section with the messages that the parser reports now."""
    with workplace():
        return {
            "command_line": f"python pretrain_gpt.py {RIGHT}",
            "mistakes": {
                section: [dataclasses.asdict(each) | {"messages": list(each.answers())} for each in mistakes]
                for section, mistakes in MISTAKES.items()
            },
        }


if __name__ == "__main__":
    FROZEN.write_text(json.dumps(messages(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
