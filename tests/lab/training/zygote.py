"""Forks a `gdeq` command for each line of stdin; see training_runs.Zygote."""

import json
import os
import sys
import traceback

import torch
import torch._dynamo  # by the first optimizer
import torch.utils.tensorboard
import training_runs

from gdeq.lab import bench, report
from gdeq.lab import data as datasets
from gdeq.lab.cli import app
from gdeq.lab.paper import collecting, running

# Each command imports what it needs, and would do it in every child.
LOADED = (bench, report, collecting, running)


def child(request):
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(log, number)
    os.close(0)
    os.environ.update(request["environment"])
    code = 70
    try:
        app(request["args"])
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def main():
    torch.set_num_threads(1)
    datasets.load = training_runs.few
    training_runs.few_digits()
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = {"code": os.waitstatus_to_exitcode(status) if pid else None}
        else:
            pid = os.fork()
            if pid == 0:
                child(request)
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)


main()
