"""The commands that take a run.yaml or write one: train, data, doctor, plan, import and settings."""

import argparse
import shutil
import sys
from pathlib import Path

import surefoot
from surefoot.cli.output import Parser, parse_count, show, working
from surefoot.errors import ConfigError, InputError, StoppedOnFinding
from surefoot.launch.run_verb import DONE, train_and_print
from surefoot.system.console import print_json, report_lost_output, say
from surefoot.system.process import is_local_leader, is_local_rank, is_rank, leave

WIDTH_OF_A_FILE = 120
"""Columns of text that is not written to a terminal."""


def add_run_verbs(verbs: "argparse._SubParsersAction[Parser]") -> None:
    """Add the verbs that take a run.yaml or write one."""
    train = verbs.add_parser(
        "train", help="fine-tune as described by a YAML file", epilog="`surefoot settings` lists all keys."
    )
    train.add_argument("config", help="run.yaml")
    train.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="settings that override the file")
    train.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    shown = train.add_mutually_exclusive_group()
    shown.add_argument("--quiet", action="store_const", dest="verbosity", const="quiet", help="show findings alone")
    shown.add_argument(
        "-v", "--verbose", action="store_const", dest="verbosity", const="verbose",
        help="show each step, and the time of each phase",
    )  # fmt: skip
    train.set_defaults(verb=run_train)

    data = verbs.add_parser("data", help="describe a run's data: format, counts, masks and findings")
    data.add_argument("config", help="run.yaml")
    data.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="settings that override the file")
    data.add_argument("--show", type=parse_count, default=1, metavar="N", help="show the first N samples (default 1)")
    data.add_argument("--json", action="store_true", help="print the report as one JSON object")
    data.set_defaults(verb=_run_data)

    doctor = verbs.add_parser("doctor", help="check this machine, and a run on it, before the run starts")
    doctor.add_argument("config", nargs="?", help="run.yaml")
    doctor.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="settings that override the file")
    doctor.add_argument("--deep", action="store_true", help="start the ranks to test network, devices and disk")
    doctor.add_argument("--against", metavar="RUN", help="list what changed since that run or --json output")
    doctor.add_argument("--json", action="store_true", help="print the machine and the checks as one JSON object")
    doctor.set_defaults(verb=_run_doctor)

    plan = verbs.add_parser("plan", help="forecast the memory and time of a run, and suggest settings that fit")
    plan.add_argument("config", help="run.yaml; of its model only config.json is read")
    plan.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value",
        help="settings that override the file; device=h200 nodes=2 for other machines, host_gib=512, price=2.5 an hour",
    )  # fmt: skip
    plan.add_argument("--json", action="store_true", help="print the forecast as one JSON object")
    plan.set_defaults(verb=_run_plan)

    imported = verbs.add_parser(
        "import", help="write the run.yaml of a run of ms-swift, LLaMA-Factory, TRL, axolotl, or of a DeepSpeed JSON"
    )
    imported.add_argument("--to", metavar="FILE", help="write to a new FILE instead of printing")
    imported.add_argument("--json", action="store_true", help="print the converted and the dropped settings as JSON")
    imported.add_argument(
        "source", nargs=argparse.REMAINDER, metavar="source", help="a .yaml, .json, .sh or .py file, or a command line"
    )
    imported.set_defaults(verb=_run_import)

    settings = verbs.add_parser("settings", help="list every setting of run.yaml with its default")
    settings.add_argument("words", nargs="*", default=[], help="show only settings with these words, such as lora")
    settings.add_argument("--json", action="store_true")
    settings.add_argument("--schema", action="store_true", help="a JSON schema of run.yaml, for editors")
    settings.set_defaults(verb=_run_settings)


