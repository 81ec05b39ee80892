"""A model as one rank holds it: elements and bytes of its shards, of what FSDP gathers, and of what is sent."""

from dataclasses import dataclass

from surefoot.distributed.parallel_dims import Layout
from surefoot.planner.sizes import FP32_BYTES, Elements, Sizes

COPIES_IN_REDUCTION, COPIES_IN_REDUCTION_GLOO = 2, 3
"""Copies of a group's gradients: as computed and as sent; gloo adds the received ones."""
GATHERED_LAYERS = 2
"""Layers that FSDP has gathered at once: it gathers the next layer while one computes."""


@dataclass(frozen=True)
class ShardedModel:
    """A model and its layout over the ranks."""

    sizes: Sizes
    layout: Layout

    @property
    def dense_shards(self) -> int:
        return self.layout.fsdp

    @property
    def expert_shards(self) -> int:
        layout, num_experts = self.layout, self.sizes.num_experts
        return (layout.expert_shards(num_experts) if num_experts else layout.fsdp) * layout.expert_parallel

    def count_shard(self, dense: int, experts: int) -> int:
        """Return the elements in one shard of dense and of expert weights."""
        return -(-dense // self.dense_shards) + -(-experts // self.expert_shards)

    @property
    def trained_elements(self) -> int:
        """Trained elements of this rank's shard."""
        return self.count_shard(self.sizes.whole.trained, self.sizes.whole.expert_trained)

    @property
    def trained_bytes(self) -> int:
        """Bytes of this rank's shard of the trained weights."""
        return FP32_BYTES * self.trained_elements

    @property
    def frozen_bytes(self) -> int:
        """Bytes of the frozen weights that this rank holds at rest."""
        whole = self.sizes.whole
        if self.layout.zero_stage == 3:
            return whole.frozen_bytes // self.dense_shards + whole.expert_frozen_bytes // self.expert_shards
        return whole.frozen_bytes + whole.expert_frozen_bytes // self.layout.expert_parallel

    @property
    def is_grouped_by_layer(self) -> bool:
        """Whether FSDP gathers and reduces layer by layer; a frozen vision tower changes nothing for the decoder."""
        return self.layout.zero_stage == 3 or self.sizes.layer.frozen + self.sizes.layer.expert_frozen == 0

    @property
    def gradient_share(self) -> float:
        """Share of the computed gradients that stays on a rank's device during the backward, by elements.

        A rank computes the gradients of its own experts and of all dense weights. With offload they leave the device
        once they are summed.
        """
        layout = self.layout
        dense, experts = self.sizes.whole.trained, self.sizes.whole.expert_trained
        computed = max(1, dense + experts / layout.expert_parallel)
        if not (layout.is_sharded and layout.zero_stage >= 2 and self.is_grouped_by_layer):
            return (dense + experts / layout.expert_parallel) / computed
        return 0.0 if layout.offload else (dense / self.dense_shards + experts / self.expert_shards) / computed

    def count_gathered_experts(self, elements: Elements) -> int:
        """Return the elements of this rank's share of the experts; 0 if no other rank has the same share."""
        ranks = self.layout.expert_parallel
        return elements.expert_trained // ranks if ranks < self.layout.size else 0

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the gathered weights that exist besides this rank's shard while it computes."""
        sizes = self.sizes
        if not self.layout.is_sharded:
            return 0
        if self.layout.zero_stage < 3:
            return FP32_BYTES * (sizes.whole.trained + self.count_gathered_experts(sizes.whole))
        layers = min(GATHERED_LAYERS, sizes.num_layers)
        return self._count_gathered_bytes(sizes.outside) + layers * self._count_gathered_bytes(sizes.layer)

    def _count_gathered_bytes(self, elements: Elements) -> int:
        ranks = self.layout.expert_parallel
        frozen_bytes = elements.frozen_bytes + elements.expert_frozen_bytes // ranks
        return frozen_bytes + FP32_BYTES * (elements.trained + elements.expert_trained // ranks)

    def count_reduction_bytes(self, *, is_on_gpu: bool) -> int:
        """Count the buffers of one group's gradients in a reduction: as computed, and as sent."""
        sizes, layout = self.sizes, self.layout
        if not layout.is_sharded or layout.size == 1:
            return 0
        groups = (sizes.layer, sizes.outside) if self.is_grouped_by_layer else (sizes.whole,)
        if layout.expert_parallel > 1:  # experts of expert parallelism are reduced in a separate group, if at all
            experts, dense = self.count_gathered_experts(sizes.layer), max(group.trained for group in groups)
            largest = max(experts, dense) if is_on_gpu else experts + dense  # gloo holds the buffers of both groups
        else:
            largest = max(group.all_trained for group in groups)
        return (COPIES_IN_REDUCTION if is_on_gpu else COPIES_IN_REDUCTION_GLOO) * FP32_BYTES * largest

    def count_pinned_bytes(self, *, is_trained: bool) -> int:
        """Count the bytes of this rank's shard of the trained or frozen weights in pinned memory."""
        return sum(
            count * shape.pinned_bytes(self.expert_shards if shape.is_expert else self.dense_shards)
            for shape, count in self.sizes.tensors.items()
            if shape.is_trained == is_trained
        )

    @property
    def pinned_rounding_bytes(self) -> int:
        """Bytes that pinned memory adds to offloaded weights and gradients by rounding up."""
        extra = 2 * (self.count_pinned_bytes(is_trained=True) - self.trained_bytes)
        if self.layout.zero_stage == 3:
            extra += self.count_pinned_bytes(is_trained=False) - self.frozen_bytes
        return max(0, extra)

    def count_sent_bytes(self, micro_batches: int) -> int:
        """Count the bytes that a rank sends in a step for gradients and gathered weights, without rows to experts."""
        layout, whole = self.layout, self.sizes.whole
        if layout.size == 1:
            return 0
        trained = FP32_BYTES * (whole.trained + self.count_gathered_experts(whole))
        if layout.zero_stage == 0:
            return 2 * trained
        reductions = micro_batches if layout.zero_stage >= 2 else 1
        if layout.zero_stage < 3:
            return trained * (1 + reductions)
        frozen = whole.frozen_bytes + whole.expert_frozen_bytes // layout.expert_parallel
        return reductions * (2 * (trained + frozen) + trained)
