"""One rank of several runs, one after the other: `torchrun ... worker.py RUNS.json`, a list of settings."""

import json
import sys
from pathlib import Path

import surefoot
from surefoot.parallel.ranks import joined

with joined("cpu"):
    for settings in json.loads(Path(sys.argv[1]).read_text()):
        surefoot.train(settings, screen=False)
