"""The language task: every token counts once, memory goes on, and a text is continued."""

import json
import math

import pytest
import torch

from gdeq import Picard
from gdeq.lab.data.text import Text
from gdeq.lab.tasks import Metric, language
from gdeq.lab.tasks.language import (
    NOTHING,
    Bytes,
    Language,
    Windows,
    Words,
    baselines,
    in_rows,
    python_help,
)
from gdeq.lab.training import config as configs
from gdeq.lab.training import process, runs
from gdeq.lab.training.folder import read_metrics
from gdeq.lab.training.learner import Learner
from gdeq.lab.training.metrics import Sums
from gdeq.lab.training.similarity import METHODS, Problem

TINY = [
    *("epochs=2", "batch_size=4", "window=8", "memory=8", "test_rows=2", "log_every=5"),
    *("model.width=16", "model.heads=2", "snapshots=[1]", "device=cpu", "precision=float32"),
    *("optimizer.lr=1e-2", "optimizer.schedule=constant", "optimizer.warmup=0"),
]
WORDS = ("<eos>", "<unk>", "cat", "mat", "on", "sat", "the")


def short_text(task):
    """One that is learned in a second."""
    if task.config.data == "python":
        whole = python_help()
        return Text(whole.train[:600], whole.validation[:101], whole.test[:150])
    line = [6, 2, 5, 4, 6, 3, 0]  # the cat sat on the mat
    one = torch.tensor(line * 60, dtype=torch.int32).numpy()
    return Text(one, one[:50], one[:75], WORDS)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(language.Language, "_text", short_text)


def config(*settings, preset="chars"):
    return configs.load(preset, [*TINY, *settings])


def task(kind, *settings, preset="chars"):
    return kind(config(*settings, preset=preset), process.Process(torch.device("cpu")))


def test_rows_are_texts_that_go_on():
    text = torch.arange(100)
    x, y, share = in_rows(text, rows=3, window=8)
    assert len(x) == 3 * 4
    for row in range(3):
        whole = x[row::3].flatten()
        assert torch.equal(whole, torch.arange(32) + 32 * row)  # the windows of a row join
    assert torch.equal(y, x + 1)
    assert torch.equal(share, torch.full((12,), 1 / 8))


def test_each_epoch_begins_at_another_place_of_the_text():
    text = torch.arange(100)
    made = Windows(text, rows=3, window=8, seed=0)
    read = [torch.cat([x for _, (x, _, _) in made.epoch(epoch)]) for epoch in range(4)]
    starts = [int(x[0, 0]) for x in read]
    assert starts[0] == 0
    assert len(set(starts)) == 4
    for epoch, (start, x) in enumerate(zip(starts, read, strict=True)):
        whole = x.view(-1, 3, 8).transpose(0, 1).flatten()  # row after row
        torch.testing.assert_close(whole, (torch.arange(len(whole)) + start) % 100)
        ((_, later),) = list(made.epoch(epoch, start=3))  # taken up at its last batch
        assert later[0].equal(x[-3:])
        assert later[1].equal((x[-3:] + 1) % 100)
    epochs = [made.epoch(epoch) for epoch in range(4)]  # also side by side
    assert [int(next(batches)[1][0][0, 0]) for batches in epochs] == starts


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
@pytest.mark.parametrize("length", [17, 100, 129])
def test_in_a_test_every_token_counts_once(rows, length):
    text = torch.randint(9, (length,))
    x, y, share = in_rows(text, rows, window=8, whole=True)
    counted = y != NOTHING
    steps = len(x) // rows
    order = torch.arange(len(x)).view(steps, rows).T.flatten()  # row by row
    assert torch.equal(y[order][counted[order]], text[1:])
    assert torch.equal(x[order][counted[order]], text[:-1])
    losses = torch.rand(y.shape) * counted
    mean = (losses.sum(1) * share).mean()  # as the metrics take it
    assert torch.allclose(mean, losses.sum() / (length - 1))


