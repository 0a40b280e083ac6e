"""UnifiedReward: a vision-language model behind an OpenAI-compatible server (vLLM, SGLang) rates pictures.

The model answers in lines such as `Alignment Score (1-5): 4.5`; a score is one of these axes or their mean,
in 1..5. Which model, prompt and axis are asked decides the scale, so `describe()` says all three. An answer
without every axis that was asked for gives no score.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g2rpo.rewards.base import Metadata
from g2rpo.rewards.remote.options import whole
from g2rpo.rewards.remote.servers import Servers
from g2rpo.rewards.remote.tally import Failed, Tally
from g2rpo.rewards.remote.wire import eight_bits, encoded
from g2rpo.runtime.text import did_you_mean

MEAN = "mean"
SCORE = re.compile(
    r"[^\w+\-]*([+\-]?\d+(?:[.,]\d+)?)(?:\s*(?:/|out of)\s*5)?"
    r"(?![.,]?\w|\s*(?:/|out of|to\b|[-–])\s*\d)"  # not a part of something longer
)
QUESTIONS = {
    "Alignment": "does the image show what the caption says: the objects, their number, looks and relations?",
    "Coherence": "does the image hold together: no distorted objects, glitches or impossible parts?",
    "Style": "how pleasing is the image to look at, whatever the caption says?",
    "Final": "how good is the image as a picture of this caption, all in all?",
}


def default_prompt(axes: Sequence[str]) -> str:
    """Our words, asking for the lines in which the model family answers. {prompt} is the caption's place."""
    questions = "\n".join(f"- {axis} Score: {QUESTIONS[axis]}" for axis in axes)
    lines = "\n".join(f"{axis} Score{'' if axis == 'Final' else ' (1-5)'}: X" for axis in axes)
    return (
        "You see an image that was generated for a text caption. Judge it on each of these axes, with a "
        f"score from 1 (very poor) to 5 (excellent):\n{questions}\n\n"
        f"Answer in exactly this form, with numbers for X and nothing else:\n{lines}\n\n"
        "Text Caption: [{prompt}]"
    )


def parse(text: str, axis: str) -> float | None:
    """The axis's score, clamped to 1..5, or None; the last line that names it counts.

    `4`, `4.5`, `4,5`, `4.5/5` and `4 out of 5` are scores; a share of another total (`8/10`), a range (`3-4`)
    and words are none.
    """
    lines = re.findall(rf"(?im)^[^a-z\n]*{re.escape(axis)}[ \t]+score\b[^:：\n]*[:：](.*)$", text)
    found = SCORE.match(lines[-1]) if lines else None
    return min(5.0, max(1.0, float(found[1].replace(",", ".")))) if found else None


@dataclass
class Unified:
    """Asks the servers about each picture.

    Attributes:
        axes: each must be in an answer. combine: the axis that is the score, or "mean" of all.
        template: the question, {prompt} where the caption goes. source: where the template is from.
        last_error: why samples of the last call have no score, or None.
    """

    servers: Servers
    model: str
    axes: tuple[str, ...]
    combine: str
    template: str
    source: str
    image_format: str
    max_tokens: int
    last_error: str | None = None
    tally: Tally = field(default_factory=lambda: Tally("unified"))

    def __call__(self, images: Tensor, prompts: list[str], metadata: Metadata | None = None) -> Tensor:
        bodies = [partial(self._question, *pair) for pair in zip(eight_bits(images), prompts, strict=True)]
        answers = [self._score(answer) for answer in self.servers.ask("/chat/completions", bodies)]
        self.last_error = self.tally.take([one if isinstance(one, Failed) else None for one in answers])
        scores = [torch.nan if isinstance(one, Failed) else one for one in answers]
        return torch.tensor(scores, dtype=torch.float32)

    def describe(self) -> str:
        """What is asked, of whom: a line for the log. Two runs with the same line but the servers compare."""
        score = f"mean of {', '.join(self.axes)}" if self.combine == MEAN else f"{self.combine}"
        digest = hashlib.sha256(self.template.encode()).hexdigest()[:12]
        return (
            f"unified: {self.model} at {', '.join(self.servers.urls)}; score: {score} (asked for "
            f"{', '.join(self.axes)}); {self.source}, sha256 {digest}; {self.image_format}, temperature 0, "
            f"{self.max_tokens} tokens"
        )

    def _question(self, pixels: Tensor, prompt: str) -> dict[str, Any]:
        url = f"data:image/{self.image_format};base64,{encoded(pixels, self.image_format)}"
        content = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": self.template.replace("{prompt}", prompt)},
        ]
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
        }

    def _score(self, answer: Any) -> float | Failed:
        if isinstance(answer, Failed):
            return answer
        try:
            choice = answer["choices"][0]
            text, cut_off = choice["message"]["content"], choice.get("finish_reason") == "length"
        except (KeyError, IndexError, TypeError, AttributeError):
            text, cut_off = None, False
        if not isinstance(text, str):
            return Failed("the answer is no chat completion with text", str(answer)[:200])
        if cut_off:  # in the middle of its last line, perhaps of a number
            text = text.rpartition("\n")[0]
        scores = {axis: parse(text, axis) for axis in self.axes}
        known = {axis: score for axis, score in scores.items() if score is not None}
        if len(known) < len(scores):
            missing = ", ".join(axis for axis in scores if axis not in known)
            ending = f" within max_tokens={self.max_tokens}" if cut_off else ""
            return Failed(f"no {missing} score in the answer{ending}", text)
        return sum(known.values()) / len(known) if self.combine == MEAN else known[self.combine]


