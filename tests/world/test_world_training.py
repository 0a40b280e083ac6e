"""Each pretraining stage learns: a few steps of small networks on a CPU lower its loss."""

import copy
import json
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.seeds import seeded
from torch import Tensor, nn

from g2rpo.models.transformer.latents import pack, unpack
from g2rpo.world import networks, pretrain, training
from g2rpo.world.captions import caption_ids
from g2rpo.world.contrast import augment, evaluate_clip, image_features, text_features, train_clip
from g2rpo.world.flow import FlowModel, distill_guidance, empty_ids, evaluate_flow, sample, train_flow
from g2rpo.world.preference import (
    SCALE,
    balance,
    evaluate_preference,
    rate,
    rated_pool,
    restyle,
    saturation,
    train_preference,
)
from g2rpo.world.training import Average, Pool, adamw, captured, make_pool, timed_loop
from g2rpo.world.vae import decode, encode, evaluate_vae, train_vae


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A second a look: the loops' schedule is over time; `seconds=30` is then 29 steps on any machine."""
    ticks = count()
    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))


@pytest.fixture(scope="module")
def pool() -> Pool:
    return make_pool(160, seeded(0))


@pytest.fixture(scope="module")
def held_out() -> Pool:
    return make_pool(48, seeded(1), held_out=True)


