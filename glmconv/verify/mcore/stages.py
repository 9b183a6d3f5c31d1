"""A Megatron model cut into stages, each built and dropped by itself.

A stage is one piece of megatron-core's own ``GPTModel``: its embedding, one of its layers, its
final norm and head, or one MTP layer. The specs are megatron-core's, so are all the modules; a
stage adds the names under which the pieces lie in a torch_dist checkpoint, which it asks
megatron-core for (``sharded_state_dict``). Build inside ``glmconv.verify.mcore.parallel.runtime``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from glmconv.tables.spec import ModelSpec
from glmconv.verify.mcore.align import align_model_epsilons, feed_indexer_normalised_latent
from glmconv.verify.mcore.config import transformer_config
from glmconv.verify.mcore.model import block_spec

EXTRA_STATE = "_extra_state"
PER_LAYER = {"non_homogeneous_layers": True}
"""Content metadata under which every layer has keys of its own."""


@dataclass(frozen=True, slots=True)
class DiskPlace:
    """Where a parameter lies in a torch_dist with keys per layer: ``index`` is the expert, or ()."""

    key: str
    index: tuple[int, ...]


class Stage(nn.Module):
    """``module`` and its place in the model.

    ``stored`` is the prefix of the module's keys on disk; ``axis`` is (layer, layers) where
    layers may be stored as one tensor.
    """

    def __init__(self, module: Any, stored: str, axis: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.module = module
        self.stored, self.axis = stored, axis
        self.alignments: tuple[str, ...] = ()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The module's own, renamed as ``TransformerBlock`` and ``MultiTokenPredictionBlock`` do."""
        from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding

        inner, stored, offsets = f"{prefix}module.", self.stored, []
        if self.axis is not None:
            if (metadata or {}).get("non_homogeneous_layers") or (metadata or {}).get(
                "singleton_local_shards"
            ):
                stored = f"{stored}{self.axis[0]}."
            else:
                offsets = [(0, *self.axis)]
        sharded: dict[str, Any] = self.module.sharded_state_dict(inner, offsets, metadata)
        replace_prefix_for_sharding(sharded, inner, stored)
        return sharded

    def places(self) -> dict[str, DiskPlace]:
        """Each parameter and persistent buffer by name, with its place on disk.

        megatron-core itself tells: in memory an expert is a module of its own, on disk a row of a
        tensor of all experts, and an MTP layer's block has another name.
        """
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

        from glmconv.verify.mcore.load import with_groups

        found = {}
        for name, item in self.sharded_state_dict(metadata=with_groups(dict(PER_LAYER))).items():
            parts = nested_values(item.build()) if isinstance(item, ShardedTensorFactory) else [item]
            first = next((part for part in parts if isinstance(part, ShardedTensor)), None)
            if first is not None:
                lead = first.prepend_axis_num
                found[name] = DiskPlace(first.key, tuple(int(i) for i in first.global_offset[:lead]))
        return found

    def tensors(self) -> dict[str, Tensor]:
        """The model's own parameters and persistent buffers, not copies, by name."""
        return {
            name: tensor
            for name, tensor in self.state_dict(keep_vars=True).items()
            if isinstance(tensor, Tensor) and not name.endswith(EXTRA_STATE)
        }


class StageBuilder:
    """Builds the stages of one model, empty: the weights come from a checkpoint.

    ``align`` false leaves the runtime's own epsilons and indexer input as they are.
    """

    def __init__(self, spec: ModelSpec, precision: str, index_topk: int | None, device: str) -> None:
        self.spec, self.device = spec, device
        options: dict[str, Any] = {"precision": precision, "index_topk": index_topk}
        self.config = transformer_config(spec, mtp=False, **options)
        self.mtp_config = transformer_config(spec, **options)
        self.block = block_spec(self.config)

    def embedding(self) -> Stage:
        """A ``GPTModel`` without layers and head: ``module.embedding`` and ``module.rotary_pos_emb``."""
        return self._finish(Stage(self._model(pre_process=True, post_process=False), ""))

    def head(self) -> Stage:
        """A ``GPTModel`` of final norm and head; a tied head brings the embedding along."""
        return self._finish(Stage(self._model(pre_process=self.spec.tied, post_process=True), ""))

    def layer(self, number: int) -> Stage:
        """Decoder layer ``number`` (from 0) as ``TransformerBlock`` builds it."""
        from megatron.core.transformer.spec_utils import build_module

        built = build_module(self.block.layer_specs[number], config=self.config, layer_number=number + 1)
        return self._finish(Stage(built, "decoder.layers.", (number, self.spec.num_layers)))

    def mtp(self, number: int) -> Stage:
        """MTP layer ``number`` (from 0): norms, projection and block."""
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.spec_utils import build_module

        block = get_gpt_mtp_block_spec(
            self.mtp_config, block_spec(self.mtp_config), use_transformer_engine=True
        )
        built = build_module(
            block.layer_specs[number],
            config=self.mtp_config,
            layer_number=number + 1,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        return self._finish(Stage(built, f"mtp.layers.{number}."))

    def _model(self, *, pre_process: bool, post_process: bool) -> Any:
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

        return GPTModel(
            config=self.config,
            transformer_layer_spec=TransformerBlockSubmodules(
                layer_specs=[], layer_norm=self.block.layer_norm
            ),
            vocab_size=self.spec.vocab_size,
            max_sequence_length=self.spec.max_positions,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=self.spec.tied,
            position_embedding_type="rope",
            rotary_percent=self.spec.rope.partial_factor,
            rotary_base=self.spec.rope.theta,
        )

    def _finish(self, stage: Stage) -> Stage:
        stage.eval().requires_grad_(False)
        if self.device != "cpu":
            # The router's weight is made on the CPU and moved later, as trainers do.
            stage.to(self.device)
        module: Any = stage.module
        stage.alignments = tuple(align_model_epsilons(module) + feed_indexer_normalised_latent(module))
        return stage
