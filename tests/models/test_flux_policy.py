"""FLUX as a policy: equal to the diffusers pipeline, exact in sigma, and trainable in every precision."""

from pathlib import Path

import pytest
import torch
from support.policies import load
from support.random_flux import save_random_flux

from g2rpo.flow.schedule import shifted_sigmas
from g2rpo.models.flux.policy import FluxPolicy
from g2rpo.models.policy import Conditioning
from g2rpo.models.registry import load_policy
from g2rpo.models.transformer.latents import pack, unpack
from g2rpo.models.transformer.weights import LORA_FILE
from g2rpo.runtime.processes import resolve_device

PROMPTS = ["a red circle on a white background", "two blue stars"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_random_flux(tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="module")
def policy(folder) -> FluxPolicy:
    return load(folder, guidance=3.0)


def latents(n: int = 2) -> torch.Tensor:
    return torch.randn(n, 16, 16, generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def euler(policy: FluxPolicy, x: torch.Tensor, sigmas: torch.Tensor, cond: Conditioning) -> torch.Tensor:
    for k in range(len(sigmas) - 1):
        x = x + (sigmas[k + 1] - sigmas[k]) * policy.velocity(x, sigmas[k].expand(len(x)), cond)
    return x


@pytest.mark.parametrize("guidance_embeds", [True, False])
def test_equals_the_stock_pipeline(tmp_path, guidance_embeds):
    from diffusers import FluxPipeline

    folder = save_random_flux(tmp_path, guidance_embeds=guidance_embeds)
    policy = load(folder, guidance=2.5)
    pipeline = FluxPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    sigmas, x = shifted_sigmas(5, 3.0), latents()
    # The folder's scheduler has shift 1 and no dynamic shifting, so the pipeline keeps the given sigmas.
    stock = pipeline(
        PROMPTS,
        latents=x,
        sigmas=sigmas[:-1].tolist(),
        num_inference_steps=5,
        guidance_scale=2.5,
        height=16,
        width=16,
        max_sequence_length=12,
        output_type="pt",
    ).images
    ours = policy.decode(euler(policy, x, sigmas, policy.encode(PROMPTS)))
    assert stock.std() > 0.01, "a constant image would agree with anything"
    torch.testing.assert_close(ours, stock, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [(16, 24), (24, 8)])
def test_rectangles_equal_the_stock_pipeline(folder, size):
    from diffusers import FluxPipeline

    height, width = size
    policy = load(folder, guidance=2.5, resolution=size)
    tokens = height * width // 16
    assert policy.latent_shape == (tokens, 16) and policy.resolution == size
    assert policy.conditions["resolution"] == [height, width]
    pipeline = FluxPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    sigmas, x = shifted_sigmas(4, 3.0), torch.randn(2, tokens, 16, generator=torch.Generator().manual_seed(8))
    call = {"sigmas": sigmas[:-1].tolist(), "num_inference_steps": 4, "guidance_scale": 2.5}
    call |= {"height": height, "width": width, "max_sequence_length": 12}
    stock_latents = pipeline(PROMPTS, latents=x, output_type="latent", **call).images
    stock = pipeline(PROMPTS, latents=x, output_type="pt", **call).images
    latents = euler(policy, x, sigmas, policy.encode(PROMPTS))
    torch.testing.assert_close(latents, stock_latents, rtol=0, atol=1e-5)
    images = policy.decode(latents)
    assert images.shape == (2, 3, height, width) and stock.std() > 0.01
    torch.testing.assert_close(images, stock, rtol=0, atol=1e-5)


def test_pipeline_in_use_is_left_alone(folder, policy):
    # The hook on the time embedding must not leak an old sigma into calls from outside the policy.
    from diffusers import FluxPipeline

    pipeline = FluxPipeline.from_pretrained(folder, transformer=policy.module)
    pipeline.set_progress_bar_config(disable=True)
    call = {"latents": latents(1), "height": 16, "width": 16, "max_sequence_length": 12, "output_type": "pt"}
    stock = FluxPipeline.from_pretrained(folder)
    stock.set_progress_bar_config(disable=True)
    policy.velocity(latents(), torch.tensor([0.9, 0.1]), policy.encode(PROMPTS))
    shared = pipeline(PROMPTS[0], num_inference_steps=2, guidance_scale=5.0, **call).images
    torch.testing.assert_close(
        shared, stock(PROMPTS[0], num_inference_steps=2, guidance_scale=5.0, **call).images, rtol=0, atol=0
    )


def received_timesteps(policy: FluxPolicy, sigma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs of the time embedding's sinusoids: (1000 sigma, 1000 guidance)."""
    seen = []
    hook = policy.module.time_text_embed.time_proj.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].clone())
    )
    with torch.no_grad():
        policy.velocity(latents(len(sigma)), sigma, policy.encode([PROMPTS[0]] * len(sigma)))
    hook.remove()
    return seen[0], seen[1]


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_time_embedding_receives_float32_in_bfloat16(folder, lora_rank):
    policy = load(folder, precision="bfloat16", lora_rank=lora_rank, guidance=3.5)
    sigma = shifted_sigmas(16)[:-1]
    time, guidance = received_timesteps(policy, sigma)
    assert time.dtype == guidance.dtype == torch.float32
    assert torch.equal(time, 1000 * sigma)
    assert guidance.tolist() == [3500.0] * 16  # 3504 after a bfloat16 cast
    # The cast that this avoids is off by up to 2 of 1,000 at these sigmas.
    assert (sigma.bfloat16().float() * 1000 - time).abs().max() > 1


