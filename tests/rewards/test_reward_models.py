"""How the reward models are used: batches, captions, dtypes, where weights lie, options, the hub."""

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from support.reward_files import MODELS, bert_tokenizer, clip_tokenizer, loading, pixels, publish

from g2rpo.rewards import model_reward as scorer
from g2rpo.rewards import preprocess
from g2rpo.rewards.model_reward import scoring
from g2rpo.rewards.registry import load_reward, load_rewards, reward_spec

CPU = torch.device("cpu")
PROMPTS = ["a photo of a cat", "two red cubes", "a photo of a cat", "“bright”", "a blue sphere"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {reward: publish(reward, tmp_path_factory.mktemp(reward)) for reward in MODELS}


@pytest.fixture(scope="module")
def images():
    return torch.rand(5, 3, 61, 80, generator=torch.Generator().manual_seed(0))


def load(folders, reward, **options):
    return load_reward(reward, CPU, {"path": str(folders[reward]), **loading(reward), **options}).reward


@pytest.mark.parametrize("reward", MODELS)
def test_batches_and_company_change_nothing(folders, images, reward):
    loaded = load(folders, reward)
    whole = loaded(images, PROMPTS)
    assert whole.shape == (5,) and whole.dtype == torch.float32 and whole.std() > 0
    small = load(folders, reward, batch=2)
    alone = torch.cat([small(one, [prompt]) for one, prompt in zip(images.split(1), PROMPTS, strict=True)])
    torch.testing.assert_close(small(images, PROMPTS), whole, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(alone, whole, atol=2e-6, rtol=1e-6)
    # Each picture is judged by its own caption.
    backwards = loaded(images.flip(0), PROMPTS[::-1]).flip(0)
    torch.testing.assert_close(backwards, whole, atol=2e-6, rtol=1e-6)
    assert (loaded(images, PROMPTS[::-1])[0] - whole[0]).abs() > 2e-5
    assert loaded(images[:0], []).shape == (0,)


@pytest.mark.parametrize("reward", MODELS)
def test_captions_are_read_once(folders, images, reward, monkeypatch):
    loaded = load(folders, reward, batch=2)
    read = []
    encode = loaded.encode
    monkeypatch.setattr(loaded, "encode", lambda prompts: read.append(prompts) or encode(prompts))
    before = loaded(images, PROMPTS)
    assert read == [["a photo of a cat", "two red cubes"], ["“bright”", "a blue sphere"]]
    assert torch.equal(loaded(images, PROMPTS), before) and len(read) == 2
    # Bounded: what was asked for least recently goes, and one call may ask for more than are kept.
    monkeypatch.setattr(scorer, "CAPTIONS_KEPT", 3)
    assert torch.equal(loaded(images, PROMPTS), before) and len(read) == 2
    assert list(loaded._captions) == [(2, "two red cubes"), (2, "“bright”"), (2, "a blue sphere")]
    loaded(images[:2], ["“bright”", "a blue sphere"])
    assert len(read) == 2
    loaded(images[:1], ["a blue sphere"])  # in a batch of another size its last bits are others
    loaded(images[:1], ["new"])
    assert read[2:] == [["a blue sphere"], ["new"]]
    assert list(loaded._captions) == [(2, "a blue sphere"), (1, "a blue sphere"), (1, "new")]


def test_the_default_dtype_is_the_devices():
    assert scorer.scoring_dtype("auto", "cpu") == torch.float32
    assert scorer.scoring_dtype("auto", "cuda") == torch.float16
    assert (
        scorer.scoring_dtype("bfloat16", "cpu") == scorer.scoring_dtype("bfloat16", "cuda") == torch.bfloat16
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("reward", MODELS)
def test_low_precision_is_near(folders, images, reward, dtype):
    exact = load(folders, reward)(images, PROMPTS)
    loaded = load(folders, reward, dtype=dtype)
    kinds = {one.dtype for name, one in loaded.network.named_parameters() if not name.startswith("mlp.")}
    assert kinds == {scorer.DTYPES[dtype]}
    scores = loaded(images, PROMPTS)
    assert scores.dtype == torch.float32 and scores.isfinite().all()
    error = (scores - exact).abs().max()
    limit = {"imagereward": 0.1}.get(reward, 0.01)  # of random tiny networks; rounding, not another formula
    assert 0 < error < limit * (1 if dtype == "bfloat16" else 0.2)


@pytest.mark.gpu
@pytest.mark.parametrize("reward", MODELS)
def test_on_a_gpu_the_default_is_near_the_cpus(folders, images, reward):
    exact = load(folders, reward)(images, PROMPTS)
    options = {"path": str(folders[reward]), **loading(reward)}
    loaded = load_reward(reward, torch.device("cuda"), options).reward
    assert loaded.dtype == torch.float16
    limit = {"imagereward": 0.02}.get(reward, 0.002)
    assert (loaded(images, PROMPTS).cpu() - exact).abs().max() < limit


def test_the_scale_and_the_last_products_are_never_rounded(folders):
    """In bfloat16, PickScore's exp(4.33) would be 0.4 % off, and its dot product as much again."""
    loaded = load(folders, "pickscore", dtype="bfloat16")
    assert loaded.scale == pytest.approx(75.94428253173828 / 100, rel=1e-6)
    with torch.no_grad():
        captions = loaded.encode(["a cat"])
        score = loaded.score_pixels(torch.zeros(1, 3, 56, 56), captions)
    assert captions.dtype == score.dtype == torch.float32
    torch.testing.assert_close(captions.norm(dim=-1), torch.ones(1), atol=1e-6, rtol=0)
    assert {one.dtype for one in load(folders, "imagereward", dtype="float16").network.mlp.parameters()} == {
        torch.float32
    }


@pytest.mark.parametrize("reward", MODELS)
def test_a_picture_that_is_no_number_has_no_score(folders, images, reward):
    spoilt = images.clone()
    spoilt[1, 0, 3, 3], spoilt[3, 2, 30, 40] = torch.nan, torch.inf
    loaded = load(folders, reward)
    scores, sound = loaded(spoilt, PROMPTS), loaded(images, PROMPTS)
    assert scores.isnan().tolist() == [False, True, False, True, False]
    torch.testing.assert_close(scores[[0, 2, 4]], sound[[0, 2, 4]], atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("reward", MODELS)
def test_input_that_does_not_do(folders, images, reward):
    loaded = load(folders, reward)
    with pytest.raises(ValueError, match="5 images but 1 prompts"):
        loaded(images, ["a"])
    with pytest.raises(ValueError, match=r"values from 0.* to 25"):
        loaded(images * 255, PROMPTS)


# ---- where weights lie


def devices(loaded):
    tensors = (*loaded.network.parameters(), *loaded.network.buffers())
    return {one.device.type for one in tensors}


@pytest.mark.parametrize("reward", MODELS)
def test_offload_moves_weights_in_and_out(folders, images, reward):
    """To the meta device, which any machine has: it keeps no numbers, so what comes back was never there."""
    loaded = load_reward(
        reward,
        torch.device("meta"),
        {"path": str(folders[reward]), "offload": "cpu", "dtype": "float32", **loading(reward)},
    ).reward
    assert devices(loaded) == {"cpu"}
    with loaded.scoring():
        assert devices(loaded) == {"meta"}
        with loaded.scoring():
            assert devices(loaded) == {"meta"}
        assert devices(loaded) == {"meta"}
    assert devices(loaded) == {"cpu"}
    with pytest.raises(RuntimeError, match="the phase fails"), loaded.scoring():
        raise RuntimeError("the phase fails")
    assert devices(loaded) == {"cpu"}
    loaded.device = CPU
    assert torch.equal(loaded(images, PROMPTS), load(folders, reward)(images, PROMPTS))
    stays = load_reward(
        reward, torch.device("meta"), {"path": str(folders[reward]), **loading(reward)}
    ).reward
    with stays.scoring():
        pass
    assert devices(stays) == {"meta"}


def test_a_phase_of_several_calls_moves_weights_once(folders, images, monkeypatch):
    options = {r: {"path": str(folders[r]), "offload": "cpu", **loading(r)} for r in ("hps", "imagereward")}
    rewards = load_rewards([*options, "colourfulness"], CPU, options)
    moved = []
    real = scorer._moved
    monkeypatch.setattr(scorer, "_moved", lambda tensor, device: moved.append(1) or real(tensor, device))
    once = sum(len(rewards[name].reward._cpu_tensors) for name in options)
    for _ in range(2):
        for reward in rewards.values():
            reward(images, PROMPTS)
    assert len(moved) == 2 * once  # each call is a phase of its own
    with scoring(rewards.values()):
        for _ in range(3):
            for reward in rewards.values():
                reward(images, PROMPTS)
    assert len(moved) == 3 * once


# ---- pixels


def test_pixels_are_shared_between_rewards(folders, monkeypatch):
    rewards = [load(folders, name) for name in ("pickscore", "clip", "hps")]
    made = []
    real = preprocess.framed
    monkeypatch.setattr(preprocess, "framed", lambda images, frame: made.append(frame) or real(images, frame))
    square = torch.rand(2, 3, 60, 60)
    for reward in rewards:
        reward(square, ["a", "b"])
    # On squares a squash and a crop are the same; HPS resizes another way.
    assert len(made) == 2
    for reward in rewards:
        reward(pixels("landscape_coffee"), ["a"])
    assert len(made) == 5


# ---- options and the hub


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dtype": "bf16"},
            "dtype='bf16' must be auto or float32 or bfloat16 or float16; did you mean 'bfloat16'",
        ),
        ({"dtype": "int8"}, "dtype='int8' must be auto or float32 or"),
        ({"batch": 0}, "batch=0 must be an integer >= 1"),
        ({"batch": 1.5}, "batch=1.5"),
        ({"batch": True}, "batch = True: true is not a number"),
        ({"offload": "disk"}, "offload='disk'.*none or cpu"),
        ({"bacth": 3}, "no option 'bacth'; did you mean 'batch'"),
    ],
)
@pytest.mark.parametrize("reward", MODELS)
def test_options_are_checked_before_anything_is_read(reward, options, message):
    with pytest.raises(ValueError, match=message):
        load_reward(reward, CPU, {"path": "/nowhere/at/all", **options})


@pytest.mark.parametrize("heads", [[4], [0, 4], [4, 4, 4], [4.0, 4], "44", 4])
@pytest.mark.parametrize("reward", ["hps", "clip", "imagereward"])
def test_heads_are_two_numbers(reward, heads):
    with pytest.raises(ValueError, match=r"heads=.* must be \[vision, text\], two positive numbers"):
        load_reward(reward, CPU, {"path": "./nowhere", "heads": heads})


def test_heads_are_no_booleans():
    with pytest.raises(ValueError, match=r"heads = \[True, 4\]: true is not a number"):
        load_reward("clip", CPU, {"path": "./nowhere", "heads": [True, 4]})


@pytest.mark.parametrize("reward", MODELS)
def test_a_tokenizer_elsewhere(tmp_path, images, reward, folders):
    folder = publish(reward, tmp_path / "weights", tokenizer=False)
    if reward == "imagereward":
        words = bert_tokenizer(
            tmp_path / "words", 1198, {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103}
        )
    else:
        words = clip_tokenizer(tmp_path / "words", 1000)
    options = {"path": str(folder), "tokenizer": str(words), **loading(reward)}
    scores = load_reward(reward, CPU, options)(images, PROMPTS)
    assert torch.equal(scores, load(folders, reward)(images, PROMPTS))


@pytest.mark.parametrize("reward", MODELS)
def test_hub_files_are_those_that_fetch_brings(tmp_path, monkeypatch, reward):
    """A snapshot of exactly what `g2rpo fetch` names is enough, and nothing else is asked for."""
    published = publish(reward, tmp_path / "published")
    asked = []

    def snapshot(repo, allow_patterns):
        (source,) = [one for one in reward_spec(reward).sources if one.repo == repo]
        folder = tmp_path / repo.replace("/", "--")
        folder.mkdir()
        asked.append(repo)
        names = {*source.files, *source.also}
        for file in published.iterdir():
            # open_clip_config.json is not in HPS's repository: here it tells the tiny model's sizes.
            if file.name in names & {*allow_patterns} or (reward == "hps" and file.name.startswith("open")):
                (folder / file.name).write_bytes(file.read_bytes())
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    loaded = load_reward(reward, CPU, loading(reward))
    assert asked == [source.repo for source in reward_spec(reward).sources]
    assert loaded(torch.rand(1, 3, 60, 60), ["a"]).isfinite()


def test_no_hub(monkeypatch):
    def snapshot(repo, allow_patterns):
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(
        ValueError, match=r"'xswu/HPSv2' is neither a local path nor available from the hub.*path=FOLDER"
    ):
        load_reward("hps", CPU)
