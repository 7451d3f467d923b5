"""Checkpoints that survive anything: whole or not there, checked on reading, safe to load.

A checkpoint is a header line with the SHA-256 of what follows, and then what `torch.save` wrote.
It is written beside its place, flushed to the disk and renamed; the one before is kept.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

MAGIC = b"gdeq-checkpoint-1 "
KEEP = 2


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


def folder_of(run: Path) -> Path:
    return run / "checkpoints"


def available(run: Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    return sorted(folder_of(run).glob("step-*.ckpt"), reverse=True)


def save(run: Path, step: int, state: dict[str, Any]) -> Path:
    """Write ``state`` (tensors, numbers, text, lists, dicts) as the newest checkpoint."""
    folder = folder_of(run)
    place = folder / f"{_name(step)}.ckpt"
    payload = io.BytesIO()
    torch.save(state, payload)
    data = payload.getbuffer()
    header = MAGIC + hashlib.sha256(data).hexdigest().encode() + b"\n"
    half = place.with_suffix(".part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with half.open("wb") as file:
            file.write(header)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        half.replace(place)
        _sync_folder(folder)
    except OSError as problem:
        with contextlib.suppress(OSError):
            half.unlink(missing_ok=True)
        kept = available(run)
        last = f"the last good one is {kept[0].name}" if kept else "there is none before it"
        full = " The disk is full: free some space, then resume." * (problem.errno == errno.ENOSPC)
        raise CheckpointError(
            f"could not write checkpoint {place}: {problem.strerror or problem}; {last}.{full}"
        ) from problem
    for old in [*available(run)[KEEP:], *folder.glob("*.part")]:  # .part: of a process killed here
        with contextlib.suppress(OSError):
            old.unlink()
    return place


def read(path: Path) -> dict[str, Any]:
    """One checkpoint; raises `CheckpointError` if a bit of it is not as it was written."""
    try:
        data = path.read_bytes()
    except OSError as problem:
        raise CheckpointError(f"{path.name} cannot be read: {problem.strerror}") from problem
    header, newline, payload = data.partition(b"\n")
    if not newline or not header.startswith(MAGIC):
        raise CheckpointError(f"{path.name} is not a checkpoint of gdeq, or its start is lost")
    if hashlib.sha256(payload).hexdigest().encode() != header[len(MAGIC) :]:
        raise CheckpointError(f"{path.name} is damaged or cut short")
    # weights_only: a checkpoint from anywhere can hold data, never code that runs.
    try:
        state: Any = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except Exception as problem:  # torch.load raises many kinds; none may end a resume
        raise CheckpointError(
            f"{path.name} holds something else than data and was refused: "
            + str(problem).strip().split("\n")[0]
        ) from problem
    if not isinstance(state, dict):
        raise CheckpointError(f"{path.name} holds no state of a training")
    return state


def latest(run: Path, tell: Callable[[str], None] = print) -> dict[str, Any]:
    """The newest checkpoint that is whole; says which damaged ones it passed over."""
    found = available(run)
    if not found:
        raise CheckpointError(f"{run} holds no checkpoint to resume from; start it anew")
    problems = []
    for path in found:
        try:
            state = read(path)
        except CheckpointError as problem:
            problems.append(str(problem))
            continue
        for text in problems:
            tell(f"warning: {text}; going back to {path.name}")
        return state
    raise CheckpointError(
        f"no checkpoint in {run} is whole: {'; '.join(problems)}.  Start again in another "
        "folder, or delete its checkpoints to begin this one anew"
    )


def set_aside(run: Path, newer_than: int) -> list[Path]:
    """Rename the damaged ones that were passed over for this step; returns their new names.

    Left as they are they would count among the newest, and be named as the last good one.
    """
    renamed = []
    for path in available(run):
        if path.stem <= _name(newer_than):
            break
        try:
            read(path)
        except CheckpointError:
            place = path.with_name(path.name + ".damaged")
            with contextlib.suppress(OSError):
                renamed.append(path.replace(place))
    return renamed


def _name(step: int) -> str:
    return f"step-{step:09d}"


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
