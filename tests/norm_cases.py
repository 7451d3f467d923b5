"""What the tests of the norms' kernels share: maps, vectors, and group norm in double precision."""

from dataclasses import replace

import torch
from torch.nn import functional

from gdeq.fast.kernels.norms import fusion, group_norm, residual

HALF = [torch.bfloat16, torch.float16]


def channels_last(*shape, device, offset=0.0, dtype=torch.float32, beside=0):
    """A map; beside: so many channels more in memory, half of them before it."""
    batch, channels, *size = shape
    whole = torch.randn(batch, *size, channels + beside, device=device) + offset
    return whole.to(dtype).permute(0, 3, 1, 2)[:, beside // 2 : beside // 2 + channels]


def affine(channels, device, batch=None, grad=False):
    """Scale and shift, for each sample its own where a batch is given."""
    shape = (channels,) if batch is None else (batch, channels)
    vectors = 1 + 0.3 * torch.randn(shape, device=device), torch.randn(shape, device=device)
    return tuple(vector.requires_grad_(grad) for vector in vectors)


def exact_norm(x, groups, weight=None, bias=None, relu=False):
    y = functional.group_norm(x.double().contiguous(), groups, None, None, 1e-5)
    for vector, join in ((weight, torch.mul), (bias, torch.add)):
        y = y if vector is None else join(y, vector.double()[..., None, None])
    return y.relu() if relu else y


def block_end_plain(y, mask, injection, z, *vectors_and_groups):
    """As `block_end`, by PyTorch."""
    *vectors, groups = vectors_and_groups
    return residual.BlockEnd(groups, 1e-5).plain((y, mask, injection, z), vectors, None, y.dtype)


def fuse_plain(own, sources, groups):
    """As `fuse`, by PyTorch."""
    maps = [own, *(source.raw for source in sources)]
    vectors = [vector for source in sources for vector in (source.weight, source.bias)]
    operation = fusion.Fuse(groups, 1e-5, tuple(source.levels for source in sources))
    return operation.plain(maps, vectors, None, next(x for x in maps if x is not None).dtype)


def error(found, expected):
    difference = (found.double() - expected.double()).abs().max()
    return (difference / (1 + expected.abs().max())).item()


def close(found, expected, tolerance=1e-5):
    off = error(found, expected)
    assert off <= tolerance, f"off by {off:.1e}"


def rounding(x):
    """Of a result in x's dtype, relative: Triton's interpreter cuts off where a GPU rounds."""
    eps = torch.finfo(x.dtype).eps
    return 1e-5 if x.dtype == torch.float32 else eps / 2 if x.is_cuda else eps


def clear(direction, exact):
    """The direction but for places where rounding may decide whether the ReLU passes."""
    kept = torch.where(exact.abs() > 0.05, direction, 0.0).to(direction.dtype)
    return kept.contiguous(memory_format=torch.channels_last)


def check(y, inputs, exact, direction, tolerance=1e-4):
    """A result and its gradients of the inputs against exact ones, which repeat bit for bit."""
    found = torch.autograd.grad(y, inputs, direction, retain_graph=True)
    again = torch.autograd.grad(y, inputs, direction, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    expected = torch.autograd.grad(exact, inputs, direction.double(), retain_graph=True)
    close(y, exact, max(1e-5, 2 * rounding(y)) if tolerance <= 1e-4 else tolerance)
    for a, b, leaf in zip(found, expected, inputs, strict=True):
        assert a.shape == leaf.shape
        assert a.dtype == leaf.dtype
        close(a, b, tolerance if a.dtype == torch.float32 else max(tolerance, 4 * rounding(a)))
    return found


def check_twice(functions, inputs, tolerance=1e-5):
    """Functions without arguments that are one in first and second derivatives."""
    results = []
    for function in functions:
        y = function()
        direction = torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y).to(y.dtype)
        first = torch.autograd.grad(y, inputs, direction, create_graph=True)
        total = sum(part.double().square().sum() for part in first)
        results.append([*first, *torch.autograd.grad(total, inputs)])
    for a, b in zip(*results, strict=True):
        close(a, b, tolerance)


def one_program_a_sample(monkeypatch):
    """All groups in one program, where that fits: the interpreter's time goes by programs."""
    for module in (group_norm, residual, fusion):
        for name, tuning in module.TUNING.items():
            monkeypatch.setitem(module.TUNING, name, replace(tuning, run_bytes=1 << 20))


class Launches(list):
    """The names of a module's kernels, as they are launched."""

    def __init__(self, monkeypatch, module, *names):
        for name in names:
            kernel = getattr(module, f"_{name}_kernel")
            monkeypatch.setattr(module, f"_{name}_kernel", _Watched(kernel, name, self))


class _Watched:
    def __init__(self, kernel, name, launches):
        self.kernel, self.name, self.launches = kernel, name, launches

    def __getitem__(self, grid):
        self.launches.append(self.name)
        return self.kernel[grid]
