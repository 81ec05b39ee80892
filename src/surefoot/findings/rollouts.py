"""Catalogue pages for missing or wrong rollouts and rewards (SF8..)."""

from surefoot.findings.page import Page

PAGES = {
    "SF801": Page(
        "the rollout engine does not answer",
        "The completions of a rollout, or the log-probabilities of a teacher server, did not arrive by their deadline "
        "(`rollout_timeout_s`, `teacher_timeout_s`), a request to a server was refused, or the server's process ended. "
        "The evidence has the end of the log and the state of the process of a server that the run has started.",
        "Read the end of its log. Out of memory: lower the engine's share (`vllm_args: "
        '[--gpu-memory-utilization, "0.5"]`) or its --max-model-len. Only slow: raise the deadline.',
        ("modelscope/ms-swift#3592",),
        severity="error",
    ),
    "SF802": Page(
        "reward functions fail",
        "A function raised, exceeded `reward_timeout_s`, returned NaN or another number of rewards than completions, "
        "or its process ended. After a wrong number the whole group is left out of the loss, after NaN only that "
        "completion. After another failure the function is called again for each completion alone, and those on "
        "which it fails again are left out. A function of weight 0 leaves none out. metrics.jsonl counts them as "
        "`rewards_failed`; completions.jsonl has the reason for each.",
        "Correct the function at the line in the finding's trace. It must return a list with one value for each "
        "completion, None for those that it cannot judge. If it is only slow, raise reward_timeout_s.",
    ),
    "SF803": Page(
        "no completion has a reward",
        "In one step every reward function failed on, or returned None for, every completion.",
        "Correct the functions that the finding says failed. If one returned None for everything, compare the names of "
        "its arguments with the columns of the data.",
        severity="error",
    ),
    "SF804": Page(
        "rewards do not tell completions apart",
        "In ten rollouts in a row all completions of each prompt had the same reward, so that every advantage was 0, "
        "or all that differed were left out of the loss (mask_truncated_completions).",
        "All 0: the task is too hard for the model. Warm up with SFT, or reward parts of an answer, such as its "
        "format. All at the top: the task is learned, or the reward is too easy. dynamic_sampling replaces such "
        "groups; a higher temperature makes completions differ.",
    ),
    "SF805": Page(
        "the rollout engine does not have the policy's weights",
        "At a sync: tensors of the adapter's file are missing or changed, or server and trainer disagree on the "
        "logprobs of a test sequence. In training: the server's logprobs were too far from the trainer's in three "
        "steps in a row (not compared if top_p or top_k cut them at another temperature than 1).",
        "Compare the base model, its data type and chat template on both sides, and the options of a server that you "
        "started with those in docs/grpo.md. A server that merges adapters, or does not adapt all of target_modules "
        "(experts, in some versions), computes other numbers: train only modules that it can serve, or set "
        "rollout_engine: local.",
        ("verl-project/verl#7495", "OpenRLHF/OpenRLHF#1349", "huggingface/trl#6688"),
        severity="error",
    ),
    "SF806": Page(
        "the rollout engine answered something else",
        "A completion, or a teacher's log-probabilities, came from another model than requested, had fewer tokens than "
        "its end says, or lacked a logprob for a token; or its prompt with images was read as other tokens.",
        "Use the version of vLLM that the documentation names, and look for a proxy that changes requests.",
        severity="error",
    ),
}
