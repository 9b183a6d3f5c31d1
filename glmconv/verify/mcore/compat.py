"""What megatron-core needs to build and run a ``GPTModel`` without Transformer Engine or CUDA.

Each ``Step`` asks megatron-core itself whether it is needed, so it does nothing once the
upstream change named in ``ends_with`` is there. Nothing is patched by importing this module:
``install`` patches, ``uninstall`` restores, ``installed`` does both around a block. A model
has to be built *and* run while the steps are installed.

Measured on megatron-core 0.16.1 and 0.19.2.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from glmconv.basics.errors import UsageError

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Patch:
    """``owner.attribute`` becomes ``value``; an owner that is a mapping is patched by key."""

    owner: Any
    attribute: str
    value: Any


@dataclass(frozen=True, slots=True)
class Step:
    """One adaptation. ``patches`` returns nothing where the installed megatron-core has it."""

    name: str
    ends_with: str
    patches: Callable[[], list[Patch]]


def _without_compiler() -> list[Patch]:
    """Run small functions as they are: megatron-core wraps them in ``torch.compile``.

    For one forward pass that costs more than it saves, and it needs a C++ compiler.
    """
    name = "TORCHDYNAMO_DISABLE"
    return [] if name in os.environ else [Patch(os.environ, name, "1")]


def _without_cuda() -> list[Patch]:
    """Send megatron-core's hard-wired CUDA device to the CPU.

    ``torch.cuda.current_device`` is used as a device throughout, ``synchronize`` by
    ``dist_checkpointing.save``, ``Tensor.cuda`` by the embedding under pipeline parallelism,
    and the RNG tracker's ``fork`` by attention dropout, whose probability is 0 here.
    """
    import torch

    if torch.cuda.is_available():
        return []
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    cpu = torch.device("cpu")
    return [
        Patch(torch.cuda, "current_device", lambda: cpu),
        Patch(torch.cuda, "synchronize", lambda *_args, **_kwargs: None),
        Patch(torch.Tensor, "cuda", lambda self, *_args, **_kwargs: self),
        Patch(CudaRNGStatesTracker, "fork", lambda _self, *_args, **_kwargs: nullcontext()),
    ]


def _without_triton() -> list[Patch]:
    """Stand in for the one module of megatron-core that imports triton without a guard.

    The stand-in takes the place of ``moe.ops.paged_stash`` and not of triton, so that
    megatron-core's own "is triton there" questions are still answered truthfully.
    """
    name = "megatron.core.transformer.moe.ops.paged_stash"
    if name in sys.modules or importlib.util.find_spec("triton") is not None:
        return []
    root = importlib.util.find_spec("megatron.core")
    where = (root.submodule_search_locations or [""])[0] if root is not None else ""
    if not os.path.exists(os.path.join(where, "transformer", "moe", "ops", "paged_stash.py")):
        return []
    return [Patch(sys.modules, name, _NeedsTriton(name))]


class _NeedsTriton(ModuleType):
    """A module whose every name is a function that says that triton is missing."""

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)

        def refuse(*_args: Any, **_kwargs: Any) -> Any:
            raise UsageError(f"{self.__name__}.{attribute} needs triton", hint="pip install triton")

        return refuse


def _torch_backend() -> list[Patch]:
    """Give megatron-core's Transformer Engine layer specs the torch backend.

    The spec functions name ``TESpecProvider`` themselves, and MLA compares classes with
    ``TELinear`` to learn that a down projection is duplicated over tensor parallel ranks.
    """
    from glmconv.verify.mcore.backend import DuplicatedLinear, TorchNorm, TorchSpecProvider

    patches = []
    for module, attribute, value in (
        ("models.gpt.gpt_layer_specs", "TESpecProvider", TorchSpecProvider),
        ("models.gpt.gpt_layer_specs", "TENorm", TorchNorm),
        ("models.gpt.moe_module_specs", "TESpecProvider", TorchSpecProvider),
        ("models.gpt.experimental_attention_variant_module_specs", "TESpecProvider", TorchSpecProvider),
        ("extensions.transformer_engine_spec_provider", "TESpecProvider", TorchSpecProvider),
        ("transformer.multi_latent_attention", "TELinear", DuplicatedLinear),
        ("transformer.experimental_attention_variant.absorbed_mla", "TELinear", DuplicatedLinear),
    ):
        found = _module(f"megatron.core.{module}")
        if found is not None:
            patches.append(Patch(found, attribute, value))
    return patches


def _dsa_in_block_spec() -> list[Patch]:
    """Back-fill ``dsa`` in the attention spec of 0.16 and 0.17 from their own DSA builder."""
    specs = _module("megatron.core.models.gpt.experimental_attention_variant_module_specs")
    build_dsa = getattr(specs, "get_dsa_module_spec_for_backend", None)
    original = getattr(specs, "get_experimental_attention_variant_module_spec", None)
    if build_dsa is None or original is None or "dsa" in original.__code__.co_consts:
        return []

    def with_dsa(config: Any, backend: Any = None) -> Any:
        if config.experimental_attention_variant != "dsa":
            return original(config=config, backend=backend)
        backend = backend if backend is not None else specs._get_backend_spec_provider(config=config)
        attention = build_dsa(config=config, backend=backend)
        attention.metainfo["fuse_input_layernorm"] = False
        return attention

    return [Patch(specs, "get_experimental_attention_variant_module_spec", with_dsa)]


def _no_hadamard_in_indexer() -> list[Patch]:
    """Leave out the indexer's Hadamard rotation where no option can.

    It multiplies q and k by the same orthogonal matrix, so no score changes; transformers
    has no such step, and the kernel takes bf16 on CUDA only.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    dsa = _module("megatron.core.transformer.experimental_attention_variant.dsa")
    if dsa is None or "dsa_indexer_rotate_activation" in TransformerConfig.__dataclass_fields__:
        return []
    return [Patch(dsa, "rotate_activation", lambda x: x)]


