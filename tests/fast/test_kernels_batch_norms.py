"""The kernels of batch normalisation, against PyTorch in double precision."""

import copy
import os
from dataclasses import replace

import torch

if not torch.cuda.is_available():  # before Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from torch import nn

from gdeq.fast.kernels import available
from gdeq.fast.kernels.norms import BatchSource, Running, batch, batch_norms, batch_norms_plain
from gdeq.models import layers

# batch, channels, height, width
SHAPES = [
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


@pytest.fixture(autouse=True)
def kernels_run(device):
    if not available(device):
        pytest.skip("Triton does not run here")


@pytest.fixture(params=[MANY, FEW], ids=["many programs", "few programs"])
def programs(request, monkeypatch):
    for name, tuning in batch.TUNING.items():
        monkeypatch.setitem(batch.TUNING, name, replace(tuning, programs=request.param))


@pytest.fixture
def as_kernels(monkeypatch):
    monkeypatch.setattr(layers, "runs_as_kernels", lambda x, dtype=None: True)


def channels_last(*shape, device, offset=0.0):
    x = torch.randn(*shape, device=device) + offset
    return x.to(memory_format=torch.channels_last)


def affine(channels, device):
    return 1 + 0.3 * torch.randn(channels, device=device), torch.randn(channels, device=device)


def exact(sources, relu):
    """By nn.BatchNorm2d in double precision."""
    total = 0
    for source in sources:
        norm = nn.BatchNorm2d(source.x.shape[1], source.eps, affine=False).double()
        y = norm.to(source.x.device)(source.x.double())
        if source.weight is not None:
            y = y * source.weight.double()[:, None, None] + source.bias.double()[:, None, None]
        total = total + y
    return total.relu() if relu else total


def close(found, expected, tolerance=1e-5):
    error = (found.double() - expected.double()).abs().max()
    assert error <= tolerance * (1 + expected.abs().max()), f"off by {error:.1e}"


def sources_of(shape, count, device):
    made = []
    for j in range(count):
        x = channels_last(*shape, device=device, offset=2.0 - 3 * j)
        made.append(BatchSource(x, *(affine(shape[1], device) if j == 0 else (None, None))))
    return made


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
    for function in (batch_norms, batch_norms_plain):
        y = function(sources, relu)
        close(y.detach(), expected.detach())
        assert y.dtype == torch.float32
        assert y.permute(0, 2, 3, 1).is_contiguous()
        for a, b in zip(torch.autograd.grad(y, inputs, direction), gradients, strict=True):
            close(a, b, 1e-4)


def test_which_shapes_have_several_tiles():
    """So that nothing is left out of `PROGRAMMED`."""
    for kernel, sources in batch.TUNING:
        plans = {shape: batch._plan(torch.empty(shape), kernel, sources) for shape in SHAPES}
        assert [shape for shape, plan in plans.items() if plan.tiles > 1] == SHAPES[1:3]


@pytest.mark.parametrize(
    ("track", "scaled"),
    [("momentum", True), ("momentum", False), ("mean of all", True), ("no statistics", False)],
)
def test_the_layer_is_batch_norm_over_several_steps(track, scaled, as_kernels, device):
    plain = nn.BatchNorm2d(
        14,
        affine=scaled,
        momentum=None if track == "mean of all" else 0.3,
        track_running_stats=track != "no statistics",
    )
    layer = layers.BatchNorm2d(
        14, affine=scaled, momentum=plain.momentum, track_running_stats=plain.track_running_stats
    )
    if scaled:
        with torch.no_grad():
            plain.weight.copy_(affine(14, "cpu")[0])
            plain.bias.copy_(affine(14, "cpu")[1])
    layer.load_state_dict(plain.state_dict())
    plain, layer = plain.double().to(device), layer.to(device)
    for step in range(3):
        x = channels_last(3, 14, 4, 5, device=device, offset=float(step)).requires_grad_()
        wide = x.detach().double().requires_grad_()
        y, expected = layer(x, relu=True), plain(wide).relu()
        close(y.detach(), expected.detach())
        direction = torch.randn_like(y)
        y.backward(direction)
        expected.backward(direction.double())
        close(x.grad, wide.grad, 1e-4)
        state = layer.state_dict()
        assert list(state) == list(plain.state_dict())
        for name, value in plain.state_dict().items():
            assert state[name].dtype == (torch.int64 if "batches" in name else torch.float32)
            close(state[name], value)
        for a, b in zip(layer.parameters(), plain.parameters(), strict=True):
            close(a.grad, b.grad, 1e-4)
    layer.eval()
    plain.eval()
    close(layer(x, relu=True).detach(), plain(wide).relu().detach())
    if track != "no statistics":
        assert layer.num_batches_tracked == 3  # not moved by that


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


def test_a_norm_without_its_count(device):
    """Running statistics stay where they are, as PyTorch has it."""
    x = channels_last(2, 6, 4, 4, device=device)
    for momentum in (None, 0.5):
        both = []
        for function in (batch_norms, batch_norms_plain):
            running = Running(torch.zeros(6).to(device), torch.ones(6).to(device), None, momentum)
            function([BatchSource(x, None, None, running)])
            both.append(torch.stack([running.mean, running.var]))
        close(*both)
        assert bool((both[0][1] == 1).all()) is (momentum is None)


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
    # In float32, the mean of equal numbers is one of its neighbours.
    close(y[:, 3:5], bias[3:5, None, None].expand(2, 2, 16, 16), 1e-2)
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


def test_one_number_has_no_variance(as_kernels, device):
    norm = layers.BatchNorm2d(4).to(device)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm(torch.randn(1, 4, 1, 1, device=device))


@pytest.mark.parametrize("own", [4, 16])
def test_other_channels_are_pytorch_s_error(own, as_kernels, device):
    norm = layers.BatchNorm2d(own).to(device)
    with pytest.raises(RuntimeError, match="running_mean"):
        norm(channels_last(2, 8, 4, 4, device=device))
    weight, bias = affine(own, device)
    with pytest.raises(RuntimeError, match="weight"):
        batch_norms([BatchSource(channels_last(2, 8, 4, 4, device=device), weight, bias)])


def test_frozen_statistics_do_not_move(as_kernels, device):
    norm = layers.BatchNorm2d(8).to(device)
    norm.track_running_stats = False
    norm(channels_last(2, 8, 4, 4, device=device, offset=5.0))
    assert bool((norm.running_mean == 0).all())
    assert bool((norm.running_var == 1).all())
    assert norm.num_batches_tracked == 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter
def test_huge_means(device):
    x = channels_last(2, 16, 16, 16, device=device) * 1e15
    x[0] += 3e19
    assert bool(batch_norms([BatchSource(x, None, None)]).isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype, device):
    one, two = sources_of((2, 28, 8, 8), 2, device)
    sources = [replace(one, x=one.x.to(dtype)), replace(two, x=two.x.to(dtype))]
    y = batch_norms(sources, relu=True)
    assert y.dtype == dtype
    # Triton's interpreter cuts bfloat16 off where a GPU rounds.
    exact_y = exact(sources, True)
    close(y, exact_y, tolerance=torch.finfo(dtype).eps / (2 if y.is_cuda else 1))
    close(batch_norms(sources, relu=True, dtype=torch.float32), exact_y)
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
    results = []
    for function in (batch_norms, batch_norms_plain):
        y = function(sources, True)
        (first,) = torch.autograd.grad(y, x, torch.randn(y.shape, generator=seeded(device),
                                       device=device), create_graph=True)  # fmt: skip
        results.append([first, *torch.autograd.grad(first.square().sum(), x)])
    for a, b in zip(*results, strict=True):
        close(a, b, 1e-4)


def seeded(device):
    return torch.Generator(device).manual_seed(1)


def test_the_same_bits_each_time(programs, device):
    sources = sources_of((9, 16, 8, 7), 2, device)
    inputs = [t.requires_grad_() for s in sources for t in (s.x, s.weight, s.bias) if t is not None]

    def outcome():
        y = batch_norms(sources, True)
        return [y, *torch.autograd.grad(y, inputs, torch.ones_like(y))]

    for a, b in zip(outcome(), outcome(), strict=True):
        assert torch.equal(a, b)


def test_what_the_plain_function_takes(device):
    x = torch.randn(2, 6, 4, 4, dtype=torch.float64, device=device)  # double precision
    sources = [BatchSource(x, None, None)]
    assert batch_norms(sources).dtype == torch.float64
    close(batch_norms(sources), exact(sources, False), 1e-12)
    three = [BatchSource(x.float(), None, None)] * 3
    close(batch_norms(three), 3 * exact(sources, False))


# ---- in layers


def head_block(norm, shortcut=True):
    body = layers.Layers(layers.conv(6, 4, 1), norm(4), nn.ReLU(), layers.conv(4, 6, 3), norm(6))
    other = layers.Layers(layers.conv(6, 6, 1), norm(6)) if shortcut else nn.Identity()
    return nn.ModuleList([body, other])


@pytest.mark.parametrize("shortcut", [True, False])
@pytest.mark.parametrize("mode", ["train", "eval", "off"])
def test_the_end_of_a_block(shortcut, mode, as_kernels, device, monkeypatch):
    monkeypatch.setattr(batch, "enabled", mode != "off")
    calls = []
    watched = lambda *a, **k: calls.append(len(a[0])) or batch_norms(*a, **k)  # noqa: E731
    monkeypatch.setattr(layers, "batch_norms", watched)
    block = head_block(layers.BatchNorm2d, shortcut).to(device).train(mode != "eval")
    exact_block = copy.deepcopy(block).double()
    x = channels_last(3, 6, 5, 4, device=device)
    y = layers.Residual(*block)(x)
    assert calls == ([] if mode != "train" else [1, 2] if shortcut else [1, 1])
    monkeypatch.setattr(layers, "runs_as_kernels", lambda x, dtype=None: False)
    expected = layers.Residual(*exact_block)(x.double())
    close(y.detach(), expected.detach(), 1e-4)
    for a, b in zip(block.parameters(), exact_block.parameters(), strict=True):
        (found,) = torch.autograd.grad(y.square().sum(), a, retain_graph=True)
        (wanted,) = torch.autograd.grad(expected.square().sum(), b, retain_graph=True)
        close(found, wanted, 1e-3)
    for a, b in zip(block.buffers(), exact_block.buffers(), strict=True):
        close(a, b)


def test_norms_over_several_processes_are_left_alone(as_kernels):
    block = nn.SyncBatchNorm.convert_sync_batchnorm(head_block(layers.BatchNorm2d))
    assert not any(isinstance(module, layers.BatchNorm2d) for module in block.modules())
    assert sum(type(module) is nn.SyncBatchNorm for module in block.modules()) == 3
    called = []
    for module in block.modules():
        if isinstance(module, nn.SyncBatchNorm):
            module.forward = lambda x: called.append(1) or x
    layers.Residual(*block)(torch.randn(2, 6, 3, 3))
    assert len(called) == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_in_a_cuda_graph():
    device = torch.device("cuda")
    norm = layers.BatchNorm2d(14, momentum=None).to(device)
    twin = nn.BatchNorm2d(14, momentum=None).double().to(device)
    x = channels_last(8, 14, 16, 16, device=device).bfloat16().requires_grad_()
    run = lambda: torch.autograd.grad(norm(x, relu=True).float().sum(), x)  # noqa: E731
    with torch.autocast("cuda", torch.bfloat16):
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
    for a, b in zip(norm.buffers(), twin.buffers(), strict=True):
        close(a, b, 1e-4)
