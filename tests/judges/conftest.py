import pytest
import torch

from tests.judges import tiny_vlm

KINDS = ("qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl")


@pytest.fixture(scope="session")
def vlm_folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("vlm")
    return {kind: tiny_vlm.build(kind, root / kind) for kind in KINDS}


@pytest.fixture(params=KINDS)
def vlm_folder(request, vlm_folders):
    return vlm_folders[request.param]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
