"""Pairs of commands, A and B, that differ in one thing: a killed run of A may never be continued by B."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tests.support.pairs import (
    Pair,
    Words,
    Workshop,
    all_shards,
    content,
    exchanged,
    header,
    json_field,
    made,
    other_bytes,
    replaced_by,
    rewritten,
    shard,
    swapped_shards,
    touched,
)
from tests.support.plain import shards_of

Maker = Callable[[Workshop], Pair]
SITUATIONS: dict[str, Maker] = {}


def situation(name: str) -> Callable[[Maker], Maker]:
    def keep(maker: Maker) -> Maker:
        SITUATIONS[name] = maker
        return maker

    return keep


def _keep(name: str, maker: Maker) -> None:
    SITUATIONS[name] = maker


MEGATRON: Words = ("--to", "megatron")


@situation("another directory")
def _(shop: Workshop) -> Pair:
    a, b = shop.hf("step_1000"), shop.hf("step_2000", seed=1)
    return Pair((a, *MEGATRON), (b, *MEGATRON), ("step_1000", "step_2000"))


@situation("another directory with the same bytes")
def _(shop: Workshop) -> Pair:
    a = shop.hf("step_1000")
    shutil.copytree(a, shop.folder / "copy")
    return Pair((a, *MEGATRON), (shop.folder / "copy", *MEGATRON), ("step_1000", "copy"))


@situation("another directory whose files are links to the same ones")
def _(shop: Workshop) -> Pair:
    a = shop.hf("step_1000")
    b = shop.variant(a, lambda folder: None, "links")
    return Pair((a, *MEGATRON), (b, *MEGATRON), ("step_1000", "links"))


for _name, _change, _says in (
    ("all shards replaced", all_shards, "model-0000"),
    ("the first shard replaced", shard(0), "model-00001"),
    ("the last shard replaced", shard(1), "model-00002"),
    ("the last shard replaced, size and time as before", shard(1, same_time=True), "model-00002"),
    ("a shard touched", touched, "model-00001"),
    ("another header", header(False), "model-00001"),
    ("another header of the same size and time", header(True), "model-00001"),
    ("shards swapped", swapped_shards, "model-0000"),
    ("another epsilon in config.json", json_field("config.json", "rms_norm_eps", 3e-6), "config"),
    ("another rope base in config.json", json_field("config.json", "rope_theta", 54321.0), "config"),
    (
        "another initializer range",
        json_field("config.json", "initializer_range", 0.03),
        "config",
    ),
    ("another tokenizer", content("tokenizer.json", b"[]\n"), "tokenizer"),
    ("another tokenizer at the same time", content("tokenizer.json", b"[]\n", same_time=True), "tokenizer"),
    ("one side file more", content("generation_config.json", b"{}"), "generation_config"),
    ("one side file less", lambda folder: (folder / "LICENSE").unlink(), "LICENSE"),
):
    _keep(
        _name,
        lambda shop, change=_change, says=_says: shop.swapped(shop.hf(), change, (), says, "src"),  # type: ignore[misc]
    )


@situation("the same weights in three shards")
def _(shop: Workshop) -> Pair:
    return shop.swapped(shop.hf(), replaced_by(shop.hf("three", shards=3)), (), "model-0000", "src")


@situation("the same weights in one file")
def _(shop: Workshop) -> Pair:
    return shop.swapped(shop.hf(), replaced_by(shop.hf("one", shards=1)), (), "model", "src")


@situation("a shard changed in place, size and time as before")
def _(shop: Workshop) -> Pair:
    src = shop.hf()

    @contextmanager
    def turn() -> Iterator[None]:
        path = shards_of(src)[1]
        before = path.stat()
        with path.open("r+b") as file:
            file.write(other_bytes(path))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        yield

    return Pair((src, *MEGATRON), (src, *MEGATRON), ("model-00002",), turn, lasting=True)


@situation("a link to the source, turned to another")
def _(shop: Workshop) -> Pair:
    first, second = shop.hf("step_1000"), shop.hf("step_2000", seed=1)
    link, other = shop.folder / "latest", shop.folder / "other"
    link.symlink_to(first)
    other.symlink_to(second)
    return Pair(
        (link, *MEGATRON), (link, *MEGATRON), ("step_1000", "step_2000"), lambda: exchanged(link, other)
    )


@situation("a link to the same source")
def _(shop: Workshop) -> Pair:
    src, link = shop.hf(), shop.folder / "link"
    link.symlink_to(src)
    return Pair((src, *MEGATRON), (link, *MEGATRON), ("src", "link"))


@situation("the same source, spelt differently")
def _(shop: Workshop) -> Pair:
    src = shop.hf()
    return Pair((src, *MEGATRON), (f"{src}/../src/", *MEGATRON), ("src",))


for _name, _a, _b, _words in (
    ("dialect slime", (), ("--dialect", "slime"), ("slime", "dialect")),
    ("dialect mcore-0.18", (), ("--dialect", "mcore-0.18"), ("mcore-0.18", "dialect")),
    ("dialects slime and miles", ("--dialect", "slime"), ("--dialect", "miles"), ("miles", "dialect")),
    ("layer keys", (), ("--layer-keys", "per-layer"), ("layer",)),
    ("padded vocabulary", (), ("--padded-vocab-size", "512"), ("vocab",)),
    ("another padding", ("--padded-vocab-size", "640"), ("--padded-vocab-size", "512"), ("vocab",)),
    ("an iteration", (), ("--iteration", "7"), ("iter",)),
    ("another iteration", ("--iteration", "8"), ("--iteration", "7"), ("iter",)),
    ("a cast", (), ("--dtype", "float32"), ("dtype", "float32")),
    ("another cast", ("--dtype", "float32"), ("--dtype", "float16"), ("dtype", "float16")),
    ("no hashes", (), ("--hash", "none"), ("hash",)),
    ("hashes", ("--hash", "none"), ("--hash", "full"), ("hash",)),
    ("the other kind", ("--to", "megatron"), ("--to", "hf"), ("hf", "megatron")),
    ("from hf to hf: shard size", ("--to", "hf"), ("--to", "hf", "--max-shard-size", "150KB"), ("shard",)),
    (
        "from hf to hf: another shard size",
        ("--to", "hf", "--max-shard-size", "100KB"),
        ("--to", "hf", "--max-shard-size", "150KB"),
        ("shard",),
    ),
    ("a name that may be missing", (), ("--allow-missing", "lm_head.weight"), ("missing",)),
):

    def _options(shop: Workshop, a: Words = _a, b: Words = _b, says: tuple[str, ...] = _words) -> Pair:
        src = shop.hf()
        return Pair((src, *a), (src, *b), says)

    _keep(f"options: {_name}", _options)

for _name, _b in (("workers", ("-j", "3")), ("copy mode", ("--copy-mode", "copy"))):

    def _same_work(shop: Workshop, b: Words = _b) -> Pair:
        src = shop.hf()
        return Pair((src, *MEGATRON), (src, *MEGATRON, *b), continues=True)

    _keep(f"options: {_name}", _same_work)


@situation("options: MTP layers dropped")
def _(shop: Workshop) -> Pair:
    src = shop.hf(model="glm-5.2")
    return Pair((src, *MEGATRON), (src, *MEGATRON, "--drop-mtp"), ("mtp",))


@situation("options: stacked experts")
def _(shop: Workshop) -> Pair:
    src = shop.hf(model="qwen3-moe")
    return Pair((src, "--to", "hf"), (src, "--to", "hf-stacked"), ("stacked", "layout"))


@situation("from hf to hf: another directory")
def _(shop: Workshop) -> Pair:
    a, b = shop.hf("step_1000"), shop.hf("step_2000", seed=1)
    return Pair((a, "--to", "hf"), (b, "--to", "hf"), ("step_1000", "step_2000"))


def _poor(shop: Workshop) -> Path:
    """A GLM without its MTP layer: what may be filled from the start model."""
    checkpoint = made("glm-5.2", 0)
    layer = f"model.layers.{checkpoint.config['num_hidden_layers']}."
    checkpoint.tensors = {name: one for name, one in checkpoint.tensors.items() if not name.startswith(layer)}
    return checkpoint.write(shop.folder / "poor")


@situation("another checkpoint to fill from")
def _(shop: Workshop) -> Pair:
    poor = _poor(shop)
    a, b = shop.hf("fill_1", "glm-5.2", seed=1), shop.hf("fill_2", "glm-5.2", seed=2)
    words = (poor, *MEGATRON, "--fill-missing-from")
    return Pair((*words, a), (*words, b), ("fill_1", "fill_2"))


@situation("the checkpoint to fill from, replaced")
def _(shop: Workshop) -> Pair:
    poor, fill = _poor(shop), shop.hf("fill", "glm-5.2", seed=1)
    other = shop.variant(fill, shard(1, same_time=True))
    words = (poor, *MEGATRON, "--fill-missing-from", fill)
    return Pair(words, words, ("fill",), lambda: exchanged(fill, other))


@situation("filled, and missing")
def _(shop: Workshop) -> Pair:
    poor, fill = _poor(shop), shop.hf("fill", "glm-5.2", seed=1)
    return Pair((poor, *MEGATRON, "--fill-missing-from", fill), (poor, *MEGATRON), ("missing", "fill", "MTP"))


@situation("from torch_dist: another iteration")
def _(shop: Workshop) -> Pair:
    root = shop.unit("--iteration", "7")
    shop.unit("--iteration", "8", seed=1)
    tracker = root / "latest_checkpointed_iteration.txt"
    seven, eight = shop.folder / "seven", tracker
    seven.write_text("7")

    def turn() -> AbstractContextManager[None]:
        return exchanged(eight, seven)

    # The tracker says 8 for A; while B runs, it says 7.
    return Pair((root, "--to", "hf"), (root, "--to", "hf"), ("iter_0000007", "iter_0000008"), turn)


@situation("from torch_dist: the unit instead of its root")
def _(shop: Workshop) -> Pair:
    root = shop.unit()
    return Pair((root, "--to", "hf"), (root / "release", "--to", "hf"), ("root",))


@situation("from torch_dist: another root")
def _(shop: Workshop) -> Pair:
    a, b = shop.unit(root="run_1"), shop.unit(root="run_2", seed=1)
    return Pair((a, "--to", "hf"), (b, "--to", "hf"), ("run_1", "run_2"))


def _numbers_of(other: Path, *, same_time: bool) -> Callable[[Path], None]:
    """The data files of another torch_dist of the same shapes, and so of the same sizes."""

    def change(root: Path) -> None:
        for path in (root / "release").glob("*.distcp"):
            rewritten(path, (other / "release" / path.name).read_bytes(), same_time=same_time)

    return change


for _name, _same in (("other numbers", False), ("other numbers, size and time as before", True)):

    def _numbers(shop: Workshop, same_time: bool = _same) -> Pair:
        other = shop.unit(root="other", seed=1)
        return shop.swapped(shop.unit(), _numbers_of(other, same_time=same_time), (), ".distcp", "root")

    _keep(f"from torch_dist: {_name}", _numbers)


def _pickled_again(root: Path) -> None:
    """The same metadata in other bytes."""
    path = root / "release" / ".metadata"
    rewritten(path, pickle.dumps(pickle.loads(path.read_bytes()), protocol=4))


for _name, _change, _says in (
    ("other bytes of .metadata", _pickled_again, ".metadata"),
    ("another config", json_field("release/hf/config.json", "rms_norm_eps", 3e-6), "config"),
    ("another tokenizer", content("release/hf/tokenizer.json", b"[]\n", same_time=True), "tokenizer"),
):
    _keep(
        f"from torch_dist: {_name}",
        lambda shop, change=_change, says=_says: shop.swapped(shop.unit(), change, (), says, "root"),  # type: ignore[misc]
    )


@situation("from torch_dist: another origin")
def _(shop: Workshop) -> Pair:
    root, one = shop.unit(), shop.hf("origin_1")
    shutil.rmtree(root / "release" / "hf")
    two = shop.variant(one, content("tokenizer.json", b"[]\n"), "origin_2")
    words = (root, "--to", "hf", "--origin-hf-dir")
    return Pair((*words, one), (*words, two), ("origin_1", "origin_2", "tokenizer"))


@situation("from torch_dist: the origin, changed")
def _(shop: Workshop) -> Pair:
    root, origin = shop.unit(), shop.hf("origin")
    shutil.rmtree(root / "release" / "hf")
    other = shop.variant(origin, json_field("config.json", "rms_norm_eps", 3e-6))
    words = (root, "--to", "hf", "--origin-hf-dir", origin)
    return Pair(words, words, ("origin", "config"), lambda: exchanged(origin, other))


@situation("from torch_dist to torch_dist: another dialect")
def _(shop: Workshop) -> Pair:
    root = shop.unit(model="glm-5.2")
    words = (root, *MEGATRON, "--dialect")
    return Pair((*words, "slime"), (*words, "miles"), ("dialect", "miles"))


@situation("from torch_dist: the dialect of the source named")
def _(shop: Workshop) -> Pair:
    root = shop.unit(model="glm-5.2")
    return Pair((root, "--to", "hf"), (root, "--to", "hf", "--from-dialect", "slime"), ("dialect",))
