"""List the names, options and arguments of torchdeq 0.1 that have no row in the table of docs.

`python docs/torchdeq_names.py` prints what coming-from/torchdeq.md leaves out.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

PAGE = Path(__file__).parent / "coming-from" / "torchdeq.md"


def public() -> set[str]:
    """All that a user of torchdeq can write: names, options, arguments, keys of the statistics."""
    import torchdeq  # noqa: PLC0415

    found: set[str] = set()
    for module in pkgutil.walk_packages(torchdeq.__path__, "torchdeq."):
        loaded = importlib.import_module(module.name)
        for name in getattr(loaded, "__all__", ()):
            found |= {name} | arguments(getattr(loaded, name))
    core = importlib.import_module("torchdeq.core")
    stat = importlib.import_module("torchdeq.solver.stat").SolverStat
    found |= arguments(core.DEQBase) | {"add_deq_args", "mixed_init", "SolverStat"} | set(stat())
    parser = argparse.ArgumentParser(add_help=False)
    torchdeq.add_deq_args(parser)
    found |= {action.dest for action in parser._actions}
    return found - {"self", "kwargs", "x", "args", "norm_kwargs", "grad_factory_kwargs"}


def arguments(what: object) -> set[str]:
    """Of a function, or of a class and the methods that a user calls."""
    calls = [what]
    if inspect.isclass(what):
        own = ("__init__", "forward") if hasattr(what, "forward") else ("__init__", "apply")
        calls = [getattr(what, name, None) for name in own]
    found: set[str] = set()
    for call in calls:
        if inspect.isfunction(call) or inspect.ismethod(call):
            found |= set(inspect.signature(call).parameters)
    return found


def missing() -> list[str]:
    """The names that stand in the first column of no row."""
    rows = re.findall(r"^\|([^|]*)\|", PAGE.read_text(), re.MULTILINE)
    told = set(re.findall(r"`'?-{0,2}(\w+)", " ".join(rows)))
    return sorted(public() - told)


if __name__ == "__main__":
    print(*missing() or ["every name has a row"], sep="\n")
