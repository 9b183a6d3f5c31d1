"""Running both real models, transformers' and megatron-core's, and comparing what they compute.

Importing this package patches nothing and imports neither torch nor megatron-core. Use::

    from glmconv.verify import VerifyOptions, self_test, verify

    report = verify("hf", "megatron", VerifyOptions(index_topk=64, seq_len=256))
    report.verdict, report.reason             # a VerifyReport; report.to_json()

``verify`` goes through the model layer by layer (``run``), each side from its own loader
(``hf_side``, ``megatron_side`` with ``stages`` and ``weights``), compares (``compare``,
``logprobs``) and judges (``verdict``). ``self_test`` (``selftest``) shows that it sees the faults of
``faults``. ``html.page(report)`` is the page.

The parts beneath build whole Megatron models without Transformer Engine, on CPU or CUDA::

    from glmconv.verify.mcore.parallel import Parallel, runtime
    from glmconv.verify.mcore.model import build_model
    from glmconv.verify.mcore.load import load_torch_dist, save_torch_dist
    from glmconv.verify.mcore.forward import hf_logprobs, megatron_logprobs

    with runtime(Parallel(tp=1, pp=1, ep=1)):           # compat steps and process groups
        model = build_model(spec, index_topk=8)       # spec: glmconv.tables.spec.ModelSpec
        missing, unexpected = load_torch_dist(model, "…/release")
        ours = megatron_logprobs(model, tokens)       # [batch, seq, vocab] fp32
        theirs = hf_logprobs(hf_model, tokens)

- ``build_model`` takes ``parallel`` (give the same one), ``precision`` (``fp32``, ``bf16``),
  ``padded_vocab_size``, ``mtp=False`` to leave MTP layers out, ``layer_keys="per-layer"``.
- ``load_torch_dist`` needs the unit directory (the one with ``.metadata``). A missing tensor is
  a ``DataError``; ``missing`` holds ``_extra_state`` objects that a trainer would ask for,
  ``unexpected`` what the file holds beyond the model (``optimizer.*`` for example).
- More than one process: start them with ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and
  ``MASTER_PORT`` set, as ``torchrun`` does, and call the same code in each.
- megatron-core 0.16 to 0.18 expects the dialect ``mcore-0.18`` (fused latent norms, rope
  channels last in the indexer), 0.19 and later ``mcore``; ``runtime_dialect()`` in
  ``glmconv.verify.mcore.model`` tells which. Index sharing needs 0.19.
- What was aligned between the runtimes is listed in ``model.alignments``: report it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glmconv.verify.faults.selftest import SelfTestReport as SelfTestReport
    from glmconv.verify.faults.selftest import self_test as self_test
    from glmconv.verify.measure.report import VerifyReport as VerifyReport
    from glmconv.verify.options import VerifyOptions as VerifyOptions
    from glmconv.verify.run import verify as verify

_HOMES = {
    "SelfTestReport": "faults.selftest",
    "VerifyOptions": "options",
    "VerifyReport": "measure.report",
    "self_test": "faults.selftest",
    "verify": "run",
}

__all__ = [*_HOMES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"glmconv.verify.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'glmconv.verify' has no attribute {name!r}")
