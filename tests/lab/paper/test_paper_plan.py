"""What the experiment consists of."""

import pytest
from paper_runs import SETTINGS

from gdeq.lab.paper import plan
from gdeq.lab.report.methods import label
from gdeq.lab.training.config import ConfigError, differences, load


def in_group(name):
    return [run for run in plan.make_plan() if run.group == name]


def test_table_2_is_all_there():
    made = {(r.row, r.pretrain, r.seed) for r in in_group("table2") if r.row in plan.METHODS}
    three = {(m, p, s) for m in ("gdeq", "implicit") for p in (False, True) for s in (0, 1, 2)}
    one = {(m, p, 0) for m in ("jfb", "npg") for p in (False, True)}
    assert made == three | one
    assert {r.row for r in in_group("table2")} == {
        *plan.METHODS, *plan.OWN, *plan.LONGER,
    }  # fmt: skip


def test_table_2_is_one_recipe_with_the_papers_steps():
    configs = {run.name: run.config() for run in in_group("table2") if not run.pretrain}
    base = configs["gdeq-seed0"]
    assert (base.solver.max_iter, base.solver.tol, base.model.size) == (18, 0.0, "large")
    assert configs["implicit-seed0"].gradient.max_iter == 20
    npg = configs["npg-seed0"].gradient
    assert (npg.steps, npg.damping) == (5, 0.5)
    for name, config in configs.items():
        allowed = {"seed", "snapshots", "test_every"}
        if name.startswith(("adaptive", "gdeq-6steps")):  # ours, and told apart in the table
            allowed |= {"epochs", "optimizer.lr", "measure_every", "solver.max_iter"}
        if name.startswith(("adaptive", "implicit-dropout")):
            allowed |= {"model.dropout", "optimizer.lr"}
        if name.startswith("gdeq-50epochs"):
            allowed |= {"epochs"}
        other = {
            key for key in changed(base, config) if not key.startswith(("gradient.", "adapt."))
        }
        assert other <= allowed, name


def test_a_run_whose_gradients_are_compared_is_named_by_its_method(few_images):
    for run in (run for run in plan.make_plan() if run.similarity):
        config = run.config(SETTINGS)
        assert plan.title(run.row).partition(",")[0] == label(vars(config.gradient)), run.name
    long = ["data=digits", "model.size=small", "batch_size=4"]
    (whole,) = plan.chosen(["gdeq-50epochs-seed0"])
    assert whole.config(long).snapshots == (1, 10, 20, 50)  # those of the paper's figure


def changed(one, other):
    return {text.partition(":")[0] for text in differences(one, other)}


def test_the_control_of_the_adaptive_row_differs_from_implicit_by_its_dropout_and_rate():
    names = ("implicit-dropout", "implicit", "adaptive")
    control, implicit, adaptive = (plan.chosen([f"{row}-seed0"])[0].config() for row in names)
    assert changed(implicit, control) == {"model.dropout", "optimizer.lr", "snapshots"}
    assert (control.model, control.optimizer) == (adaptive.model, adaptive.optimizer)
    # The preset is the adaptive row, but for a solver whose steps are not read, and what is told.
    told = changed(adaptive, load("cifar10-adaptive"))
    assert told <= {
        *("solver.max_iter", "log_every", "checkpoint_seconds", "snapshots"),
        *("gradient.max_iter", "gradient.tol"),
    }


def test_what_tells_most_comes_first():
    names = [run.name for run in plan.make_plan()]
    assert set(names[:4]) == {f"{m}-seed0" for m in plan.METHODS}
    assert names.index("gdeq-seed1") < names.index("record-adaptive")
    assert all(name.replace("-", "").replace(".", "").isalnum() for name in names)


def test_settings_for_all_have_the_last_word(few_images):
    by_name = {run.name: run for run in plan.make_plan()}
    config = by_name["gdeq-seed0"].config(["epochs=3", "optimizer.lr=0.5"])
    assert (config.epochs, config.optimizer.lr, config.snapshots) == (3, 0.5, (1, 3))
    config = by_name["gdeq-seed2"].config(["epochs=3"])
    assert (config.seed, config.gradient.name) == (2, "gdeq")
    config = by_name["gdeq-pretrained-seed0"].config([*SETTINGS, "epochs=5"])
    assert config.pretrain_steps == 3  # a fifth of 15


def test_chosen_by_name_pattern_and_group():
    assert [r.name for r in plan.chosen(["jfb-*", "sprint"])] == [
        *("jfb-seed0", "jfb-pretrained-seed0", "sprint-adaptive")
    ]
    assert [r.name for r in plan.chosen(["adaptive-seed1"])] == ["adaptive-seed1"]
    assert {r.group for r in plan.chosen(["record"])} == {"record"}
    assert plan.chosen() == plan.make_plan()
    with pytest.raises(ConfigError, match=r"no run is called 'gdeg-\*'.*table2"):
        plan.chosen(["table2", "gdeg-*"])


@pytest.mark.parametrize(
    ("setting", "message"),
    [("epoch=3", "did you mean 'epochs'"), ("gradient=jfb", "leave gradient=jfb out")],
)
def test_settings_that_cannot_be(gdeq, tmp_path, setting, message):
    said = gdeq.refused("paper", "run", "--out", tmp_path / "out", "--set", setting, "--dry-run")
    assert message in said
