"""Exports load in stock diffusers and give the same velocity; saved models open by their path."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from support.policies import policy_of
from support.random_flux import save_random_flux
from support.trained_runs import PROMPTS, make_run, velocity
from typer.testing import CliRunner

from g2rpo.algorithms.registry import PRESETS
from g2rpo.cli.app import app
from g2rpo.config.load import Settings, load_settings
from g2rpo.exporters.card import base_licence, model_card
from g2rpo.exporters.export import DTYPES, _layout, export_policy, export_run
from g2rpo.inference.open import open_policy
from g2rpo.models.family import Writer
from g2rpo.models.flux.family import FAMILY
from g2rpo.models.flux.layout import is_original, to_diffusers
from g2rpo.models.transformer.export import merged_state
from g2rpo.rewards.registry import reward_spec

CARD = "---\nlicense: other\nlicense_name: flux-1-dev-non-commercial-license\n---\nText"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = save_random_flux(tmp_path_factory.mktemp("base"))
    (folder / "README.md").write_text(CARD)
    (folder / "LICENSE.md").write_text("terms")
    return folder


@torch.no_grad()
def stock_velocity(pipeline, guidance: float) -> torch.Tensor:
    """The same through a stock pipeline's own parts."""
    x = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(7))
    text, pooled, txt_ids = pipeline.encode_prompt(PROMPTS, max_sequence_length=12)
    ids = pipeline._prepare_latent_image_ids(2, 4, 4, "cpu", torch.float32)
    return pipeline.transformer(
        hidden_states=x,
        encoder_hidden_states=text,
        pooled_projections=pooled,
        txt_ids=txt_ids,
        img_ids=ids,
        timestep=torch.tensor([0.9, 0.3]),
        guidance=torch.full((2,), guidance),
        return_dict=False,
    )[0]


@pytest.mark.parametrize(("lora_rank", "kind"), [(0, "auto"), (2, "diffusers")])
def test_whole_model_loads_in_the_stock_pipeline(base, tmp_path, lora_rank, kind):
    from diffusers import FluxPipeline

    run, policy = make_run(tmp_path / "run", base, lora_rank)
    out = export_run(run, kind=kind)
    assert out == run / "export"
    pipeline = FluxPipeline.from_pretrained(out)
    expected = velocity(policy)
    assert (expected - velocity(open_policy(base, guidance=2.0, device="cpu"))).abs().max() > 0.05
    torch.testing.assert_close(stock_velocity(pipeline, 2.0), expected, rtol=1e-4, atol=1e-5)
    assert not any("lora" in name for name, _ in pipeline.transformer.named_parameters())
    # The export knows the guidance that it was trained with.
    torch.testing.assert_close(velocity(open_policy(out, device="cpu")), expected, rtol=1e-4, atol=1e-5)


