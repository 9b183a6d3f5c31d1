"""The pickle reader: plain values come out, hostile pickles never run and always end in DataError."""

from __future__ import annotations

import ast
import builtins
import io
import os
import pickle
import random
import subprocess
import sys
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glmconv.basics.dtypes import DType
from glmconv.basics.errors import DataError, GlmconvError
from glmconv.formats import torchdist
from glmconv.formats.torchdist.entries import Chunk, ObjectEntry, TensorEntry
from glmconv.formats.torchdist.metadata import ALLOWED, parse_metadata
from glmconv.formats.torchdist.metadata_writing import metadata_bytes
from glmconv.formats.torchdist.pickle.restricted import Global, Node, Policy, loads

ANYTHING = Policy()
STRICT = Policy(allowed=ALLOWED)


class Reduced:
    """Pickles as a call of anything."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return self.parts


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail if a pickle gets anything to run or to be imported."""
    calls: list[str] = []

    def trap(name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: calls.append(name)

    modules = set(sys.modules)
    with monkeypatch.context() as patch:
        patch.setattr(os, "system", trap("os.system"))
        patch.setattr(subprocess, "Popen", trap("subprocess.Popen"))
        for name in ("eval", "exec"):
            patch.setattr(builtins, name, trap(name))
        yield
    assert not calls
    assert not {"antigravity", "ios", "this"} & (set(sys.modules) - modules)


ROOMS = Path(torchdist.__file__).parents[2]
PLAIN = [
    *(ROOMS / "formats" / "torchdist").rglob("*.py"),
    *(ROOMS / "source" / "torchdist").glob("*.py"),
    *(ROOMS / "plan" / f"{name}.py" for name in ("parser_defaults", "to_torch_dist", "training_args")),
    ROOMS / "tables" / "rope_args.py",
]
"""All that reads, judges or writes a torch_dist."""


def test_nothing_for_a_torch_dist_imports_torch_or_a_reader_that_runs_pickles() -> None:
    modules = set()
    for path in PLAIN:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules.add(node.module.partition(".")[0])
    assert {"struct", "glmconv"} <= modules
    assert not modules & {
        "torch",
        "numpy",
        "megatron",
        "pickle",
        "_pickle",
        "marshal",
        "importlib",
        "zipfile",
    }


atoms = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
values = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=40,
)


@given(values, st.sampled_from([2, 3, 4, 5]))
@settings(max_examples=300)
def test_plain_values_come_back_as_python_reads_them(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    if _has_surrogates(value):
        return
    read = loads(data, "here", ANYTHING)
    assert read == value
    assert type(read) is type(value)


def _has_surrogates(value: Any) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in repr(value)) or "\\ud" in repr(value)


def test_long_texts_big_numbers_and_shared_objects_come_back() -> None:
    shared = ["x" * 300, 1 << 200, -(1 << 70), 1.5]
    value = [shared, shared, {"k": shared}, tuple(range(300)), {i: i for i in range(3000)}]
    read = loads(pickle.dumps(value, 4), "here", ANYTHING)
    assert read == value
    assert read[0] is read[1] is read[2]["k"]


def test_objects_become_nodes_and_names_stay_names() -> None:
    node = loads(pickle.dumps(Namespace(a=1)), "here", ANYTHING)
    assert isinstance(node, Node)
    assert (node.target.path, node.state) == ("argparse.Namespace", {"a": 1})
    name = loads(pickle.dumps(OrderedDict), "here", ANYTHING)
    assert isinstance(name, Global)
    assert name.path == "collections.OrderedDict"
    assert loads(pickle.dumps({1, 2}), "here", ANYTHING).extra == [1, 2]
    assert loads(pickle.dumps(frozenset([1])), "here", ANYTHING).target.path == "builtins.frozenset"
    assert loads(pickle.dumps(OrderedDict(a=1)), "here", ANYTHING) == {"a": 1}


def stream(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts)


def short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


