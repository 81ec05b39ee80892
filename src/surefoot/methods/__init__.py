"""Fine-tuning methods: each is a file or a folder."""
