"""Fine-tuning methods, each in its own folder."""
