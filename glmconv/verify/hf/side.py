"""The Hugging Face model, one piece at a time: transformers' own classes, loaded by transformers.

Each piece is a small ``PreTrainedModel`` of the model's own family that holds only the modules
asked for, under the names that they have in the whole model. So transformers' own loader finds,
merges and casts the weights, and nothing of glmconv's tables is between the files and the model.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from glmconv.basics.errors import DataError, Defect, UsageError
from glmconv.source.source import Source
from glmconv.verify.hf.config import hf_config, skeleton_of
from glmconv.verify.hf.path import ForwardPath
from glmconv.verify.measure.capture import Choices, Result

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Makers = Mapping[str, Callable[[Any], nn.Module]]
"""Dotted names in the model and what makes the module there from the config."""


class HfSide:
    """Pieces of the model in ``source``, an HF directory.

    Tensors are ``[batch, seq, width]`` on ``device``. Raises ``UsageError`` for a model type that
    the installed transformers does not know.
    """

    def __init__(self, source: Source, *, precision: str, index_topk: int | None, device: str) -> None:
        self.source, self.spec, self.device = source, source.spec, device
        self.dtype = TORCH_DTYPES[precision]
        if device != "cpu" and importlib.util.find_spec("accelerate") is None:
            raise UsageError("loading onto a GPU needs accelerate", hint="pip install accelerate")
        self.config = hf_config(source, index_topk)
        self.index_topk = (index_topk or self.spec.dsa.top_k) if self.spec.dsa else 0
        skeleton = skeleton_of(self.config)
        decoder = skeleton.get_decoder()
        self.family = _family_class(decoder)
        self.layer_class = type(decoder.layers[0])
        self.norm_class = type(decoder.norm)
        self.names = {
            part: _name_of(skeleton, module)
            for part, module in (
                ("embed", skeleton.get_input_embeddings()),
                ("norm", decoder.norm),
                ("head", skeleton.get_output_embeddings()),
                ("layers", decoder.layers),
            )
        }
        self.path = ForwardPath(decoder, self.config, device, choosing=self.spec.dsa is not None)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings of ``[batch, seq]`` token ids."""
        spec, name = self.spec, self.names["embed"]
        piece = self._load({name: lambda _: nn.Embedding(spec.vocab_size, spec.hidden_size)}, f"{name}.")
        with torch.no_grad():
            embedded: Tensor = piece.get_submodule(name)(tokens)
        return embedded

    @contextmanager
    def layer(self, number: int) -> Iterator[Callable[[Tensor, Tensor | None], Result]]:
        """Decoder layer ``number``: (hidden states, selection to share or None) to its result."""
        name = f"{self.names['layers']}.{number}"
        piece = self._load({name: lambda config: self.layer_class(config, number)}, f"{name}.")
        module = piece.get_submodule(name)

        def run(hidden: Tensor, shared: Tensor | None) -> Result:
            return self._run(module, number, hidden, None if self.spec.has_indexer(number) else shared)

        yield run

    @contextmanager
    def head(self) -> Iterator[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]:
        """Two functions: final norm, and from normed hidden states to logits in fp32."""
        spec, norm, head = self.spec, self.names["norm"], self.names["head"]
        makers: Makers = {
            norm: lambda _: self._norm(),
            head: lambda _: nn.Linear(spec.hidden_size, spec.vocab_size, bias=False),
        }
        renamed = {f"{self.names['embed']}.weight": f"{head}.weight"} if spec.tied else {}
        piece = self._load(makers, f"{norm}.", f"{head}.", renamed=renamed)

        def normalise(hidden: Tensor) -> Tensor:
            with torch.no_grad():
                normed: Tensor = piece.get_submodule(norm)(hidden)
            return normed

        def logits(normed: Tensor) -> Tensor:
            with torch.no_grad():
                scores: Tensor = piece.get_submodule(head)(normed)
            return scores.float()

        yield normalise, logits

    @contextmanager
    def mtp(self, number: int) -> Iterator[Callable[[Tensor, Tensor], Result]]:
        """MTP layer ``number``: (embeddings of the next tokens, hidden states before) to its result.

        transformers has no MTP layer. It is composed of the family's own decoder layer and norm
        and of the ``eh_proj`` product: norm both inputs, join, project, run the block, norm
        (arXiv 2412.19437, section 2.2).
        """
        layer = self.spec.num_layers + number
        name = f"{self.names['layers']}.{layer}"
        piece = self._load({name: lambda config: self._mtp_module(config, layer)}, f"{name}.")
        block: Any = piece.get_submodule(name)

        def run(embedded: Tensor, hidden: Tensor) -> Result:
            with torch.no_grad():
                joined = block.eh_proj(torch.cat([block.enorm(embedded), block.hnorm(hidden)], dim=-1))
            result = self._run(block, layer, joined, None)
            with torch.no_grad():
                out = block.shared_head.norm(result.hidden)
            return Result(out, result.selection, result.selected, result.routing, result.router_bias)

        yield run

    def _mtp_module(self, config: Any, layer: int) -> nn.Module:
        """A decoder layer that carries the norms and the projection of an MTP layer, under hub names."""
        size = self.spec.hidden_size
        block = self.layer_class(config, layer)
        block.enorm, block.hnorm = self._norm(), self._norm()
        block.eh_proj = nn.Linear(2 * size, size, bias=False)
        block.shared_head = nn.Module()
        block.shared_head.norm = self._norm()
        made: nn.Module = block
        return made

    def _norm(self) -> nn.Module:
        made: nn.Module = self.norm_class(self.spec.hidden_size, eps=self.spec.norm_eps)
        return made

    def _run(self, module: Any, number: int, hidden: Tensor, shared: Tensor | None) -> Result:
        """Call layer ``number`` as the whole model calls it, but for the selection that it shares."""
        options = self.path.arguments(number, hidden)
        if self.spec.dsa is not None:
            options["prev_topk_indices"] = shared
        choices = Choices(self.spec, hidden.shape[0], hidden.shape[1], self.index_topk, seq_first=False)
        with torch.no_grad(), choices:
            out = module(hidden, **options)
        first = out[0] if isinstance(out, tuple) else out
        own = choices.selection
        bias = getattr(getattr(getattr(module, "mlp", None), "gate", None), "e_score_correction_bias", None)
        return Result(first, own, own.indices if own else shared, choices.routing, bias)

    def _load(self, makers: Makers, *prefixes: str, renamed: Mapping[str, str] | None = None) -> Any:
        """A model of just these modules, with the checkpoint's tensors under ``prefixes``."""
        piece = _piece_class(self.family, makers)
        tensors = _tensors(self.source, prefixes, renamed or {})
        with _quiet_loading():
            model, found = piece.from_pretrained(
                None,
                config=self.config,
                state_dict=tensors,
                dtype=self.dtype,
                attn_implementation="eager",
                experts_implementation="eager",
                output_loading_info=True,
                **({} if self.device == "cpu" else {"device_map": {"": torch.cuda.current_device()}}),
            )
        wrong = [*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])]
        if wrong or found["error_msgs"]:
            raise DataError(
                f"transformers finds {len(wrong)} tensors missing or of another shape",
                where=str(self.source.path),
                defects=[Defect("missing", "asked for by transformers", name) for name in sorted(wrong)],
            )
        return model.requires_grad_(False)


