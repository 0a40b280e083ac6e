"""Qwen-Image as a policy: exact in sigma, masks only where rows are padded, trainable in every precision.

That it equals the stock pipeline is tested in tests/contract.
"""

import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from support.random_flux import save_random_flux
from support.random_qwen import save_random_qwen

from g2rpo.flow.schedule import shifted_sigmas
from g2rpo.models.loading.low_precision import eligible_linears
from g2rpo.models.options import PolicyOptions
from g2rpo.models.qwen_image.check import check_diffusers
from g2rpo.models.registry import check_policy, find_model, load_policy

PROMPTS = ["a red circle on a white background", "two blue stars"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_random_qwen(tmp_path_factory.mktemp("qwen") / "base")


@pytest.fixture(scope="module")
def flux(tmp_path_factory) -> Path:
    return save_random_flux(tmp_path_factory.mktemp("flux") / "base")


def load(name, **options):
    return load_policy(name, PolicyOptions(**{"resolution": (16, 16), **options}), device="cpu")


@pytest.fixture(scope="module")
def policy(folder):
    return load(folder)


def latents(n: int = 2) -> torch.Tensor:
    return torch.randn(n, 16, 16, generator=torch.Generator().manual_seed(7))


SIGMA = torch.tensor([0.9, 0.3])


def test_family(folder):
    for name in (folder, "random:qwen-tiny", "random:qwen-image", "Qwen/Qwen-Image"):
        family, _ = find_model(name)
        assert family.name == "qwen_image" and family.negative_prompt == " "


def received_times(policy, sigma: torch.Tensor) -> torch.Tensor:
    """The input of the time embedding's sinusoids, which multiply it by 1,000."""
    seen = []
    hook = policy.module.time_text_embed.time_proj.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].clone())
    )
    with torch.no_grad():
        policy.velocity(latents(len(sigma)), sigma, policy.encode([PROMPTS[0]] * len(sigma)))
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_time_embedding_receives_float32_in_bfloat16(folder, lora_rank):
    policy = load(folder, precision="bfloat16", lora_rank=lora_rank)
    sigma = shifted_sigmas(16)[:-1]
    time = received_times(policy, sigma)
    assert time.dtype == torch.float32 and torch.equal(time, sigma)
    # The cast that this avoids is off by up to 2 of 1,000 at these sigmas.
    assert (1000 * sigma.bfloat16().float() - 1000 * time).abs().max() > 1


def test_released_rounding_truncates(folder):
    time = received_times(load(folder, sigma_rounding="released"), shifted_sigmas(16)[:-1])
    # int(1000 sigma), T = 16, shift 3, computed with the released formula.
    expected = [1000, 978, 954, 928, 900, 868, 833, 794, 750, 700, 642, 576, 500, 409, 300, 166]
    assert (1000 * time).tolist() == pytest.approx(expected, abs=1e-3)


def test_stock_pipeline_with_our_network(folder, policy):
    # The hook on the time embedding must not leak an old sigma into calls from outside the policy.
    from diffusers import QwenImagePipeline

    stock, shared = (QwenImagePipeline.from_pretrained(folder) for _ in range(2))
    shared.transformer = policy.module
    policy.velocity(latents(), SIGMA, policy.encode(PROMPTS))
    images = []
    for pipeline in (stock, shared):
        pipeline.set_progress_bar_config(disable=True)
        call = {"latents": latents(), "height": 16, "width": 16, "num_inference_steps": 2}
        images.append(pipeline(PROMPTS, **call, output_type="pt").images)
    assert torch.equal(*images)


@pytest.mark.parametrize("true_cfg", [1.0, 4.0])
def test_mask_only_where_rows_are_padded(folder, true_cfg):
    policy, masks = load(folder, true_cfg=true_cfg), []
    policy.module.register_forward_pre_hook(
        lambda _, args, kwargs: masks.append(kwargs["encoder_hidden_states_mask"]), with_kwargs=True
    )
    cond = policy.encode(PROMPTS)
    assert cond.lengths["text"].tolist() == [12, 8]
    policy.velocity(latents(), SIGMA, cond[torch.tensor([1, 1])])
    assert [mask is None for mask in masks] == [True] * policy.forwards_per_sample
    masks.clear()
    policy.velocity(latents(), SIGMA, cond)
    # The negative prompt has the same length in each row.
    assert [mask is None for mask in masks] == [False, True][: policy.forwards_per_sample]
    assert masks[0].sum(1).tolist() == [12, 8]


