"""The processor of a vision-language model: the tower's tensors of pictures, and the text of each picture in a prompt.

Every processor of transformers answers both questions itself, so no family is known here by name: it returns tensors
that its model's `get_image_features` takes, and the text by which each picture's placeholder is replaced. The processor
is loaded without its video and audio parts, whose packages are often missing.
"""

import copy
import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image as Pillow
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from surefoot.data.conversation import shown
from surefoot.errors import DataError, one_line
from surefoot.system.json_files import read_object

PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Names of processor files; transformers 5 writes the second if it saves a whole processor."""
REFUSED = {"paligemma": "all tokens of its prompts attend in both directions, which is not supported"}
"""Model types that read images, but whose images are refused, with the reason."""
GRID = "image_grid_thw"
"""Name of the tensor that holds the patches of each image along time, height and width."""
BLANK_SIDE = 32
"""Side in pixels of the picture that stands in for images in a batch without any."""
CHECKED_SIDE = 256
"""Side in pixels of the picture by which a processor is compared with its model: of several tokens."""


@dataclass(frozen=True)
class ImageMeasure:
    """The text and the tokens of a picture in a prompt."""

    text: str
    rows: int
    columns: int
    """Its tokens that the vision tower fills: rows x columns."""


class MissingPackage(DataError):
    """A processor needs a package that is not installed."""


class _ImagesOnly(ProcessorMixin):  # type: ignore[misc]
    """A part of each processor class that is loaded: it accepts that the video and audio parts are None."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        """Check an argument that is present."""
        return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)


class ModelProcessor:
    """The processor of a vision-language model, for pictures only."""

    def __init__(self, processor: ProcessorMixin, config: PreTrainedConfig) -> None:
        model = vision_class(config)
        assert model is not None
        self.image_processor = processor.image_processor
        self.token: str = processor.image_token
        """Placeholder of a picture in a chat template's text."""
        self.feature_token = str(processor.tokenizer.convert_ids_to_tokens(config.image_token_id))
        """Token that is repeated once for each vector that the vision tower makes of a picture."""
        self.processor = processor
        self._tensor_names = set(inspect.signature(model.get_image_features).parameters)
        self._positions = _PositionSource.of(config)

    @property
    def normalizes(self) -> bool:
        """Whether its pixels are normalised: otherwise the model does it (Gemma 4)."""
        return bool(getattr(self.image_processor, "do_normalize", True))

    @property
    def has_cells(self) -> bool:
        """Whether its pictures are grids of cells whose number `ImageSettings.cells` computes, a token each."""
        if type(self.image_processor) is not Qwen2VLImageProcessorPil or self._positions is None:
            return False
        _, (text,) = self.process([_blank_picture(BLANK_SIDE)])
        return text.replace(self.token, "") == ""

    def process(
        self, pictures: Sequence[Pillow.Image], *, do_resize: bool = True
    ) -> tuple[dict[str, Tensor], list[str]]:
        """Return the tensors of the pictures of one sample, and each picture's text.

        `do_resize`: False if the pictures have their final size already.
        """
        batch = self.processor(
            images=[list(pictures)],
            text=[" ".join([self.token] * len(pictures))],
            return_tensors="pt",
            return_text_replacement_offsets=True,
            return_mm_token_type_ids=False,
            images_kwargs={} if do_resize else {"do_resize": False},
        )
        texts = [replacement["replacement"] for replacement in batch["text_replacement_offsets"][0]]
        tensors = {name: torch.as_tensor(value) for name, value in batch.items() if name in self._tensor_names}
        return tensors, texts

    def measure(self, pictures: Sequence[Pillow.Image]) -> list[ImageMeasure]:
        """Return the text and the size of each picture of one sample."""
        tensors, texts = self.process(pictures)
        sizes = [(1, text.count(self.feature_token)) for text in texts]
        if self.merge_size is not None:
            sizes = [(row // self.merge_size, column // self.merge_size) for _, row, column in tensors[GRID].tolist()]
        return [ImageMeasure(text, *size) for text, size in zip(texts, sizes, strict=True)]

    def blank(self, side: int) -> tuple[dict[str, Tensor], int]:
        """Return the tensors of a white picture, and the number of its tokens."""
        tensors, (text,) = self.process([_blank_picture(side)], do_resize=side == BLANK_SIDE)
        return tensors, text.count(self.feature_token)

    def check_tokens(self, config: PreTrainedConfig) -> None:
        """Check that the text of a picture has the tokens that the model replaces. Raises: DataError."""
        (measure,) = self.measure([_blank_picture(CHECKED_SIDE)])
        tokens, expected = measure.text.count(self.feature_token), measure.rows * measure.columns
        if not tokens:
            raise DataError(
                f"the text that it writes for an image, {shown(measure.text)}, does not have the token of "
                f"image_token_id={config.image_token_id} in config.json, {self.feature_token}"
            )
        if tokens != expected:
            raise DataError(
                f"it writes {tokens} tokens for an image of {CHECKED_SIDE}x{CHECKED_SIDE} pixels, of which the model "
                f"makes {expected} vectors with spatial_merge_size={self.merge_size} in config.json"
            )

    def positions(self, ids: Tensor, grid: Tensor | None, image_token_id: int) -> Tensor:
        """Return the positions of a sample's tokens: int64 [n], or [3, n] for a model that counts rows and columns.

        Shapes: ids [n]; grid [I, 3], the patches of its images along time, height and width.
        """
        if self._positions is None:
            return torch.arange(len(ids))
        return self._positions.compute(ids, grid, image_token_id)

    @property
    def merge_size(self) -> int | None:
        """Patches along a token's side, for a model whose positions count rows and columns; else None."""
        return None if self._positions is None else self._positions.merge_size


class _PositionSource:
    """The `get_rope_index` of a model class, called without a model."""

    def __init__(self, model_class: Any, config: PreTrainedConfig) -> None:
        self._model = model_class.__new__(model_class)
        self._model.__dict__["config"] = config  # all that the method reads of a model
        self.merge_size = int(config.vision_config.spatial_merge_size)

    @staticmethod
    def of(config: PreTrainedConfig) -> "_PositionSource | None":
        """Return the source of a config's model; None if its positions have one dimension."""
        model_class = MODEL_MAPPING.get(type(config), None)
        return _PositionSource(model_class, config) if hasattr(model_class, "get_rope_index") else None

    def compute(self, ids: Tensor, grid: Tensor | None, image_token_id: int) -> Tensor:
        """See `ModelProcessor.positions`."""
        is_image = (ids == image_token_id).int()
        positions, _ = self._model.get_rope_index(ids[None], mm_token_type_ids=is_image[None], image_grid_thw=grid)
        result: Tensor = positions[:, 0]
        return result


def vision_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class of a model that reads images; None for a model that reads text only.

    Such a model makes vectors of images in `get_image_features`, and its forward puts them at their tokens.
    """
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING or config.model_type in REFUSED:
        return None
    model: type[PreTrainedModel] = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    takes_features = "mm_encoder_outputs" in inspect.signature(model.forward).parameters
    has_token = getattr(config, "image_token_id", None) is not None
    return model if takes_features and has_token and hasattr(model, "get_image_features") else None


def processor_file(folder: Path) -> Path | None:
    """Return the processor file of a model's folder; None if it has none."""
    return next((folder / name for name in PROCESSORS if (folder / name).is_file()), None)


def hash_processor(folder: Path) -> str:
    """Return a hash over the processor files of a folder."""
    contents = [(folder / name).read_bytes() for name in PROCESSORS if (folder / name).is_file()]
    return hashlib.sha256(b"\0".join(contents)).hexdigest()


def load_model_processor(
    folder: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None = None
) -> ModelProcessor:
    """Load the processor of a model's folder. `tokenizer`: the folder's, which is left unchanged.

    Raises: DataError if it cannot be read; MissingPackage if it needs a package that is not installed.
    """
    present = processor_file(folder)
    assert present is not None
    try:
        read_object(present)
        tokenizer = copy.deepcopy(tokenizer) if tokenizer is not None else AutoTokenizer.from_pretrained(str(folder))
        processor = ModelProcessor(_load_images_only(folder, config, tokenizer), config)
        processor.check_tokens(config)
        return processor
    except ImportError as error:
        reason = " ".join(str(error).split())[:300]
        advice = " Install torchvision of the same release as torch (torch 2.N goes with torchvision 0.(N + 15))."
        raise MissingPackage(
            f"{present}: images of {config.model_type} are read by a processor of transformers whose packages are not "
            f"installed: {reason}{advice if 'torchvision' in reason else ''}"
        ) from error
    except Exception as error:  # its fields are checked in many ways, or not at all
        reason = str(error) if isinstance(error, DataError) else one_line(error)
        raise DataError(
            f"{present}: its image processor cannot be used: {reason}. Take it and config.json from one release of the "
            "model"
        ) from error


def _load_images_only(folder: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """Return the processor of a model type with its image processor and its tokenizer, and nothing else."""
    name = PROCESSOR_MAPPING_NAMES[config.model_type]
    stock = processor_class_from_name(name)
    if stock is None or getattr(stock, "is_dummy", False):
        raise ImportError(f"{name} needs torchvision.")
    parts: dict[str, Any] = {"tokenizer": tokenizer, "image_processor": _load_image_processor(folder, name)}
    processor_class: Any = type(stock.__name__, (stock, _ImagesOnly), {})
    settings, _ = processor_class.get_processor_dict(str(folder))
    arguments = [parts.get(attribute) for attribute in processor_class.get_attributes()]
    processor: ProcessorMixin = processor_class.from_args_and_dict(arguments, settings)
    return processor


def _load_image_processor(folder: Path, owner: str) -> Any:
    """Return the image processor of a folder on Pillow, which computes the same on every machine."""
    try:
        return AutoImageProcessor.from_pretrained(str(folder), backend="pil", local_files_only=True)
    except ValueError as error:
        if "torchvision" in str(error):
            raise ImportError(f"the image processor of {owner} has no version without torchvision.") from error
        raise


def limits_of(processor: Any) -> tuple[int, int]:
    """Return (least, most) pixels of an image."""
    return int(processor.size.shortest_edge), int(processor.size.longest_edge)


def _blank_picture(side: int) -> Pillow.Image:
    return Pillow.new("RGB", (side, side), "white")
