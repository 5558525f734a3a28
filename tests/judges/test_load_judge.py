"""Which judge a job gets."""

import shutil
import sys

import pytest

from cast_engine.errors import UserError
from cast_engine.judges.load import load_judge, same_judge
from cast_engine.stages.evaluate import judge_config
from schemas.job import EvaluateConfig, ScoreConfig

OWN = """
class Good:
    name, model_sha256 = "mine", "0" * 64
    def __init__(self, config):
        self.config = config
    def score(self, images, graphs):
        return []

class NoScore:
    name, model_sha256 = "mine", "0" * 64
    def __init__(self, config):
        pass
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "my_judge.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("my_judge", None)


def test_hf_takes_every_setting(vlm_folders):
    config = ScoreConfig(
        model=str(vlm_folders["qwen3_vl"]), mode="geneval2", rows="predict", layers=(1,), batch_size=3, device="cpu"
    )
    judge = load_judge(config)
    assert (judge.mode, judge.rows, judge.layers, judge.batch_size) == ("geneval2", "predict", (1,), 3)


def test_own_class_is_found_in_the_working_folder(own_module):
    config = ScoreConfig(judge="my_judge:Good", batch_size=2)
    judge = load_judge(config)
    assert judge.name == "mine"
    assert judge.config is config


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("my_judge:NoScore", "lacks score"),
        ("my_judge:Missing", "has no class 'Missing'"),
        ("not_there:Judge", "no module 'not_there'"),
        ("nonsense", '"package.module:Class"'),
    ],
)
def test_what_is_no_judge_is_said_in_one_line(own_module, name, says):
    with pytest.raises(UserError, match=says) as error:
        load_judge(ScoreConfig(judge=name))
    assert "\n" not in str(error.value)


def test_a_missing_folder_is_said(tmp_path):
    with pytest.raises(UserError, match="no model folder"):
        load_judge(ScoreConfig(model=str(tmp_path / "nowhere"), device="cpu"))


def test_the_evaluation_has_a_model_of_its_own(vlm_folders):
    folder = str(vlm_folders["qwen2_5_vl"])
    config = EvaluateConfig(judge="hf", model=folder, dtype="bfloat16", device="cpu", batch_size=3)
    judge = load_judge(judge_config(config), "evaluate")
    assert (str(judge.path), str(judge._text.dtype), judge.batch_size) == (folder, "torch.bfloat16", 3)
    with pytest.raises(UserError, match=r"evaluate\.judge.*nonsense|nonsense.*evaluate\.judge"):
        load_judge(judge_config(EvaluateConfig(judge="nonsense")), "evaluate")


def test_one_judge_for_reward_and_gain_is_known_by_its_content(vlm_folders, tmp_path):
    here, other = str(vlm_folders["qwen3_vl"]), str(vlm_folders["qwen2_5_vl"])
    copy = str(shutil.copytree(here, tmp_path / "copy"))
    score = ScoreConfig(model=here, layers=(1,))
    assert same_judge(score, EvaluateConfig(judge="hf", model=here, dtype="bfloat16"))
    assert same_judge(score, EvaluateConfig(judge="hf", model=copy))
    assert not same_judge(score, EvaluateConfig(judge="hf", model=other))
    assert not same_judge(score, EvaluateConfig(judge="exact", model=here))
    assert same_judge(ScoreConfig(judge="exact", model=here), EvaluateConfig(judge="exact", model=other))
    gone = ScoreConfig(model="/gone")  # a report is written again where the model is not
    assert same_judge(gone, EvaluateConfig(judge="hf", model="/gone"))
    assert not same_judge(gone, EvaluateConfig(judge="hf", model=here))
