"""Which head file a run takes, and which it refuses."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from sfi_core import SfiConfig, slow_fast
from sfi_core.errors import ConfigError
from sfi_core.models.load import BUNDLED, load
from sfi_core.policies.built_in.synckv import HeadClusters, LayerClusters
from tests.core.conftest import tiny_qwen3

IDS = SfiConfig(trigger_token_ids=(1,))


def clusters(digest: str = "", layers: int = 2, heads: int = 2) -> HeadClusters:
    layer = LayerClusters(cluster_of=(0,) * heads, representatives=(0,))
    return HeadClusters(digest=digest, layers=dict.fromkeys(range(layers), layer))


def use(path: Path, model: Any) -> Any:
    config = IDS.replace(synckv={"heads": str(path)})
    with slow_fast(model, None, config, policy="synckv") as session:
        return session.policy


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (clusters(layers=3), r"the model's full-attention layers \[0, 1\], got \[0, 1, 2\]"),
        (clusters(heads=3), r"must have the model's 2 KV heads in layer 0, got 3"),
    ],
)
def test_a_file_of_another_model_is_refused(tmp_path: Path, made: HeadClusters, message: str):
    (path := tmp_path / "heads.json").write_text(made.text())
    with pytest.raises(ConfigError, match=message):
        use(path, tiny_qwen3())


def test_a_file_of_another_checkpoint_is_refused(tmp_path: Path):
    (path := tmp_path / "heads.json").write_text(clusters("another", layers=4).text())
    with pytest.raises(ConfigError, match=r"must be of the checkpoint that runs, .*, got another"):
        use(path, load(device="cpu")[0])


def test_the_file_in_the_model_s_folder_is_taken(tmp_path: Path):
    shutil.copytree(BUNDLED, folder := tmp_path / "model")
    model, _ = load(str(folder), device="cpu")
    with slow_fast(model, None, IDS, policy="synckv") as session:
        assert session.policy.config.synckv.heads == str(folder / "heads.json")
    (folder / "heads.json").unlink()
    with (
        pytest.raises(ConfigError, match="make one with `sfi tune heads`"),
        slow_fast(model, None, IDS, policy="synckv"),
    ):
        pass
