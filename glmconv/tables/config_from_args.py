"""An HF config made from what a trainer wrote down, where there is no other (``--config-from-args``)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from glmconv.basics.dtypes import DType
from glmconv.basics.errors import DataError, Defect, UsageError
from glmconv.tables.trainer_fields import PLAIN, STEPS, STEPWISE, Fields

KIND = "config-from-args"


class ArgsReader:
    """The trainer's words as values of a config; what is not there is collected, then an error."""

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        self.missing: list[str] = []

    def need(self, value: Any, *names: str) -> Any:
        """``value``, or a note that the fields ``names`` are missing or unusable."""
        if value is None:
            self.missing += names
        return value

    def natural(self, *names: str) -> Any:
        return self.need(self.fields.natural(*names), names[0])

    def number(self, *names: str) -> Any:
        return self.need(self.fields.number(*names), names[0])

    def flag(self, *names: str) -> Any:
        return self.need(self.fields.flag(*names), names[0])

    def common(self) -> dict[str, Any]:
        """What configs of all families have, under the names that they share."""
        fields = self.fields
        dtype = fields.values.get("params_dtype")
        config = {
            "num_hidden_layers": self.natural("num_layers"),
            "hidden_size": self.natural("hidden_size"),
            "intermediate_size": self.natural("ffn_hidden_size"),
            "num_attention_heads": self.natural("num_attention_heads"),
            "vocab_size": self.natural("vocab_size"),
            "max_position_embeddings": self.natural("max_position_embeddings", "seq_length"),
            "rms_norm_eps": self.number("layernorm_epsilon", "norm_epsilon"),
            "rope_theta": self.number("rotary_base"),
            "tie_word_embeddings": self.need(fields.tied(), "untie_embeddings_and_output_weights"),
            "hidden_act": "silu",
        }
        if isinstance(dtype, DType):
            config["torch_dtype"] = dtype.torch_name
        scaling = self._rope_scaling()
        return config | ({"rope_scaling": scaling} if scaling else {})

    def grouped_attention(self) -> dict[str, Any]:
        """Fields of attention whose query heads share keys and values in groups."""
        return {
            "num_key_value_heads": self.need(self.fields.groups(), "num_query_groups"),
            "head_dim": self.natural("kv_channels"),
            "attention_bias": self.flag("add_qkv_bias"),
        }

    def sigmoid_experts(self) -> dict[str, Any]:
        """Fields of experts chosen by sigmoid scores and a learnt bias, dense layers first."""
        fields, size = self.fields, self.natural("moe_ffn_hidden_size")
        shared = fields.natural("moe_shared_expert_intermediate_size") or 0
        whole = size and shared % size == 0
        layers = self.need(fields.moe_layers(), "moe_layer_freq")
        dense = layers.index(True) if layers and True in layers else None
        in_order = layers is not None and dense is not None and all(layers[dense:])
        mtp = fields.mtp_layers()
        return {
            "n_routed_experts": self.need(fields.experts, "num_experts"),
            "num_experts_per_tok": self.natural("moe_router_topk"),
            "moe_intermediate_size": size,
            "n_shared_experts": self.need(
                shared // size if whole else None, "moe_shared_expert_intermediate_size"
            ),
            "first_k_dense_replace": self.need(dense if in_order else None, "moe_layer_freq"),
            "routed_scaling_factor": self.need(fields.router_scaling(), "moe_router_topk_scaling_factor"),
            "n_group": fields.router_groups("moe_router_num_groups") or 1,
            "topk_group": fields.router_groups("moe_router_group_topk") or 1,
            "norm_topk_prob": True,
        } | ({"num_nextn_predict_layers": mtp} if mtp else {})

    def _rope_scaling(self) -> dict[str, Any]:
        fields = self.fields
        scaling = self.need(fields.scaling(), "position_embedding_type", "use_rope_scaling")
        if scaling is None or scaling == PLAIN:
            return {}
        block: dict[str, Any] = {"rope_type": scaling[0], "factor": scaling[1]}
        if scaling[0] == STEPWISE:
            return block | STEPS
        return block | (self._yarn(scaling[1]) if scaling[0] == "yarn" else {})

    def _yarn(self, factor: float) -> dict[str, Any]:
        """megatron-core's defaults where the trainer set nothing."""
        fields = self.fields
        mscale, all_dim = fields.yarn("mscale"), fields.yarn("mscale_all_dim")
        block = {
            "original_max_position_embeddings": int(fields.yarn("original_max_position_embeddings") or 4096),
            "beta_fast": fields.yarn("beta_fast") or 32.0,
            "beta_slow": fields.yarn("beta_slow") or 1.0,
        }
        if mscale and all_dim:
            return block | {"mscale": mscale, "mscale_all_dim": all_dim}
        if mscale is not None and mscale != 1:
            block["attention_factor"] = 0.1 * mscale * math.log(factor) + 1
        return block

    def finish(self, model_type: str) -> None:
        """Raise DataError naming every field that was needed and is not there."""
        if self.missing:
            raise DataError(
                f"does not suffice for a config of {model_type}: {', '.join(dict.fromkeys(self.missing))}",
                where=self.fields.where,
                hint="name the model's HF directory with --origin-hf-dir",
            )


def family_said(statements: Iterable[Fields], families: Iterable[str]) -> str | None:
    """The family that a trainer's ``model_name`` is (slime: the lower-case name of the config's class)."""
    known = {family.replace("_", ""): family for family in families}
    for fields in statements:
        named = (fields.text("model_name") or "").lower().replace("_", "").removesuffix("config")
        if named in known:
            return known[named]
    return None


def first_statement(statements: list[Fields], where: Path) -> Fields:
    """The statement that the config is made from. Raises DataError where there is none."""
    if not statements:
        raise DataError(
            "has neither a Hugging Face config nor args of its trainer",
            where=str(where),
            hint="name the model's HF directory with --origin-hf-dir (config.json and tokenizer suffice)",
        )
    return statements[0]


def unnamed_family(where: Path, families: Iterable[str]) -> UsageError:
    """The error where neither the command nor the args name the family."""
    return UsageError(
        "--config-from-args needs --model-type: the args do not name the family",
        where=str(where),
        hint=f"one of {', '.join(families)}",
    )


def made_warning(fields: Fields) -> Defect:
    """What the report says about a config that was made."""
    return Defect(
        KIND,
        "there is no config.json: it was made from these; tokenizer, generation config and the ids of "
        "special tokens are not in them",
        fields.where,
        "--origin-hf-dir with the model's own files is surer",
        "warning",
    )
