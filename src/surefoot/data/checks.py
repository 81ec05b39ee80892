"""Findings about prepared data that can be trained on but is suspicious. Reads flags and counts only."""

import numpy as np
from numpy.typing import NDArray

from surefoot.data.dataset import Dataset
from surefoot.data.oddities import Oddity
from surefoot.data.pairs import CHOSEN
from surefoot.findings import Finding

LEAK_SHARE = 0.05
"""Share of answers contained in their prompts that is still normal, as in extraction tasks."""
TRUNCATED_SHARE = 0.05
NO_THOUGHT_SHARE = 0.5
"""Share of answers without a thought that is still normal: data are mixed so that a model may do both."""

FLAG_FINDINGS: dict[Oddity, tuple[str, float, str, str]] = {
    Oddity.ENDS_TWICE: (
        "SF502", 0.0, "an answer is followed by two end-of-turn tokens, or ends with the text of one",
        "Remove the end-of-turn text from the data: the chat template writes it.",
    ),
    Oddity.BEGINS_TWICE: (
        "SF503", 0.0, "a sample begins with two beginning-of-sequence tokens",
        "Remove the token's text from the prompts, or from the chat template.",
    ),
    Oddity.ANSWER_IN_PROMPT: (
        "SF504", LEAK_SHARE, "the messages before the answer contain all of it word for word",
        "Check that the prompt column does not contain the solution; map other columns with `columns`.",
    ),
    Oddity.LOOKALIKE: (
        "SF508", 0.0, "texts of the data look like special tokens; they are kept as text",
        "Nothing, if they are meant as text. If the data are already rendered, set parse_special_tokens: true.",
    ),
    Oddity.LOST_REASONING: (
        "SF509", 0.0, "the chat template does not write the reasoning of the last turn as a thought: it leaves it out, "
        "writes an empty thought before it, or takes it for the answer",
        "Move the thoughts from the content into reasoning_content, or the other way round: the template writes one of "
        "the two. If it writes neither, give another one with chat_template.",
    ),
    Oddity.DROPPED_REASONING: (
        "SF509", 0.0, "the chat template shows no reasoning of earlier turns, so their answers are trained without it",
        "Where the model is to think before each answer: train_on: last_assistant, or a row for each turn.",
    ),
    Oddity.EMPTY_ANSWER: (
        "SF511", 0.0, "the last answer is empty, so that the model is taught to say nothing",
        "Take these rows out, or check that the column of the answers is the right one.",
    ),
    Oddity.NO_THOUGHT: (
        "SF512", NO_THOUGHT_SHARE, "the model thinks before it answers, and these answers teach it not to",
        "Do nothing if that is meant. Otherwise write thoughts into reasoning_content, or the content before </think>.",
    ),
}  # fmt: skip
"""Map from oddity to (code, share of samples that is still healthy, cause, fix)."""


def data_findings(train: Dataset, held_out: Dataset | None = None) -> list[Finding]:
    """Return the findings of a prepared dataset. A healthy dataset has none."""
    findings = [*_find_unusable(train), *_check_flags(train), *_check_counts(train), *_check_labels(train)]
    if held_out is not None:
        findings += _check_overlap(train, held_out)
    return findings


def _find_unusable(dataset: Dataset) -> list[Finding]:
    """Return the findings that make training impossible."""
    findings = []
    counts, vocab_size = dataset.counts(), dataset.options.vocab_size
    are_samples = any(len(dataset.shard(number)) for number in range(len(dataset.chunks)))
    if counts.trained + counts.truncated == 0 and are_samples:  # if all rows are bad, their reasons suffice
        first = next(dataset.skipped(), ("none", "the dataset holds no rows"))
        evidence = {"rows": counts.read, "skipped": counts.skipped, "first": f"{first[0]}: {first[1]}"}
        fix = (
            "Correct the rows, raise max_length, or give another chat_template, as the reasons of the skipped rows say."
        )
        findings.append(Finding("SF501", "no token of any sample is trained", evidence, fix))
    max_id = max((dataset.shard(number).max_id for number in range(len(dataset.chunks))), default=-1)
    if vocab_size is not None and max_id >= vocab_size:
        evidence = {"largest_token_id": max_id, "vocabulary_of_the_model": vocab_size}
        fix = "Use the tokenizer that belongs to the model, or resize the model's embeddings."
        findings.append(Finding("SF505", f"the data hold token id {max_id}; the model has {vocab_size}", evidence, fix))
    return findings


