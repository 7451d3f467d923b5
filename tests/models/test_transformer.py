"""The DEQ transformer: causal, with a memory that is as good as the text itself."""

import doctest

import pytest
import torch

import gdeq
from gdeq.models.transformer import Transformer, turned, turns_of

SYMBOLS, WINDOW = 30, 6


def model(**options):
    torch.manual_seed(0)
    sizes = {"width": 12, "heads": 2, "blocks": 2, "memory": 18, "rows": 3} | options
    made = Transformer(SYMBOLS, **sizes, solver=gdeq.Picard(max_iter=200, tol=1e-11)).double()
    return made.eval()


def text(length=3 * WINDOW, rows=3):
    return torch.randint(SYMBOLS, (rows, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def by_segments(made, tokens, window=WINDOW):
    made.eval()  # begins new texts
    found = []
    for part in tokens.split(window, 1):
        found.append(made(part))
        made.advance()
    return torch.cat(found, 1)


@pytest.mark.parametrize(
    ("blocks", "steps", "bound"), [(1, 200, 1e-8), (2, 200, 1e-8), (1, 2, 1e-13)]
)
def test_no_token_sees_a_later_one(blocks, steps, bound):
    """At the equilibrium, and after a few steps of Picard."""
    made, tokens = model(blocks=blocks), text()
    made.deq.solver = gdeq.Picard(max_iter=steps, tol=1e-11 if steps > 2 else 0.0)
    other = tokens.clone()
    other[:, 7:] = (other[:, 7:] + 1) % SYMBOLS
    apart = (by_segments(made, tokens, 18) - by_segments(made, other, 18)).abs().amax((0, 2))
    assert apart[:7].max() < bound
    assert apart[7:].min() > 0.05


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("explicit", [False, True])
def test_by_segments_it_is_the_whole(blocks, explicit):
    """What is remembered is what would be seen: at the equilibrium, or in the one evaluation."""
    made, tokens = model(blocks=blocks), text()
    if explicit:
        made.deq.solver, made.deq.gradient = None, gdeq.Unrolled(1, damping=1.0)
    whole = by_segments(made, tokens, 3 * WINDOW)
    for window in (WINDOW, 1):
        assert (by_segments(made, tokens, window) - whole).abs().max() < 1e-8


def test_unrolled_from_zeros_it_remembers_where_it_came_to():
    """Pre-training by many evaluations of f: the memory is near the equilibrium, too."""
    made, tokens = model(), text()
    at_equilibrium = by_segments(made, tokens)
    made.deq.solver, made.deq.gradient = None, gdeq.Unrolled(80)
    assert (by_segments(made, tokens) - at_equilibrium).abs().max() < 1e-6


def test_the_memory_is_as_long_as_it_is_said_to_be():
    made, tokens = model(memory=WINDOW, blocks=1), text()
    whole = by_segments(made, tokens)
    other = tokens.clone()
    other[:, 0] = (other[:, 0] + 1) % SYMBOLS
    apart = (by_segments(made, other) - whole).abs().amax((0, 2))
    assert apart[WINDOW : 2 * WINDOW].min() > 1e-6  # the second segment sees the first
    none = model(memory=0)
    assert torch.equal(
        by_segments(none, tokens)[:, -WINDOW:], by_segments(none, tokens[:, -WINDOW:])
    )


def test_training_has_a_memory_of_its_own():
    made, tokens = model(), text()
    made.train()
    made(tokens[:, :WINDOW])
    made.advance()
    assert int(made.filled) == WINDOW
    kept = made.memory.clone()
    by_segments(made, tokens)
    assert torch.equal(made.memory, kept)
    copy = model()
    copy.load_state_dict(made.state_dict())
    made.train(), copy.train()
    assert torch.equal(made(tokens[:, WINDOW:]), copy(tokens[:, WINDOW:]))
    with pytest.raises(ValueError, match="make it with rows=2"):
        made(tokens[:2])


def test_a_model_that_has_read_can_move():
    made, tokens = model(), text()
    there = by_segments(made, tokens)
    assert (by_segments(made.float(), tokens) - there).abs().max() < 1e-4


def test_what_is_read_in_inference_mode_does_not_bind_later_calls():
    made, tokens = model(), text()
    with torch.inference_mode():
        there = by_segments(made, tokens)
    assert torch.equal(by_segments(made, tokens), there)
    made.eval()(tokens).sum().backward()


def test_places_are_relative():
    """Turned by rotary places, products of queries and keys know the distance alone."""
    places = torch.arange(9.0, dtype=torch.float64)
    q, k = torch.randn(2, 1, 8, dtype=torch.float64)
    turns = turns_of(places, 8)
    products = turned(q.expand(9, 8), turns) @ turned(k.expand(9, 8), turns).T
    for distance in range(9):
        found = products.diagonal(-distance)
        assert torch.allclose(found, found[:1].expand_as(found), atol=1e-12)
    assert not torch.allclose(products[3, 0], products[0, 3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_places_are_exact_in_half_precision(dtype):
    turns, wanted = (
        model(memory=600, width=16).to(kind).context(text()).turns
        for kind in (dtype, torch.float64)
    )
    for half, double in zip(turns, wanted, strict=True):
        assert (half.double() - double).abs().max() < 1e-4


@pytest.mark.parametrize("memory", [0, 4])
def test_gradients_are_those_of_the_equilibrium(memory):
    """Beside finite differences, through memory, masks and tied embeddings."""
    made, tokens = model(blocks=1, memory=memory), text(8)
    made.deq.gradient = gdeq.Implicit(gdeq.Broyden(max_iter=200, tol=1e-11))
    made.train()
    made(tokens[:, :4])
    made.advance()

    def loss():
        return made(tokens[:, 4:]).logsumexp(2).square().mean()

    loss().backward()
    for parameter in (made.embed.weight, made.cell.blocks[0].look.key_value.weight):
        direction = torch.randn_like(parameter)
        wanted = (parameter.grad * direction).sum()
        with torch.no_grad():
            parameter.add_(direction, alpha=1e-5)
            above = loss()
            parameter.add_(direction, alpha=-2e-5)
            below = loss()
            parameter.add_(direction, alpha=1e-5)
        assert torch.allclose((above - below) / 2e-5, wanted, rtol=1e-5)


def test_dropout_is_one_function_during_a_solve():
    made = model(dropout=0.3, attention=0.3, embedding=0.3, outer=0.3)
    made.train()
    a, b = made(text(WINDOW)), made(text(WINDOW))
    assert made.deq.solution.converged.all()
    assert (a - b).abs().max() > 0.1
    made.eval()
    assert torch.equal(made(text(WINDOW)), made(text(WINDOW)))


def test_a_dropped_word_has_an_equilibrium():
    made = model(embedding=0.7)
    made.train()
    for _ in range(12):  # with x = 0 a third of these texts would not converge
        made(text(WINDOW))
        assert made.deq.solution.converged.all()


def test_attention_drops_earlier_tokens_but_never_a_token_itself():
    made, tokens = model(attention=0.4, memory=WINDOW), text(WINDOW)
    made.train()
    made(tokens)
    made.advance()
    visible = made.context(tokens).visible
    assert visible.shape == (3, 1, WINDOW, 2 * WINDOW)
    assert visible.diagonal(WINDOW, 2, 3).all()
    earlier = torch.ones(WINDOW, 2 * WINDOW).tril(WINDOW - 1).bool()
    assert 0.4 < visible[:, 0, earlier].double().mean() < 0.8
    assert not visible[:, 0].triu(WINDOW + 1).any()
    assert not torch.equal(visible, made.context(tokens).visible)
    made.eval()
    assert made.context(tokens).visible.dim() == 2


def test_its_example_runs():
    (found,) = doctest.DocTestFinder(recurse=False).find(Transformer, "Transformer")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert doctest.DocTestRunner(verbose=False).run(found).failed == 0
