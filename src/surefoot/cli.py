"""Commands of the command line. Heavy modules are imported only by the command that needs them."""

import argparse
import difflib
import os
import re
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import surefoot
from surefoot.chat import Chat
from surefoot.errors import ConfigError, InputError, StoppedOnFinding
from surefoot.launch.run_verb import DONE, run_verb, train_and_print
from surefoot.system.console import print_json, protect_streams, report_lost_output, say
from surefoot.system.process import is_local_rank, is_rank, leave, own_stop_signals

WIDTH_OF_A_FILE = 120
"""Columns of text that is not written to a terminal."""


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
    if extra and not (hasattr(parsed, "overrides") and all("=" in text for text in extra)):
        near = difflib.get_close_matches(extra[0].partition("=")[0], parsed.options, n=1)
        hint = ". Settings are written key=value: max_steps=2" if hasattr(parsed, "overrides") else ""
        parser.error(f"unrecognized arguments: {' '.join(extra)}{f'; did you mean {near[0]}?' if near else hint}")
    if extra:  # key=value after an option, and --key=value
        parsed.overrides += extra
    with own_stop_signals() if arguments is None and parsed.verb is _run_train else nullcontext():
        return run_verb(lambda: parsed.verb(parsed) or DONE)


class _Parser(argparse.ArgumentParser):
    """Parser that takes no abbreviations, and remembers the options of the command for suggestions."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "allow_abbrev": False})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the namespace and the unknown arguments; `options`: those of the command."""
        parsed, extra = super().parse_known_args(args, namespace)
        if not hasattr(parsed, "options"):  # the command's own parser runs first
            parsed.options = list(self._option_string_actions)
        return parsed, extra


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs."""
    parser = _Parser(prog="surefoot", description="Fine-tune LLMs: dense and Mixture-of-Experts, LoRA or full.")
    parser.add_argument("--version", action="version", version=f"surefoot {surefoot.__version__}")
    verbs = parser.add_subparsers(required=True, metavar="verb")
    _add_run_verbs(verbs)
    _add_watching_verbs(verbs)
    _add_model_verbs(verbs)
    return parser


def _add_run_verbs(verbs: "argparse._SubParsersAction[_Parser]") -> None:
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
    train.set_defaults(verb=_run_train)

    data = verbs.add_parser("data", help="describe a run's data: format, counts, masks and findings")
    data.add_argument("config", help="run.yaml")
    data.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="settings that override the file")
    data.add_argument("--show", type=_parse_count, default=1, metavar="N", help="show the first N samples (default 1)")
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
        "source", nargs=argparse.REMAINDER, metavar="source", help="a .yaml, .json or .sh file, or a command line"
    )
    imported.set_defaults(verb=_run_import)

    settings = verbs.add_parser("settings", help="list every setting of run.yaml with its default")
    settings.add_argument("words", nargs="*", default=[], help="show only settings with these words, such as lora")
    settings.add_argument("--json", action="store_true")
    settings.add_argument("--schema", action="store_true", help="a JSON schema of run.yaml, for editors")
    settings.set_defaults(verb=_run_settings)


def _add_watching_verbs(verbs: "argparse._SubParsersAction[_Parser]") -> None:
    """Add the verbs that diagnose runs, and the one that injects faults."""
    explain = verbs.add_parser("explain", help="explain why a run stalled, died or leaked, or explain a finding code")
    explain.add_argument("what", help="a run folder, or a code such as SF104; without one, all codes", nargs="?")
    explain.add_argument("--json", action="store_true")
    explain.set_defaults(verb=_run_explain)

    watch = verbs.add_parser("watch", help="watch a run live in the terminal: ranks, phases, speed, memory, findings")
    watch.add_argument("run", help="a run folder")
    watch.add_argument("--once", action="store_true", help="print the current state and exit")
    watch.set_defaults(verb=_run_watch)

    report = verbs.add_parser(
        "report", help="write report.html, a page with a run's charts and findings, into its folder"
    )
    report.add_argument("run", help="a run folder")
    report.set_defaults(verb=_run_report)

    drill = verbs.add_parser("drill", help="inject faults into small runs and check that each is diagnosed")
    drill.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="settings of the runs, such as zero_stage=3"
    )
    drill.add_argument("--kinds", default="", metavar="A,B", help="inject only these faults (default: all)")
    drill.add_argument("--seeds", type=_parse_count, default=1, metavar="N", help="repeat each N times (default 1)")
    drill.add_argument("--json", action="store_true", help="print each outcome as one JSON object")
    drill.set_defaults(verb=_run_drill)


def _add_model_verbs(verbs: "argparse._SubParsersAction[_Parser]") -> None:
    """Add the verbs that read models and write them."""
    export = verbs.add_parser("export", help="write a run's adapter, or the model with the adapter merged in")
    export.add_argument("run", help="a run folder, or an adapter folder")
    export.add_argument("target", help="the new folder to write")
    export.add_argument("--merge", action="store_true", help="merge into the base model and write a plain HF folder")
    export.add_argument("--step", type=int, help="use the checkpoint of this step instead of the end of the run")
    export.add_argument("--json", action="store_true")
    export.set_defaults(verb=_run_export)

    chat = verbs.add_parser("chat", help="chat with a model, or answer one prompt")
    chat.add_argument("model", help="a run folder, a model folder, a hub id or pypi:name==version")
    chat.add_argument("--adapter", help="a PEFT adapter folder to load into the model")
    chat.add_argument("--prompt", type=_as_utf8, help="answer this prompt and exit")
    chat.add_argument("--system", type=_as_utf8, help="the system message")
    chat.add_argument("--max-new-tokens", type=int, default=256)
    chat.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    chat.add_argument("--json", action="store_true")
    chat.set_defaults(verb=_run_chat)

    upcycle = verbs.add_parser("upcycle", help="turn a dense model into a Mixture-of-Experts with the same function")
    upcycle.add_argument("source", help="a dense model: folder, hub id or pypi:name==version")
    upcycle.add_argument("target", help="the new folder to write")
    upcycle.add_argument("--experts", type=int, default=8, help="experts per layer (default 8)")
    upcycle.add_argument("--top-k", type=int, default=2, help="experts per token (default 2)")
    upcycle.add_argument("--form", choices=["mixtral", "qwen2_moe"], default="mixtral")
    upcycle.add_argument("--seed", type=int, default=0, help="seeds the routers")
    upcycle.add_argument("--json", action="store_true")
    upcycle.set_defaults(verb=_run_upcycle)


def _parse_count(text: str) -> int:
    """Parse an integer of 0 or more, for argparse."""
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def _show(value: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Print the result of a command: one line of JSON, or text for a person."""
    if as_json:
        print_json(value)
    else:
        print(text)


