"""What the runs were made with: settings that differ, settings in full, environment."""

from __future__ import annotations

from gdeq.lab.report import formats
from gdeq.lab.report.markup import Markup, header, join, table, tag
from gdeq.lab.report.recipes import flatten, varying
from gdeq.lab.report.runs import Run


def differences(runs: list[Run]) -> Markup:
    """Run by run, the settings that are not the same in all."""
    flat = [{key: _shown(v) for key, v in flatten(run.config).items()} for run in runs]
    keys = varying(flat)
    if len(runs) == 1:
        return Markup("")
    if not keys:
        return tag("p", "All runs have the same settings.")
    body: list[list[object]] = [
        [run.name, *(own.get(key, formats.NONE) for key in keys)]
        for run, own in zip(runs, flat, strict=True)
    ]
    note = tag("p", "What differs between the runs; below, each run’s settings in full.")
    return join(note, table(header("Run", *keys), body, "differences"))


def configurations(runs: list[Run]) -> Markup:
    """Each run's config.yaml as it stands in the folder."""
    return join(
        *(
            tag("details", tag("summary", run.name), tag("pre", run.config_text.rstrip()))
            for run in runs
        )
    )


def environments(runs: list[Run]) -> Markup:
    """Versions and hardware; one line for a fact that all runs share."""
    flat = [{key: _shown(v) for key, v in flatten(run.environment).items()} for run in runs]
    keys = dict.fromkeys(key for own in flat for key in own)
    if not keys:
        return tag("p", "The run folders do not tell.", class_="soft")
    body: list[list[object]] = []
    for key in keys:
        values: dict[str, list[str]] = {}
        for run, own in zip(runs, flat, strict=True):
            values.setdefault(own.get(key, formats.NONE), []).append(run.name)
        parts = [
            tag("div", value, *([] if len(values) == 1 else [tag("small", ", ".join(names))]))
            for value, names in values.items()
        ]
        body.append([key, tag("td", *parts, class_="text")])
    return table(
        header("Fact", tag("th", "Value", scope="col", class_="text")), body, "environment"
    )


def _shown(value: object) -> str:
    return formats.NONE if value is None else str(value)
