"""The fused cell is the plain cell: values, gradients, dropout, weights held during a solve."""

import copy
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import torch

if not torch.cuda.is_available():  # before Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from gdeq import DEQ, GDEQ, JFB, Broyden, hold
from gdeq.fast.kernels import available, norms, weights
from gdeq.models import MDEQCell, MDEQConfig, convolution, mdeq_fused, mdeq_weights
from gdeq.models.mdeq_config import named
from gdeq.models.mdeq_fused import applies, as_buffer, fused_forward
from gdeq.models.mdeq_weights import Prepared, prepare
from gdeq.regularize import jacobian_penalty

FEW = MDEQConfig(
    channels=(4, 4, 6),
    blocks=2,
    expansion=3,
    groups=2,
    head_channels=(2, 2, 3),
    dropout=0.3,
)
LITTLE = replace(FEW, channels=(4, 6), head_channels=(1, 1), blocks=1, dropout=0.0)


class FusedCell(MDEQCell):
    def __init__(self, config):
        super().__init__(config)
        self.prepared = Prepared()

    def forward(self, z, injection):
        return fused_forward(self, z, injection)


@pytest.fixture(autouse=True)
def few_programs(device, monkeypatch):
    """All groups in one program: the interpreter's time goes by programs."""
    if not available(device):
        pytest.skip("Triton does not run here")
    if device.type == "cpu":
        for name, tuning in norms.TUNING.items():
            monkeypatch.setitem(norms.TUNING, name, replace(tuning, run_bytes=1 << 20))
        for name, together in weights.TUNING.items():
            monkeypatch.setitem(weights.TUNING, name, replace(together, rows=256))


def problem(config, size, device, batch=2):
    """A plain cell, a fused one with the same parameters, a state and an injection.

    The same numbers on every device.
    """
    plain = MDEQCell(config)
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    fused = FusedCell(config).to(device)
    fused.load_state_dict(plain.state_dict())
    injection = torch.randn(batch, config.channels[0], *size).relu()
    z = tuple(torch.randn_like(part).to(device) for part in plain.initial_state(injection))
    return plain.to(device), fused, z, injection.to(device)


def close(found, expected, tolerance=1e-5):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        error = (a.double() - b.double()).norm() / (b.double().norm() + 1e-6)
        assert error <= tolerance, f"off by {error:.1e}"


def outcome(cell, z, injection, directions, mode=True):
    """f and its gradients of z, the injection and all parameters, in train mode after an
    evaluation without autograd in the same solve."""
    z = tuple(part.detach().requires_grad_() for part in z)
    injection = injection.detach().requires_grad_()
    torch.manual_seed(1)
    cell.train(mode)
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
    plain, fused, z, injection = problem(config, size, device)
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
def test_many_small_cells_on_a_gpu(streams, device, monkeypatch):
    """All of them were wrong there in z[2] before `fusion_whole.LEAST`."""
    if device.type == "cpu":
        pytest.skip("right in the interpreter")
    monkeypatch.setattr(mdeq_fused, "streams_with_grad", streams)
    wrong = []
    for seed in range(30):
        torch.manual_seed(seed)
        plain, fused, z, injection = problem(FEW, (8, 8), device)
        directions = [torch.randn_like(part) for part in z]
        expected = outcome(plain, z, injection, directions)
        found = outcome(fused, z, injection, directions)
        for name, a, b in zip(names(fused, z), found, expected, strict=True):
            if (a - b).norm() > 1e-3 * (b.norm() + 1e-6):
                wrong.append((seed, name))
    assert len({seed for seed, _ in wrong}) <= 1, wrong  # one may stand on the corner of a ReLU


def test_large(device):
    plain, fused, z, injection = problem(named("large"), (4, 4), device, batch=1)
    directions = [torch.randn_like(part) for part in z]
    close(outcome(fused, z, injection, directions), outcome(plain, z, injection, directions))


