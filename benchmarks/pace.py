"""Seconds of whole epochs: data, steps, tests; and what 220 of them would take.

PYTHONPATH=src python3 benchmarks/pace.py --data DATA batch_size=128 gradient=gdeq
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from gdeq.lab.training import config as configs
from gdeq.lab.training import process, progress
from gdeq.lab.training.folder import RunFolder
from gdeq.lab.training.loop import Trainer


class Clock(progress.Silent):
    """When each epoch was reported, its test included."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def say(self, text: str) -> None:
        print(text, flush=True)
        if text.startswith("epoch "):
            self.ends.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="cifar10-paper")
    parser.add_argument("--data")
    parser.add_argument("--epochs", type=int, default=4, help="at least 2: the first records")
    parser.add_argument("--whole", type=int, default=220, help="epochs to extrapolate to")
    parser.add_argument("settings", nargs="*", help="key=value, as for gdeq train")
    options = parser.parse_args()
    if options.epochs < 2:
        parser.error("--epochs must be at least 2: the first one compiles and records")
    config = configs.load(options.preset, [*options.settings, f"epochs={options.epochs}"])
    config = configs.replace(config, test_every=1)
    if config.pretrain_steps or config.adapt.enabled:
        parser.error("pre-training and adapting make epochs of different length: leave them out")
    clock = Clock()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        me = process.start(config.device)
        trainer = Trainer(config, RunFolder(Path(folder)), me, clock, options.data)
        steps = len(trainer.train_batches)
        trainer.fit()
    ended = time.perf_counter()
    later = clock.ends[-1] - clock.ends[0]
    each = later / (options.epochs - 1)
    around = clock.ends[0] - began - each + (ended - clock.ends[-1])
    whole = options.whole * each + around
    print(
        f"{steps} steps of {config.batch_size} an epoch: {each:.2f} s from test to test "
        f"(mean of {options.epochs - 1}), {around:.0f} s around them; "
        f"{options.whole} epochs: {whole / 60:.1f} min"
    )


if __name__ == "__main__":
    main()
