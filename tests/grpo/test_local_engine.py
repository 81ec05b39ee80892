"""Generation with the trained model: draws, logprobs, ends, and independence of what else is generated."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from surefoot.config import load_config
from surefoot.errors import ConfigError, ModelError, StoppedOnFinding
from surefoot.methods.grpo.batch import Trajectory, collate_completions
from surefoot.methods.grpo.method import Grpo
from surefoot.methods.rollout.engines.batching import Batching, choose_batching, split_requests
from surefoot.methods.rollout.engines.local import LocalEngine, RolloutLimits
from surefoot.methods.rollout.types import Completion, Request, Sampling
from surefoot.methods.token_loss import TokenLogprobs, text_inputs
from surefoot.models.build import build_model, meta_model
from surefoot.models.isolation import longest_at_one_frequency
from surefoot.models.lora import LoraSettings
from tests.models.architectures import tiny_config, tiny_model

pytestmark = pytest.mark.slow

PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17]]
KINDS = ["llama", "qwen2_moe"]
CACHES = {
    "qwen3_next": Batching.ANY_PROMPTS,
    "qwen3_5_text": Batching.ANY_PROMPTS,
    "lfm2": Batching.ANY_PROMPTS,
    "mamba2": Batching.ANY_PROMPTS,
    "jamba": Batching.ANY_PROMPTS,
    "falcon_h1": Batching.ANY_PROMPTS,
    "minimax": Batching.ANY_PROMPTS,
    "qwen4_exp_text": Batching.ANY_PROMPTS,
    "gpt_oss": Batching.ANY_PROMPTS,
    "deepseek_v4": Batching.EQUAL_LENGTHS,
    "rwkv": Batching.ONE_BY_ONE,
}
"""Architectures whose caches hold more than keys and values, or whose attention has sinks."""


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Any:
    """As it is trained: with adapters, moved away from their start."""
    lora = LoraSettings(rank=4, alpha=8.0, targets=("all",), dropout=0.0, rslora=False, seed=1)
    built = build_model(model_folder(request.param), lora=lora, device=torch.device("cpu"), dtype=torch.float32)
    torch.manual_seed(0)
    for parameter in built.model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    return built.model


def requests(each: int = 3) -> list[Request]:
    return [Request(prompt, (3, number, index)) for number, prompt in enumerate(PROMPTS) for index in range(each)]


def test_logprobs_are_those_that_training_sees(model: Any, tokenizer: Any) -> None:
    sampling = Sampling(12, temperature=0.8, top_p=0.9, top_k=40)
    made = LocalEngine(model, tokenizer).generate(requests(), sampling, 4)
    trajectories = [
        Trajectory(request.prompt, one.ids, one.logprobs, 0.0, 1.0, "x:1")
        for request, one in zip(requests(), made, strict=True)
    ]
    for share in (True, False):
        batch = collate_completions(trajectories, share_prompts=share)
        with torch.no_grad():
            found, entropy = TokenLogprobs(model, 0.8)(batch)
        torch.testing.assert_close(found, batch.rollout_logprobs, rtol=0, atol=2e-6)
        assert bool((entropy > 0).all())
    assert [one.policy_version for one in made] == [4] * 9
    assert model.training


def test_a_completion_depends_on_its_seed_alone(model: Any, tokenizer: Any) -> None:
    engine, sampling = LocalEngine(model, tokenizer), Sampling(16, ends=frozenset(range(0, 512, 9)))
    together = engine.generate(requests(), sampling, 0)
    assert len({tuple(one.ids) for one in together}) == 9
    assert len({len(one.ids) for one in together}) > 3  # rows leave the batch one after the other
    alone = [engine.generate([request], sampling, 0)[0] for request in requests()]
    assert [one.ids for one in alone] == [one.ids for one in together]
    backwards = engine.generate(requests()[::-1], sampling, 0)[::-1]
    assert [one.ids for one in backwards] == [one.ids for one in together]
    in_waves = LocalEngine(model, tokenizer, limits=RolloutLimits(batch_size=2)).generate(requests(), sampling, 0)
    assert [one.ids for one in in_waves] == [one.ids for one in together]


def test_completions_end_where_they_should(model: Any, tokenizer: Any) -> None:
    ends = frozenset(range(0, 512, 9))
    for one in LocalEngine(model, tokenizer).generate(requests(), Sampling(16, ends=ends), 0):
        assert len(one.ids) == len(one.logprobs)
        assert not ends & set(one.ids[:-1])
        assert one.finish == ("stop" if one.ids[-1] in ends else "length")
        assert one.finish == "stop" or len(one.ids) == 16


@pytest.mark.parametrize("end", [6, 44])
def test_a_text_ends_a_completion(model: Any, tokenizer: Any, end: int) -> None:
    """Of two tokens, and of more than the engine looks at for a short one."""
    engine = LocalEngine(model, tokenizer)
    whole = engine.generate(requests(), Sampling(60), 0)
    stop = tokenizer.decode(whole[0].ids[4:end])
    cut = engine.generate(requests(), Sampling(60, stops=(stop,)), 0)[0]
    assert cut.finish == "stop"
    assert cut.ids == whole[0].ids[: len(cut.ids)]
    assert stop in tokenizer.decode(cut.ids)
    assert stop not in tokenizer.decode(cut.ids[:-1])


def test_tokens_are_drawn_as_the_distribution_says(model_folder: Callable[[str], Path], tokenizer: Any) -> None:
    """4000 first tokens against the probabilities of transformers' own forward, with and without cutting."""
    folder = model_folder("llama")
    stock = AutoModelForCausalLM.from_pretrained(folder)
    model = build_model(folder, lora=None, device=torch.device("cpu"), dtype=torch.float32).model
    with torch.no_grad():
        for one in (stock, model):
            one.lm_head.weight.mul_(20)  # a distribution with some shape
        logits = stock(torch.tensor([PROMPTS[0]])).logits[0, -1] / 1.5
    probabilities = torch.softmax(logits, 0).numpy()
    asked = [Request(PROMPTS[0], (8, index)) for index in range(4000)]
    made = LocalEngine(model, tokenizer).generate(asked, Sampling(1, temperature=1.5), 0)
    counts = np.bincount([one.ids[0] for one in made], minlength=512)
    likely = probabilities * 4000 >= 20
    assert likely.sum() > 5
    statistic = ((counts - 4000 * probabilities) ** 2 / (4000 * probabilities))[likely].sum()
    assert statistic < 2.5 * likely.sum()  # its mean is the number of tokens

    best = set(np.argsort(-probabilities)[:3].tolist())
    cut = LocalEngine(model, tokenizer).generate(asked[:300], Sampling(1, temperature=1.5, top_k=3), 0)
    assert {one.ids[0] for one in cut} == best
    nucleus = 1 + int(np.searchsorted(np.sort(probabilities)[::-1].cumsum(), 0.5))
    cut = LocalEngine(model, tokenizer).generate(asked[:600], Sampling(1, temperature=1.5, top_p=0.5), 0)
    assert len({one.ids[0] for one in cut}) <= nucleus
    # Their logprobs are of the whole distribution, as training sees it.
    assert [one.logprobs[0] for one in cut] == pytest.approx(
        [np.log(probabilities[one.ids[0]]) for one in cut], abs=1e-5
    )


