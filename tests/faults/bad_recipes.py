"""Recipes and overrides with one fault: mutations of good ones, and values that a setting does not allow."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from faults.inputs import Bad, Generator
from faults.jobs import Result
from faults.outcomes import Expected

COUNTS = (
    "iterations",
    "group_size",
    "checkpoint_every",
    "keep_last",
    "update_batch",
    "num_eval_prompts",
    "prompts_per_iteration",
)
NUMBERS = ("lr", "adam_eps", "max_grad_norm", "guidance", "weight_decay", "eta", "shift")
GOOD = 'algorithm = "g2rpo"\niterations = 1\nout = "run"\nprompts = "world:demo"\ndevice = "cpu"\n'


def _written(
    draw: Any, folder: Path, kind: str, text: str | bytes, expected: dict[str, Any], **more: Any
) -> Bad:
    name = f"recipe_{draw.randrange(1000)}.toml"
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    words = [draw.choice(["plan", "train", "embed"]), name]
    return Bad(f"recipe: {kind}", words, Expected(**{"file": name, **expected}), **more)


def _setting(draw: Any, folder: Path, kind: str, key: str, value: str, found: str, allowed: Any) -> Bad:
    """The setting in a recipe or as an override."""
    if draw.random() < 0.5:
        own = [line for line in GOOD.splitlines() if not line.startswith(f"{key} ")]
        text = "\n".join([*own, f"{key} = {value}"])
        return _written(draw, folder, kind, text, {"place": key, "found": found, "allowed": allowed})
    words = [draw.choice(["plan", "train"]), "tiny", "out=run", f"{key}={value}"]
    return Bad(f"override: {kind}", words, Expected("", key, found, allowed))


def boolean(draw: Any, folder: Path) -> Bad:
    key, value = draw.choice(COUNTS + NUMBERS), draw.choice(["true", "false"])
    return _setting(draw, folder, "a boolean for a number", key, value, value, "number|integer|int|float")


def boolean_in_a_table(draw: Any, folder: Path) -> Bad:
    words = ["plan", "tiny", "out=run", f"rewards.tiny_clip={draw.choice(['true', 'false'])}"]
    return Bad(
        "override: a boolean for a weight", words, Expected("", "rewards", "true|false", "number|float")
    )


def text_for_a_number(draw: Any, folder: Path) -> Bad:
    key, value = draw.choice(COUNTS + NUMBERS), draw.choice(['"much"', '"1e-5x"', "[1, 2]", "{a = 1}"])
    return _setting(draw, folder, "no number", key, value, ".", "number|integer|int|float")


def out_of_range(draw: Any, folder: Path) -> Bad:
    key = draw.choice((*COUNTS, "lr", "adam_eps", "max_grad_norm"))
    value = draw.choice(["0", "-1", "-7"]) if key != "group_size" else draw.choice(["1", "0", "-3"])
    return _setting(draw, folder, "out of range", key, value, value, "greater|at least|above|positive")


def fraction_for_a_count(draw: Any, folder: Path) -> Bad:
    value = draw.choice(["1.5", "0.5", "2.25"])
    return _setting(
        draw,
        folder,
        "a fraction for a count",
        draw.choice(COUNTS),
        value,
        re.escape(value),
        "integer|fraction",
    )


def not_finite(draw: Any, folder: Path) -> Bad:
    key, value = draw.choice(NUMBERS + COUNTS), draw.choice(["nan", "inf", "-inf"])
    return _setting(
        draw, folder, "not finite", key, value, value.strip("-"), "finite|number|integer|greater|above"
    )


def misspelt(draw: Any, folder: Path) -> Bad:
    key = draw.choice(
        (*COUNTS, "learning_rate", "rewards", "granularities", "eval_every", "num_steps", "train_steps")
    )
    own = {"learning_rate": "lr"}.get(key, key)
    at = draw.randrange(1, len(key) - 1)
    broken = draw.choice(
        [key[:at] + key[at + 1 :], key[:at] + key[at + 1] + key[at] + key[at + 2 :], key + "s"]
    )
    from g2rpo.config.settings import Settings

    if broken == own or broken in Settings.model_fields or broken in (key, "learning_rate"):
        broken = key + "x"
    return _setting(draw, folder, "a misspelt key", broken, "3", broken, rf"\b{own}\b")


def another_algorithm(draw: Any, folder: Path) -> Bad:
    own, key, owner, value = draw.choice(
        [
            ("g2rpo", "nft_beta", "nft", "0.1"),
            ("nft", "clip_range", "g2rpo", "1e-3"),
            ("nft", "granularities", "g2rpo", "[1, 2]"),
            ("flow_grpo", "granularities", "g2rpo", "[1, 2]"),
            ("dance_grpo", "granularities", "g2rpo", "[1]"),
        ]
    )
    text = f'algorithm = "{own}"\niterations = 1\n{key} = {value}\n'
    return _written(
        draw, folder, "an option of another algorithm", text, {"place": key, "found": own, "allowed": owner}
    )


def wrong_table(draw: Any, folder: Path) -> Bad:
    key = draw.choice([*COUNTS, "lr", "seed"])
    table = draw.choice(["rewards", "reward_options.tiny_clip"])
    text = f"{GOOD}[{table}]\n{'tiny_clip = 1.0' if table == 'rewards' else ''}\n{key} = 4\n"
    text = re.sub(rf"^{key} = .*\n", "", text, count=1, flags=re.M) if text.count(f"\n{key} =") > 1 else text
    return _written(
        draw,
        folder,
        "a key in another table",
        text,
        {
            "place": key,
            "found": table.split(".")[0],
            "allowed": "top|above|outside|before|belongs|option|setting",
        },
    )


def unknown_reward(draw: Any, folder: Path) -> Bad:
    name = draw.choice(["tiny_clp", "verifer", "colorfulness", "pickscor", "image_reward", "hpsv2"])
    near = {
        "tiny_clp": "tiny_clip",
        "verifer": "verifier",
        "colorfulness": "colourfulness",
        "pickscor": "pickscore",
    }.get(name, "hps|imagereward")
    where = draw.choice(["rewards={%s=1.0}", 'eval_rewards=["%s"]', 'rewards=["%s"]']) % name
    return Bad(
        "override: an unknown reward", ["plan", "tiny", "out=run", where], Expected("", "rewards", name, near)
    )


def unknown_choice(draw: Any, folder: Path) -> Bad:
    key, allowed = draw.choice(
        [
            ("device", "cuda"),
            ("precision", "bfloat16"),
            ("optimizer", "adamw8bit"),
            ("lr_schedule", "cosine"),
            ("noise", "antithetic"),
            ("resume", "latest"),
            ("algorithm", "g2rpo"),
        ]
    )
    value = draw.choice(["something", "CUDA ", "g3rpo"])
    return _setting(draw, folder, "no such choice", key, f'"{value}"', value.strip(), allowed)


def key_twice(draw: Any, folder: Path) -> Bad:
    key = draw.choice(["iterations", "lr", "out"])
    value = '"b"' if key == "out" else "2"
    text = GOOD + (f"{key} = {value}\n" if f"{key} =" in GOOD else f"{key} = 1\n{key} = {value}\n")
    line = text.count("\n")
    return _written(
        draw,
        folder,
        "a key twice",
        text,
        {"place": rf"{line}\b", "found": rf"\b{key}\b", "allowed": "twice|once|already|overwrite|again"},
    )


def not_toml(draw: Any, folder: Path) -> Bad:
    lines = GOOD.splitlines()
    at = draw.randrange(len(lines))
    kind, line = draw.choice(
        [
            ("an open quote", 'out = "run'),
            ("no value", "lr ="),
            ("a bare word", "device = cpu"),
            ("an open list", "granularities = [1, 2"),
            ("no equals", "iterations 3"),
        ]
    )
    lines[at] = line
    return _written(
        draw,
        folder,
        f"not TOML: {kind}",
        "\n".join(lines) + "\n",
        {"place": rf":({at + 1}|{at + 2})\b|line ({at + 1}|{at + 2})\b", "found": "TOML", "allowed": "."},
    )


def yaml(draw: Any, folder: Path) -> Bad:
    text = draw.choice(
        [
            "algorithm: g2rpo\niterations: 1\n",
            "---\niterations: 3\n",
            "rewards:\n  tiny_clip: 1.0\n",
            "rewards:\n- tiny_clip\n",
        ]
    )
    return _written(draw, folder, "YAML", text, {"found": "YAML|TOML", "allowed": "recipes are TOML|TOML"})


def json_text(draw: Any, folder: Path) -> Bad:
    return _written(
        draw,
        folder,
        "JSON",
        '{"iterations": 3, "algorithm": "g2rpo"}\n',
        {"found": "JSON|TOML", "allowed": "TOML"},
    )


def bytes_of_another_kind(draw: Any, folder: Path) -> Bad:
    content = draw.choice(
        [
            b"\xff\xfei\0t\0",
            GOOD.encode("utf-16"),
            b'out = "caf\xe9"\n',
            b"\x89PNG\r\n\x1a\n\0\0",
            bytes(draw.randrange(128, 256) for _ in range(40)),
            b"lr = 1e-5\0\n",
        ]
    )
    return _written(
        draw, folder, "no text", content, {"found": "UTF-?8|UTF-?16|TOML|text|NUL|control", "allowed": "."}
    )


def empty(draw: Any, folder: Path) -> Bad:
    text = draw.choice(["", "\n\n", "# only a comment\n"])

    def says(result: Result) -> str:
        return (
            "" if re.search("default|empty", result.text, re.I) else "an empty recipe is used without a word"
        )

    name = f"recipe_{draw.randrange(1000)}.toml"
    (folder / name).write_text(text)
    return Bad("recipe: empty", ["plan", name], Expected(name, "", "empty|no setting", "."), accepted=says)


def _warned(kind: str, line: str, words: str) -> Generator:
    def make(draw: Any, folder: Path) -> Bad:
        def says(result: Result) -> str:
            return "" if re.search(words, result.text, re.I) else f"{line} is used without a word"

        name = f"recipe_{draw.randrange(1000)}.toml"
        (folder / name).write_text(GOOD + line + "\n")
        return Bad(f"recipe: {kind}", ["plan", name], Expected("", words, ".", "."), accepted=says)

    return make


def odd_antithetic(draw: Any, folder: Path) -> Bad:
    group = draw.choice([3, 5, 7, 13])
    text = f'{GOOD}group_size = {group}\nnoise = "antithetic"\n'
    return _written(
        draw,
        folder,
        "antithetic noise of an odd group",
        text,
        {"place": "group_size|noise", "found": f"{group}", "allowed": "even|multiple|divisible|pair"},
    )


def no_recipe(draw: Any, folder: Path) -> Bad:
    name = draw.choice(["tinny", "missing.toml", "flux_hsp", "recipes/none.toml"])
    return Bad(
        "recipe: no file",
        [draw.choice(["plan", "train"]), name, "out=run"],
        Expected(name, "", "no recipe|not found|no file|no such", "tiny|recipe|file"),
    )


def recipe_is_a_folder(draw: Any, folder: Path) -> Bad:
    (folder / "mine.toml").mkdir()
    return Bad(
        "recipe: a folder",
        ["plan", "mine.toml"],
        Expected("mine.toml", "", "folder|directory|no recipe|not a file", "."),
    )


def no_override(draw: Any, folder: Path) -> Bad:
    word = draw.choice(["=3", "iterations", "lr:1e-5", "--lr=3", "granularities=[1,", "rewards={a=1"])
    if word.startswith("--"):
        return Bad(
            "override: no key=value", ["plan", "tiny", word], Expected("", "lr", "no such option|option", ".")
        )
    return Bad(
        "override: no key=value",
        ["plan", "tiny", word],
        Expected("", re.escape(word), "override|not", "key=value|TOML|quote"),
    )


def two_that_do_not_fit(draw: Any, folder: Path) -> Bad:
    words, place, allowed = draw.choice(
        [
            (["train_steps=9", "num_steps=4"], "train_steps", "num_steps|at most|4"),
            (["keep_best=hps"], "keep_best", "eval_every|eval_rewards|evaluat"),
            (["base_dtype=float8", "lora_rank=0"], "base_dtype", "lora_rank"),
            (["tails_precision=float8", "device=cpu"], "tails_precision", "bfloat16|GPU|cuda"),
            (["lora_alpha=4", "lora_rank=0"], "lora_alpha", "lora_rank"),
            (["warmup_iterations=-1"], "warmup_iterations", "0"),
        ]
    )
    return Bad(
        "override: two that do not fit",
        ["plan", "tiny", "out=run", *words],
        Expected("", place, ".", allowed),
    )


GENERATORS: tuple[Generator, ...] = (
    boolean,
    misspelt,
    out_of_range,
    text_for_a_number,
    another_algorithm,
    wrong_table,
    key_twice,
    not_toml,
    unknown_reward,
    not_finite,
    boolean_in_a_table,
    yaml,
    fraction_for_a_count,
    unknown_choice,
    json_text,
    bytes_of_another_kind,
    empty,
    odd_antithetic,
    _warned(
        "a granularity beyond the steps",
        "num_steps = 8\ntrain_steps = 4\ngranularities = [1, 50]",
        "granularit",
    ),
    _warned("a clip range below rounding", "clip_range = 1e-12", "clip"),
    no_recipe,
    recipe_is_a_folder,
    no_override,
    two_that_do_not_fit,
)
