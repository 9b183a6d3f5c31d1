"""What lies beside the weights: copied by an allow-list, and replaced by a narrower one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path, PurePath

import pytest

from glmconv.basics.errors import DataError
from glmconv.commands.convert import convert
from glmconv.plan.planner import TargetOptions
from glmconv.plan.side_files import foreign_in_unit
from glmconv.plan.side_names import classify
from tests.support.plain import plain, refused

COPIED = [
    *("config.json", "configuration.json", "generation_config.json", "modules.json"),
    *("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
    *("sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "qwen.tiktoken"),
    *("tekken.json", "vocab.json", "vocab.txt", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/tool_use.jinja"),
    *("LICENSE", "LICENSE.txt", "LICENSE-MODEL", "License-Apache-2.0", "NOTICE.txt", "README.md"),
    *(
        "README_zh.md",
        "USE_POLICY.md",
        "CITATION.cff",
        "THIRD_PARTY_NOTICES.txt",
        "licenses/LICENSE-Qwen.txt",
    ),
    *("modeling_custom.py", "tool.py", "inference/kernel.py", "tokenizer/tokenizer.json"),
]
TRAINERS = [
    *("latest_checkpointed_iteration.txt", "latest_train_state.pt", "latest", "train_state.pt"),
    *("iter_0000050/.metadata", "iter_0000050/__0_0.distcp", "iter_0000050/hf/config.json"),
    *("release/hf/tokenizer.json", "global_step100/mp_rank_00_model_states.pt", "checkpoint-500/config.json"),
    *("__0_0.distcp", ".metadata", "common.pt", "metadata.json", "run_config.yaml", "trainer_state.json"),
    *("training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "rng_state_0.pth"),
    *("zero_to_fp32.py", ".gitattributes", ".cache/huggingface/README.md", "__pycache__/tool.py"),
    *("events.out.tfevents.1.host", "train.log", "logs/README.md", "wandb/run/config.json", "a/.hidden.py"),
    *("glmconv.json", "glmconv-origin.json", "all_results.json"),
]
OTHERS = [
    *("pytorch_model.bin", "model.gguf", "consolidated.00.pth", "adapter_model.bin", "hf_quant_config.json"),
    *("ds_config.json", "train.sh", "notes.txt", "assets/figure.png", "epoch_1/config.json", "data.jsonl"),
    *("passwords.json", "requirements.txt", "2_Dense/pytorch_model.bin", "sub/tokenizer.json"),
]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("side", COPIED),
        ("trainer", TRAINERS),
        ("other", OTHERS),
        ("weights", ["model.safetensors", "model.safetensors.index.json", "sub/model.safetensors"]),
    ],
)
def test_names(kind: str, names: list[str]) -> None:
    assert {name: classify(PurePath(name)) for name in names} == dict.fromkeys(names, kind)


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return plain("qwen3").write(tmp_path / "hf")


def lay(root: Path, names: list[str]) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if not (root / name).exists():
            (root / name).write_text(f"{name}\n")


def files_of(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}


ONLY_WITH_WEIGHTS = {
    "__0_0.distcp",
    ".metadata",
    "latest_checkpointed_iteration.txt",
    "latest_train_state.pt",
}
"""These beside safetensors make a directory two checkpoints."""


@pytest.mark.parametrize(("to", "folder"), [("megatron", "hf"), ("hf", "")])
def test_conversion_copies_the_allowed_and_names_the_rest(
    hf: Path, tmp_path: Path, to: str, folder: str
) -> None:
    lay(hf, [*COPIED, *OTHERS, *(name for name in TRAINERS if name not in ONLY_WITH_WEIGHTS)])
    report = convert(hf, tmp_path / "out", target=TargetOptions(to=to))
    written = {name for name in files_of(report.path / folder) if not name.endswith(".safetensors")}
    own = {"glmconv-origin.json"} if to == "megatron" else {"glmconv.json", "model.safetensors.index.json"}
    assert written - own == {*COPIED, "LICENSE", "tokenizer.json"}
    for name in COPIED:
        assert (report.path / folder / name).read_bytes() == (hf / name).read_bytes()
    (warning,) = [one for one in report.warnings if one.kind == "side-file"]
    for name in ("ds_config.json", "epoch_1/", "assets/", "train.sh"):
        assert name in warning.what
    for name in ("trainer_state", "iter_", "wandb", ".git"):
        assert name not in warning.what


def test_a_checkpoint_or_repository_in_a_sub_directory_stays_behind(hf: Path, tmp_path: Path) -> None:
    lay(hf, ["export/model.safetensors", "export/README.md", "code/.git/HEAD", "code/train.py", "plain/x.py"])
    report = convert(hf, tmp_path / "out", target=TargetOptions(to="hf"))
    names = files_of(report.path)
    assert "plain/x.py" in names
    assert [name for name in names if name.startswith(("export", "code"))] == []
    (warning,) = report.warnings
    assert "code/, export/" in warning.what


class TestLinks:
    @pytest.mark.parametrize("name", ["tokenizer.json", "README.md", "config.json", "sub/code.py"])
    def test_out_of_the_checkpoint(self, hf: Path, tmp_path: Path, name: str) -> None:
        lay(hf, [name])
        (hf / name).rename(tmp_path / "elsewhere")
        (hf / name).symlink_to(tmp_path / "elsewhere")
        refused(hf, tmp_path / "out", DataError, name, "a link that leaves the checkpoint", "elsewhere")

    def test_to_a_file_of_the_system(self, hf: Path, tmp_path: Path) -> None:
        (hf / "vocab.txt").symlink_to("/etc/passwd")
        refused(hf, tmp_path / "out", DataError, "vocab.txt", "/etc/passwd", target=TargetOptions(to="hf"))

    def test_to_nothing(self, hf: Path, tmp_path: Path) -> None:
        (hf / "vocab.txt").symlink_to("gone")
        refused(hf, tmp_path / "out", DataError, "vocab.txt", "where nothing is")

    def test_inside(self, hf: Path, tmp_path: Path) -> None:
        (hf / "README.md").symlink_to("LICENSE")
        assert (convert(hf, tmp_path / "out").path / "hf" / "README.md").read_bytes() == b"free\n"

    def snapshot(self, hf: Path, tmp_path: Path) -> Path:
        """The checkpoint as a hub cache holds it: a snapshot of links to blobs."""
        repository = tmp_path / "hub" / "models--owner--name"
        snapshot = repository / "snapshots" / "0123"
        snapshot.mkdir(parents=True)
        (repository / "blobs").mkdir()
        for number, file in enumerate(sorted(hf.iterdir())):
            blob = repository / "blobs" / f"{number:040x}"
            file.rename(blob)
            (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
        return snapshot

    def test_snapshot_of_a_hub_cache(self, hf: Path, tmp_path: Path) -> None:
        names = {path.name for path in hf.iterdir()}
        snapshot = self.snapshot(hf, tmp_path)
        unit = convert(snapshot, tmp_path / "out", target=TargetOptions(to="hf")).path
        assert {path.name for path in unit.iterdir()} == names | {"glmconv.json"}
        assert not any(path.is_symlink() for path in unit.iterdir())

    def test_snapshot_that_reaches_another_repository(self, hf: Path, tmp_path: Path) -> None:
        snapshot = self.snapshot(hf, tmp_path)
        blob = tmp_path / "hub" / "models--other--private" / "blobs" / f"{7:040x}"
        blob.parent.mkdir(parents=True)
        blob.write_text("secret")
        (snapshot / "README.md").symlink_to(blob)
        refused(snapshot, tmp_path / "out", DataError, "README.md", "leaves the checkpoint")


Change = Callable[[Path], object]


class TestForeign:
    """What ``--overwrite`` may not remove."""

    def made(self, tmp_path: Path, to: str) -> Path:
        hf = plain("qwen3").write(tmp_path / "src")
        lay(hf, ["modeling_x.py", "helper.py", "pack/deep.py", "USE_POLICY.md", "tokenizer.model"])
        return convert(hf, tmp_path / "out", target=TargetOptions(to=to)).path

    @pytest.mark.parametrize("to", ["hf", "megatron"])
    def test_own_output_is_all_known(self, tmp_path: Path, to: str) -> None:
        assert foreign_in_unit(self.made(tmp_path, to)) == []

    @pytest.mark.parametrize("to", ["hf", "megatron"])
    def test_what_others_put_there(self, tmp_path: Path, to: str) -> None:
        unit = self.made(tmp_path, to)
        added = [*("notes.md", "train.py", "data/train.jsonl", "src/lib/code.py", "model.ckpt", ".env")]
        lay(unit, [*added, ".git/HEAD", ".git/objects/aa"])
        (unit / "link").symlink_to(tmp_path)
        (unit / "README.md").symlink_to("config.json")
        os.mkfifo(unit / "pipe")
        (unit / "empty").mkdir()
        expected = {*added, ".git", "link", "README.md", "pipe", "empty"}
        assert set(map(str, foreign_in_unit(unit))) == expected

    def test_code_that_was_edited_is_foreign(self, tmp_path: Path) -> None:
        unit = self.made(tmp_path, "hf")
        (unit / "helper.py").write_text("my own work")
        assert foreign_in_unit(unit) == [Path("helper.py")]

    def test_release_from_the_hub_without_manifest(self, tmp_path: Path) -> None:
        unit = plain("qwen3").write(tmp_path / "hub")
        lay(unit, ["modeling_a.py", "mine/model.py", "other.py", "README.md"])
        config = json.loads((unit / "config.json").read_text())
        config["auto_map"] = {"AutoModel": "owner/name--mine.model.Model", "AutoTokenizer": ["a.B", None]}
        (unit / "config.json").write_text(json.dumps(config))
        # A prefix that transformers uses too says nothing: the config has to name the module.
        assert foreign_in_unit(unit) == [Path("modeling_a.py"), Path("other.py")]

    @pytest.mark.parametrize("to", ["hf", "megatron"])
    @pytest.mark.parametrize(
        "name",
        [
            *(
                "adapter_model.safetensors",
                "lora-x.safetensors",
                "experiments/README.md",
                "my/project/LICENSE",
            ),
            *("a/b/my-authors.txt", "README-todo.txt", "processing_data.py", "custom_work.py"),
            *(
                "tokenizer_backup.json",
                "tokenizer-old/vocab.txt",
                "hf/notes/README.md",
                "hf/lora.safetensors",
            ),
        ],
    )
    def test_what_is_called_alike_is_foreign(self, tmp_path: Path, to: str, name: str) -> None:
        unit = self.made(tmp_path, to)
        assert foreign_in_unit(unit) == []
        lay(unit, [name])
        assert foreign_in_unit(unit) == [Path(name)]

    def test_adapters_alone_are_no_checkpoint(self, tmp_path: Path) -> None:
        names = [f"lora{number}.safetensors" for number in range(3)]
        lay(tmp_path / "collection", names)
        assert foreign_in_unit(tmp_path / "collection") == [Path(name) for name in names]

    def test_unit_of_a_trainer(self, tmp_path: Path) -> None:
        unit = tmp_path / "iter_0000050"
        own = [*(".metadata", "metadata.json", "common.pt", "__0_0.distcp", "run_config.yaml")]
        own += ["train_state.pt", "modelopt_state/common.pt", "tokenizer/tokenizer.json", "hf/config.json"]
        lay(unit, [*own, "hf/model.safetensors", "tokenizer/thesis.tex", "model.safetensors"])
        foreign = {"hf/model.safetensors", "tokenizer/thesis.tex", "model.safetensors"}
        assert set(map(str, foreign_in_unit(unit))) == foreign

    @pytest.mark.parametrize("extra", [[], ["README.md", "LICENSE"], ["tokenizer.json", "common.pt"]])
    def test_directory_that_is_no_checkpoint(self, tmp_path: Path, extra: list[str]) -> None:
        lay(tmp_path / "project", ["config.json", *extra])
        assert set(map(str, foreign_in_unit(tmp_path / "project"))) == {"config.json", *extra}

    def test_list_ends(self, tmp_path: Path) -> None:
        unit = self.made(tmp_path, "hf")
        lay(unit, [f"data/{number}.bin" for number in range(50)])
        assert len(foreign_in_unit(unit, most=10)) == 10
