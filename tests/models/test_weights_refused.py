"""Invalid weights give one message in every command, before anything is written."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.lora_files import INF, NAN, Names, all_refusals, with_value, without
from support.policies import load
from support.processes import run_command
from support.random_flux import save_random_flux
from support.trained_runs import make_run

from g2rpo.data.prompts import as_prompts
from g2rpo.exporters.export import export_run
from g2rpo.inference.names import check_model
from g2rpo.inference.open import open_policy
from g2rpo.inference.sample import SampleRequest, sample_to_folder


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_random_flux(tmp_path_factory.mktemp("base"))


# ---- several files, runs, commands


def test_each_file_of_a_list_is_checked(base, tmp_path, monkeypatch):
    names, sound, broken = Names("transformer."), tmp_path / "sound.safetensors", tmp_path / "nan.safetensors"
    save_file(names.sound, sound)
    save_file(names.sound | {names.a: with_value((2, 32), NAN)}, broken)
    monkeypatch.setattr(
        "g2rpo.models.transformer.network.load_weights", lambda *_: pytest.fail("weights were read")
    )
    for files in ([sound, broken], [broken, sound], [sound, sound, broken]):
        with pytest.raises(ValueError, match=r"nan\.safetensors cannot be put onto this model.*1 NaN"):
            load(base, weights=files)


def test_a_run_whose_weights_broke(base, tmp_path):
    """A run's initial adapters became invalid: checked when the run is opened, and before."""
    names, lora = Names("transformer."), tmp_path / "lora.safetensors"
    save_file(names.sound, lora)
    run, _ = make_run(tmp_path / "run", base, lora_rank=2, weights=str(lora))
    exported = export_run(run, tmp_path / "export")
    check_model(str(run))
    save_file(names.sound | {names.b: with_value((32, 2), INF)}, lora)
    for attempt in (
        lambda: check_model(str(run)),
        lambda: open_policy(run, device="cpu"),
        lambda: export_run(run, tmp_path / "again"),
        lambda: check_model(str(exported)),
    ):
        with pytest.raises(ValueError, match=r"lora\.safetensors cannot be put onto this model.*1 \+Inf"):
            attempt()
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("role", ["then", "compare"])
def test_the_second_model_is_checked_before_the_first_draws(base, tmp_path, role):
    names, lora = Names("transformer."), tmp_path / "lora.safetensors"
    save_file(names.sound | {names.a: with_value((2, 32), NAN)}, lora)
    prompts, then = tuple(as_prompts(["a red circle"])), str(lora) if role == "then" else None
    request = SampleRequest(prompts, steps=(2,), base=str(base), device="cpu", then=then)
    with pytest.raises(ValueError, match="1 NaN"):
        sample_to_folder(
            str(base), request, tmp_path / "out", compare=str(lora) if role == "compare" else None
        )
    assert not (tmp_path / "out").exists()


def test_commands_say_it_in_one_message(base, tmp_path):
    names, lora = Names("transformer."), tmp_path / "lora.safetensors"
    out = tmp_path / "out"
    prompt = ["--prompt", "a red circle", "--out", str(out)]
    onto = ["--base", str(base)]
    (tmp_path / "prompts.txt").write_text("a red circle\n")
    prompts = ["--prompts", str(tmp_path / "prompts.txt"), "--out", str(out)]
    commands = [
        ["sample", str(lora), *onto, *prompt],
        ["sample", str(base), "--compare", str(lora), *onto, *prompt],
        ["evaluate", str(base), str(lora), *onto, *prompts, "--rewards", "colourfulness"],
        ["gallery", str(base), str(lora), *onto, *prompt],
        ["train", "tiny", f"model={base}", f"weights={lora}", f"out={out}", f"cache={tmp_path / 'cache'}"],
    ]
    for state, words in (
        (names.sound | {names.a: with_value((2, 32), NAN)}, [names.a, "1 NaN"]),
        ({key: value.to(torch.int8) for key, value in names.sound.items()}, [names.a, "is I8"]),
        (without(names.sound, names.b), [names.layer, "only A"]),
    ):
        save_file(state, lora)
        for command in commands if words[-1] == "1 NaN" else commands[:1]:
            result = run_command(*command, cwd=tmp_path)
            assert result.returncode == 2, (command, result.stdout, result.stderr)
            assert all(word in result.stderr for word in [*words, str(lora)]), result.stderr
            assert "Traceback" not in result.stderr + result.stdout and not out.exists()
        result = run_command("doctor", "--verify", str(lora), *onto)
        assert result.returncode not in (0, None) and "Traceback" not in result.stderr + result.stdout


# ---- full transformers


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_transformers_that_are_not_finite(base, tmp_path, value, dtype):
    state = load_file(base / "transformer" / "diffusion_pytorch_model.safetensors")
    key = "single_transformer_blocks.1.proj_out.weight"
    state = {name: tensor.to(dtype) for name, tensor in state.items()}
    state[key] = state[key].clone()
    state[key][5, 7] = value
    save_file(state, path := tmp_path / "flux.safetensors")
    with pytest.raises(
        ValueError, match=rf"flux\.safetensors: {key} has NaN or infinite values; weights must"
    ):
        open_policy(path, base=str(base), device="cpu")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.bool, torch.complex64])
def test_transformers_of_other_numbers(base, tmp_path, dtype):
    state = load_file(base / "transformer" / "diffusion_pytorch_model.safetensors")
    key = "single_transformer_blocks.1.proj_out.weight"
    save_file(state | {key: state[key].to(dtype)}, path := tmp_path / "flux.safetensors")
    for message in all_refusals(path, base):
        assert f"{key} is " in message and "quantised" in message


DAMAGES = {
    "cut off": (lambda content: content[:-100], ["cut off", "bytes"]),
    "cut in the header": (lambda content: content[:50], ["damaged"]),
    "empty": (lambda content: b"", ["damaged"]),
    "a web page": (lambda content: b"<!DOCTYPE html><html>" + b" " * 500, ["web page", "login"]),
    "a zip": (lambda content: b"PK\x03\x04" + content, ["zip archive"]),
    "a pointer": (lambda content: b"version https://git-lfs.github.com/spec/v1\n", ["git lfs pull"]),
    "noise": (lambda content: bytes(range(256)) * 8, ["damaged"]),
}


@pytest.mark.parametrize("is_transformer", [False, True], ids=["adapters", "transformer"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files(base, tmp_path, damage, is_transformer):
    path = tmp_path / "weights.safetensors"
    if is_transformer:
        path.write_bytes((base / "transformer" / "diffusion_pytorch_model.safetensors").read_bytes())
    else:
        save_file(Names("transformer.").sound, path)
    change, words = DAMAGES[damage]
    path.write_bytes(change(path.read_bytes()))
    for message in all_refusals(path, base):
        assert all(word in message for word in words), message
