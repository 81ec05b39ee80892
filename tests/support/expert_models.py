"""Small models with experts in layouts of many kinds, run by transformers' own attention."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AriaTextConfig,
    AutoModelForCausalLM,
    DbrxConfig,
    DeepseekV3Config,
    DeepseekV4Config,
    GptOssConfig,
    JetMoeConfig,
    Llama4TextConfig,
    LongcatFlashConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from surefoot.models.experts import plug_in
from surefoot.models.lora import LoraSettings, attach, is_lora

TOKENS = 24
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
ROUTING: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    "num_attention_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt_oss": lambda: GptOssConfig(**SIZES, **HEADS, **ROUTING, intermediate_size=24),
    "aria": lambda: AriaTextConfig(
        **SIZES, **HEADS, intermediate_size=24, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1
    ),
    "llama4": lambda: Llama4TextConfig(
        **SIZES, **HEADS, **ROUTING, intermediate_size=24, intermediate_size_mlp=48, interleave_moe_layer_step=1
    ),
    "jetmoe": lambda: JetMoeConfig(**SIZES, **ROUTING, kv_channels=8, num_key_value_heads=2, intermediate_size=24),
    "dbrx": lambda: DbrxConfig(
        d_model=32,
        n_heads=4,
        n_layers=2,
        vocab_size=64,
        ffn_config={"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
        attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **SIZES,
        **LATENT,
        num_key_value_heads=4,
        intermediate_size=48,
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=0,
    ),
    "deepseek_v4": lambda: DeepseekV4Config(
        **SIZES,
        num_attention_heads=4,
        head_dim=16,
        qk_rope_head_dim=8,
        q_lora_rank=8,
        o_lora_rank=8,
        o_groups=2,
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=2,
        mlp_layer_types=["hash_moe", "moe"],
        index_n_heads=2,
        index_head_dim=8,
        index_topk=4,
    ),
    "longcat": lambda: LongcatFlashConfig(
        num_layers=1,
        hidden_size=32,
        vocab_size=64,
        ffn_hidden_size=48,
        expert_ffn_hidden_size=24,
        **LATENT,
        head_dim=8,
        n_routed_experts=4,
        zero_expert_num=2,
        moe_topk=2,
    ),
}


def build(kind: str, trained: str) -> PreTrainedModel:
    """Return a model with the experts of this project, with LoRA on everything or all of it trained."""
    torch.manual_seed(3)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation="eager")
    if trained == "lora":
        attach(model, LoraSettings(rank=4, alpha=8, targets=("all",)))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_lora(name))
    plug_in(model)
    return model.train()


def set_values(parameters: dict[str, nn.Parameter], load: Callable[[nn.Parameter, Tensor], None]) -> None:
    """Give each parameter values that depend on its name alone."""
    for name, parameter in sorted(parameters.items()):
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        load(parameter, 0.2 * torch.randn(parameter.shape, generator=generator))


def loss_of(model: PreTrainedModel) -> Tensor:
    ids = torch.randint(0, 60, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    logits = model(ids, use_cache=False).logits[0]
    return nn.functional.cross_entropy(logits[:-1].float(), ids[0, 1:])
