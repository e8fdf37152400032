"""The monitor: reads a file that is being written, tells progress, keeps a picture; the plot it draws with."""

import json
import os
import re
import time
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dfm_nb.base.metrics import Metrics
from dfm_nb.base.run import Run
from dfm_nb.base.video import write_png
from tests.json_files import change_json, write_json, write_metrics
from tests.processes import wait_until
from workbench.metrics_reader import MetricsReader
from workbench.monitor import Monitor
from workbench.plot import LinePlot, Series, downsample, draw_png, without_spikes


def record(i: int, **more) -> dict:
    return {"iteration": i, "loss": 1 / i, "lr": 1e-3, "tokens_per_s": 100.0 * i, "elapsed_s": 2.0 * i, **more}


def write(run, *records) -> None:
    run.mkdir(exist_ok=True, parents=True)
    write_metrics(run, *records)


def test_reader_waits_for_the_end_of_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    line = json.dumps(record(1)) + "\n"
    reader = MetricsReader(tmp_path)
    assert reader.read() == 0 and reader.count == 0
    for cut in (5, len(line) - 1):
        path.write_text(line[:cut])
        assert reader.read() == 0 and reader.count == 0 and reader.fault == ""
    with path.open("a") as f:
        f.write(line[-1:] + '{"iteration": 2, "lo')
    assert reader.read() == 1 and reader.iteration == 1
    with path.open("a") as f:
        f.write('ss": 0.5}\n')
    assert reader.read() == 1 and reader.points("loss")[1].tolist() == [1.0, 0.5]


def test_reader_follows_a_resume_that_cuts_records_off(tmp_path):
    write(tmp_path, *(record(i) for i in range(1, 8)))
    reader = MetricsReader(tmp_path)
    assert reader.read() == 7
    with closing(Metrics(tmp_path / "metrics.jsonl")) as metrics:
        metrics.truncate(3)
        for i in range(4, 12):  # longer than before: the size alone would not tell
            metrics.write(record(i, loss=7.0))
    reader.read()
    iterations, losses = reader.points("loss")
    assert iterations.tolist() == list(range(1, 12)) and losses[3:].tolist() == [7.0] * 8 and reader.count == 11


@pytest.mark.parametrize("line", ["not json", '{"iteration": 2, "loss": NaN}', f'{{"iteration": {2**31}}}'])
def test_reader_reports_a_damaged_line_after_those_before_it_and_recovers(tmp_path, line):
    write(tmp_path, record(1))
    monitor = Monitor(tmp_path)
    monitor.read()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(f'{{"iteration": 2}}\n{line}\n{{"iteration": 3}}\n')
    for _ in range(2):
        monitor.read()
        assert monitor.runs[0].reader.count == 2 and "line 3" in monitor.runs[0].reader.fault
    os.unlink(tmp_path / "metrics.jsonl")
    write(tmp_path, record(1))
    monitor.read()
    assert monitor.runs[0].reader.count == 1 and monitor.runs[0].reader.fault == ""


def test_numbers_that_cannot_be_drawn_are_left_out(tmp_path):
    odd = [{"loss": 1e308}, {"elapsed_s": "x"}, {"val_loss_ema_x": 1.0}, {"val_sigmas": {}, "val_loss_by_sigma": [1.0]}]
    odd += [{"val_sigmas": [1.0, sigma], "val_loss_by_sigma": [1.0]} for sigma in ("x", 2.0)]
    write(tmp_path, *({"iteration": i, **more} for i, more in enumerate([*odd, {"loss": 0.5}], 1)))
    monitor = Monitor(tmp_path)
    assert monitor.png() and monitor.runs[0].reader.points("loss")[1].tolist() == [0.5]
    assert not monitor.runs[0].reader.rounds


@pytest.mark.parametrize("over, factor, label", [("samples", 4, "samples"), ("elapsed_s", 2, "seconds")])
def test_the_axis_can_be_samples_or_time(tmp_path, over, factor, label):
    (run,) = runs(tmp_path, {})
    monitor = Monitor(run)
    monitor.read()
    monitor.axis.value = over
    training, validation = monitor.loss.data[:2]
    assert training["x"] == [factor * i for i in range(1, 11)] and validation["x"] == [factor * 10]
    assert monitor.loss.x_label == label


