"""From files to batches: rows, conversations, tokens with what is trained, and the order of samples."""
