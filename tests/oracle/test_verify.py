"""``verify`` passes right conversions, fails wrong ones, and names the layer, with both megatron-cores."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.support import mcore_run, verify_jobs
from tests.support.conversions import to_megatron
from tests.support.mutants import MUTANTS, planted

LANES = {"0.16.1": "mcore-0.18", "0.19.2": "mcore"}
NATIVE = {
    "0.16.1": ("glm-5", "glm-4.5", "glm-4.5-air", "qwen3", "qwen3-untied", "qwen3-moe"),
    "0.19.2": ("glm-5", "glm-5.2", "glm-4.5", "glm-4.5-air", "qwen3", "qwen3-untied", "qwen3-moe"),
}
RELAID = {
    "0.16.1": (("glm-5", "slime"), ("glm-5", "miles"), ("glm-5", "mcore")),
    "0.19.2": (("glm-5.2", "slime"), ("glm-5.2", "miles"), ("glm-5", "mcore-0.18")),
}
WRONG = {
    "0.16.1": ("glm-5", "indexer not swapped"),
    "0.19.2": ("glm-5", "indexer swapped where it must not be"),
}
NOISE = 2e-5


class Reports:
    """One process a lane verifies everything."""

    def __init__(self, directory: Path, checkpoint: Callable[..., Path]) -> None:
        self.directory, self.checkpoint = directory, checkpoint
        self.found: dict[str, dict[str, Any]] = {}

    def of(self, lane: str, name: str) -> dict[str, Any]:
        if lane not in self.found:
            self.found[lane] = mcore_run.run(
                verify_jobs.verify_all, lane=lane, arguments=self._arguments(lane)
            )[0]
        report: dict[str, Any] = self.found[lane][name]
        return report

    def _arguments(self, lane: str) -> dict[str, Any]:
        """Every pair of one lane, with the options that are not the usual ones."""
        native, pairs = LANES[lane], {}
        for model in NATIVE[lane]:
            pairs[model] = self._pair(model, native, lane)
        for model, dialect in RELAID[lane]:
            pairs[f"{model} {dialect}"] = self._pair(model, dialect, lane)
        pairs["padded"] = self._pair("glm-4.5", native, f"{lane}-padded", padded_vocab=400)
        model, wrong = WRONG[lane]
        mutant = next(one for one in MUTANTS if one.name == wrong)
        with planted(mutant):
            pairs["wrong"] = self._pair(model, native, f"{lane}-wrong")
        options: dict[str, Any] = {
            "dense": {"seq_len": 8},
            "lowered": {"seq_len": 8, "index_topk": 4},
            "part": {"seq_len": 24, "layers": [2, 4]},
            "bf16": {"seq_len": 32, "precision": "bf16"},
        }
        model = {"0.16.1": "glm-5", "0.19.2": "glm-5.2"}[lane]
        return {"pairs": pairs | dict.fromkeys(options, pairs[model]), "options": options}

    def _pair(self, model: str, dialect: str, group: str, **target: Any) -> list[str]:
        hf = self.checkpoint(model)
        root = self.directory / group / f"{model}-{dialect}"
        return [str(hf), str(root / "release" if root.exists() else to_megatron(hf, root, dialect, **target))]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[..., Path]) -> Reports:
    return Reports(tmp_path_factory.mktemp("verify"), checkpoint)


def require_parity(report: dict[str, Any]) -> None:
    assert report["verdict"] == "verified", report["reason"]
    assert report["exit_code"] == 0
    for predictions in report["predictions"]:
        assert predictions["parity"]["max_abs"] <= NOISE
        assert predictions["parity"]["argmax_agreement"] == 1.0
        assert abs(predictions["parity"]["kl_hf_megatron"]) < 1e-9
    for place in report["places"]:
        assert place["same_input"]["max"] <= NOISE
        assert place["same_other_input"] is None or place["same_other_input"]["max"] <= NOISE
        if place["selection"] is not None:
            assert place["selection"]["pearson"] >= 0.999999
            assert place["selection"]["with_ties"] == place["running_selection"]["with_ties"] == 1.0
            assert place["selection"]["sparse_rows"] > 0
        if place["routing"] is not None:
            assert place["routing"]["with_ties"] == 1.0
            assert not place["routing"]["bias_difference"]


@pytest.mark.parametrize(("lane", "model"), [(lane, m) for lane, models in NATIVE.items() for m in models])
def test_a_right_conversion_is_verified(reports: Reports, lane: str, model: str) -> None:
    report = reports.of(lane, model)
    require_parity(report)
    assert not report["relaid"]
    assert report["versions"]["megatron-core"] == lane
    mtp = [one["name"] for one in report["predictions"][1:]]
    assert mtp == (["MTP 0 logprobs"] if model.startswith("glm") else [])
    kinds = [place["kind"] for place in report["places"]]
    assert any("MoE" in kind for kind in kinds) == (model not in ("qwen3", "qwen3-untied"))
    indexed = [place for place in report["places"] if place["selection"] is not None]
    assert bool(indexed) == model.startswith("glm-5")
    assert any(place["shares_index"] for place in report["places"]) == (model == "glm-5.2")


@pytest.mark.parametrize("lane", LANES)
def test_what_was_aligned_is_said(reports: Reports, lane: str) -> None:
    report = reports.of(lane, "glm-5")
    assert any("epsilon" in line for line in report["alignments"])
    latent = [line for line in report["alignments"] if "normalised q latent" in line]
    selections = [place["runtime_selection"] for place in report["places"] if place["selection"]]
    if lane == "0.19.2":
        assert latent == []
        assert selections == [None] * len(selections)
    else:
        # The weights are right; that runtime by itself selects other tokens, and the page says so in red.
        assert latent != []
        assert all(one["with_ties"] < 0.99 for one in selections)
        assert "by itself it selects other tokens" in report["page"]


@pytest.mark.parametrize(
    ("lane", "name"), [(lane, f"{m} {d}") for lane, pairs in RELAID.items() for m, d in pairs]
)
def test_another_dialect_is_laid_out_anew_and_verified(reports: Reports, lane: str, name: str) -> None:
    report = reports.of(lane, name)
    require_parity(report)
    assert report["relaid"]
    assert report["runtime_dialect"] == LANES[lane]
    assert any("not the runtime of the trainer" in line for line in report["warnings"])


@pytest.mark.parametrize("lane", LANES)
def test_a_padded_vocabulary_is_verified(reports: Reports, lane: str) -> None:
    require_parity(reports.of(lane, "padded"))


@pytest.mark.parametrize("lane", LANES)
def test_a_wrong_channel_order_of_the_indexer_fails_in_every_indexer(reports: Reports, lane: str) -> None:
    report = reports.of(lane, "wrong")
    assert (report["verdict"], report["exit_code"]) == ("failed", 4)
    bad = [place["name"] for place in report["places"] if place["problems"]]
    assert bad == [place["name"] for place in report["places"] if place["selection"] is not None]
    assert all(name in report["reason"] for name in bad)
    assert all(place["selection"]["pearson"] < 0.99 for place in report["places"] if place["problems"])
    assert any(one["problems"] for one in report["predictions"])
    assert 'class="verdict failed"' in report["page"]


@pytest.mark.parametrize("lane", LANES)
def test_a_selection_that_never_was_sparse_proves_nothing(reports: Reports, lane: str) -> None:
    report = reports.of(lane, "dense")
    assert (report["verdict"], report["exit_code"]) == ("unproven", 2)
    assert "--seq-len" in report["reason"]
    assert "--index-topk" in report["reason"]


@pytest.mark.parametrize("lane", LANES)
def test_a_lowered_top_k_makes_a_short_text_sparse(reports: Reports, lane: str) -> None:
    report = reports.of(lane, "lowered")
    require_parity(report)
    assert report["index_topk"] == 4


@pytest.mark.parametrize("lane", LANES)
def test_some_layers_can_run_alone(reports: Reports, lane: str) -> None:
    report = reports.of(lane, "part")
    require_parity(report)
    # GLM-5.2's layer 2 shares the index of layer 1, so that one comes along.
    first = 2 if lane == "0.16.1" else 1
    assert [place["name"] for place in report["places"]] == [
        "embedding",
        *[f"layer {number}" for number in range(first, 4)],
    ]
    assert report["predictions"] == []
    assert "did not run" in report["reason"]


@pytest.mark.parametrize("lane", LANES)
def test_bf16_is_held_against_its_noise_floor(reports: Reports, lane: str) -> None:
    report = reports.of(lane, "bf16")
    assert report["verdict"] == "verified", report["reason"]
    for one in report["predictions"]:
        assert one["floor"]["mean_abs"] > 1e-3
        assert one["parity"]["mean_abs"] < 3 * one["floor"]["mean_abs"]
    layers = [place for place in report["places"] if place["name"].startswith("layer")]
    assert all(1e-4 < place["floor"]["p99"] < 0.1 for place in layers)


@pytest.mark.parametrize(("lane", "model"), [("0.16.1", "glm-5"), ("0.19.2", "qwen3-moe")])
def test_what_megatron_core_itself_saved_is_verified(
    lane: str, model: str, tmp_path: Path, checkpoint: Callable[..., Path]
) -> None:
    """Without a config of its own; layers numbered or stacked; gate and up apart; optimizer state beside."""
    hf = checkpoint(model, dtype="float32")
    pairs = {model: [str(hf), str(to_megatron(hf, tmp_path / model, LANES[lane]))]}
    found = mcore_run.run(
        verify_jobs.verify_saved, lane=lane, arguments={"pairs": pairs, "out": str(tmp_path / "saved")}
    )[0]
    assert len(found) == 3
    for report in found.values():
        require_parity(report)
        assert not report["relaid"]


class _Page(HTMLParser):
    """Collects tags; everything that a page could load from elsewhere is an attribute named here."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.loads += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "data", "srcset")]
        if tag not in ("meta", "br") and tag not in ("rect", "line", "circle", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            while self.open.pop() != tag:
                pass


def test_the_page_is_one_file_with_both_pictures(reports: Reports) -> None:
    text = reports.of("0.19.2", "glm-5.2")["page"]
    page = _Page()
    page.feed(text)
    assert page.loads == []
    assert not page.seen & {"script", "link", "img", "iframe"}
    assert page.open == []
    assert "url(" not in text
    assert text.count("<svg") == 2
    assert 'class="verdict verified"' in text
    for said in ("bound 2e-05", "running", "mcore", "epsilon", "layer 7"):
        assert said in text
