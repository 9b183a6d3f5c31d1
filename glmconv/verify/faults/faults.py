"""Named faults: each breaks one rule of a conversion, in a Megatron-side state dict.

A mutant is a state that a converter with one wrong rule would have written. Names and shapes stay
those of a right one (but for the MTP layer that is dropped), so only an oracle that compares values,
or runs both models, can tell. Works on stacked and per-layer keys and on every dialect, because rows
are counted from the tensor's end.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import torch
from torch import Tensor

from glmconv.verify.faults.edits import (
    COLUMNS,
    DROPPED,
    EXPERTS,
    ROWS,
    Change,
    Edit,
    Geometry,
    State,
    copy,
    drop_mtp,
    each,
    exchange,
    flat_qkv,
    from_neighbour,
    geometry,
    half_split_heads,
    halves,
    index_halves,
    interleaved_halves,
    last_repeats_first,
    layers_swapped,
    minus_one,
    mtp_from_decoder,
    ones_if_latent,
    qkv,
    rolled,
    rope_pairs_lost,
    slots,
    swap,
    through_bf16,
    values_after_keys,
    zeros,
)

__all__ = ["BY_NAME", "DROPPED", "FAULTS", "Fault", "Geometry", "State", "geometry"]


@dataclass(frozen=True, slots=True)
class Fault:
    """``apply`` returns a new state and leaves the given one alone.

    ``in_logprobs``: whether running the model without MTP shows the fault. False means that it
    cannot (MTP) or need not (a rounded router bias shows only where it turns a choice of experts):
    such a fault needs a comparison of values.
    """

    name: str
    description: str
    change: Change
    in_logprobs: bool = True

    def changed(
        self, state: State, sizes: Geometry, among: Container[str] | None = None
    ) -> dict[str, Tensor]:
        """The tensors that the fault makes others, by key; ``among`` limits the keys that are looked at.

        A tensor that the fault removes is ``DROPPED``.
        """
        found = {}
        for key, make in self.change(state, sizes).items():
            if among is not None and key not in among:
                continue
            made = make()
            if made is DROPPED or not torch.equal(made, state[key]):
                found[key] = made
        return found

    def applicable(self, state: State, sizes: Geometry) -> bool:
        """Whether the state has what this fault breaks."""
        return bool(self.changed(state, sizes))

    def apply(self, state: State, sizes: Geometry) -> dict[str, Tensor]:
        """The state with the fault in it. Raises ``ValueError`` where it is not applicable."""
        changed = self.changed(state, sizes)
        if not changed:
            raise ValueError(f"fault {self.name!r} does not apply to this state")
        mutant = {key: changed.get(key, tensor) for key, tensor in state.items()}
        return {key: tensor for key, tensor in mutant.items() if tensor is not DROPPED}


# ---------------------------------------------------------------- the list

QKV, QKV_BIAS = "self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"
Q_UP, KV_UP = "self_attention.linear_q_up_proj.weight", "self_attention.linear_kv_up_proj.weight"
KV_DOWN = "self_attention.linear_kv_down_proj.weight"
Q_LATENT = ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight")
KV_LATENT = ("self_attention.kv_layernorm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight")
INPUT_NORM = ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
POST_NORM = ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
DENSE_FC1, SHARED_FC1 = ".mlp.linear_fc1.weight", ".mlp.shared_experts.linear_fc1.weight"
EXPERTS_FC1, EXPERTS_FC2 = "experts.experts.linear_fc1.weight", "experts.experts.linear_fc2.weight"
INDEX_KEY: dict[str, Edit] = {
    "wk.weight": index_halves(ROWS),
    "k_norm.weight": index_halves(COLUMNS),
    "k_norm.bias": index_halves(COLUMNS),
}
INDEX_ALL: dict[str, Edit] = {"wq_b.weight": index_halves(ROWS), **INDEX_KEY}

FAULTS = (
    # grouped attention
    Fault(
        "q-k-swapped",
        "the first query head of each group and its key change places",
        each({QKV: qkv(lambda t, where: slots(t, where, 0, -2))}),
    ),
    Fault(
        "k-v-swapped",
        "key and value of each group change places",
        each({QKV: qkv(lambda t, where: slots(t, where, -2, -1))}),
    ),
    Fault(
        "qkv-not-grouped",
        "QKV rows are all queries, all keys, all values",
        each({QKV: qkv(flat_qkv), QKV_BIAS: qkv(flat_qkv, COLUMNS)}),
    ),
    Fault(
        "qkv-bias-not-grouped",
        "the QKV bias alone is not grouped",
        each({QKV_BIAS: qkv(flat_qkv, COLUMNS)}),
    ),
    Fault("qkv-bias-zero", "the QKV bias was lost", each({QKV_BIAS: zeros})),
    Fault(
        "rotary-pairs",
        "query and key channels are reordered as for the other rotary style",
        each({QKV: qkv(half_split_heads)}),
    ),
    Fault(
        "q-k-norms-swapped",
        "the norms of queries and keys change places",
        swap(("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight")),
    ),
    # latent attention
    Fault(
        "kv-up-swapped",
        "value rows stand before key rows in each head",
        each({KV_UP: exchange(lambda g: (g.nope, g.value), per_head=True)}),
    ),
    Fault("kv-up-not-per-head", "all key rows, then all value rows", each({KV_UP: values_after_keys})),
    Fault(
        "q-up-rope-first",
        "rope rows stand before the others in each query head",
        each({Q_UP: exchange(lambda g: (g.nope, g.rope), per_head=True)}),
    ),
    Fault(
        "kv-down-rope-first",
        "the shared rope rows stand before the latent",
        each({KV_DOWN: exchange(lambda g: (g.kv_rank, g.rope), per_head=False)}),
    ),
    Fault(
        "rope-pairs-split",
        "rope rows of queries and key are reordered from pairs to halves",
        each(
            {
                Q_UP: rope_pairs_lost(lambda g: g.nope + g.rope),
                KV_DOWN: rope_pairs_lost(lambda g: g.kv_rank + g.rope),
            }
        ),
    ),
    Fault(
        "latent-norms-swapped",
        "the norms of the two latents change places (equal ranks only)",
        swap(
            ("q_layernorm.weight", "kv_layernorm.weight"),
            ("linear_q_up_proj.layer_norm_weight", "linear_kv_up_proj.layer_norm_weight"),
        ),
    ),
    Fault(
        "latent-norms-one",
        "the norms of the latents were not carried over",
        each(dict.fromkeys(Q_LATENT + KV_LATENT, ones_if_latent)),
    ),
    # indexer
    Fault("indexer-halves", "rope channels of all indexer tensors at the other end", each(INDEX_ALL)),
    Fault("indexer-key-halves", "the same of the key side alone", each(INDEX_KEY)),
    Fault(
        "indexer-k-norm-bias-zero",
        "the bias of the index key's norm was lost",
        each({"k_norm.bias": zeros}),
    ),
    Fault(
        "indexer-heads-rolled",
        "head weights belong to the index head before",
        each({"weights_proj.weight": rolled(ROWS)}),
    ),
    Fault(
        "indexer-from-neighbour",
        "the last owner of an indexer has the query side of the owner before",
        from_neighbour("wq_b.weight"),
    ),
    # MLP and experts
    Fault("gate-up-swapped", "up stands before gate in dense layers", each({DENSE_FC1: halves(ROWS)})),
    Fault("expert-gate-up-swapped", "up stands before gate in experts", each({EXPERTS_FC1: halves(ROWS)})),
    Fault(
        "shared-gate-up-swapped",
        "up stands before gate in shared experts",
        each({SHARED_FC1: halves(ROWS)}),
    ),
    Fault(
        "gate-up-interleaved",
        "gate and up rows alternate",
        each(dict.fromkeys((DENSE_FC1, EXPERTS_FC1, SHARED_FC1), interleaved_halves)),
    ),
    Fault(
        "expert-order",
        "experts are numbered from another start",
        each({EXPERTS_FC1: rolled(EXPERTS), EXPERTS_FC2: rolled(EXPERTS)}),
    ),
    Fault(
        "expert-down-order",
        "down projections belong to the expert before",
        each({EXPERTS_FC2: rolled(EXPERTS)}),
    ),
    Fault(
        "expert-repeated",
        "the last expert is a copy of the first",
        each({EXPERTS_FC1: last_repeats_first, EXPERTS_FC2: last_repeats_first}),
    ),
    Fault(
        "router-rows-rolled",
        "router rows belong to the expert before",
        each({"mlp.router.weight": rolled(ROWS)}),
    ),
    Fault(
        "router-bias-rolled",
        "router biases belong to the expert before",
        each({"mlp.router.expert_bias": rolled(COLUMNS)}),
    ),
    Fault("router-bias-zero", "the router bias was lost", each({"mlp.router.expert_bias": zeros})),
    Fault(
        "router-bias-bf16",
        "the router bias went through bf16",
        each({"mlp.router.expert_bias": through_bf16}),
        in_logprobs=False,
    ),
    Fault(
        "router-weight-bf16",
        "a router weight that is fp32 went through bf16",
        each({"mlp.router.weight": through_bf16}),
    ),
    # norms
    Fault(
        "norms-swapped",
        "input norm and post-attention norm change places",
        swap(*((before, after) for before in INPUT_NORM for after in POST_NORM)),
    ),
    Fault(
        "norms-minus-one",
        "input norms are stored as for zero-centred gammas",
        each(dict.fromkeys(INPUT_NORM, minus_one)),
    ),
    Fault(
        "final-norm-minus-one",
        "the final norm is stored as for a zero-centred gamma",
        each({"decoder.final_layernorm.weight": minus_one}),
    ),
    # layers, embedding and head
    Fault(
        "layer-from-neighbour",
        "the last layer's attention output is the layer before's",
        from_neighbour("self_attention.linear_proj.weight"),
    ),
    Fault("layers-swapped", "two neighbouring layers of a kind change places", layers_swapped),
    Fault(
        "embedding-rolled",
        "every token has the embedding of the token before",
        each({"embedding.word_embeddings.weight": rolled(ROWS)}),
    ),
    Fault(
        "head-is-embedding",
        "the output layer is a copy of the embedding",
        copy("output_layer.weight", "embedding.word_embeddings.weight"),
    ),
    # MTP
    Fault("mtp-dropped", "the MTP layer is missing", drop_mtp, in_logprobs=False),
    Fault(
        "mtp-halves-swapped",
        "eh_proj takes hidden state and embedding in the other order",
        each({"eh_proj.weight": halves(COLUMNS)}),
        in_logprobs=False,
    ),
    Fault(
        "mtp-norms-swapped",
        "the norms of embedding and hidden state change places",
        swap(("enorm.weight", "hnorm.weight")),
        in_logprobs=False,
    ),
    Fault(
        "mtp-from-decoder",
        "the MTP block is a copy of the last decoder layer",
        mtp_from_decoder,
        in_logprobs=False,
    ),
    Fault(
        "mtp-final-norm",
        "the MTP layer's last norm is the decoder's",
        copy("mtp.layers.0.final_layernorm.weight", "decoder.final_layernorm.weight"),
        in_logprobs=False,
    ),
)

BY_NAME = {fault.name: fault for fault in FAULTS}
