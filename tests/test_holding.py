"""What holds still during a solve: dropout masks and normalised weights."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import remove_parametrizations

import gdeq
from cells import EXACT, F64, GRADIENTS, assert_same, data

SOLVER = gdeq.Broyden(max_iter=60, tol=1e-12)


# --- dropout -------------------------------------------------------------------------------------


class Dropped(nn.Module):
    """Records the mask of every evaluation."""

    def __init__(self, channelwise=False):
        super().__init__()
        self.drop = gdeq.VariationalDropout(0.5, channelwise)
        self.gain = nn.Parameter(torch.tensor(0.4, dtype=F64))
        self.masks = []

    def forward(self, z, x):
        self.masks.append(self.drop(torch.ones_like(z)).detach())
        return self.gain * self.drop(torch.tanh(z + x)) + x

    def took_one_mask(self):
        first = self.masks[0]
        return len(self.masks) > 3 and all(torch.equal(mask, first) for mask in self.masks)


def draws_anew(drop, device):
    x = torch.ones(4, 16, device=device)
    return not torch.equal(drop(x), drop(x))


@pytest.mark.parametrize("channelwise", [False, True])
def test_one_mask_per_solve_and_a_new_one_in_the_next(device, channelwise):
    deq = gdeq.DEQ(Dropped(channelwise).to(device), SOLVER)
    x, solves = data(device, 3, 8, 3, 2), []
    for _ in range(2):
        deq.cell.masks.clear()
        deq(x)
        assert deq.solution.converged.all()
        assert deq.cell.took_one_mask()
        solves.append(deq.cell.masks[0])
        assert set(solves[-1].flatten().tolist()) == {0.0, 2.0}
        whole = solves[-1].flatten(2)  # a channel is dropped as a whole, or not
        assert bool((whole == whole[:, :, :1]).all()) == channelwise
    assert not torch.equal(*solves)
    assert not torch.equal(solves[0][0], solves[0][1])  # samples have their own
    assert draws_anew(deq.cell.drop, device) or channelwise


@pytest.mark.parametrize("gradient", [EXACT, gdeq.GDEQ(refine=2), gdeq.JFB(), gdeq.Unrolled(3)])
def test_dropout_gradients_are_those_of_the_explicit_mask(device, gradient):
    deq = gdeq.DEQ(Dropped().to(device), SOLVER, gradient)
    x = data(device, 3, 8).requires_grad_()
    found = torch.autograd.grad(deq(x).square().sum(), [x, deq.cell.gain])
    mask, gain = deq.cell.masks[0], deq.cell.gain.detach().requires_grad_()
    explicit = gdeq.DEQ(lambda z, x: gain * (mask * torch.tanh(z + x)) + x, SOLVER, gradient)
    expected = torch.autograd.grad(explicit(x).square().sum(), [x, gain])
    assert_same(found, expected, rtol=1e-9, atol=1e-10)


def test_both_evaluations_of_implicit_see_the_same_mask(device):
    deq, x = gdeq.DEQ(Dropped().to(device), SOLVER, EXACT), data(device, 1, 4).requires_grad_()

    def slope(x):
        torch.manual_seed(11)
        return torch.autograd.grad(deq(x).square().sum(), x, create_graph=True)[0].square().sum()

    assert torch.autograd.gradcheck(slope, (x,))


def test_dropout_by_itself(device):
    x = torch.ones(1, 40000, dtype=F64, device=device)
    out = gdeq.VariationalDropout(0.3)(x)
    assert (out == 0).double().mean().item() == pytest.approx(0.3, abs=0.02)
    kept = out[out != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / 0.7), rtol=1e-6, atol=0)
    for same in (gdeq.VariationalDropout(0.0), gdeq.VariationalDropout(0.5).eval()):
        assert torch.equal(same(x), x)
    assert repr(gdeq.VariationalDropout(0.3)) == "VariationalDropout(p=0.3, channelwise=False)"
    with pytest.raises(ValueError, match=r"\(batch, channels, ...\)"):
        gdeq.VariationalDropout(0.5, channelwise=True)(torch.ones(5, device=device))


@pytest.mark.parametrize("p", [-0.1, 1.0, 2, "0.5", True, None])
def test_dropout_probability_is_checked(p):
    with pytest.raises((ValueError, TypeError), match=r"VariationalDropout.p must be"):
        gdeq.VariationalDropout(p)


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"shared": 1}, (3, 1, 5, 4)),
        ({"shared": (0, -1)}, (1, 8, 5, 1)),
        ({"channelwise": True, "shared": 0}, (1, 8, 1, 1)),
    ],
)
def test_masks_that_dimensions_share(device, options, shape):
    drop, ones = gdeq.VariationalDropout(0.5, **options), torch.ones(3, 8, 5, 4, device=device)
    out = drop(ones)
    index = tuple(slice(size) for size in shape)
    assert torch.equal(out, out[index].expand_as(out))
    assert 0 < (out[index] == 0).sum() < out[index].numel()
    assert "shared" in repr(drop)


def test_a_dimension_that_is_not_there():
    with pytest.raises(ValueError, match=r"shared=\(5,\)\) was given \(2, 3\), which has no dim"):
        gdeq.VariationalDropout(0.5, shared=5)(torch.ones(2, 3))


# --- hold ----------------------------------------------------------------------------------------


def test_hold_by_hand_around_fixed_point(device):
    cell, x = Dropped().to(device), data(device, 3, 8)
    with gdeq.hold(cell):
        found = gdeq.fixed_point(lambda z: cell(z, x), torch.zeros_like(x), SOLVER)
    assert found.converged.all()
    assert cell.took_one_mask()
    with gdeq.hold(lambda z: z):  # of a function there is nothing to hold
        pass


def test_dropout_in_a_function_is_held(device):
    drop, x, seen = gdeq.VariationalDropout(0.5), data(device, 3, 8), []

    def cell(z, x):
        seen.append(drop(torch.ones_like(z)))
        return 0.4 * drop(torch.tanh(z + x)) + x

    gdeq.DEQ(cell, SOLVER)(x)
    assert all(torch.equal(mask, seen[0]) for mask in seen)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_hold_that_was_opened_without_autograd(device, mode):
    """The normalised weight has gradients all the same, and the mask is the same."""
    cell = Normalised().to(device)
    cell.drop = gdeq.VariationalDropout(0.5)
    deq = gdeq.DEQ(lambda z, x: cell.drop(cell(z, x)), SOLVER, EXACT)
    x = data(device, 3, 4)
    with mode(), gdeq.hold(cell):
        before = cell.drop(torch.ones_like(x))
        cell(x, x)  # a weight without a graph
        with torch.enable_grad():
            deq(x).sum().backward()
        assert torch.equal(cell.drop(torch.ones_like(x)), before)
    for p in cell.inner.parametrizations.parameters():
        assert p.grad.abs().sum() > 0


def test_nested_holds_keep_one_value_until_the_outer_ends(device):
    drop, x = gdeq.VariationalDropout(0.5), torch.ones(4, 16, device=device)
    with gdeq.hold(drop):
        with gdeq.hold(drop):
            first = drop(x)
        assert torch.equal(drop(x), first)  # the end of the inner one does not renew it
        with gdeq.hold(drop):
            assert torch.equal(drop(x), first)
        same = copy.deepcopy(drop)  # copies made meanwhile are free
        assert draws_anew(same, device)
        with pytest.raises(RuntimeError, match="one module for each place"):
            drop(torch.ones(2, 4, device=device))
    assert draws_anew(drop, device)
    with pytest.raises(KeyError), gdeq.hold(drop), gdeq.hold(drop):
        raise KeyError
    assert draws_anew(drop, device)


def test_dropout_in_nested_layers_holds_for_the_outer_solve(device):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = gdeq.DEQ(Dropped(), SOLVER)

        def forward(self, z, x):
            return 0.3 * torch.tanh(self.inner(z)) + x

    deq = gdeq.DEQ(Outer().to(device), SOLVER, EXACT)
    deq(data(device, 2, 6)).sum().backward()
    assert deq.solution.converged.all()
    assert deq.cell.inner.cell.took_one_mask()
    assert deq.cell.inner.cell.gain.grad.abs() > 0


# --- weight normalisation ------------------------------------------------------------------------

LAYERS = {
    "linear": (lambda: nn.Linear(4, 3, dtype=F64), (2, 4), {}),
    "linear-dim-1": (lambda: nn.Linear(4, 3, dtype=F64), (2, 4), {"dim": 1}),
    "conv": (lambda: nn.Conv2d(2, 3, 3, dtype=F64), (2, 2, 5, 5), {}),
    "transposed": (lambda: nn.ConvTranspose2d(2, 3, 3, dtype=F64), (2, 2, 5, 5), {"dim": 1}),
}


def like_pytorch(device) -> dict[str, float]:
    """PyTorch's own fused kernel on CUDA sums norms in float32, even of float64 weights."""
    if device.type == "cuda":
        return {"rtol": 1e-6, "atol": 1e-7}
    return {"rtol": 1e-12, "atol": 1e-13}