def seeded_module(make: Callable[[], nn.Module], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return make()


def small(make: Callable[[], nn.Module], **changes: Any) -> Any:
    """The class and settings of one of our networks, but smaller, so that a step takes milliseconds."""
    full: Any = make()
    torch.manual_seed(0)
    if hasattr(full, "_from_config"):  # transformers
        config = full.config.to_dict()
        for name, value in changes.items():
            part, _, key = name.rpartition("__")
            (config[part] if part else config)[key] = value
        return type(full)(type(full.config).from_dict(config))
    return type(full).from_config({**full.config, **changes})


def small_vae() -> Any:
    return small(networks.vae, block_out_channels=(8, 8, 8), norm_num_groups=4)


def small_clip() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    changes = {f"{part}_config__{key}": size for part in ("text", "vision") for key, size in sizes.items()}
    return small(networks.clip, **changes)


def small_flow() -> FlowModel:
    return FlowModel(
        small(networks.transformer, num_layers=1, num_single_layers=1, num_attention_heads=2),
        small(networks.text_encoder, num_hidden_layers=1),
        small(networks.text_encoder_2, num_layers=1),
    )


def test_the_loop_warms_up_and_falls_to_its_floor():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    rates = [optimizer.param_groups[0]["lr"] for _ in timed_loop(optimizer, seconds=100, warmup=10)]
    # The clock is looked at once before the loop and once a step: step i is at i + 1 of 100 s.
    assert len(rates) == 99
    assert rates[0] == pytest.approx(2 / 10, rel=0.01) and rates[0] < rates[4] < rates[9] == max(rates)
    assert rates[49] == pytest.approx(2 * (0.02 + 0.98 * 0.5))  # half-way: cos(pi/2) = 0
    assert rates[-1] == pytest.approx(2 * 0.02, rel=0.05)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert len(list(timed_loop(optimizer, seconds=1e9, max_steps=7))) == 7


def test_the_average_lags_and_loads():
    module = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(0.0)
        average = Average.of(module)
        module.weight.fill_(1.0)
    # decay = min(decay, (1 + step) / (10 + step)). Step 0: 1/10, to 0.9. Step 1: 2/11, to 1 - 0.1 * 2/11.
    average.update(0)
    assert average.mean[0].item() == pytest.approx(0.9)
    average.update(1)
    assert average.mean[0].item() == pytest.approx(1 - 0.1 * 2 / 11)
    average.update(10**9, decay=1.0)
    average.load()
    assert module.weight.item() == pytest.approx(1 - 0.1 * 2 / 11)


def test_on_the_cpu_a_captured_step_starts_from_no_gradient():
    weight = torch.ones(1, requires_grad=True)
    replay = captured(lambda: (weight * 3).sum().backward() or torch.zeros(()), [weight], seeded(0))
    replay(), replay()
    assert weight.grad is not None and weight.grad.item() == 3.0


def test_pools_repeat_and_keep_their_part(pool, held_out):
    again = make_pool(160, seeded(0))
    assert torch.equal(again.pixels, pool.pixels) and pool.pixels.dtype == torch.uint8
    assert len(pool) == len(pool.scenes) == 160 and len(held_out) == 48
    assert pool.images(slice(0, 3)).shape == (3, 3, 64, 64) and float(pool.images(slice(None)).max()) <= 1


def test_the_autoencoder_learns_and_stores_its_latents_scale(pool, held_out):
    vae = small_vae()
    before = evaluate_vae(vae, held_out)
    train_vae(vae, pool, seconds=60, batch=4, lr=0.1)
    after = evaluate_vae(vae, held_out)
    assert after["psnr_db"] > before["psnr_db"] + 1.5
    latents = encode(vae, pool.pixels)
    assert latents.mean().item() == pytest.approx(0, abs=0.02)
    assert latents.std().item() == pytest.approx(1, abs=0.02)


def test_latents_lie_as_the_policys_do(held_out):
    vae = seeded_module(networks.vae)
    vae.register_to_config(shift_factor=0.25, scaling_factor=1.5)
    pixels = held_out.pixels[:4]
    with torch.no_grad():
        plain = vae.encode(pixels.float() / 127.5 - 1).latent_dist.mode()
        packed = encode(vae, pixels)
        assert torch.allclose(packed, pack((plain - 0.25) * 1.5), atol=1e-6)
        there_and_back = vae.decode(unpack(packed, (8, 8)) / 1.5 + 0.25).sample
        assert torch.allclose(decode(vae, packed), (there_and_back / 2 + 0.5).clamp(0, 1), atol=1e-5)


def test_the_contrastive_model_learns(pool):
    clip = small_clip()

    @torch.no_grad()
    def loss() -> float:
        image = image_features(clip, pool.images(slice(0, 64)))
        text = text_features(clip, caption_ids(pool.scenes[:64], seeded(2), background_share=1.0))
        return F.cross_entropy(clip.logit_scale.exp() * image @ text.T, torch.arange(64)).item()

    before = loss()
    assert before > 3.5  # ln 64 = 4.2: it knows nothing
    train_clip(clip, pool, seconds=60, batch=32, lr=3e-2)
    assert loss() < before - 0.8
    wins = evaluate_clip(clip, pool)
    assert wins["background"] > 0.9  # the first thing that it learns
    assert all(0 <= share <= 1 for share in wins.values())


def test_augmented_pictures_stay_pictures(pool):
    images = pool.images(slice(0, 32))
    changed = augment(images, seeded(3))
    assert float(changed.min()) >= 0 and float(changed.max()) <= 1
    assert 0.003 < (changed - images).abs().mean().item() < 0.1
    assert torch.equal(changed, augment(images, seeded(3)))


@pytest.fixture(scope="module")
def latents(pool: Pool) -> Tensor:
    """Substitutes for latents that depend only on the scene: its image at 8 x 8 pixels, in 16 channels."""
    small = F.adaptive_avg_pool2d(pool.images(slice(None)), 8).flatten(2).transpose(1, 2)
    mix = torch.randn(3, 16, generator=seeded(4))
    return (small - 0.5) @ mix


@torch.no_grad()
def velocity_loss(model: FlowModel, latents: Tensor, pool: Pool, teacher: FlowModel | None = None) -> float:
    """Over fixed noise; with a teacher, against its velocity guided by w = 4."""
    num = 48
    sigma = torch.linspace(0.1, 0.95, num)
    noise = torch.randn(num, 64, 16, generator=seeded(5))
    level = sigma[:, None, None]
    x = (1 - level) * latents[:num] + level * noise
    ids, guidance = caption_ids(pool.scenes[:num], seeded(6)), torch.full((num,), 4.0)
    target = noise - latents[:num]
    if teacher is not None:
        empty = teacher.velocity(x, sigma, empty_ids(num, ids.device), guidance)
        target = empty + 4.0 * (teacher.velocity(x, sigma, ids, guidance) - empty)
    return F.mse_loss(model.velocity(x, sigma, ids, guidance), target).item()


@pytest.mark.long
def test_the_flow_model_learns_and_then_its_guidance(pool, latents):
    model = small_flow()
    before = velocity_loss(model, latents, pool)
    train_flow(model, latents, pool.scenes, seconds=40, lr=4e-3, batch=16, warmup=5)
    after = velocity_loss(model, latents, pool)
    assert after < 0.75 * before

    # A text encoder louder than trained, so that guidance has something to do after so few steps.
    teacher = copy.deepcopy(model)
    with torch.no_grad():
        teacher.transformer.context_embedder.weight.mul_(4)
    student = copy.deepcopy(teacher)
    apart = velocity_loss(student, latents, pool, teacher)
    text = [p.clone() for p in student.text_encoder_2.parameters()]
    distill_guidance(student, teacher, latents, pool.scenes, seconds=30, lr=2e-2, batch=16)
    assert velocity_loss(student, latents, pool, teacher) < 0.8 * apart
    assert all(map(torch.equal, text, student.text_encoder_2.parameters()))


def test_sampling_repeats_and_guidance_of_one_is_the_conditional_model(pool, held_out):
    model, vae = small_flow(), small_vae()
    ids = caption_ids(held_out.scenes[:3], seeded(7))
    plain = sample(model, ids, num_steps=3, guidance=1.0)
    assert torch.equal(plain, sample(model, ids, num_steps=3, guidance=1.0))
    assert torch.allclose(plain, sample(model, ids, num_steps=3, guidance=1.0, cfg=True), atol=1e-5)
    assert not torch.allclose(plain, sample(model, ids, num_steps=3, guidance=1.0, seed=1), atol=0.1)
    scores = evaluate_flow(model, vae, held_out.scenes[:16], num_steps=2)
    assert scores["strict1"] == scores["strict2"] == 0  # untrained


def test_the_rater_dislikes_flaws_and_likes_colour(pool):
    images = pool.images(slice(0, 64))
    restyled, style = restyle(images, seeded(8))
    assert float(restyled.min()) >= 0 and float(restyled.max()) <= 1
    assert all(0 < value.mean().item() < 0.4 for value in style.values())
    assert saturation(torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1).expand(1, 3, 64, 64)).item() == 1.0
    assert saturation(torch.full((1, 3, 64, 64), 0.3)).item() == 0.0
    centred, cornered = torch.zeros(2, 1, 3, 64, 64).unbind()
    centred[..., 24:40, 24:40] = 1
    cornered[..., 48:63, 48:63] = 1
    assert balance(centred).item() > 0.97 and balance(cornered).item() < 0.3
    rated = rate(pool.scenes[:64], seeded(9))
    assert rated.images.shape == (64, 4, 3, 64, 64) and rated.utility.shape == (64, 4)
    assert rated.utility.std(1).mean().item() > 0.3  # the images of a caption differ in utility