def test_status_tells_progress_and_time_left(tmp_path):
    assert Monitor(tmp_path / "later").runs[0].state == "not started"
    write(tmp_path, *(record(i) for i in range(1, 11)), {"iteration": 10, "val_loss": 0.25})
    (tmp_path / "config.yaml").write_text("train:\n  train_iters: 40\n")
    monitor = Monitor(tmp_path)
    assert "10/40" in repr(monitor), "in a script nobody else reads"
    assert monitor.runs[0].eta_s == pytest.approx(2.0 * 30)
    assert monitor.runs[0].state == "stopped"
    (tmp_path / "config.yaml").write_text("train:\n  train_iters: 10\n")
    monitor = Monitor(tmp_path)
    monitor.refresh()
    assert monitor.runs[0].state == "finished" and "10/10" in monitor.kept_html()


def test_lines_hold_validation_by_sigma_of_first_and_last_round(tmp_path):
    rounds = [
        {"iteration": i, "val_loss": v, "val_loss_by_sigma": [v, None, 2 * v], "val_sigmas": [0.1, 1.0, 10.0]}
        for i, v in ((1, 0.9), (2, 0.8), (3, 0.7))
    ]
    write(tmp_path, record(1), record(2), record(3), *rounds)
    monitor = Monitor(tmp_path)
    monitor.read()
    monitor.paint()
    first, last = monitor.by_sigma.data
    assert (first["name"], last["name"]) == ("iteration 1", "iteration 3")
    assert last["x"] == [0.1, 10.0] and last["y"] == [0.7, 1.4]
    assert first["color"] != last["color"] and first["dash"] != last["dash"]
    assert [s["name"] for s in monitor.loss.data] == ["training", "validation", "best validation"]


def test_the_best_round_is_marked_and_a_turn_is_told(tmp_path):
    """By the shortest average, as in training."""
    losses = [(0.5, 0.9), (0.6, 0.7), (0.4, 0.8), (0.3, 0.8), (0.2, 0.8)]
    rounds = [
        {"iteration": 10 * i, "val_loss": v, "val_loss_ema_0.05": a, "val_loss_ema_0.1": v}
        for i, (v, a) in enumerate(losses, 1)
    ]
    write(tmp_path, record(1), *rounds[:4])
    monitor = Monitor(tmp_path)
    assert "3 rounds" not in monitor.status()
    write(tmp_path, rounds[4])
    assert "at 20; it has risen for 3 rounds" in monitor.status()
    monitor.paint()
    mark = monitor.loss.data[-1]
    assert (mark["name"], mark["x"], mark["y"]) == ("best validation", [20.0], [0.7])


def test_the_verdict_of_an_evaluation_is_shown(tmp_path):
    """Odd ones: tests/attacks/test_views.py."""
    write(tmp_path, record(1))
    (tmp_path / "verdict.json").write_text('{"verdict": {"sentence": "take 5"}}')
    assert Monitor(tmp_path).status().endswith("take 5")


def test_widget_follows_the_run_in_a_thread_until_a_second_view_of_it(tmp_path, capsys):
    monitor, second = Monitor(tmp_path), Monitor(tmp_path)
    box = monitor.widget
    try:
        assert monitor.loss.data == [] and monitor._thread.daemon
        write(tmp_path, record(1), record(2))
        # The thread may read between the two records and paint the first alone; the text follows the curves.
        wait_until(lambda: [s["y"] for s in monitor.loss.data] == [[1.0, 0.5]], "both records")
        wait_until(lambda: "loss 0.5 " in monitor._text.value, "the text")
        assert monitor.loss in box.children[2].children
        assert box.children[-1].layout.display == "none", "the machine's panels are folded"
        second.show()
        monitor._thread.join(60)
        assert not monitor._thread.is_alive() and second._thread.is_alive()
    finally:
        monitor.close()
        second.close()


