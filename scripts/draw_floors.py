"""Draw the floors of glmconv from its imports into docs/architecture.md, or say that the drawing is old.

python scripts/draw_floors.py            # write
python scripts/draw_floors.py --check    # exit 1 where the page differs
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- floors: begin (scripts/draw_floors.py) -->", "<!-- floors: end -->"

FLOORS = (
    "basics",
    "storage",
    "tables",
    "formats",
    "source",
    "values",
    "plan",
    "engine",
    "checks",
    "verify",
    "commands",
    "cli",
)
"""From the ground up: a module imports from its own floor and from those before it."""


def module_name(path: Path) -> str:
    """``glmconv/plan/plan.py`` as ``glmconv.plan.plan``."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def modules() -> dict[str, Path]:
    """Every module of the core by its dotted name."""
    return {module_name(path): path for path in sorted((ROOT / "glmconv").rglob("*.py"))}


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of the core that a module imports anywhere in it, for types too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in known}
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module)
    return found


def graph() -> dict[str, set[str]]:
    """Every module with those that it imports."""
    known = modules()
    return {name: imports(path, known) for name, path in known.items()}


def floor(module: str) -> str | None:
    """The floor that a module lies on; None for ``glmconv`` itself and its ``__main__``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FLOORS else None


def upward() -> list[str]:
    """Imports from a floor above, as ``a -> b``."""
    height = {name: number for number, name in enumerate(FLOORS)}
    found = []
    for module, others in graph().items():
        own = floor(module)
        if own is None:
            continue
        for other in sorted(others):
            there = floor(other)
            if there is None or height[there] > height[own]:
                found.append(f"{module} -> {other}")
    return found


def circle() -> list[str]:
    """The modules of one circle of imports, empty where there is none."""
    edges = graph()
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for other in sorted(edges[module]):
            found = walk(other, [*path, module])
            if found:
                return found
        done.add(module)
        return []

    return next((found for module in edges if (found := walk(module, []))), [])


def drawing() -> str:
    """A table of the floors, the highest first: what each holds, and which it stands on."""
    edges = graph()
    lines = ["| floor | holds | imports from |", "|---|---|---|"]
    for name in reversed(FLOORS):
        doc = ast.get_docstring(ast.parse((ROOT / "glmconv" / name / "__init__.py").read_text())) or ""
        below = {
            floor(other) for module, others in edges.items() if floor(module) == name for other in others
        }
        stands = " ".join(one for one in FLOORS if one in below and one != name)
        lines.append(f"| `{name}` | {doc.splitlines()[0].rstrip('.')} | {stands} |")
    return "\n".join(lines)


def page() -> str:
    """The whole page with the drawing of now. ValueError where it has no place for one."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{PAGE} has no place for the drawing")
    return f"{before}{BEGIN}\n{drawing()}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page is old")
    wrong = upward()
    if wrong:
        print("imports upwards:", *wrong, sep="\n  ", file=sys.stderr)
        return 1
    current = page()
    if not parser.parse_args().check:
        PAGE.write_text(current)
        return 0
    return int(current != PAGE.read_text())


if __name__ == "__main__":
    sys.exit(main())
