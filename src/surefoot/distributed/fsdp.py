"""FSDP wrap order: which parameters are sharded, when they are gathered, and how gradients are summed.

zero_stage  frozen weights   trained weights at rest   between forward and backward   gradients
0           on every rank    on every rank             -                              summed once per step
1           on every rank    cut over the ranks        gathered                       summed and cut once per step
2           on every rank    cut over the ranks        gathered                       summed and cut per micro-batch
3           cut              cut                       freed, gathered again          summed and cut per micro-batch

Optimizer state is where the trained weights are at rest. With expert parallelism the experts are cut by expert first.
Experts fewer than the ranks are cut over fewer ranks, and copied.
The loss is normalised over the global batch, so gradients are summed, never averaged.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard, register_fsdp_forward_method
from transformers import PreTrainedModel
from transformers.distributed.expert_parallel import apply_expert_parallelism

from surefoot.distributed import gloo_collectives
from surefoot.distributed.parallel_dims import Layout, Meshes
from surefoot.models.decoder_layers import decoder_layers
from surefoot.models.expert_layouts import can_be_shared_out, experts_of, is_fused_experts
from surefoot.models.vision import tower_blocks

T = TypeVar("T")


class Sharding:
    """Sharding of one model over the ranks; `models.build` applies it between construction and reading weights."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.meshes = Meshes(layout, device)
        self.is_offloaded = layout.offload

    def apply(self, model: PreTrainedModel) -> None:
        """Shard the parameters of a model on the meta device, whose trained parameters are marked, in place."""
        layout = self.layout
        frozen = {parameter for parameter in model.parameters() if not parameter.requires_grad}
        ignored = frozen if layout.zero_stage < 3 else set()
        """Parameters that the groups below must not shard."""
        ignored = ignored | self._shard_experts(model, ignored)
        layers = decoder_layers(model)
        # One group for all LoRA parameters: they are few, and each group costs two collectives per step.
        for blocks in (layers, tower_blocks(model)):
            for block in blocks:
                if layout.zero_stage == 3 or all(parameter.requires_grad for parameter in block.parameters()):
                    self._fully_shard(block, self.meshes.dense, ignored, free=layout.zero_stage == 3)
        self._fully_shard(model, self.meshes.dense, ignored, free=False)

    def reshard(self, model: PreTrainedModel) -> None:
        """Free the parameters that a forward without backward leaves gathered."""
        reshard(model)

    def _shard_experts(self, model: PreTrainedModel, ignored: set[nn.Parameter]) -> set[nn.Parameter]:
        """Shard experts that cannot be sharded like other parameters, and return their parameters.

        These are experts under expert parallelism, and stacks of fewer experts than there are ranks.
        """
        layout = self.layout
        is_owner = can_be_shared_out if layout.expert_parallel > 1 else is_fused_experts
        owners = {name: module for name, module in model.named_modules() if is_owner(module)}
        if layout.expert_parallel > 1:
            self._share_out(model, owners)
        done: set[nn.Parameter] = set()
        for module in owners.values():
            own = set(module.parameters(recurse=False))
            shards = layout.expert_shards(experts_of(module))
            if layout.expert_parallel == 1 and (shards == layout.fsdp or own <= ignored):
                continue
            done |= own
            mesh = self.meshes.experts(shards)
            if layout.size // layout.expert_parallel == 1:
                continue  # each expert is on one rank: its gradient is complete there
            over = mesh["dp_replicate", "fsdp"] if mesh.size(0) > 1 else mesh["fsdp"]
            frozen = {parameter for parameter in own if not parameter.requires_grad}
            for child in module.children():  # a norm of experts: the tokens of every rank train it
                self._fully_shard(child, self.meshes.dense, ignored, free=layout.zero_stage == 3)
            self._fully_shard(module, over, frozen if layout.zero_stage < 3 else set(), free=layout.zero_stage == 3)
        return done

    def _share_out(self, model: PreTrainedModel, owners: dict[str, nn.Module]) -> None:
        """Apply expert parallelism: each rank of a group keeps some experts in full, and tokens travel to them."""
        ep = self.layout.expert_parallel
        assert owners, "expert parallelism of a model without experts"
        plan: dict[str, str] = {}
        for name, module in owners.items():
            assert experts_of(module) % ep == 0, name
            plan |= {f"{name}.{leaf}": "grouped_gemm" for leaf, _ in module.named_parameters(recurse=False)}
            plan[name] = "ep_dispatch_experts"
        mesh = self.meshes.experts(self.layout.expert_shards(experts_of(next(iter(owners.values())))))
        apply_expert_parallelism(model, mesh["ep"], self.meshes.get_mesh("tp"), plan, "all_to_all")

    def _fully_shard(self, module: nn.Module, mesh: Any, ignored: set[nn.Parameter], *, free: bool) -> None:
        options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if self.layout.offload else {}
        cls = type(module)
        fully_shard(module, mesh=mesh, reshard_after_forward=free, ignored_params=ignored, **options)
        assert isinstance(module, FSDPModule)
        # transformers leaves the buffers of a class from elsewhere without values.
        type(module).__module__ = cls.__module__
        module.set_gradient_divide_factor(1.0)
        if mesh.size() > 1:
            # A divide factor goes through PREMUL_SUM otherwise, which gloo lacks and NCCL gets wrong in bfloat16
            # up to torch 2.13 (pytorch#190747).
            module.set_force_sum_reduction_for_comms(True)
            if mesh.device_type == "cpu":
                module.set_custom_reduce_scatter(gloo_collectives.ReduceScatter())  # type: ignore[arg-type]
                module.set_custom_all_gather(gloo_collectives.AllGather())  # type: ignore[arg-type]

    def before_micro_batch(self, model: PreTrainedModel, is_last: bool) -> None:
        """Let stages 0 and 1 sum gradients over the ranks once per step, after the last micro-batch."""
        if self.layout.zero_stage < 2:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_requires_gradient_sync(is_last, recurse=False)


def _is_fully_sharded(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def reshard(model: nn.Module) -> None:
    """Reshard parameters after a forward without backward, which leaves them gathered.

    Gathered parameters are copies. Code that reads the model then would write, or overwrite, the wrong ones.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def as_fsdp_forward(model: PreTrainedModel, function: Callable[..., T]) -> Callable[..., T]:
    """Return `function` wrapped as the model's forward, so that the root group's parameters are gathered for it."""
    if not _is_fully_sharded(model):
        return function
    name = f"_surefoot_{function.__name__}"

    def forward(_: None, *args: Any, **kwargs: Any) -> T:
        return function(*args, **kwargs)

    setattr(model, name, forward)
    register_fsdp_forward_method(model, name)
    return partial(getattr(model, name), None)  # without an argument, torch 2.11 fails on a GPU