def test_dropout_outside_a_solve_draws_the_same(device):
    plain, fused, z, injection = problem(replace(LITTLE, dropout=0.3), (4, 4), device)
    results = []
    for cell in (plain, fused):
        torch.manual_seed(5)
        with torch.no_grad():
            results.append([cell(z, injection), cell(z, injection)])
    for expected, found in zip(*results, strict=True):
        close(found, expected)
    assert not torch.equal(results[1][0][0], results[1][1][0])
    with torch.no_grad():
        close(fused.eval()(z, injection), plain.eval()(z, injection))


def test_dropout_refuses_another_batch_in_one_solve(device):
    _, fused, z, injection = problem(replace(LITTLE, dropout=0.3), (4, 4), device)
    with torch.no_grad(), hold(fused):
        fused(z, injection)
        with pytest.raises(RuntimeError, match="in one solve"):
            fused(tuple(part[:1] for part in z), injection[:1])


def test_second_derivatives(device):
    plain, fused, z, injection = problem(LITTLE, (4, 3), device)
    found = []
    for cell in (plain, fused):
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


def test_a_solve_finds_the_same(device):
    plain, fused, _, injection = problem(LITTLE, (4, 4), device)
    results = []
    for cell in (plain, fused):
        deq = DEQ(cell, Broyden(max_iter=6, tol=0.0), JFB())
        z = deq(injection)
        gradient = torch.autograd.grad(
            sum(part.square().sum() for part in z), list(cell.parameters())
        )
        results.append([*z, *gradient])
    close(results[1], results[0], tolerance=1e-3)


def aside_on_all_devices(x, weight, stride=1, padding=0, pairs=None):
    if not torch.is_grad_enabled():
        return convolution.convolution(x, weight, stride, padding, pairs)
    return convolution.apart(x, weight, stride, padding, None, pairs)


def test_what_nobody_asks_for_is_not_computed(device, monkeypatch):
    _, fused, _, injection = problem(replace(LITTLE, blocks=2), (4, 4), device)
    injection = injection.requires_grad_() * 1.0
    computed, ends = [], []
    real, end = convolution._backward, norms.residual.BlockEnd.launch_backward

    def counted(*args):
        computed.append(args[-1])
        return real(*args)

    def watched(self, maps, vectors, out, stats, dout, sums, wanted, others=()):
        _, _, injected, z = (bool(one) for one in wanted[:4])
        ends.append((injected, z))
        return end(self, maps, vectors, out, stats, dout, sums, wanted, others)

    monkeypatch.setattr(convolution, "_backward", counted)
    monkeypatch.setattr(norms.residual.BlockEnd, "launch_backward", watched)
    monkeypatch.setattr(mdeq_fused, "convolution", aside_on_all_devices)
    deq = DEQ(fused, Broyden(max_iter=3, tol=0.0), GDEQ(refine=1))
    results, products = [], []
    for inputs in (None, list(fused.parameters())):
        fused.zero_grad()
        computed.clear()
        ends.clear()
        sum(part.square().sum() for part in deq(injection)).backward(inputs=inputs)
        results.append([parameter.grad for parameter in fused.parameters()])
        products.append(computed.count(0))
        # Two scales of two blocks each, in the product with Jᵀ and then in the pass to all else.
        assert not any(injected for injected, _ in ends[:4])
        assert all(z for _, z in ends[:4])
        assert sum(injected for injected, _ in ends[4:]) == (inputs is None)
        assert sum(z for _, z in ends[4:]) == (4 if inputs is None else 2)
        assert (deq.solution.backward.residual is None) == (inputs is not None)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert products[0] - products[1] == 2  # the first convolution of each scale


