"""Fetching: said before it is done, refused before it fails. The hub's own library plays the hub."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import HfApi, constants, errors
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from huggingface_hub.hf_api import ModelInfo
from support.random_flux import save_random_flux

from g2rpo.models.flux.family import FAMILY
from g2rpo.rewards.registry import REWARDS, reward_spec
from g2rpo.setup.fetch import fetch_needs, missing_files, needs

ROOT = Path(__file__).parents[2]
SHA = "0" * 40
TUNED = "owner/tuned"  # a model whose name is not built in
FLUX, HPS = "black-forest-labs/FLUX.1-dev", "xswu/HPSv2"
WORDS = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"  # of which rewards take the tokenizer
WORD_FILES = ("tokenizer_config.json", "vocab.json", "merges.txt")
HPS_BYTES = 1_972_455_412


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_random_flux(tmp_path_factory.mktemp("flux"))


class Hub:
    """A hub of three repositories, over the calls that are made of it."""

    def __init__(self, model: Path, cache: Path) -> None:
        self.model, self.cache = model, cache
        self.downloads: list[str] = []
        self.logged_in, self.granted, self.gated = True, True, "auto"
        self.drop: set[str] = set()

    def model_info(self, repo_id, *, files_metadata=False, **_):
        assert files_metadata  # else no sizes
        if repo_id in (FLUX, TUNED):
            paths = [path for path in self.model.rglob("*") if path.is_file()]
            files = [(path.relative_to(self.model).as_posix(), path.stat().st_size) for path in paths]
            files += [("flux1-dev.safetensors", 23_802_932_552)]  # not ours: the copy in another layout
            card = {"license": "other", "license_name": "flux-1-dev-non-commercial-license"}
            return self.info(repo_id, files, card, gated=self.gated)
        if repo_id == HPS:
            files = [("HPS_v2.1_compressed.pt", HPS_BYTES), ("HPS_v2_compressed.pt", HPS_BYTES)]
            return self.info(repo_id, files, {"license": "apache-2.0"}, gated=False)
        if repo_id == WORDS:
            files = [*((name, 1000) for name in WORD_FILES), ("model.safetensors", 3_944_517_836)]
            return self.info(repo_id, files, {"license": "mit"}, gated=False)
        raise http_error(RepositoryNotFoundError, 401)

    def info(self, repo_id, files, card, gated):
        siblings = [{"rfilename": name, "size": size} for name, size in files if name not in self.drop]
        return ModelInfo(id=repo_id, sha=SHA, gated=gated, siblings=siblings, cardData=card, tags=[])

    def auth_check(self, repo_id, **_):
        if not self.granted:
            raise http_error(GatedRepoError, 403)

    def snapshot_download(self, repo_id, *, allow_patterns, **_):
        self.downloads.append(repo_id)
        folder = self.snapshot(repo_id)
        if repo_id in (FLUX, TUNED):
            shutil.copytree(self.model, folder, dirs_exist_ok=True)
        else:
            folder.mkdir(parents=True)
            names = ("HPS_v2.1_compressed.pt",) if repo_id == HPS else WORD_FILES
            assert set(names) <= {*allow_patterns}
            for name in names:
                (folder / name).write_bytes(b"weights")
        return str(folder)

    def snapshot(self, repo_id) -> Path:
        return self.cache / f"models--{repo_id.replace('/', '--')}" / "snapshots" / SHA


def http_error(kind, status):
    client = importlib.import_module(errors.HTTPError.__module__.partition(".")[0])  # httpx, or its successor
    request = client.Request("GET", "https://huggingface.co/api/models/x/y")
    return kind("refused", response=client.Response(status, request=request))


@pytest.fixture
def hub(model, tmp_path, monkeypatch) -> Hub:
    played = Hub(model, tmp_path / "hub")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(played.cache))
    monkeypatch.setattr(HfApi, "model_info", lambda self, *args, **kwargs: played.model_info(*args, **kwargs))
    monkeypatch.setattr(HfApi, "auth_check", lambda self, *args, **kwargs: played.auth_check(*args, **kwargs))
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_token" if played.logged_in else None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", played.snapshot_download)
    return played


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_what_will_be_fetched_is_said_first(hub, model):
    flux, hps, words, own, tiny = needs(FLUX, ["hps", "mine:score", "tiny_clip", "hps"])
    assert (flux.size_bytes, flux.missing_bytes) == (size_of(model), size_of(model))  # no single-file copy
    assert flux.licence == "flux-1-dev-non-commercial-license" and flux.access == "gated, granted"
    assert (hps.num_files, hps.missing_bytes, hps.licence, hps.access) == (1, HPS_BYTES, "apache-2.0", "open")
    assert "1.97 GB to fetch" in str(hps) and "reward hps" in str(hps)
    assert (words.origin, words.num_files, words.size_bytes) == (WORDS, 3, 3000)
    assert "your own code" in str(own) and "ships with g2rpo" in str(tiny)
    assert not hub.downloads


def test_a_reward_of_ones_own_is_looked_for_where_it_is(hub, tmp_path):
    (weights := tmp_path / "mine.pt").write_bytes(b"weights")
    own = needs("tiny", ["hps"], {"hps": {"path": str(weights)}})[1:]
    assert "mine.pt: here" in str(own[0]) and own[0].source is None and own[1].origin == WORDS
    for name in WORD_FILES:
        (tmp_path / name).write_text("{}")
    beside = needs("tiny", ["hps"], {"hps": {"path": str(weights)}})[1:]
    assert [need.source for need in beside] == [None, None] and str(tmp_path) in beside[1].origin
    named = needs("tiny", ["hps"], {"hps": {"path": HPS, "tokenizer": str(tmp_path)}})[1:]
    assert named[0].origin == HPS and named[1].source is None
    with pytest.raises(ValueError, match="no repository 'no/such'"):
        needs("tiny", ["hps"], {"hps": {"path": "no/such"}})


def test_then_it_is_fetched_and_not_again(hub, capsys):
    fetch_needs(needs(FLUX, ["hps"]))
    assert hub.downloads == [FLUX, HPS, WORDS]
    assert "1.97 GB to fetch into" in capsys.readouterr().out
    again = needs(FLUX, ["hps"])
    assert [need.num_missing for need in again] == [0, 0, 0] and "all here" in str(again[0])
    hub.logged_in = False  # what is here needs no permission
    fetch_needs(again)
    assert hub.downloads == [FLUX, HPS, WORDS]
    (hub.snapshot(FLUX) / "vae" / "config.json").unlink()
    assert needs(FLUX, [])[0].num_missing == 1


@pytest.mark.parametrize(
    ("logged_in", "granted", "said"),
    [(False, True, ["not logged in", "hf auth login"]), (True, False, ["not granted"])],
)
def test_gated_without_permission(hub, logged_in, granted, said):
    hub.logged_in, hub.granted = logged_in, granted
    found = needs(FLUX, ["hps"])  # a look is free
    with pytest.raises(ValueError) as caught:
        fetch_needs(found)
    for part in [FLUX, f"accept its licence on https://huggingface.co/{FLUX}", *said]:
        assert part in str(caught.value)
    assert ("hf auth login" in str(caught.value)) is not logged_in
    assert not hub.downloads


def test_an_open_model_asks_for_no_login(hub):
    hub.gated, hub.logged_in = False, False
    assert needs(FLUX, [])[0].access == "open"


def test_no_such_repository(hub):
    with pytest.raises(ValueError, match=r"no repository 'no/such'.*check the name.*hf auth login"):
        needs("no/such", [])


def test_a_repository_without_a_part(hub):
    hub.drop = {"HPS_v2.1_compressed.pt"}
    with pytest.raises(ValueError, match=r"xswu/HPSv2 on the hub contains no HPS_v2.1_compressed.pt"):
        needs("tiny", ["hps"])
    hub.drop = {"model_index.json"}
    with pytest.raises(ValueError, match=r"no model_index.json.*not a pipeline in diffusers layout"):
        needs(FLUX, [])


def test_the_index_of_a_repository_says_which_parts_are_needed(hub, model):
    (tuned,) = needs(TUNED, [])
    assert tuned.size_bytes == size_of(model) and tuned.family is FAMILY
    assert hub.downloads == [TUNED]  # its configuration


def test_a_repository_of_a_family_that_we_do_not_have(hub, model, tmp_path):
    hub.model = shutil.copytree(model, tmp_path / "model")
    (hub.model / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusion3Pipeline"}))
    with pytest.raises(ValueError, match=r"is a StableDiffusion3Pipeline; g2rpo has families for"):
        needs(TUNED, [])
    found = needs(TUNED, [], family="support.other_family:FAMILY")[0]
    used = [hub.model / "model_index.json"]
    used += [path for part in ("scheduler", "transformer") for path in (hub.model / part).iterdir()]
    assert found.size_bytes == sum(path.stat().st_size for path in used)


def test_space_is_looked_at_before(hub, monkeypatch):
    found = needs(FLUX, ["hps"])
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2 * HPS_BYTES, HPS_BYTES, HPS_BYTES))
    with pytest.raises(ValueError, match=r"1.97 GB to fetch.*has 1.97 GB free.*HF_HOME"):
        fetch_needs(found)
    assert not hub.downloads


def test_every_reward_is_accounted_for():
    # A new reward that loads something names it in its spec; these load what lies in the package.
    inside = {"tiny_clip", "tiny_preference", "verifier", "verifier_strict", "colourfulness"}
    inside |= {"geneval", "geneval_strict", "ocr"}
    for name in REWARDS:
        spec = reward_spec(name)
        assert bool(spec.sources) == (name not in {*inside, "unified", "http"}), name
        assert spec.sources or ("server" if name in ("unified", "http") else "ships") in spec.origin
    assert "ships with g2rpo or a package that it needs" in str(needs("tiny", ["verifier"])[1])
    assert "server" in str(needs("tiny", ["unified"])[1])
    with pytest.raises(ValueError, match="did you mean 'hps'"):
        needs("tiny", ["hpss"])


@pytest.mark.parametrize(
    "lost",
    [
        "scheduler/scheduler_config.json",
        "tokenizer/tokenizer_config.json",
        "tokenizer_2/tokenizer.json",
        "text_encoder_2/config.json",
        "transformer/diffusion_pytorch_model.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
    ],
)
def test_an_incomplete_folder_is_told(model, tmp_path, lost):
    folder = shutil.copytree(model, tmp_path / "model")
    assert missing_files(folder, FAMILY) == [] and "complete" in str(needs(str(folder), [])[0])
    (folder / lost).unlink()
    part = lost.rpartition("/")[0]
    with pytest.raises(ValueError, match=f"is incomplete; it lacks {part}/"):
        needs(str(folder), [])


def test_a_missing_shard_is_told(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    part = folder / "transformer"
    (part / "diffusion_pytorch_model.safetensors").rename(part / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = part / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    assert missing_files(folder, FAMILY) == ["transformer/model-00002-of-00002.safetensors"]


def command(place: Path, *words: str, **environment: str) -> subprocess.CompletedProcess:
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HOME": str(place / "home")} | environment
    return subprocess.run(
        [sys.executable, "-m", "g2rpo", "fetch", *words],
        cwd=place,
        env=os.environ | own,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ({"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}, "ConnectError"),
    ],
)
def test_no_network(tmp_path, environment, said):
    done = command(tmp_path, f"model={FLUX}", **environment)
    assert done.returncode == 2 and done.stderr.startswith("error: the hub could not be reached for")
    assert said in done.stderr and "Check the network" in done.stderr and "Traceback" not in done.stderr


def test_the_embedded_model_needs_nothing(tmp_path):
    done = command(tmp_path, "--dry-run", HF_HUB_OFFLINE="1")
    assert done.returncode == 0 and "model: tiny: ships with g2rpo" in done.stdout
    assert not (tmp_path / "home").exists()


def test_an_absent_prompt_file_is_named_with_its_origin(tmp_path):
    (tmp_path / "own.toml").write_text('prompts = "hpsv2_train.json"\neval_prompts = "mine.txt"\n')
    done = command(tmp_path, "own.toml", "--dry-run", HF_HUB_OFFLINE="1")
    assert done.returncode == 0
    assert (
        "prompts: hpsv2_train.json does not exist, and this command does not download it; it contains"
        in done.stdout
    )
    assert "`hf download ymhao/HPDv2 train.json" in done.stdout
    assert (
        "eval_prompts: mine.txt does not exist, and this command does not download it; give eval_prompts=FILE"
        in done.stdout
    )
    (tmp_path / "hpsv2_train.json").write_text('["a cat"]')
    assert "\nprompts:" not in command(tmp_path, "own.toml", "--dry-run", HF_HUB_OFFLINE="1").stdout