def test_released_rounding_truncates(folder):
    policy = load(folder, sigma_rounding="released")
    time, _ = received_timesteps(policy, shifted_sigmas(16)[:-1])
    # int(1000 sigma), T = 16, shift 3, computed with the released formula.
    expected = [1000, 978, 954, 928, 900, 868, 833, 794, 750, 700, 642, 576, 500, 409, 300, 166]
    assert time.tolist() == expected


def test_pack_is_the_pipelines(policy):
    from diffusers import FluxPipeline

    z = torch.arange(2 * 4 * 8 * 8.0).reshape(2, 4, 8, 8)
    assert torch.equal(pack(z), FluxPipeline._pack_latents(z, 2, 4, 8, 8))
    assert torch.equal(unpack(pack(z), (4, 4)), z)
    assert pack(z).shape[1:] == policy.latent_shape
    wide = torch.arange(2 * 4 * 4 * 10.0).reshape(2, 4, 4, 10)
    assert torch.equal(unpack(pack(wide), (2, 5)), wide)
    with pytest.raises(ValueError, match="10 tokens of 16 channels are not a packed latent of 5 x 5 tokens"):
        unpack(pack(wide), (5, 5))


def test_encoding_of_a_prompt_does_not_depend_on_its_company(policy):
    together, single = policy.encode(PROMPTS).tensors, policy.encode(PROMPTS[1:]).tensors
    assert together.keys() == single.keys() == {"text", "pooled"}
    assert all(torch.equal(together[name][1:], single[name]) for name in single)
    text = together["text"]
    assert not torch.equal(text[0], text[1])
    assert text.shape[1] == 12 == policy.text.max_sequence_length


def test_text_encoders_load_at_the_first_prompt_only(folder):
    policy = load(folder)
    assert policy.text._encoders is None
    policy.encode(PROMPTS)
    policy.text.unload()
    assert torch.equal(policy.encode(PROMPTS).tensors["text"], policy.encode(PROMPTS).tensors["text"])


@pytest.mark.parametrize(
    ("precision", "lora_rank"), [("float32", 0), ("float32", 3), ("bfloat16", 0), ("bfloat16", 3)]
)
def test_precisions_and_adapters(folder, policy, precision, lora_rank):
    trained = load(folder, guidance=3.0, precision=precision, lora_rank=lora_rank)
    x, sigma = latents(), torch.tensor([0.9, 0.3])
    velocity = trained.velocity(x, sigma, trained.encode(PROMPTS))
    reference = policy.velocity(x, sigma, policy.encode(PROMPTS)).detach()
    # Initial adapters change nothing; bfloat16 has 8 bits of precision.
    error = (velocity.detach() - reference).square().mean().sqrt() / reference.square().mean().sqrt()
    assert error <= (0.05 if precision == "bfloat16" else 1e-6)
    assert velocity.dtype == torch.float32
    velocity.square().mean().backward()
    parameters = dict(trained.module.named_parameters())
    trainable = {name: p for name, p in parameters.items() if p.requires_grad}
    assert {p.dtype for p in trainable.values()} == {torch.float32}
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in trainable.values())
    assert any(p.grad.abs().max() > 0 for p in trainable.values())
    frozen = {p.dtype for name, p in parameters.items() if name not in trainable}
    if lora_rank:
        assert frozen == {torch.bfloat16 if precision == "bfloat16" else torch.float32}
        # 1 double block: 8 attention + 4 MLP linears; 2 single blocks: 3 attention + 2 MLP each; A and B.
        assert len(trainable) == 2 * (12 + 2 * 5) and all("lora_" in name for name in trainable)
    else:
        assert not frozen
    assert not any(p.requires_grad for p in trained.vae.parameters())