def _run_train(arguments: argparse.Namespace) -> int:
    from surefoot.config import load_config
    from surefoot.models.resolve_model import check_is_known

    shown = [f"verbosity={arguments.verbosity}"] if arguments.verbosity else []
    loaded = load_config(arguments.config, [*arguments.overrides, *shown])
    check_is_known(loaded.run.model, loaded.where("model"))
    # If the first rank of a machine refuses, torchrun ends the others.
    is_first_here = not is_rank() or os.environ.get("LOCAL_RANK") == "0"
    if loaded.run.preflight and is_first_here:
        from surefoot.diagnostics.doctor import may_start

        if not may_start(loaded):
            return StoppedOnFinding.exit_status
    if is_rank() or not loaded.run.health:
        return train_and_print(loaded, as_json=arguments.json)
    from surefoot.launch.run_supervisor import train_supervised

    return train_supervised(loaded, as_json=arguments.json)


def _run_data(arguments: argparse.Namespace) -> int:
    report = surefoot.describe_data(arguments.config, arguments.overrides, show=arguments.show)
    from surefoot.data.inspect import as_text  # it needs numpy: an invalid config is refused before

    _show(report.as_dict(), as_text(report, color=sys.stdout.isatty()), as_json=arguments.json)
    return InputError.exit_status if report.refusal is not None else DONE


def _run_doctor(arguments: argparse.Namespace) -> int:
    from surefoot.config import load_config
    from surefoot.diagnostics.doctor import doctor

    loaded = load_config(arguments.config, arguments.overrides) if arguments.config is not None else None
    report = doctor(loaded, is_deep=arguments.deep, against=arguments.against)
    if isinstance(report, int):
        status = report
        if not is_local_rank():
            say("the machine of rank 0 shows the report of all")
    else:
        _show(report.as_dict(), report.as_text(), as_json=arguments.json)
        status = StoppedOnFinding.exit_status if report.has_failed else DONE
    if is_local_rank():  # a thread of a hanging check would keep this process alive
        leave(report_lost_output(status))
    return status


