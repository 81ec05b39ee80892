"""The data pipeline: from files to rows, conversations, tokens with loss weights, the order of samples, and batches."""