def digests(dataset: Dataset) -> NDArray[np.uint64]:
    """Return the sorted 64-bit digests of all samples in use; 8 bytes a sample."""
    parts = [dataset.shard(n).digests[np.unique(dataset.chunk_samples(n).indices)] for n in range(len(dataset.chunks))]
    return np.sort(np.concatenate([np.zeros(0, np.uint64), *parts]))


def _check_flags(dataset: Dataset) -> list[Finding]:
    counts = dict.fromkeys(FLAG_FINDINGS, 0)
    places: dict[int, list[str]] = {flag: [] for flag in FLAG_FINDINGS}
    samples = 0
    for number in range(len(dataset.chunks)):
        part = dataset.chunk_samples(number)
        flags = dataset.shard(number).flags[part.indices]
        samples += len(flags)
        if not flags.any():
            continue
        for flag in FLAG_FINDINGS:
            hits = np.flatnonzero(flags & flag)
            counts[flag] += len(hits)
            room = 3 - len(places[flag])
            places[flag] += [dataset.sample(number, int(part.samples[hit])).place for hit in hits[:room]]
    findings = []
    for flag, (code, healthy_share, cause, fix) in FLAG_FINDINGS.items():
        if flag == Oddity.DROPPED_REASONING and dataset.options.train_on == "last_assistant":
            continue  # earlier answers are not trained
        if counts[flag] > healthy_share * samples:
            evidence = {"rows": counts[flag], "of": samples, "first": ", ".join(places[flag])}
            findings.append(Finding(code, f"{cause} ({counts[flag]} of {samples} rows)", evidence, fix))
    return findings


def _check_counts(dataset: Dataset) -> list[Finding]:
    counts = dataset.counts()
    if counts.truncated <= TRUNCATED_SHARE * counts.read:
        return []
    limit = dataset.options.limit_name
    longest = max(int(dataset.shard(number).lengths.max(initial=0)) for number in range(len(dataset.chunks)))
    evidence = {
        "truncated": counts.truncated,
        "of": counts.read,
        "inside_a_trained_turn": counts.cut_inside,
        limit: dataset.options.max_length,
        "longest": longest,
    }
    share = counts.truncated / counts.read
    fix = f"Raise {limit} (the longest sample has {longest} tokens), or leave long rows out with truncation: drop."
    return [Finding("SF506", f"{share:.0%} of the rows are cut to {limit}", evidence, fix)]


def count_labels(dataset: Dataset) -> tuple[int, int] | None:
    """Return the numbers of desired answers and of others; None if rows have no labels."""
    if not any(source.spec.labels for source in dataset.sources):
        return None
    desired = total = 0
    for number in range(len(dataset.chunks)):
        parts, indices = dataset.shard(number).parts, dataset.chunk_samples(number).indices
        desired += int((parts[indices, CHOSEN] > 0).sum()) if parts is not None else 0
        total += len(indices)
    return desired, total - desired


def _check_labels(dataset: Dataset) -> list[Finding]:
    counts = count_labels(dataset)
    if counts is None or all(counts) or not any(counts):
        return []
    desired, others = counts
    kind = "desired" if desired else "not desired"
    fix = "Check the column of the labels, and add answers with the other label."
    return [
        Finding("SF513", f"all {desired + others} answers are {kind}", {"desired": desired, "not_desired": others}, fix)
    ]


def _check_overlap(train: Dataset, held_out: Dataset) -> list[Finding]:
    train_digests, held_out_digests = digests(train), digests(held_out)
    shared = int(np.isin(held_out_digests, train_digests).sum())
    if not shared:
        return []
    evidence = {"shared": shared, "held_out": len(held_out_digests), "training": len(train_digests)}
    fix = "Remove them from one side, or hold out with eval_fraction, which keeps equal samples on one side."
    return [
        Finding("SF507", f"{shared} of {len(held_out_digests)} held-out samples are also trained on", evidence, fix)
    ]
