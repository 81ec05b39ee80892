"""Every text-generation class of transformers, from a tiny configuration of its own."""

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.models.architectures import CAUSAL


def test_every_text_generation_class_has_a_line() -> None:
    assert sorted(CAUSAL) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
