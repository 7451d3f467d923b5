"""The fused cell is the plain cell: values, gradients, dropout, weights held during a solve."""

import copy
from dataclasses import replace

import pytest
import torch
from mdeq_cases import FEW, LITTLE, cells, close

from gdeq import DEQ, GDEQ, Broyden, hold
from gdeq.fast.kernels.norms.slices import _Home
from gdeq.fast.mdeq import cell as cell_file
from gdeq.fast.mdeq import convolution, run
from gdeq.fast.mdeq import weights as weights_file
from gdeq.fast.mdeq.run import CellMap
from gdeq.fast.mdeq.weights import Prepared, prepare
from gdeq.fast.streams import Serial
from gdeq.models.mdeq import named
from gdeq.regularize import jacobian_penalty


def outcome(cell, z, injection, directions):
    """f and its gradients of z, the injection and all parameters, in train mode after an
    evaluation without autograd in the same solve."""
    z = tuple(part.detach().requires_grad_() for part in z)
    injection = injection.detach().requires_grad_()
    torch.manual_seed(1)
    with hold(cell):
        with torch.no_grad():
            first = cell(z, injection)
        out = cell(z, injection)
    values = [part.detach() for part in out]
    close(first, values)
    leaves = [*z, injection, *cell.parameters()]
    return [*values, *torch.autograd.grad(out, leaves, directions)]


def names(cell, z):
    parts = [f"{of}[{i}]" for of in ("f", "z") for i in range(len(z))]
    return [*parts, "injection", *(name for name, _ in cell.named_parameters())]


def in_turn(monkeypatch):
    """No streams."""
    for file in (cell_file, weights_file):
        monkeypatch.setattr(file, "side_by_side", lambda *_: Serial())


# ---- the same function


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (FEW, (8, 8)),
        (replace(FEW, blocks=1), (7, 5)),
        (replace(FEW, groups=1, blocks=1), (1, 3)),
        (replace(LITTLE, weight_norm=False, post_affine=True), (5, 6)),
        (replace(FEW, channels=(4,), head_channels=(2,)), (3, 3)),
        (
            replace(FEW, channels=(4, 2, 4, 2, 4), head_channels=(1,) * 5, blocks=1, groups=1),
            (17, 18),
        ),
        (named("small"), (5, 4)),
        (named("tiny"), (3, 4)),
    ],
    ids=["even", "odd", "thin", "bare", "one scale", "five scales", "small", "tiny"],
)
def test_values_and_gradients(config, size, device, monkeypatch):
    plain, fused, z, injection = cells(config, size, device)
    directions = [torch.randn_like(part) for part in z]
    found = outcome(fused, z, injection, directions)
    expected = outcome(plain, z, injection, directions)
    corners, relu = [], torch.relu
    monkeypatch.setattr(torch, "relu", lambda x: corners.append(x.detach().abs().min()) or relu(x))
    wide = [part.double() for part in (*z, injection, *directions)]
    count = len(z)
    exact = outcome(plain.double(), tuple(wide[:count]), wide[count], wide[count + 1 :])
    assert min(corners) > 3e-6  # else a rounding may open a ReLU in one form and not in the other
    # Norms of few numbers make much of a rounding: in both forms.
    for name, a, b, truth in zip(names(fused, z), found, expected, exact, strict=True):
        allowed = 1e-5 * (truth.norm() + 1e-6) + 10 * (b - truth).norm()
        assert (a - truth).norm() <= allowed, name


@pytest.mark.parametrize("streams", [False, True])
def test_many_small_cells_on_a_gpu(streams, gpu, monkeypatch):
    """Groups that are smaller than a tile, of which kernels have been wrong there alone."""
    if not streams:
        in_turn(monkeypatch)
    wrong = []
    for seed in range(30):
        torch.manual_seed(seed)
        plain, fused, z, injection = cells(FEW, (8, 8), gpu)
        directions = [torch.randn_like(part) for part in z]
        expected = outcome(plain, z, injection, directions)
        found = outcome(fused, z, injection, directions)
        for name, a, b in zip(names(fused, z), found, expected, strict=True):
            if (a - b).norm() > 1e-3 * (b.norm() + 1e-6):
                wrong.append((seed, name))
    assert len({seed for seed, _ in wrong}) <= 1, wrong  # one may stand on the corner of a ReLU


