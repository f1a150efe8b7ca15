"""Command lines that the tests of this folder plan."""

from __future__ import annotations

_SMALL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 48 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--num-virtual-stages-per-pipeline-rank 2 --bf16 --tokenizer-type NullTokenizer --vocab-size 1000 "
    "--train-iters 20 --lr 1e-4 --use-distributed-optimizer --mock-data --sequence-parallel"
)
# Attention dropout would run context parallelism without a fused kernel: eighty blocks of scores in each layer's trace.
_LARGE = (
    "--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --ffn-hidden-size 28672 "
    "--group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --attention-dropout 0 "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights "
    "--seq-length 32768 --micro-batch-size 1 --global-batch-size 128 --bf16 --tensor-model-parallel-size "
    "8 --pipeline-model-parallel-size 4 --sequence-parallel --tokenizer-type NullTokenizer --vocab-size "
    "128255 --train-iters 10 --lr 1e-4 --mock-data"
)

SMALL = _SMALL.split()
LARGE = _LARGE.split()
