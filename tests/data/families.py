"""Model families as they meet a chat template: special tokens, kind of tokenizer, documented format."""

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent / "templates"
WORDS = ["system user assistant tool ipython You are a helpful assistant. Count one two three four. <think> </think>"]
CHATML = re.compile(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", re.DOTALL)
LLAMA = re.compile(r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n(.*?<\|eot_id\|>)", re.DOTALL)
MIXTRAL_ANSWER = re.compile(r" \[/INST\]( .*?</s>)", re.DOTALL)
MISTRAL_ANSWER = re.compile(r"\[/(?:INST|TOOL_RESULTS)\]([^\[]*?</s>|\[TOOL_CALLS\].*?</s>)", re.DOTALL)
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class Family:
    """`answer` finds what the assistant says in a rendered text, in the family's documented format."""

    template: str
    bos: str | None
    eos: str
    specials: tuple[str, ...]
    answer: re.Pattern[str]
    has_tools: bool = False
    has_parallel_calls: bool = False
    trims: bool = False
    pieces: bool = False
    """A SentencePiece-like tokenizer, which marks the beginning of words; else byte-level BPE."""
    kwargs: dict[str, Any] = field(default_factory=dict)


QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
           "[TOOL_RESULTS]", "[/TOOL_RESULTS]")  # fmt: skip
FAMILIES = {
    "qwen1.5": Family("qwen1.5", None, "<|im_end|>", QWEN, CHATML),
    "smollm2": Family("smollm2", "<|im_start|>", "<|im_end|>", QWEN, CHATML),
    "qwen2.5": Family("qwen2.5", None, "<|im_end|>", QWEN, CHATML, True, True),
    "qwen3": Family("qwen3", None, "<|im_end|>", QWEN, CHATML, True, True),
    "qwen3-nothink": Family("qwen3", None, "<|im_end|>", QWEN, CHATML, True, True, kwargs={"enable_thinking": False}),
    "mixtral": Family("mixtral", "<s>", "</s>", ("<s>", "</s>"), MIXTRAL_ANSWER, pieces=True),
    "mistral": Family(
        "mistral", "<s>", "</s>", MISTRAL, MISTRAL_ANSWER,
        True, pieces=True,
    ),
    "llama3": Family("llama3", "<|begin_of_text|>", "<|eot_id|>", LLAMA3, LLAMA, trims=True),
    "llama3.1": Family("llama3.1", "<|begin_of_text|>", "<|eot_id|>", LLAMA3, LLAMA, True, trims=True),
}  # fmt: skip


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A small tokenizer of the family's kind, with its special tokens and chat template."""
    family = FAMILIES[name]
    if family.pieces:
        words = ["<unk>", *family.specials, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
        vocabulary = {word: number for number, word in enumerate(words)}
        backend = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        backend.add_special_tokens([AddedToken(token, special=True) for token in family.specials])
    else:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=list(family.specials),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(WORDS, trainer)
        if name.startswith("qwen3"):  # known to Qwen3 as single tokens that are not special
            backend.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=family.bos,
        eos_token=family.eos,
        additional_special_tokens=[token for token in family.specials if token not in (family.bos, family.eos)],
    )
    fast.chat_template = (HERE / f"{family.template}.jinja").read_text("utf-8").removesuffix("\n")
    return fast
