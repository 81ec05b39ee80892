"""How a chat template ends the assistant's turns, found in renderings of short conversations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import Any

from surefoot.data.conversation import Message
from surefoot.data.template_source import PLAIN_CALL, PLAIN_TOOL, PLAIN_TURNS, Template

WAITS_FOR_TOOL = "<|eom_id|>"
"""Token with which Llama 3.1 ends a turn that waits for a tool."""


@dataclass(frozen=True)
class TurnEnds:
    """The ends of turns. `is_call` below: whether the turn calls tools."""

    written: tuple[str, ...]
    """Texts that end a turn: one special token, or several without anything between them."""
    unwritten: Mapping[bool, str]
    """The end of a turn, by `is_call`, where the template writes it only when another message follows."""
    last: tuple[str, ...]
    """Tokens that end the last turn, at which a model stops."""
    header: str
    """The generation prompt, which the template writes before a plain answer."""

    def find_first(self, text: str, begin: int, end: int) -> int:
        """Return where the first end of a turn within `[begin, end)` ends; 0 without one."""
        matches = [(at, at + len(token)) for token in self.written if (at := text.find(token, begin, end)) >= 0]
        first = min((at for at, _ in matches), default=0)
        return max((stop for at, stop in matches if at == first), default=0)

    def find_last(self, text: str, begin: int, end: int) -> int:
        """Return where the last end of a turn within `[begin, end)` ends, less ends that directly follow another."""
        last = 0
        while stop := self.find_first(text, begin, end):
            if not last or text[last:stop].strip() not in self.written:
                last = stop
            begin = stop
        return last


def find_turn_ends(template: Template) -> TurnEnds:
    """Return the ends of turns of a template. Raises: DataError if it cannot be used."""
    source = template.source
    named = (*source.generation_ends, source.eos)
    middle, last = _end_plain_turns(template, named)
    unwritten: dict[bool, str] = {}
    if not last:
        unwritten[False] = _find_unwritten_end(template, PLAIN_TURNS[:3], (), "A1")
    call = _end_of_last_call(template, {middle, last, *named})
    if source.generation_ends and call not in {middle, last, *named} and _ends_each_call(template, call):
        call = ""  # the end of the turn is one that the settings name, which the template may leave out
    if not call:
        unwritten[True] = _find_unwritten_end(template, PLAIN_CALL[:3], (PLAIN_TOOL,), "V1")
    unwritten = {is_call: end for is_call, end in unwritten.items() if end.strip() in named}
    controls = set(template.controls)
    written = [end for end in (middle, last, call) if end]
    written += [end for end in (*named, WAITS_FOR_TOOL) if end in controls]
    stops = [template.control.findall(end)[-1] for end in (last, call) if end]
    if source.generation_ends:  # they tell whether the end of a call ends the turn, or only this call
        stops = [end for end in stops if end != call or end in named]
    stops += [end for end in (source.eos, WAITS_FOR_TOOL) if end in controls]
    stops += map(str.strip, unwritten.values())
    return TurnEnds(tuple(dict.fromkeys(written)), unwritten, tuple(dict.fromkeys(stops)), _find_header(template))


def _end_plain_turns(template: Template, named: Sequence[str]) -> tuple[str, str]:
    """Return what ends an answer before other turns, and the last one; empty where nothing does.

    It is all up to a token that the model's settings name, if that follows both answers, and else the special tokens
    that follow both: further ones begin the next turn, or end the text.
    """
    text = render_plain_turns(template)
    tails = [text[text.find(answer) + len(answer) :] for answer in ("A1", "A2") if answer in text]
    tails = [tail.partition("Q2")[0].lstrip() for tail in tails]
    closings = [_cut_at_end(template, tail, named) for tail in tails]
    if closings and closings[0] and len(set(closings)) == 1:
        return closings[0], closings[-1]
    runs = [_find_run(template, tail) for tail in tails]
    if len(runs) < 2:
        return "", "".join(runs[0][:1]) if runs else ""
    middle, last = runs
    shared = len(commonprefix([middle, last])) or 1  # noqa: RUF071 - these are no paths
    return "".join(middle[:shared] if last else ()), "".join(last[:shared])


def _cut_at_end(template: Template, tail: str, named: Sequence[str]) -> str:
    """Return a text from its first special token to the first that is an end; empty if there is none."""
    matches = list(template.control.finditer(tail))
    end = next((match.end() for match in matches if match.group() in named), 0)
    return tail[matches[0].start() : end] if end else ""


def render_plain_turns(template: Template) -> str:
    """Return the rendering of plain turns, or of the first two; empty if the template refuses both."""
    return template.try_render(PLAIN_TURNS, ()) or template.try_render(PLAIN_TURNS[:2], ()) or ""


def _find_header(template: Template) -> str:
    prompt, bare = (template.try_render(PLAIN_TURNS[:1], (), add_generation_prompt=adds) for adds in (True, False))
    header = prompt.removeprefix(bare) if prompt and bare else ""
    return header if template.control.search(header) else ""


def _find_run(template: Template, text: str) -> list[str]:
    """Return the special tokens with which a text begins, up to the first thing between them."""
    run: list[str] = []
    while match := template.control.match(text, sum(map(len, run))):
        run.append(match.group())
    return run


def _end_of_last_call(template: Template, turn_ends: set[str]) -> str:
    """Return what ends a call when nothing follows: an end of a turn, or else the last special token."""
    text = template.try_render(PLAIN_CALL[:2], (PLAIN_TOOL,)) or ""
    tail = text[text.rfind("V1") :].rstrip() if "V1" in text else ""
    tokens: list[str] = template.control.findall(tail)
    if not tokens or not tail.endswith(tokens[-1]):
        return ""
    return next((token for token in tokens if token in turn_ends), tokens[-1])


def _ends_each_call(template: Template, token: str) -> bool:
    """Return whether the template writes a token between two calls of one turn."""
    (call,) = PLAIN_CALL[1].tool_calls
    second = {**call, "id": "call00002", "function": {**call["function"], "arguments": {"p1": "V2"}}}
    turn = replace(PLAIN_CALL[1], tool_calls=(call, second))
    text = template.try_render((PLAIN_CALL[0], turn), (PLAIN_TOOL,)) or ""
    return token in text[text.find("V1") : text.find("V2")]


def _find_unwritten_end(
    template: Template, messages: Sequence[Message], tools: Sequence[dict[str, Any]], word: str
) -> str:
    """Return the special token, and white space before it, with which the text goes on for the last of the messages.

    The message before it ends with `word`, and may begin in another way when it is the last (GLM-5.1).
    """
    text, before = template.try_render(messages, tools), template.try_render(messages[:-1], tools)
    if text is None or before is None or word not in before or word not in text:
        return ""
    rest, tail = (each[each.rfind(word) + len(word) :] for each in (text, before))
    match = template.control.search(rest, len(tail))
    return rest[len(tail) : match.end()] if rest.startswith(tail) and match is not None else ""
