"""Sparse up-cycling: a dense model becomes a Mixture-of-Experts with the same function at the start.

Each MLP is copied into N experts behind a fresh router. Where the top-k weights sum to one, identical experts give the
dense MLP's output whatever the router chooses. The result is an ordinary HF folder with the hub's per-expert names.

Source: Komatsuzaki et al., Sparse Upcycling, https://arxiv.org/abs/2212.05055
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from surefoot.errors import ModelError
from surefoot.models.build import load_config
from surefoot.models.checkpoint_weights import CheckpointWeights
from surefoot.models.resolve_model import resolve_model
from surefoot.system.atomic_io import new_folder

Form = Literal["mixtral", "qwen2_moe"]

SHARED_CONFIG = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act "
    "max_position_embeddings initializer_range rms_norm_eps tie_word_embeddings rope_parameters "
    "attention_dropout bos_token_id eos_token_id pad_token_id dtype"
).split()
"""Fields that mean the same in a dense Llama/Mistral/Qwen2 config and in both MoE forms."""
AS_WRITTEN = ("rope_theta", "rope_scaling")
"""Fields of older configs that older readers need."""

DENSE_TYPES = {"llama": False, "mistral": False, "qwen2": True}
"""Dense model types that can be up-cycled, and whether their query, key and value projections have a bias."""

TOKENIZER_FILES = [
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
]
ROUTER_STD = 0.02


@dataclass(frozen=True)
class _Plan:
    form: Form
    num_experts: int
    shared_size: int
    """Rows of the MLP that go to the shared expert (qwen2_moe only); the experts hold the rest."""


def upcycle(
    source: str, target: str | Path, *, num_experts: int = 8, top_k: int = 2, form: Form = "mixtral", seed: int = 0
) -> Path:
    """Write the MoE of the dense model `source` (folder, hub id or pypi:) to the folder `target`.

    `mixtral`: every expert is a copy of the dense MLP. `qwen2_moe`: half of the MLP's hidden units become the shared
    expert (always active), the other half the routed experts, so the sum is the dense MLP again.

    Memory: one decoder layer of the result at a time.
    Raises: ModelError for a model that is not dense Llama, Mistral or Qwen2, for impossible sizes, or if `target`
    exists already.
    """
    if num_experts < 2 or not 1 <= top_k <= num_experts:
        raise ModelError(
            f"num_experts={num_experts}, top_k={top_k}: a mixture needs 2 experts or more and 1 <= top_k <= experts."
        )
    target = Path(target)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ModelError(f"{target} exists already and is not empty; it was not touched. Give a new folder.")
    folder = resolve_model(source, "upcycle")
    # Read through transformers: a field that the file leaves out has another default in the new architecture.
    dense = load_config(folder).to_dict()
    config, plan = _build_moe_config(dense, num_experts, top_k, form, folder)
    written = json.loads((folder / "config.json").read_text("utf-8"))
    config |= {name: written[name] for name in AS_WRITTEN if name in written}
    with new_folder(target) as temporary:
        _write_weights(folder, temporary, dense["num_hidden_layers"], plan, seed)
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for pattern in [*TOKENIZER_FILES, "generation_config.json"]:
            for path in filter(Path.is_file, folder.glob(pattern)):  # a device file has no end
                shutil.copy2(path, temporary / path.name)
    return target


def _build_moe_config(
    dense: dict[str, Any], num_experts: int, top_k: int, form: Form, folder: Path
) -> tuple[dict[str, Any], _Plan]:
    model_type = dense["model_type"]
    if model_type not in DENSE_TYPES or dense.get("attention_bias") or dense.get("mlp_bias"):
        raise ModelError(
            f"{folder}: a dense model of type llama, mistral or qwen2 (no attention_bias, no mlp_bias) can be "
            f"up-cycled; this one is {model_type}, attention_bias={dense.get('attention_bias', False)}."
        )
    if DENSE_TYPES[model_type] and form == "mixtral":
        raise ModelError(f"{folder}: {model_type} has query/key/value biases, which Mixtral lacks. Use form qwen2_moe.")
    if form == "qwen2_moe" and dense.get("head_dim", 0) not in (
        None,
        0,
        dense["hidden_size"] // dense["num_attention_heads"],
    ):
        raise ModelError(f"{folder}: head_dim={dense['head_dim']} is not hidden_size / heads, which Qwen2-MoE needs.")
    config = {name: dense[name] for name in SHARED_CONFIG if dense.get(name) is not None}
    window = dense.get("sliding_window")
    layers = (
        dense.get("layer_types") or ["sliding_attention" if window else "full_attention"] * config["num_hidden_layers"]
    )
    size = dense["intermediate_size"]
    if form == "mixtral":
        config |= {
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            "intermediate_size": size,
            "num_local_experts": num_experts,
            "num_experts_per_tok": top_k,
            "sliding_window": window,
            "router_aux_loss_coef": 0.0,
        }
        return config, _Plan(form, num_experts, 0)
    shared_size = size // 2
    config.pop("head_dim", None)
    config |= {
        "model_type": "qwen2_moe",
        "architectures": ["Qwen2MoeForCausalLM"],
        "intermediate_size": size,
        "moe_intermediate_size": size - shared_size,
        "shared_expert_intermediate_size": shared_size,
        "num_experts": num_experts,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": True,  # the weights of identical experts must sum to one
        "qkv_bias": DENSE_TYPES[model_type],
        "use_sliding_window": "sliding_attention" in layers,
        "sliding_window": window,
        "layer_types": layers,
        "router_aux_loss_coef": 0.0,
    }
    return config, _Plan(form, num_experts, shared_size)


def _write_weights(folder: Path, target: Path, num_layers: int, plan: _Plan, seed: int) -> None:
    reader = _Reader(folder)
    weight_map: dict[str, str] = {}
    total_bytes = 0

    def write(tensors: dict[str, Tensor], index: int) -> None:
        nonlocal total_bytes
        name = f"model-{index + 1:05d}-of-{num_layers + 1:05d}.safetensors"
        save_file(tensors, target / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())

    outside = [name for name in reader.names if not name.startswith("model.layers.")]
    write({name: reader.read(name) for name in outside}, num_layers)
    for layer in range(num_layers):
        generator = torch.Generator().manual_seed(seed * 100_003 + layer)
        write(dict(_build_layer(reader, f"model.layers.{layer}.", plan, generator)), layer)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _build_layer(
    reader: "_Reader", prefix: str, plan: _Plan, generator: torch.Generator
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of one MoE layer under the hub's names.

    Shapes: H hidden, I intermediate; gate and up [I, H], down [H, I].
    """
    for name in reader.names:
        if name.startswith(prefix) and ".mlp." not in name:
            yield name, reader.read(name)
    gate, up, down = (reader.read(f"{prefix}mlp.{part}_proj.weight") for part in ("gate", "up", "down"))
    router = (torch.randn(plan.num_experts, gate.shape[1], generator=generator) * ROUTER_STD).to(gate.dtype)
    shared = slice(0, plan.shared_size)
    routed = slice(plan.shared_size, None)
    if plan.form == "mixtral":
        yield f"{prefix}block_sparse_moe.gate.weight", router
        names = {"w1": gate, "w3": up, "w2": down}
        expert = f"{prefix}block_sparse_moe.experts.{{}}.{{}}.weight"
    else:
        yield f"{prefix}mlp.gate.weight", router
        # A zero gate vector gives sigmoid(0) = 1/2 for every token, which the doubled down projection cancels.
        yield f"{prefix}mlp.shared_expert_gate.weight", torch.zeros(1, gate.shape[1], dtype=gate.dtype)
        yield f"{prefix}mlp.shared_expert.gate_proj.weight", gate[shared].clone()
        yield f"{prefix}mlp.shared_expert.up_proj.weight", up[shared].clone()
        yield f"{prefix}mlp.shared_expert.down_proj.weight", down[:, shared] * 2
        names = {"gate_proj": gate[routed], "up_proj": up[routed], "down_proj": down[:, routed]}
        expert = f"{prefix}mlp.experts.{{}}.{{}}.weight"
    for index in range(plan.num_experts):
        for name, value in names.items():
            yield expert.format(index, name), value.clone(memory_format=torch.contiguous_format)


class _Reader:
    """Reader of single tensors of a dense model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stored = CheckpointWeights(folder)
        self.names = sorted(self._stored.weights)

    def read(self, name: str) -> Tensor:
        """Read one tensor. Raises: ModelError if there is none of this name."""
        if name not in self._stored.weights:
            raise ModelError(f"{self._folder}: its weights have no {name}, which a model of its type has.")
        return self._stored.read(name)
