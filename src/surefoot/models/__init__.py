"""A stock transformers model with LoRA, attention over packed samples and grouped experts; adapters and export."""
