"""Self-test (`surefoot doctor --deep`): ranks started like those of a run try the operations that a run needs."""
