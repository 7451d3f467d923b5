"""Samples that are done leave the batch, and nothing else changes.

Against the same solve without narrowing, in float64; without a GPU the kernels run in Triton's
interpreter, and graphs are functions that are called again.
"""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import gdeq
from gdeq import narrowing
from gdeq.fast import product
from gdeq.fast.kernels import choice
from gdeq.fast.recording import Repeated, Stage, rehearsal
from gdeq.models.mdeq import mdeq
from gdeq.solution import Status
from played import Event, Graph, Played
from problems import assert_near, leaves
from sweeps import ledger_of

pytest.importorskip("triton")
from gdeq.fast.kernels import product as fused

F64 = torch.float64
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
# The interpreter divides 0 by 0 aloud.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
BATCH = 8
Pair = namedtuple("Pair", "strength offset")


@pytest.fixture(params=["plain", "triton"])
def form(request):
    return request.param


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(narrowing, "LEAST", 2)  # 8 samples, then 4, then 2
    # Of a sample that has left no steps are written any more: whatever is there must not matter.
    build, grow = fused.Sweep.__init__, fused._with_room

    def lost(store):
        return store.fill_(torch.nan if store.is_floating_point() else 127)

    def built(sweep, *arguments, **more):
        build(sweep, *arguments, **more)
        lost(sweep.steps)
        lost(sweep.scales)

    def grown(known, room):
        larger = lost(grow(known, room))
        larger[:, : known.shape[1]] = known
        return larger

    monkeypatch.setattr(fused.Sweep, "__init__", built)
    monkeypatch.setattr(fused, "_with_room", grown)


class Cell(nn.Module):
    """tanh(strength·Wz + x); the stronger, the slower.  Says how many samples it was given."""

    def __init__(self, width=4):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        matrix = torch.randn(width, width, dtype=F64, generator=generator)
        self.matrix = nn.Parameter(matrix / torch.linalg.matrix_norm(matrix, 2))
        self.given = []

    def forward(self, z, x, strength):
        self.given.append(len(z))
        return torch.tanh(strength.unsqueeze(1) * (z @ self.matrix.T) + x)


class Awkward(Cell):
    """NaN where ‖f(z) − z‖ is below a limit; z + 1 for a sample that drifts."""

    def forward(self, z, x, strength, limit, drift):
        found = super().forward(z, x, strength)
        near = (found - z).norm(dim=1) < limit
        found = torch.where(near.unsqueeze(1), torch.nan, found)
        return torch.where(drift.unsqueeze(1), z + 1, found)


class Nested(Cell):
    """A state of several tensors, and inputs that are nested."""

    def forward(self, z, x, given, *, shared):
        flat = torch.cat([z["a"], z["b"][0].flatten(1)], dim=1)
        found = super().forward(flat, x, given["pair"].strength) + given["pair"].offset
        found = found * shared[0] + given["more"][0][:, None]
        return {"a": found[:, :2], "b": (found[:, 2:].reshape(-1, 2, 1),)}