def test_large(gpu):
    plain, fused, z, injection = cells(named("large"), (4, 4), gpu, batch=1)
    directions = [torch.randn_like(part) for part in z]
    close(outcome(fused, z, injection, directions), outcome(plain, z, injection, directions))


def test_second_derivatives(device):
    *both, z, injection = cells(LITTLE, (4, 3), device)
    found = []
    for cell in both:
        torch.manual_seed(3)
        with hold(cell):
            penalty = jacobian_penalty(lambda z, f=cell: f(z, injection), z)
        found.append(
            [penalty, *torch.autograd.grad(penalty, list(cell.parameters()), allow_unused=True)]
        )
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            close([b], [a], tolerance=1e-4)


# ---- dropout


def test_dropout_outside_a_solve_draws_the_same(device):
    *both, z, injection = cells(replace(LITTLE, dropout=0.3), (4, 4), device)
    results = []
    for cell in both:
        torch.manual_seed(5)
        with torch.no_grad():
            results.append([cell(z, injection), cell(z, injection), cell.eval()(z, injection)])
    for expected, found in zip(*results, strict=True):
        close(found, expected)
    assert not torch.equal(results[1][0][0], results[1][1][0])


def test_dropout_in_a_solve(device):
    """One mask, that of the modules; another batch is refused, other modes are seen."""
    _, fused, z, injection = cells(replace(LITTLE, dropout=0.3), (4, 4), device)
    with torch.no_grad(), hold(fused):
        first = fused(z, injection)
        close(fused(z, injection), first, 0.0)
        drop = fused.scales[0].blocks[0].dropout
        ones = injection.new_ones(2, 4, 1, 1)
        assert torch.equal(drop(ones).flatten(1), Prepared(fused).masks(injection)[drop])
        with pytest.raises(RuntimeError, match="in one solve"):
            fused(tuple(part[:1] for part in z), injection[:1])
        fused.eval()
        without = fused(z, injection)
        assert not torch.equal(without[0], first[0])
        fused.train()
        drop.p = 0.0
        assert not torch.equal(fused(z, injection)[0], first[0])


# ---- less work


def aside_on_all_devices(x, weight, stride=1, padding=0, pairs=None):
    if not torch.is_grad_enabled():
        return convolution.convolution(x, weight, stride, padding, pairs)
    return convolution.apart(x, weight, stride, padding, None, pairs)


def test_what_nobody_asks_for_is_not_computed(device, monkeypatch):
    _, fused, _, injection = cells(replace(LITTLE, blocks=2), (4, 4), device)
    injection = injection.requires_grad_() * 1.0
    computed, real = [], convolution._backward
    monkeypatch.setattr(convolution, "_backward", lambda *a: computed.append(a[-1]) or real(*a))
    monkeypatch.setattr(cell_file, "convolution", aside_on_all_devices)
    deq = DEQ(fused, Broyden(max_iter=3, tol=0.0), GDEQ(refine=1))
    results, products = [], []
    for inputs in (None, list(fused.parameters())):
        fused.zero_grad()
        computed.clear()
        sum(part.square().sum() for part in deq(injection)).backward(inputs=inputs)
        results.append([parameter.grad for parameter in fused.parameters()])
        products.append(computed.count(0))
        assert (deq.solution.backward.residual is None) == (inputs is not None)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert products[0] - products[1] == 2  # the first convolution of each scale


def test_a_solve_with_pairs_of_places_finds_the_same(device, monkeypatch):
    """In the solve, in the evaluation that is differentiated, and in its gradients."""
    _, fused, z, injection = cells(replace(FEW, dropout=0.0), (8, 8), device)
    paired, real = [], convolution.in_pairs
    monkeypatch.setattr(convolution, "in_pairs", lambda *args: paired.append(args) or real(*args))
    monkeypatch.setattr(cell_file, "convolution", aside_on_all_devices)
    directions = [torch.randn_like(part) for part in z]
    results = []
    for most in (0, 4):
        monkeypatch.setattr(weights_file, "pays", lambda weight, outputs, _, n=most: outputs <= n)
        paired.clear()
        results.append(outcome(fused, z, injection, directions))
        # Two scales of 4 channels, two blocks each: f without and with autograd, and back.
        assert len(paired) == 3 * most
    close(results[1], results[0], tolerance=1e-5)


