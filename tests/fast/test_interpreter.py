"""What makes Triton's interpreter quicker still refuses what Triton refuses."""

import os

import pytest

pytest.importorskip("triton")
from triton.runtime.interpreter import interpreter_semantic as semantic
from triton.runtime.interpreter import tl

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here"
)


def test_types_are_equal_by_what_they_are():
    block = tl.block_type(tl.float32, [4, 2])
    assert block is tl.block_type(tl.float32, [tl.constexpr(4), 2])  # else nothing is kept
    assert tl.float32 != tl.float64
    assert block != tl.block_type(tl.float64, [4, 2])
    assert block != tl.block_type(tl.float32, [2, 4])
    pointer, elsewhere = tl.pointer_type(tl.float32), tl.pointer_type(tl.float32, "shared")
    assert tl.block_type(pointer, [4]) == tl.block_type(tl.pointer_type(tl.float32), [4])
    assert tl.block_type(pointer, [4]) != tl.block_type(elsewhere, [4])


@pytest.mark.parametrize(("size", "error"), [(4.0, TypeError), (3, ValueError)])
def test_sizes_that_triton_does_not_take_are_refused(size, error):
    tl.block_type(tl.float32, [4])
    for _ in range(2):
        with pytest.raises(error):
            tl.block_type(tl.float32, [size])


def test_shapes_that_do_not_fit_are_refused():
    def shape(*of):
        return semantic.full(list(of), 1.0, tl.float32)

    wide = semantic.broadcast_impl_value(shape(4, 1), shape(1, 2))
    assert [x.handle.data.shape for x in wide] == [(4, 2), (4, 2)]
    assert [x.type.shape.values for x in wide] == [[4, 2], [4, 2]]
    with pytest.raises(ValueError, match="incompatible dimensions"):
        semantic.broadcast_impl_value(shape(4, 1), shape(2, 2))
