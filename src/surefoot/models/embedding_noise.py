"""Noise on the input embeddings in training: NEFTune.

Source: Jain et al., https://arxiv.org/abs/2310.05914
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surefoot.models.sample_layout import current_layout


def add_embedding_noise(model: PreTrainedModel, alpha: float) -> None:
    """Add uniform noise of at most `alpha / sqrt(L * D)` to the D embeddings of each of the L tokens of a sample.

    In packed rows L is the length of the token's own sample. Only while the model trains.
    """

    def add_noise(_module: nn.Module, _inputs: Any, states: Tensor) -> Tensor:
        layout = current_layout()
        if not model.training or layout is None:
            return states
        lengths = layout.ends.diff().to(states.dtype)
        scales = (alpha / (lengths * states.shape[-1]).sqrt())[layout.sample_of_token[0]]
        noise = torch.empty_like(states).uniform_(-1.0, 1.0)
        return states + noise * scales.view(1, -1, 1)

    model.get_input_embeddings().register_forward_hook(add_noise)