def test_a_solve_with_pairs_of_places_finds_the_same(device, monkeypatch):
    """In the solve, in the evaluation that is differentiated, and in its gradients."""
    _, fused, z, injection = problem(replace(FEW, dropout=0.0), (8, 8), device)
    paired = []
    real = convolution.in_pairs

    def counted(*args):
        paired.append(args)
        return real(*args)

    monkeypatch.setattr(convolution, "in_pairs", counted)
    monkeypatch.setattr(mdeq_fused, "convolution", aside_on_all_devices)
    directions = [torch.randn_like(part) for part in z]
    results = []
    for most in (0, 4):
        monkeypatch.setattr(mdeq_weights, "pays", lambda weight, outputs, _, n=most: outputs <= n)
        paired.clear()
        results.append(outcome(fused, z, injection, directions))
        # Two scales of 4 channels, two blocks each: f without and with autograd, and back.
        assert len(paired) == 3 * most
    close(results[1], results[0], tolerance=1e-5)


# ---- half precision


def test_autocast_is_as_exact_as_the_plain_cell(device):
    plain, fused, z, injection = problem(LITTLE, (8, 8), device)
    errors = []
    with torch.no_grad():
        exact = plain(z, injection)
        for cell in (plain, fused):
            with torch.autocast(device.type, torch.bfloat16):
                out = cell(z, injection)
            if cell is fused:
                assert all(part.dtype == torch.float32 for part in out)
            errors.append(max((a - b).norm() / b.norm() for a, b in zip(out, exact, strict=True)))
        half = tuple(part.bfloat16() for part in z)
        with torch.autocast(device.type, torch.bfloat16):
            out = fused(half, injection)
        assert all(part.dtype == torch.bfloat16 for part in out)
        errors.append(max((a - b).norm() / b.norm() for a, b in zip(out, exact, strict=True)))
    assert 1e-4 < errors[0] < 0.05
    assert max(errors[1:]) < 2 * errors[0]


def test_gradients_in_half_precision_reach_all_parameters(device):
    _, fused, z, injection = problem(replace(LITTLE, dropout=0.3), (6, 5), device)
    z = tuple(part.requires_grad_() for part in z)
    with hold(fused), torch.autocast(device.type, torch.bfloat16):
        with torch.no_grad():
            fused(z, injection)
        out = fused(z, injection)
    found = torch.autograd.grad(sum(part.sin().sum() for part in out), [*z, *fused.parameters()])
    assert all(g.dtype == torch.float32 and bool(g.isfinite().all()) for g in found)


# ---- what is kept during a solve


def test_weights_are_prepared_once_for_each_solve(device, monkeypatch):
    _, fused, z, injection = problem(LITTLE, (4, 4), device)
    calls = []
    monkeypatch.setattr(mdeq_weights, "prepare", lambda *args: calls.append(args) or prepare(*args))
    with torch.no_grad():
        with hold(fused):
            first = fused(z, injection)
            fused(z, injection)
        assert len(calls) == 1
        for parameter in fused.parameters():
            parameter.mul_(1.5)
        with hold(fused):
            assert not torch.equal(fused(z, injection)[0], first[0])
        assert len(calls) == 2
        fused(z, injection)
        fused(z, injection)
        assert len(calls) == 4


def test_another_injection_is_seen(device):
    plain, fused, z, injection = problem(LITTLE, (4, 4), device)
    with torch.no_grad(), hold(fused):
        fused(z, injection)
        other = injection + 1
        close(fused(z, other), plain(z, other))
        other.mul_(2)
        close(fused(z, other), plain(z, other))
    with torch.inference_mode(), hold(fused):
        other = injection + 1
        fused(z, other)
        other.mul_(2)
        close(fused(z, other), plain(z, other))


def test_gradients_in_a_solve_that_was_opened_without(device):
    config = replace(LITTLE, weight_norm=False)
    plain, fused, z, injection = problem(config, (4, 4), device)
    found = []
    for cell in (plain, fused):
        with torch.no_grad(), hold(cell):
            cell(z, injection)
            with torch.enable_grad():
                out = cell(z, injection)
        loss = sum(part.sin().sum() for part in out)
        found.append(torch.autograd.grad(loss, list(cell.parameters())))
    close(found[1], found[0], tolerance=1e-4)


def test_copies_start_with_nothing_kept(device):
    _, fused, z, injection = problem(LITTLE, (4, 4), device)
    with torch.no_grad(), hold(fused):
        fused(z, injection)
        twin = copy.deepcopy(fused)
    assert twin.prepared._value is None


