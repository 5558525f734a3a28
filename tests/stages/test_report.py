"""The page: what it shows, that it is safe and self-contained, and that missing parts are said."""

import json
import re
import shutil
import time
from html.parser import HTMLParser

import numpy as np
import pytest

from cast_engine.run import report_credit, report_gallery, report_images
from cast_engine.run.report_plots import Chart, Line, draw
from cast_engine.stages import report
from cast_engine.store import Dataset
from schemas.job import JobConfig
from tests.stages.report_fakes import GRID, make_run, small_job, write_evaluation

VOID = {"meta", "img", "br", "link", "input", "hr", "col", "source", "path", "use", "line", "rect", "circle"}


class Page(HTMLParser):
    """The elements of a page, whether they nest, and its visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.wrong: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, {k: v or "" for k, v in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, {k: v or "" for k, v in attrs}))

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        if self.open and self.open[-1] == tag:
            self.open.pop()
        else:
            self.wrong.append(tag)

    def handle_data(self, data):
        if not self.open or self.open[-1] not in {"script", "style"}:
            self.words.append(data)

    def find(self, tag, **wanted):
        attrs = {k.rstrip("_").replace("_", "-"): v for k, v in wanted.items()}
        return [a for t, a in self.elements if t == tag and all(v in a.get(k, "").split() for k, v in attrs.items())]

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    layout, job = make_run(tmp_path_factory.mktemp("whole") / "run")
    path = report.write(layout, job)
    assert path == layout.report
    return layout, job, path.read_text()


@pytest.fixture
def copy(whole, tmp_path):
    layout, job, _ = whole
    shutil.copytree(layout.root, tmp_path / "run")
    return type(layout)(tmp_path / "run"), job


def test_everything_is_there(whole):
    _, job, text = whole
    page = Page(text)
    assert not page.wrong
    assert not page.open
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    for part in ("summary", "what", "held-out", "rewards", "dynamics", "gallery", "credit", "config"):
        assert page.find("section", id=part), part
    assert not page.find("section", id="missing"), page.text
    assert len(page.find("article", class_="pair")) == job.report.images
    assert len(page.find("article", class_="training")) == job.report.maps
    assert len(page.find("figure", class_="chart")) == 7 + 6 + 8
    assert "finished" in page.text
    assert "cast: each atom's own advantage" in page.text


def test_weights_are_shown_by_place_and_by_spread(whole):
    _, _, text = whole
    words = Page(text).text
    for title in ("What atoms with low spread have to say", "Spread of the mean of W", "Mean of W by place"):
        assert title in words
    assert "on the background" in text


def test_the_summary_is_that_of_the_evaluations(whole):
    layout, _, text = whole
    metas = Dataset.open(layout.evaluate("base")).rows().to_pylist()
    mean = 100 * np.mean([np.mean(r["atom_scores"]) for r in metas])
    assert f"before, {mean:.1f}%" in Page(text).text


def test_nothing_leaves_the_page(whole):
    _, _, text = whole
    page = Page(text)
    policy = next(a["content"] for a in page.find("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.split("script-src")[1].split(";")[0]
    assert not re.search(r"https?:|//[a-z]|@import", re.sub(r"base64,[A-Za-z0-9+/=]*", "", text))
    for tag, attrs in page.elements:
        for name in ("src", "href", "action", "srcset", "data", "poster"):
            assert attrs.get(name, "#").startswith(("#", "data:image/")), (tag, attrs)
        assert not [name for name in attrs if name.startswith("on")]
    assert len(text) < 15_000_000


def test_pictures_have_alternatives_and_controls_have_names(whole):
    page = Page(whole[2])
    images = page.find("img")
    assert len(images) > 20
    assert all(len(a["alt"]) > 10 for a in images)
    assert all(a.get("aria-label") for _, a in page.elements if a.get("role") in {"img", "region"})
    assert dict(page.elements)["html"]["lang"] == "en"
    assert {a["name"] for a in page.find("select")} == {"kind", "change", "order"}


def test_verdicts_are_words_not_only_colours(whole):
    page = Page(whole[2])
    assert page.text.count("✓ right") > 10
    assert page.text.count("✗ wrong") > 5
    assert "counted " in page.text


def test_prompts_are_data(tmp_path):
    layout, job = make_run(tmp_path / "run", hostile=True)
    text = report.write(layout, job).read_text()
    page = Page(text)
    assert len(page.find("script")) == 1
    assert "<script>alert" not in text
    assert '<script>alert("x")</script>' in page.text  # shown, not run
    assert not [a for a in page.find("img") if a.get("src") == "x"]
    assert not [a for _, a in page.elements if "onerror" in a]


def test_a_page_is_the_same_each_time(whole):
    layout, job, text = whole
    assert report.write(layout, job).read_text() == text


# ---- what is missing


def test_a_run_that_just_began(tmp_path):
    layout, job = make_run(tmp_path / "run", rounds=0, evaluations=("base",))
    page = Page(report.write(layout, job).read_text())
    assert "not finished: 0 of 3 rounds" in page.text
    assert "No training images were scored yet." in page.text
    assert len(page.find("article", class_="pair")) == job.report.images
    assert not page.find("article", class_="training")
    assert {a["name"] for a in page.find("select")} == {"kind", "order"}


def test_an_empty_folder(tmp_path):
    layout, job = make_run(tmp_path / "run", rounds=0, evaluations=())
    shutil.rmtree(layout.root / "graphs")
    page = Page(report.write(layout, job).read_text())
    assert "The untrained model was not evaluated" in page.text
    assert "No metrics of training yet." in page.text
    assert not page.wrong


def test_an_unfinished_run_shows_its_newest_evaluation(tmp_path):
    layout, job = make_run(tmp_path / "run", rounds=2)
    page = Page(report.write(layout, job).read_text())
    assert "“after” is round 2" in page.text
    assert "after 2 rounds" in page.text
    assert "not finished: 2 of 3 rounds" in page.text


def test_no_evaluation_during_training(tmp_path):
    job = small_job(evaluate={"double_steps": False})
    layout, _ = make_run(tmp_path / "run", job, evaluations=("base", "round-0003"))
    page = Page(report.write(layout, job).read_text())
    assert "There was no evaluation during training" in page.text
    assert "evaluate.double_steps is off" in page.text
    assert "over twice the steps" not in page.text


def test_scored_but_neither_weighed_nor_trained(copy):
    layout, job = copy
    for round_ in range(job.rounds):
        shutil.rmtree(layout.round(round_, "advantages"))
        shutil.rmtree(layout.round(round_, "train"))
    page = Page(report.write(layout, job).read_text())
    assert "Round 0: no advantages yet, so its images have no W." in page.text
    assert len(page.find("article", class_="training")) == job.report.maps
    assert not page.find("section", id="dynamics")


def test_failed_samples_are_counted(copy):
    layout, job = copy
    shutil.rmtree(layout.evaluate("round-0003"))
    graphs = {}
    reader = Dataset.open(layout.graphs("evaluate")).reader()
    for key in reader.keys():  # noqa: SIM118
        body = json.loads(reader.read(key)["graph.json"])
        graphs[key] = (body["prompt"], report.SceneGraph.model_validate(body))
    write_evaluation(layout.evaluate("round-0003"), graphs, 0.9, fail=3)
    page = Page(report.write(layout, job).read_text())
    assert "Evaluation round-0003: 3 of 10 images failed and are left out." in page.text
    assert len(page.find("article", class_="pair")) <= job.report.images


def test_evaluations_whose_manifest_has_no_counts_are_read_from_their_records(copy, monkeypatch):
    layout, job = copy
    before = report.write(layout, job).read_text()
    plain = report.report_data._plain

    def without(dataset, columns):
        return [r | ({"counted": None} if "counted" in r else {}) for r in plain(dataset, columns)]

    monkeypatch.setattr(report.report_data, "_plain", without)
    assert report.write(layout, job).read_text() == before


@pytest.mark.parametrize("what", ["score", "rollout", "evaluate", "graphs", "metrics"])
def test_damage_is_said_and_the_rest_shown(copy, what):
    layout, job = copy
    folder = {"evaluate": layout.evaluate("round-0002"), "graphs": layout.graphs("evaluate")}.get(what)
    if what == "metrics":
        (layout.round(1, "train") / "metrics.jsonl").write_text('{"round": 1, "upd')
        (layout.round(1, "train") / "state.json").write_text("[]")
    else:
        folder = folder or layout.round(0, what)
        for name in ("index.parquet", *(p.relative_to(folder) for p in folder.glob("data/*/*"))):
            file = folder / name
            file.write_bytes(file.read_bytes()[:-1] + b"?")
    page = Page(report.write(layout, job).read_text())
    assert not page.wrong
    assert page.find("section", id="missing")
    assert page.find("article", class_="pair")


def test_other_credit_rules(tmp_path):
    for credit in ("scalar", "shuffled"):
        job = small_job(advantages={"credit": credit}, rounds=1)
        layout, _ = make_run(tmp_path / credit, job)
        page = Page(report.write(layout, job).read_text())
        assert f"The rule of this run, {credit}" in page.text
        assert ("A of the image" in page.text) == (credit == "scalar")


def test_a_fall_in_counting_is_a_warning(whole, monkeypatch):
    layout, job, _ = whole
    monkeypatch.setattr(report, "count_warning", lambda difference: "count fell by 5.0 points")
    page = Page(report.render(layout, job))
    assert "Warning: count fell by 5.0 points." in page.text


def test_a_judge_that_marks_its_own_work_is_named(whole):
    layout, job, _ = whole
    same = job.model_copy(update={"evaluate": job.evaluate.model_copy(update={"judge": job.score.judge})})
    assert "the judge of the reward also gave the evaluation" in Page(report.render(layout, same)).text


def test_nothing_to_show_when_nothing_is_asked_for(whole):
    layout, job, _ = whole
    none = job.model_copy(update={"report": job.report.model_copy(update={"images": 0, "maps": 0})})
    page = Page(report.render(layout, none))
    assert not page.find("article")


# ---- parts


def test_chosen_prompts_are_not_only_the_best():
    changes = {f"k{i}": c for i, c in enumerate([0.0, 0.5, -0.2, 0.1, 0.0, 0.0, -0.4, 0.3, 0.0])}
    chosen = report_gallery.choose(changes, 6)
    assert chosen[:4] == ["k1", "k7", "k6", "k2"]
    assert len(chosen) == len(set(chosen)) == 6
    assert len(report_gallery.choose(changes, 50)) == 9
    assert report_gallery.choose({}, 5) == []


def test_overlays_show_the_map_where_it_is():
    image = np.full((16, 16, 3), 200, dtype=np.uint8)
    values = np.zeros((2, 2))
    values[0, 1] = 1.0
    out = report_images.overlay(image, values, low=-1, high=1, signed=True).astype(int)
    assert (out[:8, 8:] == out[0, 15]).all()  # the whole cell, not smoothed
    assert out[0, 15, 2] > out[0, 15, 0] + 50  # blue above 0
    assert abs(out[15, 0, 2] - out[15, 0, 0]) < 5  # grey at 0
    assert report_images.cell_centre(values, 1) == (75.0, 25.0)


def test_grid_guessed_from_the_shape_of_the_picture():
    assert report_credit.guess_grid(64, 1.0) == GRID
    assert report_credit.guess_grid(32, 0.5) == (4, 8)


def test_large_pictures_become_small():
    noise = np.random.default_rng(0).integers(0, 256, (1024, 768, 3), dtype=np.uint8)
    uri = report_images.data_uri(noise)
    assert uri.startswith("data:image/jpeg;base64,")
    assert len(uri) < 150_000


def test_charts_leave_out_what_is_not_finite():
    assert draw(Chart("none", "t", [Line("a", [0, 1], [float("nan")] * 2)])) is None
    drawn = draw(Chart("some", "T", [Line("a", [0, 1, 2], [1.0, float("nan"), 3.0])], digits=0))
    assert drawn.words == "T. 1 at round 0, 3 at round 2."
    assert drawn.rows == [["0", "1"], ["1", "missing"], ["2", "3"]]
    assert "xmlns" not in drawn.svg
    assert "#010203" not in drawn.svg


@pytest.mark.slow
def test_a_run_of_the_tiny_job_is_reported_in_seconds(tmp_path):
    sections = {"rollout": {"prompts_per_round": 4, "group_size": 16}, "prompts": {"evaluate_count": 256}}
    job = JobConfig.model_validate({"rounds": 30, "evaluate": {"every": 8}} | sections)
    layout, _ = make_run(tmp_path / "run", job)
    report.render(*make_run(tmp_path / "warm"))  # imports
    began = time.process_time()
    path = report.write(layout, job)
    assert time.process_time() - began < 5
    assert path.stat().st_size < 2_000_000