class Picture(nn.Module):
    """Channels-last; says whether x is too."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1, dtype=F64)
        self.given = []

    def forward(self, z, x, strength):
        self.given.append(len(z))
        assert x.is_contiguous(memory_format=torch.channels_last)
        return torch.tanh(strength.view(-1, 1, 1, 1) * self.conv(z) + x)


def inputs(width=4):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, width, dtype=F64, generator=generator)
    strength = torch.logspace(-4, 0.3, BATCH, dtype=F64)
    order = torch.randperm(BATCH, generator=generator)
    return x.to(DEVICE), strength[order].to(DEVICE)


def awkward_inputs():
    x, strength = inputs()
    limit, drift = torch.zeros_like(strength), torch.zeros_like(strength, dtype=torch.bool)
    slowest = strength.argsort(descending=True)
    limit[slowest[0]], limit[slowest[6]] = 1e-5, torch.inf
    drift[slowest[1]] = True
    return x, strength, limit, drift


def layer(cell, solver=None, narrow=True, gradient=None):
    solver = gdeq.Broyden(14, 1e-9) if solver is None else solver
    gradient = gdeq.GDEQ() if gradient is None else gradient
    return gdeq.DEQ(cell.to(DEVICE), solver, gradient, narrow=narrow).eval()


def both_ways(form, cell, solver=None, *inputs, **options):
    """The solutions of the whole batch and of the narrowed one, and what the cell was given."""
    with choice.use(form), torch.no_grad():
        whole = layer(copy.deepcopy(cell), solver, narrow=False)
        whole(*inputs, **options)
        narrow = layer(cell, solver)
        narrow(*inputs, **options)
    assert set(whole.cell.given) == {BATCH}
    return whole.solution, narrow.solution, narrow.cell.given


def assert_same(expected, found, tolerance=1e-9):
    for a, b in zip(leaves(expected.z), leaves(found.z), strict=True):
        assert_near(b, a, tolerance)
    assert found.codes.tolist() == expected.codes.tolist()
    assert found.steps.tolist() == expected.steps.tolist()
    assert found.evals == expected.evals
    torch.testing.assert_close(
        found.residual, expected.residual, rtol=1e-3, atol=1e-13, equal_nan=True
    )
    torch.testing.assert_close(found.trace, expected.trace, rtol=1e-3, atol=1e-13, equal_nan=True)
    wide = torch.randn(BATCH, found.inverse.space.size, dtype=F64, device=DEVICE)
    for of in ("matvec", "rmatvec"):
        a, b = (getattr(s.inverse, of)(wide) for s in (expected, found))
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)


def test_samples_with_very_different_numbers_of_steps(form):
    expected, found, given = both_ways(form, Cell(), None, *inputs())
    assert_same(expected, found)
    assert 3 * expected.steps.min() <= expected.steps.max()
    assert set(given) == {8, 4, 2}
    assert len(given) == found.evals + 2 * 2  # each size is compared once with the one before


def test_samples_that_are_lost_stay_lost(form):
    expected, found, given = both_ways(form, Awkward(), None, *awkward_inputs())
    assert_same(expected, found)
    kinds = set(expected.status)
    assert {Status.CONVERGED, Status.NONFINITE, Status.NONFINITE_START} <= kinds
    assert kinds & {Status.STALLED, Status.DIVERGED, Status.MAX_STEPS}
    assert 4 in given


def test_a_sample_that_is_done_does_not_change_by_a_bit(form, monkeypatch):
    """From the first narrowing on, whatever f says of it."""
    kind = fused.Sweep if form == "triton" else product.PlainSweep
    seen = []

    def watched(sweep, size):
        ledger = ledger_of(sweep)
        known = sweep.z.clone(), sweep.steps.clone(), ledger.steps.clone()
        seen.append((sweep, ~ledger.active, *known))
        return narrow(sweep, size)

    narrow = kind.narrow
    monkeypatch.setattr(kind, "narrow", watched)
    _, found, _ = both_ways(form, Cell(), None, *inputs())
    assert len(seen) == 2
    for sweep, done, z, steps, taken in seen:
        assert torch.equal(found.z[done], z[done])
        for b in done.nonzero().flatten().tolist():
            known = int(taken[b])
            assert torch.equal(sweep.steps[b, :known], steps[b, :known])


def test_states_of_several_tensors_and_nested_inputs(form):
    x, strength = inputs()
    shared = torch.tensor([0.9, 5.0], dtype=F64, device=DEVICE)
    given = {"pair": Pair(strength, 0.1 * x), "more": [0.1 * strength, "a word"]}
    z0 = {"a": x[:, :2] * 0, "b": (x[:, 2:].reshape(-1, 2, 1) * 0,)}
    solver = gdeq.Broyden(14, 1e-9, check_every=2)
    expected, found, sizes = both_ways(form, Nested(), solver, x, given, shared=shared, z0=z0)
    assert_same(expected, found)
    assert set(sizes) == {8, 4, 2}


def test_images_stay_in_channels_last_memory():
    x, strength = inputs(16)
    x = x.view(BATCH, 2, 4, 2).contiguous(memory_format=torch.channels_last)
    expected, found, sizes = both_ways("plain", Picture(), None, x, strength)
    assert_same(expected, found)
    assert 2 in sizes


def test_mdeq():
    """Whose cell keeps its injection in the right order during a solve."""
    model = mdeq("tiny", dropout=0.0, outer_norm="group", fused=DEVICE.type == "cuda")
    model = model.to(DEVICE, memory_format=torch.channels_last).eval()
    given, close = [], {"rtol": 1e-3, "atol": 1e-4}
    model.deq.cell.register_forward_pre_hook(lambda cell, of: given.append(len(of[0][0])))
    model.deq.solver = gdeq.Broyden(12, 1e-3)
    scale = torch.logspace(-0.5, 2.5, BATCH, device=DEVICE)
    with choice.use("auto" if DEVICE.type == "cuda" else "plain"), torch.no_grad():
        images = torch.randn(BATCH, 3, 16, 16, device=DEVICE)
        x = model.stem(images) * scale.view(-1, 1, 1, 1)
        expected = model.deq(x)
        assert set(given) == {BATCH}
        model.deq.narrow = True
        for a, b in zip(model.deq(x), expected, strict=True):
            torch.testing.assert_close(a, b, **close)
    assert set(given) == {8, 4, 2}


@pytest.mark.parametrize("bits", [16, 8])
def test_half_precision(form, bits):
    """Steps are rounded, and ‖y‖ is not measured: f at the last z is not kept."""
    x, strength = inputs()
    cell, results = Cell().float(), []
    for narrow in (True, False):
        solver = gdeq.Broyden(14, 3e-2, step_bits=bits)
        deq = layer(cell, solver, narrow=narrow, gradient=gdeq.GDEQ(refine=2))
        of_x = x.float().requires_grad_()
        cell.given.clear()
        with choice.use(form), torch.autocast(DEVICE.type, torch.bfloat16):
            z = deq(of_x, strength.float())
        with choice.use(form):
            (z**2).sum().backward()
        assert (min(cell.given) < BATCH) == narrow
        results.append((z.detach().double(), of_x.grad.double()))
    for found, expected in zip(*results, strict=True):
        assert_near(found, expected, 0.1)


@pytest.mark.parametrize("gradient", [gdeq.GDEQ(), gdeq.GDEQ(refine=3), gdeq.Implicit()])
def test_gradients_come_after_a_narrowed_solve(form, gradient):
    """The solve never differentiates f; the evaluation after it is of all samples.

    Of those that left, the store holds no more than the steps that they took.
    """
    if form == "triton" and isinstance(gradient, gdeq.Implicit):
        pytest.skip("slow in the interpreter, and of the plain solver")
    x, strength = inputs()
    results = []
    for narrow in (False, True):
        of_x = x.clone().requires_grad_()
        deq = layer(Cell(), narrow=narrow, gradient=gradient)
        with choice.use(form):
            (deq(of_x, strength) ** 2).sum().backward()
        results.append((deq.cell.matrix.grad, of_x.grad))
    assert 2 in deq.cell.given
    assert deq.cell.given[-1] == BATCH
    for found, expected in zip(results[1], results[0], strict=True):
        assert_near(found, expected, 1e-6)
    for b in range(BATCH):
        assert_near(results[1][1][b], results[0][1][b], 1e-5)


@pytest.mark.filterwarnings("ignore:narrow=True has no effect")
def test_where_nothing_is_narrowed():
    x, strength = inputs()

    def sizes(deq, x=x, strength=strength):
        deq.cell.given.clear()
        with choice.use("plain"), torch.no_grad():
            deq(x, strength)
        return set(deq.cell.given)

    assert sizes(layer(Cell())) != {BATCH}
    assert sizes(layer(Cell(), narrow=False)) == {BATCH}
    assert sizes(layer(Cell()).train()) == {BATCH}
    assert sizes(layer(Cell(), gdeq.Broyden(6, 0.0))) == {BATCH}
    assert sizes(layer(Cell(), gdeq.Broyden(14, 1e-9, memory=3))) == {BATCH}
    assert sizes(layer(Cell()), x[:3], strength[:3]) == {3}
    part = layer(Cell())
    part.cell.dropout = gdeq.VariationalDropout().train()
    assert sizes(part) == {BATCH}


def test_samples_that_are_all_done_at_once(form):
    x, strength = inputs()
    x, strength = x[:1].expand_as(x), strength[:1].expand_as(strength)
    expected, found, sizes = both_ways(form, Cell(), None, x, strength)
    assert_same(expected, found)
    assert set(sizes) == {BATCH}


def test_samples_that_are_done_at_the_start(form):
    """They leave before the first step, with an inverse of no factor."""
    x, strength = inputs()
    with choice.use("plain"), torch.no_grad():
        z0 = layer(Cell(), gdeq.Broyden(60, 1e-12))(x, strength)
    z0[::2] = 0
    expected, found, sizes = both_ways(form, Cell(), None, x, strength, z0=z0)
    assert_same(expected, found)
    assert (found.steps[1::2] == 0).all()
    assert sizes[:2] == [8, 8]  # compared
    assert set(sizes[2:]) <= {4, 2}


class Attention(nn.Module):
    """Over places of which each sample has its own number, once as a mask and once as a length."""

    def __init__(self, width=3):
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        weights = torch.randn(3, width, width, dtype=F64, generator=generator)
        self.weights = nn.Parameter(0.5 * weights)
        self.given = []

    def forward(self, z, x, strength, mask, lengths):
        self.given.append(len(z))
        query, key, value = (z @ weight for weight in self.weights)
        bias = torch.zeros_like(mask[:, None, :], dtype=z.dtype).masked_fill(~mask[:, None], -1e9)
        mixed = torch.softmax(query @ key.mT + bias, dim=2) @ value
        within = torch.arange(z.shape[1], device=z.device) < lengths.unsqueeze(1)
        return torch.tanh(strength.view(-1, 1, 1) * mixed * within.unsqueeze(2) + x)


def test_masks_and_lengths(form):
    places, generator = 5, torch.Generator().manual_seed(3)
    _, strength = inputs()
    x = torch.randn(BATCH, places, 3, dtype=F64, generator=generator).to(DEVICE)
    lengths = (torch.arange(BATCH, device=DEVICE) % places) + 1
    mask = torch.arange(places, device=DEVICE) < lengths.unsqueeze(1)
    expected, found, sizes = both_ways(form, Attention(), None, x, strength, mask, lengths)
    assert_same(expected, found)
    assert 4 in sizes


def test_an_f_that_writes_into_the_same_memory_in_each_size(monkeypatch):
    """As a cell in a CUDA graph of its own does."""
    memory, seen = {}, []

    class Written(Cell):
        def forward(self, *given):
            found = super().forward(*given)
            return memory.setdefault(len(found), torch.empty_like(found)).copy_(found)

    take = fused.Sweep.take

    def watched(sweep, t, fz):
        seen.append(sweep.last_fz.data_ptr() == fz.data_ptr())
        take(sweep, t, fz)

    monkeypatch.setattr(fused.Sweep, "take", watched)
    expected, found, sizes = both_ways("triton", Written(), None, *inputs())
    assert set(sizes) == {8, 4, 2}
    assert_same(expected, found)
    assert not any(seen)  # else ‖f(z_t) − f(z_{t−1})‖ is 0


def test_a_cell_that_needs_the_whole_batch_is_refused():
    class Closed(Cell):
        def forward(self, z, x):
            return super().forward(z, x, strength)

    class Mixing(Cell):
        share = 1.0

        def forward(self, z, x, strength):
            return super().forward(z, x + self.share * x.mean(0), strength)

    class Slightly(Mixing):
        share = 0.003

    class Matrix(Cell):
        def forward(self, z, x, strength, square):
            return super().forward(z, x, strength * square.sum(0)[: len(z)])

    x, strength = inputs()
    square = torch.eye(BATCH, dtype=F64, device=DEVICE)
    with choice.use("plain"), torch.no_grad():
        with pytest.raises(RuntimeError) as caught:
            layer(Closed())(x)
        assert "the cell was given 4 of 8 samples" in caught.value.__notes__[0]
        for kind in (Mixing, Slightly):
            with pytest.raises(narrowing.NarrowError, match="other values for 4 of 8 samples"):
                layer(kind())(x, strength)
        with pytest.raises(narrowing.NarrowError, match="narrow=False"):
            layer(Matrix())(x, strength, square)


def test_batch_norm_without_averages_is_refused():
    """It mixes samples in eval mode too; with averages it does not."""

    class Normed(Cell):
        def __init__(self, track):
            super().__init__()
            self.norm = nn.BatchNorm1d(4, track_running_stats=track, dtype=F64)

        def forward(self, z, x, strength):
            return super().forward(z, self.norm(x), strength)

    x, strength = inputs()
    with choice.use("plain"), torch.no_grad():
        with pytest.raises(narrowing.NarrowError, match=r"BatchNorm1d \(norm\) has no running"):
            layer(Normed(False))(x, strength)
        layer(Normed(False), narrow=False)(x, strength)
        with pytest.warns(gdeq.layer.UnsteadyCellWarning):
            layer(Normed(False)).train()(x, strength)
        fine = layer(Normed(True))
        fine(x, strength)
    assert 2 in fine.cell.given


class OfLengths(Cell):
    """lengths: of each sample, whatever holds them."""

    def forward(self, z, x, strength, lengths, *more):
        values = [lengths[i] for i in range(len(z))]
        scale = torch.tensor(values, dtype=F64, device=z.device).unsqueeze(1)
        return super().forward(z, x * scale, strength)


def test_what_holds_something_for_each_sample_must_be_a_tensor():
    """With equal lengths nothing would be noticed, and nothing later with the same shapes."""
    x, strength = inputs()
    lengths = [1.0] * BATCH
    array = torch.ones(BATCH).numpy()
    sparse = torch.eye(BATCH, dtype=F64, device=DEVICE).to_sparse()
    nested = torch.nested.nested_tensor([torch.ones(i + 1) for i in range(BATCH)])
    told = "input 2 of the cell is a list of 8, as many as there are samples"
    with choice.use("plain"), torch.no_grad():
        deq = layer(OfLengths())
        with pytest.raises(narrowing.NarrowError, match=told):
            deq(x, strength, lengths)
        with pytest.raises(narrowing.NarrowError, match="lengths of the cell is a tuple of 8"):
            deq(x, strength, lengths=tuple(lengths))
        with pytest.raises(narrowing.NarrowError, match="is a ndarray of 8"):
            deq(x, strength, array)
        with pytest.raises(narrowing.NarrowError, match=r"\['a'\]\[0\] is in the layout torch"):
            deq(x, strength, {"a": (sparse,)})
        with pytest.raises(narrowing.NarrowError, match="is a nested tensor"):
            deq(x, strength, nested)
        assert not deq.cell.given[1:]
        deq(x, strength, [*lengths, 1.0], "8 places", array[0], array[0:1].reshape(()))
        assert 2 in deq.cell.given


def test_a_list_of_tensors_of_all_samples_is_no_matter():
    class Sum(Cell):
        def forward(self, z, x, strength, more):
            return super().forward(z, x + sum(more), strength)

    x, strength = inputs()
    expected, found, sizes = both_ways("plain", Sum(), None, x, strength, [0.1 * x] * BATCH)
    assert_same(expected, found)
    assert 2 in sizes


def test_with_inputs_of_an_unknown_kind_it_is_compared_at_each_call():
    @dataclass
    class Lengths:
        values: list

        def __getitem__(self, i):
            return self.values[i]

    x, strength = inputs()
    equal, unlike = Lengths([1.0] * BATCH), Lengths([1.0 + i for i in range(BATCH)])
    with choice.use("plain"), torch.no_grad():
        deq = layer(OfLengths())
        deq(x, strength, equal)
        assert 2 in deq.cell.given
        with pytest.raises(narrowing.NarrowError, match="other values"):
            deq(x, strength, unlike)


def test_a_cell_that_has_trained_is_compared_again():
    class Gated(Cell):
        gate = 0.0

        def forward(self, z, x, strength):
            return super().forward(z, x + self.gate * x.mean(0), strength)

    x, strength = inputs()
    with choice.use("plain"), torch.no_grad():
        deq = layer(Gated())
        deq(x, strength)
        deq.train()
        deq.cell.gate = 1.0
        with pytest.raises(narrowing.NarrowError, match="other values"):
            deq.eval()(x, strength)


def test_a_copy_compares_anew_and_can_be_pickled():
    x, strength = inputs()
    deq = layer(Cell())
    with choice.use("plain"), torch.no_grad():
        deq(x, strength)
    assert deq._narrowed_well
    assert not copy.deepcopy(deq)._narrowed_well
    again = pickle.loads(pickle.dumps(deq))
    assert again.narrow
    assert not again._narrowed_well


def test_the_distance_of_two_results():
    """Of each sample, where numbers are far from the end of their range."""

    def distance(found, expected):
        return float(narrowing._distance(torch.tensor(found), torch.tensor(expected), [1, 1]))

    expected = [1.0, 2.0, 1e3, 1.0, 2.0, 0.0]  # (1, 1), (2, 2), (1e3, 0)
    assert distance(expected, expected) == 0
    assert distance([1.0, 2.0, 1010.0, *expected[3:]], expected) == pytest.approx(0.01)
    assert distance([1.5, *expected[1:]], expected) == pytest.approx(0.5 / 8**0.5)
    inf = float("inf")
    assert distance([inf, *expected[1:]], [3e38, *expected[1:]]) == 0
    assert distance([3e38, *expected[1:]], [inf, *expected[1:]]) == 0
    assert not distance([inf, *expected[1:]], expected) < 1
    assert not distance([float("nan"), *expected[1:]], expected) < 1
    assert distance([0.0] * 6, [0.0] * 6) == 0
    assert distance([1e-9] * 6, [0.0] * 6) == inf


def test_both_ways_are_compared_once_for_each_size():
    x, strength = inputs()
    deq = layer(Cell())
    with choice.use("plain"), torch.no_grad():
        deq(x, strength)
        deq.cell.given.clear()
        deq(x, strength)
    assert len(deq.cell.given) == deq.solution.evals
    assert deq.cell.given == sorted(deq.cell.given, reverse=True)
    again = copy.deepcopy(deq)
    assert again.narrow
    assert "narrow=True" in repr(again)


def test_functions_and_inference_mode():
    x, strength = inputs()
    cell = Cell().to(DEVICE).eval()
    deq = gdeq.DEQ(lambda z, *given: 1 * cell(z, *given), gdeq.Broyden(14, 1e-9), narrow=True)
    with choice.use("plain"), torch.inference_mode():
        deq(x, strength)
        assert set(cell.given) == {BATCH}  # a layer in training mode
        expected = deq.solution
        deq.eval()(x, strength)
    assert 2 in cell.given
    assert_same(expected, deq.solution)


def test_a_module_in_a_function_may_be_in_training_mode_still():
    """Whatever the layer is in, which does not know it."""
    x, strength = inputs()
    cell = Cell().to(DEVICE)
    wrapped = [
        lambda z, *given: 1 * cell(z, *given),
        functools.partial(cell.forward),
        functools.partial(lambda z, x, strength, inner: inner(z, x, strength), inner=cell),
        cell.forward,
    ]
    for function in wrapped:
        deq = gdeq.DEQ(function, gdeq.Broyden(14, 1e-9), narrow=True).eval()
        for training in (True, False):
            cell.train(training).given.clear()
            with choice.use("plain"), torch.no_grad():
                deq(x, strength)
            assert (2 in cell.given) == (not training)


def test_it_is_true_or_false():
    with pytest.raises(TypeError, match="narrow must be True or False, got 3"):
        gdeq.DEQ(Cell(), narrow=3)
    with pytest.raises(TypeError, match="did you mean 'narrow'"):
        gdeq.DEQ(Cell(), narow=True)
    deq = gdeq.DEQ(Cell())
    deq.narrow = "yes"
    with pytest.raises(TypeError, match="narrow must be True or False, got 'yes'"):
        deq(torch.ones(8, 3))


@pytest.mark.parametrize(
    ("kernels", "solver", "why"),
    [
        ("off", gdeq.Broyden(tol=1e-3), "on a GPU with Triton"),
        ("plain", gdeq.Broyden(tol=0.0), "give the solver a tolerance"),
        (
            "plain",
            gdeq.Picard(tol=1e-3),
            "Broyden(memory=None) or Anderson(memory<=16), not Pic",
        ),
        ("plain", gdeq.Anderson(tol=1e-3, memory=17), "or Anderson(memory<=16), not Anderson"),
        ("plain", gdeq.Broyden(tol=1e-3, memory=3), "or Anderson(memory<=16), not Broyden"),
        ("plain", gdeq.Broyden(tol=1e-3), None),
        ("plain", gdeq.Anderson(tol=1e-3), None),
    ],
)
def test_where_no_sample_can_leave_is_said_once(kernels, solver, why):
    deq = gdeq.DEQ(lambda z, x: 0.3 * torch.tanh(z) + x, solver, gdeq.JFB(), narrow=True)
    x = torch.randn(8, 3, dtype=F64)
    with choice.use(kernels), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        deq(x)  # in training no sample leaves anyway
        assert not told
        deq.eval()
        deq(x)
        deq(x)
    told = [str(w.message) for w in told if "no effect" in str(w.message)]
    assert len(told) == (why is not None)
    assert why is None or why in told[0]


class Coupled(nn.Module):
    """Each sample with a share of the mean of all; table: rows for all samples together."""

    share = 0.0

    def forward(self, z, x, strength, share=0.0, centre=False, table=None):
        found = strength[:, None] * torch.tanh(z) + x + (share + self.share) * z.mean(0)
        if table is not None:
            found = found + 1e-3 * table.sum(0)
        return found - 1e-4 * found.mean(0) if centre else found


def coupled(size=64, **options):
    """The same numbers on every device."""
    strength = torch.linspace(0.05, 0.9, size, dtype=F64)
    x = torch.randn(size, 5, dtype=F64, generator=torch.Generator().manual_seed(0))
    return (x.to(DEVICE), strength.to(DEVICE)), options


@pytest.mark.parametrize("tol", [1e-4, 1e-10])
def test_what_couples_samples_by_more_than_the_tolerance_tells_is_refused(tol):
    (x, strength), _ = coupled()
    deq = gdeq.DEQ(Coupled(), gdeq.Broyden(60, tol=tol), narrow=True).eval()
    with choice.use("plain"):
        deq(x, strength, share=0.0)
        deq(x, strength, share=1e-3 * tol)  # in no residual that is told
        with pytest.raises(gdeq.NarrowError, match="would be taken for rounding"):
            deq(x, strength, share=3 * tol)


def test_another_flag_or_cell_is_compared_again():
    """Weak couplings: with strong ones all samples are done at once, and none leaves before."""
    (x, strength), _ = coupled()
    deq = gdeq.DEQ(Coupled(), gdeq.Broyden(60, tol=1e-8), narrow=True).eval()
    with choice.use("plain"):
        deq(x, strength, centre=False)
        with pytest.raises(gdeq.NarrowError):
            deq(x, strength, centre=True)
        deq.cell = Coupled().eval()
        deq.cell.share = 1e-4
        with pytest.raises(gdeq.NarrowError):
            deq(x, strength)


@pytest.mark.parametrize(
    ("form", "size", "rows"),
    [*(("plain", 64, rows) for rows in (2, 4, 5, 16, 32)), ("triton", 8, 4)],
)
def test_a_table_for_all_samples_may_have_as_many_rows_as_are_left(form, size, rows):
    (x, strength), _ = coupled(size)
    table = torch.randn(rows, 5, dtype=F64, device=DEVICE)
    seen = []
    cell = Coupled()
    cell.register_forward_pre_hook(lambda _module, given: seen.append(len(given[0])))
    found = []
    for narrow in (False, True):
        tol = 1e-10 if form == "plain" else 1e-5  # fewer steps for the interpreter
        deq = gdeq.DEQ(cell, gdeq.Broyden(60, tol=tol), narrow=narrow).eval()
        with choice.use(form):
            found.append(deq(x, strength, table=table))
    assert ({64, 32, 16, 8, 4} if size == 64 else {8, 4, 2}) <= set(seen)
    torch.testing.assert_close(found[1], found[0], rtol=1e-8, atol=1e-10)


# --- recorded ------------------------------------------------------------------------------------


@pytest.fixture
def played(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    for module in (product, fused):
        monkeypatch.setattr(module, "recording", lambda device: True)
    found = Played()
    monkeypatch.setattr(product, "current", lambda: found)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is recorded")
@pytest.mark.parametrize(("kind", "every"), [(Cell, 2), (Awkward, 1)])
def test_a_recorded_solve_narrows_too(played, kind, every):
    given = inputs() if kind is Cell else awkward_inputs()
    solver = gdeq.Broyden(14, 1e-9, check_every=every)
    cell = kind()
    with choice.use("triton"), torch.no_grad():
        whole, narrow = layer(copy.deepcopy(cell), solver, narrow=False), layer(cell, solver)
        whole(*given)
        plays = played.log.count("judge")
        played.log.clear()
        narrow(*given)
    assert_same(whole.solution, narrow.solution)
    assert played.log.count("judge") == played.log.count("go on") == plays  # one count for all
    changes = [name for name in played.log if name.startswith("at")]
    assert changes == ["at most 4", "at most 2"][: len(changes)]
    assert changes
    assert cell.given == sorted(cell.given, reverse=True)
    assert len(cell.given) == plays + 1


def test_stages_that_come_at_once_are_all_begun(monkeypatch):
    """Each gathers from the one before.  None begins when all are done, or no step is left."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)

    def plays(numbers, most):
        heard, unfinished = [], torch.ones(1, dtype=torch.int64)

        def graph(name):
            def replay():
                heard.append(name)
                if name.startswith("judge"):
                    unfinished[0] = numbers[sum(n.startswith("judge") for n in heard) - 1]

            return Graph(replay)

        stages = [Stage(graph("judge 8"), graph("go on"))]
        for few in (4, 2):
            stages.append(Stage(graph(f"judge {few}"), graph("go on"), graph(f"to {few}"), few))
        Repeated(stages, unfinished, most, 1).replay()
        return " ".join(name for name in heard if name != "go on")

    assert plays([8, 5, 2, 2, 0], 9) == "judge 8 judge 8 judge 8 to 4 to 2 judge 2 judge 2"
    assert plays([8, 4, 3, 0], 9) == "judge 8 judge 8 to 4 judge 4 judge 4"
    assert plays([0], 9) == "judge 8"
    assert plays([8, 3, 1], 2) == "judge 8 judge 8"
    assert plays([4, 3, 3], 3) == "judge 8 to 4 judge 4 judge 4"


