"""Declaration of Mamba-2 layers. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from megatron.core.errors import divisors
from megatron.core.transformer.recurrent_kind import RecurrentHeads, RecurrentKind, check_context, check_sharding

if TYPE_CHECKING:
    from megatron.core.transformer.decoder_config import DecoderConfig
    from megatron.core.transformer.hybrid_config import HybridConfig
    from megatron.core.transformer.recurrent_mixer import RecurrentMixer

MAMBA = "mamba"


class MambaKind(RecurrentKind):
    """Mamba-2: Dao and Gu 2024, https://arxiv.org/abs/2405.21060."""

    name, symbol, title = MAMBA, "M", "Mamba-2"
    prefix = "mamba_"
    # The name in Megatron-LM's layers.
    module_name = "mixer"
    shares_groups = True

    def layer_class(self) -> type[RecurrentMixer]:
        from megatron.core.transformer.mamba_mixer import MambaMixer

        return MambaMixer

    def projection_rows(self, hybrid: HybridConfig, hidden_size: int) -> tuple[int, ...]:
        """Return the rows of the gate z, x, B, C and the step sizes dt."""
        heads = hybrid.mamba_heads(hidden_size)
        inner, states = heads * hybrid.mamba_head_dim, hybrid.mamba_num_groups * hybrid.mamba_state_dim
        return inner, inner, states, states, heads

    def inner_size(self, hybrid: HybridConfig, hidden_size: int) -> int:
        return hybrid.mamba_heads(hidden_size) * hybrid.mamba_head_dim

    def heads(self, hybrid: HybridConfig, hidden_size: int) -> RecurrentHeads:
        return RecurrentHeads("mamba_num_heads", hybrid.mamba_heads(hidden_size), hybrid.mamba_num_groups)

    def recurrence_multiply_adds(self, hybrid: HybridConfig, hidden_size: int) -> float:
        """Return the multiply-adds as Megatron-LM counts them."""
        return 3.5 * self.inner_size(hybrid, hidden_size) * hybrid.mamba_state_dim

    def check_shapes(self, model: DecoderConfig) -> Iterator[str]:
        hybrid, tensor = model.hybrid, max(model.tensor_model_parallel_size, 1)
        if hybrid.mamba_num_heads is None and 2 * model.hidden_size % hybrid.mamba_head_dim:
            yield (
                f"twice --hidden-size {model.hidden_size} is not divisible by --mamba-head-dim "
                f"{hybrid.mamba_head_dim}; change it, or pass --mamba-num-heads"
            )
            return
        heads, groups = hybrid.mamba_heads(model.hidden_size), hybrid.mamba_num_groups
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
        yield from check_context(model, "--mamba-num-heads", heads, "--mamba-num-groups", groups)
        if groups < tensor and model.context_parallel_size > 1 and model.recurrent_cp_comm_type == "a2a":
            yield (
                f"--mamba-num-groups {groups} is below --tensor-model-parallel-size {tensor}, which is not supported "
                f"with --context-parallel-size {model.context_parallel_size} and --recurrent-cp-comm-type a2a; use "
                f"--recurrent-cp-comm-type all_gather, or at most {groups} tensor-parallel ranks"
            )

    def input_widths(self, model: DecoderConfig) -> Mapping[str, tuple[int, int]]:
        inner = self.inner_size(model.hybrid, model.hidden_size)
        return {"--mamba-num-heads x --mamba-head-dim": (inner, max(model.tensor_model_parallel_size, 1))}