def load(
    device: torch.device,
    *,
    servers: Sequence[str] | str = (),
    model: str = "",
    axes: Sequence[str] = ("Alignment", "Coherence", "Style"),
    combine: str | None = None,
    prompt_file: str | None = None,
    image_format: str = "png",
    max_tokens: int = 512,
    timeout: float = 120.0,
    concurrency: int = 16,
    retries: int = 4,
    backoff: float = 1.0,
    api_key_env: str | None = None,
    check: bool = True,
) -> Unified:
    """Checks the options and, unless check=False, that every server is there and serves the model.

    Args:
        servers: addresses up to and with /v1. model: by the name under which they serve it.
        axes: asked for; each answer must have all. combine: "mean" or one of them; None = the first.
        prompt_file: the question as a text file with {prompt} in it; None = `default_prompt`.
        image_format: png, or jpeg (quality 95). max_tokens: of an answer.
        timeout, concurrency, retries, backoff, api_key_env: see `Servers`.

    Raises:
        ValueError: options that cannot be meant, or a server that is not there.
    """
    asked = Servers(
        "unified",
        "servers",
        servers,
        timeout=timeout,
        concurrency=concurrency,
        retries=retries,
        backoff=backoff,
        api_key_env=api_key_env,
    )
    if not model or not isinstance(model, str):
        raise ValueError(
            f"reward unified: model={model!r} must name the model as the servers do, such as "
            'model = "CodeGoat24/UnifiedReward-2.0-qwen3vl-8b"'
        )
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    if not names or not all(isinstance(axis, str) and axis for axis in names) or len({*names}) < len(names):
        raise ValueError(
            f"reward unified: axes={axes!r} must be a list of different names, such as {[*QUESTIONS]}"
        )
    chosen = names[0] if combine is None else combine
    if chosen not in (MEAN, *names):
        raise ValueError(
            f"reward unified: combine={combine!r} is neither 'mean' nor one of the axes {', '.join(names)}"
            f"{did_you_mean(str(combine), [MEAN, *names])}"
        )
    if image_format not in ("png", "jpeg"):
        raise ValueError(f"reward unified: image_format={image_format!r} must be 'png' or 'jpeg'")
    template, source = _template(prompt_file, names)
    whole("unified", "max_tokens", max_tokens, least=1)
    if check:
        _check(asked, model)
    return Unified(asked, model, names, chosen, template, source, image_format, max_tokens)


def _template(prompt_file: str | None, axes: Sequence[str]) -> tuple[str, str]:
    if prompt_file is None:
        if unknown := [axis for axis in axes if axis not in QUESTIONS]:
            raise ValueError(
                f"reward unified: our own prompt knows no axis {unknown[0]!r}"
                f"{did_you_mean(unknown[0], QUESTIONS)}; it has {', '.join(QUESTIONS)}. For others give a "
                "prompt_file that asks for them"
            )
        return default_prompt(axes), "our own prompt"
    try:
        template = Path(prompt_file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"reward unified: prompt_file={prompt_file!r} cannot be read: {error}") from error
    if "{prompt}" not in template:
        raise ValueError(
            f"reward unified: prompt_file={prompt_file!r} has no {{prompt}}, where the caption must go"
        )
    return template, f"prompt of {prompt_file}"


def _check(servers: Servers, model: str) -> None:
    for url, answer in servers.reach("/models").items():
        start = (
            f"Start it with `vllm serve {model} --port {url.rpartition(':')[2].partition('/')[0]}` or as "
            "docs/rewards.md says, or give check = false to ask it only when pictures are judged"
        )
        if isinstance(answer, Failed):
            raise ValueError(f"reward unified: no server at {url} ({answer.reason}). {start}")
        if answer.status_code in (401, 403):
            raise ValueError(
                f"reward unified: {url} asks for a key (HTTP {answer.status_code}); put it into an "
                "environment variable and name that in api_key_env"
            )
        try:
            served = [str(one["id"]) for one in answer.raise_for_status().json()["data"]]
        except _unusable() as error:
            raise ValueError(
                f"reward unified: {url}/models answers HTTP {answer.status_code} and lists no models; the "
                f"address of an OpenAI-compatible server ends in /v1. {start}"
            ) from error
        if model not in served:
            raise ValueError(
                f"reward unified: {url} serves {', '.join(served) or 'nothing'}, not model={model!r}"
                f"{did_you_mean(model, served)}"
            )


def _unusable() -> tuple[type[Exception], ...]:
    import httpx

    return (httpx.HTTPStatusError, ValueError, KeyError, TypeError)