@pytest.mark.parametrize(("cpu_s", "every_s", "apart_s"), [(0, 0.02, 0.2), (0.05, 0.04, 0.9)])
def test_paints_are_at_most_four_a_second_and_rare_when_they_take_long(tmp_path, monkeypatch, cpu_s, every_s, apart_s):
    monitor, painted = Monitor(tmp_path), []

    def paint():
        painted.append(time.monotonic())
        end = time.thread_time() + cpu_s
        while time.thread_time() < end:
            pass

    monkeypatch.setattr(monitor, "paint", paint)
    monitor.watch()
    for i in range(1, 36):
        write(tmp_path, record(i))
        time.sleep(every_s)
    monitor.close()
    monitor._thread.join(5)
    assert len(painted) >= 2 and min(b - a for a, b in zip(painted, painted[1:])) > apart_s


def test_samples_of_a_prompt_are_shown_over_the_training(tmp_path):
    write(tmp_path, record(1))
    monitor = Monitor(tmp_path)
    monitor.widget  # noqa: B018
    monitor.close()
    for last, shown in ((5, [5]), (10, [5, 10]), (40, [5, 15, 25, 40])):
        for i in range(5, last + 1, 5):
            for name in "ab":
                write_png(Run(tmp_path).sample_folder(i) / f"{name}.png", np.full((8, 8, 3), i, np.uint8))
        monitor.paint()
        page = monitor._media.value
        assert [int(i) for i in re.findall(r">iteration (\d+)<", page)] == shown
        assert page.count("data:image/png") == len(shown) + 1, "one prompt, and a picture of both"
        assert page in monitor.kept_html()
    Run(tmp_path).sample_folder(45)
    monitor.paint()
    assert monitor._media.value == page, "its samples are not there yet"


def test_a_run_that_diverged_can_be_read(tmp_path):
    write(tmp_path, record(1), record(2, loss=2.8312747e20))
    (tmp_path / "launch.log").write_text("[INFO] start\nerror: loss or gradients were <NaN>; lower optimizer.lr\n")
    write_json(tmp_path / "launch.json", {"exit_code": 1})
    monitor = Monitor(tmp_path)
    assert "loss 2.831e+20 " in monitor.status()
    monitor.widget  # noqa: B018
    monitor.close()
    for shown in (monitor._text.value, monitor.kept_html()):
        assert "failed" in shown and "were &lt;NaN&gt;; lower optimizer.lr" in shown


# ---- several runs -------------------------------------------------------------------------------------------------


def runs(folder, *settings: dict) -> list:
    """Runs a, b, ... of ten steps with these settings."""
    made = []
    for name, values in zip("abcdef", settings):
        made.append(folder / name)
        write(made[-1], *(record(i, samples=4 * i) for i in range(1, 11)), {"iteration": 10, "val_loss": 0.5})
        config = {"train": {"train_iters": 10, **values}, "dataset": {"path": "d"}}
        write_json(made[-1] / "config.yaml", config)
    return made


def test_runs_are_drawn_over_one_another_and_named_by_what_differs(tmp_path):
    made = runs(tmp_path, {"lr": 0.1}, {"lr": 0.2})
    for what in (made, tmp_path):
        monitor = Monitor(what)
        monitor.refresh()
        assert [s["name"] for s in monitor.loss.data] == ["lr 0.1", "lr 0.2"]
        assert len({s["color"] for s in monitor.loss.data}) == 2
        assert [s["y"] for s in monitor.validation.data] == [[0.5], [0.5]]
        assert [plot.legend for plot in (monitor.loss, monitor.validation, monitor.rates["lr"])] == [True, False, False]
        assert [run.state for run in monitor.runs] == ["finished"] * 2
        assert "finished · iteration 10/10" in monitor.table_html() and "path" not in monitor.table_html()


def test_a_run_can_be_left_out_and_a_new_one_is_found(tmp_path, monkeypatch):
    runs(tmp_path, {"lr": 0.1}, {"lr": 0.2})
    monkeypatch.setattr("workbench.monitor.LOOK_FOR_RUNS_S", 0.0)
    monitor = Monitor(tmp_path)
    monitor.widget  # noqa: B018
    monitor.close()
    monitor._picker.children[0].value = False
    assert [s["name"] for s in monitor.loss.data] == ["lr 0.2"]
    runs(tmp_path, {"lr": 0.1}, {"lr": 0.2}, {"lr": 0.3})
    monitor.refresh()
    assert [box.description for box in monitor._picker.children] == ["lr 0.1", "lr 0.2", "lr 0.3"]
    assert [s["name"] for s in monitor.loss.data] == ["lr 0.2", "lr 0.3"]


