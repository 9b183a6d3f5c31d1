"""Compare ``glmconv/plan/parser_defaults.py`` with parsers of Megatron-LM, or write it anew.

    python scripts/parser_fields.py MEGATRON_LM_DIR [MEGATRON_LM_DIR …] [--write]

Each directory is a checkout of Megatron-LM (slime: the pinned commit with docker/patch applied;
miles: the branch that its Dockerfile names), the newest last. Exits 1 where a parser defines a
field that the list lacks. The checkout's parser is built in a process of its own; packages that
it imports and that are not here (triton, six, …) are replaced by empty ones.
"""

from __future__ import annotations

import argparse
import enum
import json
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absent_packages import install

ROOT = Path(__file__).resolve().parents[1]
MODULE = ROOT / "glmconv" / "plan" / "parser_defaults.py"


def dump(checkout: str) -> None:
    """Print the defaults of the checkout's parser as JSON; objects of classes as ``{"class": repr}``."""
    install([checkout])
    from megatron.training import arguments

    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    found = vars(parser.parse_args([]))
    sys.stdout.write(json.dumps(found, default=lambda value: {"class": repr(value)}, sort_keys=True))


def _plain(value: Any) -> Any:
    """An IntEnum (a signal) is the number that it equals."""
    return value.value if isinstance(value, enum.IntEnum) else value


def defaults_of(checkout: Path) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", __file__, "--dump", str(checkout)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{checkout}: its parser cannot be built:\n{done.stderr[-2000:]}")
    return {name: _plain(value) for name, value in json.loads(done.stdout.splitlines()[-1]).items()}


def merged(parsers: list[dict[str, Any]]) -> dict[str, Any]:
    """All fields; where defaults differ, that of the newest parser."""
    fields: dict[str, Any] = {}
    for parser in parsers:
        fields |= parser
    return dict(sorted(fields.items()))


def module_text(fields: Mapping[str, Any], doc: str) -> str:
    """The module: one entry a value, the value in JSON, then the fields that have it."""
    shared: dict[str, list[str]] = {}
    for name, value in fields.items():
        if not isinstance(value, dict):  # an object of a class of Megatron's
            shared.setdefault(json.dumps(value), []).append(name)
    entries = "; ".join(f"{value}: {' '.join(names)}" for value, names in sorted(shared.items()))
    table = textwrap.fill(entries, 108, break_long_words=False, break_on_hyphens=False)
    return f'"""{doc}"""\n\n{HEAD}{table}\n{TAIL}'


HEAD = '''from __future__ import annotations

import json
from typing import Any

_TABLE = """\\
'''
TAIL = '''"""
"""A default in JSON, a colon and the fields that have it; entries are apart by semicolons."""


def parser_defaults() -> dict[str, Any]:
    """A new dictionary of every field with its default."""
    defaults: dict[str, Any] = {}
    for entry in " ".join(_TABLE.split()).split("; "):
        value, _, names = entry.rpartition(": ")
        defaults |= {name: json.loads(value) for name in names.split()}
    return defaults
'''


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkouts", nargs="*", type=Path)
    parser.add_argument("--write", action="store_true", help="write the module anew, its docstring kept")
    parser.add_argument("--dump", metavar="CHECKOUT", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.dump:
        dump(asked.dump)
        return 0
    if not asked.checkouts:
        parser.error("name at least one checkout of Megatron-LM")
    fields = merged([defaults_of(checkout) for checkout in asked.checkouts])
    sys.path.insert(0, str(ROOT))
    from glmconv.plan import parser_defaults

    if asked.write:
        MODULE.write_text(module_text(fields, parser_defaults.__doc__ or ""))
        return 0
    ours = parser_defaults.parser_defaults()
    objects = [name for name, value in fields.items() if isinstance(value, dict)]
    lacking = sorted(set(fields) - set(ours) - set(objects))
    other = sorted(name for name in set(fields) & set(ours) if fields[name] != ours[name])
    print(f"{len(fields)} fields in {len(asked.checkouts)} parsers, {len(ours)} in the list")
    print(f"defaults that are objects of Megatron's classes: {', '.join(objects) or 'none'}")
    print(f"lacking: {', '.join(lacking) or 'none'}")
    print(f"in no parser: {', '.join(sorted(set(ours) - set(fields))) or 'none'}")
    print(f"other defaults: {', '.join(other) or 'none'}")
    return 1 if lacking or other else 0


if __name__ == "__main__":
    sys.exit(main())
