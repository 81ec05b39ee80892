"""What `surefoot train` would refuse before it reads weights or data, as a check of the doctor."""

from pathlib import Path

from surefoot.config import LoadedConfig
from surefoot.doctor.check import Check, fine, wrong
from surefoot.errors import SurefootError
from surefoot.models.build import load_config
from surefoot.models.sources import resolve_model
from surefoot.parallel.layout import Layout
from surefoot.training.expert_parallel import check_experts
from surefoot.training.folder import check_folder
from surefoot.training.resolve import resolve
from surefoot.training.rollouts import check_routing_replay


def refusal(loaded: LoadedConfig) -> Check:
    """Whether the run would be refused on this machine. A model that is not in a folder here is not fetched."""
    name, run = "the run itself", loaded.run
    ranks = run.nproc_per_node * run.nnodes
    try:
        loaded = resolve(loaded, ranks)
        Layout.of(loaded.run, ranks, loaded.where)
        check_folder(loaded)
        if Path(run.model).exists() or run.model.startswith(("/", ".", "~")):
            base = resolve_model(run.model, loaded.where("model"))
            load_config(base)
            check_experts(loaded, base)
            check_routing_replay(loaded, base)
    except SurefootError as error:
        return wrong(name, "SF743", str(error), is_fatal=True)
    return fine(name, "it would start, as far as can be told without its weights and data")