@pytest.mark.parametrize(("make", "shape", "kwargs"), LAYERS.values(), ids=LAYERS)
def test_weight_norm_equals_pytorchs(device, make, shape, kwargs):
    ours, x = make().to(device), data(device, *shape)
    theirs, plain = copy.deepcopy(ours), ours(x)
    assert gdeq.weight_norm(ours, **kwargs) is ours
    parametrizations.weight_norm(theirs, **kwargs)
    torch.testing.assert_close(ours(x), plain, rtol=1e-12, atol=1e-13)  # the function it was
    with torch.no_grad():  # away from the start, where weight = v
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            step = torch.randn_like(p)
            p.add_(step)
            q.add_(step)
    torch.testing.assert_close(ours(x), theirs(x), **like_pytorch(device))
    ours(x).square().sum().backward()
    theirs(x).square().sum().backward()
    named = dict(theirs.named_parameters())
    assert [name for name, _ in ours.named_parameters()] == list(named)
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, named[name].grad, **like_pytorch(device))


class Normalised(nn.Module):
    def __init__(self, normalise=gdeq.weight_norm):
        super().__init__()
        self.inner = normalise(nn.Linear(4, 4, dtype=F64))
        with torch.no_grad():
            self.inner.parametrizations.weight.original0.mul_(0.5)
        self.weights = []

    @property
    def g(self):
        return self.inner.parametrizations.weight.original0

    def forward(self, z, x):
        self.weights.append(self.inner.weight)
        return torch.tanh(self.inner(z) + x)


