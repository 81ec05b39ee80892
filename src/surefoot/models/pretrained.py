"""Readers of a model folder through transformers: its configuration, class, tokenizer and generation settings.

A folder is untrusted. None of its code is ever run, and every error that transformers, tokenizers and safetensors raise
for bad files becomes a ModelError that names the file.

Independent of LoRA, training and sharding.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
import transformers
from jinja2 import Environment, TemplateSyntaxError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from surefoot.config.documents import read_text, shorten
from surefoot.errors import ModelError, is_panic, one_line
from surefoot.models.quantization.released import find_quantization
from surefoot.models.resolve_model import read_json_object
from surefoot.models.score_head import head_of, score_class
from surefoot.models.tokenizer_file import check_tokenizer_file
from surefoot.system.allocators import is_out_of_memory
from surefoot.system.atomic_io import write_json

PROCESSOR_CONFIG, PROCESSOR_TEMPLATE = "processor_config.json", "chat_template.json"
"""Files that may hold a processor's chat template. transformers reads it for processors alone, whose tokenizers often
have another, without images, or none."""
MOST_LAYERS, MOST_EXPERTS, MOST_SIZE = 1000, 100_000, 2**31 - 1
"""Upper bounds of numbers in config.json: creating more modules would take minutes, or overflow."""
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Numbers of a config that every decoder has, and that are 1 or more."""
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts of a layer; 0 or null in dense models."""
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
"""Names of the number of experts that a token goes to."""
NOT_TRAINED = {"paligemma": "its whole prompt attends in both directions, which a packed row of chats does not tell it"}
"""Model types that transformers has and whose samples would be computed otherwise than by transformers."""
FLOAT32_ONLY = {"xlstm"}
"""Model types whose code in transformers mixes float32 with other types."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "tekken.json", "*.model", "*.tiktoken",
)  # fmt: skip
"""Files of which a model's tokenizer has one at least. Without any, transformers makes up an empty tokenizer."""
BAD_CONFIG = (
    AssertionError, AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError,
    ZeroDivisionError,
)  # fmt: skip
"""Exceptions of a model's constructor for an inconsistent config."""


