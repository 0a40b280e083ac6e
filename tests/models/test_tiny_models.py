"""The models inside the package: small, loadable by stock classes, and as good as the documents say.

The bounds lie away from what was measured on other held-out scenes (docs/embedded.md) by about three standard
errors of these samples or more: they catch broken weights and broken code, not luck.
"""

import json
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support.policies import load
from support.seeds import seeded
from torch import Tensor

from g2rpo.flow.schedule import shifted_sigmas
from g2rpo.models.flux.policy import FluxPolicy
from g2rpo.models.loading.files import dtype_argument
from g2rpo.models.registry import load_policy
from g2rpo.models.tiny import assets
from g2rpo.rewards.registry import load_rewards
from g2rpo.world import verifier
from g2rpo.world.captions import MAX_TOKENS, caption_ids, captions, prompt_set
from g2rpo.world.contrast import evaluate_clip, image_features, text_features
from g2rpo.world.preference import evaluate_preference
from g2rpo.world.pretrain import load_clip, load_vae
from g2rpo.world.render import render
from g2rpo.world.scenes import COLOUR_NAMES, Compositions, sample_compositions, sample_layouts
from g2rpo.world.training import Pool, make_pool
from g2rpo.world.vae import evaluate_vae

MODELS = ("tiny_flux", "tiny_clip", "tiny_preference")
TOTAL_MB, FILE_MB = 30.0, 15.0
VAE_STRICT = 0.93
CLIP_WINS = 0.9  # measured: count 0.946 is the lowest
PREFERENCE_WINS = {
    "colour": 0.95,
    "shape": 0.95,
    "count": 0.92,
    "binding": 0.92,
    "sharpness": 0.95,
    "vividness": 0.85,
}
BLIND = 0.65  # measured: relation 0.566
# Bounds on the share of correct base images (16 steps, guidance 3.5): a signal, and room to learn.
# Measured: one group 0.78, two groups 0.71; standard errors here 0.05 and 0.08.
ONE_GROUP = (0.62, 0.94)
TWO_GROUPS = (0.45, 0.92)
NUM_STEPS, GUIDANCE = 16, 3.5
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def held_out() -> Pool:
    return make_pool(512, seeded(7), held_out=True, two_groups=0.5)


@pytest.fixture(scope="module")
def policy() -> FluxPolicy:
    return load(assets() / "tiny_flux", guidance=GUIDANCE)


@torch.no_grad()
def draw(policy: FluxPolicy, prompts: list[str], noise: Tensor) -> Tensor:
    """Images from the Euler ODE."""
    cond, x = policy.encode(prompts), noise
    sigmas = shifted_sigmas(NUM_STEPS, 3.0)
    for step in range(NUM_STEPS):
        velocity = policy.velocity(x, sigmas[step].expand(len(x)), cond)
        x = x + velocity * (sigmas[step + 1] - sigmas[step])
    return policy.decode(x)


def test_the_package_stays_small():
    sizes = {path: path.stat().st_size / 1e6 for path in assets().rglob("*") if path.is_file()}
    assert sum(sizes.values()) <= TOTAL_MB, sum(sizes.values())
    assert max(sizes.values()) < FILE_MB, max(sizes, key=sizes.__getitem__)


@pytest.mark.long
def test_the_shipped_tuning_beats_the_base(policy):
    """Paired on 48 unseen prompts: the verifier's score, which the tuning did not use, must not fall."""
    prompts = [text for text, _ in prompt_set("heldout", 48)]
    noise = torch.randn(48, *policy.latent_shape, generator=seeded(11))
    verifier = load_rewards(["verifier"], CPU)["verifier"]
    base, tuned = (
        verifier(draw(model, prompts, noise), prompts) for model in (policy, load_policy("tiny@g2rpo"))
    )
    # measured on 256 prompts: 0.910 -> 0.944, paired standard error 0.008 (here about 0.02)
    assert (tuned - base).mean() > -0.02


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_bfloat16_and_finite(name):
    files = list((assets() / name).rglob("*.safetensors"))
    assert len(files) == (4 if name == "tiny_flux" else 1)
    for path in files:
        with safe_open(path, "pt") as weights:
            for key in weights.keys():  # noqa: SIM118 (no mapping)
                value = weights.get_tensor(key)
                assert value.dtype == torch.bfloat16 or not value.is_floating_point(), (path, key)
                assert bool(value.isfinite().all()), (path, key)


def test_configs_name_no_folder_of_the_machine_that_made_them():
    for path in assets().rglob("*.json"):
        for key, value in json.loads(path.read_text()).items():
            assert not (isinstance(value, str) and value.startswith("/")), f"{path}: {key} = {value}"


