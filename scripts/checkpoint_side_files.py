"""The files beside the weights of a Hugging Face checkpoint, small but real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CHAT_TEMPLATE = """[gMASK]<sop>
{%- for message in messages %}<|{{ message['role'] }}|>
{{ message['content'] }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""

LICENCE = "These weights are random numbers made for tests. Anyone may use them for anything.\n"

CUSTOM_CODE = '''"""Custom code of a checkpoint: a converter copies it as text and never runs it."""

raise RuntimeError("custom code of a test checkpoint was executed")
'''

SENTENCES = (
    "A conversion is a movement of bytes, known in full before the first byte moves.",
    "Experts share a layer, layers share an index, and every tensor has one place.",
    "Queries, keys and values are grouped; gate and up are stacked; nothing is lost.",
)


def write_side_files(out: Path, config: dict[str, Any]) -> None:
    """Tokenizer, generation config, chat template, licence and a custom ``.py`` that must not run."""
    _tokenizer(config["vocab_size"]).save(str(out / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": None}
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, **special}
    write_json(out / "tokenizer_config.json", tokenizer)
    generation = {
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
        "eos_token_id": config["eos_token_id"],
    }
    write_json(out / "generation_config.json", generation)
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (out / "LICENSE").write_text(LICENCE)
    (out / "modeling_custom.py").write_text(CUSTOM_CODE)


def write_json(path: Path, content: Any) -> None:
    """JSON as transformers writes it: two spaces, a final newline."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer whose ids all lie below ``vocab_size``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    return tokenizer
