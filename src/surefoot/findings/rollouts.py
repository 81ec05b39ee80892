"""Catalogue pages for missing or wrong rollouts and rewards (SF8..)."""

from surefoot.findings.page import Page

PAGES = {
    "SF801": Page(
        "error",
        "the rollout engine does not answer",
        "The completions of a rollout were not there by its deadline (`rollout_timeout_s`), whatever engine makes "
        "them; or a request to a server was refused, or the server's process ended. The evidence holds the end of the "
        "server's log and what became of its process.",
        "Read the end of its log. Out of memory: lower the engine's share (`vllm_args: "
        '[--gpu-memory-utilization, "0.5"]`) or its --max-model-len. Only slow: raise rollout_timeout_s.',
        ("modelscope/ms-swift#3592",),
    ),
    "SF802": Page(
        "warning",
        "reward functions fail",
        "A function raised, took longer than `reward_timeout_s`, returned NaN or another number of rewards than it was "
        "given completions, or its process ended. A group of the wrong count is left out of the loss whole, a NaN "
        "alone; else the function is asked again for each completion alone: those on which it fails again are left "
        "out, and the others are asked for together. A function of weight 0 leaves none out. metrics.jsonl counts "
        "them as `rewards_failed`, completions.jsonl gives the reason of each.",
        "Correct the function where the finding's trace points: it returns a list with one value for each completion "
        "that it is given, None for those that it cannot judge. Raise reward_timeout_s where it only is slow.",
    ),
    "SF803": Page(
        "error",
        "no completion has a reward",
        "In one step every reward function failed on, or returned None for, every completion.",
        "Correct the functions where the finding says that they failed; one that returned None for everything "
        "finds nothing to judge: compare the names of its arguments with the columns of the data.",
    ),
    "SF804": Page(
        "warning",
        "rewards do not tell completions apart",
        "In ten rollouts in a row all completions of each prompt had the same reward, so every advantage was 0, or all "
        "that had another one were left out of the loss (mask_truncated_completions).",
        "All 0: the task is too hard for the model as it is. Warm up with SFT, or reward parts of an answer (its "
        "format, for one). All at the top: the task is learned, or the reward is too easy. dynamic_sampling replaces "
        "such groups; a higher temperature makes completions differ.",
    ),
    "SF805": Page(
        "error",
        "the rollout engine does not have the policy's weights",
        "With each sync an adapter's file is read back and compared tensor by tensor, and one sequence is scored by "
        "the server and by the trainer: tensors are missing or changed, or the logprobs disagree. And in each step the "
        "server's logprobs are compared with training's, unless top_p or top_k cut them at another temperature than 1: "
        "three steps in a row too far from each other end the run.",
        "Compare the base model, its type and chat template on both sides, and the options of a server that was "
        "started by hand with those in docs/grpo.md. A server that merges adapters, or does not adapt all modules of "
        "target_modules (experts, in some versions), gives other numbers: train the modules that it can serve, or set "
        "rollout_engine: local.",
        ("verl-project/verl#7495", "OpenRLHF/OpenRLHF#1349", "huggingface/trl#6688"),
    ),
    "SF806": Page(
        "error",
        "the rollout engine answered something else",
        "A completion was of another model than the one asked for, had fewer tokens than its end says, or had no "
        "logprob for each token; or its prompt with images was read as other tokens.",
        "Use the version of vLLM that the documentation names; look for a proxy between that changes requests.",
    ),
}