def test_gradients_between_scales_are_not_copied(device, monkeypatch):
    """Of z, several times, as a refinement asks for them: each is written where it belongs."""
    _, cell, z, injection = cells(replace(FEW, dropout=0.0), (8, 8), device)
    cell.requires_grad_(False)
    z = tuple(part.requires_grad_() for part in z)
    whole, real = [], _Home.holds
    monkeypatch.setattr(_Home, "holds", lambda *args: whole.append(real(*args)) or whole[-1])
    out = cell(z, injection)
    directions = [part.detach().cos() for part in out]
    found = []
    for _ in range(2):
        whole.clear()
        one = torch.autograd.grad(out, z, directions, retain_graph=True)
        # One level on the way down from scale 0, and what goes up from scale 2.
        assert whole == [True, True]
        found.append([part.clone() for part in one])
    close(found[1], found[0], 0.0)


# ---- half precision


def test_autocast_is_as_exact_as_the_plain_cell(device):
    plain, fused, z, injection = cells(LITTLE, (8, 8), device)
    half = tuple(part.bfloat16() for part in z)
    errors = []
    with torch.no_grad():
        exact = plain(z, injection)
        for cell, given in ((plain, z), (fused, z), (fused, half)):
            with torch.autocast(device.type, torch.bfloat16):
                out = cell(given, injection)
            if cell is fused:
                assert [part.dtype for part in out] == [part.dtype for part in given]
            errors.append(max((a - b).norm() / b.norm() for a, b in zip(out, exact, strict=True)))
    assert 1e-4 < errors[0] < 0.05
    assert max(errors[1:]) < 2 * errors[0]
    z = tuple(part.requires_grad_() for part in z)
    with torch.autocast(device.type, torch.bfloat16):
        loss = sum(part.sin().sum() for part in fused(z, injection))
    found = torch.autograd.grad(loss, [*z, *fused.parameters()])
    assert all(g.dtype == torch.float32 and bool(g.isfinite().all()) for g in found)


# ---- what is kept during a solve


def test_weights_are_prepared_once_for_each_solve(device, monkeypatch):
    _, fused, z, injection = cells(LITTLE, (4, 4), device)
    calls = []
    monkeypatch.setattr(weights_file, "prepare", lambda *args: calls.append(args) or prepare(*args))
    with torch.no_grad():
        with hold(fused):
            first = fused(z, injection)
            fused(z, injection)
        assert len(calls) == 1
        for parameter in fused.parameters():
            parameter.mul_(1.5)
        with hold(fused):
            assert not torch.equal(fused(z, injection)[0], first[0])
            assert not torch.equal(fused(z, injection + 1)[0], first[0])
            twin = copy.deepcopy(fused)
        assert len(calls) == 2
        for _ in range(2):
            fused(z, injection)
            twin(z, injection)  # in no solve
        assert len(calls) == 6


def test_gradients_in_a_solve_that_was_opened_without(device):
    *both, z, injection = cells(replace(LITTLE, weight_norm=False), (4, 4), device)
    found = []
    for cell in both:
        with torch.no_grad(), hold(cell):
            cell(z, injection)
            with torch.enable_grad():
                out = cell(z, injection)
        loss = sum(part.sin().sum() for part in out)
        found.append(torch.autograd.grad(loss, list(cell.parameters())))
    close(found[1], found[0], tolerance=1e-4)


