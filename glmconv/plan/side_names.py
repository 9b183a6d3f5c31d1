"""Names of a checkpoint's files: which lie beside its weights, and which are a trainer's.

An allow-list: config, tokenizer, processor, chat template, licence and model card, custom code.
Names: ``huggingface_hub`` and ``transformers`` (``utils/__init__.py``, ``tokenization_utils_base.py``,
``processing_utils.py``), ``sentence-transformers`` (``modules.json``, one ``N_Name`` directory a
module). What trainers leave: Megatron-LM and Megatron-Bridge (``checkpointing.py``), DeepSpeed
(``runtime/engine.py``), ``transformers.Trainer``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Literal

from glmconv.formats.safetensors.origin import FILE as ORIGIN
from glmconv.source.manifest import FILE as MANIFEST

Kind = Literal["side", "weights", "trainer", "other"]
"""``side`` is copied; ``weights`` are safetensors; ``trainer``: trackers, states, logs, hidden files."""

CONFIGS = (
    *("config.json", "configuration.json", "generation_config.json", "modules.json"),
    *("processor_config.json", "*_processor_config.json", "preprocessor_config.json"),
    *("*_preprocessor_config.json", "feature_extractor_config.json"),
    *("sentence_*_config.json", "config_sentence_transformers.json"),
)
TOKENIZERS = (
    *("tokenizer*.json", "tokenizer*.model", "*.tiktoken", "tekken.json", "merges.txt"),
    *("vocab.json", "vocab.txt", "vocab.bpe", "vocab.model", "special_tokens_map.json", "added_tokens.json"),
    *("spiece.model", "sentencepiece*.model", "spm*.model", "chat_template.jinja", "chat_template*.json"),
)
LOOSE = ("*.model", "*.jinja", "*.md", "*.py")
"""Copied, but common outside of checkpoints too."""

TEXTS = re.compile(
    r"(.*[-_. ])?(licen[sc]es?|notices?|readme|copying|copyright|authors|citation|model_?card|use_policy)"
    r"([-_. ].*)?"
)
TEXT_SUFFIXES = ("", ".txt", ".md", ".rst", ".cff", ".bib")

TEMPLATES = "additional_chat_templates"
HELPERS = ("tokenizer", "processor", "image_processor", "feature_extractor")
"""Sub-directories that hold a tokenizer's or a processor's own files."""

MODULE = re.compile(r"\d+_[A-Z]\w*")
"""A module's directory of sentence-transformers: ``1_Pooling``."""

CODE_PREFIXES = (
    *("modeling_", "modular_", "configuration_", "tokenization_", "processing_", "image_processing_"),
    *("video_processing_", "feature_extraction_", "custom_"),
)
"""How transformers names the modules of a checkpoint's own code."""

WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
TRAINER = (
    *("latest_checkpointed_iteration.txt", "latest_train_state.pt", "latest_wandb_artifact_path.txt"),
    *("latest", "latest_universal", "*.distcp", "common.pt", "metadata.json", "train_state.pt"),
    *("run_config.yaml", "modelopt_*", "mp_rank_*", "trainer_state.json", "training_args.*"),
    *("optimizer*", "optim_*", "scheduler*", "rng_state*", "random_states_*", "zero_to_fp32.py"),
    *("zero_pp_rank_*", "*_optim_states.pt", "events.out.tfevents*", "*.log", "nohup.out", "*_results.json"),
    *("train_dataloader_*", "*.pyc", MANIFEST, ORIGIN),
)
TRAINER_FOLDERS = (
    *("iter_*", "release", "global_step*", "checkpoint-*", "checkpoint_*", "modelopt_*", "mp_rank_*"),
    *("wandb", "tensorboard", "runs", "logs", "log", "mlruns", "__pycache__"),
)
UNIT_FILES = (
    *(".metadata", "metadata.json", "common.pt", "*.distcp", MANIFEST, "run_config.yaml"),
    *("train_state.pt", "modelopt_*"),
)
"""Files of a torch_dist unit itself (megatron-core, Megatron-Bridge, ModelOpt)."""


SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""Weights as ``save_pretrained`` names them."""

OWN = frozenset(
    (
        *("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json"),
        *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
        *("added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
        *("README.md", "LICENSE", "LICENSE.txt", "LICENSE.md"),
    )
)
"""Side files that every release has under these very names, at the top."""


def is_own(path: PurePath) -> bool:
    """Whether a side file's name alone says that it is a checkpoint's own: nothing else is called so."""
    return len(path.parts) == 1 and path.name in OWN


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name fits one of some shell patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def classify(path: PurePath) -> Kind:
    """What a file of a checkpoint's directory is, told by its path relative to that directory."""
    *folders, name = path.parts
    if any(part.startswith(".") for part in path.parts) or matches(name, TRAINER):
        return "trainer"
    if any(matches(folder, TRAINER_FOLDERS) for folder in folders):
        return "trainer"
    if matches(name, WEIGHTS):
        return "weights"
    return "side" if is_distinctive(path) or _is_loose(path) else "other"


def is_distinctive(path: PurePath) -> bool:
    """Whether a side file's name alone says that it belongs to a checkpoint."""
    *folders, name = path.parts
    if _is_text(name):
        return True
    if not folders:
        return matches(name, CONFIGS) or matches(name, TOKENIZERS) or _is_own_code(name)
    folder = folders[0]
    if len(folders) > 1:
        return False
    if folder == TEMPLATES:
        return name.endswith(".jinja")
    if MODULE.fullmatch(folder):
        return name == "config.json"
    return folder in HELPERS and (matches(name, CONFIGS) or matches(name, TOKENIZERS))


def _is_text(name: str) -> bool:
    """A licence, a notice, a model card: ``LICENSE-Apache-2.0``, ``README.md`` …"""
    lowered = name.lower()
    suffix = PurePath(lowered).suffix
    return bool(TEXTS.fullmatch(lowered)) and (suffix in TEXT_SUFFIXES or suffix[1:].isdigit())


def _is_own_code(name: str) -> bool:
    return name.endswith(".py") and name.startswith(CODE_PREFIXES)


def _is_loose(path: PurePath) -> bool:
    """Any text, template and code; in sub-directories (of packages, documents) no ``*.model``."""
    return matches(path.name, LOOSE if len(path.parts) == 1 else ("*.md", "*.py"))
