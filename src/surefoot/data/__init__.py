"""Data on their way to batches: files, rows, conversations, tokens with what is trained, the order of samples."""