# ---- at zero, where a solve begins


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (FEW, (8, 8)),
        (replace(FEW, blocks=1), (7, 5)),
        (replace(FEW, groups=1), (1, 3)),
        (replace(LITTLE, weight_norm=False, post_affine=True), (2, 6)),
        (replace(FEW, channels=(4,), head_channels=(2,)), (3, 1)),
        (replace(LITTLE, channels=(8, 16), groups=2, expansion=5), (4, 4)),
    ],
    ids=["even", "odd", "thin", "bare", "one scale", "whole pairs"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_first_evaluation(config, size, dtype, batch, device):
    plain, cell, z, injection = cells(config, size, device, batch)
    z0 = cell_file.zeros([tuple(part.shape) for part in z], like=injection.to(dtype))
    with torch.no_grad(), hold(cell), hold(plain):
        f = CellMap(Prepared(cell), dtype, injection)
        torch.manual_seed(1)
        found, expected = f.at_zero(z0), f(z0)
        torch.manual_seed(1)
        exact = plain(tuple(part.float() for part in z0), injection)
    half = dtype == torch.bfloat16
    # Where a norm has few numbers that are nearly equal, half precision is far off in both.
    close(found, expected, 3e-2 if half else 1e-5)
    for a, b, truth in zip(found, expected, exact, strict=True):
        assert a.dtype == dtype
        assert (a - truth).norm() <= 2 * (b - truth).norm() + 1e-3 * truth.norm()


# ---- where it lies, and when it is used


@pytest.mark.parametrize("made", ["result", "start"])
def test_a_state_lies_in_one_piece(made, device):
    _, fused, z, injection = cells(LITTLE, (4, 3), device)
    if made == "result":
        with torch.no_grad():
            parts = fused(z, injection)
    else:
        parts = cell_file.zeros([tuple(part.shape) for part in z], like=injection)
        assert not any(part.any() for part in parts)
    assert all(part.is_contiguous(memory_format=torch.channels_last) for part in parts)
    assert [part.shape for part in parts] == [part.shape for part in z]
    assert parts[1].data_ptr() == parts[0].data_ptr() + 4 * parts[0].numel()
    assert parts[0].untyped_storage().data_ptr() == parts[1].untyped_storage().data_ptr()
    parts[0].add_(1)  # as tensors of their own
    assert parts[1]._version == 0


@pytest.mark.parametrize(
    ("fused", "half", "dtype", "used"),
    [
        ("auto", False, torch.float32, "no"),  # no faster
        ("auto", True, torch.float32, "on a GPU"),
        (True, False, torch.float32, "yes"),
        (True, False, torch.float64, "no"),
        (False, True, torch.float32, "no"),
    ],
)
def test_when_it_is_used(fused, half, dtype, used, device, monkeypatch):
    _, cell, z, injection = cells(LITTLE, (4, 4), device)
    cell.config = replace(cell.config, fused=fused)
    calls, real = [], run.evaluate
    monkeypatch.setattr(run, "evaluate", lambda *args: calls.append(args) or real(*args))
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=half):
        cell.to(dtype)(tuple(part.to(dtype) for part in z), injection.to(dtype))
    assert bool(calls) == (used == "yes" or (used == "on a GPU" and device.type == "cuda"))


def test_a_state_of_other_scales_is_the_plain_cell_s_error(device):
    _, cell, z, injection = cells(LITTLE, (4, 4), device)
    with pytest.raises(ValueError, match=r"zip\(\)"):
        cell(z[:1], injection)


# ---- streams and graphs


def test_streams_and_graphs_change_nothing(gpu, monkeypatch):
    _, fused, z, injection = cells(replace(named("large"), dropout=0.3), (32, 32), gpu, 16)
    with torch.no_grad(), hold(fused), torch.autocast("cuda", torch.bfloat16):
        with monkeypatch.context() as changed:
            in_turn(changed)
            expected = [part.clone() for part in fused(z, injection)]
        for _ in range(20):
            found = fused(z, injection)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(4):
                found = fused(z, injection)
        for part in found:
            part.zero_()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("captured", [False, True])
def test_streams_and_graphs_change_no_gradient(captured, gpu, monkeypatch):
    """Memory of one stream that another still reads would show after some repetitions."""
    _, fused, z, injection = cells(replace(named("large"), dropout=0.0), (32, 32), gpu, 16)
    z = tuple(part.requires_grad_() for part in z)
    injection.requires_grad_()
    directions = [torch.randn_like(part) for part in z]
    leaves = [*z, injection, *fused.parameters()]

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            out = fused(z, injection)
        return torch.autograd.grad(out, leaves, directions)

    def recorded():
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            step()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            found = step()
        return graph, found

    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    with monkeypatch.context() as changed:
        in_turn(changed)
        expected = step()
    graph, found = recorded() if captured else (None, ())
    for _ in range(10):
        if graph is None:
            found = step()
        else:
            for part in found:
                part.zero_()
            graph.replay()
        torch.cuda.synchronize()
        for a, b in zip(found, expected, strict=True):
            assert (a - b).norm() <= 1e-3 * b.norm()
