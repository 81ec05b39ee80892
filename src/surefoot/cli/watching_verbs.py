"""The commands that diagnose runs, and the one that injects faults: explain, watch, report and drill."""

import argparse
import re
import sys
from dataclasses import asdict
from pathlib import Path

from surefoot.cli.output import Parser, parse_count, show
from surefoot.errors import ConfigError, StoppedOnFinding
from surefoot.launch.run_verb import DONE

COMPARISON = "comparison.html"


def add_watching_verbs(verbs: "argparse._SubParsersAction[Parser]") -> None:
    """Add the verbs that diagnose runs, and the one that injects faults."""
    explain = verbs.add_parser("explain", help="explain why a run stalled, died or leaked, or explain a finding code")
    explain.add_argument(
        "what", help="a run folder, a log of any trainer or server, or a code (SF104); none: all codes", nargs="?"
    )
    explain.add_argument("--json", action="store_true")
    explain.set_defaults(verb=_run_explain)

    watch = verbs.add_parser("watch", help="watch a run live in the terminal: ranks, phases, speed, memory, findings")
    watch.add_argument("run", help="a run folder")
    watch.add_argument("--once", action="store_true", help="print the current state and exit")
    watch.add_argument("--web", action="store_true", help="show the live page of the run in a browser on this machine")
    watch.add_argument("--port", type=parse_count, default=8686, help="of --web (default 8686; 0 is any free one)")
    watch.set_defaults(verb=_run_watch)

    report = verbs.add_parser(
        "report", help="write report.html, a page with a run's charts and findings, into its folder; or compare runs"
    )
    report.add_argument("runs", nargs="+", metavar="run", help="a run folder; several are compared in one page")
    report.add_argument("--to", metavar="FILE", help="the page to write (default of a comparison: comparison.html)")
    report.set_defaults(verb=_run_report)

    drill = verbs.add_parser("drill", help="inject faults into small runs and check that each is diagnosed")
    drill.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="settings of the runs, such as zero_stage=3"
    )
    drill.add_argument("--kinds", default="", metavar="A,B", help="inject only these faults (default: all)")
    drill.add_argument("--seeds", type=parse_count, default=1, metavar="N", help="repeat each N times (default 1)")
    drill.add_argument("--json", action="store_true", help="print each outcome as one JSON object")
    drill.set_defaults(verb=_run_drill)


def _run_explain(arguments: argparse.Namespace) -> None:
    from surefoot.findings import CATALOGUE

    code = (arguments.what or "").upper()
    if re.fullmatch(r"SF\d+", code) and code not in CATALOGUE:
        raise ConfigError(f"there is no finding {code}. `surefoot explain` lists all.")
    if not code or code in CATALOGUE:
        pages = {code: CATALOGUE[code]} if code else CATALOGUE
        titles = "\n".join(f"{name} {page.title} ({page.severity})" for name, page in pages.items())
        text = CATALOGUE[code].as_text(code) if code else titles
        show({name: asdict(page) for name, page in pages.items()}, text, as_json=arguments.json)
    elif Path(arguments.what).is_file():
        from surefoot.diagnostics.monitor.explain_log import explain_log

        log = explain_log(Path(arguments.what))
        show(log.as_dict(), log.as_text(), as_json=arguments.json)
    else:
        from surefoot.diagnostics.monitor.explain import explain

        explanation = explain(Path(arguments.what))
        show(explanation.as_dict(), explanation.as_text(), as_json=arguments.json)


def _run_watch(arguments: argparse.Namespace) -> None:
    if arguments.web:
        from surefoot.diagnostics.report.live import watch_in_browser

        watch_in_browser(Path(arguments.run), arguments.port)
        return
    from surefoot.diagnostics.monitor.watch import watch

    watch(Path(arguments.run), once=arguments.once)


def _run_report(arguments: argparse.Namespace) -> None:
    from surefoot.diagnostics.report.comparison import write_comparison
    from surefoot.diagnostics.report.html import write_report

    runs = [Path(run) for run in arguments.runs]
    target = Path(arguments.to) if arguments.to is not None else None
    print(write_report(runs[0], target) if len(runs) == 1 else write_comparison(runs, target or Path(COMPARISON)))


def _run_drill(arguments: argparse.Namespace) -> int:
    from surefoot.diagnostics.drill import drill

    missed = total = 0
    kinds = arguments.kinds.split(",") if arguments.kinds else []
    for outcome in drill(kinds, seeds=arguments.seeds, overrides=arguments.overrides):
        total, missed = total + 1, missed + (not outcome.is_named)
        after = f"{outcome.after_s:5.1f} s" if outcome.after_s is not None else "      -"
        sign = "ok    " if outcome.is_named else "MISSED"
        text = f"{sign} {after}  {outcome.kind:22} {outcome.found or 'nothing':8} {outcome.cause}"
        show(outcome.as_dict(), text, as_json=arguments.json)
        sys.stdout.flush()
    if not arguments.json:
        print(f"{total - missed} of {total} faults were diagnosed")
    return StoppedOnFinding.exit_status if missed else DONE