def run_train(arguments: argparse.Namespace) -> int:
    from surefoot.config import load_config
    from surefoot.data.sources import check_files_exist
    from surefoot.models.resolve_model import check_is_known

    shown = [f"verbosity={arguments.verbosity}"] if arguments.verbosity else []
    loaded = load_config(arguments.config, [*arguments.overrides, *shown])
    check_is_known(loaded.run.model, loaded.where("model"))
    check_files_exist(loaded)
    if loaded.run.preflight and is_local_leader():  # if it refuses, torchrun ends the other ranks
        from surefoot.diagnostics.doctor import check_start

        if check_start(loaded):
            return StoppedOnFinding.exit_status
    if is_rank() or not loaded.run.health:
        return train_and_print(loaded, as_json=arguments.json)
    from surefoot.launch.run_supervisor import train_supervised

    return train_supervised(loaded, as_json=arguments.json)


def _run_data(arguments: argparse.Namespace) -> int:
    report = surefoot.describe_data(arguments.config, arguments.overrides, show=arguments.show)
    from surefoot.data.inspect import as_text  # it needs numpy: an invalid config is refused before

    show(report.as_dict(), as_text(report, color=sys.stdout.isatty()), as_json=arguments.json)
    return InputError.exit_status if report.refusal is not None else DONE


def _run_doctor(arguments: argparse.Namespace) -> int:
    from surefoot.config import load_config
    from surefoot.diagnostics.doctor import doctor

    loaded = load_config(arguments.config, arguments.overrides) if arguments.config is not None else None
    with working("checking this machine"):
        report = doctor(loaded, is_deep=arguments.deep, against=arguments.against)
    if isinstance(report, int):
        status = report
        if not is_local_rank():
            say("the machine of rank 0 shows the report of all")
    else:
        show(report.as_dict(), report.as_text(), as_json=arguments.json)
        status = StoppedOnFinding.exit_status if report.has_failed else DONE
    if is_local_rank():  # a thread of a hanging check would keep this process alive
        leave(report_lost_output(status))
    return status


def _run_plan(arguments: argparse.Namespace) -> int:
    from surefoot.planner.command import plan

    with working("forecasting memory and time"):
        result = plan(arguments.config, arguments.overrides)
    show(result.as_dict(), result.as_text(), as_json=arguments.json)
    return DONE if result.forecast.fits else StoppedOnFinding.exit_status


def _run_import(arguments: argparse.Namespace) -> int:
    from surefoot.config import method_names
    from surefoot.migrate.convert import convert
    from surefoot.migrate.parse_input import parse_run
    from surefoot.system.atomic_io import write_text

    words = arguments.source[1:] if arguments.source[:1] == ["--"] else arguments.source
    if not words:
        raise ConfigError("nothing to import. Give a .yaml, .json or .sh file, or a command line after `--`.")
    if len(words) > 1 and Path(words[0]).is_file():
        raise ConfigError(f"{' '.join(words[1:])}: options of import come before the file.")
    parsed_run = parse_run(words[0] if len(words) == 1 else words)
    converted = convert(parsed_run)
    if arguments.to is not None:
        if Path(arguments.to).exists():
            raise ConfigError(f"--to {arguments.to}: this file exists. Give another name.")
        converted.move_to(Path(arguments.to).resolve().parent)
        write_text(Path(arguments.to), converted.as_yaml())
        for line in (f"written: {arguments.to}", *converted.list_differences()):
            say(line)
    if arguments.json:
        print_json(converted.as_dict())
    elif arguments.to is None:
        print(converted.as_yaml(), end="")
    for finding in converted.findings:
        say(finding.as_text())
    if parsed_run.method in method_names():
        return DONE
    say(f"error: method: {parsed_run.method} is not available yet, so nothing can be trained with these settings.")
    return InputError.exit_status


def _run_settings(arguments: argparse.Namespace) -> int:
    from surefoot.config.describe import describe_settings, run_schema, settings_as_text
    from surefoot.config.methods import available_classes

    for problem in available_classes()[1]:
        say(f"left out: {problem}")
    if arguments.schema:
        print_json(run_schema())
        return DONE
    if arguments.json:
        print_json(describe_settings())
        return DONE
    print(settings_as_text(arguments.words, shutil.get_terminal_size((WIDTH_OF_A_FILE, 24)).columns))
    return DONE