HOSTILE: dict[str, bytes] = {
    "os.system": pickle.dumps(Reduced(os.system, ("touch /tmp/owned",)), 2),
    "builtins.eval": pickle.dumps(Reduced(eval, ("1+1",)), 2),
    "builtins.exec": pickle.dumps(Reduced(exec, ("x=1",)), 4),
    "subprocess": stream(short("subprocess"), short("Popen"), b"\x93", short("id"), b"\x85R."),
    "getattr chain": pickle.dumps(Reduced(getattr, (Reduced(getattr, (1, "real")), "imag")), 4),
    "__import__": stream(short("builtins"), short("__import__"), b"\x93", short("antigravity"), b"\x85R."),
    "dotted name": stream(short("torch"), short("Size.__new__.__globals__"), b"\x93."),
    "import by GLOBAL": b"\x80\x02cantigravity\nfly\n.",
    "allowed name, call with odd arguments": stream(
        short("torch"), short("Size"), b"\x93", short("x"), b"\x85R."
    ),
    "setting attributes of a class": stream(
        short("torch"), short("Size"), b"\x93", b"N}", short("__new__"), b"K\x01s\x86b."
    ),
    "call of a built object": stream(short("torch"), short("Size"), b"\x93)\x81)R."),
    "call of a number": stream(b"K\x01)R."),
    "extension registry 1": stream(b"\x82\x01."),
    "extension registry 2": stream(b"\x83\x01\x00."),
    "extension registry 4": stream(b"\x84\x01\x00\x00\x00."),
    "persistent id": stream(short("0"), b"Q."),
    "persistent id as text": b"\x80\x02P0\n.",
    "INST": b"\x80\x02(ios\nsystem\n.",
    "OBJ": b"\x80\x02(cos\nsystem\nX\x01\x00\x00\x00xo.",
    "text integer": b"\x80\x02I" + b"9" * 100_000 + b"\n.",
    "text long": b"\x80\x02L" + b"9" * 100_000 + b"L\n.",
    "out-of-band buffer": b"\x80\x05\x97.",
    "read-only buffer": b"\x80\x05N\x98.",
    "memo bomb": b"\x80\x02Nr\xff\xff\xff\xff.",
    "memo bomb as text": b"\x80\x02Np4294967295\n.",
    "memo overwritten": b"\x80\x02Nq\x00Nq\x00.",
    "length bomb, bytes": stream(b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f."),
    "length bomb, bytearray": b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\xff.",
    "length bomb, text": stream(b"\x8d\xff\xff\xff\xff\xff\xff\xff\xffabc."),
    "long number": stream(b"\x8b\xff\xff\xff\x7f."),
    "frame behind the end": stream(b"\x95\xff\xff\xff\xff"),
    "two frames of a protocol": b"\x80\x04\x80\x04N.",
    "protocol 0": b"cos\nsystem\n(S'x'\ntR.",
    "protocol 6": b"\x80\x06N.",
    "empty": b"",
    "one byte": b"\x80",
    "empty stack": stream(b"."),
    "two values": stream(b"NN."),
    "open mark": stream(b"(N."),
    "no mark": stream(b"t."),
    "pop from nothing": stream(b"0."),
    "get from an empty memo": stream(b"h\x00."),
    "after the end": stream(b"N.N."),
    "end missing": stream(b"N"),
    "odd dictionary": stream(b"}(K\x01u."),
    "list as key": stream(b"}]K\x01s."),
    "dictionary as key": stream(b"}}K\x01s."),
    "broken text": stream(b"\x8c\x02\xff\xfe."),
    "surrogate text": stream(b"\x8c\x03\xed\xa0\x80."),
    "append to a number": stream(b"K\x01K\x02a."),
    "set in a list": stream(b"]K\x01K\x02s."),
    "build on a list": stream(b"]}b."),
    "unnamed class": stream(b"K\x01K\x02\x93."),
    "unknown opcode": stream(b"\xff."),
    "tuple of 100,000 levels as key": stream(b"})" + b"\x85" * 100_000 + b"K\x01s."),
    "doubling tuple as key": stream(b"})" + b"2\x86" * 200 + b"K\x01s."),
    "class without an end": b"\x80\x02c" + b"a" * 5000,
}


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_metadata_file_ends_in_a_data_error(name: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_metadata(HOSTILE[name], "there/.metadata")
    assert caught.value.where == "there/.metadata"


@pytest.mark.parametrize("name", ["memo bomb", "memo overwritten"])
def test_the_memo_only_grows_by_one(name: str) -> None:
    with pytest.raises(DataError, match="it stores memo"):
        loads(HOSTILE[name], "here", ANYTHING)


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "__import__", "getattr chain"])
def test_the_error_names_what_the_pickle_asked_for(name: str) -> None:
    wanted = {"os.system": "system", "builtins.eval": "eval"}.get(name, name.partition(" ")[0])
    with pytest.raises(DataError, match=wanted):
        loads(HOSTILE[name], "here", STRICT)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("name", HOSTILE)
