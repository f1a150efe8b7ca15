"""Tensor-parallel ranks share few tokens, also fewer than there are ranks, and compute one process's logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron.core.collectives import all_gather_last_dim
from tests.harness.distributed import run_distributed
from tests.harness.toy_model import load_global_weights, make_model, tensor_parallel_group

VOCABULARY = 53


def logits_of(dispatcher: str, shape: tuple[int, int]) -> np.ndarray:
    tp = tensor_parallel_group()
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 8, "moe_token_dispatcher_type": dispatcher}
    model = make_model(tp, params_dtype="float64", **experts).eval()
    load_global_weights(model)
    tokens = torch.arange(shape[0] * shape[1]).view(shape)
    positions = torch.arange(shape[1]).expand(shape)
    with torch.no_grad():
        return all_gather_last_dim(model(tokens, positions), tp)[..., :VOCABULARY].numpy().copy()


@pytest.mark.parametrize("shape", [(3, 5), (1, 1)])
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_logits_of_few_tokens_are_those_of_one_process(dispatcher: str, shape: tuple[int, int]) -> None:
    whole = logits_of(dispatcher, shape)
    for rank in run_distributed(2, logits_of, dispatcher, shape):
        np.testing.assert_allclose(rank, whole, rtol=0, atol=1e-13)
