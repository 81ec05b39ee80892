"""The command `surefoot chat`: a conversation with a model, whose answers appear as they are written."""

from collections.abc import Mapping
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surefoot.data.render import find_shared_system, tokenize_prompts
from surefoot.errors import InputError
from surefoot.inference.load import ModelFiles
from surefoot.models.generate import complete
from surefoot.system.console import say
from surefoot.system.json_files import read_objects
from surefoot.training.export import read_run_config
from surefoot.training.run_summary import SAMPLES, is_sample

COMMANDS = "/clear begins anew, /system TEXT sets the system text and begins anew, /exit or Ctrl-D ends"


def find_system(files: ModelFiles, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the system message to begin with: that of the run that trained the model."""
    return find_trained_system(files.run, tokenizer) if files.run is not None else None


def find_trained_system(run: Path, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the system message of a run: that of its config, or the one that all samples of samples.jsonl have."""
    config = read_run_config(run)
    if config.system is not None:
        return config.system
    lines = [line for _, line in read_objects(run / SAMPLES) if line is not None and is_sample(line)]
    texts = ["".join(text for text, _ in line["parts"]) for line in lines]
    today = date.fromisoformat(config.chat_template_date)
    return find_shared_system(texts, tokenizer, config.template_variables, today)


class Chat:
    """A conversation, turn by turn."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        system: str | None,
        *,
        max_new_tokens: int,
        temperature: float,
        template_variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._model, self._tokenizer, self._template_variables = model, tokenizer, template_variables
        self._max_new_tokens, self._temperature = max_new_tokens, temperature
        self._begin(system)

    def _begin(self, system: str | None) -> None:
        self._system = system
        self._turns = [{"role": "system", "content": system}] if system else []

    def answer(self, text: str, *, shows: bool = False) -> str:
        """Return the model's answer to the next message; with `shows`, print it as it is written.

        Raises: InputError if no answer fits into the model's context, or the template refuses the conversation.
        """
        turns = [*self._turns, {"role": "user", "content": text}]
        (reply,) = complete(
            self._model,
            self._tokenizer,
            tokenize_prompts(self._tokenizer, [turns], self._template_variables),
            max_new_tokens=self._max_new_tokens,
            temperature=self._temperature,
            on_text=(lambda piece: print(piece, end="", flush=True)) if shows else None,
        )
        self._turns = [*turns, {"role": "assistant", "content": reply}]
        return reply

    def run(self) -> None:
        """Talk to the user of the terminal until they end it. A message that cannot be answered is left out."""
        say(f"Type a message. {COMMANDS}.")
        while True:
            try:
                text = input("> ").strip()
            except EOFError:
                return
            command, _, rest = text.partition(" ")
            if command == "/exit":
                return
            if command == "/clear":
                self._begin(self._system)
            elif command == "/system":
                self._begin(rest)
            elif command.startswith("/"):
                say(f"{command} is not known. {COMMANDS}.")
            elif text:
                try:
                    self.answer(text, shows=True)
                    print()
                except InputError as error:
                    say(f"error: {error}")
