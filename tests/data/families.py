"""Model families as they meet a chat template: special tokens, kind of tokenizer, documented format."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from surefoot.data.conversation import Conversation, MessageForm

HERE = Path(__file__).parent / "templates"
WORDS = ["system user assistant tool ipython You are a helpful assistant. Count one two three four. <think> </think>"]
CHATML = re.compile(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", re.DOTALL)
LLAMA = re.compile(r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n(.*?<\|eot_id\|>)", re.DOTALL)
MIXTRAL_ANSWER = re.compile(r" \[/INST\]( .*?</s>)", re.DOTALL)
MISTRAL_ANSWER = re.compile(r"\[/(?:INST|TOOL_RESULTS)\]([^\[]*?</s>|\[TOOL_CALLS\].*?</s>)", re.DOTALL)
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
GLM_ANSWER = re.compile(r"<\|assistant\|>(.*?<\|(?:user|observation)\|>)", re.DOTALL)
GPT_OSS_ANSWER = re.compile(
    r"<\|start\|>assistant(.*?(?:<\|return\|>|<\|call\|>|<\|end\|>(?=<\|start\|>user)))", re.DOTALL
)
GEMMA4_ANSWER = re.compile(
    r"(?:<\|turn>model\n|<tool_response\|>(?!<\|tool_response>))(.*?(?:<turn\|>|<\|tool_response>))", re.DOTALL
)
COHERE_ANSWER = re.compile(
    r"<\|CHATBOT_TOKEN\|>(?:<\|START_RESPONSE\|>)?(.*?<\|END_RESPONSE\|><\|END_OF_TURN_TOKEN\|>)", re.DOTALL
)
R7B_ANSWER = re.compile(
    r"<\|CHATBOT_TOKEN\|>(?:<\|START_THINKING\|>(?:<\|END_THINKING\|>)?)?(.*?<\|END_OF_TURN_TOKEN\|>)", re.DOTALL
)
FUNCTIONARY_ANSWER = re.compile(r"assistant<\|end_header_id\|>\n\n(?:>>>)?(.*?<\|eot_id\|>)", re.DOTALL)
DEEPSEEK_ANSWER = re.compile(
    r"(?:<｜Assistant｜>(?:</think>)?|<｜tool▁outputs?▁end｜>(?!<))(.*?<｜end▁of▁sentence｜>)", re.DOTALL
)
SMOLLM3_ANSWER = re.compile(r"<\|im_start\|>assistant\n(?:<think>\n\n</think>\n)?(.*?<\|im_end\|>)", re.DOTALL)
IDEFICS_ANSWER = re.compile(r"Assistant:(.*?<end_of_utterance>)", re.DOTALL)
LLAVA_ANSWER = re.compile(r"\[/INST\](.*?</s>)", re.DOTALL)


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
    prompted: str = ""
    """End of the generation prompt that `answer` finds as a part of the answer."""
    form: MessageForm = field(default_factory=MessageForm)
    """Form in which the template reads messages."""
    without: tuple[str, ...] = ()
    """Shapes of conversations that the template does not support."""
    leads: tuple[str, ...] = ("", " ", EMPTY_THOUGHT)
    """What the template may write between the beginning of a turn and its words."""
    named_ends: tuple[str, ...] = ()
    """Ends of answers in the model's generation_config.json."""
    unwritten: Mapping[bool, str] = field(default_factory=dict)
    """End of the last turn that the template does not write, by whether it is a call."""
    middle_end: str = ""
    """End of an answer before other turns, where it is another one than that of the last."""
    tools_in_system: bool = False
    """Whether the template shows no tools, so the system message describes them."""

    def expected_text(self, conversation: Conversation, tokenizer: PreTrainedTokenizerFast) -> str:
        """What transformers makes of the conversation, and the end of the last turn where that lacks it."""
        messages = [message.as_template_input(self.form) for message in conversation.messages]
        tools = list(conversation.tools) or None
        if self.form.call_content is None:  # apply_chat_template removes keys without a value
            variables = {**tokenizer.special_tokens_map, **self.kwargs}
            template = tokenizer.get_chat_template()
            text: str = render_jinja_template([messages], tools=tools, chat_template=template, **variables)[0][0]
        else:
            text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **self.kwargs)
        return text + self.unwritten.get(bool(conversation.messages[-1].tool_calls), "")

    @property
    def ends(self) -> tuple[str, ...]:
        """Ends of an answer."""
        return (self.unwritten.get(False, self.eos), self.middle_end or self.eos)


QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
           "[TOOL_RESULTS]", "[/TOOL_RESULTS]")  # fmt: skip
GLM = ("<|endoftext|>", "<|user|>", "<|observation|>", "<|assistant|>", "<|system|>", "[gMASK]", "<sop>")
GPT_OSS = ("<|return|>", "<|call|>", "<|end|>", "<|start|>", "<|channel|>", "<|message|>", "<|endoftext|>")
GEMMA4 = ("<bos>", "<eos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>",
          "<|tool_response>", "<tool_response|>", '<|"|>', "<|channel>", "<channel|>")  # fmt: skip
COHERE = ("<BOS_TOKEN>", *(f"<|{name}|>" for name in (
    "END_OF_TURN_TOKEN", "START_OF_TURN_TOKEN", "SYSTEM_TOKEN", "USER_TOKEN", "CHATBOT_TOKEN", "START_RESPONSE",
    "END_RESPONSE", "START_ACTION", "END_ACTION", "START_THINKING", "END_THINKING", "START_TOOL_RESULT",
    "END_TOOL_RESULT")))  # fmt: skip
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", *(
    f"<｜tool▁{name}｜>" for name in (
        "calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep", "outputs▁begin", "outputs▁end", "output▁begin",
        "output▁end")))  # fmt: skip
