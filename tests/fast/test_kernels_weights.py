"""Weights of convolutions made ready in one launch, against PyTorch operation by operation."""

import pytest
import torch
from torch import nn

from gdeq.fast.kernels import weights
from gdeq.fast.kernels.weights import Convolution, Merged, Plans, merge, merge_plain
from norm_cases import check_twice

pytestmark = pytest.mark.usefixtures("kernels_run")


@pytest.fixture(params=[1, 8], ids=["row by row", "rows together"])
def tuning(request, monkeypatch):
    monkeypatch.setattr(weights, "ROWS", request.param)
    monkeypatch.setattr(weights, "NUMBERS", 8 * request.param)


def convolution(outputs, inputs, edge, device, normalised=False, order=torch.contiguous_format):
    weight = torch.randn(outputs, inputs, edge, edge, device=device).to(memory_format=order)
    gain = torch.randn(outputs, 1, 1, 1, device=device) if normalised else None
    return Convolution(
        nn.Parameter(weight), None if gain is None else nn.Parameter(gain.to(memory_format=order))
    )


def mixture(device):
    """Shared and own inputs, with and without normalisation, 1×1 and 3×3, both orders."""
    last = {"order": torch.channels_last}
    return [
        Merged((convolution(5, 7, 3, device, normalised=True),)),
        Merged((convolution(3, 5, 1, device, **last), convolution(2, 5, 1, device))),
        Merged(
            (
                convolution(4, 3, 3, device, normalised=True, **last),
                convolution(2, 5, 3, device),
                convolution(3, 1, 3, device, **last),
            ),
            own_inputs=True,
        ),
        Merged((convolution(2, 9, 3, device, **last),)),
        Merged((convolution(6, 4, 1, device, normalised=True, **last),)),
        Merged((convolution(3, 2, 3, device), convolution(2, 2, 3, device)), outputs=8, inputs=3),
        Merged((convolution(3, 5, 1, device, normalised=True, **last),), outputs=4),
        Merged((convolution(4, 3, 3, device, **last),), outputs=2, inputs=8),  # as many as it has
    ]


def parameters(merged):
    return [t for e in merged for p in e.parts for t in (p.weight, p.gain) if t is not None]


def in_double(merged):
    def wide(tensor):
        return None if tensor is None else tensor.detach().double().requires_grad_()

    return [
        Merged(tuple(Convolution(wide(p.weight), wide(p.gain)) for p in e.parts), *e.form)
        for e in merged
    ]