def test_lora_loads_in_the_stock_pipeline(base, tmp_path):
    from diffusers import FluxPipeline

    run, policy = make_run(tmp_path / "run", base, lora_rank=2)
    out = export_run(run, tmp_path / "adapters")
    assert not (out / "transformer").exists()
    pipeline = FluxPipeline.from_pretrained(base)
    pipeline.load_lora_weights(out)
    expected = velocity(policy)
    torch.testing.assert_close(stock_velocity(pipeline, 2.0), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(velocity(open_policy(out, device="cpu")), expected, rtol=1e-4, atol=1e-4)


def test_runs_and_checkpoints_open(base, tmp_path):
    run, policy = make_run(tmp_path / "run", base, lora_rank=0)
    assert torch.equal(velocity(open_policy(run)), velocity(policy))
    assert torch.equal(velocity(open_policy(run / "checkpoints" / "step_000005")), velocity(policy))


CONDITIONS = {
    "precision": "bfloat16",
    "guidance": 2.0,
    "true_cfg": 1.5,
    "negative_prompt": "",
    "resolution": 8,
    "max_sequence_length": 6,
    "sigma_rounding": "released",
}


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_saved_models_open_under_the_conditions_of_their_run(base, tmp_path, lora_rank):
    run, policy = make_run(tmp_path / "run", base, lora_rank, **CONDITIONS)
    exported = export_run(run)
    for opened in (policy, open_policy(run), open_policy(exported, device="cpu")):
        assert opened.conditions == CONDITIONS
    # The second model of a comparison gets those of the first; what is asked for comes before both.
    assert open_policy(base, device="cpu", **policy.conditions).conditions == CONDITIONS
    assert open_policy(exported, device="cpu", sigma_rounding="exact").options.sigma_rounding == "exact"


def test_rectangles_are_recorded(base, tmp_path):
    run, policy = make_run(tmp_path / "run", base, lora_rank=0, resolution=[8, 16])
    exported = export_run(run)
    record = json.loads((exported / "g2rpo.json").read_text())
    assert record["resolution"] == record["settings"]["resolution"] == [8, 16]
    assert "height=8, width=16" in (exported / "README.md").read_text()
    for opened in (policy, open_policy(run), open_policy(exported, device="cpu")):
        assert opened.resolution == (8, 16) and opened.conditions["resolution"] == [8, 16]
    assert open_policy(exported, device="cpu", resolution=16).conditions["resolution"] == 16


def test_ema_is_what_opens(base, tmp_path):
    run, policy = make_run(tmp_path / "run", base, lora_rank=0, ema_decay=0.9)
    opened = dict(open_policy(run).module.named_parameters())
    for name, parameter in policy.module.named_parameters():
        assert torch.equal(opened[name], 0.5 * parameter)


def test_bare_weights_need_their_base(base, tmp_path):
    run, policy = make_run(tmp_path / "run", base, lora_rank=0)
    out = export_run(run)
    weights = out / "transformer" / "diffusion_pytorch_model.safetensors"
    with pytest.raises(ValueError, match="base=NAME"):
        open_policy(weights)
    opened = open_policy(weights, base=str(base), guidance=2.0, device="cpu")
    assert torch.equal(velocity(opened), velocity(policy))


def test_bfloat16_halves_the_transformer(base, tmp_path):
    run, _ = make_run(tmp_path / "run", base, lora_rank=0)
    name = "transformer/diffusion_pytorch_model.safetensors"
    whole = (export_run(run) / name).stat().st_size
    half = (export_run(run, dtype="bfloat16") / name).stat().st_size
    assert half < 0.6 * whole


def test_model_card(base, tmp_path):
    run, _ = make_run(tmp_path / "run", base, lora_rank=2)
    out = export_run(run)
    card = (out / "README.md").read_text()
    assert (
        "license_name: flux-1-dev-non-commercial-license" in card
        and (out / "LICENSE.md").read_text() == "terms"
    )
    # Metrics up to the checkpoint's iteration 5: first 0.1, last 0.5, not the sixth line's 0.6.
    row = "| embedded CLIP score, training images | `reward/tiny_clip` | 0.1000 | 0.5000 |"
    assert row in card and "loss" not in card.split("## Settings")[0]
    assert "| verifier, evaluation images | `eval/verifier` |" in card
    assert "trained for 5 iterations with G²RPO (g2rpo) on: embedded preference score (weight 1)." in card
    assert f"\n# {base.name} trained with G²RPO\n" in card and "lora_rank = 2" in card
    assert "| denoising steps | 16 in evaluations, 16 in training |" in card
    assert "| training | 5 iterations of 4 prompts with 12 images each |" in card
    assert "num_inference_steps=16, guidance_scale=2, height=16, width=16, max_sequence_length=12" in card
    assert json.loads((out / "g2rpo.json").read_text())["base_model"] == str(base)
    assert base_licence(tmp_path) == {}


def painted(path: Path, colour: str) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), colour).save(path)
    return path.read_bytes()


