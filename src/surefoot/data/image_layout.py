"""Measuring of images by the processor of a model: the text of each image of a row, and the number of its tokens."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from transformers import AutoConfig

from surefoot.data.conversation import BadRow, ImageSource
from surefoot.data.images import Image, ImageSettings, find_picture, limit_pixels
from surefoot.data.model_processor import ImageMeasure, ModelProcessor, load_model_processor

SIZES_REMEMBERED = 4096
"""Number of sizes whose texts are kept: a processor writes the same text for all images of a size."""


class ImageLayout:
    """The processor of a model's folder, which it runs on the images of each row."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._measures: dict[tuple[tuple[int, int], ...], list[ImageMeasure]] = {}

    @cached_property
    def _processor(self) -> ModelProcessor:
        return load_model_processor(self._folder, AutoConfig.from_pretrained(str(self._folder), local_files_only=True))

    def load(self) -> None:
        """Load the processor now rather than with the first image. Raises: DataError."""
        _ = self._processor

    def measure(
        self, sources: Sequence[ImageSource], folder: Path, settings: ImageSettings
    ) -> tuple[tuple[Image, ...], list[str]]:
        """Return the images that a row names, and the text of each.

        `folder`: that of the row's file. Raises: BadRow, StorageError; DataError for a processor that cannot be used.
        """
        sources_read = [find_picture(source, folder, settings) for source in sources]
        pictures = [limit_pixels(picture, settings) for _, picture in sources_read]
        sizes = tuple(picture.size for picture in pictures)
        measures = self._measures.get(sizes)
        if measures is None:
            try:
                measures = self._processor.measure(pictures)
            except ValueError as error:
                raise BadRow(f"the model's processor refuses its images of {sizes} pixels: {error}") from error
            if len(self._measures) < SIZES_REMEMBERED:
                self._measures[sizes] = measures
        for picture in pictures:
            picture.close()
        images = [
            replace(image, rows=measure.rows, columns=measure.columns)
            for (image, _), measure in zip(sources_read, measures, strict=True)
        ]
        return tuple(images), [measure.text for measure in measures]