def _router_without_te_gemm() -> list[Patch]:
    """Define the name that the router's matrix product asks for when TE is absent."""
    moe_utils = _module("megatron.core.transformer.moe.moe_utils")
    if moe_utils is None or hasattr(moe_utils, "te_general_gemm"):
        return []
    return [Patch(moe_utils, "te_general_gemm", None)]


STEPS: tuple[Step, ...] = (
    Step("no compiler", "an option of megatron-core's jit_fuser", _without_compiler),
    Step("import without triton", "a guarded triton import in moe/ops/paged_stash.py", _without_triton),
    Step("no CUDA device", "a device option instead of torch.cuda.current_device", _without_cuda),
    Step("torch backend", "a backend argument of the TE layer spec functions and of MLA", _torch_backend),
    Step("dsa in the block spec", "megatron-core 0.18 builds dsa itself", _dsa_in_block_spec),
    Step("no Hadamard step", "the option dsa_indexer_rotate_activation (0.19)", _no_hadamard_in_indexer),
    Step("router without TE", "te_general_gemm defined without TE (0.19)", _router_without_te_gemm),
)

_undo: list[Patch] = []
_applied: list[str] = []


def is_installed() -> bool:
    """Whether the steps are in force in this process."""
    return bool(_applied)


def install() -> tuple[str, ...]:
    """Apply the steps that this megatron-core needs; return their names. Idempotent.

    Raises ``UsageError`` where megatron-core or torch is missing.
    """
    if _applied:
        return tuple(_applied)
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("megatron") is None:
        raise UsageError(
            "running the Megatron model needs torch and megatron-core",
            hint="pip install torch megatron-core",
        )
    try:
        for step in STEPS:
            patches = step.patches()
            for patch in patches:
                _undo.append(Patch(patch.owner, patch.attribute, _swap(patch)))
            if patches:
                _applied.append(step.name)
    except BaseException:
        uninstall()
        raise
    return tuple(_applied)


def uninstall() -> None:
    """Restore everything that ``install`` replaced, newest first."""
    while _undo:
        _swap(_undo.pop())
    _applied.clear()


@contextmanager
def installed() -> Iterator[tuple[str, ...]]:
    """``install`` around a block; leaves an outer installation in force."""
    outermost = not _applied
    names = install()
    try:
        yield names
    finally:
        if outermost:
            uninstall()


def _swap(patch: Patch) -> Any:
    """Put ``patch.value`` in place (or remove it) and return what was there."""
    if isinstance(patch.owner, MutableMapping):
        before = patch.owner.get(patch.attribute, _MISSING)
        if patch.value is _MISSING:
            patch.owner.pop(patch.attribute, None)
        else:
            patch.owner[patch.attribute] = patch.value
        return before
    before = vars(patch.owner).get(patch.attribute, _MISSING)
    if patch.value is _MISSING:
        delattr(patch.owner, patch.attribute)
    else:
        setattr(patch.owner, patch.attribute, patch.value)
    return before


def _module(name: str) -> Any:
    """The module, or None where this megatron-core does not have it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            return None
        raise
