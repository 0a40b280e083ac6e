"""Sampling: the ODE, seeds that stand for themselves, policies that share a walk, files."""

import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.policies import load
from support.processes import run_command
from support.random_flux import save_random_flux

from g2rpo.data.prompts import as_prompts
from g2rpo.inference.images import read_png_text, to_pil
from g2rpo.inference.sample import (
    SampleRequest,
    Segment,
    image_seeds,
    sample_images,
    sample_segments,
    sample_to_folder,
    share_of_first,
    start_noise,
)
from g2rpo.inference.sample_folder import write_comparison, write_samples
from g2rpo.models.flux.policy import FluxPolicy
from g2rpo.models.policy import Conditioning, Policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_random_flux(tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="module")
def policy(folder) -> FluxPolicy:
    return load(folder)


class Linear(Policy):
    """dx/dsigma = slope x: over sigmas 1, s, 0 the Euler walk gives x (1 - slope (1 - s)) (1 - slope s)."""

    latent_shape, device = (4, 12), torch.device("cpu")
    modules = {"linear": torch.nn.Identity()}  # noqa: RUF012

    def __init__(self, slope=1.0):
        self.slope = slope
        self.itself = self  # as FluxPolicy's hook does

    def encode(self, prompts: list[str]) -> Conditioning:
        return Conditioning({"text": torch.zeros(len(prompts), 1)})

    def velocity(self, x, sigma, cond):
        assert len(x) == len(sigma) == len(cond)
        return self.slope * x

    def decode(self, latents):
        return latents.reshape(len(latents), 3, 4, 4)


def test_euler_by_hand():
    # shift 3, T = 2: sigmas 1, 0.75, 0; x (1 - 0.25) (1 - 0.75) = 0.1875 x
    policy = Linear()
    images = sample_images(policy, ["a", "b"], num_steps=2, shift=3.0, seeds=[5, 6])
    torch.testing.assert_close(images.flatten(1), 0.1875 * start_noise(policy, [5, 6]).flatten(1))


def test_two_policies_share_a_walk_by_hand():
    # shift 3, T = 3: sigmas 1, 6/7, 3/5, 0. Slope 1 takes the first step: x (1 - 1/7); slope 2 the other two:
    # (1 - 2 (6/7 - 3/5)) (1 - 2 * 3/5). Together 6/7 * 17/35 * -1/5.
    first, second = Linear(1.0), Linear(2.0)
    segments = [Segment(lambda: first, 1), Segment(lambda: second, 2)]
    images = sample_segments(segments, ["a", "b", "c"], shift=3.0, seeds=[5, 6, 7], batch=2)
    expected = 6 / 7 * 17 / 35 * -1 / 5 * start_noise(first, [5, 6, 7])
    torch.testing.assert_close(images.flatten(1), expected.flatten(1))


def test_only_one_policy_is_in_memory():
    alive: list[weakref.ref] = []

    def opening():
        assert all(earlier() is None for earlier in alive), "the policy before is still there"
        policy = Linear()
        alive.append(weakref.ref(policy))
        return policy

    sample_segments([Segment(opening, 2)] * 3, ["a", "b"], seeds=[1, 2])
    assert len(alive) == 3


def test_a_policy_that_takes_over_from_itself_changes_nothing(policy):
    prompts, seeds = ["a red circle", "two blue stars"], [1, 2]
    whole = sample_images(policy, prompts, num_steps=5, shift=2.0, seeds=seeds)
    for parts in ([5], [2, 3], [1, 1, 3]):
        segments = [Segment(lambda: policy, count) for count in parts]
        assert torch.equal(sample_segments(segments, prompts, shift=2.0, seeds=seeds), whole)


def test_segments_must_fit(policy):
    other = Linear()
    with pytest.raises(ValueError, match=r"latents of \(4, 12\).*cannot continue from latents of \(16, 16\)"):
        sample_segments([Segment(lambda: policy, 1), Segment(lambda: other, 1)], ["a"], seeds=[1])
    with pytest.raises(ValueError, match="at least one step, got \\[2, 0\\]"):
        sample_segments([Segment(lambda: policy, 2), Segment(lambda: other, 0)], ["a"], seeds=[1])
    with pytest.raises(ValueError, match="the segments have 3 steps in total, but num_steps=4"):
        SampleRequest(tuple(as_prompts(["a"])), steps=(4,)).images_by([Segment(lambda: policy, 3)])