def test_without_an_allow_list_a_hostile_pickle_still_runs_nothing(name: str) -> None:
    try:
        loads(HOSTILE[name], "here", ANYTHING)
    except DataError:
        return


def test_deep_nesting_costs_no_recursion() -> None:
    levels = 200_000
    nested = loads(stream(b"]" * levels + b"a" * (levels - 1) + b"."), "here", ANYTHING)
    assert isinstance(nested, list)
    tuples = loads(stream(b")" + b"\x85" * levels + b"."), "here", ANYTHING)
    assert isinstance(tuples, tuple)
    cyclic = loads(stream(b"]\x942a."), "here", ANYTHING)
    assert cyclic[0] is cyclic


def test_a_tuple_of_atoms_may_be_a_key() -> None:
    assert loads(pickle.dumps({("a", 1, None): 2}), "here", ANYTHING) == {("a", 1, None): 2}


def small_metadata() -> bytes:
    chunks = tuple(Chunk((4 * i, 0), (4, 6), f"__{i}_0.distcp", 100 * i, 2000) for i in range(2))
    tensors = {
        "a.weight": TensorEntry(DType.BF16, (8, 6), chunks),
        "b.weight": TensorEntry(DType.BF16, (3,), (Chunk((0,), (3,), "__0_0.distcp", 1 << 40, 1700),)),
    }
    return metadata_bytes(tensors, {"a._extra_state/shard_0_1": ObjectEntry("__0_0.distcp", 0, 1261)})


def test_mutated_metadata_ends_in_success_or_a_data_error() -> None:
    data, random_ = small_metadata(), random.Random(5)
    parse_metadata(data, "here")
    outcomes = {True: 0, False: 0}
    for _ in range(10_000):
        mutant = bytearray(data)
        for _ in range(random_.choice((1, 1, 2, 8))):
            at = random_.randrange(len(mutant))
            action = random_.random()
            if action < 0.6:
                mutant[at] = random_.choice((random_.randrange(256), data[random_.randrange(len(data))]))
            elif action < 0.8:
                del mutant[at : at + random_.randrange(1, 9)]
            else:
                piece = random_.randrange(len(data))
                mutant[at:at] = data[piece : piece + random_.randrange(1, 30)]
        try:
            parse_metadata(bytes(mutant), "here")
            outcomes[True] += 1
        except GlmconvError:
            outcomes[False] += 1
    assert outcomes[True] > 100
    assert outcomes[False] > 1000


@given(
    st.lists(
        st.sampled_from([bytes([code]) for code in range(256)] + [b"K\x01", b"h\x00", b"h\x01", b"\x8c\x01a"])
    )
)
@settings(max_examples=1000)
def test_any_bytes_end_in_success_or_a_data_error(parts: list[bytes]) -> None:
    for policy in (ANYTHING, STRICT):
        try:
            loads(b"\x80\x04" + b"".join(parts) + b".", "here", policy)
        except DataError:
            continue


def test_truncated_anywhere_is_a_data_error() -> None:
    data = small_metadata()
    for end in range(len(data)):
        with pytest.raises(DataError):
            parse_metadata(data[:end], "here")


def test_a_stream_of_pickles_is_not_one_pickle() -> None:
    out = io.BytesIO()
    pickle.dump(1, out)
    pickle.dump(2, out)
    with pytest.raises(DataError, match="follows its end"):
        loads(out.getvalue(), "here", ANYTHING)
