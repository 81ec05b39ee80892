"""GRPO: completions of the trained model, scored by reward functions and trained on by their advantages."""