def test_a_rollout_has_a_deadline(model: Any, tokenizer: Any) -> None:
    engine = LocalEngine(model, tokenizer, limits=RolloutLimits(batch_size=2, timeout_s=1e-3))
    with pytest.raises(StoppedOnFinding, match="0.001 s of rollout_timeout_s") as late:
        engine.generate(requests(), Sampling(16), 0)
    assert late.value.finding.code == "SF801"
    assert late.value.finding.evidence["missing"] == len(requests())
    assert late.value.is_agreed


def test_no_request_gives_no_completion(model: Any, tokenizer: Any) -> None:
    nothing: list[Completion] = LocalEngine(model, tokenizer).generate([], Sampling(4), 0)
    assert nothing == []


def test_banned_tokens_are_never_drawn(model: Any, tokenizer: Any) -> None:
    banned = frozenset(range(0, 512, 2))
    sampling = Sampling(12, temperature=2.0, banned=banned)
    made = LocalEngine(model, tokenizer).generate(requests(), sampling, 0)
    assert not any(banned & set(one.ids) for one in made)
    # Logprobs are those of a policy without them.
    for request, one in zip(requests(), made, strict=True):
        trajectory = Trajectory(request.prompt, one.ids, one.logprobs, 0.0, 1.0, "x:1")
        batch = collate_completions([trajectory], share_prompts=False)
        with torch.no_grad():
            logits = model(**text_inputs(batch), logits_to_keep=batch.target_positions).logits[0] / 2.0
        logits[:, sorted(banned & set(range(logits.shape[-1])))] = -torch.inf
        expected = logits.log_softmax(-1).gather(1, torch.tensor(one.ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(one.logprobs), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("batch_size", [None, 2])
def test_completions_tell_the_experts_that_training_would_choose(
    batch_size: int | None, model_folder: Callable[[str], Path], tokenizer: Any
) -> None:
    lora = LoraSettings(rank=4, alpha=8.0, targets=("all",), seed=1)
    built = build_model(model_folder("qwen2_moe"), lora=lora, device=torch.device("cpu"), dtype=torch.float32)
    engine = LocalEngine(built.model, tokenizer, routing=built.routing, limits=RolloutLimits(batch_size=batch_size))
    made = engine.generate(requests(), Sampling(16, ends=frozenset(range(0, 512, 9))), 0)
    assert len({len(one.ids) for one in made}) > 3
    for share in (True, False):
        trajectories = [
            Trajectory(request.prompt, one.ids, one.logprobs, 0.0, 1.0, "x:1", experts=one.experts)
            for request, one in zip(requests(), made, strict=True)
        ]
        batch = collate_completions(trajectories, share_prompts=share)
        logprobs = TokenLogprobs(built.model, 1.0)
        with torch.no_grad(), built.routing.recording() as layers:
            logprobs(batch)
        chosen = torch.stack([layer.index for layer in layers], dim=1)
        assert batch.experts is not None
        last = [int(batch.token_at[batch.answer_of == number][-1]) for number in range(len(made))]
        told = [token for token in range(batch.ids.shape[1]) if token not in last]
        assert bool((batch.experts[last] == -1).all())  # no forward has seen it
        assert torch.equal(batch.experts[told].long(), chosen[told])
        for one in trajectories:
            one.experts = None
        batch.keep_experts(chosen.short())
        assert [one.experts for one in trajectories] == [one.experts for one in made]


@pytest.mark.long
@pytest.mark.parametrize("name", CACHES)
def test_caches_of_every_kind_give_the_tokens_of_each_prompt_alone(name: str, tokenizer: Any) -> None:
    model = tiny_model(name)
    engine = LocalEngine(model, tokenizer)
    assert engine.batching is CACHES[name]
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected.append(model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist())
    greedy = engine.generate(requests(), Sampling(12, top_k=1), 0)
    assert [completion.ids for completion in greedy] == [ids for ids in expected for _ in range(3)]

    sampling = Sampling(16, ends=frozenset(range(0, 128, 9)))
    together = [completion.ids for completion in engine.generate(requests(), sampling, 0)]
    assert len(set(map(len, together))) > 2  # rows leave the batch one after the other
    alone = [engine.generate([request], sampling, 0)[0].ids for request in requests()]
    backwards = [completion.ids for completion in engine.generate(requests()[::-1], sampling, 0)[::-1]]
    limited = LocalEngine(model, tokenizer, limits=RolloutLimits(batch_size=2))
    in_waves = [completion.ids for completion in limited.generate(requests(), sampling, 0)]
    assert together == alone == backwards == in_waves


@pytest.mark.parametrize("name", ["moshi", "hrm_text", "openai-gpt", "recurrent_gemma", "xlstm"])
def test_a_model_that_cannot_generate_with_its_cache_is_refused(name: str, tokenizer: Any) -> None:
    """Its cache changes its logits, its forward fails, takes no cache, or returns none."""
    with pytest.raises(ModelError) as refused:
        LocalEngine(tiny_model(name), tokenizer)
    assert type(tiny_model(name)).__name__ in str(refused.value)


@pytest.mark.parametrize(("name", "threshold"), [("moshi", 32), ("doge", 24)])
def test_a_cache_that_is_wrong_once_its_window_is_full_is_refused(name: str, threshold: int, tokenizer: Any) -> None:
    model = tiny_model(name, times=4)
    assert threshold in model.config.to_dict().values()
    LocalEngine(model, tokenizer, limits=RolloutLimits(most_tokens=threshold))  # completions end before it
    with pytest.raises(ModelError, match="differ by"):
        LocalEngine(model, tokenizer, limits=RolloutLimits(most_tokens=2 * threshold))


@pytest.mark.parametrize("name", ["phi3+longrope", "llama+dynamic_ntk"])
def test_completions_end_before_position_frequencies_change(
    name: str, model_folder: Callable[[str], Path], data_file: Path, tmp_path: Path
) -> None:
    """Tokens before the change would be drawn with other probabilities than those of the whole sample."""
    config = tiny_config(name, 128)
    config.save_pretrained(tmp_path)
    limit = longest_at_one_frequency(meta_model(tmp_path))
    assert limit is not None
    values: dict[str, Any] = {
        "model": str(tmp_path), "dataset": str(data_file), "output_dir": "o", "method": "grpo",
        "reward_funcs": ["length"], "max_prompt_length": limit - 4,
    }  # fmt: skip

    def check(**changes: Any) -> None:
        Grpo.check_model(load_config(None, [], {**values, **changes}), tmp_path)

    check(max_completion_length=4)
    check(max_completion_length=400, rollout_engine="vllm", vllm_server="http://localhost:1")
    with pytest.raises(ConfigError, match=str(limit)):
        check(max_completion_length=5)
    plain = load_config(None, [], {**values, "max_completion_length": 400})
    Grpo.check_model(plain, model_folder("llama"))


def test_ranks_agree_on_a_batching() -> None:
    """Another rank, whose rounding differs, sees a difference where this one sees none."""

    def read(_prompts: Any, rows: Any, _tokens: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(rows), 4)

    answers = iter([True, False, True])
    assert choose_batching(read, range(50), lambda holds: holds and next(answers), "Model") is Batching.EQUAL_LENGTHS
    with pytest.raises(ModelError):
        choose_batching(read, range(50), lambda _: False, "Model")


def test_batches_have_what_their_completions_must_share() -> None:
    lengths = [len(request.prompt) for request in requests(2)]
    assert lengths == [4, 4, 2, 2, 7, 7]
    mixed = [requests(2)[index] for index in (0, 2, 4, 1, 3, 5)]
    assert split_requests(mixed, None, Batching.ANY_PROMPTS) == [[0, 1, 2, 3, 4, 5]]
    assert split_requests(mixed, 4, Batching.ANY_PROMPTS) == [[0, 1, 2, 3], [4, 5]]
    assert split_requests(mixed, None, Batching.EQUAL_LENGTHS) == [[0, 3], [1, 4], [2, 5]]
    assert split_requests(mixed, 1, Batching.EQUAL_LENGTHS) == [[0], [3], [1], [4], [2], [5]]
    assert split_requests(mixed, 4, Batching.ONE_BY_ONE) == [[index] for index in range(6)]
    assert split_requests([], None, Batching.ANY_PROMPTS) == []
