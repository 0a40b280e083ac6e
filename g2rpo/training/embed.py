"""`g2rpo embed`: a run's prompts through the text encoders before the run, which then never loads them.

Only the text encoders are loaded, no transformer and no VAE. Started by torchrun, each process takes its
share of the prompts; they need not talk, because shards of the cache appear whole and under names of their
own. What is embedded stays: interrupted and started again, it goes on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from g2rpo.config.settings import Settings
from g2rpo.data.embeddings import EmbeddingCache
from g2rpo.data.prompts import ReadReport, read_prompts
from g2rpo.models.flux.random import RandomText, is_random, random_configs
from g2rpo.models.flux.text import FluxText
from g2rpo.models.loading.files import flux_folder
from g2rpo.models.policy import Conditioning
from g2rpo.models.tiny import is_tiny, tiny_folder
from g2rpo.runtime.interrupt import interruptible
from g2rpo.runtime.processes import any_process, gathered, rank, resolve_device, world_size
from g2rpo.runtime.progress import counted
from g2rpo.training.run_prompts import run_prompts

INTERRUPTED = "interrupted; {} embeddings are kept, the same command goes on"


@dataclass(frozen=True)
class Encoders:
    """A model's text encoders by themselves, as the cache asks for them (`conditioning.Encoder`)."""

    text: FluxText | RandomText

    @property
    def device(self) -> torch.device:
        return self.text.device

    @property
    def encoder_identity(self) -> str:
        """As that of the policy: what it finds in the cache."""
        return self.text.identity

    def encode(self, prompts: list[str]) -> Conditioning:
        return self.text.encode(prompts)


def text_encoders(settings: Settings, device: torch.device) -> Encoders:
    """The text encoders of a run's model; their weights are read at the first prompt.

    Raises:
        ValueError: no such model, another pipeline, or a max_sequence_length that it does not take.
    """
    # As FluxPolicy.load has it: the same products, so the same bits.
    torch.set_float32_matmul_precision("high" if settings.precision == "tf32" else "highest")
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
    name, precision, length = settings.model, settings.precision, settings.max_sequence_length
    if is_random(name):
        text = RandomText(random_configs(name), device=device, precision=precision, length=length)
        return Encoders(text)
    folder = tiny_folder(name)[0] if is_tiny(name) else flux_folder(name)
    return Encoders(FluxText(folder, device=device, precision=precision, max_sequence_length=length))


@dataclass(frozen=True)
class Truncation:
    """Prompts of which an encoder sees the beginning only."""

    encoder: str
    tokens: int
    """Where it cuts, special tokens counted."""
    prompts: tuple[str, ...]

    def __str__(self) -> str:
        effect = (
            "their pooled embedding only, T5 reads on" if self.encoder == "CLIP" else "what the model reads"
        )
        first = self.prompts[0][:60] + ("…" if len(self.prompts[0]) > 60 else "")
        return (
            f"{self.encoder} cuts {len(self.prompts)} prompts after {self.tokens} tokens, which shortens "
            f"{effect}; the first: {first!r}"
        )


def truncated_prompts(text: Any, prompts: Sequence[str]) -> list[Truncation]:
    """What CLIP and T5 cut; without an entry for one that sees every prompt whole.

    Args:
        text: FluxText; other encoders have no tokenizers and cut nothing.
    """
    if not isinstance(text, FluxText) or not prompts:
        return []
    cuts = []
    for encoder, tokenizer, limit in (
        ("CLIP", text.tokenizer, int(text.tokenizer.model_max_length)),
        ("T5", text.tokenizer_2, text.max_sequence_length),
    ):
        ids = tokenizer(list(prompts), truncation=False, padding=False, verbose=False).input_ids
        long = tuple(prompt for prompt, row in zip(prompts, ids, strict=True) if len(row) > limit)
        cuts += [Truncation(encoder, limit, long)] if long else []
    return cuts


@dataclass(frozen=True)
class EmbedResult:
    """What `embed_run` did.

    Attributes:
        prompts: of the run, each once. share: those of this process. there: of these, embedded before.
        added: embedded now; fewer than share - there where it was interrupted.
        cuts: prompts that an encoder sees in part.
    """

    prompts: int
    share: int
    there: int
    added: int
    interrupted: bool
    cuts: list[Truncation]