def test_a_rehearsal_evaluates_f_in_each_size(monkeypatch):
    """Libraries choose their algorithms by the size, and not while a graph is recorded."""
    for module in (product, fused):
        monkeypatch.setattr(module, "recording", lambda device: True)
    x, strength = inputs()
    cell, plain = Cell(), Cell()
    with choice.use("plain"), torch.no_grad(), rehearsal():
        found, expected = layer(cell), layer(plain, narrow=False)
        found(x, strength)
        expected(x, strength)
        assert cell.given == [*plain.given, 8, 4, 4, 2]  # compared
        assert torch.equal(found.solution.z, expected.solution.z)
        cell.given.clear()
        found(x, strength)
        assert cell.given == [*plain.given, 4, 2]


def test_what_will_be_recorded_is_compared_in_the_rehearsal(monkeypatch):
    """In a recording nothing is, and the steps before may have had no sample that left."""
    for module in (product, fused):
        monkeypatch.setattr(module, "recording", lambda device: True)

    class Mixing(Cell):
        def forward(self, z, x, strength):
            return super().forward(z, x + x.mean(0), strength)

    told = pytest.raises(narrowing.NarrowError, match="other values for 4 of 8 samples")
    with choice.use("plain"), torch.no_grad(), rehearsal(), told:
        layer(Mixing())(*inputs())


