"""Sizes of optimizers' state."""

STATE_BYTES = {"adamw": 8.0, "adamw_8bit": 2.04, "adafactor": 0.01, "muon": 4.0, "lion": 4.0, "sgd": 0.0}
"""Optimizer -> bytes of its state for each trained weight, in matrices with long rows."""
OUTSIDE_LAYERS_BYTES = {"muon": 8.0}
"""The same for weights outside the layers, where they differ."""
