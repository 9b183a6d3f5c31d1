"""What a checkpoint lacks: believed where the run itself says so, else refused; filled by name only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glmconv.basics.errors import DataError
from glmconv.commands.check import check
from glmconv.commands.convert import convert, plan_conversion
from glmconv.formats.safetensors.header import read_header
from glmconv.plan.planner import TargetOptions
from glmconv.source.source import SourceOptions
from tests.support.plain import Plain, edit_json, plain, refused
from tests.support.trained import lose, set_args, trained

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
UNTIE = "untie_embeddings_and_output_weights"
BIAS = "mlp.gate.e_score_correction_bias"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def tensors_of(folder: Path) -> dict[str, bytes]:
    """The bytes of every tensor of an HF checkpoint."""
    found = {}
    for file in folder.glob("*.safetensors"):
        header, data = read_header(file), file.read_bytes()
        for entry in header.entries:
            found[entry.name] = data[header.data_start + entry.begin : header.data_start + entry.end]
    return found


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


class TestTiedRun:
    """Trained without ``--untie-embeddings-and-output-weights``, from a model that is not tied."""

    FAMILIES = ("qwen3", "qwen3-moe", "glm-4.5", "glm-5.2")

    def run(self, tmp_path: Path, model: str, **args: Any) -> tuple[Path, Plain]:
        """A tied run, and the untied model that it was started from (with another seed)."""
        made = plain(model, tie_word_embeddings=True)
        unit = trained(made.write(tmp_path / "trained"), tmp_path / "run")
        set_args(unit, args)
        start = plain(model, tie_word_embeddings=False)
        for name, tensor in list(start.tensors.items()):
            start.add(name, tensor.shape, tensor.dtype)
        start.write(tmp_path / "start")
        return unit, made

    @pytest.mark.parametrize("origin_holds_weights", [True, False])
    @pytest.mark.parametrize("model", FAMILIES)
    def test_the_head_is_the_trained_embedding(
        self, tmp_path: Path, out: Path, model: str, origin_holds_weights: bool
    ) -> None:
        _, made = self.run(tmp_path, model)
        start = tmp_path / "start"
        if not origin_holds_weights:
            for file in start.glob("model*"):
                file.unlink()
        report = convert(tmp_path / "run", out, source=SourceOptions(origin_hf_dir=start))
        written = tensors_of(out)
        assert written[EMBEDDING] == made.tensors[EMBEDDING].data
        # The table of Qwen3 knows the head as a copy of the embedding, that of GLM has none where tied.
        assert (HEAD in written) == (origin_holds_weights and model.startswith("qwen3"))
        assert written.get(HEAD, written[EMBEDDING]) == made.tensors[EMBEDDING].data
        assert config_of(out) == config_of(start) | {"tie_word_embeddings": True}
        (warning,) = [one for one in report.warnings if one.kind == "tied"]
        assert UNTIE in warning.what
        assert "config.json says that it is not" in warning.what

    def test_another_models_head_is_not_taken(self, tmp_path: Path, out: Path) -> None:
        _, made = self.run(tmp_path, "qwen3")
        start = tmp_path / "start"
        options = SourceOptions(origin_hf_dir=start, fill_missing_from=start)
        report = convert(tmp_path / "run", out, source=options)
        assert tensors_of(out)[HEAD] == made.tensors[EMBEDDING].data
        assert [one for one in report.warnings if "nothing is missing" in one.what]

    def test_relaid_out(self, tmp_path: Path, out: Path) -> None:
        self.run(tmp_path, "glm-5.2")
        source = SourceOptions(origin_hf_dir=tmp_path / "start")
        unit = convert(
            tmp_path / "run", out, source=source, target=TargetOptions(to="megatron", dialect="slime")
        ).path
        assert config_of(unit / "hf")["tie_word_embeddings"] is True
        assert plan_conversion(out).source.spec.tied

    def test_check_says_it(self, tmp_path: Path) -> None:
        from glmconv.checks.findings import CheckOptions

        self.run(tmp_path, "qwen3")
        report = check(tmp_path / "run", CheckOptions(source=SourceOptions(origin_hf_dir=tmp_path / "start")))
        assert report.ok
        assert "tied" in {one.kind for one in report.findings}

    @pytest.mark.parametrize("silence", ["untied", "no word", "no args"])
    def test_the_head_was_lost(self, tmp_path: Path, out: Path, silence: str) -> None:
        """Nothing says that the run was tied: refused, and no other model's head is offered."""
        unit, _ = self.run(tmp_path, "qwen3")
        if silence == "untied":
            set_args(unit, {UNTIE: True})
        else:
            set_args(unit, {} if silence == "no word" else None, without=(UNTIE,))
        options = SourceOptions(origin_hf_dir=tmp_path / "start")
        message = refused(
            tmp_path / "run", out, DataError, HEAD, "missing", "tie_word_embeddings", source=options
        )
        assert "fill" not in message
        edit_json(tmp_path / "start" / "config.json", lambda config: config.update(tie_word_embeddings=True))
        if silence == "untied":  # a config that is tied contradicts the run: its head is lost for good
            refused(tmp_path / "run", out, DataError, "untie_embeddings_and_output_weights", source=options)
        else:
            assert convert(tmp_path / "run", out, source=options).path == out

    def test_hf_without_head(self, tmp_path: Path, out: Path) -> None:
        made = plain("qwen3", tie_word_embeddings=False)
        del made.tensors[HEAD]
        message = refused(made.write(tmp_path / "hf"), out, DataError, HEAD, '"tie_word_embeddings"')
        assert "fill" not in message