def check_type(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """Raise ModelError for a type of the weights that transformers' code of the model does not compute in."""
    if config.model_type in FLOAT32_ONLY and dtype != torch.float32:
        raise ModelError(
            f"{folder / 'config.json'}: transformers computes model_type={config.model_type} with float32 weights "
            "alone. Set dtype: float32."
        )


def load_config(folder: Path, *, has_score: bool = False) -> PreTrainedConfig:
    """Return the model's configuration; of quantised weights, as they are once they are read back.

    `has_score`: of the model with a score head; its padding is that of the tokenizer, unless config.json says which.

    Raises: ModelError for a config.json that is malformed, an architecture that transformers does not have, and
    weights of a quantisation method that cannot be read back.
    """
    path = folder / "config.json"
    content = read_json_object(path)
    if content.get("transformers_weights") is not None:
        raise ModelError(
            f"{path}: transformers_weights={shorten(content['transformers_weights'])} is not followed: weights are "
            "read from model.safetensors, or the files of its index. Delete the key, or rename the file."
        )
    _check_architecture(path, content)
    _check_numbers(path, content)
    is_quantised = find_quantization(path) is not None
    try:
        with quiet_transformers():
            config: PreTrainedConfig = AutoConfig.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
            text = config.get_text_config()
            # A folder does not choose implementations: it could name code of the hub, which transformers would fetch.
            config._attn_implementation = config._experts_implementation = None
        _check_text_config(path, text)
    except ModelError:
        raise
    except Exception as error:  # each architecture checks its fields in its own way; the file is always the cause
        raise ModelError(
            f"{path}: transformers {transformers.__version__} cannot read it: {one_line(error)}. Correct it, or take "
            "the model's own."
        ) from error
    if is_quantised:
        config.dtype = torch.bfloat16
    for part in (config, text):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    if has_score:
        _describe_score(folder, config)
    return config


def _describe_score(folder: Path, config: PreTrainedConfig) -> None:
    """Set what transformers' classes for sequence classification read: one label, and the token that is padding."""
    config.num_labels = 1
    text = config.get_text_config()
    if getattr(text, "pad_token_id", None) is None:
        tokenizer = load_tokenizer(folder)
        text.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id


def _check_architecture(path: Path, content: Mapping[str, Any]) -> None:
    model_type = content.get("model_type")
    if isinstance(model_type, str) and model_type in NOT_TRAINED:
        raise ModelError(f"{path}: model_type={model_type} is not trained here: {NOT_TRAINED[model_type]}.")
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        return  # custom code in the folder is ignored
    raise ModelError(
        f"{path}: model_type={shorten(model_type)} is not an architecture of transformers "
        f"{transformers.__version__}. {_describe_code(content)}Architectures that transformers has itself work: Llama, "
        "Qwen, Mistral, Mixtral, Gemma and about 200 more. Take a release of the model that was converted to one of "
        "them, or a newer transformers that has it."
    )


def _describe_code(content: Mapping[str, Any]) -> str:
    if "auto_map" not in content:
        return ""
    return "It has code of its own (auto_map), and Surefoot never runs code of a model folder. "


def _check_numbers(path: Path, content: Mapping[str, Any]) -> None:
    """Raise ModelError for counts and sizes that no model has, before modules are created from them."""
    parts = {"": content}
    for name in ("text_config", "vision_config"):
        part = content.get(name) or {}
        if not isinstance(part, dict):
            raise ModelError(f"{path}: {name}={shorten(part)}; an object is needed. Correct it.")
        parts[f"{name}."] = part
    for prefix, part in parts.items():
        for name, value in part.items():
            most = _get_upper_bound(name)
            if isinstance(value, int | float) and not abs(value) <= most:
                raise ModelError(f"{path}: {prefix}{name}={shorten(value)} is beyond {most}. Correct it.")
            if name in SIZES and type(value) is int and value < 1:
                raise ModelError(f"{path}: {prefix}{name}={value}; a whole number above 0 is needed. Correct it.")
            is_used = name.endswith("dropout") and name != "classifier_dropout"  # null if there is no classifier
            if is_used and not (isinstance(value, int | float) and 0 <= value < 1):
                raise ModelError(
                    f"{path}: {prefix}{name}={shorten(value)}; a number from 0 to 1 is needed. Correct it."
                )


def _check_text_config(path: Path, text: PreTrainedConfig) -> None:
    """Raise ModelError for sizes that no decoder has, and a number of experts per token that a layer does not have."""
    for name in SIZES:
        value = getattr(text, name, 1)
        if type(value) is not int or value < 1:
            raise ModelError(f"{path}: {name}={shorten(value)}; a whole number above 0 is needed. Correct it.")
    num_experts = next((value for name in NUM_EXPERTS if type(value := getattr(text, name, None)) is int), 0)
    for name in EXPERTS_PER_TOKEN:
        value = getattr(text, name, None)
        if num_experts > 1 and type(value) is int and not 1 <= value <= num_experts:  # 1 may mean that there is none
            raise ModelError(
                f"{path}: {name}={value}, and each layer has {num_experts} experts; a number from 1 to {num_experts} "
                "is needed. Correct it."
            )


def _get_upper_bound(name: str) -> float:
    if "layers" in name or name == "depth":
        return MOST_LAYERS
    if "experts" in name:
        return MOST_EXPERTS
    is_size = name.startswith(("num_", "n_")) or name.endswith(("_size", "_dim", "_rank", "_token_id"))
    return MOST_SIZE if is_size else 1e30


def model_class(folder: Path, config: PreTrainedConfig, *, has_score: bool = False) -> type[PreTrainedModel]:
    """Return the class with a language-model head, or a score; for a vision-language model the full class.

    Raises: ModelError if transformers has none.
    """
    if has_score:
        scorer = score_class(config)
        if scorer is None:
            raise ModelError(
                f"{folder}: transformers {transformers.__version__} has no class for sequence classification of "
                f"model_type={config.model_type}, which would open the trained reward model. Train one of Qwen2, "
                "Qwen3, Qwen3-MoE, Qwen3.5, Llama, Mistral, Mixtral, DeepSeek-V3, gpt-oss or Gemma."
            )
        return scorer
    if config.is_encoder_decoder and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:  # Florence-2
        raise ModelError(f"{folder}: model_type={config.model_type} is an encoder-decoder, which is not trained.")
    # Some configs with a vision_config are in both mappings: the first would be the language model alone.
    for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(config) in mapping:
            entry = mapping[type(config)]
            stock: type[PreTrainedModel] = entry[0] if isinstance(entry, tuple) else entry
            return stock
    raise ModelError(f"{folder}: model_type={config.model_type} has no language model in transformers.")


def is_image_text_model(config: PreTrainedConfig) -> bool:
    """Return whether AutoModelForImageTextToText opens a model, and not AutoModelForCausalLM."""
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def meta_model(folder: Path, *, has_score: bool = False) -> PreTrainedModel:
    """Return the model of a folder without storage, or the one with a score: its modules, names and shapes.

    Raises: ModelError for a config that transformers cannot build.
    """
    config = load_config(folder, has_score=has_score)
    cls = model_class(folder, config, has_score=has_score)
    with quiet_transformers(), config_errors(folder), torch.device("meta"), catch_warnings():
        simplefilter("ignore")  # torch warns of initial values, which mean nothing here
        model = cls(config)
    if has_score and head_of(model) is None:
        raise ModelError(
            f"{folder}: transformers' {cls.__name__} computes its labels otherwise than by a linear layer `score` on "
            "the last token, so it is no reward model."
        )
    return model


def load_tokenizer(folder: Path, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer, with another chat template (a Jinja file) if one is given.

    Raises: ModelError if there is none or it cannot be read.
    """
    if (folder / "config.json").is_file():  # transformers reads it here, too
        load_config(folder)
    if not any(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)):
        raise ModelError(
            f"{folder} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there. Is a download cut short? Copy "
            "the tokenizer's files of the model's release into it."
        )
    check_tokenizer_file(folder)
    settings = folder / "tokenizer_config.json"
    content = read_json_object(settings) if settings.is_file() else {}
    try:
        with quiet_transformers():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
    except BaseException as error:  # tokenizers raises Exception itself for an unreadable file, or panics
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"{settings}: this tokenizer is not one of transformers {transformers.__version__}. "
                f"{_describe_code(content)}Take a release of the model with a tokenizer.json, or save one beside it."
            ) from error
        raise ModelError(
            f"{folder}: its tokenizer cannot be read (tokenizer.json, tokenizer_config.json): {one_line(error)}"
        ) from error
    longest = tokenizer.model_max_length
    if isinstance(longest, bool) or not isinstance(longest, int | float):
        raise ModelError(f"{settings}: model_max_length={shorten(longest)}; a number is needed. Correct it.")
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
    elif (of_processor := _read_processor_template(folder)) is not None:
        tokenizer.chat_template = of_processor
    return tokenizer


def load_tokenizer_of(adapter: Path | None, base: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of an adapter, or else of its base. Raises: ModelError."""
    is_there = adapter is not None and (adapter / "tokenizer_config.json").is_file()
    return load_tokenizer(adapter if adapter is not None and is_there else base)


def _read_processor_template(folder: Path) -> str | None:
    """Return the template that the files of a processor hold, in the order in which transformers takes them."""
    if not any((folder / name).is_file() for name in ("preprocessor_config.json", PROCESSOR_CONFIG)):
        return None
    for name in (PROCESSOR_CONFIG, PROCESSOR_TEMPLATE):
        if (folder / name).is_file() and read_json_object(folder / name).get("chat_template") is not None:
            return read_template(str(folder / name))
    return None


def drop_processor_templates(folder: Path) -> bool:
    """Remove the templates from the files of a processor, which then reads the tokenizer's chat_template.jinja.

    Returns: whether there was one.
    """
    had_template = _read_processor_template(folder) is not None
    (folder / PROCESSOR_TEMPLATE).unlink(missing_ok=True)
    if (folder / PROCESSOR_CONFIG).is_file():
        content = read_json_object(folder / PROCESSOR_CONFIG)
        if content.pop("chat_template", None) is not None:
            write_json(folder / PROCESSOR_CONFIG, content)
    return had_template


def read_template(path: str) -> str:
    """Return a chat template from a Jinja file, or from a processor's JSON file. Raises: ConfigError, ModelError."""
    if not path.endswith(".json"):
        text = read_text(Path(path), f"chat_template={path}")
        _check_syntax(text, path)
        return text
    template = read_json_object(Path(path)).get("chat_template")
    if isinstance(template, dict):
        template = template.get("default")
    if not isinstance(template, str):
        raise ModelError(f"{path}: chat_template={shorten(template)}; a text is needed.")
    return template


def _check_syntax(template: str, path: str) -> None:
    """Raise ModelError for a template that is not valid Jinja, with its line."""
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateSyntaxError as error:
        if "generation" not in str(error):  # transformers' own tag, which marks what the assistant writes
            raise ModelError(f"chat_template={path}:{error.lineno}: not valid Jinja: {error.message}") from error


def check_generation_config(folder: Path) -> None:
    """Raise ModelError for a generation_config.json that transformers cannot read, or whose end tokens are invalid."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return
    content = read_json_object(path)
    ends = content.get("eos_token_id")
    tokens = ends if isinstance(ends, list) else [ends] if ends is not None else []
    if any(type(token) is not int or abs(token) > MOST_SIZE for token in tokens):
        raise ModelError(f"{path}: eos_token_id={shorten(ends)}; a token's number or a list of them is needed.")
    try:
        with quiet_transformers():
            GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    except BAD_CONFIG as error:
        raise ModelError(f"{path}: cannot be read: {one_line(error)}. Correct it, or remove it.") from error


@contextmanager
def config_errors(folder: Path) -> Iterator[None]:
    """Turn errors of a model's constructor, for an inconsistent config or a missing package, into a ModelError."""
    try:
        yield
    except ModelError:
        raise
    except ImportError as error:
        raise ModelError(f"{folder}: a part of the model needs a package that is missing: {one_line(error)}") from error
    except BAD_CONFIG as error:
        raise ModelError(
            f"{folder / 'config.json'}: no model can be built from it: {one_line(error)}"
            f"{_name_settings(folder, error)}. Compare it with the config.json of the model's release."
        ) from error


def _name_settings(folder: Path, error: Exception) -> str:
    """Return which settings of config.json have the value that a KeyError names, to add to its message; else empty."""
    if not isinstance(error, KeyError):
        return ""

    def find(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
        for name, value in values.items():
            if isinstance(value, Mapping):
                yield from find(value, f"{prefix}{name}.")
            elif value == error.args[0]:
                yield f"{prefix}{name}"

    names = list(find(read_json_object(folder / "config.json")))
    return f", the value of {', '.join(names)}" if names else ""


@contextmanager
def weight_errors(place: Path) -> Iterator[None]:
    """Turn errors of the loader for broken or foreign weights into a ModelError with their first line."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"{place}: its weights cannot be loaded: {one_line(error)}. Is the folder complete, and its config.json "
            "its own?"
        ) from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Disable progress bars and notes about LoRA parameters, which the checkpoint correctly lacks."""
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