def with_scheduler(folder: Path, place: Path, **config) -> Path:
    """The model with another scheduler_config.json."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    copied = shutil.copytree(folder, place)
    FlowMatchEulerDiscreteScheduler(**config).save_pretrained(copied / "scheduler")
    return copied


@pytest.mark.parametrize(
    "config",
    [
        {"use_dynamic_shifting": True},
        {
            "use_dynamic_shifting": True,
            "base_shift": 0.9,
            "max_shift": 3.0,
            "base_image_seq_len": 8,
            "max_image_seq_len": 32,
        },
        {"shift": 2.5},
        {"use_dynamic_shifting": True, "shift_terminal": 0.1},
    ],
)
def test_the_pipelines_shift_draws_the_pipelines_pictures(folder, tmp_path, config):
    from diffusers import FluxPipeline

    model = with_scheduler(folder, tmp_path / "model", **config)
    policy, prompts, seeds = load(model, guidance=2.0), ["a red circle", "two blue stars"], [3, 4]
    shift = policy.pipeline_shift()
    ours = sample_images(policy, prompts, num_steps=6, shift=shift, seeds=seeds)
    pipeline = FluxPipeline.from_pretrained(model)
    pipeline.set_progress_bar_config(disable=True)
    stock = pipeline(
        prompts,
        latents=start_noise(policy, seeds),
        num_inference_steps=6,
        guidance_scale=2.0,
        height=16,
        width=16,
        max_sequence_length=12,
        output_type="pt",
    ).images
    assert (ours - stock).abs().max() <= 2 / 255
    assert (ours - sample_images(policy, prompts, num_steps=6, shift=1.0, seeds=seeds)).abs().max() > 8 / 255


@pytest.mark.parametrize(
    "config",
    [{"invert_sigmas": True}, {"use_karras_sigmas": True}, {"time_shift_type": "linear"}],
)
def test_a_schedule_that_no_shift_makes_is_refused(folder, tmp_path, config):
    model = with_scheduler(folder, tmp_path / "model", **config)
    with pytest.raises(ValueError, match=f"{next(iter(config))}.*give a number instead"):
        load(model).pipeline_shift()


def test_drawing_with_two_models(folder, policy, tmp_path):
    # The base is another model, in another noise schedule; both shifts must come from the first one.
    model = with_scheduler(folder, tmp_path / "tuned", use_dynamic_shifting=True, base_shift=1.0)
    base = str(save_random_flux(tmp_path / "base", seed=9))
    request = SampleRequest(
        tuple(as_prompts(["a red circle"])),
        steps=(4,),
        num_images=2,
        seed=11,
        shift=None,
        conditions={"guidance": 2.0, "resolution": None},
        device="cpu",
        then=base,
        first_share=share_of_first(3, base, 4),
    )
    lines: list[str] = []
    sample_to_folder(str(model), request, tmp_path / "out", compare=base, say=lines.append)
    prompt, info = read_png_text(tmp_path / "out" / "0001.png")
    shift = load(model).pipeline_shift()
    assert prompt == "a red circle" and (info["seed"], info["num_steps"]) == (12, 4)
    assert (info["model"], info["then"], info["first_steps"]) == (str(model), base, 3)
    assert info["guidance"] == 2.0 and info["shift"] == pytest.approx(shift)
    other = read_png_text(tmp_path / "out" / "compare" / "0001.png")[1]
    assert other["model"] == base and "then" not in other and other["shift"] == info["shift"]
    for name in ("grid.png", "comparison.png", "compare/grid.png"):
        assert (tmp_path / "out" / name).is_file()
    assert "comparison.png" in lines[-1]

    first, last = load(model, guidance=2.0), load(base, guidance=2.0)
    segments = [Segment(lambda: first, 3), Segment(lambda: last, 1)]
    expected = sample_segments(segments, ["a red circle"] * 2, shift=shift, seeds=[11, 12])
    with Image.open(tmp_path / "out" / "0001.png") as image:
        assert np.array_equal(np.array(image), np.array(to_pil(expected[1])))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"first_steps": 2}, "belong together"),
        ({"then": "tiny"}, "belong together"),
        ({"first_steps": 4, "then": "tiny"}, "give 1 to 3"),
        ({"first_steps": 0, "then": "tiny"}, "give 1 to 3"),
    ],
)
def test_who_takes_over_when_must_be_said(options, said):
    with pytest.raises(ValueError, match=said):
        share_of_first(**{"first_steps": None, "then": None, "num_steps": 4} | options)


def test_a_share_of_the_steps_gives_the_steps_back():
    for num_steps in range(2, 101):
        for first_steps in range(1, num_steps):
            share = share_of_first(first_steps, "tiny", num_steps)
            assert (
                SampleRequest(tuple(as_prompts(["a"])), first_share=share).first_steps(num_steps)
                == first_steps
            )


def test_an_image_depends_on_its_own_seed_and_prompt(policy):
    prompts, seeds = ["a red circle", "two blue stars", "a red circle"], image_seeds(40, 3)
    together = sample_images(policy, prompts, num_steps=3, seeds=seeds)
    assert together.shape == (3, 3, 16, 16) and together.dtype == torch.float32
    assert together.min() >= 0 and together.max() <= 1
    assert (together[0] - together[2]).abs().max() > 0.01, "another seed is another picture"
    for i in range(3):
        alone = sample_images(policy, [prompts[i]], num_steps=3, seeds=[40 + i])
        torch.testing.assert_close(alone[0], together[i], rtol=0, atol=1e-5)
    small = sample_images(policy, prompts, num_steps=3, seeds=seeds, batch=2)
    torch.testing.assert_close(small, together, rtol=0, atol=1e-5)
    cached = sample_images(policy, prompts, num_steps=3, seeds=seeds, cond=policy.encode(prompts))
    assert torch.equal(cached, together)


def test_global_random_state_is_neither_read_nor_moved(policy):
    torch.manual_seed(1)
    first = sample_images(policy, ["a star"], num_steps=2, seeds=[3])
    state = torch.random.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(first, sample_images(policy, ["a star"], num_steps=2, seeds=[3]))
    torch.manual_seed(1)
    assert torch.equal(state, torch.random.get_rng_state())


def test_counts_must_fit(policy):
    with pytest.raises(ValueError, match="2 prompts, 1 seeds"):
        sample_images(policy, ["a", "b"], num_steps=2, seeds=[1])
    with pytest.raises(ValueError, match="1 rows of conditioning for 2 prompts"):
        sample_images(policy, ["a", "b"], num_steps=2, seeds=[1, 2], cond=policy.encode(["a"]))
    with pytest.raises(ValueError, match="no prompts"):
        SampleRequest(())


def test_files(policy, tmp_path):
    request = SampleRequest(
        tuple(as_prompts(["a red circle", "two blue stars"])), steps=(2,), num_images=2, seed=7
    )
    assert request.texts == ["a red circle"] * 2 + ["two blue stars"] * 2 and request.seeds == [7, 8, 9, 10]
    images = request.images(policy)
    paths = write_samples(tmp_path, images, request, {"model": "random"})
    assert [p.name for p in paths] == ["0000.png", "0001.png", "0002.png", "0003.png", "grid.png"]
    prompt, info = read_png_text(tmp_path / "0003.png")
    assert prompt == "two blue stars"
    assert info == {"seed": 10, "num_steps": 2, "shift": 3.0, "model": "random"}
    with Image.open(tmp_path / "0003.png") as image:
        assert np.array_equal(np.array(image), np.array(to_pil(images[3])))
    with Image.open(tmp_path / "grid.png") as sheet:
        assert sheet.width < sheet.height * 2
    pair = write_comparison(tmp_path, request, images, images.flip(0), ("base", "tuned"))
    assert pair.name == "comparison.png" and pair.stat().st_size > 1000


def test_rectangles_in_files_and_figures(tmp_path):
    words = ("sample", "tiny", "--compare", "tiny@g2rpo", "--limit", "2", "--steps", "2", "--device", "cpu")
    done = run_command(*words, "--resolution", "32x64", "--out", "drawn", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for file in ("drawn/0001.png", "drawn/compare/0001.png"):
        assert read_png_text(tmp_path / file)[1]["resolution"] == [32, 64]
        with Image.open(tmp_path / file) as image:
            assert image.size == (64, 32)  # width, height
    with Image.open(tmp_path / "drawn" / "comparison.png") as image:
        assert image.width > image.height / 2
    refused = run_command(*words, "--resolution", "32by64", cwd=tmp_path)
    assert refused.returncode == 2 and "--resolution='32by64': give the side of a square" in refused.stderr
    refused = run_command(*words, "--resolution", "30x64", cwd=tmp_path)
    assert refused.returncode == 2 and "sides must be multiples of 8 pixels" in refused.stderr