def test_the_weight_is_computed_once_per_solve_and_follows_the_optimiser(device):
    deq = gdeq.DEQ(Normalised().to(device), SOLVER, EXACT)
    weights, x, firsts = deq.cell.weights, data(device, 3, 4), []
    optimiser = torch.optim.SGD(deq.parameters(), lr=0.1)
    for _ in range(2):
        weights.clear()
        z = deq(x)
        z.sum().backward()
        assert len(weights) > 4
        assert all(weight is weights[0] for weight in weights)
        assert not weights[0].is_leaf  # though the first evaluation ran without autograd
        firsts.append((weights[0], z.detach()))
        optimiser.step()
    assert firsts[0][0] is not firsts[1][0]
    assert not torch.allclose(firsts[0][1], firsts[1][1])
    assert deq.cell.inner.weight is not deq.cell.inner.weight  # outside, every time


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weight_norm_without_autograd(device, mode):
    deq, x = gdeq.DEQ(Normalised().to(device), SOLVER), data(device, 3, 4)
    expected = deq(x)
    with mode():
        z = deq(x)
        assert not deq.cell(z, x).requires_grad
    assert not z.requires_grad
    torch.testing.assert_close(z, expected, rtol=1e-12, atol=1e-13)
    deq(x).sum().backward()
    assert deq.cell.g.grad.abs().sum() > 0


@pytest.mark.parametrize("when", ["new", "forward", "backward"])
def test_weight_norm_survives_deepcopy(device, when):
    deq, x = gdeq.DEQ(Normalised().to(device), SOLVER, GRADIENTS["GDEQ"]), data(device, 3, 4)
    if when != "new":
        z = deq(x)
    if when == "backward":
        z.sum().backward()
    deq.cell.weights.clear()  # recorded by the test, and not leaves
    same = copy.deepcopy(deq)
    assert torch.equal(same(x), deq(x))
    with torch.no_grad():
        same.cell.g.mul_(0.1)
    assert not torch.allclose(same(x), deq(x))
    same(x).sum().backward()
    assert same.cell.g.grad.abs().sum() > 0


@pytest.mark.parametrize("to", ["ours", "theirs"])
def test_state_dicts_are_exchanged_with_pytorchs(device, to):
    ours, theirs = Normalised().to(device), Normalised(parametrizations.weight_norm).to(device)
    source, target = (theirs, ours) if to == "ours" else (ours, theirs)
    z, x = data(device, 2, 4), data(device, 2, 4)
    assert not torch.allclose(source(z, x), target(z, x))
    target.load_state_dict(source.state_dict())
    torch.testing.assert_close(target(z, x), source(z, x), **like_pytorch(device))