def test_the_metric_is_that_of_all_tokens():
    """From scores by windows to perplexity, against the sum over the text by hand."""
    words = task(Words, preset="ptb")
    batches = list(words.test_batches(256).epoch())
    assert [len(batch[0]) for _, batch in batches] == [2] * 5
    logits = torch.randn(len(WORDS), len(WORDS), generator=torch.Generator().manual_seed(0))
    scores = [words.score(logits[x.long()], *targets) for _, (x, *targets) in batches]
    text = words.parts[1].long()
    nats = torch.nn.functional.cross_entropy(logits[text[:-1]], text[1:])
    assert Words.metric.of_mean(torch.cat(scores).mean().item()) == pytest.approx(math.exp(nats))
    x, *targets = batches[0][1]
    bits, losses = (
        task(Bytes).score(logits[x.long()], *targets),
        words.losses(logits[x.long()], *targets),
    )
    assert torch.allclose(bits, losses / math.log(2))
    assert Metric("x").of_mean(3.0) == 3.0


def test_baselines_by_hand():
    """Of the pairs a b, b a, a b, each counted once more than seen, among 256 bytes."""
    train, test = torch.tensor([0, 1, 0, 1]), torch.tensor([0, 1])
    one, two = baselines(train, test)
    assert one == pytest.approx(-math.log2(3 / 259))  # the three second bytes: b, a, b
    assert two == pytest.approx(-math.log2(3 / 258))


def test_the_help_of_python_is_split_without_a_gap():
    whole = python_help()
    sizes = [len(part) for part in whole[:3]]
    assert sizes[0] > 15 * sizes[1]
    assert bytes(whole.train[:40]).isascii()


@pytest.mark.parametrize(
    "gradient",
    [
        *(["gradient=gdeq", "solver=broyden"], ["gradient=gdeq", "gradient.refine=2"]),
        *(["gradient=npg"], ["gradient=jfb"], ["gradient=implicit"], ["gradient=unrolled"]),
        ["gradient=gdeq", "gradient.refine=1", "adapt.enabled=true", "adapt.every=5"],
    ],
    ids=lambda settings: "-".join(s.split("=")[1] for s in settings),
)
def test_every_gradient_trains_it(tmp_path, gradient):
    runs.train(tmp_path / "run", config(*gradient))
    first, last = (
        r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "epoch"
    )
    assert last["train_bits_per_byte"] < first["train_bits_per_byte"]


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """Six words in one order: memory and places tell which `the` it is."""
    path = tmp_path_factory.mktemp("learned") / "run"
    more = ["epochs=12", "solver.max_iter=6", "gradient.steps=2", "ema=0.5"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language.Language, "_text", short_text)
        runs.train(path, config(*more, preset="ptb"))
    return path


def test_words_are_learned(learned):
    summary = json.loads((learned / "summary.json").read_text())
    assert summary["test_perplexity"] < 1.5
    assert summary["metric"]["exponential"]
    found = runs.evaluate(learned, steps=30)
    assert found["perplexity"] == pytest.approx(summary["test_perplexity"], rel=0.2)


def test_interrupted_it_is_the_same_to_the_bit(tmp_path, monkeypatch):
    """Also in the middle of an epoch, where the memory is in use."""
    dropouts = (f"model.{name}=0.1" for name in ("dropout", "attention", "embedding", "outer"))
    settings = [*dropouts, "checkpoint_seconds=0"]
    runs.train(tmp_path / "whole", config(*settings))
    advance, calls = language.Language.advance, []

    def stopped(self, model):
        advance(self, model)
        calls.append(model.training)
        if sum(calls) == 25:
            raise KeyboardInterrupt

    monkeypatch.setattr(language.Language, "advance", stopped)
    with pytest.raises(KeyboardInterrupt):
        runs.train(tmp_path / "half", config(*settings))
    monkeypatch.setattr(language.Language, "advance", advance)
    runs.resume(tmp_path / "half")
    whole, half = (runs.trained(tmp_path / name).model.state_dict() for name in ("whole", "half"))
    assert whole["memory"].any()
    for name, value in whole.items():
        assert torch.equal(value, half[name]), name