def test_a_running_run_tells_its_phase(tmp_path):
    run = Run.create(tmp_path / "run")
    run.claim()
    try:
        run.tell("validating")
        monitor = Monitor(run.path)
        assert monitor.runs[0].state == "running"
        assert "validating" in monitor.status()
        write(run.path, *(record(i) for i in range(1, 11)))
        (run.path / "config.yaml").write_text("train:\n  train_iters: 40\n")
        assert "to go" in monitor.status()
        run.tell("building the model")  # of a run that goes on: that pace is the former one's
        assert "to go" not in monitor.status()
        change_json(run.pid_file, {"phase": None})
        for started_s, phase in ((time.time() + 60, "starting"), (time.time() - 60, "ending")):
            write_json(run.path / "launch.json", {"started_s": started_s})
            assert phase in monitor.status() and "to go" not in monitor.status()
    finally:
        run.release()


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=3000))
@settings(max_examples=50, deadline=None)
def test_downsample_keeps_the_extremes_of_any_series(values):
    x, y = downsample(np.arange(len(values)), np.array(values))
    assert len(x) <= 500 and (min(y), max(y), x[0], x[-1]) == (min(values), max(values), 0, len(values) - 1)
    assert all(values[int(i)] == v for i, v in zip(x, y))


def test_zoom_sends_more_of_what_is_seen():
    x = np.arange(100_000.0)
    plot = LinePlot("t")
    plot.update([Series("s", x, np.sin(x)), Series("mean", x, np.sin(x), smoothing=0.1)])
    assert len(plot.data[0]["x"]) <= 500
    plot.zoom = [40_000.0, 40_100.0]
    assert plot.data[0]["x"] == list(range(39_999, 40_102)) and plot.data[1]["x"] == plot.data[0]["x"]
    plot.zoom = []
    assert plot.data[0]["x"][-1] == 99_999


def test_a_few_spikes_are_cut_off_and_marked():
    y = 0.5 + 0.1 * np.random.default_rng(0).normal(size=10_000)
    y[500::1000] = 8.0
    plot = LinePlot("t")
    plot.update([Series("each step", range(10_000), y, "faint"), Series("mean", range(10_000), y, smoothing=0.01)])
    faint, mean = plot.data
    assert max(faint["y"]) < 1.5 and [faint["x"][i] for i in faint["cut"]] == list(range(500, 10_000, 1000))
    assert mean["cut"] == [] and y.max() == 8.0
    x, kept = without_spikes(np.arange(10_000.0), y)
    assert kept.max() < 1.5 and len(kept) == 9_990 and not set(x) & set(range(500, 10_000, 1000))


def test_a_running_mean_of_many_points_is_that_of_the_points():
    x, y = np.arange(50_000.0), np.random.default_rng(0).normal(size=50_000)
    at, mean = Series("mean", x, y, smoothing=0.1).shown()
    inside = slice(60, -60)
    expected = [y[int(i) - 2500 : int(i) + 2501].mean() for i in at[inside]]
    np.testing.assert_allclose(mean[inside], expected, atol=1e-9)
    assert len(at) <= 500 and at[-1] == 49_999


def test_plot_leaves_out_what_cannot_be_drawn():
    plot = LinePlot("t", log_x=True)
    plot.update([Series("s", [0.0, 1.0, 2.0, 3.0], [1.0, float("nan"), 5.0, float("inf")])])
    assert plot.data[0]["x"] == [2.0] and plot.data[0]["y"] == [5.0]
    plot.update([Series("s", [], [])])
    assert plot.data == [] and plot.summary == "t: no points yet"
    assert draw_png([plot]).startswith(b"\x89PNG")


def test_thirty_six_lines_differ_in_colour_or_dash():
    plot = LinePlot()
    plot.update([Series(str(i), [1, 2], [i, i], colour=i) for i in range(36)])
    assert len({(s["color"], s["dash"]) for s in plot.data}) == 36
    assert len({s["dash"] for s in plot.data[:6]}) == 6