@cuda
def test_a_step_with_a_cell_that_mixes_samples_is_not_recorded():
    """All samples are done at once, so that no call before the recording compares."""

    class Mixing(Cell):
        def forward(self, z, x, strength):
            return super().forward(z, x + x.mean(0), strength)

    deq = layer(Mixing())
    step = gdeq.capture(lambda x, strength: deq(x, 0 * strength))
    with torch.no_grad():
        step(*inputs())
        step(*inputs())
        with pytest.raises(narrowing.NarrowError, match="other values"):
            step(*inputs())
    assert torch.cuda.get_sync_debug_mode() == 0


@cuda
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_graph_of_a_narrowed_solve(dtype):
    """Played with several inputs, among them such that leave stages out."""
    deq = layer(Cell().to(dtype), gdeq.Broyden(14, 1e-9 if dtype == F64 else 1e-2))
    whole = copy.deepcopy(deq)
    whole.narrow = False

    @gdeq.capture
    def step(x, strength):
        z = deq(x, strength)
        solution = deq.solution
        return z, solution.steps, solution.codes, solution.trace, solution.inverse.rmatvec(z)

    x, strength = (value.to(dtype) for value in inputs())
    with torch.no_grad():
        for scale in (1.0, 1.0, 1.0, 1.0, 0.01, 0.5, 1.0, 0.0, 1.0):
            found = step(x, scale * strength.roll(1))
            z = whole(x, scale * strength.roll(1))
            solution = whole.solution
            close = {"rtol": 1e-6, "atol": 1e-8} if dtype == F64 else {"rtol": 0.05, "atol": 0.05}
            torch.testing.assert_close(found[0], z, **close)
            if dtype == F64:
                assert found[1].tolist() == solution.steps.tolist()
                assert found[2].tolist() == solution.codes.tolist()
                torch.testing.assert_close(
                    found[4], solution.inverse.rmatvec(z), rtol=1e-3, atol=1e-5
                )
            assert found[3].isfinite().all()
    assert len(step.graph.parts) == 3
    assert len(step.graph.parts[1].stages) == 3
