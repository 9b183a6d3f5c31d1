"""Torch modules with Transformer Engine's parameter names, as a megatron-core backend.

Trainers build their layers from Transformer Engine modules, whose parameter names end up in
every checkpoint. This backend gives the same names from plain torch, so that megatron-core's
own layer specs build the same model on any device. It holds linears and norms only: attention,
rotary embedding, routing, experts and the indexer are megatron-core's.

``_extra_state``: TE modules save one object each (FP8 metadata). The modules here save ``None``
where TE 2 would save something (linears, norm-linears, norms), and accept its absence.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn import functional


def _default_extra_state(_module: nn.Module, state: dict[str, Any], prefix: str, *_args: Any) -> None:
    """Let a plain state dict without ``_extra_state`` load strictly."""
    state.setdefault(f"{prefix}_extra_state", None)


class _WithExtraState(nn.Module):
    """A module that saves an empty ``_extra_state``, as TE's modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(_default_extra_state)  # type: ignore[no-untyped-call]

    def get_extra_state(self) -> None:
        """Nothing to save: there is no FP8 metadata here."""

    def set_extra_state(self, state: Any) -> None:
        """FP8 metadata of a trainer means nothing here."""


def _gamma(hidden_size: int, config: Any) -> nn.Parameter:
    """A gamma that leaves its input as it is: ones, or zeros under zero-centred gamma."""
    start = 0.0 if config.layernorm_zero_centered_gamma else 1.0
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    return nn.Parameter(torch.full((hidden_size,), start, dtype=config.params_dtype, device=device))


def _beta(gamma: Tensor, config: Any) -> nn.Parameter | None:
    """The offset of a layer norm; an RMS norm has none."""
    return nn.Parameter(torch.zeros_like(gamma)) if config.normalization == "LayerNorm" else None


def _normalise(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centred: bool) -> Tensor:
    """RMS norm where ``bias`` is None, else layer norm, over the last axis and in fp32."""
    gamma = weight.float() + 1.0 if zero_centred else weight.float()
    if bias is None:
        out = functional.rms_norm(x.float(), gamma.shape, gamma, eps)
    else:
        out = functional.layer_norm(x.float(), gamma.shape, gamma, bias.float(), eps)
    return out.to(x.dtype)


class TorchNorm(_WithExtraState):
    """``weight`` (and ``bias`` for layer norm) ``[hidden_size]``, as ``te.RMSNorm``/``te.LayerNorm``.

    ``config.normalization`` chooses, as in megatron-core's ``TENorm``. ``eps`` may be set later.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_options: Any) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centred = bool(config.layernorm_zero_centered_gamma)
        self.weight = _gamma(hidden_size, config)
        self.bias = _beta(self.weight, config)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis; the result has the dtype of ``x``."""
        return _normalise(x, self.weight, self.bias, self.eps, self.zero_centred)


class NormColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
    """A norm, then megatron-core's column parallel linear, as ``te.LayerNormLinear``.

    ``layer_norm_weight`` (and ``layer_norm_bias``) ``[input_size]`` are the same on all tensor
    parallel ranks; ``weight`` and ``bias`` are split on axis 0 by megatron-core. ``eps`` may be
    set later.
    """

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.eps = config.layernorm_epsilon
        self.zero_centred = bool(config.layernorm_zero_centered_gamma)
        self.layer_norm_weight = _gamma(input_size, config)
        self.layer_norm_bias = _beta(self.layer_norm_weight, config)

    def normalise(self, x: Tensor) -> Tensor:
        """The norm alone: what the linear sees."""
        return _normalise(x, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.zero_centred)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """``[..., input_size]`` to (``[..., output_size / tp]``, bias to be added later or None)."""
        out: tuple[Tensor, Tensor | None] = super().forward(self.normalise(x), *args, **kwargs)
        return out


class DuplicatedLinear(_WithExtraState):
    """A linear whose ``weight`` ``[output_size, input_size]`` is the same on all tensor parallel ranks.

    It stands for ``TELinear`` with ``parallel_mode="duplicated"``, the only mode in which the
    layer specs use it directly (MLA's down projections, the DSA indexer).
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str | None,
        config: Any,
        init_method: Any,
        bias: bool,
        skip_bias_add: bool,
        skip_weight_param_allocation: bool = False,
        **_options: Any,
    ) -> None:
        super().__init__()
        if parallel_mode != "duplicated" or skip_weight_param_allocation:
            raise ValueError(f"only a duplicated linear with its own weight, not {parallel_mode!r}")
        self.skip_bias_add = skip_bias_add
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        options = {"dtype": config.params_dtype, "device": device}
        self.weight = nn.Parameter(torch.empty(output_size, input_size, **options))
        self.bias = nn.Parameter(torch.zeros(output_size, **options)) if bias else None
        if config.perform_initialization:
            init_method(self.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """``[..., input_size]`` to (``[..., output_size]``, bias to be added later or None)."""
        if self.skip_bias_add:
            return functional.linear(x, self.weight), self.bias
        return functional.linear(x, self.weight, self.bias), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Replicas over tensor and data parallel ranks, as ``TELinear`` saves them."""
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            None,
            sharded_offsets,
            tp_group=get_tensor_model_parallel_group(),
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        return sharded


class TorchDotProductAttention(DotProductAttention):  # type: ignore[misc]
    """megatron-core's own attention, taking the head sizes that MLA passes to TE's.

    Ends when ``DotProductAttention.__init__`` takes ``k_channels`` and ``v_channels``.
    """

    def __init__(
        self,
        config: Any,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


class TorchSpecProvider(LocalSpecProvider):  # type: ignore[misc]
    """The ``BackendSpecProvider`` that takes the place of ``TESpecProvider``.

    It differs from megatron-core's local provider where TE does: norms fused into linears,
    duplicated linears, norms that honour zero-centred gamma.
    """

    def linear(self) -> type:
        """The linear that is not split over tensor parallel ranks."""
        return DuplicatedLinear

    def fuse_layernorm_and_linear(self) -> bool:
        """TE fuses, and the parameter names follow from it."""
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        """Norm and column parallel linear in one module."""
        return NormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        """The norm that ``config.normalization`` says, whatever the flags, as with TE."""
        return TorchNorm

    def core_attention(self) -> type:
        """megatron-core's dense attention; DSA brings its own."""
        return TorchDotProductAttention
