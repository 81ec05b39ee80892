"""NEFTune: uniform noise on embeddings, by the length of each sample, in training alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from surefoot.models.build import build_model
from surefoot.models.embedding_noise import add_embedding_noise
from surefoot.models.lora import LoraSettings
from surefoot.models.sample_layout import SampleLayout, samples_are

CPU = torch.device("cpu")
LENGTHS = [4, 25]


@pytest.mark.parametrize("is_training", [True, False])
def test_noise_has_the_scale_of_each_sample(is_training: bool, model_folder: Callable[[str], Path]) -> None:
    lora = LoraSettings(4, 8.0, targets=("attention",))
    model = build_model(model_folder("llama"), lora=lora, device=CPU, dtype=torch.float32).model.train(is_training)
    ids = torch.randint(3, 40, (1, sum(LENGTHS)))
    embed = model.get_input_embeddings()
    plain: Tensor = embed(ids)
    add_embedding_noise(model, 5.0)
    torch.manual_seed(0)
    with samples_are(SampleLayout.of(LENGTHS)):
        noise = (embed(ids) - plain).detach()
    if not is_training:
        assert not noise.any()
        return
    width = plain.shape[-1]
    for length, part in zip(LENGTHS, noise.split(LENGTHS, dim=1), strict=True):
        # NEFTune's code: torch.zeros_like(embeddings).uniform_(-mag, mag) with mag = alpha / sqrt(L * D)
        most = 5.0 / (length * width) ** 0.5
        assert 0.9 * most < part.abs().max() <= most
        assert part.std() == pytest.approx(most / 3**0.5, rel=0.1)
    assert torch.equal(embed(ids), plain), "only in a forward of the model"
