"""A TRL run that Surefoot watches: one line more, and a stall, a leak or a death gets a named cause.

pip install . trl datasets
python examples/trl_watched.py MODEL DATA.jsonl OUTPUT [--steps 20]
surefoot watch OUTPUT        # from another terminal; later: surefoot explain OUTPUT
"""

import argparse

import torch
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

from surefoot.integrations import SurefootCallback

parser = argparse.ArgumentParser()
parser.add_argument("model", help="a folder or hub id")
parser.add_argument("data", help="JSON lines with `messages`")
parser.add_argument("output")
parser.add_argument("--steps", type=int, default=20)
given = parser.parse_args()

trainer = SFTTrainer(
    model=given.model,
    args=SFTConfig(
        output_dir=given.output,
        max_steps=given.steps,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_steps=10,
        bf16=torch.cuda.is_available(),  # TRL's default needs a GPU
        report_to=[],
    ),
    train_dataset=load_dataset("json", data_files=given.data, split="train"),
    callbacks=[SurefootCallback()],
)
trainer.train()
