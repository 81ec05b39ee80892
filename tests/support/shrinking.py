"""Tiny configurations of any architecture: fields of known names become small, and a layer of each kind stays."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError

VOCAB_SIZE = 128
SIZES: dict[str, int] = {
    **dict.fromkeys(
        "vocab_size vocab_size_per_layer_input decoder_vocab_size pronunciation_vocab_size shape_vocab_size "
        "audio_vocab_size encoder_hash_byte_group_vocab ngram_vocab_size_base".split(), VOCAB_SIZE),
    **dict.fromkeys(
        "hidden_size d_model n_embd emb_dim embed_dim embedding_dim embedding_size attention_hidden_size "
        "hidden_size_global lru_width word_embed_proj_dim input_embedding_size output_embedding_size "
        "pronunciation_embed_dim shape_embed_dim backbone_hidden_size out_hidden_size projection_dim "
        "projection_hidden_size ple_embed_dim adapter_in_dim adapter_out_dim "
        "vision_output_dim mm_embed_dim output_proj_dims "
        "projector_input_dim projector_output_dim input_size dim_model_base".split(), 32),
    **dict.fromkeys(
        "intermediate_size moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size "
        "shared_intermediate_size expert_ffn_hidden_size ffn_hidden_size ffn_dim decoder_ffn_dim encoder_ffn_dim d_ff "
        "d_inner dff dim_ff feed_forward_size mlp_dim dense_intermediate_size intermediate_size_mlp "
        "moe_shared_expert_intermediate_size prefix_dense_intermediate_size".split(), 48),
    **dict.fromkeys(
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
        "num_encoder_layers depth num_blocks".split(), 2),
    **dict.fromkeys(
        "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads encoder_attention_heads "
        "num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads".split(), 4),
    **dict.fromkeys(
        "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads index_n_heads n_mamba_heads "
        "num_global_key_value_heads".split(), 2),
    **dict.fromkeys("linear_num_value_heads linear_num_heads".split(), 4),
    **dict.fromkeys("mamba_n_heads mamba_num_heads".split(), 8),
    "mamba_d_ssm": 64,
    **dict.fromkeys(
        "head_dim dim_head d_head d_kv kv_channels attention_head_size swa_head_dim global_head_dim index_head_dim "
        "linear_head_dim linear_key_head_dim linear_value_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim "
        "mamba_d_head mamba_head_dim state_size mamba_d_state ssm_state_size mamba_dt_rank time_step_rank d_rel "
        "query_pre_attn_scalar".split(), 8),
    "rotary_dim": 4,
    "qk_head_dim": 16,
    **dict.fromkeys("kv_lora_rank q_lora_rank o_lora_rank laurel_rank gated_norm_rank hc_lowrank adapter_rank "
                    "hidden_size_per_layer_input router_hidden_size".split(), 8),
    **dict.fromkeys("num_experts num_local_experts n_routed_experts moe_num_experts".split(), 4),
    **dict.fromkeys("num_experts_per_tok moe_topk moe_k top_k_experts num_experts_per_token".split(), 2),
    **dict.fromkeys("n_group num_expert_group".split(), 2),
    "topk_group": 1,
    **dict.fromkeys("mamba_chunk_size chunk_size block_size index_block_size lsh_attn_chunk_length "
                    "local_attn_chunk_length".split(), 4),
    "zero_expert_num": 2,
    **dict.fromkeys("n_groups mamba_n_groups mamba_ngroups n_shared_experts moe_num_shared_experts num_shared_experts "
                    "first_k_dense_replace num_dense_layers o_groups".split(), 1),
}  # fmt: skip
"""Small values of the fields that configurations have. A field that is None or 0 by default stays as it is."""

THRESHOLDS: dict[str, int] = {
    **dict.fromkeys(
        "sliding_window sliding_window_size attention_window_size local_attention window_size attention_chunk_size "
        "local_attention_window_len rel_extent floor_scale log_scaling_n_floor indexer_budget".split(), 8),
    **dict.fromkeys("index_topk keep_window_size".split(), 6),
    "index_topk_blocks": 2,
    **dict.fromkeys(
        "max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions model_max_length "
        "num_position_embeddings position_embedding_size mm_posemb_size".split(), 64),
}  # fmt: skip
"""Small numbers of tokens from which on a layer computes otherwise: fewer than the samples of the suite have."""

THRESHOLDS_BY_KIND = ("compress_rates",)
"""Fields that have such a number for each kind of layer."""

RANDOM = ("dropout", "pdrop", "dropout_prob", "dropout_p", "layerdrop", "jitter_noise", "drop_path_rate")
"""Endings of fields whose value would make two forwards differ."""

PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types")
"""Fields that list the kind of each layer."""


def tiny(cls: type[PreTrainedConfig], changes: Mapping[str, Any], times: int = 1) -> PreTrainedConfig:
    """Return a small configuration of a class.

    `changes`: fields of other values; a mapping for one of its parts. `times`: factor of all THRESHOLDS.
    """
    optional: dict[str, Any] = {
        name: {} for name in changes if name in cls.sub_configs and getattr(cls(), name, None) is None
    }
    defaults = cls(**optional)
    values: dict[str, Any] = {}
    for name in _names_of(cls):
        default = _value_of(defaults, name)
        if isinstance(default, PreTrainedConfig):
            change = changes.get(name, {})
            values[name] = tiny(type(default), change, times).to_dict()
        elif name.endswith(RANDOM) and default:
            values[name] = 0.0
        elif name.endswith(("_token_id", "_token_index")) and isinstance(default, int):
            values[name] = _small_token(name)
        elif name in SIZES and isinstance(default, int) and default:
            values[name] = SIZES[name]
        elif name in THRESHOLDS and isinstance(default, int) and default:
            values[name] = THRESHOLDS[name] * times
    if "kv_lora_rank" in values:  # the keys of latent attention have as many heads as its queries
        values["num_key_value_heads"] = values["num_attention_heads"]
    values |= _representative_layers(defaults)
    for name, change in changes.items():
        if not _is_part(defaults, name):
            values[name] = _multiply(change, times) if name in (*THRESHOLDS, *THRESHOLDS_BY_KIND) else change
    return cls(**values)


def _multiply(value: Any, times: int) -> Any:
    """Return a number, or the numbers of a mapping, times a factor."""
    if isinstance(value, Mapping):
        return {name: part * times for name, part in value.items()}
    return value * times if isinstance(value, int) else value


def _names_of(cls: type[PreTrainedConfig]) -> list[str]:
    return [field.name for field in fields(cls)]


def _value_of(config: PreTrainedConfig, name: str) -> Any:
    """Return a field's value, of the whole model where layers may differ."""
    try:
        return getattr(config, name, None)
    except AmbiguousGlobalPerLayerAttributeError:
        return vars(config).get(name)