def test_no_precision_leaks_into_the_next_policy(folder):
    tf32 = load(folder, precision="tf32")
    assert torch.get_float32_matmul_precision() == "high"
    float32 = load(folder)
    assert torch.get_float32_matmul_precision() == "highest"
    # The cache must not serve embeddings of one precision to the other.
    assert tf32.encoder_identity.replace(":tf32:", ":float32:") == float32.encoder_identity
    assert tf32.encoder_identity != float32.encoder_identity


def test_adapters_start_the_same_whatever_was_drawn_before(folder):
    torch.manual_seed(1)
    first = load(folder, lora_rank=2).module.state_dict()
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    second = load(folder, lora_rank=2).module.state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert torch.equal(before, torch.random.get_rng_state())


def test_gradient_checkpointing_changes_no_gradient(folder):
    gradients = []
    for checkpointing in (False, True):
        policy = load(folder, gradient_checkpointing=checkpointing)
        policy.velocity(
            latents(), torch.tensor([0.9, 0.3]), policy.encode(PROMPTS)
        ).square().mean().backward()
        gradients.append([p.grad for p in policy.module.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def test_weights_of_another_transformer(folder, tmp_path):
    other = save_random_flux(tmp_path / "other", seed=1)
    expected = load(other)
    policy = load(folder, weights=[other])
    x, sigma, cond = latents(), torch.tensor([0.9, 0.3]), policy.encode(PROMPTS)
    assert torch.equal(policy.velocity(x, sigma, cond), expected.velocity(x, sigma, cond))
    single = other / "transformer" / "diffusion_pytorch_model.safetensors"
    assert torch.equal(
        load(folder, weights=[single]).velocity(x, sigma, cond), policy.velocity(x, sigma, cond)
    )


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_weights_that_are_a_lora(folder, tmp_path, lora_rank):
    trained = load(folder, lora_rank=2, lora_alpha=3.0)
    with torch.no_grad():
        for parameter in trained.module.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    trained.module.save_lora_adapter(tmp_path, weight_name=LORA_FILE)
    policy = load(folder, weights=[tmp_path], lora_rank=lora_rank)
    x, sigma, cond = latents(), torch.tensor([0.9, 0.3]), policy.encode(PROMPTS)
    with torch.no_grad():
        ours, theirs = policy.velocity(x, sigma, cond), trained.velocity(x, sigma, cond)
        base = load(folder).velocity(x, sigma, cond)
    assert (ours - base).abs().max() > 0.05
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_what_a_user_can_get_wrong(folder, tmp_path):
    with pytest.raises(ValueError, match="resolution=18: sides must be multiples of 4 pixels, as resolut"):
        load(folder, resolution=18)
    with pytest.raises(ValueError, match=r"max_sequence_length=13 is outside 1\.\.12"):
        load(folder, max_sequence_length=13)
    with pytest.raises(ValueError, match="precision='half'"):
        load(folder, precision="half")
    with pytest.raises(ValueError, match="no model folder 'nowhere'"):
        load_policy("nowhere")
    with pytest.raises(ValueError, match=r"contains no model_index\.json"):
        load_policy(tmp_path)
    with pytest.raises(ValueError, match=r"no embedded model 'tiny@nothing'|the embedded model is missing"):
        load_policy("tiny@nothing")
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    with pytest.raises(ValueError, match="is a StableDiffusionPipeline"):
        load_policy(tmp_path)
    with pytest.raises(ValueError, match="no weights at"):
        load(folder, weights=[tmp_path / "none.safetensors"])
    vae = folder / "vae" / "diffusion_pytorch_model.safetensors"
    with pytest.raises(ValueError, match="does not fit this model"):
        load(folder, weights=[vae])


def test_velocity_checks_its_shapes(policy):
    cond = policy.encode(PROMPTS)
    with pytest.raises(ValueError, match=r"need x \[N, 16, 16\]"):
        policy.velocity(latents(3), torch.full((3,), 0.5), cond)
    with pytest.raises(ValueError, match="sigma"):
        policy.velocity(latents(), torch.tensor(0.5), cond)


def test_another_resolution_changes_the_latents(folder):
    policy = load(folder, resolution=24)
    assert policy.latent_shape == (36, 16)
    assert policy.decode(torch.zeros(1, 36, 16)).shape == (1, 3, 24, 24)


def test_device_names():
    assert resolve_device("cpu") == torch.device("cpu")
    if not torch.cuda.is_available():
        assert resolve_device("auto").type == "cpu"
        with pytest.raises(ValueError, match="no GPU"):
            resolve_device("cuda")
