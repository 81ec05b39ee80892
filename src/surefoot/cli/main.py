"""Commands of the command line. Heavy modules are imported only by the command that needs them."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from contextlib import nullcontext

import surefoot
from surefoot.cli.model_verbs import add_model_verbs
from surefoot.cli.output import Parser
from surefoot.cli.run_verbs import add_run_verbs
from surefoot.cli.watching_verbs import add_watching_verbs
from surefoot.errors import InputError
from surefoot.launch.run_verb import DONE, run_verb
from surefoot.system.console import protect_streams, report_lost_output
from surefoot.system.process import own_stop_signals


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0 done, 2 wrong input, 3 stopped on a finding, 1 anything else.

    Without `arguments` this process is the program, so it handles its streams and stop signals.
    """
    if arguments is not None:
        return _run_command(arguments)
    protect_streams()
    try:
        status = _run_command(None)
    except SystemExit as end:  # argparse has printed its help or an error
        status = int(end.code or 0)
    return report_lost_output(status)


def _run_command(arguments: Sequence[str] | None) -> int:
    """Parse the arguments, those of the program if None, and run their command."""
    parser = build_parser()
    parsed, extra = parser.parse_known_args(arguments)
    if not extra and not hasattr(parsed, "verb"):
        parser.print_help(sys.stderr)
        return InputError.exit_status
    if extra and not (hasattr(parsed, "overrides") and all("=" in text for text in extra)):
        near = difflib.get_close_matches(extra[0].partition("=")[0], parsed.options, n=1)
        hint = ". Settings are written key=value: max_steps=2" if hasattr(parsed, "overrides") else ""
        parser.error(f"unrecognized arguments: {' '.join(extra)}{f'; did you mean {near[0]}?' if near else hint}")
    if extra:  # key=value after an option, and --key=value
        parsed.overrides += extra
    with own_stop_signals() if arguments is None else nullcontext():
        return run_verb(lambda: parsed.verb(parsed) or DONE)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs."""
    parser = Parser(prog="surefoot", description="Fine-tune LLMs: dense and Mixture-of-Experts, LoRA or full.")
    parser.add_argument("--version", action="version", version=f"surefoot {surefoot.__version__}")
    verbs = parser.add_subparsers(metavar="verb")
    add_run_verbs(verbs)
    add_watching_verbs(verbs)
    add_model_verbs(verbs)
    return parser