def test_weight_norm_can_be_removed_and_have_another_name(device):
    cell, x = Normalised().to(device), data(device, 3, 4)
    deq = gdeq.DEQ(cell, SOLVER)
    expected = deq(x)
    remove_parametrizations(cell.inner, "weight")
    assert set(dict(cell.named_parameters())) == {"inner.weight", "inner.bias"}
    torch.testing.assert_close(deq(x), expected, rtol=1e-10, atol=1e-11)
    rnn = gdeq.weight_norm(nn.RNNCell(3, 4, dtype=F64), name="weight_hh")
    assert "parametrizations.weight_hh.original0" in dict(rnn.named_parameters())


def test_weight_norm_of_what_is_not_there_names_what_is():
    for name in ("wieght", "in_features"):
        with pytest.raises(ValueError, match=f"Linear has no tensor '{name}'"):
            gdeq.weight_norm(nn.Linear(2, 2), name=name)
    cell = nn.Module()
    cell.inner = nn.Linear(2, 2)
    cell.blocks = nn.Sequential(nn.Tanh(), nn.Conv1d(2, 2, 1))
    with pytest.raises(ValueError, match="Module has no tensor 'weight'") as error:
        gdeq.weight_norm(cell)
    assert str(error.value).endswith(
        "module.inner, module.blocks[1], or use gdeq.apply_norm(module) for all"
    )
    with pytest.raises(ValueError, match=r"to normalise$"):
        gdeq.weight_norm(nn.Tanh())


def test_a_weight_is_normalised_once():
    linear = gdeq.weight_norm(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"Linear.weight is normalised .* gdeq.remove_norm"):
        gdeq.weight_norm(linear)
    gdeq.remove_norm(linear)
    gdeq.weight_norm(linear)


@pytest.mark.parametrize("bound", [0, -1.0, float("nan"), float("inf"), True, "1"])
def test_a_bound_that_is_none(bound):
    with pytest.raises(ValueError, match="bound of a spectral norm must be above 0"):
        gdeq.spectral_norm(nn.Linear(2, 2), bound=bound)


TAKES_A_MODULE = [gdeq.steady, gdeq.apply_norm, gdeq.remove_norm, gdeq.weight_norm]


@pytest.mark.parametrize("call", [*TAKES_A_MODULE, gdeq.spectral_norm, gdeq.fixed_steps])
def test_what_is_no_module(call):
    with pytest.raises(TypeError, match=r"takes a module, got .*; of a function, give it the mod"):
        call(lambda z, x: z)


# --- whole modules --------------------------------------------------------------------------------


def block():
    return nn.Sequential(
        nn.Conv1d(4, 4, 1), nn.Tanh(), nn.Sequential(nn.Linear(6, 6)), nn.LayerNorm(6)
    )


@pytest.mark.parametrize("norm", [gdeq.weight_norm, gdeq.spectral_norm])
def test_norms_of_a_module_are_applied_and_removed(norm):
    module, x = block(), torch.randn(2, 4, 6)
    names = set(module.state_dict())
    plain = module(x)
    assert gdeq.apply_norm(module, norm, lambda path, layer: path != "0") == ["2.0"]
    assert gdeq.apply_norm(module, norm) == ["0"]
    module.eval()
    normalised = module(x)
    if norm is gdeq.weight_norm:
        torch.testing.assert_close(normalised, plain)
    assert gdeq.remove_norm(module, lambda path, layer: path == "0") == ["0.weight"]
    assert gdeq.remove_norm(module) == ["2.0.weight"]
    assert set(module.state_dict()) == names
    torch.testing.assert_close(module(x), normalised)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_is_normalised_already_stays_so():
    cell = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    nn.utils.weight_norm(cell[0])  # PyTorch's older form
    parametrizations.weight_norm(cell[1])
    parametrizations.weight_norm(cell[2], "bias")
    assert gdeq.apply_norm(cell) == ["2", "3"]


