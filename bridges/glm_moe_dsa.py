"""GLM-5, GLM-5.1 and GLM-5.2 (``glm_moe_dsa``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glmconv.tables.bridge import Bridge
from glmconv.tables.config import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_MTP_LAYERS,
    ConfigReader,
    Shapes,
    count_mtp_layers,
    sigmoid_experts,
)
from glmconv.tables.config_from_args import ArgsReader
from glmconv.tables.spec import Dsa, Mla, ModelSpec
from mappings.glm_moe_dsa import TABLE

INERT = {
    "head_dim": "the sizes of latent attention are qk_nope, qk_rope and v_head_dim; GLM-5.2 writes 192 here",
    "index_share_for_mtp_iteration": "how an engine drafts several tokens with one MTP layer",
}
KINDS = ("indexed_attention", "full_attention")
"""``layer_types`` as transformers writes it for the family, and as it writes it for any other."""


def _moe_layers(reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """``mlp_layer_types`` (GLM-5.2) or ``first_k_dense_replace`` (GLM-5); both must agree."""
    if reader.natural("moe_layer_freq", default=1) != 1:
        reader.problem("every layer after the dense ones has experts", "moe_layer_freq")
    kinds = reader.words("mlp_layer_types", num_layers, ("dense", "sparse"))
    listed = tuple(kind == "sparse" for kind in kinds) if kinds else None
    if listed is None or reader.has("first_k_dense_replace"):
        dense = reader.natural("first_k_dense_replace", least=0)
        counted = tuple(layer >= dense for layer in range(num_layers))
        if listed is not None and listed != counted:
            reader.problem("contradicts mlp_layer_types", "first_k_dense_replace")
        return counted if listed is None else listed
    return listed


def _by_frequency(num_layers: int, freq: int, offset: int) -> tuple[bool, ...]:
    """Layer i computes iff ``max(i + 1 - offset, 0) % freq == 0`` (transformers, Megatron-Core)."""
    return tuple(max(layer + 1 - offset, 0) % freq == 0 for layer in range(num_layers))


def _express(full: tuple[bool, ...]) -> tuple[int, int] | None:
    """Frequency and offset that give a listed schedule, or None where none does.

    Runtimes on the Megatron side read these two and ignore the list. With a frequency above 1 the
    leading owners are as many as the offset, and the next owner follows a frequency after the last.
    """
    if all(full):
        return 1, 1
    offset = full.index(False)
    after = next((layer for layer in range(offset, len(full)) if full[layer]), len(full))
    freq = after - offset + 1
    return (freq, offset) if offset and _by_frequency(len(full), freq, offset) == full else None


def _pattern(reader: ConfigReader, num_layers: int) -> tuple[bool, ...] | None:
    """``index_topk_pattern``: a text of the letters F and S, or a list of the words of ``indexer_types``.

    transformers takes a list as it is, so in a list of letters no entry says ``shared`` and every
    layer would compute: that is refused.
    """
    value, letters = reader.get("index_topk_pattern"), {"F": True, "S": False}
    words = {"full": True, "shared": False}
    known: dict[str, bool] = letters if isinstance(value, str) else words
    if value is None:
        return None
    if isinstance(value, (str, list)) and len(value) == num_layers:
        entries = [known.get(one) if isinstance(one, str) else None for one in value]
        if None not in entries:
            return tuple(entry is True for entry in entries)
    reader.problem(
        f"must be a text of {num_layers} letters F or S, or a list of as many words, full or shared",
        "index_topk_pattern",
        "transformers takes every entry of a list that is not the word shared for a full one",
    )
    return None


def _schedule(reader: ConfigReader, num_layers: int) -> tuple[tuple[bool, ...], int, int]:
    """Which layers compute an index: ``indexer_types``, ``index_topk_pattern`` or freq and offset.

    That is transformers' precedence; its default offset is 2.
    """
    freq = reader.natural("index_topk_freq", default=1)
    offset = reader.natural("index_skip_topk_offset", default=2, least=0)
    listed: tuple[bool, ...] | None = None
    types = reader.words("indexer_types", num_layers, ("full", "shared"))
    pattern = _pattern(reader, num_layers)
    if types is not None:
        listed = tuple(kind == "full" for kind in types)
        if pattern is not None and pattern != listed:
            reader.problem("contradicts indexer_types", "index_topk_pattern")
    elif pattern is not None:
        listed = pattern
    if listed is None:
        full = _by_frequency(num_layers, freq, offset)
        if not full[0]:
            reader.problem("the first layer has no earlier index to share", "index_skip_topk_offset")
        return full, freq, offset
    if reader.has("index_topk_freq") and _by_frequency(num_layers, freq, offset) != listed:
        reader.problem(
            f"index_topk_freq {freq} and offset {offset} give another schedule",
            "indexer_types",
            "Megatron reads frequency and offset, transformers the list: make them agree",
        )
        return listed, freq, offset
    expressed = _express(listed)
    if expressed is None:
        reader.problem(
            "no frequency and offset give this schedule, so Megatron cannot run it", "indexer_types"
        )
        return listed, freq, offset
    return listed, *expressed


def _mla(reader: ConfigReader, shapes: Shapes) -> Mla:
    """MLA sizes. ``head_dim`` is never read: GLM-5.2 says 192 there while the rope has 64 rows."""
    mla = Mla(
        q_lora_rank=reader.natural("q_lora_rank"),
        kv_lora_rank=reader.natural("kv_lora_rank"),
        qk_nope_head_dim=reader.natural("qk_nope_head_dim"),
        qk_rope_head_dim=reader.natural("qk_rope_head_dim"),
        v_head_dim=reader.natural("v_head_dim"),
    )
    if reader.has("qk_head_dim") and reader.natural("qk_head_dim") != mla.qk_head_dim:
        reader.problem(f"is not qk_nope_head_dim + qk_rope_head_dim = {mla.qk_head_dim}", "qk_head_dim")
    kv_a = shapes.get("model.layers.0.self_attn.kv_a_proj_with_mqa.weight")
    if kv_a and kv_a[0] - mla.kv_lora_rank != mla.qk_rope_head_dim:
        reader.problem(
            f"is {mla.qk_rope_head_dim}, but kv_a_proj_with_mqa has {kv_a[0]} rows: "
            f"{kv_a[0]} - kv_lora_rank {mla.kv_lora_rank} = {kv_a[0] - mla.kv_lora_rank}",
            "qk_rope_head_dim",
            "some transformers versions overwrite it with head_dim on saving; restore the released value",
        )
    return mla


def _interleaved(reader: ConfigReader) -> bool:
    """Whether the main attention rotates pairs of channels; both runtimes do, whatever the config says."""
    interleaved = reader.flag("rope_interleave", True)
    if not interleaved:
        what = "transformers ignores it, and megatron-core's latent attention rotates pairs of channels too"
        reader.changes_forward("rope_interleave", False, what)
    return interleaved


def _dsa(reader: ConfigReader, num_layers: int, mla: Mla) -> Dsa:
    interleave = reader.flag("indexer_rope_interleave", True)
    if not interleave:
        reader.changes_forward(
            "indexer_rope_interleave",
            False,
            "transformers ignores it and rotates pairs of channels in the indexer, where a Megatron runtime "
            "that reads it rotates halves: the two select other tokens",
        )
    full, freq, offset = _schedule(reader, num_layers)
    dsa = Dsa(
        num_heads=reader.natural("index_n_heads", most=MAX_HEADS),
        head_dim=reader.natural("index_head_dim"),
        top_k=reader.natural("index_topk"),
        full=full,
        freq=freq,
        offset=offset,
        rope_interleave=interleave,
    )
    if dsa.head_dim <= mla.qk_rope_head_dim:
        reader.problem(f"must be larger than qk_rope_head_dim {mla.qk_rope_head_dim}", "index_head_dim")
    return dsa


def read_spec(config: Mapping[str, Any], shapes: Shapes) -> ModelSpec:
    """Validate a GLM-5 config; ``shapes`` are the HF files' tensors where there are any."""
    reader = ConfigReader(config, inert=INERT)
    num_layers = reader.natural("num_hidden_layers", most=MAX_LAYERS)
    mla = _mla(reader, shapes)
    moe_layers = _moe_layers(reader, num_layers)
    moe = sigmoid_experts(reader, shapes, moe_layers, scaling=2.5)
    if reader.flag("attention_bias", False):
        reader.problem("the family's attention has no bias", "attention_bias")
    heads = reader.natural("num_attention_heads", most=MAX_HEADS)
    groups = reader.natural("num_key_value_heads", default=heads, most=MAX_HEADS)
    if groups != heads:
        reader.changes_forward("num_key_value_heads", groups, f"latent attention has {heads}, one a head")
    max_positions = reader.natural("max_position_embeddings")
    reader.alike("layer_types", KINDS, "the family's attention is sparse in every layer")
    spec = ModelSpec(
        model_type="glm_moe_dsa",
        num_layers=num_layers,
        hidden_size=reader.natural("hidden_size"),
        num_heads=heads,
        num_groups=heads,
        head_dim=mla.v_head_dim,
        ffn_size=reader.natural("intermediate_size"),
        vocab_size=reader.natural("vocab_size"),
        norm_eps=reader.number("rms_norm_eps", positive=True),
        tied=reader.flag("tie_word_embeddings", False),
        rope=reader.rope(max_positions, interleaved=_interleaved(reader), yarn=True),
        max_positions=max_positions,
        mla=mla,
        moe=moe,
        moe_layers=moe_layers,
        dsa=_dsa(reader, num_layers, mla),
        num_mtp=reader.natural(
            "num_nextn_predict_layers",
            "num_mtp_layers",
            default=count_mtp_layers(shapes, num_layers),
            least=0,
            most=MAX_MTP_LAYERS,
        ),
        dtype=reader.dtype(),
        raw=dict(config),
        remarks=reader.remarks(),
    )
    reader.finish()
    return spec


