"""Catalogue pages for problems in the data (SF5..)."""

from surefoot.findings.page import Page

PAGES = {
    "SF501": Page(
        "error",
        "no token of any sample is trained",
        "Every label of the data is masked.",
        "`surefoot data run.yaml` shows what is trained; check train_on, roles and the chat template.",
        ("meta-llama/llama-cookbook#133", "huggingface/trl#6668"),
    ),
    "SF502": Page(
        "warning",
        "two end-of-turn tokens",
        "A rendered turn ends with two of them.",
        "The data hold one already: take it out of the texts.",
    ),
    "SF503": Page(
        "warning",
        "two beginning-of-sequence tokens",
        "A rendered sample begins with two of them.",
        "The template writes one and the data hold one: take it out of the texts.",
    ),
    "SF504": Page(
        "warning",
        "the answer stands in the prompt",
        "The words that are trained are also in the turn before.",
        "Check the columns: an answer was probably mapped to the prompt as well.",
    ),
    "SF505": Page(
        "error",
        "the tokenizer does not belong to the model",
        "Ids of the data are outside the model's embedding.",
        "Use the model's own tokenizer.",
    ),
    "SF506": Page(
        "warning",
        "many rows are truncated",
        "More than 5 % of the rows are longer than max_length.",
        "Raise max_length, or drop these rows with truncation: drop.",
    ),
    "SF507": Page(
        "warning",
        "held-out samples are also trained on",
        "Rendered samples of the evaluation data are equal to trained ones.",
        "Remove them from one of the two.",
    ),
    "SF508": Page(
        "info",
        "texts of the data look like special tokens",
        "A text holds the name of a special token; it is tokenised as plain text.",
        "Nothing, unless they are meant as control tokens: then write the conversation as messages.",
    ),
    "SF509": Page(
        "warning",
        "reasoning is not shown by the chat template",
        "Rows carry reasoning, and the template renders nothing of it, or (as Qwen3's) that of the last turn alone, so "
        "that earlier answers are trained as if there had been none.",
        "Use a template that shows it, or drop the column; for earlier turns train_on: last_assistant, or a row for "
        "each turn.",
        ("modelscope/ms-swift#9829",),
    ),
    "SF510": Page(
        "warning",
        "no end of an answer is trained",
        "In other trainers: of all tokens trained in the first fifty steps none is one at which the model ends its "
        "answers (eos_token_id of generation_config.json, else of config.json). Surefoot's own masks hold the "
        "end-of-turn token.",
        "Generations will not end. Let the template or the data write the end token, and do not mask it: a collator "
        "masks it with the padding where pad_token is eos_token.",
        ("unslothai/unsloth#416", "huggingface/trl#1623"),
    ),
    "SF511": Page(
        "warning",
        "empty answers are trained",
        "The last answer of some rows has no words, no thoughts and no calls: all that is trained of it is its end.",
        "Take these rows out, or check that the column of the answers is the right one.",
    ),
}
