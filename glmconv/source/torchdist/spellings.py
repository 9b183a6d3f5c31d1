"""The ways in which trainers spell the same torch_dist keys, brought to one spelling.

Sources (``torch_dist.md`` section 2, by experiment): megatron-core >= 0.19 names the block inside
an MTP layer ``mtp_model_layer`` in memory and some writers on disk; ``singleton_local_shards``
writes each expert under its own key and gate and up as ``weight_w`` and ``weight_v``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from glmconv.basics.errors import DataError, Defect
from glmconv.formats.stored import StoredChunk, StoredTensor

NOT_MODEL = (
    "optimizer.",
    "chained_",
    "rng_state",
    "opt_param_scheduler",
    "rerun_state_machine",
    "common_state",
)
"""First words of keys that hold the trainer's state: skipped on export, and said."""

EXPERTS = ".experts.experts."


def is_trainer_state(name: str) -> bool:
    """Whether a key belongs to optimizer, scheduler or random state."""
    return name.startswith(NOT_MODEL)


def one_spelling(name: str) -> str:
    """The key with the MTP block under its common name."""
    if name.startswith("mtp.layers.") and ".mtp_model_layer." in name:
        return name.replace(".mtp_model_layer.", ".transformer_layer.", 1)
    return name


def normalise(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """All tensors in the common spelling. Raises DataError where two spellings collide."""
    tensors: dict[str, StoredTensor] = {}
    for tensor in stored.values():
        _add(tensors, StoredTensor(one_spelling(tensor.name), tensor.dtype, tensor.shape, tensor.chunks))
    tensors = _join_gate_up(tensors)
    return _join_experts(tensors)


def _add(tensors: dict[str, StoredTensor], tensor: StoredTensor) -> None:
    if tensor.name in tensors:
        raise DataError("the checkpoint holds this tensor in two spellings", where=tensor.name)
    tensors[tensor.name] = tensor


def _join_gate_up(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """``X.weight_w`` (gate rows) and ``X.weight_v`` (up rows) become ``X.weight``."""
    joined: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(".weight_v") and name[:-1] + "w" in tensors:
            continue
        up = tensors.get(name[:-1] + "v") if name.endswith(".weight_w") else None
        if up is None:
            _add(joined, tensor)
            continue
        if up.dtype is not tensor.dtype or up.shape != tensor.shape or not tensor.shape:
            raise DataError(
                f"gate and up differ: {tensor.dtype.label}{list(tensor.shape)}, "
                f"{up.dtype.label}{list(up.shape)}",
                where=name,
            )
        rows = tensor.shape[0]
        shifted = [
            StoredChunk((chunk.offsets[0] + rows, *chunk.offsets[1:]), chunk.sizes, chunk.file, chunk.offset)
            for chunk in up.chunks
        ]
        shape = (2 * rows, *tensor.shape[1:])
        _add(joined, StoredTensor(name[:-2], tensor.dtype, shape, [*tensor.chunks, *shifted]))
    return joined


def _join_experts(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """``….experts.experts.{e}.rest`` become the elements of ``….experts.experts.rest``."""
    joined: dict[str, StoredTensor] = {}
    families: dict[str, dict[int, StoredTensor]] = {}
    for name, tensor in tensors.items():
        head, found, tail = name.partition(EXPERTS)
        number, dot, rest = tail.partition(".")
        if found and dot and _is_number(number):
            families.setdefault(f"{head}{EXPERTS}{rest}", {})[int(number)] = tensor
        else:
            _add(joined, tensor)
    for name, experts in families.items():
        _add(joined, _stack(name, experts))
    return joined


def _is_number(text: str) -> bool:
    """Whether it is a number as trainers write them: no zeros in front, so that no two are the same."""
    return text.isascii() and text.isdigit() and len(text) < 10 and str(int(text)) == text


def _stack(name: str, experts: Mapping[int, StoredTensor]) -> StoredTensor:
    first = next(iter(experts.values()))
    odd = _odd_ones(first, experts.values())
    if odd:
        raise DataError("experts of one layer differ in shape or dtype", where=name, defects=odd)
    chunks = [
        StoredChunk((number, *chunk.offsets), (1, *chunk.sizes), chunk.file, chunk.offset)
        for number, expert in sorted(experts.items())
        for chunk in expert.chunks
    ]
    return StoredTensor(name, first.dtype, (max(experts) + 1, *first.shape), chunks)


def _odd_ones(first: StoredTensor, experts: Iterable[StoredTensor]) -> list[Defect]:
    return [
        Defect(
            "shape",
            f"{one.dtype.label}{list(one.shape)}, others {first.dtype.label}{list(first.shape)}",
            one.name,
        )
        for one in experts
        if one.shape != first.shape or one.dtype is not first.dtype
    ]