@torch.no_grad()
def test_guidance_keeps_the_norm_of_each_token(folder, policy):
    guided = load(folder, true_cfg=4.0)
    cond = policy.encode(PROMPTS)
    v = policy.velocity(latents(), SIGMA, cond)
    v0 = policy.velocity(latents(), SIGMA, policy.encode([" ", " "]))
    ours = guided.velocity(latents(), SIGMA, cond)
    combined = v0 + 4 * (v - v0)
    torch.testing.assert_close(ours.norm(dim=-1), v.norm(dim=-1))
    torch.testing.assert_close(
        ours / ours.norm(dim=-1, keepdim=True), combined / combined.norm(dim=-1)[..., None]
    )
    assert guided.forwards_per_sample == 2 and guided.negative_prompt == " "
    other = load(folder, true_cfg=4.0, negative_prompt="two red star")
    assert (other.velocity(latents(), SIGMA, cond) - ours).abs().max() > 0.01


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("float32", {}),
        ("float32", {"lora_rank": 3}),
        ("bfloat16", {}),
        ("bfloat16", {"lora_rank": 3}),
        ("bfloat16", {"lora_rank": 3, "base_dtype": "float8"}),
    ],
)
def test_precisions_and_adapters(folder, policy, precision, options):
    trained = load(folder, precision=precision, **options)
    velocity = trained.velocity(latents(), SIGMA, trained.encode(PROMPTS))
    reference = policy.velocity(latents(), SIGMA, policy.encode(PROMPTS)).detach()
    # Initial adapters change nothing; bfloat16 has 8 bits of precision, float8 4.
    error = (velocity.detach() - reference).norm() / reference.norm()
    limit = 0.2 if "base_dtype" in options else 0.05 if precision == "bfloat16" else 1e-6
    assert velocity.dtype == torch.float32 and error <= limit
    velocity.square().mean().backward()
    parameters = dict(trained.module.named_parameters())
    trainable = {name: p for name, p in parameters.items() if p.requires_grad}
    assert {p.dtype for p in trainable.values()} == {torch.float32}
    # The last block's text stream ends in nothing: only its keys and values reach the image.
    unused = {name for name, p in trainable.items() if p.grad is None}
    assert all("blocks.1.attn.to_add_out" in name or "blocks.1.txt_mlp" in name for name in unused)
    assert unused or "lora_rank" not in options
    if "lora_rank" in options:
        # 2 blocks of 8 attention and 4 MLP linears; A and B.
        assert len(trainable) == 2 * 12 * 2 and all("lora_" in name for name in trainable)
        frozen = {p.dtype for name, p in parameters.items() if name not in trainable}
        compute = torch.bfloat16 if precision == "bfloat16" else torch.float32
        assert frozen == {compute} | ({torch.float8_e4m3fn} if "base_dtype" in options else set())
    assert not any(p.requires_grad for p in trained.vae.parameters())


