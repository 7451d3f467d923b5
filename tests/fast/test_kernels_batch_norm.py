"""Batch normalisation in kernels, against PyTorch in double precision."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gdeq.fast.kernels.norms import (
    BatchSource,
    Running,
    batch_norm,
    batch_norms,
    batch_norms_plain,
)
from norm_cases import affine, channels_last, check_twice, close, rounding

pytestmark = pytest.mark.usefixtures("kernels_run")

SHAPES = [  # batch, channels, height, width
    (2, 14, 5, 3),  # columns of seven programs; fewer rows than a tile has
    (2, 16, 16, 16),  # whole tiles, several in turn where there are few programs
    (9, 16, 8, 7),  # the last tile is cut
    (3, 5, 1, 1),  # one pixel
    (2, 24, 8, 4),  # 192 columns, eight of each channel
    (2, 1, 9, 3),  # one channel
]
MANY, FEW = 1 << 10, 1  # programs
# The others are one tile: fewer programs than one there are not.
PROGRAMMED = [*((shape, MANY) for shape in SHAPES), *((shape, FEW) for shape in SHAPES[1:3])]


@pytest.fixture(params=[MANY, FEW], ids=["many programs", "few programs"])
def programs(request, monkeypatch):
    for name, tuning in batch_norm.TUNING.items():
        monkeypatch.setitem(batch_norm.TUNING, name, replace(tuning, programs=request.param))


def exact(sources, relu):
    """By nn.BatchNorm2d in double precision."""
    total = 0
    for source in sources:
        norm = nn.BatchNorm2d(source.x.shape[1], source.eps, affine=False).double()
        y = norm.to(source.x.device)(source.x.double())
        for vector, join in ((source.weight, torch.mul), (source.bias, torch.add)):
            y = y if vector is None else join(y, vector.double()[:, None, None])
        total = total + y
    return total.relu() if relu else total


def sources_of(shape, count, device):
    made = []
    for j in range(count):
        x = channels_last(*shape, device=device, offset=2.0 - 3 * j)
        made.append(BatchSource(x, *(affine(shape[1], device) if j == 0 else (None, None))))
    return made


def buffers(channels, device, batches=None, momentum=0.1):
    mean, var = torch.zeros(channels, device=device), torch.ones(channels, device=device)
    return Running(mean, var, batches, momentum)


@pytest.mark.parametrize(("shape", "programs"), PROGRAMMED, indirect=["programs"])
@pytest.mark.parametrize(("count", "relu"), [(1, False), (1, True), (2, True)])
def test_values_and_gradients(shape, count, relu, programs, device):
    sources = sources_of(shape, count, device)
    with torch.no_grad():
        close(batch_norms(sources, relu), exact(sources, relu))
    inputs = [t for s in sources for t in (s.x, s.weight, s.bias) if t is not None]
    for t in inputs:
        t.requires_grad_()
    direction = torch.randn(shape, device=device)
    expected = exact(sources, relu)
    gradients = torch.autograd.grad(expected, inputs, direction.double())
    results = []
    for function in (batch_norms, batch_norms, batch_norms_plain):
        y = function(sources, relu)
        close(y.detach(), expected.detach())
        assert y.dtype == torch.float32
        assert y.permute(0, 2, 3, 1).is_contiguous()
        results.append([y, *torch.autograd.grad(y, inputs, direction)])
        for a, b in zip(results[-1][1:], gradients, strict=True):
            close(a, b, 1e-4)
    assert all(map(torch.equal, *results[:2]))  # the same bits each time


def test_which_shapes_have_several_tiles():
    """So that nothing is left out of `PROGRAMMED`."""
    for kernel, sources in batch_norm.TUNING:
        plans = {shape: batch_norm._plan(torch.empty(shape), kernel, sources) for shape in SHAPES}
        assert [shape for shape, plan in plans.items() if plan.tiles > 1] == SHAPES[1:3]


@pytest.mark.parametrize(
    ("momentum", "counted", "scaled"),
    [(0.3, True, True), (0.3, True, False), (None, True, True), (None, False, False)],
)
@pytest.mark.parametrize("function", [batch_norms, batch_norms_plain])
def test_running_statistics_are_those_of_the_layer(function, momentum, counted, scaled, device):
    """Over several steps; without a count the mean of all batches stays where it is."""
    plain = nn.BatchNorm2d(14, affine=scaled, momentum=momentum).double().to(device)
    if not counted:
        plain.num_batches_tracked = None
    count = torch.tensor(0, device=device) if counted else None
    running = buffers(14, device, count, momentum)
    vectors = affine(14, device) if scaled else (None, None)
    if scaled:
        with torch.no_grad():
            plain.weight.copy_(vectors[0])
            plain.bias.copy_(vectors[1])
    for step in range(3):
        x = channels_last(3, 14, 4, 5, device=device, offset=float(step))
        close(function([BatchSource(x, *vectors, running)]), plain(x.double()).detach())
        close(running.mean, plain.running_mean)
        close(running.var, plain.running_var)
    assert count is None or count == 3
    if function is batch_norms and momentum is not None:  # autograd is told of it
        assert running.mean._version == running.var._version == 3


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("function", [batch_norms, batch_norms_plain])
def test_zeros_beside_the_channels_stay_zeros(function, momentum, programs, device):
    """Statistics of the first channels alone, and nothing written behind them."""
    narrow = channels_last(3, 14, 4, 5, device=device, offset=1.0)
    x = channels_last(3, 16, 4, 5, device=device)
    x[:, :14], x[:, 14:] = narrow, 0.0
    memory = torch.full((2, 16), 7.0, device=device)
    running = Running(memory[0, :14], memory[1, :14], torch.tensor(0, device=device), momentum)
    own = Running(*(torch.full((14,), 7.0, device=device) for _ in range(2)), None, momentum)
    if momentum is None:
        own = Running(own.mean, own.var, torch.tensor(0, device=device), None)
    direction = torch.randn_like(x)
    direction[:, 14:] = 0.0
    x.requires_grad_()
    narrow = narrow.detach().requires_grad_()
    y = function([BatchSource(x, None, None, running)], relu=True)
    expected = function([BatchSource(narrow, None, None, own)], relu=True)
    close(y[:, :14].detach(), expected.detach())
    assert not y[:, 14:].any()
    (found,) = torch.autograd.grad(y, x, direction)
    (wanted,) = torch.autograd.grad(expected, narrow, direction[:, :14])
    close(found[:, :14], wanted, 1e-4)
    assert not found[:, 14:].any()
    close(running.mean, own.mean)
    close(running.var, own.var)
    assert bool((memory[:, 14:] == 7).all())


@pytest.mark.parametrize("shape", [(2, 14, 9, 9), (2, 16, 16, 16)])
def test_variance_survives_a_large_mean(shape, programs, device):
    x = channels_last(*shape, device=device, offset=3000.0)
    sources = [BatchSource(x, None, None)]
    close(batch_norms(sources), exact(sources, False), tolerance=1e-3)


def test_a_constant_channel(programs, device):
    x = channels_last(2, 16, 16, 16, device=device)
    x[:, 3] = 7.1
    x[:, 4] = 0.0
    weight, bias = affine(16, device)
    x.requires_grad_()
    y = batch_norms([BatchSource(x, weight, bias)])
    assert torch.equal(y[:, 3:5], bias[3:5, None, None].expand(2, 2, 16, 16))
    (found,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert bool(found.isfinite().all())


def test_nan_stays_visible(programs, device):
    x = channels_last(2, 16, 16, 16, device=device)
    x[1, 2, 3, 4] = torch.nan
    x.requires_grad_()
    running = Running(torch.zeros(16).to(device), torch.ones(16).to(device), None, 0.1)
    y = batch_norms([BatchSource(x, None, None, running)], relu=True)
    (found,) = torch.autograd.grad(y, x, torch.ones_like(y))
    for values in (y.transpose(0, 1), found.transpose(0, 1)):
        hit = values.isnan().flatten(1).any(1)
        assert hit.nonzero().flatten().tolist() == [2]
        assert bool(values[2].isnan().all())
    for buffer in (running.mean, running.var):
        assert buffer.isnan().nonzero().flatten().tolist() == [2]


def test_pytorch_s_errors(device):
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        batch_norms([BatchSource(torch.randn(1, 4, 1, 1, device=device), None, None)])
    x = channels_last(2, 8, 4, 4, device=device)
    for own in (4, 16):
        with pytest.raises(RuntimeError, match="weight"):
            batch_norms([BatchSource(x, *affine(own, device))])
    with pytest.raises(RuntimeError, match="running_mean"):
        batch_norms([BatchSource(x, None, None, buffers(16, device))])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype, device):
    one, two = sources_of((2, 28, 8, 8), 2, device)
    sources = [replace(one, x=one.x.to(dtype)), replace(two, x=two.x.to(dtype))]
    y = batch_norms(sources, relu=True)
    assert y.dtype == dtype
    exact_y = exact(sources, True)
    close(y, exact_y, rounding(y))
    x = sources[0].x.requires_grad_()
    direction = torch.randn_like(exact_y).to(dtype)
    (found,) = torch.autograd.grad(batch_norms(sources, relu=True), x, direction)
    (expected,) = torch.autograd.grad(exact(sources, True), x, direction.double())
    assert found.dtype == dtype
    close(found, expected, tolerance=2 * torch.finfo(dtype).eps)


def test_layouts_that_are_copied_first(device):
    x = torch.randn(2, 6, 5, 4, device=device)
    slices = torch.randn(2, 20, 5, 4, device=device).to(memory_format=torch.channels_last)[:, 3:9]
    for y in (x, slices, x[:, :, :1, ::2]):
        source = BatchSource(y.requires_grad_() if y.is_leaf else y, *affine(6, device))
        close(batch_norms([source]).detach(), exact([source], False).detach())
    weight = torch.ones(6, device=device, requires_grad=True)
    y = batch_norms([BatchSource(slices, weight, None)])
    (spread,) = torch.autograd.grad(y.mean((2, 3)).square().sum(), weight)  # one for all pixels
    exact_y = nn.functional.batch_norm(slices.double(), None, None, weight.double(), None, True)
    (expected,) = torch.autograd.grad(exact_y.mean((2, 3)).square().sum(), weight)
    close(spread, expected, 1e-4)


@pytest.mark.parametrize("count", [1, 2])
def test_gradients_of_some_and_twice(count, device):
    sources = sources_of((2, 6, 4, 3), count, device)
    x = sources[-1].x.requires_grad_()
    both = [lambda f=f: f(sources, True) for f in (batch_norms, batch_norms_plain)]
    check_twice(both, [x], 1e-4)


def test_what_the_plain_function_takes(device):
    x = torch.randn(2, 6, 4, 4, dtype=torch.float64, device=device)  # double precision
    sources = [BatchSource(x, None, None)]
    assert batch_norms(sources).dtype == torch.float64
    close(batch_norms(sources), exact(sources, False), 1e-12)
    three = [BatchSource(x.float(), None, None)] * 3
    close(batch_norms(three), 3 * exact(sources, False))


def test_in_a_cuda_graph(gpu):
    running = buffers(14, gpu, torch.tensor(0, device=gpu))
    twin = nn.BatchNorm2d(14).double().to(gpu)
    x = channels_last(8, 14, 16, 16, device=gpu, dtype=torch.bfloat16).requires_grad_()

    def run():
        y = batch_norms([BatchSource(x, None, None, running)], relu=True)
        return torch.autograd.grad(y.float().sum(), x)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    twin(x.double())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for step in range(3):
        with torch.no_grad():
            x.copy_(torch.randn_like(x) + step)
        graph.replay()
        twin(x.double())
    for a, b in zip((running.mean, running.var, running.batches), twin.buffers(), strict=True):
        close(a, b, 1e-4)