def _is_part(config: PreTrainedConfig, name: str) -> bool:
    return isinstance(_value_of(config, name), PreTrainedConfig)


def _small_token(name: str) -> int:
    """Return a token number outside 3 to 119, which the samples of the suite are drawn from."""
    ends = ("pad", "bos", "eos")
    for number, part in enumerate(ends):
        if name.startswith(part):
            return number
    specials = ("image_token", "video_token", "audio_token")
    for number, part in enumerate(specials):
        if name.startswith(part):
            return VOCAB_SIZE - 1 - number
    return VOCAB_SIZE - 8 + sum(name.encode()) % 5


def _representative_layers(defaults: PreTrainedConfig) -> dict[str, Any]:
    """Return the per-layer lists cut to the first layer of each kind, two at least, and the number of layers."""
    values = {name: _value_of(defaults, name) for name in _names_of(type(defaults))}
    lists = {name: values[name] for name in PER_LAYER if isinstance(values.get(name), Sequence)}
    if not lists:
        return {}
    count = max(len(kinds) for kinds in lists.values())
    lists = {name: kinds for name, kinds in lists.items() if len(kinds) == count}
    known: set[tuple[str, str]] = set()
    chosen = []
    for layer in range(count):
        kinds = {(name, kinds[layer]) for name, kinds in lists.items()}
        if kinds - known:
            chosen.append(layer)
            known |= kinds
    if len(chosen) < 2:
        chosen.append(count - 1)
    numbers = {
        name: [value[layer] for layer in chosen]
        for name, value in values.items()
        if isinstance(value, list | tuple) and len(value) == count and count > 4
    }
    cut = {name: [kinds[layer] for layer in chosen] for name, kinds in lists.items()}
    total = {"num_hidden_layers": len(chosen)} if "num_hidden_layers" in values else {}
    return {**numbers, **cut, **total}


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Add noise to every weight, so that a leak between samples and a bias that is dropped both show."""
    generator = torch.Generator().manual_seed(seed)
    stored = model.state_dict()
    for name, parameter in model.named_parameters():
        _add_noise(parameter.data, 0.25 if parameter.dim() > 1 and "A_log" not in name else 0.1, generator)
    for name, buffer in model.named_buffers():
        if name in stored and "bias" in name and buffer.is_floating_point():  # corrections of routers
            _add_noise(buffer, 0.1, generator)
        elif name.endswith("tid2eid"):  # a table of experts by token
            buffer.copy_(torch.randint(0, 4, buffer.shape, generator=generator))


def _add_noise(tensor: Tensor, std: float, generator: torch.Generator) -> None:
    tensor.add_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype), alpha=std)