@pytest.mark.long
def test_the_preference_model_learns(pool, held_out):
    clip, vae = small_clip(), small_vae()
    with torch.no_grad():
        images, utility = rated_pool(pool, vae, seeded(10), 64)
    first, second = torch.triu_indices(4, 4, 1)
    wish = torch.sigmoid(1.5 * (utility[:, first] - utility[:, second]))

    @torch.no_grad()
    def loss() -> float:
        image = image_features(clip, images.flatten(0, 1).float() / 255).view(64, 4, -1)
        text = text_features(clip, caption_ids(pool.scenes[:64], seeded(11)))
        score = SCALE * (image * text[:, None]).sum(-1)
        return F.binary_cross_entropy_with_logits(score[:, first] - score[:, second], wish).item()

    before = loss()
    train_preference(clip, pool, vae, seconds=40, batch=16, lr=1e-2, num_rated=96)
    assert loss() < before - 0.02
    assert set(evaluate_preference(clip, held_out)) >= {"count", "background", "sharpness", "vividness"}


def test_the_stages_leave_folders_that_load(tmp_path, held_out):
    # The real networks, two steps each; preference needs what vae and clip have left.
    options = {"lr": None, "scenes": 8, "seed": 0, "batch": 4, "part": 0, "compiled": False}
    for stage in ("vae", "clip", "preference"):
        pretrain.run(stage, tmp_path, seconds=3, **options)
    report = json.loads((tmp_path / "pretrain.json").read_text())
    assert set(report) == {"vae", "clip", "preference"} and "strict" in report["vae"]
    cpu = torch.device("cpu")
    vae = pretrain.load_vae(tmp_path, cpu)
    assert vae.config.scaling_factor != 1.0 and next(vae.parameters()).dtype == torch.float32
    before, after = (pretrain.load_clip(tmp_path, name, cpu) for name in ("tiny_clip", "tiny_preference"))
    assert not torch.equal(before.text_projection.weight, after.text_projection.weight)

    model = pretrain.fresh_flow(cpu)
    pretrain.save_pipeline(tmp_path, model, vae)
    again = pretrain.load_flow(tmp_path, cpu)
    x, sigma = torch.randn(2, 64, 16, generator=seeded(12)), torch.tensor([0.3, 0.9])
    ids, guidance = caption_ids(held_out.scenes[:2], seeded(13)), torch.full((2,), 3.5)
    with torch.no_grad():
        got, want = again.velocity(x, sigma, ids, guidance), model.velocity(x, sigma, ids, guidance)
    assert 0 < (got - want).norm() < 0.02 * want.norm()  # saved in bfloat16, the model itself left as it was


def test_the_optimizer_decays_what_it_is_told_to():
    weight = torch.ones(1, requires_grad=True)
    optimizer = adamw([weight], lr=0.1, weight_decay=0.5)
    weight.grad = torch.zeros(1)
    optimizer.step()
    assert weight.item() == pytest.approx(1 - 0.1 * 0.5)
