"""Use of a trained model: loading it for generation, chat, a server and benchmarks."""