def test_gradient_checkpointing_changes_no_gradient(folder):
    gradients = []
    for checkpointing in (False, True):
        policy = load(folder, gradient_checkpointing=checkpointing)
        policy.velocity(latents(), SIGMA, policy.encode(PROMPTS)).square().mean().backward()
        gradients.append([p.grad for p in policy.module.parameters() if p.grad is not None])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_no_batch_size_and_no_text_length_compiles_anew(folder, lora_rank, monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    compiled = load(folder, compile_blocks=True, gradient_checkpointing=True, lora_rank=lora_rank)
    eager, seen = load(folder, lora_rank=lora_rank), []
    words = ["a", "red", "circle", "on", "white", "background", "and", "two", "blue", "stars"]
    for n, longest, ragged in ((1, 3, 0), (4, 5, 0), (3, 4, 1), (2, 6, 0), (7, 8, 1), (5, 2, 1)):
        cond = eager.encode([" ".join(words[: longest - ragged * (i % 2)]) for i in range(n)])
        x, sigma = torch.randn(n, *eager.latent_shape), torch.rand(n)
        with torch.no_grad():
            torch.testing.assert_close(compiled.velocity(x, sigma, cond), eager.velocity(x, sigma, cond))
        seen.append(len(graphs))
        assert compiled.velocity(x, sigma, cond).requires_grad and len(graphs) == seen[-1]
    # All blocks share a graph. The second size compiles a general one for inputs that are views (those of the
    # first block) and one for others; so does the first mask; later sizes compile none.
    assert seen[0] == 1 and seen[1] <= 3 and seen[2] <= 5 and len(set(seen[2:])) == 1, seen


def test_decoder_compiles_as_one_graph(policy):
    decoder = torch.compile(policy._decoder, backend="aot_eager", fullgraph=True)
    z = torch.randn(2, 4, 8, 8)
    torch.testing.assert_close(decoder(z), policy._decoder(z), rtol=0, atol=1e-5)


def test_eight_bit_tails_leave_modulations(policy):
    block = policy.module.transformer_blocks[0]
    names = {name for name, module in block.named_modules() if module in eligible_linears(block)}
    assert len(names) == 12 and not any("_mod" in name for name in names)


@torch.no_grad()
def test_random_weights():
    policy = load("random:qwen-tiny", true_cfg=2.0, resolution=(16, 24))
    cond = policy.encode(PROMPTS)
    velocity = policy.velocity(torch.randn(2, *policy.latent_shape), SIGMA, cond)
    assert velocity.isfinite().all() and velocity.std() > 0.1
    assert policy.decode(velocity).shape == (2, 3, 16, 24)
    with pytest.raises(ValueError, match="has no scheduler"):
        policy.pipeline_shift()


# ---- errors, before weights are read


def changed_config(folder: Path, out: Path, part: str, **changes) -> Path:
    shutil.copytree(folder, out)
    file = out / part / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return out


@pytest.fixture
def no_weights(monkeypatch):
    monkeypatch.setattr(
        "g2rpo.models.transformer.policy.fill_from_folder", lambda _: pytest.fail("read weights")
    )


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        (
            {"guidance_embeds": True},
            {"true_cfg": 4.0},
            r"true_cfg=4: .* distilled .* guided twice; set true_cfg=1",
        ),
        ({"guidance_embeds": True}, {}, r"is distilled for guidance .* no input for the guidance scale"),
        ({"zero_cond_t": True}, {}, r"an image-editing model \(zero_cond_t"),
        ({"use_layer3d_rope": True}, {}, "a model of layered images"),
        ({"_class_name": "FluxTransformer2DModel"}, {}, "of the class FluxTransformer2DModel, not QwenImage"),
        ({}, {"resolution": (16, 18)}, r"resolution=\[16, 18\]: sides must be multiples of 4 pixels"),
        ({}, {"max_sequence_length": 1025}, r"max_sequence_length=1025 is outside 1\.\.1024"),
        ({}, {"lora_rank": 2, "lora_targets": ("to_x",)}, r"ends in 'to_x'.*attn\.to_q"),
    ],
)
def test_what_a_user_can_get_wrong(folder, tmp_path, no_weights, changes, options, message):
    model = changed_config(folder, tmp_path / "model", "transformer", **changes)
    with pytest.raises(ValueError, match=message):
        load(model, **options)


def test_guidance_without_effect_is_accepted(folder, policy):
    x, cond = latents(), policy.encode(PROMPTS)
    assert torch.equal(load(folder, guidance=9.0).velocity(x, SIGMA, cond), policy.velocity(x, SIGMA, cond))


def test_files_of_another_family(folder, flux, tmp_path, no_weights):
    for model, weights, kind in ((folder, flux, "Flux"), (flux, folder, "QwenImage")):
        with pytest.raises(
            ValueError, match=f"does not fit this model: it contains a {kind}Transformer2DModel"
        ):
            check_policy(model, PolicyOptions(weights=(weights,)))
        single = weights / "transformer" / "diffusion_pytorch_model.safetensors"
        with pytest.raises(ValueError, match=r"does not fit this model: .*\d+ differences"):
            check_policy(model, PolicyOptions(weights=(single,)))
        mixed = shutil.copytree(model, tmp_path / f"with {kind}")
        shutil.rmtree(mixed / "transformer")
        shutil.copytree(weights / "transformer", mixed / "transformer")
        with pytest.raises(ValueError, match=f"{kind}Transformer2DModel, not"):
            load(mixed)


def test_lora_of_another_family(folder, flux, tmp_path):
    for model, other in ((folder, flux), (flux, folder)):
        lora = tmp_path / other.parent.name
        load(other, lora_rank=2).module.save_lora_adapter(
            lora, weight_name="pytorch_lora_weights.safetensors"
        )
        check_policy(other, PolicyOptions(weights=(lora,)))
        with pytest.raises(ValueError, match=r"unknown layers.*another architecture"):
            check_policy(model, PolicyOptions(weights=(lora,)))


def test_old_diffusers():
    check_diffusers("0.37.0")
    check_diffusers("1.0")
    with pytest.raises(ValueError, match=r"needs diffusers >= 0\.37, .* 0\.36\.2 is installed"):
        check_diffusers("0.36.2")