# ---- where the result lies


def test_the_result_is_one_buffer(device):
    _, fused, z, injection = problem(LITTLE, (4, 3), device)
    with torch.no_grad():
        parts = fused(z, injection)
        buffer = as_buffer(parts)
        assert buffer is not None
        expected = torch.cat([part.permute(0, 2, 3, 1).flatten() for part in parts])
        assert torch.equal(buffer, expected)
        given = torch.full((len(buffer) + 2,), 7.0, device=device)
        parts = fused_forward(fused, z, injection, out=given[1:-1])
        assert torch.equal(given[1:-1], buffer)
        assert given[0] == given[-1] == 7
        assert as_buffer(parts).data_ptr() == given[1:].data_ptr()
        assert as_buffer(z) is None
        assert as_buffer([parts[1], parts[0]]) is None
        close(fused(parts, injection), fused([part.contiguous() for part in parts], injection))


# ---- when it is used


def test_when_it_applies(device):
    cell, _, z, injection = problem(LITTLE, (4, 4), device)
    wide = tuple(part.double() for part in z)
    assert not applies(cell, z, injection)  # float32: no faster
    with torch.autocast(device.type, torch.bfloat16):
        assert applies(cell, z, injection) == (device.type == "cuda")
    cell.config = SimpleNamespace(fused=True)
    assert applies(cell, z, injection)
    assert not applies(cell, wide, injection)
    assert not applies(cell, z, injection.double())
    cell.config = SimpleNamespace(fused=False)
    with torch.autocast(device.type, torch.bfloat16):
        assert not applies(cell, z, injection)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_streams_and_graphs_change_nothing():
    device = torch.device("cuda")
    _, fused, z, injection = problem(replace(named("large"), dropout=0.3), (32, 32), device, 16)
    with torch.no_grad(), hold(fused), torch.autocast("cuda", torch.bfloat16):
        expected = [part.clone() for part in fused_forward(fused, z, injection, streams=False)]
        for _ in range(20):
            found = fused(z, injection)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = fused(z, injection)
            for _ in range(3):
                found = fused(z, injection)
        for part in found:
            part.zero_()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("captured", [False, True])
def test_streams_and_graphs_change_no_gradient(captured, monkeypatch):
    """Memory of one stream that another still reads would show after some repetitions."""
    device = torch.device("cuda")
    config = replace(named("large"), dropout=0.3)
    _, fused, z, injection = problem(config, (32, 32), device, 16)
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

    torch.backends.cudnn.deterministic = True
    try:
        for block in (b for scale in fused.scales for b in scale.blocks):
            block.dropout.p = 0.0  # the same function at each call
        monkeypatch.setattr(mdeq_fused, "streams_with_grad", False)
        expected = step()
        monkeypatch.setattr(mdeq_fused, "streams_with_grad", True)
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
    finally:
        torch.backends.cudnn.deterministic = False


def test_gradients_between_scales_are_not_copied(device, monkeypatch):
    """Of z, several times, as a refinement asks for them: each is written where it belongs."""
    _, cell, z, injection = problem(FEW, (8, 8), device)
    cell.requires_grad_(False)
    cell.eval()
    z = tuple(part.requires_grad_() for part in z)
    home = sys.modules["gdeq.fast.kernels.norms.slices"]._Home
    whole, real = [], home.holds
    monkeypatch.setattr(home, "holds", lambda *args: whole.append(real(*args)) or whole[-1])
    found = []
    for enabled in (False, True):
        monkeypatch.setattr(mdeq_fused, "slices_with_grad", enabled)
        out = cell(z, injection)
        directions = [part.detach().cos() for part in out]
        for _ in range(2):
            whole.clear()
            one = torch.autograd.grad(out, z, directions, retain_graph=True)
            # One level on the way down from scale 0, and what goes up from scale 2.
            assert whole == [True, True] * enabled
            found.append([part.clone() for part in one])
    for other in found[1:]:
        close(other, found[0], 1e-6)