def test_the_card_shows_images_of_the_run(base, tmp_path):
    run, _ = make_run(tmp_path / "run", base, lora_rank=2)
    assert "](samples.png)" not in (export_run(run) / "README.md").read_text()
    # Of the exported checkpoint's iteration 5, not of others. The pairs are from the end of a longer run.
    (run / "finished").write_text("6\n")
    painted(run / "samples" / "step_000006" / "grid.png", "red")
    grid = painted(run / "samples" / "step_000005" / "grid.png", "green")
    pairs = painted(run / "before_after.png", "blue")
    out = export_run(run)
    card = (out / "README.md").read_text()
    assert (out / "samples.png").read_bytes() == grid and not (out / "before_after.png").exists()
    assert "](samples.png)" in card and "after 5 iterations, not chosen by score" in card
    # Where the run ended at the checkpoint, the pairs of before and after are of this model.
    (run / "finished").write_text("5\n")
    out = export_run(run)
    assert (out / "before_after.png").read_bytes() == pairs and not (out / "samples.png").exists()
    assert "](before_after.png)" in (out / "README.md").read_text()


def test_names_in_prose():
    """The names of the papers' tables, for every shipped method and reward of the paper."""
    assert [preset.title for preset in PRESETS.values()] == [
        "G²RPO",
        "G²RPO with Λ = {1}",
        "Flow-GRPO",
        "DanceGRPO",
        "MixGRPO",
        "DiffusionNFT",
    ]
    titles = {
        name: reward_spec(name).title for name in ("hps", "clip", "pickscore", "imagereward", "unified")
    }
    assert titles == {
        "hps": "HPS-v2.1",
        "clip": "CLIP score",
        "pickscore": "PickScore",
        "imagereward": "ImageReward",
        "unified": "UnifiedReward",
    }


def test_the_card_of_the_papers_run(base, tmp_path):
    """As for FLUX.1-dev, with a small network in its place."""
    _, policy = make_run(tmp_path / "run", base, lora_rank=2)
    settings = load_settings("flux_hps_clip", check_files=False)
    lines = [{"step": 1, "reward/hps": 0.3, "reward/my_file:score": 1.0}]
    card = model_card(settings, lines, 300, policy=policy, family=FAMILY, kind="diffusers")
    assert "# FLUX.1-dev trained with G²RPO\n" in card
    assert "base_model: black-forest-labs/FLUX.1-dev\n" in card
    assert "300 iterations with G²RPO (g2rpo) on: HPS-v2.1 (weight 1), CLIP score (weight 1)." in card
    assert (
        "| denoising steps | 50 in evaluations, 16 in training |" in card and "num_inference_steps=50" in card
    )
    assert "| HPS-v2.1, training images | `reward/hps` |" in card
    assert "| my_file:score, training images | `reward/my_file:score` |" in card  # imports nothing
    own = Settings(algorithm="my_file:Mine", out="runs/a", model="owner/model")
    card = model_card(own, [], 1, policy=policy, family=FAMILY, kind="diffusers")
    assert "# model trained with my_file:Mine\n" in card and "| denoising steps | 16 in evaluations |" in card


def test_a_run_without_iterations_is_exported_with_a_warning(base, tmp_path):
    run, _ = make_run(tmp_path / "run", base, lora_rank=2, iteration=0)
    result = CliRunner().invoke(app, ["export", str(run)])
    assert result.exit_code == 0 and result.stdout == f"{run / 'export'}\n"
    assert (
        result.stderr.startswith("warning: the run has done 0 iterations, so ") and str(base) in result.stderr
    )
    run, _ = make_run(tmp_path / "trained", base, lora_rank=2, iteration=1)
    assert CliRunner().invoke(app, ["export", str(run)]).stderr == ""


