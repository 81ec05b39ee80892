"""Table of the suite's architectures: what the tiny configuration of each changes, and why one does not train."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from tests.support.shrinking import VOCAB_SIZE, randomise, tiny

ENCODER_DECODER = "encoder-decoder: this class is its decoder alone"
DRAFTER = "drafts tokens from the states of another model, and has none of its own"
BOTH_WAYS = "its tokens see those that follow them"
TIED = "its layers share weights, each with a LoRA pair of its own, so that its adapters cannot be merged"


@dataclass(frozen=True)
class Line:
    """An architecture of the suite."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the tiny configuration that differ from the general rule."""
    of: str | None = None
    """The model type, where this line is a variant of another."""
    reason: str | None = None
    """Why it does not train."""
    is_built: bool = True
    """Whether a tiny model of it can be made here."""


DECODER: dict[str, Any] = {"is_decoder": True}
WINDOWS = ["sliding_attention", "full_attention"]
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
ROPE_BY_KIND = dict.fromkeys(WINDOWS, ROPE)
DOTS3: dict[str, Any] = {
    "head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 8,
    "swa_kv_lora_rank": 8, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8,
}  # fmt: skip
MROPE: dict[str, Any] = {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}}
LONGROPE: dict[str, Any] = {
    "max_position_embeddings": 64, "original_max_position_embeddings": 12,
    "rope_parameters": {
        **ROPE, "rope_type": "longrope", "original_max_position_embeddings": 12,
        "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0],
    },
}  # fmt: skip
QWEN4: dict[str, Any] = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}  # fmt: skip

