"""The Hugging Face config as transformers reads it, made fit for running a model piece by piece."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from glmconv.basics.errors import DataError, UsageError
from glmconv.source.source import Source


def hf_config(source: Source, index_topk: int | None) -> Any:
    """The parsed config with one more layer for every MTP layer, and the lowered top-k."""
    import transformers

    raw = copy.deepcopy(dict(source.config))
    try:
        config = transformers.AutoConfig.for_model(**raw)
    except (ValueError, KeyError) as error:
        raise UsageError(
            f"transformers {transformers.__version__} does not know {raw.get('model_type')!r}",
            where=str(source.path),
            hint="pip install --upgrade transformers",
        ) from error
    if source.spec.num_mtp:
        config = transformers.AutoConfig.for_model(**_longer(source, raw, config.to_dict()))
    if index_topk is not None and source.spec.dsa is not None:
        if not hasattr(config, "index_topk"):
            raise UsageError("--index-topk: transformers' config has no index_topk", where=raw["model_type"])
        config.index_topk = index_topk
    return config


def _longer(source: Source, raw: dict[str, Any], parsed: Mapping[str, Any]) -> dict[str, Any]:
    """``raw`` with one more decoder layer for every MTP layer, of the kind of the MTP's block.

    Lists of words with an entry a layer say a layer's kind: the entry of a decoder layer of the
    same kind is repeated.
    """
    spec = source.spec
    layers = spec.num_layers
    kind = (spec.is_moe(layers), spec.has_indexer(layers))
    twins = [i for i in range(layers) if (spec.is_moe(i), spec.has_indexer(i)) == kind]
    if not twins:
        raise DataError(
            "no decoder layer is of the MTP layer's kind, so transformers cannot be told how to build it",
            where=str(source.path),
        )
    longer: dict[str, Any] = {}
    for name, value in parsed.items():
        if isinstance(value, list) and len(value) == layers and all(isinstance(one, str) for one in value):
            longer[name] = [*value, *[value[twins[-1]]] * spec.num_mtp]
    return raw | longer | {"num_hidden_layers": layers + spec.num_mtp}


def skeleton_of(config: Any) -> Any:
    """The whole model without storage, to see which classes it is made of."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(copy.deepcopy(config), attn_implementation="eager")
