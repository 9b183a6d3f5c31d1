"""Kill conversions at every system call that changes the filesystem, and let the same command finish them.

``python scripts/kill_everywhere.py`` plays all scenes of ``tests/support/kill_scenes.py`` and reports how
many runs were killed, and at which calls. Linux on x86-64; needs no privileges beyond tracing a child.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.support.kill_plays import Place, Theatre  # noqa: E402
from tests.support.kill_scenes import Scene, scenes  # noqa: E402


def main(
    only: Annotated[str, typer.Option(help="Play scenes whose name holds this.")] = "",
    folder: Annotated[Path | None, typer.Option(help="Where to work (default: a temporary one).")] = None,
    servers: Annotated[int, typer.Option(min=1, help="Runs at the same time.")] = 2,
    sample: Annotated[bool, typer.Option("--sample", help="One place of each kind.")] = False,
    shown: Annotated[int, typer.Option(help="Faults of a scene that are printed.")] = 5,
) -> None:
    """Exit code 1 when a place has a fault."""
    work = Path(tempfile.mkdtemp(prefix="glmconv-kill-", dir=folder))
    played: list[Place] = []
    broken: list[Scene] = []
    try:
        with Theatre(work, servers) as theatre:
            for scene in (scene for scene in scenes() if only in str(scene)):
                began = time.monotonic()
                try:
                    calm, places = theatre.play(scene, every=not sample)
                except AssertionError as error:
                    typer.echo(f"{scene}: not even an undisturbed run is right: {error}")
                    broken.append(scene)
                    continue
                played += places
                wrong = [place for place in places if place.problems]
                hit, seconds = sum(place.hit for place in places), time.monotonic() - began
                typer.echo(
                    f"{scene}: {len(calm.calls)} calls, {hit} of {len(places)} places hit, "
                    f"{len(wrong)} with a fault, {seconds:.0f} s"
                )
                for place in wrong[:shown]:
                    typer.echo(f"    {str(place).replace(str(work), '')}")
            touched = theatre.sources.touched()
    finally:
        shutil.rmtree(work)
    _report(played)
    if touched:
        typer.echo("a source was touched")
    if touched or broken or any(place.problems for place in played):
        raise typer.Exit(1)


def _report(played: list[Place]) -> None:
    hit = [place for place in played if place.hit]
    calls = ", ".join(f"{name} {count}" for name, count in Counter(p.call.name for p in hit).most_common())
    wrong = sum(bool(place.problems) for place in played)
    typer.echo(
        f"{len(hit)} of {len(played)} places hit by SIGKILL, {wrong} with a fault; killed before: {calls}"
    )


if __name__ == "__main__":
    typer.run(main)