CAUSAL: dict[str, Line] = {
    "afmoe": Line(),
    "apertus": Line(),
    "arcee": Line(),
    "aria_text": Line(),
    "axk1": Line(),
    "axk2": Line(),
    "bailing_hybrid": Line(),
    "bamba": Line({"attn_layer_indices": [1]}),
    "bart": Line(reason=ENCODER_DECODER),
    "beam": Line(),
    "bert": Line(DECODER),
    "bert-generation": Line(DECODER),
    "big_bird": Line(DECODER),
    "bigbird_pegasus": Line(reason=ENCODER_DECODER),
    "biogpt": Line(),
    "bitnet": Line(),
    "blenderbot": Line(reason=ENCODER_DECODER),
    "blenderbot-small": Line(reason=ENCODER_DECODER),
    "bloom": Line(),
    "blt": Line(),
    "camembert": Line(DECODER),
    "codegen": Line(),
    "cohere": Line(),
    "cohere2": Line(),
    "cohere2_moe": Line({"mlp_layer_types": ["dense", "sparse"], "prefix_dense_intermediate_size": 48}),
    "cohere_compass_text": Line(
        {"layer_types": ["sliding_attention", "full_attention"], "rope_parameters": ROPE_BY_KIND}
    ),
    "cpmant": Line(reason=BOTH_WAYS),
    "ctrl": Line(),
    "cwm": Line(),
    "data2vec-text": Line(DECODER),
    "dbrx": Line(
        {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}, "ffn_config": {"moe_top_k": 2}}
    ),
    "deepseek_v2": Line({"first_k_dense_replace": 1, "num_experts_per_tok": 2}),
    "deepseek_v3": Line(),
    "deepseek_v32": Line(),
    "deepseek_v4": Line({"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 7}}),
    "diffllama": Line(),
    "doge": Line(),
    "dots1": Line(
        {
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "layer_types": WINDOWS,
        }
    ),
    "dots3_note": Line({"text_config": DOTS3, "audio_config": {"adapter_input_size": 32}}),
    "dots3_note_text": Line(DOTS3),
    "electra": Line(DECODER),
    "emu3": Line({"vocabulary_map": {"<image>": 127}, "vq_config": {"base_channels": 32, "codebook_size": 64}}),
    "ernie": Line(DECODER),
    "ernie4_5": Line(),
    "ernie4_5_moe": Line(),
    "exaone4": Line(),
    "exaone_moe": Line(),
    "falcon": Line(),
    "falcon_h1": Line(),
    "falcon_mamba": Line(),
    "flex_olmo": Line(),
    "flint": Line({"mlp_only_layers": [0]}),
    "fuyu": Line(),
    "gemma": Line(),
    "gemma2": Line(),
    "gemma3": Line(),
    "gemma3_text": Line(),
    "gemma3n": Line(reason="its vision tower needs the package timm", is_built=False),
    "gemma3n_text": Line(
        {
            "num_hidden_layers": 4,
            "layer_types": WINDOWS * 2,
            "num_kv_shared_layers": 2,
            "intermediate_size": [48] * 4,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        }
    ),
    "gemma4": Line({"vision_config": {}}),
    "gemma4_assistant": Line(reason=DRAFTER, is_built=False),
    "gemma4_text": Line(),
    "gemma4_unified": Line({"vision_config": {}}),
    "gemma4_unified_assistant": Line(reason=DRAFTER, is_built=False),
    "gemma4_unified_text": Line(),
    "git": Line(),
    "glm": Line(),
    "glm4": Line(),
    "glm4_moe": Line(),
    "glm4_moe_lite": Line(),
    "glm_moe_dsa": Line(),
    "got_ocr2": Line(),
    "gpt-sw3": Line(),
    "gpt2": Line(),
    "gpt_bigcode": Line(),
    "gpt_neo": Line({"attention_types": [[["global", "local"], 1]]}),
    "gpt_neox": Line(),
    "gpt_neox_japanese": Line(),
    "gpt_oss": Line(),
    "gptj": Line(),
    "granite": Line(),
    "granite_swa": Line(),
    "granitemoe": Line(),
    "granitemoe_swa": Line(),
    "granitemoehybrid": Line({"layer_types": ["linear_attention", "full_attention"]}),
    "granitemoeshared": Line(),
    "helium": Line(),
    "hrm_text": Line({"num_layers_per_stack": 2}),
    "hunyuan_v1_dense": Line({"head_dim": 8}),
    "hunyuan_v1_moe": Line({"head_dim": 8, "num_experts": 4, "moe_topk": 2}),
    "hy_v3": Line(),
    "hy_v4": Line(),
    "hyperclovax": Line(),
    "inkling2_text": Line(),
    "inkling_text": Line({"mlp_layer_types": ["dense", "sparse"]}),
    "internlm3": Line(),
    "iquestcoder": Line(),
    "jais2": Line(),
    "jamba": Line({"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 0}),
    "jetmoe": Line(),
    "kimi_linear": Line(),
    "kolibri1": Line(),
    "laguna": Line(
        {
            "layer_types": WINDOWS,
            "mlp_layer_types": ["dense", "sparse"],
            "num_hidden_layers": 2,
            "num_attention_heads_per_layer": [4, 8],
        }
    ),
    "lfm2": Line({"layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": Line({"layer_types": ["conv", "full_attention"]}),
    "lfm3": Line(),
    "llama": Line(),
    "llama4": Line(),
    "llama4_text": Line({"moe_layers": [1]}),
    "longcat_flash": Line(),
    "mamba": Line(),
    "mamba2": Line({"num_heads": 8}),
    "marian": Line(reason=ENCODER_DECODER),
    "mbart": Line(reason=ENCODER_DECODER),
    "megatron-bert": Line(DECODER),
    "mellum": Line({"layer_types": WINDOWS}),
    "mimo_v2_flash": Line(),
    "minicpm3": Line(),
    "minimax": Line(),
    "minimax_m2": Line(),
    "minimax_m3_vl_text": Line(
        {"layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse"]}
    ),
    "ministral": Line({"head_dim": 8}),
    "ministral3": Line(),
    "mistral": Line(),
    "mixtral": Line(),
    "mllama": Line(),
    "modernbert-decoder": Line(),
    "moshi": Line(),
    "moss_transcribe_diarize": Line(),
    "mpt": Line(),
    "musicgen": Line(reason=ENCODER_DECODER, is_built=False),
    "musicgen_melody": Line(reason=ENCODER_DECODER, is_built=False),
    "mvp": Line(),
    "nanochat": Line(),
    "nemotron": Line({"num_key_value_heads": 2}),
    "nemotron_h": Line(),
    "olmo": Line(),
    "olmo2": Line(),
    "olmo3": Line(),
    "olmo_hybrid": Line(),
    "olmoe": Line(),
    "openai-gpt": Line(),
    "opt": Line(),
    "pegasus": Line(reason=ENCODER_DECODER),
    "persimmon": Line(),
    "phi": Line(),
    "phi3": Line(),
    "phi4_multimodal": Line(),
    "phimoe": Line(),
    "plbart": Line(reason=ENCODER_DECODER),
    "prophetnet": Line(reason=ENCODER_DECODER),
    "qwen2": Line(),
    "qwen2_moe": Line(),
    "qwen3": Line(),
    "qwen3_5": Line(),
    "qwen3_5_moe": Line(),
    "qwen3_5_moe_text": Line(),
    "qwen3_5_text": Line(),
    "qwen3_moe": Line(),
    "qwen3_next": Line(),
    "qwen4_exp": Line({"text_config": QWEN4}),
    "qwen4_exp_text": Line(QWEN4),
    "recurrent_gemma": Line({"num_hidden_layers": 3}),
    "reformer": Line(
        {
            "is_decoder": True,
            "attn_layers": ["local", "lsh"],
            "axial_pos_shape": (8, 8),
            "axial_pos_embds_dim": (8, 24),
            "num_buckets": 4,
            "hash_seed": 0,
        },
        reason="transformers trains it on rows of one length only",
    ),
    "rembert": Line(DECODER),
    "roberta": Line(DECODER),
    "roberta-prelayernorm": Line(DECODER),
    "roc_bert": Line(DECODER),
    "roformer": Line(DECODER),
    "rwkv": Line(),
    "seed_oss": Line(),
    "smollm3": Line(),
    "solar_open": Line(),
    "stablelm": Line(),
    "starcoder2": Line(),
    "trocr": Line(),
    "vaultgemma": Line(),
    "whisper": Line(),
    "xglm": Line(),
    "xlm": Line({"causal": True}),
    "xlm-roberta": Line(DECODER),
    "xlm-roberta-xl": Line(DECODER),
    "xlnet": Line({"attn_type": "uni"}),
    "xlstm": Line(),
    "xmod": Line({"is_decoder": True, "default_language": "en_XX"}),
    "youtu": Line(),
    "zamba": Line(
        {
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "num_hidden_layers": 4,
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
        },
        reason=TIED,
    ),
    "zamba2": Line({"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4}, reason=TIED),
    "zaya": Line({"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": 8}),
}

VISION: dict[str, Line] = {
    "qwen2_vl": Line({"text_config": MROPE}),
    "qwen2_5_vl": Line({"text_config": MROPE}),
    "qwen3_vl": Line({"text_config": MROPE}),
    "qwen3_vl_moe": Line({"text_config": MROPE}),
    "internvl": Line(),
    "idefics3": Line(),
    "glm4v": Line({"text_config": MROPE}),
    "glm4v_moe": Line({"text_config": {**MROPE, "head_dim": 16}}),
    "glm46v": Line({"text_config": MROPE}),
    "llava_onevision": Line(),
    "smolvlm": Line(),
    "mistral3": Line(),
    "kimi_k25": Line(),
    "paligemma": Line(reason="its whole prompt attends in both directions"),
}
"""Vision-language classes, besides those of `CAUSAL`."""

VARIANTS: dict[str, Line] = {
    "llama+dynamic_ntk": Line(
        {"max_position_embeddings": 12, "rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 4.0}}, "llama"
    ),
    "phi3+longrope": Line(LONGROPE, "phi3"),
    "phimoe+window": Line({"sliding_window": 8}, "phimoe"),
    "qwen2+window": Line({"use_sliding_window": True, "layer_types": WINDOWS}, "qwen2"),
    "qwen2_moe+window": Line({"use_sliding_window": True, "sliding_window": 8, "layer_types": WINDOWS}, "qwen2_moe"),
    "qwen3+window": Line({"use_sliding_window": True, "layer_types": WINDOWS}, "qwen3"),
    "qwen3_moe+dense_layer": Line({"mlp_only_layers": [0]}, "qwen3_moe"),
    "mixtral+window": Line({"sliding_window": 8}, "mixtral"),
    "doge+moe": Line(
        {"is_moe": True, "num_experts": 16},
        "doge",
        reason="its routers mix the tokens of a sample in transformers, so that logits change with tokens that follow",
    ),
    "falcon+alibi": Line({"alibi": True}, "falcon"),
    "falcon+new_decoder": Line({"new_decoder_architecture": True, "num_kv_heads": 2}, "falcon"),
    "gemma4_text+moe": Line(
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}, "gemma4_text"
    ),
    "gemma4_text+global_heads": Line(
        {"attention_k_eq_v": True, "num_key_value_heads": 2, "num_global_key_value_heads": 1}, "gemma4_text"
    ),
    "gemma4_text+shared_kv": Line(
        {"num_hidden_layers": 4, "layer_types": WINDOWS * 2, "num_kv_shared_layers": 2}, "gemma4_text"
    ),
    "nemotron_h+latent": Line({"moe_latent_size": 16}, "nemotron_h"),
    "qwen4_exp_text+ngrams": Line(
        {**QWEN4, "eos_token_id": 2, "ple_layer_ids": [1], "heads_per_ngram": 2, "split_ngram_parts": 4},
        "qwen4_exp_text",
    ),
    "kolibri1+full": Line({"layer_types": ["full_attention"] * 2}, "kolibri1"),
}
"""Configurations of a class that take another way through it."""

ARCHITECTURES = {**CAUSAL, **VISION, **VARIANTS}


def tiny_config(name: str, vocab_size: int = VOCAB_SIZE, times: int = 1) -> PreTrainedConfig:
    """Return the tiny configuration of a line. `times`: factor of its windows and other thresholds."""
    line = ARCHITECTURES[name]
    changes = deepcopy(dict(line.changes))  # configurations write into the mappings that they are given
    if vocab_size != VOCAB_SIZE:
        changes["vocab_size"] = vocab_size
    return tiny(CONFIG_MAPPING[line.of or name], changes, times)


def model_class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class of a configuration: with its vision tower, if it has one."""
    for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(config) in mapping:
            entry = mapping[type(config)]
            stock: type[PreTrainedModel] = entry[0] if isinstance(entry, tuple) else entry
            return stock
    raise KeyError(type(config).__name__)


def tiny_model(name: str, seed: int = 0, vocab_size: int = VOCAB_SIZE, times: int = 1) -> PreTrainedModel:
    """Return a model of a line with random weights, in float32 on the CPU. `times`: as in `tiny_config`."""
    torch.manual_seed(seed)
    config = tiny_config(name, vocab_size, times)
    model = model_class_of(config)._from_config(config, dtype=torch.float32)
    randomise(model, seed)
    return model.eval()
