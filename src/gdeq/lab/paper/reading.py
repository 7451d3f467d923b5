"""Run folders of the plan, as far as they are there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gdeq.lab.paper.plan import Planned, make_plan
from gdeq.lab.report.runs import Run, read_run

NOT_YET = "not yet run"


@dataclass(frozen=True)
class Made:
    """A planned run and what is there of it."""

    planned: Planned
    run: Run | None
    failure: str = ""  # why it ended early for good

    @property
    def finished(self) -> bool:
        return self.run is not None and self.run.finished

    @property
    def state(self) -> str:
        if self.failure:
            return self.failure
        if self.run is None:
            return NOT_YET
        return "finished" if self.run.finished else f"unfinished: {self.run.progress}"


def read_all(folder: Path, plan: Sequence[Planned] | None = None) -> list[Made]:
    """All of the plan, in its order."""
    return [_read(folder / run.name, run) for run in (make_plan() if plan is None else plan)]


def _read(path: Path, planned: Planned) -> Made:
    if not (path / "config.yaml").is_file():
        return Made(planned, None)
    return Made(planned, read_run(path), _failure(path))


def _failure(path: Path) -> str:
    try:
        told = json.loads((path / "failed.json").read_text())
        return f"failed: the loss became NaN after step {told['steps']}"
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, LookupError, TypeError):
        return "failed"


def markdown(head: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join("| " + " | ".join(str(cell) for cell in row) + " |\n" for row in rows)
