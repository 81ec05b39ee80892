"""Doctor check of everything that `surefoot train` refuses before it reads weights or data."""

import shutil
from pathlib import Path

from surefoot.config import LoadedConfig, vllm_settings
from surefoot.config.resolve import resolve
from surefoot.data.build_dataset import check_sources, open_images
from surefoot.diagnostics.preflight.check import Check, NotApplicable, Result, fail, ok, run_check
from surefoot.distributed.parallel_dims import Layout
from surefoot.errors import ConfigError, SurefootError
from surefoot.methods.registry import method_of
from surefoot.models.adapter_files import load_adapter_files
from surefoot.models.build import load_config, load_tokenizer
from surefoot.models.hubs import require_package
from surefoot.models.model_size import weights_of
from surefoot.models.pretrained import check_generation_config
from surefoot.models.resolve_model import folder_here, resolve_model
from surefoot.models.weight_loading import check_weights_fill
from surefoot.training.expert_parallel import check_experts
from surefoot.training.run_dir import check_folder, check_named_checkpoint, check_resume
from surefoot.training.train_setup import (
    check_packages,
    check_router_biases,
    check_targets,
)

NAME = "the run itself"


def refusal(loaded: LoadedConfig) -> Check:
    """Check whether the run would be refused on this machine. Fetches no model that is not in a local folder."""
    return run_check(NAME, _check_run, loaded)


def _check_run(loaded: LoadedConfig) -> Result:
    run = loaded.run
    ranks = run.nproc_per_node * run.nnodes
    try:
        loaded = resolve(loaded, ranks)
        Layout.of(loaded.run, ranks, loaded.where)
        check_folder(loaded)
        check_resume(loaded)
        check_packages(loaded)
        is_unpacked = run.model.startswith("pypi:") and folder_here(run.model) is not None
        if is_unpacked or Path(run.model).exists() or run.model.startswith(("/", ".", "~")):
            base = resolve_model(run.model, loaded.where("model"))
            model = load_config(base)
            check_experts(loaded, base)
            method_of(run).check_model(loaded, base)
            check_router_biases(loaded, base)
            check_targets(loaded, base)
            open_images(loaded, base, model, load_tokenizer(base, run.chat_template))
            check_generation_config(base)
            weights_of(base)  # a damaged file is reported by `check_model`
            check_weights_fill(base, has_score=run.has_score)
        else:
            require_package(run.model, loaded.where("model"))
        _check_named_files(loaded)
    except ValueError as error:  # of a damaged file
        raise NotApplicable(str(error)) from error
    except (SurefootError, OSError) as error:
        return fail("SF743", str(error), is_fatal=True)
    return ok("it would start, as far as its config, its files and the shapes of its weights show")


def _check_named_files(loaded: LoadedConfig) -> None:
    """Check that the files that the run reads exist, except those that are fetched. Raises: SurefootError."""
    run = loaded.run
    check_sources(loaded)
    if run.init_adapter is not None:
        load_adapter_files(Path(run.init_adapter))
    method_of(run).check_files(loaded)
    rollouts = vllm_settings(run)
    if rollouts is not None and rollouts.starts_server and shutil.which(rollouts.vllm_command) is None:
        raise ConfigError(
            f"vllm_command: there is no {rollouts.vllm_command} here. Give the path of the `vllm` command of its "
            f"virtual environment, or the address of a server with vllm_server ({loaded.where('vllm_command')})."
        )
    check_named_checkpoint(loaded)
