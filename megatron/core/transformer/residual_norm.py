"""Where a layer reads the residual stream: a branch is added to it, and the sum is normalised or passed on as it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from megatron.core.kernels.dropout import RowKeys, drop_hidden
from megatron.core.kernels.triton_choice import runs_on_triton
from megatron.core.transformer.norm import Norm


def add_branch(x: torch.Tensor, branch: torch.Tensor | None, keys: RowKeys | None, probability: float) -> torch.Tensor:
    """Return the residual stream ``x`` with a branch added, of which dropout by ``keys`` leaves a part.

    Without keys nothing is dropped, without a branch the stream is returned.

    Shapes: ``x, branch: [s, b, h]``, keys ``[s, b]`` ``-> [s, b, h]``.
    """
    if branch is None:
        return x
    return x + branch if keys is None else drop_hidden(branch, keys, probability, x)


@dataclass
class NormAhead:
    """Hand a layer the norm that it begins with, from the end of the layer before, which has a branch to add there.

    ``following`` is with what the next layer reads the stream, and ``normalised`` what came of it; both are None where
    there is no layer behind, or before.
    """

    following: ResidualNorm | ResidualSum | None = None
    normalised: torch.Tensor | None = None


class ResidualSum(nn.Module):
    """Add a branch to the residual stream, which is read without a norm. Called as `ResidualNorm` is."""

    def forward(
        self,
        x: torch.Tensor,
        branch: torch.Tensor | None = None,
        keys: RowKeys | None = None,
        probability: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stream twice."""
        total = add_branch(x, branch, keys, probability)
        return total, total


class ResidualNorm(Norm):
    """Add a branch to the residual stream, and normalise the sum.

    ``sums_branch_grad`` says that branches end with a bias, which wants the sum of their gradient.

    Shapes: ``x, branch: [s, b, h]``, keys ``[s, b]`` ``-> [s, b, h]`` twice.
    """

    sums_branch_grad = False

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        branch: torch.Tensor | None = None,
        keys: RowKeys | None = None,
        probability: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stream, to be read further in place of ``x``, and its norm.

        Triton does all of it in one pass, and in one the gradients of both results.
        """
        tensors = (x, self.weight) if branch is None else (x, self.weight, branch)
        is_alike = all(tensor.dtype == x.dtype for tensor in tensors) and self.kind in ("LayerNorm", "RMSNorm")
        if is_alike and runs_on_triton(*tensors):
            from megatron.core.kernels.triton_programs import residual_norm as programs

            if self.shape[0] <= programs.MAX_WIDTH:
                return programs.add_and_normalise(
                    x,
                    branch,
                    self.weight,
                    self.bias,
                    self.epsilon,
                    subtracts_mean=self.kind == "LayerNorm",
                    weight_offset=1.0 if self.centred_weight else 0.0,
                    keys=keys,
                    probability=probability,
                    sums_branch_grad=self.sums_branch_grad,
                )
        total = add_branch(x, branch, keys, probability)
        return total, self._normalise(total)

    def of_stream(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of the stream that a call has left: the same bits as the call's."""
        normalised: torch.Tensor = self(x)[1]
        return normalised


class StreamOfNorms(ResidualNorm):
    """Add a branch to the residual stream and normalise the sum, which is the stream from here on."""

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        branch: torch.Tensor | None = None,
        keys: RowKeys | None = None,
        probability: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm twice."""
        _, normalised = super().forward(x, branch, keys, probability)
        return normalised, normalised
