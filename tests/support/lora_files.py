"""Unusable LoRA files in every naming, and the errors of all functions that open a LoRA file."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from g2rpo.config.load import load_settings
from g2rpo.inference.names import check_model
from g2rpo.inference.open import open_policy
from g2rpo.setup.verify import verify
from support.policies import check_of

LAYER = "transformer_blocks.0.attn.to_q"
KOHYA, GENERIC = "lora_unet_double_blocks_0_img_attn_proj", "diffusion_model.double_blocks.0.img_attn.proj"
NAMINGS = {
    "transformer.": (f"transformer.{LAYER}", "lora_A", "lora_B"),
    "no prefix": (LAYER, "lora_A", "lora_B"),
    "lora_unet_": (KOHYA, "lora_down", "lora_up"),
    "diffusion_model.": (GENERIC, "lora_A", "lora_B"),
}
NAN, INF = float("nan"), float("inf")


class Names:
    """Keys of the layer that a test breaks, and a valid file (`sound`) that contains them."""

    def __init__(self, naming: str) -> None:
        self.layer, down, up = NAMINGS[naming]
        self.a, self.b = f"{self.layer}.{down}.weight", f"{self.layer}.{up}.weight"
        self.alpha = f"{self.layer}.alpha"
        other = self.layer.replace("to_q", "to_v").replace("img_attn", "txt_attn")
        self.sound = {
            key.replace(self.layer, layer): torch.full(shape, 0.1)
            for layer in (self.layer, other)
            for key, shape in ((self.a, (2, 32)), (self.b, (32, 2)))
        }


def without(state, *keys):
    return {key: value for key, value in state.items() if key not in keys}


def with_value(shape, value) -> torch.Tensor:
    tensor = torch.full(shape, 0.1)
    tensor.view(-1)[3] = value
    return tensor


# Kind of fault -> function from names to (tensors of the broken file, words that the message must contain).
BROKEN: dict[str, Callable] = {
    "B missing": lambda n: (without(n.sound, n.b), [n.layer, "only A", "needs both"]),
    "A missing": lambda n: (without(n.sound, n.a), [n.layer, "only B", "needs both"]),
    "alpha alone": lambda n: (
        without(n.sound, n.a, n.b) | {n.alpha: torch.tensor(1.0)},
        [n.layer, "only alpha"],
    ),
    "ranks differ": lambda n: (
        n.sound | {n.b: torch.ones(32, 4)},
        [n.layer, "(2, 32)", "(32, 4)", "different ranks"],
    ),
    "input width": lambda n: (
        n.sound | {n.a: torch.ones(2, 33)},
        [n.layer, "(2, 33)", "(32, 32)", "do not fit"],
    ),
    "output width": lambda n: (
        n.sound | {n.b: torch.ones(31, 2)},
        [n.layer, "(31, 2)", "(32, 32)", "do not fit"],
    ),
    "vector": lambda n: (n.sound | {n.a: torch.ones(64)}, [n.layer, "(64,)", "not matrices"]),
    "three dimensions": lambda n: (
        n.sound | {n.b: torch.ones(32, 2, 1)},
        [n.layer, "(32, 2, 1)", "not matrices"],
    ),
    "scalar": lambda n: (n.sound | {n.b: torch.tensor(1.0)}, [n.layer, "B ()", "not matrices"]),
    "rank 0": lambda n: (
        n.sound | {n.a: torch.ones(0, 32), n.b: torch.ones(32, 0)},
        [n.layer, "rank 0", "at least 1"],
    ),
    **{
        str(dtype): lambda n, d=dtype, name=name: (
            n.sound | {n.a: torch.ones(2, 32).to(d)},
            [n.a, f"is {name}", "allowed are F64, F32, F16, BF16"],
        )
        for dtype, name in {
            torch.int8: "I8",
            torch.uint8: "U8",
            torch.int64: "I64",
            torch.bool: "BOOL",
            torch.complex64: "C64",
            torch.float8_e4m3fn: "F8_E4M3",
            torch.float8_e5m2: "F8_E5M2",
        }.items()
    },
    **{
        f"{end} {value}": lambda n, end=end, v=value: (
            n.sound | ({n.a: with_value((2, 32), v)} if end == "A" else {n.b: with_value((32, 2), v)}),
            [
                n.a if end == "A" else n.b,
                "not finite",
                "1 NaN" if v != v else "1 +Inf" if v > 0 else "1 -Inf",
            ],
        )
        for end in "AB"
        for value in (NAN, INF, -INF)
    },
    "bfloat16 NaN": lambda n: (
        {key: value.bfloat16() for key, value in (n.sound | {n.a: with_value((2, 32), NAN)}).items()},
        [n.a, "1 NaN"],
    ),
    "float16 Inf": lambda n: (n.sound | {n.a: with_value((2, 32), 1e9).half()}, [n.a, "1 +Inf"]),
    **{
        f"alpha {value}": lambda n, v=value: (
            n.sound | {n.alpha: torch.tensor(v)},
            [n.layer, f"alpha {v:g}", "from 0 to 1e6"],
        )
        for value in (NAN, INF, -INF, -2.0)
    },
    "alpha no scalar": lambda n: (
        n.sound | {n.alpha: torch.ones(2)},
        [n.alpha, "(2,)", "not a single number"],
    ),
    "alpha of no numbers": lambda n: (
        n.sound | {n.alpha: torch.ones(0)},
        [n.alpha, "(0,)", "not a single number"],
    ),
    "alpha a boolean": lambda n: (n.sound | {n.alpha: torch.tensor(True)}, [n.alpha, "is BOOL"]),
    "half unknown": lambda n: (
        n.sound
        | {
            k.replace("attn", "attention").replace("img_", "im_").replace("txt_", "tx_"): v + 0
            for k, v in n.sound.items()
        },
        ["4 of 8 keys are of 2 unknown layers, 4 keys are of known ones", "--base"],
    ),
    "all unknown": lambda n: (
        {k.replace("0", "77", 1): v for k, v in n.sound.items()},
        ["4 of 4 keys are of 2 unknown layers, 0 keys"],
    ),
    "strange parts": lambda n: (
        n.sound | {f"{n.layer}.lora_C.weight": torch.ones(1)},
        ["1 of 5 keys", "lora_C"],
    ),
    "a text encoder": lambda n: (
        n.sound | {f"text_encoder.layers.0.q_proj.lora_{end}.weight": torch.ones(2, 2) for end in "AB"},
        ["2 of 6 keys are of text encoders", "save the file without"],
    ),
    "kohya's text encoder": lambda n: (
        n.sound | {"lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_up.weight": torch.ones(2, 2)},
        ["1 of 5 keys are of text encoders"],
    ),
    "DoRA": lambda n: (
        n.sound | {f"{n.layer}.dora_scale": torch.ones(32, 1)},
        ["DoRA", n.layer, "plain LoRA"],
    ),
    "DoRA by PEFT": lambda n: (n.sound | {f"{n.layer}.lora_magnitude_vector": torch.ones(32)}, ["DoRA"]),
    "LoHa": lambda n: (
        {f"{n.layer}.hada_w{i}_{e}": torch.ones(2, 2) for i in "12" for e in "ab"},
        ["4 of 4 keys", "LoHa"],
    ),
    "LoKr": lambda n: ({f"{n.layer}.lokr_w{i}": torch.ones(2, 2) for i in "12"}, ["2 of 2 keys", "LoKr"]),
    "LoCon": lambda n: (n.sound | {f"{n.layer}.lora_mid.weight": torch.ones(2, 2)}, ["LoCon"]),
    "a bias": lambda n: (n.sound | {f"{n.layer}.lora_B.bias": torch.ones(32)}, ["biases of adapters"]),
    "full differences": lambda n: (n.sound | {f"{n.layer}.diff": torch.ones(32, 32)}, ["full differences"]),
    "two names of a matrix": lambda n: (
        n.sound | {f"{n.layer}.{end}.weight": torch.ones(2, 32) for end in ("lora_A", "lora_down")},
        ["not part of a LoRA"],
    ),
    "two adapters": lambda n: (
        {
            f"{LAYER.replace('to_q', layer)}.lora_{end}.{name}.weight": torch.ones(shape)
            for layer, name in (("to_q", "default"), ("to_v", "other"))
            for end, shape in (("A", (2, 32)), ("B", (32, 2)))
        },
        ["2 adapters", "default, other", "one LoRA"],
    ),
    "LyCORIS": lambda n: (
        {f"lycoris_{LAYER.replace('.', '_')}.lora_{end}.weight": torch.ones(2, 2) for end in ("up", "down")},
        ["LyCORIS", "convert"],
    ),
    "attention processors": lambda n: (
        {f"double_blocks.0.processor.qkv_lora1.{end}.weight": torch.ones(2, 2) for end in ("up", "down")},
        ["attention processors", "convert"],
    ),
    "modules_to_save": lambda n: (
        n.sound | {"base_model.model.proj_out.modules_to_save.default.weight": torch.ones(32, 32)},
        ["modules_to_save", "plain LoRA"],
    ),
    "no tensors": lambda n: ({}, ["empty", "no tensors"]),
}


def all_refusals(path: Path, base: Path) -> list[str]:
    """Messages of all functions that open a LoRA file, and of `doctor`, for an unusable file."""
    settings = load_settings("tiny", [f"model={base}", f"weights={path}", "device=cpu"])
    attempts = [
        lambda: open_policy(path, base=str(base), device="cpu"),
        lambda: check_model(str(path), str(base)),
        lambda: check_of(settings),
    ]
    messages = []
    for attempt in attempts:
        with pytest.raises(ValueError) as caught:
            attempt()
        assert str(path) in str(caught.value)
        messages.append(str(caught.value))
    return [*messages, doctors_refusal(path, base)]


def doctors_refusal(path: Path, base: Path) -> str:
    """Rows of `g2rpo doctor --verify` for an unusable file, one per line."""
    rows = verify(path, base=str(base))
    assert {row.status for row in rows} == {"missing"} and {row.name for row in rows} == {path.name}
    return "\n".join(f"{row.detail}; {row.advice}" for row in rows)