def test_spectral_norm_holds_still_and_bounds_the_weight(device):
    cell = Normalised(lambda layer: gdeq.spectral_norm(gdeq.weight_norm(layer), bound=0.6))
    linear = gdeq.spectral_norm(nn.Linear(4, 4, dtype=F64), bound=0.6).to(device)
    cell.inner = linear
    with torch.no_grad():
        linear.parametrizations.weight.original.mul_(5.0).add_(torch.randn(4, 4, device=device))
    deq, x = gdeq.DEQ(cell.to(device), SOLVER, EXACT), data(device, 3, 4).requires_grad_()
    vectors = linear.parametrizations.weight[0]
    for _ in range(60):
        before = vectors._u.clone()
        cell.weights.clear()
        z = deq(x)
        assert all(weight is cell.weights[0] for weight in cell.weights)
    assert not torch.equal(before, vectors._u) or torch.allclose(before, vectors._u)
    torch.testing.assert_close(torch.linalg.matrix_norm(cell.weights[0], 2).item(), 0.6)
    assert deq.solution.converged.all()
    found = torch.autograd.grad(z.square().sum(), [x, linear.parametrizations.weight.original])
    raw = linear.parametrizations.weight.original.detach().requires_grad_()
    u, v = vectors._u.clone(), vectors._v.clone()

    def explicit(z, x):
        weight = 0.6 * raw / torch.vdot(u, torch.mv(raw, v))
        return torch.tanh(z @ weight.T + linear.bias + x)

    out = gdeq.DEQ(explicit, SOLVER, EXACT)(x)
    assert_same(found, torch.autograd.grad(out.square().sum(), [x, raw]), rtol=1e-9, atol=1e-10)


def test_spectral_norm_has_pytorchs_state_dict():
    ours, theirs = (
        gdeq.spectral_norm(nn.Linear(4, 4)),
        parametrizations.spectral_norm(nn.Linear(4, 4)),
    )
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours.eval().weight, theirs.eval().weight)
    assert torch.equal(copy.deepcopy(ours).weight, ours.weight)


class Unsteady(nn.Module):
    def __init__(self):
        super().__init__()
        self.drops = nn.ModuleList([nn.Dropout(0.2), nn.Dropout2d(0.3), nn.Dropout(0.2).eval()])
        self.norm = nn.BatchNorm2d(16)
        self.old = nn.utils.spectral_norm(nn.Conv2d(16, 16, 1))
        self.new = parametrizations.spectral_norm(nn.Conv2d(16, 16, 1))

    def forward(self, z, x):
        for part in (*self.drops, self.old, self.new, self.norm):
            z = part(z)
        return torch.tanh(0.3 * z + x)


def test_steady_replaces_what_changes(device):
    cell = Unsteady()
    cell.norm.weight.data.uniform_(0.5, 1.5)
    weight = cell.norm.weight
    done = gdeq.steady(cell)
    for line in (
        "drops.0: Dropout(p=0.2, inplace=False) became "
        "VariationalDropout(p=0.2, channelwise=False)",
        "drops.1: Dropout2d(p=0.3, inplace=False) became "
        "VariationalDropout(p=0.3, channelwise=True)",
        "old.weight: spectral norm, computed once per solve",
        "new.weight: parametrized, computed once per solve",
    ):
        assert line in done
    assert any("norm: BatchNorm2d" in line and "became GroupNorm(2, 16" in line for line in done)
    assert cell.norm.weight is weight
    assert not cell.drops[2].training
    assert len(done) == 6
    x = torch.randn(3, 16, 5, 5, device=device)
    deq = gdeq.DEQ(cell.to(device), gdeq.Broyden(max_iter=40, tol=1e-5))
    deq(x)  # without a warning
    assert deq.solution.converged.all()
    assert gdeq.steady(cell) == []


def test_steady_replaces_a_part_that_is_used_twice():
    dropout, norm = nn.Dropout(0.5), nn.BatchNorm1d(4)
    cell = nn.Sequential(dropout, norm, nn.Sequential(dropout, norm), nn.Linear(4, 4), dropout)
    assert len(gdeq.steady(cell)) == 5
    assert gdeq.steady(cell) == []
    assert cell[0] is not cell[4]  # each place has a mask of its own
    assert cell[1].weight is cell[2][1].weight


def test_steady_says_what_it_cannot_replace():
    cell = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1)
    done = gdeq.steady(cell)
    assert done[-1].startswith("left MultiheadAttention (self_attn) draws")
    assert done[-1].endswith("set its attribute dropout to 0")
    assert len(done) == 4
    block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1).eval()
    assert any(line.startswith("left MultiheadAttention") for line in gdeq.steady(block))
    assert gdeq.steady(nn.Sequential(nn.Dropout(1.0))) == []  # always 0


def test_a_weight_is_held_for_the_parameters_it_is_made_of():
    layer = gdeq.weight_norm(nn.Linear(3, 3))
    one = {name: p.detach() for name, p in layer.named_parameters()}
    two = {name: 3 * p + 1 for name, p in one.items()}
    x = torch.randn(2, 3)
    alone = [torch.func.functional_call(layer, p, (x,)) for p in (one, two)]
    with gdeq.hold(layer):
        together = [torch.func.functional_call(layer, p, (x,)) for p in (one, two)]
    torch.testing.assert_close(together, alone)
