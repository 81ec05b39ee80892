"""Run the TRL script with its fresh adapter saved first, so that another trainer can start from the same values.

    python trl_from_adapter.py ADAPTER_FOLDER PEER_SCRIPT [its arguments]

TRL also trains the newline after the end-of-turn token; its mask is cut there, so that both count the same tokens.
"""

import runpy
import sys
from typing import Any

from trl import SFTTrainer

folder, script = sys.argv[1:3]
sys.argv = [script, *sys.argv[3:]]
train = SFTTrainer.train


def without_last(row: dict[str, Any]) -> dict[str, Any]:
    return {"labels": [*row["labels"][:-1], -100]}


def train_from_saved(self: SFTTrainer, *args: Any, **kwargs: Any) -> Any:
    self.model.save_pretrained(folder)
    self.train_dataset = self.train_dataset.map(without_last)
    return train(self, *args, **kwargs)


SFTTrainer.train = train_from_saved
runpy.run_path(script, run_name="__main__")