def test_values(tuning, device):
    merged = mixture(device)
    expected = merge_plain(in_double(merged), torch.float64)
    with torch.no_grad():
        found = merge(merged, torch.float32)
        half = merge(merged, torch.bfloat16)
    plain = merge_plain(merged, torch.bfloat16)
    for a, b, c, exact in zip(found, half, plain, expected, strict=True):
        assert a.is_contiguous(memory_format=torch.channels_last)
        assert a.data_ptr() % 16 == b.data_ptr() % 16 == 0
        torch.testing.assert_close(a.double(), exact, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(b, c, rtol=1e-2, atol=1e-3)
        assert torch.equal(b == 0, exact == 0)
    assert len({a.untyped_storage().data_ptr() for a in found}) == 1


def test_gradients(tuning, device):
    merged, plans = mixture(device), Plans()
    wide = in_double(merged)
    exact = merge_plain(wide, torch.float64)
    directions = [torch.randn_like(e) for e in exact]
    expected = torch.autograd.grad(exact, parameters(wide), directions)
    for order in (torch.channels_last, torch.contiguous_format):
        found = torch.autograd.grad(
            merge(merged, torch.float32, plans),
            parameters(merged),
            [d.float().to(memory_format=order) for d in directions],
        )
        for a, b, parameter in zip(found, expected, parameters(merged), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)
            assert a.stride() == parameter.stride()
            assert a.dtype == torch.float32


def test_gradients_of_half_precision_are_accumulated(device):
    merged = mixture(device)
    frozen = merged[0].parts[0].weight.requires_grad_(False)
    wanted = [p for p in parameters(merged) if p is not frozen]
    for _ in range(2):
        sum(w.float().sin().sum() for w in merge(merged, torch.bfloat16)).backward()
    assert frozen.grad is None
    plain = merge_plain(merged, torch.bfloat16)
    once = torch.autograd.grad(sum(w.float().sin().sum() for w in plain), wanted)
    for parameter, gradient in zip(wanted, once, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient, rtol=2e-2, atol=4e-2)


def test_an_unused_result_gives_zeros(device):
    merged = mixture(device)
    merge(merged, torch.float32)[1].sum().backward()
    assert not merged[0].parts[0].weight.grad.any()
    assert bool((merged[1].parts[0].weight.grad == 1).all())


def test_second_derivatives(device):
    merged = [Merged((convolution(3, 4, 3, device, normalised=True),))]
    both = [lambda f=f: f(merged, torch.float32)[0].sin() for f in (merge, merge_plain)]
    check_twice(both, parameters(merged), 1e-4)


def test_a_row_of_zeros_is_not_hidden(device):
    merged = [Merged((convolution(3, 4, 3, device, normalised=True),))]
    with torch.no_grad():
        merged[0].parts[0].weight[1] = 0
        (found,) = merge(merged, torch.float32)
    assert bool(found[1].isnan().all())
    assert bool(found[0].isfinite().all())


# ---- room for more channels


def test_what_nobody_has_is_zero(tuning, device):
    entry = Merged((convolution(3, 2, 3, device), convolution(2, 2, 3, device)), False, 8, 4)
    for function in (merge, merge_plain):
        (found,) = function([entry], torch.float32)
        assert found.shape == (8, 4, 3, 3)
        assert found.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(found[:5, :2], torch.cat([part.weight for part in entry.parts]))
        assert not found[5:].any()
        assert not found[:, 2:].any()


def test_room_makes_another_table(device):
    part, plans = convolution(3, 2, 1, device), Plans()
    shapes = [
        tuple(merge([Merged((part,), False, *room)], torch.float32, plans)[0].shape[:2])
        for room in ((), (8,), (8, 4), ())
    ]
    assert shapes == [(3, 2), (8, 2), (8, 4), (3, 2)]


# ---- addresses


def test_the_table_is_made_once_and_anew_when_a_parameter_moves(device, monkeypatch):
    made = []
    plan = weights.Plan
    monkeypatch.setattr(weights, "Plan", lambda *args: made.append(1) or plan(*args))
    merged, plans = mixture(device), Plans()
    with torch.no_grad():
        merge(merged, torch.float32, plans)
        merged[0].parts[0].weight.mul_(2)
        merge(merged, torch.bfloat16, plans)
        assert len(made) == 1
        moved = merged[0].parts[0].weight
        moved.data = moved.data.clone()
        found = merge(merged, torch.float32, plans)
        assert len(made) == 2
        for a, b in zip(found, merge_plain(merged, torch.float32), strict=True):
            torch.testing.assert_close(a, b)


def test_what_kernels_cannot_take_goes_to_pytorch(device):
    double = [Merged((Convolution(torch.randn(3, 2, 1, 1, device=device).double()),))]
    assert merge(double, torch.float64)[0].dtype == torch.float64
    weight = torch.randn(3, 4, 2, 2, device=device, requires_grad=True)
    (found,) = merge([Merged((Convolution(weight * 2),))], torch.float32)
    torch.testing.assert_close(found, weight * 2)
    assert merge([], torch.float32) == []


def test_a_graph_reads_the_parameters_as_they_are_then(gpu):
    merged, plans = mixture(gpu), Plans()
    merge(merged, torch.float32, plans)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = merge(merged, torch.float32, plans)
        gradients = torch.autograd.grad([w.sin().sum() for w in found], parameters(merged))
    with torch.no_grad():
        for parameter in parameters(merged):
            parameter.mul_(1.5)
    graph.replay()
    plain = merge_plain(merged, torch.float32)
    expected = torch.autograd.grad([w.sin().sum() for w in plain], parameters(merged))
    for a, b in zip([*found, *gradients], [*plain, *expected], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    other = mixture(gpu)
    with pytest.raises(RuntimeError, match="has moved"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        merge(other, torch.float32, plans)
