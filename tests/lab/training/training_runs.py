"""Runs that are small enough to be killed many times: 12 images of digits, 3 steps an epoch."""

import dataclasses
import functools
import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gdeq.lab import data as datasets
from gdeq.lab.training import checkpoint, folder, loop, process, progress, runs
from gdeq.lab.training import config as configs

HERE = Path(__file__).parent
IMAGES, TEST_IMAGES, BATCH = 12, 21, 4
PER_EPOCH = IMAGES // BATCH

TINY = [
    *["epochs=2", "batch_size=4", "solver.max_iter=3", "log_every=1", "checkpoint_seconds=0"],
    *["snapshots=[1]", "device=cpu"],
    # The rest as if there were no preset, whose recipe may change.
    *["label_smoothing=0", "solver.tol=1e-3", "gradient.tol=1e-6", "augment.crop=0"],
    *["optimizer.lr=1e-3", "optimizer.weight_decay=0", "optimizer.schedule=cosine"],
    *["optimizer.warmup=0", "optimizer.clip=null"],
]
# Everything that has a state: dropout masks, averaged weights, two phases, moved and mixed images.
RICH = [*TINY, "model.dropout=0.2", "ema=0.9", "pretrain_steps=2", "augment.crop=1"]
RICH += ["residual_weight=0.1", "residual_every=3", "optimizer.clip=1", "label_smoothing=0.1"]
RICH += ["augment.flip=true", "augment.alternate=true", "augment.cutmix=0.7"]

whole = datasets.load


def few(name, root=None, device="cpu"):
    """In place of `gdeq.lab.data.load`."""
    return few_digits() if name == "digits" else whole(name, root, device)


@functools.cache  # importing scikit-learn takes longer than training
def few_digits():
    found = whole("digits")
    return dataclasses.replace(
        found,
        train_x=found.train_x[:IMAGES],
        train_y=found.train_y[:IMAGES],
        test_x=found.test_x[:TEST_IMAGES],
        test_y=found.test_y[:TEST_IMAGES],
    )


def begun(path, *settings):
    """A run folder of digits in which nothing was trained yet."""
    return folder.RunFolder(path).create(configs.load("digits", settings)).path


def metrics(run, timing=False):
    """The records, without what the clock says."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if timing or k not in ("ms", "seconds")} for r in records]


def assert_same_run(run, reference):
    assert metrics(run) == metrics(reference)
    for name in ("weights.safetensors", "snapshots/epoch-001.safetensors"):
        found, expected = (checkpoint.read_tensors(place / name)[0] for place in (run, reference))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found), name


def assert_resumed(path, settings, stop, reference):
    """A run of digits that is killed after this step, and gone on with, is the same to the bit."""

    class Stopping(progress.Silent):
        def step(self, done, figures):
            if done == stop:
                raise KeyboardInterrupt

    run = folder.RunFolder(path).create(configs.load("digits", settings))
    alone = process.Process(torch.device("cpu"))
    with pytest.raises(KeyboardInterrupt):
        loop.Trainer(run.config(), run, alone, Stopping(), None).fit()
    assert checkpoints(path)
    runs.resume(path)
    assert_same_run(path, reference)


def checkpoints(run):
    return sorted((run / "checkpoints").glob("*.ckpt"))


def steps_seen(run):
    """Lines of metrics so far: how a run is watched from outside."""
    try:
        return (run / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def wait_until(true, child, seconds=120):
    """Until it is true or the child has ended; says which."""
    end = time.monotonic() + seconds
    while not true():
        if not child.alive():
            return False
        assert time.monotonic() < end, "no progress"
        time.sleep(0.002)
    return True


class Zygote:
    """A process with everything imported that forks itself for each command: `gdeq` in 0.1 s."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
        )

    def start(self, log, *args, **environment):
        return Child(self, log, [str(a) for a in args], environment)

    def run(self, log, *args, **environment):
        child = self.start(log, *args, **environment)
        code = child.wait()
        return code, log.read_text()

    def ok(self, log, *args, **environment):
        """What a command said that came to its end."""
        code, said = self.run(log, *args, **environment)
        assert code == 0, said
        return said

    def ask(self, **request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


class Child:
    def __init__(self, zygote, log, args, environment):
        self.zygote, self.code = zygote, None
        self.pid = zygote.ask(args=args, log=str(log), environment=environment)["pid"]

    def alive(self):
        if self.code is None:
            self.code = self.zygote.ask(poll=self.pid)["code"]
        return self.code is None

    def kill(self, number):
        if self.alive():
            os.kill(self.pid, number)

    def wait(self, seconds=120):
        """The exit code; minus the signal if one ended it."""
        end = time.monotonic() + seconds
        while self.alive():
            assert time.monotonic() < end, "it does not end"
            time.sleep(0.01)
        return self.code


def free(port):
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) != 0


def start_all(zygote, folder, count, *args):
    """The command in so many processes, as `torchrun` would start them."""
    # Below the ports that the system gives away, or a connection of somebody else takes it first.
    port = next(
        port for port in random.SystemRandom().sample(range(20_000, 30_000), 99) if free(port)
    )
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    return [
        zygote.start(folder / f"log{r}", *args, **shared, RANK=str(r), LOCAL_RANK=str(r))
        for r in range(count)
    ]


def run_all(zygote, folder, count, *args):
    """All of them to their end; what the first one said."""
    children = start_all(zygote, folder, count, *args)
    assert [child.wait() for child in children] == [0] * count, (folder / "log0").read_text()
    return (folder / "log0").read_text()
