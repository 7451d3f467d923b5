"""States: many tensors as one batched vector, and what is said about those that cannot be."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import gdeq
from gdeq.state import StateSpace

SOLVERS = [gdeq.Broyden(), gdeq.Anderson(), gdeq.Picard()]
by_name = pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)


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
    assert type(back["b"]) is tuple
    assert type(back["b"][1]) is list
    assert type(back["a"]) is Pair
    assert type(back["a"].fine) is dict
    assert torch.equal(back["b"][0], z["b"][0])
    assert torch.equal(back["b"][1][0], z["b"][1][0])
    assert torch.equal(back["b"][1][1], z["b"][1][1])
    assert torch.equal(back["a"].coarse, z["a"].coarse)
    assert back["a"].fine["x"].shape == (3, 0, 2)


def test_each_sample_is_one_row():
    z = (tensor(3, 2, 2, seed=1), tensor(3, 2, seed=2))
    flat = StateSpace(z).pack(z)
    for i in range(3):
        assert torch.equal(flat[i], torch.cat([z[0][i].flatten(), z[1][i]]))


def test_a_single_tensor_needs_no_nesting_and_strides_do_not_matter():
    z = tensor(4, 3, 2).transpose(1, 2)
    space = StateSpace(z)
    assert torch.equal(space.pack(z), z.reshape(4, 6))
    assert torch.equal(space.unpack(space.pack(z)), z)


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
    assert solution.residual.dtype == algebra
    assert solution.inverse.as_matrix().dtype == algebra


def test_half_precision_steps_do_not_lose_what_half_precision_cannot_hold():
    """z is kept in float32 between the calls: a small damping still moves it."""
    z0 = torch.zeros(1, 1, dtype=torch.float16)
    solver = gdeq.Picard(max_iter=4000, tol=0.0, damping=1e-3)
    solution = gdeq.solve(lambda z: torch.full_like(z, 2048.0), z0, solver)
    # In float16 the spacing above 1024 is 1, so steps below a half would be lost from there on.
    assert solution.z.item() == pytest.approx(2048 * (1 - 0.999**4000), rel=1e-3)


# --- solving nested states ------------------------------------------------------------------------


@by_name
def test_structures_come_back_as_they_went_in(solver):
    z0 = nested()

    def f(z: dict) -> dict:
        (b0, (b1, b2)), a = z["b"], z["a"]
        coupled = b1 + 0.1 * b0.mean((1, 2)) + 0.1 * a.coarse.mean(1)
        return {
            "b": (torch.cos(b0 + b2.unsqueeze(2)), [torch.sin(coupled), 0.5 * torch.cos(b2)]),
            "a": Pair(torch.cos(a.coarse), {"x": a.fine["x"]}),
        }

    solution = gdeq.solve(f, z0, type(solver)(max_iter=400, tol=1e-10))
    assert solution.converged.all(), str(solution)
    z = solution.z
    assert type(z["b"]) is tuple
    assert type(z["b"][1]) is list
    assert type(z["a"]) is Pair
    out = f(z)
    torch.testing.assert_close(z["b"][0], out["b"][0], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(z["b"][1], out["b"][1], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(z["a"].coarse, out["a"].coarse, rtol=1e-8, atol=1e-8)


def test_f_may_return_the_keys_in_another_order():
    z0 = {"a": tensor(2, 3, seed=1), "b": tensor(2, 3, seed=2)}

    def f(z: dict) -> dict:
        return {"b": torch.full_like(z["b"], 2.0), "a": torch.cos(z["a"])}

    solution = gdeq.solve(f, z0, gdeq.Broyden(tol=1e-12))
    assert list(solution.z) == ["a", "b"]
    torch.testing.assert_close(solution.z["b"], torch.full((2, 3), 2.0).double())
    torch.testing.assert_close(solution.z["a"], torch.full((2, 3), 0.7390851332151607).double())


def test_keys_in_another_order_inside_other_containers():
    z0 = [({"p": tensor(2, 1, seed=1), "q": tensor(2, 1, seed=2)},)]
    f = lambda z: [({"q": 0 * z[0][0]["q"] + 5, "p": 0 * z[0][0]["p"] + 3},)]  # noqa: E731
    (inner,) = gdeq.solve(f, z0).z[0]
    assert inner["p"].tolist() == [[3.0], [3.0]]
    assert inner["q"].tolist() == [[5.0], [5.0]]


def test_f_may_return_a_list_for_a_tuple_and_a_tuple_for_a_namedtuple():
    z0 = Pair(tensor(2, 3, seed=1), (tensor(2, seed=2),))
    solution = gdeq.solve(lambda z: (torch.cos(z.coarse), [torch.cos(z.fine[0])]), z0)
    assert type(solution.z) is Pair
    assert type(solution.z.fine) is tuple
    assert solution.converged.all()


def test_an_ordered_dict_is_a_dict():
    z0 = OrderedDict(b=tensor(2, 3, seed=1), a=tensor(2, 2, seed=2))
    solution = gdeq.solve(lambda z: {key: torch.cos(z[key]) for key in ("a", "b")}, z0)
    assert list(solution.z) == ["b", "a"]
    assert solution.converged.all()


def test_the_inverse_takes_and_returns_the_states_structure():
    z0 = {"a": tensor(2, 3, seed=1), "b": (tensor(2, 2, 2, seed=2),)}
    f = lambda z: {"a": torch.cos(z["a"]), "b": (torch.sin(z["b"][0] + 1),)}  # noqa: E731
    inverse = gdeq.solve(f, z0).inverse
    v = {"a": tensor(2, 3, seed=3), "b": (tensor(2, 2, 2, seed=4),)}
    flat = torch.cat([v["a"], v["b"][0].reshape(2, 4)], 1)
    for name, matrix in [
        ("matvec", inverse.as_matrix()),
        ("rmatvec", inverse.as_matrix().transpose(1, 2)),
    ]:
        expected = (matrix @ flat.unsqueeze(2)).squeeze(2)
        out = getattr(inverse, name)(v)
        assert list(out) == ["a", "b"]
        torch.testing.assert_close(out["a"], expected[:, :3])
        torch.testing.assert_close(out["b"][0], expected[:, 3:].reshape(2, 2, 2))
        torch.testing.assert_close(getattr(inverse, name)(flat), expected)


# --- nothing to solve -----------------------------------------------------------------------------


@by_name
@pytest.mark.parametrize("tol", [1e-6, 0.0])
@pytest.mark.parametrize("shape", [(0, 3), (0,), (0, 2, 0)], ids=str)
def test_a_batch_of_size_zero(solver, tol, shape):
    z0 = torch.zeros(shape)
    solution = gdeq.solve(torch.cos, z0, type(solver)(max_iter=4, tol=tol))
    assert solution.z.shape == shape
    assert solution.converged.shape == solution.residual.shape == solution.steps.shape == (0,)
    assert solution.trace.shape[1] == 0
    assert solution.status == []
    assert str(solution) == "an empty batch; nothing to solve"


@by_name
def test_a_nested_batch_of_size_zero(solver):
    z0 = {"a": torch.zeros(0, 3), "b": [torch.zeros(0, 2, 2)]}
    solution = gdeq.solve(
        lambda z: {"a": torch.cos(z["a"]), "b": [torch.cos(z["b"][0])]}, z0, solver
    )
    assert solution.z["a"].shape == (0, 3)
    assert solution.z["b"][0].shape == (0, 2, 2)


@by_name
@pytest.mark.parametrize("tol", [1e-6, 0.0])
@pytest.mark.parametrize("shape", [(3, 0), (3, 2, 0, 4)], ids=str)
def test_samples_without_a_single_number(solver, tol, shape):
    """The only fixed point there is has been found."""
    z0 = torch.zeros(shape)
    solution = gdeq.solve(torch.cos, z0, type(solver)(max_iter=4, tol=tol))
    assert solution.z.shape == shape
    assert solution.residual.tolist() == [0.0, 0.0, 0.0]
    if tol > 0:
        assert solution.converged.all()


@pytest.mark.parametrize(
    "gradient",
    [gdeq.Implicit(), gdeq.JFB(), gdeq.NPG(), gdeq.GDEQ(), gdeq.GDEQ(refine=2), gdeq.GDEQ(0, 1e-3)],
    ids=repr,
)
@pytest.mark.parametrize("shape", [(0, 3), (3, 0)], ids=str)
def test_gradients_of_nothing(gradient, shape):
    weight = torch.ones((), requires_grad=True)
    solution = gdeq.fixed_point(
        lambda z: torch.cos(weight * z), torch.zeros(shape), gradient=gradient
    )
    solution.z.sum().backward()
    assert weight.grad.item() == 0.0


# --- bad states -----------------------------------------------------------------------------------


def refused(z0, *words: str, f=torch.cos, kind: type[Exception] = gdeq.StateError) -> None:
    """Both entries raise the same error, and its message says all the words."""
    for call in (gdeq.solve, gdeq.fixed_point):
        with pytest.raises(kind) as caught:
            call(f, z0)
        assert isinstance(caught.value, (ValueError, TypeError))
        for word in words:
            assert word in str(caught.value), str(caught.value)


def test_no_batch_dimension():
    refused(torch.tensor(1.0), "z0 has no batch dimension", "z0.unsqueeze(0)")
    refused({"a": torch.zeros(2), "b": torch.tensor(1.0)}, "z0['b'] has no batch dimension")


def test_batch_sizes_differ():
    z0 = (torch.zeros(2, 3), {"deep": torch.zeros(4, 3)})
    refused(z0, "batch sizes differ", "z0[0] has 2 samples", "z0[1]['deep'] has 4")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_integer_states(dtype):
    z0 = torch.zeros(2, 3, dtype=dtype)
    refused(z0, f"z0 has dtype {dtype}", "must be floating point", kind=TypeError)
    refused([torch.zeros(2, 3), z0], "z0[1]", str(dtype))


def test_complex_states():
    z0 = torch.zeros(2, 3, dtype=torch.complex64)
    refused(z0, "torch.complex64", "must be floating point", "view_as_real", kind=TypeError)


@pytest.mark.parametrize(
    ("part", "name"),
    [(None, "NoneType"), (1.0, "float"), ("z", "str"), ({1.0}, "set"), (len, "builtin")],
    ids=repr,
)
def test_a_state_that_is_not_a_tensor(part, name):
    must = "must be a tensor or a tuple, list or dict of tensors"
    refused(part, "z0 " + must, f"got {name}", kind=TypeError)
    refused({"a": torch.zeros(2, 3), "b": (part,)}, "z0['b'][0] " + must, kind=TypeError)


def test_numpy_is_not_silently_taken():
    np = pytest.importorskip("numpy")
    refused(np.zeros((2, 3)), "z0 must be a tensor", "ndarray", kind=TypeError)


@pytest.mark.parametrize("empty", [(), [], {}, ((), {"a": []})], ids=repr)
def test_a_state_without_tensors(empty):
    refused(empty, "z0 holds no tensor")


def test_a_state_on_two_devices():
    z0 = (torch.zeros(2, 3), torch.zeros(2, 3, device="meta"))
    refused(z0, "z0[0] is on cpu", "z0[1] is on meta", "one device")


# --- what f must not do ---------------------------------------------------------------------------


def test_f_changes_the_shape():
    z0 = torch.zeros(2, 3)
    for f, shape in [
        (lambda z: z[:, :2], "(2, 2)"),
        (lambda z: z[:1], "(1, 3)"),
        (lambda z: z.unsqueeze(1), "(2, 1, 3)"),
        (lambda z: z.sum(), "()"),
        (lambda z: z.reshape(3, 2), "(3, 2)"),
    ]:
        refused(z0, f"f(z) has shape {shape}", "the state there has (2, 3)", f=f)


def test_f_changes_the_shape_of_one_part():
    z0 = {"a": torch.zeros(2, 3), "b": [torch.zeros(2, 4)]}
    f = lambda z: {"a": z["a"], "b": [z["b"][0][:, :1]]}  # noqa: E731
    refused(z0, "f(z)['b'][0] has shape (2, 1)", "(2, 4)", f=f)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.complex64])
def test_f_changes_the_dtype(dtype):
    refused(
        torch.zeros(2, 3),
        f"f(z) has dtype {dtype}",
        "the state there has torch.float32",
        f=lambda z: z.to(dtype),
    )


def test_f_changes_the_structure():
    z0 = {"a": torch.zeros(2, 3), "b": torch.zeros(2, 3)}
    for f, sketch in [
        (lambda z: z["a"], "tensor"),
        (lambda z: (z["a"], z["b"]), "(tensor, tensor)"),
        (lambda z: {"a": z["a"]}, "{'a': tensor}"),
        (lambda z: {**z, "c": z["a"]}, "{'a': tensor, 'b': tensor, 'c': tensor}"),
        (lambda z: {"a": (z["a"],), "b": z["b"]}, "{'a': (tensor), 'b': tensor}"),
        (lambda z: {"a": z["a"], "B": z["b"]}, "{'a': tensor, 'B': tensor}"),
    ]:
        refused(z0, "f(z) has the structure", sketch, "z0 has {'a': tensor, 'b': tensor}", f=f)
    refused(torch.zeros(2, 3), "f(z) has the structure (tensor)", f=lambda z: (z,))
    refused((torch.zeros(2, 3),), "f(z) has the structure tensor", f=lambda z: z[0])
    pair = (torch.zeros(2, 3), torch.zeros(2, 3))
    refused(pair, "f(z) has the structure (tensor)", f=lambda z: z[:1])


def test_f_changes_the_device():
    refused(torch.zeros(2, 3), "f(z) is on meta", "the state is on cpu", f=lambda z: z.to("meta"))


@pytest.mark.parametrize(("out", "name"), [(None, "NoneType"), (0.5, "float")], ids=repr)
def test_f_returns_no_tensor(out, name):
    refused(torch.zeros(2, 3), "f(z) must be a tensor", f"got {name}", f=lambda z: out)
    f = lambda z: {"a": out}  # noqa: E731
    refused({"a": torch.zeros(2, 3)}, "f(z)['a'] must be a tensor", f"got {name}", f=f)


def test_f_goes_wrong_only_later():
    calls = []

    def f(z: Tensor) -> Tensor:
        calls.append(1)
        return torch.cos(z) if len(calls) < 4 else z[:, :1]

    with pytest.raises(gdeq.StateError, match="f must keep the shape"):
        gdeq.solve(f, torch.zeros(2, 3))
    assert len(calls) == 4


class MyError(Exception):
    pass


@by_name
@pytest.mark.parametrize("call", [1, 3])
def test_what_f_raises_arrives_unchanged(solver, call):
    raised = MyError("mine")
    calls = []

    def f(z: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == call:
            raise raised
        return torch.cos(z)

    with pytest.raises(MyError) as caught:
        gdeq.solve(f, torch.zeros(2, 3), solver)
    assert caught.value is raised
    assert caught.value.__cause__ is None
    assert len(calls) == call
    assert torch.is_grad_enabled()