PARTS = MessageForm(content_is_parts=True)
FAMILIES = {
    "qwen1.5": Family("qwen1.5", None, "<|im_end|>", QWEN, CHATML),
    "smollm2": Family("smollm2", "<|im_start|>", "<|im_end|>", QWEN, CHATML),
    "qwen2.5": Family("qwen2.5", None, "<|im_end|>", QWEN, CHATML, True, True),
    "qwen3": Family("qwen3", None, "<|im_end|>", QWEN, CHATML, True, True),
    "qwen3-nothink": Family(
        "qwen3", None, "<|im_end|>", QWEN, CHATML, True, True,
        kwargs={"enable_thinking": False}, prompted=EMPTY_THOUGHT,
    ),
    "mixtral": Family("mixtral", "<s>", "</s>", ("<s>", "</s>"), MIXTRAL_ANSWER, pieces=True),
    "mistral": Family(
        "mistral", "<s>", "</s>", MISTRAL, MISTRAL_ANSWER,
        True, pieces=True,
    ),
    "llama3": Family("llama3", "<|begin_of_text|>", "<|eot_id|>", LLAMA3, LLAMA, trims=True),
    "llama3.1": Family(
        "llama3.1", "<|begin_of_text|>", "<|eot_id|>", LLAMA3, LLAMA, True, trims=True, without=("parallel calls",),
    ),
    "qwen3.5": Family(
        "qwen3.5", None, "<|im_end|>", QWEN, CHATML, True, True, trims=True, leads=("", "\n</think>\n\n"),
        prompted="<think>\n",
    ),
    "glm4": Family(
        "glm4", None, "<|endoftext|>", GLM, GLM_ANSWER, True, True, trims=True, leads=("\n<think></think>\n",),
        named_ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
        unwritten={False: "<|user|>", True: "<|observation|>"}, middle_end="<|user|>",
    ),
    "gpt-oss": Family(
        "gptoss", None, "<|return|>", GPT_OSS, GPT_OSS_ANSWER, True, leads=("<|channel|>final<|message|>",),
        without=("parallel calls",), middle_end="<|end|>",
    ),
    "gemma4": Family(
        "gemma4", "<bos>", "<turn|>", GEMMA4, GEMMA4_ANSWER, True, trims=True,
        named_ends=("<eos>", "<turn|>", "<|tool_response>"),
    ),
    "cohere2": Family(
        "cohere2", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", COHERE, COHERE_ANSWER,
        middle_end="<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
    ),
    "command-r7b": Family(
        "command-r7b", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", COHERE, R7B_ANSWER, True,
        leads=("<|START_RESPONSE|>",), middle_end="<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
    ),
    "hermes": Family("hermes", "<|endoftext|>", "<|im_end|>", QWEN, CHATML, True),
    "functionary": Family(
        "functionary", "<|begin_of_text|>", "<|eot_id|>", LLAMA3, FUNCTIONARY_ANSWER, True, True,
        form=MessageForm(arguments_are_text=True), leads=("all\n", ""),
    ),
    "deepseek-v3.1": Family(
        "deepseek-v3.1", DEEPSEEK[0], DEEPSEEK[1], DEEPSEEK, DEEPSEEK_ANSWER, True, True, tools_in_system=True,
    ),
    "r1-distill": Family(
        "r1-distill", DEEPSEEK[0], DEEPSEEK[1], DEEPSEEK, DEEPSEEK_ANSWER, True,
        form=MessageForm(call_content=None, arguments_are_text=True), tools_in_system=True,
    ),
    "smollm3": Family("smollm3", None, "<|im_end|>", QWEN, SMOLLM3_ANSWER, tools_in_system=True),
    "idefics3": Family(
        "idefics3", "<|begin_of_text|>", "<end_of_utterance>", ("<|begin_of_text|>", "<end_of_utterance>", "<image>"),
        IDEFICS_ANSWER, form=PARTS,
    ),
    "llava-next": Family("llava-next", "<s>", "</s>", ("<s>", "</s>"), LLAVA_ANSWER, form=PARTS, pieces=True),
}  # fmt: skip

_FOLDERS = TemporaryDirectory()


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
    if family.named_ends:
        fast.name_or_path = str(Path(_FOLDERS.name, name))
        ends = fast.convert_tokens_to_ids(list(family.named_ends))
        GenerationConfig(eos_token_id=ends).save_pretrained(fast.name_or_path)
    fast.chat_template = (HERE / f"{family.template}.jinja").read_text("utf-8").removesuffix("\n")
    return fast


MODELS = {
    "qwen1.5": "Qwen1.5, Qwen2",
    "smollm2": "SmolLM2",
    "qwen2.5": "Qwen2.5",
    "qwen3": "Qwen3",
    "mixtral": "Mixtral",
    "mistral": "Mistral 7B v0.3, Mistral Nemo",
    "llama3": "Llama 3",
    "llama3.1": "Llama 3.1 to 3.3",
    "qwen3.5": "Qwen3.5",
    "glm4": "GLM-4.5 to 4.7",
    "gpt-oss": "gpt-oss",
    "gemma4": "Gemma 4",
    "cohere2": "Cohere 2, Tiny Aya",
    "command-r7b": "Command-R7B",
    "hermes": "Hermes 2 Pro, Hermes 3",
    "functionary": "Functionary v3.2",
    "deepseek-v3.1": "DeepSeek V3.1",
    "r1-distill": "DeepSeek-R1-Distill",
    "smollm3": "SmolLM3",
    "idefics3": "Idefics3",
    "llava-next": "LLaVA-Next",
}
"""Released models of each family, as the documentation names them."""
