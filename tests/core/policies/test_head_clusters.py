"""The head file: what it keeps, what it refuses, which models it fits, and which file a run takes."""

import json
import shutil
from pathlib import Path

import pytest

from sfi_core import SfiConfig, slow_fast
from sfi_core.errors import ConfigError, InputError
from sfi_core.models.load import BUNDLED, load
from sfi_core.models.source import model_digest
from sfi_core.policies.built_in.synckv import HeadClusters, LayerClusters
from tests.core.conftest import tiny_qwen3

IDS = SfiConfig(trigger_token_ids=(1,))
LAYERS = {
    0: LayerClusters(cluster_of=(0, 1, 0, 1), representatives=(2, 1)),
    3: LayerClusters(cluster_of=(0, 0, 0, 1), representatives=(1, 3)),
}
CLUSTERS = HeadClusters(digest="a1", model="ours", layers=LAYERS, made_from={"texts": 5})


def layer(cluster_of, representatives):
    return {"layers": {"0": {"cluster_of": cluster_of, "representatives": representatives}}}


def test_a_file_gives_back_what_was_saved(tmp_path):
    (tmp_path / "heads.json").write_text(CLUSTERS.text())
    assert HeadClusters.load(tmp_path / "heads.json") == CLUSTERS


def test_every_head_follows_its_cluster_s_representative():
    assert CLUSTERS.leader_of(0) == (2, 1, 2, 1)
    assert CLUSTERS.leader_of(3) == (1, 1, 1, 3)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"format": 2}, "format: Input should be 1"),
        ({"digest": None}, "digest: Input should be a valid string"),
        ({"layers": []}, "layers: Input should be an object"),
        ({"layers": {}}, "layers: Dictionary should have at least 1 item"),
        ({"layers": {"first": {}}}, "layers.first"),
        (layer([0, True], [0]), "layers.0.cluster_of.1: Input should be a valid integer"),
        ({"layers": {"0": {"cluster_of": [0]}}}, "layers.0.representatives: Field required"),
        (layer([0, 0], [0, 1]), "layers.0: cluster_of must use each number from 0 to 1"),
        (layer([0, 2], [0, 1]), "layers.0: cluster_of must use each number from 0 to 1"),
        (layer([0, 1], [1, 0]), "must be in their own clusters, got head 1 for cluster 0"),
        (layer([0, 1], [0, 2]), "must be in their own clusters, got head 2 for cluster 1"),
        (layer([0, 1], [0, 1, 1]), "layers.0: cluster_of must use each number from 0 to 2"),
    ],
)
def test_a_damaged_file_is_refused_with_what_is_wrong(tmp_path, changes, told):
    path = tmp_path / "heads.json"
    path.write_text(json.dumps(json.loads(CLUSTERS.text()) | changes))
    with pytest.raises(InputError) as caught:
        HeadClusters.load(path)
    assert str(caught.value).startswith(f"head file {path} is damaged: ")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read: No such file"):
        HeadClusters.load(tmp_path / "none.json")
    (tmp_path / "cut.json").write_text(CLUSTERS.text()[:-20])
    with pytest.raises(InputError, match="is damaged: the file: Invalid JSON"):
        HeadClusters.load(tmp_path / "cut.json")


@pytest.mark.parametrize(
    ("heads", "digest", "told"),
    [
        ({0: 4, 3: 4}, "b2", "the checkpoint that runs, b2, got a1"),
        ({0: 4, 1: 4}, "a1", "the model's 4 KV heads in layer 1, got 0"),
        ({0: 4, 3: 8}, "", "8 KV heads in layer 3, got 4"),
    ],
)
def test_another_model_is_refused(heads, digest, told):
    with pytest.raises(ConfigError, match=told):
        CLUSTERS.check(heads, digest)


@pytest.mark.parametrize("digest", ["a1", ""])
def test_the_same_model_and_one_without_a_digest_are_taken(digest):
    CLUSTERS.check({0: 4, 3: 4}, digest)


def test_the_bundled_file_is_the_bundled_checkpoint_s():
    model, _ = load(device="cpu")
    clusters = HeadClusters.load(BUNDLED / "heads.json")
    config = model.config
    heads = dict.fromkeys(range(config.num_hidden_layers), config.num_key_value_heads)
    assert model_digest(model)
    assert clusters.digest == model_digest(model)
    clusters.check(heads, model_digest(model))
    assert all(len(chosen) == 1 for chosen in (layer.representatives for layer in clusters.layers.values()))


def clusters(digest: str = "", layers: int = 2, heads: int = 2) -> HeadClusters:
    layer = LayerClusters(cluster_of=(0,) * heads, representatives=(0,))
    return HeadClusters(digest=digest, layers=dict.fromkeys(range(layers), layer))


def use(path: Path, model):
    config = IDS.replace(synckv={"heads": str(path)})
    with slow_fast(model, None, config, policy="synckv") as session:
        return session.policy


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (clusters(layers=3), "must have the model's 0 KV heads in layer 2, got 2"),
        (clusters(heads=3), r"must have the model's 2 KV heads in layer 0, got 3"),
    ],
)
def test_a_run_refuses_the_file_of_another_model(tmp_path: Path, made: HeadClusters, message: str):
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
