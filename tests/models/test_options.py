"""PolicyOptions: one list of everything that determines how a policy is loaded."""

import pytest

from g2rpo.config.settings import Settings
from g2rpo.models.options import CONDITIONS, PolicyOptions, as_resolution, plain_resolution


@pytest.mark.parametrize(
    ("given", "size"),
    [
        (None, None),
        (720, (720, 720)),
        ("720", (720, 720)),
        ([512, 768], (512, 768)),
        ((512, 768), (512, 768)),
        ("512x768", (512, 768)),
        ("512X768", (512, 768)),
    ],
)
def test_sizes(given, size):
    assert as_resolution(given) == size
    assert PolicyOptions(resolution=given).resolution == size
    if size is not None:
        assert as_resolution(plain_resolution(size)) == size


@pytest.mark.parametrize("given", [0, -1, [512], [1, 2, 3], [512, 0], "512x", "x", "a x b", "", 5.0, True])
def test_what_is_no_size(given):
    with pytest.raises(ValueError, match="give the side of a square image"):
        as_resolution(given)


def test_records_of_squares_stay_numbers():
    assert plain_resolution((64, 64)) == 64 and plain_resolution((64, 32)) == [64, 32]


def test_conditions():
    plain = PolicyOptions(guidance=2.0, resolution=(64, 32), max_sequence_length=8)
    assert plain.conditions() == {
        "precision": "float32",
        "guidance": 2.0,
        "true_cfg": 1.0,
        "resolution": [64, 32],
        "max_sequence_length": 8,
        "sigma_rounding": "exact",
    }
    guided = PolicyOptions(true_cfg=2.0, negative_prompt="blurred")
    assert (
        list(guided.conditions()) == list(CONDITIONS) and guided.conditions()["negative_prompt"] == "blurred"
    )
    assert PolicyOptions(**plain.conditions()) == plain and PolicyOptions(**guided.conditions()) == guided


def test_copies():
    options = PolicyOptions(guidance=2.0, compile_blocks=True, gradient_checkpointing=True, lora_rank=4)
    assert options.with_given(guidance=None, lora_rank=8) == PolicyOptions(
        guidance=2.0, compile_blocks=True, gradient_checkpointing=True, lora_rank=8
    )
    assert options.for_inference() == PolicyOptions(guidance=2.0, lora_rank=4, trainable=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "half"}, "precision='half': choose one of float32, tf32"),
        ({"sigma_rounding": "up"}, "sigma_rounding='up': choose one of exact, released"),
        ({"base_dtype": "float8"}, "base_dtype='float8' with lora_rank=0"),
        ({"negative_prompt": "blurred"}, "has no effect with true_cfg=1"),
        ({"tails_precision": "float8"}, "needs precision=bfloat16"),
    ],
)
def test_what_contradicts_itself(options, message):
    with pytest.raises(ValueError, match=message):
        PolicyOptions(**options)


def test_settings_pass_every_option():
    settings = Settings(
        precision="bfloat16",
        guidance=1.5,
        true_cfg=2.0,
        negative_prompt="blurred",
        resolution=[64, 32],
        max_sequence_length=8,
        sigma_rounding="released",
        lora_rank=4,
        lora_alpha=6.0,
        lora_targets=["attn.to_q"],
        base_dtype="float8",
        weights="/w/lora.safetensors",
        gradient_checkpointing=True,
        compile_blocks=True,
    )
    options = settings.policy_options()
    for name in ("precision", "guidance", "true_cfg", "negative_prompt", "lora_alpha", "compile_blocks"):
        assert getattr(options, name) == getattr(settings, name) != getattr(PolicyOptions(), name), name
    assert options.resolution == (64, 32) and options.lora_targets == ("attn.to_q",)
    assert [str(path) for path in options.weights] == ["/w/lora.safetensors"]
    assert Settings().policy_options() == PolicyOptions()


def test_sizes_in_settings():
    assert Settings(resolution=64).resolution == Settings(resolution=[64, 64]).resolution == 64
    wide = Settings(resolution=[32, 64])
    assert wide.resolution == Settings(resolution="32x64").resolution == [32, 64]
    assert "resolution = [32, 64]" in wide.to_toml()
    for wrong in ([64], [1, 2, 3], [0, 64], 0, "x"):
        with pytest.raises(ValueError, match="resolution"):
            Settings(resolution=wrong)
    with pytest.raises(ValueError, match="negative_prompt='no' has no effect with true_cfg=1"):
        Settings(negative_prompt="no")