class TestRunWithoutRouterBias:
    ARG = "moe_router_enable_expert_bias"

    def run(self, tmp_path: Path, model: str, dialect: str = "mcore", **target: Any) -> Plain:
        made = plain(model)
        unit = trained(made.write(tmp_path / "hf"), tmp_path / "run", dialect=dialect, **target)
        assert lose(unit, lambda name: name.endswith("expert_bias"))
        set_args(unit, {self.ARG: False})
        return made

    @pytest.mark.parametrize("to", ["hf", "hf-stacked", "megatron"])
    @pytest.mark.parametrize("model", ["glm-4.5", "glm-5.2"])
    def test_zeros(self, tmp_path: Path, out: Path, model: str, to: str) -> None:
        made = self.run(tmp_path, model)
        source = SourceOptions(origin_hf_dir=tmp_path / "hf", fill_missing_from=tmp_path / "hf")
        report = convert(tmp_path / "run", out, source=source, target=TargetOptions(to=to))
        if to == "megatron":
            convert(out, tmp_path / "back")
        written = tensors_of(tmp_path / "back" if to == "megatron" else out)
        biases = {name: data for name, data in written.items() if name.endswith(BIAS)}
        assert biases.keys() == {name for name in made.tensors if name.endswith(BIAS)}
        assert all(data == bytes(len(made.tensors[name].data)) for name, data in biases.items())
        others = {name: one.data for name, one in made.tensors.items() if not name.endswith(BIAS)}
        assert to == "hf-stacked" or {n: d for n, d in written.items() if n not in biases} == others
        (warning,) = [one for one in report.warnings if one.kind == "zeros"]
        assert f"zeros are written for {len(biases)} layers" in warning.what

    def test_stacked_layers(self, tmp_path: Path, out: Path) -> None:
        made = plain("glm-4.5", first_k_dense_replace=0)
        unit = trained(made.write(tmp_path / "hf"), tmp_path / "run", layer_keys="stacked")
        assert lose(unit, lambda name: name.endswith("expert_bias"))
        set_args(unit, {}, without=(self.ARG,))
        convert(tmp_path / "run", out, source=SourceOptions(origin_hf_dir=tmp_path / "hf"))
        written = tensors_of(out)
        assert all(not any(data) for name, data in written.items() if name.endswith(BIAS))

    def test_checked_and_read(self, tmp_path: Path) -> None:
        from glmconv.checks.findings import CheckOptions

        self.run(tmp_path, "glm-5.2")
        source = SourceOptions(origin_hf_dir=tmp_path / "hf")
        assert check(tmp_path / "run", CheckOptions(source=source, values=True)).ok

    @pytest.mark.parametrize("case", ["args say so", "some are there", "no args"])
    def test_a_lost_bias_is_refused(self, tmp_path: Path, out: Path, case: str) -> None:
        unit = trained(plain("glm-5.2").write(tmp_path / "hf"), tmp_path / "run")
        first = "decoder.layers.3.mlp.router.expert_bias"
        lose(unit, lambda name: name.endswith("expert_bias") and (case != "some are there" or name == first))
        set_args(unit, {self.ARG: case == "args say so"} if case != "no args" else None)
        source = SourceOptions(origin_hf_dir=tmp_path / "hf")
        message = refused(tmp_path / "run", out, DataError, f"layers.3.{BIAS}", "missing", source=source)
        assert "fill" not in message


