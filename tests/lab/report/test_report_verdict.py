"""What the page says is shown, and what it says is not."""

import math

import pytest
from report_runs import changed_summary, make_run, other_task

from gdeq.lab import report
from gdeq.lab.report.rows import make_rows
from gdeq.lab.report.runs import read_runs
from gdeq.lab.report.verdict import headline, leaders, verdict

NAMES = ("implicit", "jfb", "gdeq")


def rows_of(folder, scores, samples=None, turns=(None,) * 3, seeds=1):
    """scores: of each method, one for each seed."""
    paths = []
    for name, own, times in zip(NAMES, scores, turns, strict=False):
        for seed, score in zip(range(seeds), own, strict=True):
            path = make_run(folder / f"{name}{seed}", name, seed=seed, turns=times)
            told = {"test_accuracy": score} | ({"test_samples": samples} if samples else {})
            paths.append(changed_summary(path, **told))
    return make_rows(read_runs(paths))


def bold(rows):
    return [cell.text for row in headline(rows).rows for cell in row if cell.best]


def test_one_image_of_360_is_no_difference(tmp_path):
    rows = rows_of(tmp_path, ([97.5], [97.22], [97.22]), samples=360)
    assert bold(rows) == []
    text = verdict(rows)
    assert "The runs show no difference in test accuracy: 97.22 to 97.50 %." in text
    # Two standard errors of a difference: 8 p (1 − p) / 0.0028² test images, to two digits.
    level = (97.5 + 2 * 97.22) / 3
    images = 1000 * math.ceil(8 * level * (100 - level) / 0.28**2 / 1000)
    assert f"is real, it takes about {images:,} test samples (there are 360), or" in text


@pytest.mark.parametrize(
    ("scores", "seeds", "samples", "leads", "told"),
    [
        (([97.5], [90.0], [90.0]), 1, 360, ["97.50"], "Implicit has the best test accuracy"),
        (([97.5], [97.2], [80.0]), 1, 360, [], "Implicit and JFB lead in test accuracy"),
        (([97.5], [90.0], [80.0]), 1, None, [], "One run of each says nothing about the spread"),
        (([90.0, 90.2], [91.0, 91.2], [93.0, 93.2]), 2, None, ["93.10 ± 0.14"], "GDEQ has"),
        # The variances between seeds are 8, 8 and 18; Implicit and GDEQ are 2 apart.
        (([90.0, 94.0], [91.0, 95.0], [91.0, 97.0]), 2, None, [], "takes about 23 seeds of each"),
        (([90.0], [90.0], [90.0]), 1, 360, [], "no difference in test accuracy: 90.00 to 90.00 %."),
        # 2.7 standard deviations of one score, but less than two of a difference.
        (([97.5], [94.5], [94.5]), 1, 360, [], "no difference in test accuracy"),
    ],
)  # fmt: skip
def test_a_winner_is_bold_where_it_is_told_from_the_noise(
    tmp_path, scores, seeds, samples, leads, told
):
    rows = rows_of(tmp_path, scores, samples, seeds=seeds)
    assert bold(rows) == leads
    assert told in verdict(rows)


@pytest.mark.parametrize(
    ("jfb", "gdeq", "leads", "told"),
    [
        ([16, 16.5, 16.2, 16.1], [10, 10.2, 9.9, 10], ["2.00×"],
         "GDEQ takes the shortest steps, 2.0"),
        ([16, 16.5, 16.2, 16.1], [15.5, 17, 16, 19], [],
         "JFB and GDEQ take the shortest steps, 1.2"),
        ([20, 25, 19, 20], [15, 40, 20, 19], [],
         "No method's steps are measurably shorter than Imp"),
    ],
)  # fmt: skip
def test_the_fastest_is_bold_where_the_turns_tell_it_apart(tmp_path, jfb, gdeq, leads, told):
    turns = ([20.0, 20.4, 19.8, 20.0], jfb, gdeq)
    rows = rows_of(tmp_path, ([90.0], [90.0], [90.0]), 360, turns)
    assert bold(rows) == leads
    assert told in verdict(rows)


def test_times_of_trainings_have_no_bold_winner(tmp_path):
    rows = rows_of(tmp_path, ([90.0], [90.0], [90.0]), 360)
    assert bold(rows) == []
    assert "GDEQ takes the shortest steps, 2.2 times as fast as Implicit’s, judging by" in (
        verdict(rows)
    )


@pytest.mark.parametrize(
    ("turns", "seconds", "slow"),
    [
        ((30.0, 30.0), (None, None), "Implicit and GDEQ"),
        # Timed on a machine that was busier still, beside which no training is slow.
        ((300.0, 100.0), (0.1, 0.08), "GDEQ"),
    ],
)
def test_a_training_that_was_slowed_is_told(tmp_path, turns, seconds, slow):
    paths = [
        make_run(tmp_path / name, name, turns=[ms] * 4, seconds=own)
        for name, ms, own in zip(("implicit", "gdeq"), turns, seconds, strict=True)
    ]
    assert f"slowed the training of {slow}: do not compare" in report.table(paths)


def test_a_metric_of_which_less_is_better(tmp_path):
    rows = make_rows(read_runs([other_task(tmp_path / n, n) for n in ("implicit", "gdeq")]))
    assert bold(rows) == []  # no spread is known
    assert "The runs show no difference in test bits per character" in verdict(rows)
    assert leaders(rows, 0)[0].label == "GDEQ"
    assert verdict(make_rows(read_runs([make_run(tmp_path / "alone")]))) == ""