def _run_plan(arguments: argparse.Namespace) -> int:
    from surefoot.planner.command import plan

    result = plan(arguments.config, arguments.overrides)
    _show(result.as_dict(), result.as_text(), as_json=arguments.json)
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
    if arguments.json:
        print_json(converted.as_dict())
    elif arguments.to is None:
        print(converted.as_yaml(), end="")
    for finding in converted.findings:
        say(finding.as_text())
    return DONE if parsed_run.method in method_names() else InputError.exit_status  # written, but not trainable


def _run_explain(arguments: argparse.Namespace) -> None:
    from surefoot.findings import CATALOGUE

    code = (arguments.what or "").upper()
    if re.fullmatch(r"SF\d+", code) and code not in CATALOGUE:
        raise ConfigError(f"there is no finding {code}. `surefoot explain` lists all.")
    if not code or code in CATALOGUE:
        pages = {code: CATALOGUE[code]} if code else CATALOGUE
        titles = "\n".join(f"{name} {page.title} ({page.severity})" for name, page in pages.items())
        text = CATALOGUE[code].as_text(code) if code else titles
        _show({name: asdict(page) for name, page in pages.items()}, text, as_json=arguments.json)
    else:
        from surefoot.diagnostics.monitor.explain import explain

        explanation = explain(Path(arguments.what))
        _show(explanation.as_dict(), explanation.as_text(), as_json=arguments.json)


def _run_watch(arguments: argparse.Namespace) -> None:
    from surefoot.diagnostics.monitor.watch import watch

    watch(Path(arguments.run), once=arguments.once)


def _run_report(arguments: argparse.Namespace) -> None:
    from surefoot.diagnostics.report.html import write_report

    print(write_report(Path(arguments.run)))


def _run_drill(arguments: argparse.Namespace) -> int:
    from surefoot.diagnostics.drill import drill

    missed = total = 0
    kinds = arguments.kinds.split(",") if arguments.kinds else []
    for outcome in drill(kinds, seeds=arguments.seeds, overrides=arguments.overrides):
        total, missed = total + 1, missed + (not outcome.is_named)
        after = f"{outcome.after_s:5.1f} s" if outcome.after_s is not None else "      -"
        sign = "ok    " if outcome.is_named else "MISSED"
        text = f"{sign} {after}  {outcome.kind:22} {outcome.found or 'nothing':8} {outcome.cause}"
        _show(outcome.as_dict(), text, as_json=arguments.json)
        sys.stdout.flush()
    if not arguments.json:
        print(f"{total - missed} of {total} faults were diagnosed")
    return StoppedOnFinding.exit_status if missed else DONE


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


def _run_export(arguments: argparse.Namespace) -> None:
    target = surefoot.export(arguments.run, arguments.target, merge=arguments.merge, step=arguments.step)
    is_adapter = (target / "adapter_config.json").is_file()
    what = "an adapter; with --merge it would be a model that needs no other" if is_adapter else "a whole model"
    payload = {"target": str(target), "merged": arguments.merge, "is_adapter": is_adapter}
    _show(payload, f"written: {target}, {what}", as_json=arguments.json)


def _run_upcycle(arguments: argparse.Namespace) -> None:
    target = surefoot.upcycle(
        arguments.source,
        arguments.target,
        num_experts=arguments.experts,
        top_k=arguments.top_k,
        form=arguments.form,
        seed=arguments.seed,
    )
    model = {"target": str(target), "experts": arguments.experts, "top_k": arguments.top_k, "form": arguments.form}
    _show(model, f"written: {target}", as_json=arguments.json)


def _as_utf8(text: str) -> str:
    """Return an argument with question marks for bytes that are not UTF-8."""
    return text.encode("utf-8", "replace").decode()


def _run_chat(arguments: argparse.Namespace) -> None:
    model, tokenizer = surefoot.load(arguments.model, arguments.adapter)
    chat = Chat(
        model,
        tokenizer,
        arguments.system,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
    )
    if arguments.prompt is None:
        chat.run()
        return
    reply = chat.answer(arguments.prompt)
    _show({"prompt": arguments.prompt, "completion": reply}, reply, as_json=arguments.json)