def _tensors(source: Source, prefixes: tuple[str, ...], renamed: Mapping[str, str]) -> dict[str, Tensor]:
    """The stored tensors whose names begin so, or are renamed; mapped files, not memory."""
    from safetensors import safe_open

    wanted: dict[int, list[str]] = {}
    for name, stored in source.stored.items():
        if name in renamed or (name.startswith(prefixes) and name not in renamed.values()):
            wanted.setdefault(stored.chunks[0].file, []).append(name)
    tensors: dict[str, Tensor] = {}
    for number, names in wanted.items():
        with safe_open(source.files[number].address, framework="pt") as file:
            tensors |= {renamed.get(name, name): file.get_tensor(name) for name in names}
    return tensors


def _family_class(decoder: Any) -> Any:
    """The family's own base class: it knows which modules stay in fp32 and what experts are called."""
    from transformers import PreTrainedModel

    return next(base for base in type(decoder).__mro__[1:] if issubclass(base, PreTrainedModel))


def _piece_class(family: Any, makers: Makers) -> Any:
    from transformers import PreTrainedModel

    def build(self: Any, config: Any) -> None:
        PreTrainedModel.__init__(self, config)
        for name, make in makers.items():
            parent: nn.Module = self
            *path, last = name.split(".")
            for step in path:
                if not hasattr(parent, step):
                    parent.add_module(step, nn.Module())
                parent = parent.get_submodule(step)
            parent.add_module(last, make(config))
        self.post_init()

    # transformers merges experts on loading for classes of its own modules only.
    return type(family)(
        f"{family.__name__}Piece", (family,), {"__init__": build, "__module__": family.__module__}
    )


def _name_of(skeleton: Any, module: nn.Module) -> str:
    return next(str(name) for name, one in skeleton.named_modules() if one is module)


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """No progress bars or reports of absent layers, and one tensor after the other.

    transformers' threads would hold a layer's tensors beside the merged ones, all at once.
    """
    from transformers.utils import logging

    quiet: Any = logging
    name, level, bars = "HF_DEACTIVATE_ASYNC_LOAD", quiet.get_verbosity(), quiet.is_progress_bar_enabled()
    before = os.environ.get(name)
    os.environ[name] = "1"
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    try:
        yield
    finally:
        quiet.set_verbosity(level)
        if bars:
            quiet.enable_progress_bar()
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
