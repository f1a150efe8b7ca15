"""TransformerConfig: megatron-core's settings of a stack of transformer layers, with its field names and defaults."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F

from megatron.core.device import current_device
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.transformer.decoder_config import INDEPENDENT_SCORES
from megatron.core.transformer.enums import AttnBackend
from megatron.core.utils import init_method_normal, scaled_init_method_normal

_RECOMPUTABLE = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj")


@dataclass
class TransformerConfig(ModelParallelConfig):
    """Settings that megatron-core's MLP and MoE layers and schedules take, in addition to `ModelParallelConfig`.

    The layers reject fields that change their results and are unsupported, such as ``fp8``. Fields that they do not
    read, such as those of attention, are for layers of the caller's own. Fields that only choose between kernels, or
    save memory, have no effect.

    Raises:
        ValueError: fields contradict each other.
        AssertionError: fields of experts contradict each other.
        ConfigurationError: ``hybrid_context_parallel`` is set.
    """

    num_layers: int = 0
    mtp_num_layers: int | None = None
    mtp_loss_scaling_factor: float | None = 0.1
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    pipeline_model_parallel_layout: str | list[Any] | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    hidden_size: int = 0
    num_attention_heads: int = 0
    attention_backend: AttnBackend = AttnBackend.auto
    softmax_scale: float | None = None
    softmax_type: str = "vanilla"
    num_query_groups: int | None = None
    ffn_hidden_size: int | None = None
    kv_channels: int | None = None
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    fp32_residual_connection: bool = False
    apply_residual_connection_post_layernorm: bool = False
    layernorm_epsilon: float = 1e-05
    layernorm_zero_centered_gamma: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    gated_linear_unit: bool = False
    activation_func: Callable[..., Any] = F.gelu
    activation_func_fp8_input_store: bool = False
    glu_linear_offset: float = 0.0
    activation_func_clamp_value: float | None = None
    num_moe_experts: int | None = None
    rotary_interleaved: bool = False
    window_size: tuple[int, int] | None = None
    window_attn_skip_freq: int | list[int] | None = None
    normalization: str = "LayerNorm"
    qk_layernorm: bool = False
    qk_l2_norm: bool = False
    qk_clip: bool = False
    qk_clip_alpha: float = 0.5
    qk_clip_threshold: float = 100
    log_max_attention_logit: bool = False
    attention_output_gate: bool = False
    test_mode: bool = False
    calculate_per_token_loss: bool = False
    multi_latent_attention: bool = False
    no_rope_freq: int | list[int] | None = None
    experimental_attention_variant: str | None = None
    dsa_indexer_n_heads: int | None = None
    dsa_indexer_head_dim: int | None = None
    dsa_indexer_topk: int | None = None
    dsa_indexer_loss_coeff: float | None = None
    dsa_indexer_use_sparse_loss: bool = False
    linear_attention_freq: int | list[int] | None = None
    linear_conv_kernel_dim: int | None = 4
    linear_key_head_dim: int | None = 128
    linear_value_head_dim: int | None = 128
    linear_num_key_heads: int | None = 16
    linear_num_value_heads: int | None = 32
    init_method: Callable[..., Any] | None = None
    output_layer_init_method: Callable[..., Any] | None = None
    init_method_std: float = 0.02
    embedding_init_method: Callable[..., Any] | None = None
    embedding_init_method_std: float | None = None
    init_model_with_meta_device: bool = False
    apply_query_key_layer_scaling: bool = False
    attention_softmax_in_fp32: bool = True
    disable_bf16_reduced_precision_matmul: bool = False
    bias_activation_fusion: bool = False
    masked_softmax_fusion: bool = False
    persist_layer_norm: bool = False
    memory_efficient_layer_norm: bool = False
    bias_dropout_fusion: bool = False
    apply_rope_fusion: bool = False
    use_fused_weighted_squared_relu: bool = False
    fused_single_qkv_rope: bool = False
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    distribute_saved_activations: bool | None = False
    recompute_modules: list[str] | None = None
    fp8: str | None = None
    fp8_recipe: str | None = "delayed"
    fp8_param: bool = False
    fp8_quantizer_factory: str | None = None
    fp8_margin: int = 0
    fp8_interval: int = 1
    fp8_amax_history_len: int = 1
    fp8_amax_compute_algo: str = "most_recent"
    fp8_wgrad: bool = True
    fp8_dot_product_attention: bool = False
    fp8_multi_head_attention: bool = False
    tp_only_amax_red: bool = False
    first_last_layers_bf16: bool = False
    num_layers_at_start_in_bf16: int = 1
    num_layers_at_end_in_bf16: int = 1
    use_kitchen: bool = False
    use_kitchen_attention: bool = False
    kitchen_attention_backend: str = "sdpa"
    fp4: str | None = None
    fp4_recipe: str | None = "nvfp4"
    fp4_param: bool = False
    fp4_quantizer_factory: str | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_shared_expert_overlap: bool = False
    moe_layer_freq: int | list[int] = 1
    moe_ffn_hidden_size: int | None = None
    moe_router_load_balancing_type: str | list[str] = "aux_loss"
    moe_router_topk: int = 2
    moe_enable_routing_replay: bool = False
    moe_router_topk_limited_devices: int | None = None
    moe_router_padding_for_quantization: bool | None = False
    moe_router_padding_for_fp8: bool | None = False
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_pre_softmax: bool = False
    moe_router_topk_scaling_factor: float | None = None
    moe_router_score_function: str = "softmax"
    moe_router_dtype: str | None = None
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: float = 0.001
    moe_router_force_load_balancing: bool = False
    moe_grouped_gemm: bool = False
    moe_use_legacy_grouped_gemm: bool = False
    moe_aux_loss_coeff: float | list[float] = 0.0
    moe_z_loss_coeff: float | None = None
    moe_input_jitter_eps: float | None = None
    moe_token_dropping: bool = False
    moe_token_dispatcher_type: str = "allgather"
    moe_enable_deepep: bool = False
    moe_flex_dispatcher_backend: str = "deepep"
    moe_per_layer_logging: bool = False
    moe_expert_capacity_factor: float | None = None
    moe_pad_expert_input_to_capacity: bool = False
    moe_token_drop_policy: str = "probs"
    moe_layer_recompute: bool = False
    moe_permute_fusion: bool = False
    moe_router_fusion: bool = False
    moe_apply_probs_on_input: bool = False
    moe_latent_size: int | None = None
    moe_deepep_num_sms: int = 20
    moe_hybridep_num_sms: int = 16
    cp_comm_type: str | list[str] | None = None
    enable_cuda_graph: bool = False
    cuda_graph_use_single_mempool: bool = False
    cuda_graph_retain_backward_graph: bool = False
    cuda_graph_warmup_steps: int = 3
    external_cuda_graph: bool = False
    cuda_graph_impl: str = "none"
    cuda_graph_scope: str | list[str] = "full"
    clone_scatter_output_in_embedding: bool = True
    disable_parameter_transpose_cache: bool = False
    config_logger_dir: str = ""
    flash_decode: bool = False
    batch_invariant_mode: bool = False
    use_te_activation_func: bool = False
    inference_rng_tracker: bool = False
    inference_sampling_seed: int = 42
    symmetric_ar_type: str | None = None
    use_inference_optimized_layers: bool = False
    inference_fuse_tp_communication: bool = False
    mrope_section: list[int] | None = None
    is_hybrid_model: bool = False
    mamba_state_dim: int = 128
    mamba_head_dim: int = 64
    mamba_num_groups: int = 8
    mamba_num_heads: int | None = None
    use_mamba_mem_eff_path: bool = True
    mlp_chunks_for_prefill: int = 1
    heterogeneous_block_specs: bool = False
    hetereogenous_dist_checkpoint: bool = False
    quant_recipe: Any = None
    transformer_impl: str = "transformer_engine"
    fine_grained_activation_offloading: bool = False
    offload_modules: list[str] | None = field(default_factory=list)
    min_offloaded_tensor_size: int = 1048576

    def __post_init__(self) -> None:
        """Set the fields that follow from others, and check combinations."""
        super().__post_init__()
        if self.fp16 and self.bf16:
            raise ValueError(f"Only one of self.fp16: {self.fp16} and self.bf16 {self.bf16} should be True.")
        if self.bf16 and self.disable_bf16_reduced_precision_matmul:
            current_device().keep_float32_sums()
        tp = self.tensor_model_parallel_size
        if self.num_attention_heads % tp:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of tensor_model_parallel_size "
                f"({tp})."
            )
        if self.ffn_hidden_size is None:
            self.ffn_hidden_size = 4 * self.hidden_size
        if self.kv_channels is None:
            self.kv_channels = self.hidden_size // self.num_attention_heads
        if self.num_query_groups is None:
            self.num_query_groups = self.num_attention_heads
        if self.num_query_groups % tp and tp % self.num_query_groups:
            raise ValueError(
                f"num_query_groups ({self.num_query_groups}) must be a multiple or divisor of "
                f"tensor_model_parallel_size ({tp})."
            )
        if self.apply_query_key_layer_scaling:
            self.attention_softmax_in_fp32 = True
        if isinstance(self.cuda_graph_scope, str):
            self.cuda_graph_scope = [] if self.cuda_graph_scope == "full" else self.cuda_graph_scope.split(",")
        self._check_experts()
        self._check_memory_saving()
        self._check_pipeline_split()
        self._set_init_methods()

    def _set_init_methods(self) -> None:
        if self.embedding_init_method_std is None:
            self.embedding_init_method_std = self.init_method_std
        if self.embedding_init_method is None:
            if self.init_method is None or self.embedding_init_method_std != self.init_method_std:
                self.embedding_init_method = init_method_normal(self.embedding_init_method_std)
            else:
                self.embedding_init_method = self.init_method
        if self.init_method is None:
            self.init_method = init_method_normal(self.init_method_std)
        if self.output_layer_init_method is None:
            self.output_layer_init_method = scaled_init_method_normal(
                self.init_method_std, self.num_layers, multiplier=1.0 if self.is_hybrid_model else 2.0
            )

    def _check_experts(self) -> None:
        if self.num_moe_experts is None:
            if self.expert_model_parallel_size > 1:
                raise ValueError("num_moe_experts must be non None to use expert-parallel.")
            assert self.moe_ffn_hidden_size is None, "moe_ffn_hidden_size must be None when num_experts is not set."
        else:
            if self.num_moe_experts <= 0:
                raise ValueError(f"num_moe_experts ({self.num_moe_experts}) must be positive.")
            if self.moe_ffn_hidden_size is None:
                self.moe_ffn_hidden_size = self.ffn_hidden_size
                warnings.warn("moe_ffn_hidden_size is not set, using ffn_hidden_size instead.", stacklevel=4)
            if self.add_bias_linear:
                assert self.expert_tensor_parallel_size == 1, "Bias in Moe is only supported when ETP==1"
        shared = self.moe_shared_expert_intermediate_size
        if shared is not None and shared <= 0:
            raise ValueError(f"moe_shared_expert_intermediate_size ({shared}) must be positive.")
        if shared is not None and self.moe_shared_expert_overlap and self.moe_token_dispatcher_type != "alltoall":
            raise ValueError("moe_shared_expert_overlap only works with alltoall token dispatcher.")
        balancing = self.moe_router_load_balancing_type
        if isinstance(balancing, list):
            coefficients = self.moe_aux_loss_coeff
            is_matching = isinstance(coefficients, list) and len(coefficients) == len(balancing)
            assert is_matching, "moe_aux_loss_coeff must be a list of the same length as moe_router_load_balancing_type"
        accepted = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
        others = [each for each in ([balancing] if isinstance(balancing, str) else balancing) if each not in accepted]
        if self.moe_expert_capacity_factor is not None:
            if self.moe_expert_capacity_factor < 0:
                self.moe_expert_capacity_factor = None
            if others:
                raise ValueError(f"moe_expert_capacity_factor only works with {', '.join(accepted)} load balancing")
        if others and balancing != "sinkhorn":
            raise ValueError(
                f"moe_router_load_balancing_type is {balancing!r}; use sinkhorn alone, or one or several of "
                f"{', '.join(accepted)}"
            )
        if self.moe_router_dtype not in (None, "fp32", "fp64"):
            raise ValueError(f"moe_router_dtype is {self.moe_router_dtype!r}; use fp32, fp64 or None")
        if self.moe_pad_expert_input_to_capacity and self.moe_expert_capacity_factor is None:
            raise ValueError("moe_expert_capacity_factor must be set to use moe_pad_expert_input_to_capacity")
        if self.moe_router_enable_expert_bias and self.moe_router_score_function not in INDEPENDENT_SCORES:
            raise ValueError(
                "Expert bias for aux-loss-free routing only supports the score functions "
                f"{' and '.join(INDEPENDENT_SCORES)}."
            )
        if (
            self.moe_router_topk == 1
            and self.moe_router_score_function == "softmax"
            and not self.moe_router_pre_softmax
            and balancing != "sinkhorn"
        ):
            raise ValueError("Please use --moe-router-pre-softmax when topk is 1.")
        if self.moe_router_group_topk:
            groups = self.moe_router_num_groups
            if not groups:
                raise ValueError("When using group limited routing, moe_router_num_groups must be specified.")
            assert (self.num_moe_experts or 1) % groups == 0, (
                f"num_moe_experts ({self.num_moe_experts}) should be divisible by moe_router_num_groups ({groups})."
            )
            assert self.moe_router_group_topk <= groups, (
                f"moe_router_group_topk ({self.moe_router_group_topk}) should be at most moe_router_num_groups "
                f"({groups})."
            )
        if self.moe_token_dispatcher_type == "allgather" and self.variable_seq_lengths:
            raise ValueError(
                "Token dispatcher type: allgather does not support variable sequence length, please use alltoall "
                "dispatcher instead."
            )

    def _check_memory_saving(self) -> None:
        if self.cpu_offloading:
            if not 0 <= self.cpu_offloading_num_layers < self.num_layers:
                raise ValueError(f"CPU offloading can be done only for layers less than {self.num_layers}")
            if self.pipeline_model_parallel_size > 1:
                raise ValueError("Currently there is no support for Pipeline parallelism with CPU offloading")
            if self.recompute_granularity is not None:
                raise ValueError("CPU offloading does not work when activation recomputation is enabled")
        if self.recompute_modules is None:
            self.recompute_modules = ["core_attn"]
        if self.moe_layer_recompute:
            if self.recompute_granularity == "full":
                raise ValueError("moe_layer_recompute needs recompute_granularity selective or None, not full")
            self.recompute_granularity = "selective"
            self.recompute_modules = [*dict.fromkeys([*self.recompute_modules, "moe"])]
        granularity = self.recompute_granularity
        if granularity is None:
            return
        if granularity not in ("full", "selective"):
            raise ValueError(f'recompute_granularity: {granularity} must be "full" or "selective".')
        if self.recompute_method not in (None, "block", "uniform"):
            raise ValueError(f'recompute_method: {self.recompute_method} must be "block" or "uniform".')
        if granularity == "full" and self.recompute_method is None:
            raise ValueError('recompute_granularity: full needs recompute_method "block" or "uniform"')
        if granularity == "full" and self.recompute_num_layers is None:
            most = self.num_layers // self.pipeline_model_parallel_size
            raise ValueError(f"recompute_granularity: full needs recompute_num_layers between 1 and {most}")
        if granularity == "selective" and self.recompute_num_layers is not None:
            raise ValueError("recompute_granularity: selective needs recompute_num_layers=None.")
        self._check_recomputed_modules()
        if self.distribute_saved_activations and self.sequence_parallel:
            raise ValueError("distribute_saved_activations must be False when sequence_parallel is True")

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """Return the parts of a layer that selective recomputation recomputes; empty for full recomputation."""
        return tuple(self.recompute_modules or ()) if self.recompute_granularity == "selective" else ()

    def _check_recomputed_modules(self) -> None:
        modules = self.recomputed_modules
        if unknown := [name for name in modules if name not in _RECOMPUTABLE]:
            raise ValueError(f"recompute_modules has unknown names {unknown}; use {', '.join(_RECOMPUTABLE)}")
        if "moe_act" in modules and not self.moe_grouped_gemm:
            raise ValueError("moe_act in recompute_modules needs moe_grouped_gemm=True")
        if "mla_up_proj" in modules and not self.multi_latent_attention:
            raise ValueError("mla_up_proj in recompute_modules needs multi_latent_attention=True")
        if "shared_experts" in modules and self.moe_shared_expert_overlap:
            raise ValueError("shared_experts in recompute_modules needs moe_shared_expert_overlap=False")

    def _check_pipeline_split(self) -> None:
        first, last = self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage
        accounts = self.account_for_embedding_in_pipeline_split or self.account_for_loss_in_pipeline_split
        is_uneven = first is not None or last is not None
        if is_uneven and accounts:
            raise ValueError(
                "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage cannot be set at the same "
                "time with account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split"
            )
        if self.pipeline_model_parallel_layout is not None and (is_uneven or accounts):
            raise ValueError("pipeline_model_parallel_layout cannot be set with other pipeline layout arguments.")


@dataclass
class MLATransformerConfig(TransformerConfig):
    """`TransformerConfig` of a model with multi-head latent attention (MLA)."""

    normalization: str = "RMSNorm"
    multi_latent_attention: bool = True
    q_lora_rank: int | None = 512
    kv_lora_rank: int = 512
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    rope_type: str = "yarn"
    rotary_base: float = 10000
    rotary_percent: float = 1.0
    rotary_scaling_factor: float = 40
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32
    beta_slow: float = 1
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    cache_mla_latents: bool = False

    def __post_init__(self) -> None:
        """Set the fields that follow from others, and check combinations."""
        super().__post_init__()
        if self.attention_output_gate:
            raise ValueError("Output gate is not supported for MLA yet.")
        if self.rotary_interleaved:
            raise ValueError("rotary_interleaved does not work with multi_latent_attention.")