def test_gradients_are_compared_with_each_weight_counted_once():
    """The keys of the memory, an input of f, come from a matrix of f."""
    learner = Learner(config(), process.Process(torch.device("cpu")), None)
    learner.model.eval()
    batch = next(learner.train_batches.epoch())[1]
    found = Problem(learner, batch).gradient(Picard(max_iter=4), METHODS["JFB"], 1.0)
    assert len(found.gradient) == sum(p.numel() for p in learner.model.parameters()) - 256


def test_tests_in_between_change_nothing(tmp_path):
    """The memory of the training text is not that of the test."""
    for name, every in (("often", 1), ("once", 2)):
        runs.train(tmp_path / name, config(f"test_every={every}"))
    often, once = (runs.trained(tmp_path / name).model.state_dict() for name in ("often", "once"))
    assert all(torch.equal(value, once[name]) for name, value in often.items())
    first = runs.evaluate(tmp_path / "once")
    assert first == runs.evaluate(tmp_path / "often")


def test_a_text_is_continued(learned, gdeq):
    arguments = ["sample", learned, "--prompt", "the cat", "--tokens", "12"]
    code, said = gdeq(*arguments, "--temperature", "0.01", "--tol", "1e-4")
    assert code == 0, said
    assert said.startswith("the cat sat on the mat\nthe cat sat on the mat")
    code, fresh = gdeq(*arguments, "--temperature", "0.01", "--tol", "1e-4", "--fresh")
    steps = [float(text.split("\n")[-2].split()[0]) for text in (said, fresh)]
    assert said.split("\n")[:2] == fresh.split("\n")[:2]
    assert min(steps) >= 1
    code, said = gdeq("sample", learned, "--prompt", " ")
    assert code == 1
    assert "--prompt is empty" in said


def test_what_a_model_says_does_not_reach_the_terminal_as_it_is(learned, gdeq, monkeypatch):
    monkeypatch.setattr(Language, "decoded", lambda *_: "a\x1b[2Jb")
    said = gdeq("sample", learned, "--prompt", "the", "--tokens", "1")[1]
    assert said.startswith(r"a\x1b[2Jb")


def test_reuse_saves_steps_where_tokens_repeat():
    """Decoding a text of one token: its equilibrium is that of the token before."""
    made = task(Bytes, "memory=0").model()
    made.deq.solver = Picard(max_iter=100, tol=1e-4)
    prompt = torch.zeros(4, dtype=torch.long)
    with torch.no_grad():
        made.bias.zero_()[0] = 100.0  # always the same token
    warm, cold = (
        [n for _, n in language.continued(made, prompt, 5, 1.0, 0, reuse)]
        for reuse in (True, False)
    )
    assert max(warm) <= 1 < min(cold)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.heads=3"], "width 16 must be a multiple of 2 heads, 6"),
        (["window=0"], "window must be"),
        (["test=all"], "test must be"),
        (["model.dropout=1"], "dropout must be"),
        (["model.attention=1"], "attention must be"),
        (["data=ptb"], "data must be python or enwik8, got 'ptb'"),
        (["batch_size=200"], "too few for 200 rows of 8: lower batch_size"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(configs.ConfigError, match=message):
        task(Bytes, *settings)


def test_a_word_begins_as_likely_as_it_is_frequent():
    words = task(Words, preset="ptb")
    shares = words.model().bias.detach().softmax(0)
    assert shares[6] == pytest.approx(121 / 427)  # `the` is 2 of 7 words; each counts once more
    assert shares[1] == pytest.approx(1 / 427)  # `<unk>` does not occur


def test_several_processes_are_refused():
    two = process.Process(torch.device("cpu"))
    object.__setattr__(two, "world_size", 2)
    with pytest.raises(configs.ConfigError, match="is trained by one process"):
        Bytes(config(), two)


def test_the_mean_score_becomes_the_metric():
    sums = Sums(torch.device("cpu"), Words.metric)
    sums.values[:, 0], sums.values[:, 2] = 4, 4 * math.log(7)
    assert sums.read(process.Process(torch.device("cpu")))["perplexity"] == pytest.approx(7)
