"""Entry point of `python -m surefoot`."""

import sys

from surefoot.cli import main

sys.exit(main())