def embed_run(settings: Settings, *, console: Console | None = None) -> EmbedResult:
    """Fills the embedding cache with what a run will ask it for, and says what it found and did.

    Of several processes (torchrun's RANK, WORLD_SIZE, LOCAL_RANK) each embeds a share; the first one speaks.

    Raises:
        ValueError: prompts or a model that cannot be read, or no space for the embeddings.
    """
    number, processes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    console = Console(quiet=True) if number else console or Console()
    say = _speaker(console)
    texts = run_prompts(settings)
    policy = text_encoders(settings, _own_device(settings.device))
    # A share of all prompts, not of the missing ones: the processes look at different moments.
    mine = texts[number::processes]
    filling = _Filling(EmbeddingCache(settings.cache), policy, mine, console)
    there = len(mine) - len(filling.missing)
    own = f" (this process's share of {processes}: {len(mine)})" if processes > 1 else ""
    say(f"{len(texts)} different prompts{own}: {there} are embedded already, {len(filling.missing)} to do")

    with interruptible():
        try:
            filling.run()
        except KeyboardInterrupt:
            say(INTERRUPTED.format(filling.added))
            return EmbedResult(len(texts), len(mine), there, filling.added, True, [])
    cuts = truncated_prompts(policy.text, texts)
    sources = dict.fromkeys(source for source in (settings.prompts, settings.eval_prompts) if source)
    for line in (*(_said(read_prompts(source)[1]) for source in sources), *map(str, cuts)):
        say(line)
    _say_disk(say, EmbeddingCache(settings.cache), policy)
    return EmbedResult(len(texts), len(mine), there, filling.added, False, cuts)


class EmbeddingInterrupted(Exception):
    """A signal ended a run before its first iteration; what was embedded is kept."""


def embed_missing(settings: Settings, device: torch.device) -> None:
    """What `train` does first: a run's prompts that are not in the cache, shared among its processes.

    Raises:
        EmbeddingInterrupted: on every process, when a signal came to any of them.
        ValueError: as `embed_run`.
    """
    console = Console(quiet=rank() > 0)
    texts, encoders = run_prompts(settings), text_encoders(settings, device)
    cache = EmbeddingCache(settings.cache)
    filling = _Filling(cache, encoders, texts[rank() :: world_size()], console)
    if missing := len(cache.missing(encoders, texts)):
        _speaker(console)(f"embedding {missing} prompts")
    with interruptible() as interrupt:
        try:
            interrupt.together(filling.run)
            if any_process(interrupt.asked):  # it came to one that was done and waited
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            _speaker(console)(INTERRUPTED.format(sum(gathered(filling.added))))
            raise EmbeddingInterrupted from None
    encoders.text.unload()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class _Filling:
    """One process's prompts on their way into the cache, with progress on a console.

    Attributes:
        missing: those that were not there. added: how many of these are there by now.
    """

    def __init__(
        self, cache: EmbeddingCache, encoders: Encoders, prompts: Sequence[str], console: Console
    ) -> None:
        self._cache, self._encoders, self._console = cache, encoders, console
        self.missing, self.added = cache.missing(encoders, prompts), 0

    def run(self) -> None:
        with counted(len(self.missing), "prompts", "embedding", self._console) as progress:

            def count(done: int, total: int) -> None:
                self.added = done
                progress(done)

            self._cache.fill(self._encoders, self.missing, progress=count)


def _own_device(setting: str) -> torch.device:
    device = resolve_device(setting)
    if device.type == "cuda" and "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return device


def _speaker(console: Console) -> Callable[[str], None]:
    return lambda line: console.print(line, soft_wrap=True, markup=False, emoji=False, highlight=False)


def _said(report: ReadReport) -> str:
    places = ", ".join(report.duplicates[:3]) + (", …" if len(report.duplicates) > 3 else "")
    return (
        f"{report.source}: {report.read} prompts read, {report.kept} kept, {len(report.duplicates)} repeated"
        f"{f' ({places})' if places else ''}, {report.empty_lines} empty lines"
    )


def _say_disk(say: Callable[[str], None], cache: EmbeddingCache, policy: Encoders) -> None:
    folder, count, size = cache.held(policy)
    say(f"{folder}: {count} embeddings of these encoders, {_size(size)}")
    if others := cache.other_encoders(policy):
        taken = sum(file.stat().st_size for other in others for file in other.glob("*.safetensors"))
        names = ", ".join(other.name for other in others[:3]) + (", …" if len(others) > 3 else "")
        say(
            f"{cache.folder} also holds {_size(taken)} by other encoders or settings (precision, "
            f"max_sequence_length), of no use to this run: {names}; each folder's identity.txt says whose"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.2f} MB"
