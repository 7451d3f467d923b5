"""States: many tensors as one batched vector, and what is said about those that cannot be."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gdeq
from cells import every_gradient, every_solver
from gdeq.state import StateMap, StateSpace


class Pair(NamedTuple):
    coarse: Tensor
    fine: Tensor


def tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def nested() -> dict:
    return {
        "b": (tensor(3, 2, 4, seed=1), [tensor(3, seed=2), tensor(3, 1, seed=3)]),
        "a": Pair(tensor(3, 5, seed=4), {"x": tensor(3, 0, 2, seed=5)}),
    }


# --- there and back -------------------------------------------------------------------------------


def test_round_trip():
    z = nested()
    space = StateSpace(z)
    flat = space.pack(z)
    assert flat.shape == (3, 8 + 1 + 1 + 5 + 0)
    back = space.unpack(flat)
    assert list(back) == ["b", "a"]
    assert [type(part) for part in (back["b"], back["b"][1], back["a"])] == [tuple, list, Pair]
    assert type(back["a"].fine) is dict
    torch.testing.assert_close(back, z, rtol=0, atol=0)
    for i in range(3):  # each sample is one row
        expected = torch.cat([z["b"][0][i].flatten(), z["b"][1][0][i : i + 1], z["b"][1][1][i]])
        assert torch.equal(flat[i, :10], expected)


def test_a_single_tensor_needs_no_nesting_and_strides_do_not_matter():
    z = tensor(4, 3, 2).transpose(1, 2)
    space = StateSpace(z)
    assert torch.equal(space.pack(z), z.reshape(4, 6))
    assert torch.equal(space.unpack(space.pack(z)), z)


def test_images_in_channels_last_memory_stay_so():
    z0 = tensor(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    seen = []

    def f(z):
        seen.append(z.is_contiguous(memory_format=torch.channels_last))
        return torch.cos(z)

    found = gdeq.solve(f, z0, gdeq.Broyden(tol=1e-10))
    assert all(seen)
    expected = gdeq.solve(torch.cos, z0.contiguous(), gdeq.Broyden(tol=1e-10)).z
    torch.testing.assert_close(found.z, expected)
    flat, weight = StateSpace(z0).pack(z0), torch.rand(2, dtype=torch.float64)
    assert torch.equal(StateSpace(z0).join([z0], factor=weight), flat * weight[:, None])


@pytest.mark.parametrize(
    ("dtypes", "algebra"),
    [
        ([torch.float16], torch.float32),
        ([torch.bfloat16], torch.float32),
        ([torch.float32], torch.float32),
        ([torch.float64], torch.float64),
        ([torch.float16, torch.bfloat16], torch.float32),
        ([torch.bfloat16, torch.float64], torch.float64),
    ],
    ids=str,
)
def test_the_algebra_is_in_float32_or_better_and_f_sees_its_own_dtypes(dtypes, algebra):
    z0 = [tensor(2, 3, seed=i, dtype=dtype) for i, dtype in enumerate(dtypes)]
    seen = []

    def f(z: list[Tensor]) -> list[Tensor]:
        seen.append([leaf.dtype for leaf in z])
        return [torch.cos(leaf) for leaf in z]

    solution = gdeq.solve(f, z0, gdeq.Broyden(tol=1e-2))
    assert solution.converged.all()
    assert seen == [dtypes] * solution.evals
    assert [leaf.dtype for leaf in solution.z] == dtypes
    assert solution.residual.dtype == solution.inverse.as_matrix().dtype == algebra
    assert StateMap(StateSpace(z0), f).precision == max(torch.finfo(dtype).eps for dtype in dtypes)


def test_half_precision_steps_do_not_lose_what_half_precision_cannot_hold():
    """z is kept in float32 between the calls: a small damping still moves it."""
    solver = gdeq.Picard(max_iter=1000, tol=0.0, damping=4e-3)
    z0 = torch.full((1, 1), 1024.0, dtype=torch.float16)
    solution = gdeq.solve(lambda z: torch.full_like(z, 1100.0), z0, solver)
    # In float16 the spacing above 1024 is 1, so steps below a half would be lost from the start.
    assert solution.z.item() == pytest.approx(1100 - 76 * 0.996**1000, abs=1)


def test_where_float16_cannot_hold_z_f_is_not_a_number():
    space = StateSpace([torch.zeros(2, 1, dtype=torch.float16), torch.zeros(2, 1)])
    f = StateMap(space, lambda z: [part.clamp(-1, 1) for part in z])
    flat = torch.tensor([[7e4, 0.0], [1.0, 7e4]])
    assert f.inside(flat).tolist() == [[False], [True]]
    assert f(flat).isnan().tolist() == [[True, True], [False, False]]


# --- solving nested states ------------------------------------------------------------------------


LOOSE = {
    "keys in another order": (
        {"a": tensor(2, 3, seed=1), "b": (tensor(2, 3, seed=2),)},
        lambda z: {"b": (0 * z["b"][0] + 2,), "a": torch.cos(z["a"])},
    ),
    "deep inside": (
        [({"p": tensor(2, 1, seed=1), "q": tensor(2, 1, seed=2)},)],
        lambda z: [({"q": 0 * z[0][0]["q"] + 5, "p": 0 * z[0][0]["p"] + 3},)],
    ),
    "a list for a tuple, a tuple for a named one": (
        Pair(tensor(2, 3, seed=1), (tensor(2, seed=2),)),
        lambda z: (torch.cos(z.coarse), [torch.sin(1 + z.fine[0])]),
    ),
    "an ordered dict": (
        OrderedDict(b=tensor(2, 3, seed=1), a=tensor(2, 2, seed=2)),
        lambda z: {key: torch.cos(z[key] + (key == "a")) for key in ("a", "b")},
    ),
}


@pytest.mark.parametrize(("z0", "f"), LOOSE.values(), ids=LOOSE)
@pytest.mark.parametrize("call", [gdeq.solve, gdeq.fixed_point])
def test_tensors_are_told_by_where_they_stand(call, z0, f):
    solution = call(f, z0, gdeq.Broyden(tol=1e-12))
    assert solution.converged.all()
    assert type(solution.z) is type(z0)
    if isinstance(z0, dict):
        assert list(solution.z) == list(z0)
    out = f(solution.z)
    for key in z0 if isinstance(z0, dict) else range(len(z0)):
        found, expected = solution.z[key], out[key]
        if isinstance(found, tuple):
            assert isinstance(z0[key], tuple)
            found, expected = found[0], expected[0]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


# --- nothing to solve -----------------------------------------------------------------------------


def assert_is_nothing(solution, shape):
    batch = shape[0]
    assert solution.z.shape == shape
    for name in ("converged", "residual", "steps", "status"):
        assert len(getattr(solution, name)) == batch, name
    assert solution.trace.shape[1] == batch
    assert solution.residual.tolist() == [0.0] * batch
    assert (str(solution) == "an empty batch; nothing to solve") == (batch == 0)


SHAPES = pytest.mark.parametrize("shape", [(0, 3), (0,), (0, 2, 0), (3, 0), (3, 2, 0, 4)], ids=str)


@every_solver
@pytest.mark.parametrize("tol", [1e-6, 0.0])
@SHAPES
def test_solving_for_nothing(solver, tol, shape, device):
    solver = type(solver)(max_iter=4, tol=tol)
    solution = gdeq.solve(torch.cos, torch.zeros(shape, device=device), solver)
    assert_is_nothing(solution, shape)
    if tol > 0:
        assert solution.converged.all()  # the only fixed point there is has been found


@every_gradient
@SHAPES
def test_gradients_of_nothing(gradient, shape, device):
    w = torch.tensor(0.5, device=device, requires_grad=True)
    deq = gdeq.DEQ(lambda z, x: torch.cos(w * z), gradient=gradient)
    z = deq(torch.zeros(shape, device=device))
    assert_is_nothing(deq.solution, shape)
    z.sum().backward()
    assert w.grad == 0
    str(deq.solution.backward)


# --- bad states -----------------------------------------------------------------------------------


def through_layer(f, z0):
    return gdeq.DEQ(lambda z, x: f(z))(None, z0=z0)


every_entry = pytest.mark.parametrize("call", [gdeq.solve, gdeq.fixed_point, through_layer])
MUST = "must be a tensor or a tuple, list or dict of tensors"
X = torch.zeros(2, 3)

BAD_STATES = {
    "no batch": (torch.tensor(1.0), ["z0 has no batch dimension", "(batch, ...)", "z0.unsqueeze"]),
    "a part without": ({"a": X, "b": torch.tensor(1.0)}, ["z0['b'] has no batch dimension"]),
    "batch sizes": (
        (X, {"deep": torch.zeros(4, 3)}),
        ["batch sizes differ: z0[0] has 2 samples, z0[1]['deep'] has 4", "the first dimension"],
    ),
    "one sample": ((X[:1], X), ["z0[0] has 1 sample, z0[1] has 2"]),
    "devices": ((X, X.to("meta")), ["z0[0] is on cpu but z0[1] is on meta", "one device"]),
    "no tensors": ((), ["z0 holds no tensor"]),
    "empty nest": ({"a": [], "b": ()}, ["z0 holds no tensor"]),
}
BAD_TYPES = {
    "integer": (X.long(), ["z0 has dtype torch.int64", "floating point", "z0.float()"]),
    "boolean": (X.bool(), ["z0 has dtype torch.bool", "floating point"]),
    "eight bits": (X.to(torch.float8_e4m3fn), ["z0 has dtype torch.float8_e4m3fn", "z0.float()"]),
    "nested": (
        torch.nested.nested_tensor([X, X[:1]], layout=torch.jagged),
        ["z0 is a nested tensor", "samples of one shape"],
    ),
    "sparse": (X.to_sparse(), ["z0 is sparse", "z0.to_dense()"]),
    "complex": (X + 0j, ["z0 has dtype torch.complex64", "view_as_real"]),
    "a part": ([X, X.int()], ["z0[1] has dtype torch.int32"]),
    "none": (None, [f"z0 {MUST}, got NoneType"]),
    "none inside": ({"a": X, "b": (None,)}, [f"z0['b'][0] {MUST}, got NoneType"]),
    "number": (1.0, [f"z0 {MUST}, got float"]),
    "text": ("zeros", ["got str"]),
    "list of numbers": ([[0.0, 1.0]], ["z0[0][0] must be a tensor", "got float"]),
    "set": ({1, 2}, ["got set"]),
    "module": (nn.Linear(2, 2), ["got Linear"]),
    "function": (torch.cos, ["z0 must be a tensor", "got builtin_function"]),
    "array": (np.zeros((2, 3)), ["z0 must be a tensor", "got ndarray"]),
}


@every_entry
@pytest.mark.parametrize("name", [*BAD_STATES, *BAD_TYPES])
def test_bad_z0(call, name):
    if call is through_layer and name == "none":
        return  # that is how a layer is asked for its own
    z0, words = BAD_STATES.get(name) or BAD_TYPES[name]
    calls = []
    kind = TypeError if name in BAD_TYPES else ValueError
    with pytest.raises(kind) as error:
        call(lambda z: calls.append(1) or z, z0)
    assert isinstance(error.value, gdeq.StateError)  # one class to catch them all
    for word in words:
        assert word in str(error.value)
    assert not calls  # noticed before f runs


@pytest.mark.parametrize("call", [gdeq.solve, gdeq.fixed_point, gdeq.spectral_radius])
def test_what_is_no_function(call):
    with pytest.raises(TypeError, match="f must be callable, a function of the state, got 3"):
        call(3, X)


# --- what f must not do ---------------------------------------------------------------------------

KEEP, CAST = "f must keep the shape of z", "(cast inside f, or give z0 in the dtype f works in)"
BAD_MAPS = {
    "shape": (lambda z: z[:, :2], ["f(z) has shape (2, 2), but the state there has (2, 3)", KEEP]),
    "batch": (lambda z: z[:1], ["f(z) has shape (1, 3)", KEEP]),
    "dimension": (lambda z: z.unsqueeze(1), ["f(z) has shape (2, 1, 3)", KEEP]),
    "transposed": (lambda z: z.T, ["f(z) has shape (3, 2)", KEEP]),
    "scalar": (lambda z: z.sum(), ["f(z) has shape ()", KEEP]),
    "wider": (lambda z: z.double(), ["f(z) has dtype torch.float64", "has torch.float32", CAST]),
    "narrower": (lambda z: z.bfloat16(), ["dtype torch.bfloat16", "has torch.float32", CAST]),
    "integer": (lambda z: z.long(), ["f(z) has dtype torch.int64"]),
    "boolean": (lambda z: z > 0, ["f(z) has dtype torch.bool"]),
    "complex": (lambda z: z + 0j, ["f(z) has dtype torch.complex64"]),
    "device": (lambda z: z.to("meta"), ["f(z) is on meta, but the state is on cpu"]),
    "tuple": (
        lambda z: (z,),
        ["f(z) has the structure (tensor,), but z0 has tensor", "f must return what it was given"],
    ),
    "dict": (lambda z: {"z": z}, ["f(z) has the structure {'z': tensor}", "in the same nesting"]),
    "nothing": (lambda z: None, [f"f(z) {MUST}, got NoneType"]),
    "number": (lambda z: 1.0, [f"f(z) {MUST}, got float"]),
    "numbers": (lambda z: z.tolist(), ["f(z)[0][0] must be a tensor", "got float"]),
    "in place": (lambda z: z.mul_(0.5), ["f changed its argument z in place", "nn.ReLU(inplace="]),
}
STRUCTURE = "but z0 has {'a': tensor, 'b': [tensor]}"
BAD_PARTS = {
    "alone": (lambda z: z["a"], ["f(z) has the structure tensor, " + STRUCTURE]),
    "list": (lambda z: [z["a"], z["b"]], ["structure [tensor, [tensor]]", STRUCTURE]),
    "missing": (lambda z: {"a": z["a"]}, ["{'a': tensor}", STRUCTURE]),
    "extra": (lambda z: {**z, "c": z["a"]}, ["'b': [tensor], 'c': tensor}", STRUCTURE]),
    "renamed": (lambda z: {"a": z["a"], "B": z["b"]}, ["{'a': tensor, 'B': [tensor]}"]),
    "nested": (lambda z: {"a": (z["a"],), "b": z["b"]}, ["{'a': (tensor,), 'b': [tensor]}"]),
    "short": (lambda z: {"a": z["a"], "b": []}, ["{'a': tensor, 'b': []}"]),
    "shape": (lambda z: {**z, "b": [z["b"][0][:, :1]]}, ["f(z)['b'][0] has shape (2, 1)"]),
    "dtype": (lambda z: {**z, "a": z["a"].double()}, ["f(z)['a'] has dtype torch.float64"]),
    "none": (lambda z: {"a": z["a"], "b": [None]}, ["f(z)['b'][0] must be", "NoneType"]),
    "in place": (lambda z: [z["b"][0].add_(1)] and z, ["f changed its argument z in place"]),
}
CASES = [(X, *row) for row in BAD_MAPS.values()]
CASES += [({"a": X, "b": [torch.zeros(2, 4)]}, *row) for row in BAD_PARTS.values()]


@every_entry
@pytest.mark.parametrize(
    ("z0", "f", "words"), CASES, ids=[*BAD_MAPS, *map("part-{}".format, BAD_PARTS)]
)
def test_f_returns_the_wrong_thing(call, z0, f, words):
    with pytest.raises(gdeq.StateError) as error:
        call(f, z0)
    for word in words:
        assert word in str(error.value)


@every_gradient
def test_f_goes_wrong_in_its_evaluation_with_autograd(gradient, device):
    def f(z):
        return z[:, :1] if torch.is_grad_enabled() else 0.5 * z + 1

    with pytest.raises(gdeq.StateError, match=r"f\(z\) has shape \(3, 1\)"):
        gdeq.fixed_point(f, torch.zeros(3, 4, device=device), gradient=gradient)
    assert torch.is_grad_enabled()


class MyError(Exception):
    pass


@every_solver
@pytest.mark.parametrize("at", [1, 3])
def test_what_f_raises_arrives_unchanged(solver, at):
    raised, calls = MyError("mine"), []

    def f(z: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == at:
            raise raised
        return torch.cos(z)

    for call in (gdeq.solve, gdeq.DEQ(lambda z, x: f(z), solver)):
        calls.clear()
        with pytest.raises(MyError) as caught:
            call(*((f, X, solver) if call is gdeq.solve else (X,)))
        assert caught.value is raised
        assert caught.value.__cause__ is None
        assert len(calls) == at
        assert torch.is_grad_enabled()


def test_autocast_is_as_before_after_an_error(device):
    with torch.autocast(device.type, dtype=torch.bfloat16):
        with pytest.raises(ZeroDivisionError):
            gdeq.fixed_point(lambda z: 1 / 0, torch.zeros(2, 3, device=device))
        assert torch.is_autocast_enabled(device.type)
    assert not torch.is_autocast_enabled(device.type)


def test_under_autocast_f_may_return_half_precision_and_nothing_else():
    with torch.autocast("cpu", torch.bfloat16):
        for given, computes_in in ((X, torch.bfloat16), (X.double(), torch.float64)):
            found = StateMap(StateSpace(given), torch.cos).precision
            assert found == torch.finfo(computes_in).eps
        with pytest.raises(gdeq.StateError, match=r"f\(z\) has dtype torch.int64"):
            gdeq.solve(lambda z: z.long(), X)


@pytest.mark.parametrize("kind", [dict, OrderedDict, type("Mine", (dict,), {})])
def test_dicts_of_all_kinds(kind):
    found = gdeq.solve(
        lambda z: kind(b=0.5 * z["a"], a=0.25 * z["b"] + 1),
        kind(a=torch.zeros(2, 3), b=torch.zeros(2, 3)),
    )
    assert found.converged.all()
    torch.testing.assert_close(found.z["a"], torch.full((2, 3), 8 / 7))


@dataclass
class Fields:
    coarse: Tensor
    fine: Tensor


def test_dataclasses_are_states_once_they_are_registered():
    z0 = Fields(tensor(2, 3), tensor(2, 4))

    def f(z):
        return Fields(torch.cos(z.coarse), 0.5 * torch.cos(z.fine))

    with pytest.raises(TypeError, match=r"register_dataclass\(Fields\)"):
        gdeq.solve(f, z0)
    torch.export.register_dataclass(Fields)
    for gradient in (gdeq.GDEQ(refine=1), gdeq.Implicit()):
        solution = gdeq.fixed_point(f, z0, gradient=gradient)
        assert type(solution.z) is Fields
        assert solution.converged.all()
