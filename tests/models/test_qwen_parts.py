"""Qwen-Image's parts equal diffusers': text encoder, latents, decoder of single frames, attention."""

from pathlib import Path

import pytest
import torch
from support.random_qwen import save_random_qwen

from g2rpo.models.qwen_image.attention import install
from g2rpo.models.qwen_image.known import RANDOM_TINY
from g2rpo.models.qwen_image.latents import checked_size, unscaled
from g2rpo.models.qwen_image.random import RandomText
from g2rpo.models.qwen_image.text import DROPPED_TOKENS, TEMPLATE, QwenText, language_model
from g2rpo.models.qwen_image.vae import FrameDecoder
from g2rpo.models.transformer.latents import pack, unpack

PROMPTS = ["a red circle and two stars on white", "a blue square", "", " "]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_random_qwen(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def pipeline(folder):
    from diffusers import QwenImagePipeline

    return QwenImagePipeline.from_pretrained(folder)


def text_of(folder: Path, length: int | None = None) -> QwenText:
    return QwenText(folder, device=CPU, precision="float32", max_sequence_length=length)


# ---- text


def test_text_is_the_pipelines(folder, pipeline):
    assert pipeline.prompt_template_encode == TEMPLATE
    assert pipeline.prompt_template_encode_start_idx == DROPPED_TOKENS
    start = TEMPLATE.partition("{}")[0]
    assert len(pipeline.tokenizer(start).input_ids) == DROPPED_TOKENS  # as with the published tokenizer
    ours = text_of(folder).encode(PROMPTS)
    assert ours.lengths["text"].tolist() == [13, 8, 5, 6]  # words, and 5 tokens of the template's end
    for i, prompt in enumerate(PROMPTS):
        stock, mask = pipeline.encode_prompt([prompt])  # alone, so without padding
        assert mask is None
        row = ours[torch.tensor([i])]
        assert torch.equal(row.tensors["text"], stock)
    stock, mask = pipeline.encode_prompt(PROMPTS)
    assert mask.sum(1).tolist() == ours.lengths["text"].tolist()
    torch.testing.assert_close(ours.tensors["text"], stock, rtol=0, atol=1e-5)


def test_rows_do_not_depend_on_their_company(folder):
    text = text_of(folder)
    together, single = text.encode(PROMPTS), text.encode(PROMPTS[1:2])
    assert torch.equal(together[torch.tensor([1])].tensors["text"], single.tensors["text"])


def test_long_prompts_are_cut_as_in_the_pipeline(folder, pipeline):
    long = " ".join(["a red circle"] * 10)
    text = text_of(folder, 12)
    ours = text.encode([long])
    stock, _ = pipeline.encode_prompt([long], max_sequence_length=12)
    torch.testing.assert_close(ours.tensors["text"], stock, rtol=0, atol=1e-5)
    (truncation,) = text.truncated([long, "a red circle"])
    assert truncation.prompts == (long,) and "to 12 tokens" in str(truncation)
    # 7 words and the template's end are exactly 12 tokens.
    assert not text.truncated(["a red circle and two blue stars"]) and not text.truncated([])


def test_vision_tower_and_output_layer_are_not_loaded(folder, capsys):
    encoder = language_model(folder / "text_encoder", torch.float32)
    names = [name for name, _ in encoder.named_parameters()]
    assert not any("visual" in name or "lm_head" in name for name in names)
    printed = capsys.readouterr()
    assert "UNEXPECTED" not in printed.out + printed.err


@pytest.mark.parametrize("rename", ["model.language_model.", None])
def test_text_encoder_files(folder, tmp_path, rename):
    # transformers names the language part in two ways; a file without some of its weights must be refused.
    from safetensors.torch import load_file, save_file

    source = folder / "text_encoder"
    state = load_file(source / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    if rename is None:
        del state["model.layers.1.mlp.up_proj.weight"]
        save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=r"lacks weights .*layers\.1\.mlp\.up_proj\.weight missing"):
            language_model(tmp_path, torch.float32)
        return
    renamed = {
        rename + key.removeprefix("model.") if key.startswith("model.") else f"model.{key}": value
        for key, value in state.items()
    }
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    expected = language_model(source, torch.float32).state_dict()
    actual = language_model(tmp_path, torch.float32).state_dict()
    assert all(torch.equal(expected[key], actual[key]) for key in expected)


@pytest.mark.parametrize("length", [0, 1025])
def test_limit_of_the_encoder(folder, length):
    with pytest.raises(ValueError, match=rf"max_sequence_length={length} is outside 1\.\.1024"):
        text_of(folder, length)


def test_identity_covers_what_embeddings_depend_on(folder, tmp_path):
    identities = {
        text_of(folder).identity,
        text_of(folder, 12).identity,
        QwenText(folder, device=CPU, precision="bfloat16").identity,
        text_of(save_random_qwen(tmp_path, seed=1)).identity,
    }
    assert len(identities) == 4


def test_random_text_has_realistic_lengths():
    text = RandomText(RANDOM_TINY, device=CPU, precision="float32", max_sequence_length=20)
    cond = text.encode([*PROMPTS, "word " * 40])
    # round(1.3 * words) + 5, at most 20
    assert cond.lengths["text"].tolist() == [15, 9, 5, 5, 20]
    assert torch.equal(cond[torch.tensor([1])].tensors["text"], text.encode([PROMPTS[1]]).tensors["text"])
    assert cond.tensors["text"][0, :5].std() > 0.5 and cond.tensors["text"][2, 5:].abs().max() == 0
    assert text.truncated(PROMPTS) == []


# ---- latents and decoder


def test_packing_is_the_pipelines(pipeline):
    z = torch.arange(2 * 4 * 8 * 12.0).reshape(2, 4, 8, 12)
    packed = pack(z)
    assert torch.equal(packed, pipeline._pack_latents(z, 2, 4, 8, 12))
    assert torch.equal(unpack(packed, (4, 6)), z)
    assert torch.equal(pipeline._unpack_latents(packed, 16, 24, 2).squeeze(2), z)


def test_sizes():
    assert checked_size(None, {"temperal_downsample": [False, True, True]}) == ((1024, 1024), (64, 64))
    assert checked_size((16, 24), RANDOM_TINY["vae"]) == ((16, 24), (4, 6))
    with pytest.raises(ValueError, match=r"\[16, 30\]: .* multiples of 4 pixels, as resolution=\[16, 28\]"):
        checked_size((16, 30), RANDOM_TINY["vae"])


@torch.no_grad()
def test_frame_decoder_equals_the_video_decoder(folder, pipeline):
    from diffusers import AutoencoderKLQwenImage

    z = torch.randn(3, 4, 8, 12, generator=torch.Generator().manual_seed(0))
    stock = pipeline.vae.decode(z[:, :, None]).sample[:, :, 0]
    vae = AutoencoderKLQwenImage.from_pretrained(folder / "vae")
    ours = FrameDecoder(vae)(z).clamp(-1, 1)
    assert stock.std() > 0.1
    torch.testing.assert_close(ours, stock, rtol=0, atol=2e-6)
    config = pipeline.vae.config
    # The pipeline's own computation, written out for one channel.
    assert torch.equal(unscaled(z, config)[:, 2], z[:, 2] * config.latents_std[2] + config.latents_mean[2])


# ---- attention


@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_attention_is_diffusers(folder, masked):
    from diffusers import QwenImageTransformer2DModel

    network = QwenImageTransformer2DModel.from_pretrained(folder / "transformer")
    random = torch.Generator().manual_seed(0)
    inputs = {
        "hidden_states": torch.randn(2, 24, 16, generator=random),
        "encoder_hidden_states": torch.randn(2, 7, 32, generator=random),
        "encoder_hidden_states_mask": torch.arange(7) < torch.tensor([[7], [4]]) if masked else None,
        "timestep": torch.tensor([0.3, 0.7]),
        "img_shapes": [[(1, 4, 6)]] * 2,
        "return_dict": False,
    }
    stock = network(**inputs)[0]
    install(network)
    assert torch.equal(network(**inputs)[0], stock)
    # Compiled blocks rotate by real numbers.
    for block in network.transformer_blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(network(**inputs)[0], stock, rtol=0, atol=1e-5)