def test_what_a_user_can_get_wrong(base, tmp_path):
    run, _ = make_run(tmp_path / "run", base, lora_rank=0)
    for kind in ("lora", "comfyui"):
        with pytest.raises(ValueError, match="no LoRA; use the layout diffusers or single_file"):
            export_run(run, kind=kind)
    with pytest.raises(ValueError, match="layout='onnx': choose one of auto, diffusers, lora, single_file"):
        export_run(run, kind="onnx")
    with pytest.raises(ValueError, match="dtype='int8'"):
        export_run(run, dtype="int8")
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not an export by g2rpo"):
        export_run(run, precious)
    assert (precious / "thesis.txt").read_text() == "mine"
    with pytest.raises(ValueError, match="neither a run folder"):
        export_run(tmp_path)
    (run / "latest").unlink()
    shutil.rmtree(run / "checkpoints")  # without `latest` alone, the newest complete one is used
    with pytest.raises(ValueError, match="no checkpoint yet"):
        export_run(run)


@pytest.mark.parametrize("kind", ["diffusers", "single_file"])
def test_a_refused_export_leaves_nothing_behind(tmp_path, kind):
    settings = Settings(model="random:tiny", out=str(tmp_path / "run"), device="cpu")
    policy, out = policy_of(settings), tmp_path / "exported"
    with pytest.raises(ValueError, match="random"):
        export_policy(policy, out, settings=settings, metrics=[], iteration=1, kind=kind)
    assert not list(tmp_path.iterdir())


def test_a_failed_export_leaves_the_earlier_one(base, tmp_path, monkeypatch):
    run, _ = make_run(tmp_path / "run", base, lora_rank=0)
    out = export_run(run)
    kept = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    def fails(policy, folder, dtype):
        (folder / "half").write_text("")
        raise OSError("no space left on device")

    monkeypatch.setitem(FAMILY.writers, "diffusers", Writer(fails))
    with pytest.raises(OSError, match="no space"):
        export_run(run)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == kept
    assert not list(run.glob("*.tmp"))


def test_exporting_again_replaces_the_export(base, tmp_path):
    run, _ = make_run(tmp_path / "run", base, lora_rank=0)
    out = export_run(run)
    (out / "stale").write_text("old")
    assert export_run(run) == out and not (out / "stale").exists()
    assert not list(run.glob("*.tmp"))


@pytest.mark.parametrize(("lora_rank", "dtype"), [(0, "float32"), (2, "float32"), (2, "bfloat16")])
def test_single_file_holds_the_merged_transformer(base, tmp_path, lora_rank, dtype):
    run, policy = make_run(tmp_path / "run", base, lora_rank)
    out = export_run(run, kind="single_file", dtype=dtype)
    assert {path.name for path in out.iterdir()} == {
        "model.safetensors",
        "README.md",
        "g2rpo.json",
        "LICENSE.md",
    }
    state = load_file(out / "model.safetensors")
    assert is_original(state) and {value.dtype for value in state.values()} == {DTYPES[dtype]}
    # Found by its path, under the conditions of the run or those asked for.
    opened = open_policy(out / "model.safetensors", base=str(base), guidance=2.0, device="cpu")
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == "float32" else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(velocity(opened), velocity(policy), **close)
    # The same weights as the layout that diffusers loads.
    other = export_run(run, tmp_path / "other", kind="diffusers", dtype=dtype) / "transformer"
    theirs = load_file(other / "diffusion_pytorch_model.safetensors")
    ours = to_diffusers(state, policy.module.config)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_comfyui_lora_gives_the_trained_policy(base, tmp_path):
    run, policy = make_run(tmp_path / "run", base, lora_rank=2)
    out = export_run(run, kind="comfyui")
    assert {path.name for path in out.iterdir()} == {
        "comfyui_lora.safetensors",
        "README.md",
        "g2rpo.json",
        "LICENSE.md",
    }
    opened = open_policy(out / "comfyui_lora.safetensors", base=str(base), guidance=2.0, device="cpu")
    torch.testing.assert_close(velocity(opened), velocity(policy), rtol=1e-4, atol=1e-4)
    ranks = {
        key.removesuffix(".lora_down.weight"): len(value)
        for key, value in load_file(out / "comfyui_lora.safetensors").items()
        if ".lora_down." in key
    }
    assert ranks["lora_unet_double_blocks_0_txt_attn_qkv"] == 6
    assert ranks["lora_unet_single_blocks_1_linear1"] == 8 and ranks["lora_unet_single_blocks_1_linear2"] == 2