def config_of(args: ArgsReader) -> dict[str, Any]:
    """A GLM-5 config from a trainer's args; those of slime and miles lack the indexer's numbers."""
    args.need(args.fields.latent or None, "multi_latent_attention")
    args.need(args.fields.sparse or None, "experimental_attention_variant")
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        **args.common(),
        **args.sigmoid_experts(),
        "num_key_value_heads": args.natural("num_attention_heads"),
        "attention_bias": False,
        "q_lora_rank": args.natural("q_lora_rank"),
        "kv_lora_rank": args.natural("kv_lora_rank"),
        "qk_nope_head_dim": args.natural("qk_head_dim"),
        "qk_rope_head_dim": args.natural("qk_pos_emb_head_dim"),
        "v_head_dim": args.natural("v_head_dim"),
        "index_n_heads": args.natural("dsa_indexer_n_heads"),
        "index_head_dim": args.natural("dsa_indexer_head_dim"),
        "index_topk": args.natural("dsa_indexer_topk"),
        "index_topk_freq": args.fields.natural("dsa_indexer_topk_freq") or 1,
        "index_skip_topk_offset": args.fields.natural("dsa_indexer_skip_topk_offset") or 0,
        "rope_interleave": True,
        "indexer_rope_interleave": args.fields.flag("dsa_indexer_rope_interleaved") is not False,
    }


BRIDGES = {
    "glm_moe_dsa": Bridge(
        model_type="glm_moe_dsa",
        table=TABLE,
        spec=read_spec,
        titles=("GLM-5", "GLM-5.1", "GLM-5.2"),
        mtp_field="num_nextn_predict_layers",
        config_of=config_of,
    )
}
