"""Catalogue pages for problems in the data (SF5..)."""

from surefoot.findings.page import Page

PAGES = {
    "SF501": Page(
        "no token of any sample is trained",
        "Every label of the data is masked.",
        "`surefoot data run.yaml` shows what is trained. Check train_on, roles and the chat template.",
        ("meta-llama/llama-cookbook#133", "huggingface/trl#6668"),
        severity="error",
    ),
    "SF502": Page(
        "two end-of-turn tokens",
        "A rendered turn ends with two of them.",
        "Remove the token from the texts: the chat template writes it.",
    ),
    "SF503": Page(
        "two beginning-of-sequence tokens",
        "A rendered sample begins with two of them.",
        "Remove the token from the texts: the chat template writes it.",
    ),
    "SF504": Page(
        "the answer is already in the prompt",
        "The words that are trained are also in the turn before.",
        "Check the columns: an answer was probably mapped to the prompt as well.",
    ),
    "SF505": Page(
        "the tokenizer does not belong to the model",
        "Token ids of the data are outside the model's embedding.",
        "Use the model's own tokenizer.",
        severity="error",
    ),
    "SF506": Page(
        "many rows are truncated",
        "More than 5 % of the rows are longer than max_length.",
        "Raise max_length, or drop these rows with truncation: drop.",
    ),
    "SF507": Page(
        "held-out samples are also trained on",
        "Rendered samples of the evaluation data are equal to trained ones.",
        "Remove them from one of the two.",
    ),
    "SF508": Page(
        "texts of the data look like special tokens",
        "A text contains the name of a special token; it is tokenised as plain text.",
        "Do nothing, unless they are meant as control tokens: then write the conversation as messages.",
        severity="info",
    ),
    "SF509": Page(
        "reasoning is not shown by the chat template",
        "Rows have reasoning, but the template renders none of it, or (as Qwen3's) only that of the last turn, so that "
        "earlier answers are trained as if there had been none; or it takes a thought in the content for the answer, "
        "because it writes an empty thought before it (as Qwen3.8's) or has other words for thoughts (as gpt-oss's).",
        "Move the thoughts to where the template reads them: reasoning_content, or the content before </think>. A "
        "template that reads neither cannot show them: give another one. For earlier turns, set train_on: "
        "last_assistant or make a row of each turn.",
        ("modelscope/ms-swift#9829",),
    ),
    "SF510": Page(
        "no end of an answer is trained",
        "In other trainers: none of the tokens trained in the first fifty steps is one with which the model ends its "
        "answers (eos_token_id of generation_config.json, else of config.json), so it will not stop generating. "
        "Surefoot's own masks include the end-of-turn token.",
        "Let the template or the data write the end token, and do not mask it: if pad_token is eos_token, a collator "
        "masks it together with the padding.",
        ("unslothai/unsloth#416", "huggingface/trl#1623"),
    ),
    "SF511": Page(
        "empty answers are trained",
        "The last answer of some rows has no words, no reasoning and no tool calls: only its end is trained.",
        "Remove these rows, or check that the column of the answers is the right one.",
    ),
    "SF512": Page(
        "answers of a thinking model are trained without thoughts",
        "The chat template begins a thought before each answer (its generation prompt ends with `<think>`), and more "
        "than half of the rows have answers without one: the model learns to end its thought at once.",
        "Do nothing, if the model is to answer directly. Otherwise write the thoughts into reasoning_content, or into "
        "the content before `</think>`. Where the template has a switch, enable_thinking: false trains and answers "
        "without thoughts.",
        severity="info",
    ),
    "SF513": Page(
        "all answers have the same label",
        "Each answer of KTO's data is desired, or none is: the model moves in one direction, and learns no difference.",
        "Check the column of the labels, and add rows with the other label. With desired answers alone, method: sft "
        "does the same with less work.",
    ),
}