def test_cards_say_how_each_kind_is_loaded(base, tmp_path):
    run, policy = make_run(tmp_path / "run", base, lora_rank=2)
    for kind, name in (("single_file", "model"), ("comfyui", "comfyui_lora")):
        card = (export_run(run, kind=kind) / "README.md").read_text()
        assert f'g2rpo sample "THIS FOLDER/{name}.safetensors" --base {base}' in card and "width 3072" in card
        assert ("- lora" in card) == (kind == "comfyui") and "from_pretrained" not in card
    # At FLUX.1's width the others read these files too.
    policy.module.register_to_config(num_attention_heads=24, attention_head_dim=128)
    policy.options = replace(policy.options, true_cfg=2.0, negative_prompt='say "no"')
    settings = Settings(model="owner/flux", out="runs/a")
    cards = {
        kind: model_card(settings, [], 1, policy=policy, family=FAMILY, kind=kind) for kind in FAMILY.writers
    }
    assert (
        '"THIS FOLDER/model.safetensors", config="owner/flux", subfolder="transformer"'
        in cards["single_file"]
    )
    assert "models/diffusion_models" in cards["single_file"] and "models/loras" in cards["comfyui"]
    loads = 'load_lora_weights("THIS FOLDER", weight_name="comfyui_lora.safetensors")'
    assert loads in cards["comfyui"] and 'load_lora_weights("THIS FOLDER")' in cards["lora"]
    for card in cards.values():
        code = card.split("```python\n")[1].split("```")[0]
        compile(code, "card", "exec")
        assert r'true_cfg_scale=2, negative_prompt="say \"no\""' in code


def test_a_folder_that_cannot_be_written_is_named(base, tmp_path, monkeypatch):
    run, _ = make_run(tmp_path / "run", base, lora_rank=0)

    def refused(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(ValueError, match=f"cannot write to {run} .Permission denied.; .* --out FOLDER"):
        export_run(run)


def test_merging_holds_each_weight_once(base, tmp_path):
    """In the target dtype, tensor by tensor: what is kept of a weight is its rounded copy."""
    _, policy = make_run(tmp_path / "run", base, lora_rank=2)
    whole, half = merged_state(policy.module), merged_state(policy.module, torch.bfloat16)
    assert whole.keys() == half.keys() and {value.dtype for value in half.values()} == {torch.bfloat16}
    assert all(torch.equal(value.bfloat16(), half[key]) for key, value in whole.items())
    # float32 weights without adapters are not copied at all
    own = dict(policy.module.named_parameters())
    assert whole["x_embedder.weight"].data_ptr() == own["x_embedder.weight"].data_ptr()


def test_float8_bases_are_exported_whole(base, tmp_path):
    """The adapters of a run whose base was stored in 8 bits are merged into the base as it is."""
    run, _ = make_run(tmp_path / "run", base, lora_rank=2, base_dtype="float8")
    exported = export_run(run, kind="single_file")
    state = to_diffusers(
        load_file(exported / "model.safetensors"), open_policy(base, device="cpu").module.config
    )
    name = "transformer/diffusion_pytorch_model.safetensors"
    assert torch.equal(state["x_embedder.weight"], load_file(base / name)["x_embedder.weight"])


def test_the_default_layout_is_the_first_that_fits():
    writers = {"small": Writer(None, adapters=True), "own": Writer(None), "diffusers": Writer(None)}
    family = replace(FAMILY, writers=writers)
    assert [_layout(family, "auto", adapters) for adapters in (False, True)] == ["own", "small"]
    with pytest.raises(ValueError, match="trained adapters, but the model family flux has no layout"):
        _layout(replace(FAMILY, writers={"own": Writer(None)}), "auto", True)
