"""Exports of every layout and family, read back by stock readers alone, give the trained function.

The stock network computes with what diffusers or peft have read; g2rpo's readers take no part. Then each file
is changed in its meaning (a scale, a transposed matrix, swapped parts of a stacked layer, swapped halves of a
modulation), and the same comparison must fail.

diffusers' readers of FLUX.1's original names assume its width, 3072, as a constant; the tests put the small
model's width in its place and leave the rest of their source as it is.
"""

import inspect
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.policies import policy_of
from support.random_flux import save_random_flux
from support.random_qwen import save_random_qwen

from g2rpo.config.load import Settings
from g2rpo.exporters.export import export_policy
from g2rpo.models.registry import find_model

SAVE = {"flux": save_random_flux, "qwen_image": save_random_qwen}
LAYOUTS = [
    ("flux", "diffusers", 0),
    ("flux", "diffusers", 2),
    ("flux", "single_file", 0),
    ("flux", "single_file", 2),
    ("flux", "lora", 2),
    ("flux", "comfyui", 2),
    ("qwen_image", "diffusers", 0),
    ("qwen_image", "diffusers", 2),
    ("qwen_image", "lora", 2),
]
WIDTH = 32


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return {name: save(tmp_path_factory.mktemp(name)) for name, save in SAVE.items()}


@pytest.fixture(scope="module")
def trained(bases):
    """Family, rank -> settings and a policy whose weights are away from the base's."""
    made = {}

    def make(family: str, rank: int):
        if (family, rank) not in made:
            # alpha is neither the rank nor twice the rank, so that a reader that guesses is found out.
            alpha = {"lora_alpha": 3.0} if rank else {}
            settings = Settings(model=str(bases[family]), lora_rank=rank, out="run", device="cpu", **alpha)
            policy = policy_of(settings)
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for parameter in policy.module.parameters():
                    if parameter.requires_grad:
                        parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
            made[family, rank] = settings, policy
        return made[family, rank]

    return make


@torch.no_grad()
def output(family: str, network) -> torch.Tensor:
    """The network's velocities for fixed inputs."""
    generator = torch.Generator().manual_seed(7)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    inputs = {"hidden_states": noise(2, 16, 16), "encoder_hidden_states": noise(2, 12, 32)}
    inputs["timestep"] = torch.tensor([0.9, 0.3])
    if family == "flux":
        rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
        positions = torch.stack([torch.zeros(16), rows.flatten(), columns.flatten()], dim=1)
        inputs |= {"pooled_projections": noise(2, 32), "guidance": torch.full((2,), 2.0)}
        inputs |= {"img_ids": positions, "txt_ids": torch.zeros(12, 3)}
    else:
        inputs |= {"img_shapes": [[(1, 4, 4)]] * 2, "encoder_hidden_states_mask": torch.ones(2, 12).bool()}
    return network(**inputs, return_dict=False)[0]


def at_this_width(function):
    """diffusers' function with the small model's width in place of FLUX.1's."""
    source = inspect.getsource(function).replace("12288", str(4 * WIDTH)).replace("3072", str(WIDTH))
    namespace = dict(vars(inspect.getmodule(function)))
    exec(compile(source, inspect.getsourcefile(function), "exec"), namespace)
    return namespace[function.__name__]


@pytest.fixture
def small_width(monkeypatch):
    from diffusers.loaders import lora_pipeline, single_file_model

    entry = single_file_model.SINGLE_FILE_LOADABLE_CLASSES["FluxTransformer2DModel"]
    monkeypatch.setitem(entry, "checkpoint_mapping_fn", at_this_width(entry["checkpoint_mapping_fn"]))
    name = "_convert_kohya_flux_lora_to_diffusers"
    monkeypatch.setattr(lora_pipeline, name, at_this_width(getattr(lora_pipeline, name)))


def stock_network(family: str, layout: str, base: Path, exported: Path):
    """The network as diffusers reads it from an export."""
    import diffusers

    own = find_model(base)[0]
    network = getattr(diffusers, own.architecture.network)
    if layout == "diffusers":
        return network.from_pretrained(exported / "transformer")
    if layout == "single_file":
        return network.from_single_file(
            exported / "model.safetensors", config=str(base), subfolder="transformer"
        )
    pipeline = getattr(diffusers, own.pipeline).from_pretrained(base)
    pipeline.load_lora_weights(exported, weight_name=weights_of(exported, layout).name)
    return pipeline.transformer


def weights_of(exported: Path, layout: str) -> Path:
    """The file of an export that holds what was trained."""
    return next((exported / "transformer" if layout == "diffusers" else exported).glob("*.safetensors"))


@pytest.mark.parametrize(("family", "layout", "rank"), LAYOUTS)
def test_stock_readers_give_the_trained_function(bases, trained, tmp_path, small_width, family, layout, rank):
    settings, policy = trained(family, rank)
    exported = export_policy(
        policy, tmp_path / "out", settings=settings, metrics=[], iteration=1, kind=layout
    )
    expected = output(family, policy.module)
    base = output(family, stock_network(family, "diffusers", bases[family], bases[family]))
    assert (expected - base).abs().max() > 0.05, "the training must show"
    found = output(family, stock_network(family, layout, bases[family], exported))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_every_layout_is_read_back(bases):
    offered = {(name, kind) for name, base in bases.items() for kind in find_model(base)[0].writers}
    assert {(family, layout) for family, layout, _ in LAYOUTS} == offered