class TestFill:
    """``--fill-missing-from`` opens a source like any other, and takes from the very same model only."""

    LOST = "model.layers.2.self_attn.o_proj.weight"

    def lacking(self, tmp_path: Path, model: str = "qwen3", lost: str = LOST) -> Plain:
        made = plain(model)
        whole = dict(made.tensors)
        del made.tensors[lost]
        made.write(tmp_path / "hf")
        made.tensors = whole
        return made

    def filled(self, tmp_path: Path, other: Plain, **target: Any) -> Any:
        source = SourceOptions(fill_missing_from=other.write(tmp_path / "other"))
        return convert(tmp_path / "hf", tmp_path / "out", source=source, target=TargetOptions(**target))

    @pytest.mark.parametrize("to", ["hf", "megatron"])
    @pytest.mark.parametrize("model", ["qwen3", "qwen3-moe", "glm-4.5", "glm-5.2"])
    def test_taken_and_named(self, tmp_path: Path, model: str, to: str) -> None:
        made = self.lacking(tmp_path, model)
        other = plain(model)
        other.random = np.random.Generator(np.random.SFC64(11))
        for name, tensor in list(other.tensors.items()):
            other.add(name, tensor.shape, tensor.dtype)
        report = self.filled(tmp_path, other, to=to)
        manifest = json.loads((report.path / "glmconv.json").read_text())
        (name,), (path,) = manifest["filled"], manifest["filled"].values()
        assert name == self.LOST
        assert name.encode() in Path(path).read_bytes()[:100_000]
        assert Path(path).parent == tmp_path / "other"
        if to == "megatron":
            convert(tmp_path / "out", tmp_path / "back")
        written = tensors_of(tmp_path / "back" if to == "megatron" else tmp_path / "out")
        expected = {name: tensor.data for name, tensor in made.tensors.items()}
        assert written == expected | {self.LOST: other.tensors[self.LOST].data}

    @pytest.mark.parametrize("layer_keys", ["stacked", "per-layer"])
    def test_into_a_torch_dist_and_from_one(self, tmp_path: Path, out: Path, layer_keys: str) -> None:
        made = plain("qwen3")
        unit = trained(made.write(tmp_path / "hf"), tmp_path / "run", layer_keys=layer_keys)
        lose(unit, lambda name: name == "decoder.final_layernorm.weight")
        options = SourceOptions(origin_hf_dir=tmp_path / "hf")
        assert "fill" not in refused(tmp_path / "run", out, DataError, "model.norm.weight", source=options)
        options = SourceOptions(origin_hf_dir=tmp_path / "hf", fill_missing_from=tmp_path / "hf")
        convert(tmp_path / "run", out, source=options)
        assert tensors_of(out) == {name: tensor.data for name, tensor in made.tensors.items()}

    def refused(self, tmp_path: Path, other: Plain, *words: str, **target: Any) -> str:
        source = SourceOptions(fill_missing_from=other.write(tmp_path / "other"))
        options = TargetOptions(**target)
        return refused(tmp_path / "hf", tmp_path / "out", DataError, *words, source=source, target=options)

    @pytest.mark.parametrize("target", [{}, {"to": "hf"}, {"layer_keys": "per-layer"}, {"dtype": "float32"}])
    def test_quantised(self, tmp_path: Path, target: dict[str, Any]) -> None:
        self.lacking(tmp_path)
        other = plain("qwen3", quantization_config={"quant_method": "fp8", "fmt": "e4m3"})
        shape = other.tensors[self.LOST].shape
        other.add(self.LOST, shape, "F8_E4M3")
        other.add(f"{self.LOST}_scale_inv", (1, 1), "F32")
        self.refused(tmp_path, other, "other", "quantised (fp8 e4m3)", **target)

    @pytest.mark.parametrize("target", [{}, {"to": "hf"}, {"layer_keys": "per-layer"}])
    def test_raw_fp8_under_a_plain_config(self, tmp_path: Path, target: dict[str, Any]) -> None:
        self.lacking(tmp_path)
        other = plain("qwen3")
        other.add(self.LOST, other.tensors[self.LOST].shape, "F8_E4M3")
        self.refused(tmp_path, other, "other", self.LOST, "quantised or not floating point", **target)

    @pytest.mark.parametrize("target", [{}, {"to": "hf"}, {"layer_keys": "per-layer"}])
    def test_another_dtype_needs_a_cast(self, tmp_path: Path, target: dict[str, Any]) -> None:
        self.lacking(tmp_path)
        other = plain("qwen3")
        other.add(self.LOST, other.tensors[self.LOST].shape, "F32")
        self.refused(tmp_path, other, self.LOST, "is F32", "the run's are BF16", "--dtype", **target)
        source = SourceOptions(fill_missing_from=tmp_path / "other")
        options = TargetOptions(dtype="bfloat16", **target)
        assert convert(tmp_path / "hf", tmp_path / "out", source=source, target=options).steps["computed"]

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"num_attention_heads": 4, "head_dim": 36}, ("num_heads: 6 and 4", "head_dim: 24 and 36")),
            ({"rope_theta": 5e5}, ("rope.theta",)),
            ({"rms_norm_eps": 1e-5}, ("norm_eps: 1e-06 and 1e-05",)),
            ({"tie_word_embeddings": False}, ("tied: True and False",)),
            ({"num_hidden_layers": 6}, ("num_layers: 4 and 6",)),
            ({"hidden_act": "gelu"}, ("hidden_act", "False and True")),
        ],
    )
    def test_another_model_of_the_family(
        self, tmp_path: Path, change: dict[str, Any], words: tuple[str, ...]
    ) -> None:
        self.lacking(tmp_path)
        made = plain("qwen3")
        config = made.config
        if "rope_theta" in change and "rope_parameters" in config:
            change = {"rope_parameters": config["rope_parameters"] | change}
        self.refused(tmp_path, plain("qwen3", **change), "is not the model of", *words)

    @pytest.mark.parametrize("field", ["num_experts_per_tok", "routed_scaling_factor", "norm_topk_prob"])
    def test_other_routing(self, tmp_path: Path, field: str) -> None:
        made = self.lacking(tmp_path, "glm-5.2")
        values = {"num_experts_per_tok": 3, "routed_scaling_factor": 9.5}
        change: dict[str, Any] = {field: values.get(field, not made.config.get(field, True))}
        other = plain("glm-5.2", **change)
        self.refused(tmp_path, other, "is not the model of", "moe.")

    def test_another_family(self, tmp_path: Path) -> None:
        self.lacking(tmp_path)
        self.refused(tmp_path, plain("qwen3-moe"), "is not the model of", "model_type: qwen3 and qwen3_moe")

    def test_defects_of_its_own(self, tmp_path: Path) -> None:
        self.lacking(tmp_path)
        other = plain("qwen3")
        del other.tensors["model.norm.weight"]
        other.add("model.unknown.weight", (3,))
        self.refused(tmp_path, other, "other: 2 things", "model.norm.weight", "model.unknown.weight")

    def test_mtp_as_before(self, tmp_path: Path, out: Path) -> None:
        made = plain("glm-5.2")
        made.write(tmp_path / "whole")
        layers = made.config["num_hidden_layers"]
        for name in [name for name in made.tensors if name.startswith(f"model.layers.{layers}.")]:
            del made.tensors[name]
        made.write(tmp_path / "hf")
        refused(tmp_path / "hf", out, DataError, "MTP", "--drop-mtp", "--fill-missing-from")
        convert(tmp_path / "hf", out, source=SourceOptions(fill_missing_from=tmp_path / "whole"))
        assert plan_conversion(out).source.spec.num_mtp == 1


