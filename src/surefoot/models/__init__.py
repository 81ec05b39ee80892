"""Stock transformers models with LoRA, attention over packed samples and grouped experts; adapters and export."""
