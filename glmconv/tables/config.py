"""Reading a raw ``config.json``: typed fields, all defects collected, nothing defaulted silently.

transformers' parsed configs rename and default fields, so bridges read the file itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from glmconv.basics.abbreviated import brief
from glmconv.basics.dtypes import BY_TORCH_NAME
from glmconv.tables.config_fields import MAX_SIZE
from glmconv.tables.config_keys import Neutral
from glmconv.tables.config_rope import RopeFields
from glmconv.tables.spec import Moe

__all__ = [
    "MAX_EXPERTS",
    "MAX_HEADS",
    "MAX_LAYERS",
    "MAX_MTP_LAYERS",
    "MAX_SIZE",
    "ConfigReader",
    "Neutral",
    "Shapes",
    "check_experts",
    "check_routing",
    "count_experts",
    "count_mtp_layers",
    "sigmoid_experts",
]

MAX_LAYERS = 1 << 12
MAX_MTP_LAYERS = 1 << 6
MAX_HEADS = 1 << 16
MAX_EXPERTS = 1 << 17
"""Limits far beyond any model (experts: of all layers together). Tables are expanded by these
numbers, so a wrong one must be an error and not hours of work or gigabytes of names."""

DTYPE_FIELDS = ("dtype", "torch_dtype")
"""Where a config says the dtype of the weights: transformers 5's name, and the earlier one."""


class ConfigReader(RopeFields):
    """Typed access to a config; ``finish`` and ``remarks`` come once all fields were read."""

    def dtype(self) -> str:
        """Torch name of the weights' dtype as the config says it; bfloat16 where it says nothing."""
        given = {name: self.config[name] for name in DTYPE_FIELDS if self.has(name)}
        names = {name: str(value).removeprefix("torch.") for name, value in given.items()}
        for name, value in names.items():
            if value not in BY_TORCH_NAME:
                self.problem(f"is not a dtype of torch: {brief(given[name])}", name)
        if len(set(names.values())) > 1:
            self.problem(f"fields contradict each other: {brief(given)}", " and ".join(given))
        return next(iter(names.values()), "bfloat16")


Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of the tensors that an HF checkpoint holds; empty where the source is not HF."""


def count_mtp_layers(shapes: Shapes, num_layers: int) -> int:
    """MTP layers in the files: numbers from ``num_layers`` on that own an ``enorm``."""
    count = 0
    while f"model.layers.{num_layers + count}.enorm.weight" in shapes:
        count += 1
    return count


def count_experts(shapes: Shapes, layer: int) -> int:
    """Experts of one layer in the files, per expert or stacked; 0 where the layer has none."""
    prefix = f"model.layers.{layer}.mlp.experts."
    stacked = shapes.get(prefix + "gate_up_proj")
    if stacked:
        return stacked[0]
    count = 0
    while f"{prefix}{count}.gate_proj.weight" in shapes:
        count += 1
    return count


def check_experts(
    reader: ConfigReader, shapes: Shapes, field: str, experts: int, moe: tuple[bool, ...]
) -> None:
    """Compare the config's number of experts with the files' (a stale default has misled loaders)."""
    if experts * sum(moe) > MAX_EXPERTS:
        reader.problem(f"{experts} experts in {sum(moe)} layers: more than {MAX_EXPERTS:,} in all", field)
    counted = {count_experts(shapes, layer) for layer, is_moe in enumerate(moe) if is_moe} - {0}
    if counted and max(counted) != experts and len(counted) == 1:
        reader.problem(f"says {experts} experts, the files hold {max(counted)} a layer", field)


def check_routing(reader: ConfigReader, moe: Moe) -> None:
    """A router cannot choose more experts, or groups of them, than there are."""
    if reader.defects:  # numbers may be stand-ins for wrong ones
        return
    if moe.top_k > moe.num_experts:
        reader.problem(f"chooses {moe.top_k} of {moe.num_experts} experts", "num_experts_per_tok")
    reader.divides(moe.num_experts, moe.num_groups, "experts over n_group")
    if moe.top_k_groups > moe.num_groups:
        reader.problem(f"chooses {moe.top_k_groups} of {moe.num_groups} groups", "topk_group")


def sigmoid_experts(
    reader: ConfigReader, shapes: Shapes, moe_layers: tuple[bool, ...], scaling: float = 1.0
) -> Moe:
    """Experts chosen by sigmoid scores plus a learnt bias, under the field names that such configs share.

    ``scaling``: what transformers' class takes where ``routed_scaling_factor`` is absent.
    """
    experts = reader.natural("n_routed_experts", "num_experts", "num_local_experts")
    check_experts(reader, shapes, "n_routed_experts", experts, moe_layers)
    if reader.get("scoring_func") not in (None, "sigmoid"):
        reader.problem("the family's router scores by sigmoid", "scoring_func")
    ffn_size = reader.natural("moe_intermediate_size")
    moe = Moe(
        num_experts=experts,
        ffn_size=ffn_size,
        top_k=reader.natural("num_experts_per_tok"),
        shared_ffn_size=ffn_size * reader.natural("n_shared_experts", default=1, least=0),
        router_bias=True,
        score_function="sigmoid",
        num_groups=reader.natural("n_group", default=1),
        top_k_groups=reader.natural("topk_group", default=1),
        scaling=reader.number("routed_scaling_factor", scaling),
        normalise=reader.flag("norm_topk_prob", True),
    )
    check_routing(reader, moe)
    _compare_sigmoid_routing(reader, moe)
    return moe


GROUP_SCORES = 2
"""How many scores of a group transformers sums to choose the groups of a group-limited router."""


def _compare_sigmoid_routing(reader: ConfigReader, moe: Moe) -> None:
    """Where transformers' router and megatron-core's (``topk_routing_with_score_function``) part."""
    if not moe.normalise and moe.top_k > 1:
        what = "megatron-core always normalises the scores of more than one expert"
        reader.changes_forward("norm_topk_prob", False, what)
    if moe.normalise and moe.top_k == 1:
        what = "megatron-core does not normalise the score of a single expert"
        reader.changes_forward("norm_topk_prob", True, what)
    if moe.num_groups > 1 and moe.top_k // moe.top_k_groups != GROUP_SCORES:
        best = moe.top_k // moe.top_k_groups
        reader.changes_forward(
            "n_group",
            moe.num_groups,
            f"megatron-core chooses groups of experts by the best {best} scores of a group, "
            f"transformers by the best {GROUP_SCORES}",
        )
