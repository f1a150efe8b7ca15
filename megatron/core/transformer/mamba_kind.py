"""Declaration of Mamba-2 layers. Importing this module does not import torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from megatron.core.config_base import NOT_NEGATIVE, POSITIVE, Config, flag
from megatron.core.errors import divisors
from megatron.core.parallel_config import ParallelConfig
from megatron.core.transformer.recurrent_kind import RecurrentHeads, RecurrentKind, check_context, check_sharding

MAMBA = "mamba"


_PATTERN = "hybrid_override_pattern"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MambaConfig(Config, in_args=False):
    """Shapes and variants of Mamba-2."""

    mamba_state_dim: int = flag(128, role="shape", bounds=POSITIVE, needs=_PATTERN)
    """State dimension of Mamba-2."""
    mamba_head_dim: int = flag(64, role="shape", bounds=POSITIVE, needs=_PATTERN)
    """Dimension of a Mamba-2 head."""
    mamba_num_groups: int = flag(8, role="shape", bounds=POSITIVE, needs=_PATTERN)
    """Groups of Mamba-2 heads that share B and C."""
    mamba_num_heads: int | None = flag(None, role="shape", bounds=POSITIVE, needs=_PATTERN)
    """Number of Mamba-2 heads; by default 2 x hidden size / --mamba-head-dim."""
    mamba_conv_kernel_dim: int = flag(4, role="shape", bounds=POSITIVE, needs=_PATTERN)
    """Positions that the convolution of Mamba-2 covers, its own included."""
    mamba_conv_bias: bool = flag(True, negative="--disable-mamba-conv-bias", role="weights", needs=_PATTERN)
    """Add a bias to the convolution of Mamba-2. Off: use a convolution of Mamba-2 without bias."""
    mamba_proj_bias: bool = flag(False, role="weights", needs=_PATTERN)
    """Add biases to the input and output projections of Mamba-2."""
    mamba_dt_lower_limit: float = flag(0.0, role="meaning", bounds=NOT_NEGATIVE, needs=_PATTERN)
    """Clamp the step sizes dt of Mamba-2 to this value or more."""
    mamba_dt_upper_limit: float | None = flag(None, role="meaning", bounds=POSITIVE, needs=_PATTERN)
    """Clamp the step sizes dt of Mamba-2 to this value or less; by default they have no upper limit."""
    mamba_norm: str = flag("after-gate", choices=("after-gate", "before-gate", "none"), role="shape", needs=_PATTERN)
    """Normalize the output of Mamba-2 after its gate, before its gate, or not at all."""
    mamba_multipliers: tuple[float, ...] = flag(
        (1.0,) * 5, nargs="+", metavar="X", role="meaning", bounds=None, needs=_PATTERN
    )
    """Multipliers of the gate z, x, B, C and the step sizes dt of Mamba-2 after the input projection: five numbers."""

    def mamba_heads(self, hidden_size: int) -> int:
        return self.mamba_num_heads or 2 * hidden_size // self.mamba_head_dim


class MambaKind(RecurrentKind[MambaConfig]):
    """Mamba-2: Dao and Gu 2024, https://arxiv.org/abs/2405.21060."""

    name, symbol, title = MAMBA, "M", "Mamba-2"
    layer = "megatron.core.transformer.mamba_mixer:MambaMixer"
    flags = MambaConfig
    # The name in Megatron-LM's layers.
    module_name = "mixer"
    shares_groups = True

    def projection_rows(self, hybrid: MambaConfig, hidden_size: int) -> tuple[int, ...]:
        """Return the rows of the gate z, x, B, C and the step sizes dt."""
        heads = hybrid.mamba_heads(hidden_size)
        inner, states = heads * hybrid.mamba_head_dim, hybrid.mamba_num_groups * hybrid.mamba_state_dim
        return inner, inner, states, states, heads

    def inner_size(self, hybrid: MambaConfig, hidden_size: int) -> int:
        return hybrid.mamba_heads(hidden_size) * hybrid.mamba_head_dim

    def heads(self, hybrid: MambaConfig, hidden_size: int) -> RecurrentHeads:
        return RecurrentHeads("mamba_num_heads", hybrid.mamba_heads(hidden_size), hybrid.mamba_num_groups)

    def recurrence_multiply_adds(self, hybrid: MambaConfig, hidden_size: int) -> float:
        """Return the multiply-adds as Megatron-LM counts them."""
        return 3.5 * self.inner_size(hybrid, hidden_size) * hybrid.mamba_state_dim

    def check_shapes(self, hybrid: MambaConfig, hidden_size: int, layout: ParallelConfig) -> Iterator[str]:
        tensor, context = max(layout.tensor_model_parallel_size, 1), layout.context_parallel_size
        if hybrid.mamba_num_heads is None and 2 * hidden_size % hybrid.mamba_head_dim:
            yield (
                f"twice --hidden-size {hidden_size} is not divisible by --mamba-head-dim "
                f"{hybrid.mamba_head_dim}; change it, or pass --mamba-num-heads"
            )
            return
        heads, groups = hybrid.mamba_heads(hidden_size), hybrid.mamba_num_groups
        if heads % groups:
            yield (
                f"{heads} Mamba-2 heads are not divisible by --mamba-num-groups {groups}; numbers of groups that work: "
                f"{divisors(heads, heads)}"
            )
        elif heads % tensor:
            yield (
                f"{heads} Mamba-2 heads are not divisible by --tensor-model-parallel-size {tensor}; sizes that work: "
                f"{divisors(heads, heads)}"
            )
        elif tensor % groups == 0:
            if groups * hybrid.mamba_state_dim % tensor:
                yield (
                    f"--mamba-num-groups {groups} x --mamba-state-dim {hybrid.mamba_state_dim} is not divisible by "
                    f"--tensor-model-parallel-size {tensor}, whose ranks share a group; use another size"
                )
        else:
            yield from check_sharding("--mamba-num-groups", groups, tensor)
        multipliers = hybrid.mamba_multipliers
        if len(multipliers) != 5 or min(multipliers) <= 0:
            given = " ".join(map(str, multipliers))
            yield f"--mamba-multipliers {given}: five numbers greater than 0 are expected, of z, x, B, C and dt"
        lower, upper = hybrid.mamba_dt_lower_limit, hybrid.mamba_dt_upper_limit
        if upper is not None and lower > upper:
            yield f"--mamba-dt-lower-limit {lower} is above --mamba-dt-upper-limit {upper}; use a smaller lower limit"
        yield from check_context(layout, "--mamba-num-heads", heads, "--mamba-num-groups", groups)
        if groups < tensor and context > 1 and layout.recurrent_cp_comm_type == "a2a":
            yield (
                f"--mamba-num-groups {groups} is below --tensor-model-parallel-size {tensor}, which is not supported "
                f"with --context-parallel-size {context} and --recurrent-cp-comm-type a2a; use "
                f"--recurrent-cp-comm-type all_gather, or at most {groups} tensor-parallel ranks"
            )

    def input_widths(self, hybrid: MambaConfig, hidden_size: int, tensor: int) -> Mapping[str, tuple[int, int]]:
        return {"--mamba-num-heads x --mamba-head-dim": (self.inner_size(hybrid, hidden_size), tensor)}
