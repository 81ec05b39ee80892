"""The command `surefoot serve`: a trained model behind OpenAI's API, by vLLM or by the server of transformers."""

import json
import os
import shutil
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.import_utils import is_serve_available

import surefoot.data.model_processor as processors
from surefoot.config.vllm_args import allowed_lora_rank
from surefoot.errors import ConfigError
from surefoot.inference.load import ModelFiles, load
from surefoot.models.adapter_files import load_adapter_files
from surefoot.system.console import say
from surefoot.system.loopback import loopback_variables

Engine = Literal["vllm", "transformers"]


@dataclass(frozen=True)
class Endpoint:
    """Address of a server."""

    host: str
    port: int

    def announce(self, files: ModelFiles, engine: Engine) -> None:
        """Print where the server answers, and the name under which requests ask for its model."""
        say(f"{engine} serves {files.name} at http://{self.host}:{self.port}/v1 (model={files.name})")


def choose_engine() -> Engine:
    """Return vllm if its command is installed, else transformers."""
    return "vllm" if shutil.which("vllm") else "transformers"


def serve_with_vllm(files: ModelFiles, endpoint: Endpoint, arguments: Sequence[str]) -> None:
    """Replace this process by `vllm serve`, with further arguments for it. Raises: ConfigError without the command."""
    command = shutil.which("vllm")
    if command is None:
        raise ConfigError("there is no `vllm` command. Install vLLM (pip install vllm), or use --engine transformers.")
    options = ["--host", endpoint.host, "--port", str(endpoint.port), *vllm_options(files), *arguments]
    environment = {**loopback_variables(), "VLLM_NO_USAGE_STATS": "1", **os.environ}
    endpoint.announce(files, "vllm")
    os.execve(command, [command, "serve", str(files.base), *options], environment)


def vllm_options(files: ModelFiles) -> list[str]:
    """Return the options of `vllm serve` that name the model and load its adapter."""
    if files.adapter is None:
        return ["--served-model-name", files.name]
    config, _ = load_adapter_files(files.adapter)
    if config.get("use_dora"):
        raise ConfigError(
            f"vLLM serves no adapter with magnitudes (use_dora), and {files.adapter} has them. Use --engine "
            f"transformers, or `surefoot export {files.run or files.adapter} FOLDER --merge` and serve that."
        )
    module: dict[str, Any] = {"name": files.name, "path": str(files.adapter.resolve())}
    options = ["--enable-lora", "--max-lora-rank", str(allowed_lora_rank(config["r"]))]
    # The experts of a layer are in one tensor; the parameter of a linear layer has the name `weight`.
    if any(not name.endswith(".weight") for name in config.get("target_parameters") or ()):
        options.append("--enable-mixed-moe-lora-format")
        module |= {"is_3d_lora_weight": True}
    return [*options, "--lora-modules", json.dumps(module)]


def serve_with_transformers(files: ModelFiles, endpoint: Endpoint) -> None:
    """Serve with transformers' own server until the process is stopped.

    Raises: ConfigError if its packages are missing, or the address cannot be used.
    """
    if not is_serve_available():
        raise ConfigError(
            "the server of transformers needs its packages: pip install 'surefoot[serve]', or install vLLM (pip "
            "install vllm)."
        )
    import uvicorn

    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((endpoint.host, endpoint.port))
        except OSError as error:
            raise ConfigError(
                f"the server cannot listen on {endpoint.host}:{endpoint.port}: {error.strerror}. "
                "Choose another with --port."
            ) from error
        model, tokenizer = load(files)
        server = uvicorn.Server(uvicorn.Config(_build_app(model, _processor(files, model, tokenizer), files.name)))
        endpoint.announce(files, "transformers")
        with suppress(KeyboardInterrupt):  # Ctrl-C ends a server
            server.run(sockets=[listening])


def _processor(files: ModelFiles, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the tokenizer, or for a model that reads images its processor, with the tokenizer's chat template."""
    if processors.vision_class(model.config) is None or processors.processor_file(files.base) is None:
        return tokenizer
    processor = processors.load_model_processor(files.base, model.config, tokenizer).processor
    processor.chat_template = tokenizer.chat_template
    return processor


def _build_app(model: PreTrainedModel, processor: Any, name: str) -> Any:
    """Return the application of transformers' server with one model, which is loaded already."""
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.response import ResponseHandler
    from transformers.cli.serving.server import build_server
    from transformers.cli.serving.systemone import SystemOneHandler
    from transformers.cli.serving.transcription import TranscriptionHandler
    from transformers.cli.serving.utils import GenerationState

    class LoadedModel(ModelManager):  # type: ignore[misc]
        """Manager of the server's models that has one."""

        def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[PreTrainedModel, Any]:
            return model, processor

        def get_gen_models(self) -> list[dict[str, Any]]:
            return [{"id": name, "object": "model", "owned_by": "surefoot", "created": 0}]

    manager, state = LoadedModel(), GenerationState()
    manager.force_model = name  # a request for another model is refused
    return build_server(
        manager,
        ChatCompletionHandler(manager, state),
        completion_handler=CompletionHandler(manager, state),
        response_handler=ResponseHandler(manager, state),
        transcription_handler=TranscriptionHandler(manager, state),
        systemone_handler=SystemOneHandler(manager, state),
        generation_state=state,
    )