class TestDropMtp:
    """MTP layers are known by their names, whatever the config says of them."""

    @pytest.mark.parametrize("model", ["glm-4.5", "glm-5.2"])
    @pytest.mark.parametrize("said", [0, None, 1, "absent"])
    @pytest.mark.parametrize("kind", ["hf", "megatron"])
    def test_dropped(self, tmp_path: Path, out: Path, model: str, said: Any, kind: str) -> None:
        made = plain(model, copies=True)
        src = made.write(tmp_path / "hf")
        if kind == "megatron":
            trained(src, tmp_path / "run")
            for file in src.glob("model*"):
                file.unlink()
        config = src / "config.json"
        field = "num_nextn_predict_layers"
        edit_json(config, lambda c: c.pop(field) if said == "absent" else c.update({field: said}))
        origin = src if kind == "megatron" else None
        path = tmp_path / "run" if kind == "megatron" else src
        if said == 0:
            refused(path, out, DataError, "--drop-mtp", source=SourceOptions(origin_hf_dir=origin))
        options = SourceOptions(origin_hf_dir=origin, drop_mtp=True)
        report = convert(path, out, source=options, target=TargetOptions(to="hf"))
        prefix = f"model.layers.{made.config['num_hidden_layers']}."
        expected = {name: one.data for name, one in made.tensors.items() if not name.startswith(prefix)}
        assert tensors_of(out) == expected
        assert config_of(out)[field] == 0
        assert all("--drop-mtp" in reason or "repeats" in reason for _, reason, _ in report.dropped)

    def test_a_decoder_layer_too_many_is_none(self, tmp_path: Path, out: Path) -> None:
        made = plain("glm-5.2", num_nextn_predict_layers=0)
        layers = made.config["num_hidden_layers"]
        for name in [name for name in made.tensors if name.startswith("model.layers.3.")]:
            made.tensors[name.replace(".3.", f".{layers}.", 1)] = made.tensors[name]
        hf = made.write(tmp_path / "hf")
        message = refused(hf, out, DataError, f"layer {layers}", source=SourceOptions(drop_mtp=True))
        assert "by its enorm" not in message

    @pytest.mark.parametrize("model", ["qwen3", "glm-5.2"])
    def test_nothing_to_drop_is_said(self, tmp_path: Path, out: Path, model: str) -> None:
        changes: dict[str, Any] = {} if model == "qwen3" else {"num_nextn_predict_layers": 0}
        hf = plain(model, **changes).write(tmp_path / "hf")
        report = convert(hf, out, source=SourceOptions(drop_mtp=True))
        assert [one.what for one in report.warnings if "--drop-mtp does nothing" in one.what]


def test_allowing_what_is_not_missing_is_said(tmp_path: Path, out: Path) -> None:
    hf = plain("qwen3").write(tmp_path / "hf")
    options = SourceOptions(allow_missing=frozenset({EMBEDDING, "no.such.tensor"}))
    told = {one.where: one.what for one in convert(hf, out, source=options).warnings}
    assert "not missing" in told[EMBEDDING]
    assert "no tensor of this model" in told["no.such.tensor"]
