"""Storage of weights in a format while a model is loaded, as a quantizer of transformers' loader.

The loader hands over each weight, or this rank's part of it, as it is read; so at most one is held in both forms.
"""

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from surefoot.models.quantization.base import WeightFormat

METHOD = "surefoot"


@register_quantization_config(METHOD)
class StoreOnLoad(QuantizationConfigMixin):  # type: ignore[misc]
    """Argument `quantization_config` of `from_pretrained` for a model whose modules have a format."""

    def __init__(self, weight_format: WeightFormat) -> None:
        self.quant_method = METHOD
        self.weight_format = weight_format


class _Store(ConversionOps):  # type: ignore[misc]
    """The conversion of one weight."""

    def __init__(self, weight_format: WeightFormat) -> None:
        self._format = weight_format

    def convert(self, input_dict: dict[str, Any], **_kwargs: Any) -> dict[str, Tensor]:
        stored: dict[str, Tensor] = {}
        for name, value in input_dict.items():
            tensors = self._format.store(value[0] if isinstance(value, list) else value)
            stored |= {name + ending: tensor for ending, tensor in zip(self._format.endings, tensors, strict=True)}
        return stored


@register_quantizer(METHOD)
class _Quantizer(HfQuantizer):  # type: ignore[misc]
    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_kwargs: Any) -> bool:
        owner, _, leaf = param_name.rpartition(".")
        return leaf in getattr(model.get_submodule(owner), "stored_weights", ())

    def get_quantize_ops(self) -> ConversionOps:
        assert isinstance(self.quantization_config, StoreOnLoad)
        return _Store(self.quantization_config.weight_format)

    def is_serializable(self, **_kwargs: Any) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return True