@pytest.mark.parametrize(("family", "layout"), [("flux", "lora"), ("qwen_image", "lora")])
def test_peft_reads_the_adapters(bases, trained, tmp_path, family, layout):
    """peft alone, with the configuration in the file's metadata, on the stock network."""
    import json

    import diffusers
    from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
    from safetensors import safe_open

    settings, policy = trained(family, 2)
    exported = export_policy(
        policy, tmp_path / "out", settings=settings, metrics=[], iteration=1, kind=layout
    )
    with safe_open(weights_of(exported, layout), framework="pt") as file:
        stated = json.loads(file.metadata()["lora_adapter_metadata"])
    config = {key.removeprefix("transformer."): value for key, value in stated.items()}
    known = inspect.signature(LoraConfig).parameters
    network = getattr(diffusers, find_model(bases[family])[0].architecture.network)
    network = network.from_pretrained(bases[family] / "transformer")
    inject_adapter_in_model(LoraConfig(**{k: v for k, v in config.items() if k in known}), network)
    state = {
        key.removeprefix("transformer."): v for key, v in load_file(weights_of(exported, layout)).items()
    }
    result = set_peft_model_state_dict(network, state)
    assert not result.unexpected_keys
    torch.testing.assert_close(output(family, network), output(family, policy.module), rtol=1e-4, atol=1e-4)


def _scaled(state, key):
    return {key: 2 * state[key]}


def _transposed(state, key):
    return {key: state[key].T.contiguous()}


def _parts_swapped(state, key):
    """The first two of a stacked layer's parts, such as q and k, in each other's place."""
    parts = list(state[key].split(WIDTH))
    return {key: torch.cat([parts[1], parts[0], *parts[2:]])}


def _halves_swapped(state, key):
    """shift and scale in each other's place."""
    return {key: torch.cat(list(state[key].chunk(2))[::-1])}


def _alpha(state, key):
    return {key: 3 * state[key]}


def _exchanged(other):
    return lambda state, key: {key: state[other], other: state[key]}


FLUX_BLOCK, QWEN_BLOCK = "transformer_blocks.0", "transformer_blocks.0"
MUTATIONS = [
    ("flux", "diffusers", 0, f"{FLUX_BLOCK}.attn.to_q.weight", _transposed),
    ("flux", "diffusers", 0, f"{FLUX_BLOCK}.attn.to_q.weight", _exchanged(f"{FLUX_BLOCK}.attn.to_k.weight")),
    ("flux", "diffusers", 0, "norm_out.linear.weight", _halves_swapped),
    ("flux", "diffusers", 2, f"{FLUX_BLOCK}.attn.to_v.weight", _scaled),
    ("flux", "single_file", 0, "double_blocks.0.img_attn.qkv.weight", _parts_swapped),
    ("flux", "single_file", 0, "single_blocks.1.linear1.weight", _parts_swapped),
    ("flux", "single_file", 0, "double_blocks.0.txt_attn.proj.weight", _transposed),
    ("flux", "single_file", 0, "final_layer.adaLN_modulation.1.weight", _halves_swapped),
    ("flux", "single_file", 2, "single_blocks.0.linear2.weight", _scaled),
    ("flux", "lora", 2, f"transformer.{FLUX_BLOCK}.attn.to_q.lora_B.weight", _scaled),
    (
        "flux",
        "lora",
        2,
        f"transformer.{FLUX_BLOCK}.attn.to_q.lora_B.weight",
        _exchanged(f"transformer.{FLUX_BLOCK}.attn.to_k.lora_B.weight"),
    ),
    ("flux", "comfyui", 2, "lora_unet_double_blocks_0_img_attn_qkv.alpha", _alpha),
    ("flux", "comfyui", 2, "lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight", _parts_swapped),
    ("flux", "comfyui", 2, "lora_unet_single_blocks_0_linear1.lora_up.weight", _parts_swapped),
    ("qwen_image", "diffusers", 0, f"{QWEN_BLOCK}.attn.to_q.weight", _transposed),
    (
        "qwen_image",
        "diffusers",
        0,
        f"{QWEN_BLOCK}.attn.to_q.weight",
        _exchanged(f"{QWEN_BLOCK}.attn.to_k.weight"),
    ),
    ("qwen_image", "diffusers", 0, f"{QWEN_BLOCK}.img_mod.1.weight", _halves_swapped),
    ("qwen_image", "diffusers", 2, f"{QWEN_BLOCK}.attn.to_v.weight", _scaled),
    ("qwen_image", "lora", 2, f"transformer.{QWEN_BLOCK}.attn.to_v.lora_B.weight", _scaled),
]


@pytest.mark.parametrize(("family", "layout", "rank", "key", "change"), MUTATIONS)
def test_a_changed_meaning_is_seen(bases, trained, tmp_path, small_width, family, layout, rank, key, change):
    """The comparison of the first test is sharp enough: it fails for a file that means something else."""
    settings, policy = trained(family, rank)
    exported = export_policy(
        policy, tmp_path / "out", settings=settings, metrics=[], iteration=1, kind=layout
    )
    file = weights_of(exported, layout)
    state = load_file(file)
    metadata = _metadata(file)
    changed = change(state, key)
    assert {k: v.shape for k, v in changed.items()} == {k: state[k].shape for k in changed}
    save_file(state | changed, file, metadata)
    found = output(family, stock_network(family, layout, bases[family], exported))
    difference = (found - output(family, policy.module)).abs().max()
    assert difference > 2e-3, f"{key} was changed and the output by {difference:.1e} only"


def _metadata(file: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        return opened.metadata() or {"format": "pt"}
