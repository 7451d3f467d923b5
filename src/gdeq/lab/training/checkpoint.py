"""Checkpoints and weights: whole or not there, checked on reading, never any code.

Both are safetensors files, which any program reads.  Their metadata hold as JSON what is no tensor,
the run's configuration among it, and the SHA-256 of the whole file, taken with zeros in its place.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from safetensors.torch import save as dump
from torch import Tensor, nn

from gdeq.lab import files
from gdeq.lab.files import LabError

KEEP = 2
SUM, ZEROS = b'{\\"sha256\\": \\"', b"0" * 64  # JSON within JSON


class CheckpointError(LabError):
    """A checkpoint cannot be read."""


def available(run: Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    return sorted((run / "checkpoints").glob("step-*.ckpt"), reverse=True)


def save(run: Path, step: int, state: dict[str, Any], config: dict[str, Any] | None = None) -> Path:
    """Write ``state`` (tensors, numbers, text, lists, dicts) as the newest checkpoint."""
    tensors: dict[str, Tensor] = {}
    about = {"state": _without_tensors(state, tensors), "config": config}
    folder = files.subfolder(run, "checkpoints")
    place = folder / f"step-{step:09d}.ckpt"
    files.write(place, pack(tensors, about))
    for old in [*available(run)[KEEP:], *folder.glob("*.part")]:  # .part: a process was killed
        with contextlib.suppress(OSError):
            old.unlink()
    return place


def read(path: Path) -> dict[str, Any]:
    """One checkpoint; raises `CheckpointError` if a bit of it is not as it was written."""
    tensors, about = read_tensors(path)
    with contextlib.suppress(LookupError, TypeError, ValueError):
        state = _with_tensors(about["state"], tensors)
        if isinstance(state, dict) and "step" in state:
            return state
    raise CheckpointError(f"{path.name} holds no state of a training")


def latest(run: Path, tell: Callable[[str], None] = print, aside: bool = False) -> dict[str, Any]:
    """The newest checkpoint that is whole; says which damaged ones it passed over.

    aside: rename those, or they would count among the newest and be named as the last good one.
    """
    damaged: dict[Path, str] = {}
    for path in available(run):
        try:
            state = read(path)
        except CheckpointError as problem:
            damaged[path] = str(problem)
            continue
        for other, text in damaged.items():
            tell(f"warning: {text}; going back to {path.name}")
            if aside:
                place = other.replace(other.with_name(f"{other.name}.damaged"))
                tell(f"the damaged checkpoint is now {place.name}")
        return state
    raise CheckpointError(
        f"no checkpoint in {run} is whole: {'; '.join(damaged.values())}.  Start again in another "
        "folder, or delete its checkpoints to begin this one anew"
    )


# -- tensors, and what is said about them ----------------------------------------------------------


def pack(tensors: Mapping[str, Tensor], about: Any) -> bytes:
    """A safetensors file with its own checksum."""
    plain = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    # One entry, since the order of several is not fixed.
    data = dump(plain, {"gdeq": json.dumps({"sha256": ZEROS.decode(), "about": about})})
    at = data.index(SUM) + len(SUM)
    return data[:at] + hashlib.sha256(data).hexdigest().encode() + data[at + len(ZEROS) :]


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    """The tensors of a file that `pack` made, and what was said about them."""
    try:
        data = path.read_bytes()
    except (OSError, MemoryError) as problem:
        why = getattr(problem, "strerror", "it does not fit into the memory")
        raise CheckpointError(f"{path.name} cannot be read: {why}") from problem
    head = 8 + int.from_bytes(data[:8], "little")
    at = data.find(SUM, 0, head) + len(SUM)
    if at < len(SUM):
        raise CheckpointError(f"{path.name} is not a file of gdeq, or its start is lost")
    rest = at + len(ZEROS)
    found = hashlib.sha256(data[:at] + ZEROS)
    found.update(memoryview(data)[rest:])
    if found.hexdigest().encode() != data[at:rest]:
        raise CheckpointError(f"{path.name} is damaged or cut short")
    try:
        about = json.loads(json.loads(data[8:head])["__metadata__"]["gdeq"])["about"]
        tensors = load(data)
    except (SafetensorError, ValueError, LookupError, TypeError, RecursionError) as problem:
        raise CheckpointError(
            f"{path.name} holds something else than data and was refused: {problem}"
        ) from problem
    if isinstance(about, dict):
        check_task(about.get("config"), path)
    return tensors, about


def check_task(config: Any, place: Path) -> None:
    """Raise if a configuration that lies here names a task whose code may have come with it.

    What gdeq wrote names a task of the user's by its whole path, elsewhere.
    """
    task = config.get("task") if isinstance(config, dict) else None
    if not isinstance(task, str) or not task.endswith(".py"):
        return
    if not Path(task).is_absolute() or place.parent.resolve() in Path(task).resolve().parents:
        raise CheckpointError(
            f"{place.name} names the task {task}, whose code may have come with the run: it was "
            "not run"
        )


def config_in(path: Path) -> dict[str, Any] | None:
    """The configuration of the run that made the file; None where it cannot be read."""
    try:
        config = read_tensors(path)[1]["config"]
    except (CheckpointError, LookupError, TypeError):
        return None
    return config if isinstance(config, dict) else None


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """`load_state_dict`, which also refuses other dtypes and numbers that are not finite."""
    for name, own in model.state_dict().items():
        given = tensors.get(name, own)
        if given.dtype != own.dtype:
            raise ValueError(f"{name} is {given.dtype}, that of the model is {own.dtype}")
        if given.is_floating_point() and not given.isfinite().all():
            raise ValueError(f"{name} holds numbers that are not finite")
    model.load_state_dict(tensors)


def _without_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Data for JSON, with names in place of tensors.  Keys of dicts keep their type."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"items": [[key, _without_tensors(v, tensors)] for key, v in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_without_tensors(v, tensors) for v in value]
    return value


def _with_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_with_tensors(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    return {key: _with_tensors(v, tensors) for key, v in value["items"]}