def test_the_stock_pipeline_draws_the_same_picture(policy):
    from diffusers import FluxPipeline

    # The dtype must be explicit: transformers would load the stored bfloat16, and diffusers float32.
    pipeline: Any = FluxPipeline.from_pretrained(assets() / "tiny_flux", **dtype_argument(torch.float32))
    pipeline.set_progress_bar_config(disable=True)
    prompt = "two red circles above a blue star on a white background"
    noise = torch.randn(1, *policy.latent_shape, generator=seeded(0))
    image = pipeline(
        prompt=prompt,
        height=64,
        width=64,
        num_inference_steps=NUM_STEPS,
        guidance_scale=GUIDANCE,
        max_sequence_length=MAX_TOKENS,
        latents=noise.clone(),
        output_type="pt",
    ).images
    assert image.shape == (1, 3, 64, 64)
    assert torch.allclose(image, draw(policy, [prompt], noise), atol=2e-3)
    assert load_rewards(["verifier"], "cpu")["verifier"](image, [prompt]).item() > 0.5


@pytest.mark.long
def test_the_autoencoder_keeps_what_a_caption_says(held_out):
    few = slice(0, 256)
    scores = evaluate_vae(load_vae(assets(), CPU), Pool(held_out.scenes[few], held_out.pixels[few]))
    assert scores["strict"] >= VAE_STRICT and scores["psnr_db"] > 34


@pytest.mark.long
def test_clip_prefers_the_right_caption(held_out):
    wins = evaluate_clip(load_clip(assets(), "tiny_clip", CPU), held_out)
    assert len(wins) == 6
    for name, share in wins.items():
        assert share >= CLIP_WINS, (name, share)


def test_the_preference_model_and_its_blind_spot(held_out):
    few = slice(0, 192)
    pool = Pool(held_out.scenes[few], held_out.pixels[few])
    wins = evaluate_preference(load_clip(assets(), "tiny_preference", CPU), pool)
    for name, lowest in PREFERENCE_WINS.items():
        assert wins[name] >= lowest, (name, wins[name])
    # It hardly measures relations (left of, above); the verifier and tiny_clip do.
    assert wins["relation"] < BLIND and wins["relation"] < wins["count"] - 0.2


@torch.no_grad()
def test_colourful_backgrounds_win_where_the_caption_names_none():
    clip = load_clip(assets(), "tiny_preference", CPU)
    compositions = sample_compositions(600, seeded(3), held_out=True)
    scenes = compositions[compositions.background == COLOUR_NAMES.index("white")][:80]
    layouts = sample_layouts(scenes, seeded(4))
    pink = Compositions(*scenes.fields()[:4], torch.full_like(scenes.background, COLOUR_NAMES.index("pink")))
    white_wins = {}
    for share in (0.0, 1.0):
        text = text_features(clip, caption_ids(scenes, seeded(5), background_share=share))
        on_white, on_pink = (image_features(clip, render(shown, layouts)) for shown in (scenes, pink))
        white_wins[share] = ((on_white - on_pink) * text).sum(-1).gt(0).float().mean().item()
    assert white_wins[0.0] < 0.4  # vividness dominates
    assert white_wins[1.0] > 0.9  # the contrastive term of its training still holds a stated background


@pytest.mark.long
@pytest.mark.parametrize(("groups", "num", "band"), [(1, 64, ONE_GROUP), (2, 32, TWO_GROUPS)])
def test_base_quality_leaves_room_to_learn(policy, groups, num, band):
    scenes = sample_compositions(num, seeded(8), held_out=True, two_groups=float(groups - 1))
    prompts = captions(scenes, seeded(9), background_share=1.0)
    images = draw(policy, prompts, torch.randn(num, *policy.latent_shape, generator=seeded(10)))
    reading = verifier.read((images * 255).round() / 255)
    strict = verifier.strict_score(reading, scenes).mean().item()
    assert band[0] < strict < band[1], strict
    assert verifier.soft_score(reading, scenes).mean().item() > 0.85


@pytest.mark.parametrize("name", ["tiny_clip", "tiny_preference"])
def test_scorers_as_rewards_know_their_own_prompt(held_out, name):
    reward = load_rewards([name], "cpu")[name]
    num = 32
    scenes, images = held_out.scenes[:num], held_out.images(slice(0, num))
    prompts = captions(scenes, seeded(11), background_share=1.0)
    own = reward(images, prompts)
    others = reward(images, prompts[1:] + prompts[:1])
    assert (own > others).float().mean().item() >= 0.95
    # A score depends on the image and its prompt, not on the rest of the batch.
    assert torch.allclose(reward(images[:3], prompts[:3]), own[:3], atol=1e-5)
