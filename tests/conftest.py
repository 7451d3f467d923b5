import gc
import os
import sys
from pathlib import Path

# Test files are imported by path, so that folders may hold files of one name, as in the source;
# what tests share is imported by name from wherever it lies.
sys.path += sorted({str(path.parent) for path in Path(__file__).parent.rglob("*.py")})

# Some virtual machines announce AMX and then refuse it: PyTorch's bf16 layers die there with an
# illegal instruction.  Must be set before torch is loaded.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

# Where there is no GPU, Triton's kernels run in its interpreter.  Before Triton is loaded.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import settings

from interpreter import make_quicker

make_quicker()

settings.register_profile("gdeq", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("gdeq")


def pytest_collection_modifyitems(items):
    """Marks what runs on a GPU, so that ``pytest -m gpu`` runs just that.

    Tests of `gdeq.fast` without a ``device`` run on the GPU where there is one.
    """
    there = torch.cuda.is_available()
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        default = "cuda" if there and "fast" in item.path.parts else "cpu"
        if given.get("device", default) == "cuda":
            item.add_marker(pytest.mark.gpu)


def pytest_collection_finish():
    """What is loaded by now stays: no collection of garbage looks through it again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # else extensions complain at the end that it is still there


DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.fixture(params=DEVICES)
def device(request):
    """Each test that takes it also runs on the GPU where there is one."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the tests run in two processes on two cores
    torch.backends.cudnn.allow_tf32 = False  # what is compared here is not rounded so
