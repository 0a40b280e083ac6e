"""Captions of scenes in plain English, their parser, and the prompt sets of the embedded world.

    group   = NUMBER COLOUR SHAPE            "two red circles", "a blue star"
    what    = group [RELATION group]         "two red circles above a blue star"
    caption = frame around `what`, with or without the background

Captions are generated as token ids on the device of the scenes (a million per second), then spelled out.
"""

import re
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.resources import files

import torch
from torch import Tensor

from g2rpo.world.scenes import (
    COLOUR_NAMES,
    OBJECT_COLOURS,
    RELATIONS,
    SHAPES,
    Compositions,
    sample_compositions,
)

NUMBERS = ("one", "two", "three", "four", "five")
RELATION_WORDS: dict[str, tuple[str, str]] = {
    "and": ("and", "with"),
    "left of": ("left of", "to the left of"),
    "right of": ("right of", "to the right of"),
    "above": ("above", "over"),
    "below": ("below", "under"),
}
# Parts of a caption: (before WHAT, whether the background comes first, its suffix, then WHAT, before the
# background, after it).
WITH_BACKGROUND = (
    ("", False, "", "on a", "background"),
    ("a picture of", False, "", "on", ""),
    ("", False, "", "in front of a", "background"),
    ("", True, "background with", "", ""),
    ("", False, "", "on", ""),
    ("there BE", False, "", "on a", "background"),
)
WITHOUT_BACKGROUND = (
    ("", False, "", "", ""),
    ("a picture of", False, "", "", ""),
    ("there BE", False, "", "", ""),
    ("a drawing of", False, "", "", ""),
)
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")
PAD, EOS, BOS, UNK = range(4)
MAX_TOKENS = 20  # <bos>, 18 words, <eos>
PLURAL = {shape: shape + ("es" if shape == "cross" else "s") for shape in SHAPES}


def _vocabulary() -> tuple[str, ...]:
    words = [
        word
        for frame in WITH_BACKGROUND + WITHOUT_BACKGROUND
        for part in frame
        if isinstance(part, str)
        for word in part.split()
        if word != "BE"
    ]
    words += ["is", "are", "a", "an", *NUMBERS, *COLOUR_NAMES, *SHAPES, *PLURAL.values()]
    words += [word for forms in RELATION_WORDS.values() for form in forms for word in form.split()]
    return (*SPECIAL, *dict.fromkeys(words))


VOCABULARY = _vocabulary()
_ID = {word: index for index, word in enumerate(VOCABULARY)}


@lru_cache
def _table(phrases: tuple[str, ...], width: int, device: torch.device) -> Tensor:
    rows = [[_ID[word] for word in phrase.split()] for phrase in phrases]
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows], device=device)


@lru_cache
def _starts_with_background(device: torch.device) -> Tensor:
    return torch.tensor([frame[1] for frame in WITH_BACKGROUND + WITHOUT_BACKGROUND], device=device)


@lru_cache
def empty_caption(device: torch.device) -> Tensor:
    """Returns the token ids of the empty caption: [MAX_TOKENS], int64."""
    return torch.tensor([BOS, EOS] + [PAD] * (MAX_TOKENS - 2), device=device)


def caption_ids(
    scenes: Compositions, generator: torch.Generator, *, background_share: float = 0.75
) -> Tensor:
    """Generates one caption per scene as token ids, with varied frames, wording and articles.

    Args:
        scenes: compositions with a stated background.
        generator: on the device of the scenes.
        background_share: share of captions that state the background, in [0, 1].

    Returns:
        [N, MAX_TOKENS], int64: <bos>, words, <eos>, then <pad>.
    """
    device, num = scenes.relation.device, len(scenes)
    pick = torch.rand(5, num, generator=generator, device=device)
    stated = (pick[0] < background_share) & (scenes.background >= 0)
    frames = WITH_BACKGROUND + WITHOUT_BACKGROUND
    frame = torch.where(
        stated,
        (pick[1] * len(WITH_BACKGROUND)).long(),
        len(WITH_BACKGROUND) + (pick[1] * len(WITHOUT_BACKGROUND)).long(),
    )
    plural = (scenes.count[:, 0] > 1).long()

    def words(phrases: list[str], width: int, index: Tensor) -> Tensor:
        return _table(tuple(phrases), width, device)[index]

    first = [f[0].replace("BE", be) for be in ("is", "are") for f in frames]
    ground = words(list(COLOUR_NAMES), 1, scenes.background.clamp(min=0))
    at_start = _starts_with_background(device)[frame]
    groups = []
    for g in (0, 1):
        count, colour, shape = scenes.count[:, g], scenes.colour[:, g], scenes.shape[:, g]
        article = torch.where(pick[2 + g] < 0.75, 0, 1) * (count == 1)
        an = (colour == COLOUR_NAMES.index("orange")) & (count == 1) & (article == 0)
        number = torch.where(count > 1, count, torch.where(article == 1, 1, torch.where(an, 6, 0)))
        text = torch.cat(
            [
                words(["a", *NUMBERS, "an"], 1, number),
                words(list(COLOUR_NAMES), 1, colour),
                words([*SHAPES, *PLURAL.values()], 1, shape + len(SHAPES) * (count > 1)),
            ],
            1,
        )
        groups.append(text.masked_fill((count == 0)[:, None], -1))
    wording = words(
        [form for name in RELATIONS for form in RELATION_WORDS[name]],
        4,
        scenes.relation * 2 + (pick[4] < 0.5).long(),
    )
    pieces = [
        torch.full((num, 1), BOS, device=device),
        words(first, 4, frame + len(frames) * plural),
        ground.masked_fill(~(at_start & stated)[:, None], -1),
        words([f[2] for f in frames], 3, frame),
        groups[0],
        wording.masked_fill((scenes.count[:, 1] == 0)[:, None], -1),
        groups[1],
        words([f[3] for f in frames], 4, frame),
        ground.masked_fill(~(~at_start & stated)[:, None], -1),
        words([f[4] for f in frames], 1, frame),
        torch.full((num, 1), EOS, device=device),
    ]
    ids = torch.cat(pieces, 1)
    order = (ids < 0).long().sort(dim=1, stable=True).indices
    ids = ids.gather(1, order)[:, :MAX_TOKENS]
    return ids.masked_fill(ids < 0, PAD)


def spell(ids: Tensor) -> list[str]:
    """Converts token ids to text, without the special tokens."""
    return [" ".join(VOCABULARY[i] for i in row if i >= len(SPECIAL)) for row in ids.tolist()]


def captions(
    scenes: Compositions, generator: torch.Generator, *, background_share: float = 0.75
) -> list[str]:
    """Generates one caption per scene as text; see `caption_ids`."""
    return spell(caption_ids(scenes, generator, background_share=background_share))


_NUMBER = "|".join(("an", "a", *NUMBERS))
_GROUP = (
    rf"\b(?P<n{{0}}>{_NUMBER}) (?P<c{{0}}>{'|'.join(OBJECT_COLOURS)}) "
    rf"(?P<s{{0}}>{'|'.join(SHAPES)})(?:es|s)?\b"
)
_WORDING = {w: RELATIONS.index(name) for name, forms in RELATION_WORDS.items() for w in forms}
_ANY_RELATION = "|".join(sorted(_WORDING, key=len, reverse=True))
_PAIR = re.compile(_GROUP.format(0) + rf"(?: (?P<rel>{_ANY_RELATION}) " + _GROUP.format(1) + ")?")
_COLOUR = "|".join(COLOUR_NAMES)
_BACKGROUND = re.compile(rf"\b(?P<a>{_COLOUR}) background\b|\b(?:on|in front of)(?: an?)? (?P<b>{_COLOUR})$")


def _groups_in(words: str) -> re.Match[str] | None:
    """Returns the match of the only group or pair of groups; None if there is none, or another one."""
    match = _PAIR.search(words)
    return None if match is None or _PAIR.search(words, match.end()) is not None else match


def parse(text: str) -> Compositions | None:
    """Reads a caption back into one composition.

    Returns:
        One composition (N = 1), whose background is -1 if the caption does not state it. None if the text is
        outside the grammar, for example with more than two groups or five objects.
    """
    words = " ".join(re.findall(r"[a-z]+", text.lower()))
    match = _groups_in(words)
    if match is None:
        return None
    number = {"a": 1, "an": 1} | {word: i + 1 for i, word in enumerate(NUMBERS)}
    second = match["n1"] is not None
    count = [number[match["n0"]], number[match["n1"]] if second else 0]
    if sum(count) > 5:
        return None
    colour = [COLOUR_NAMES.index(match["c0"]), COLOUR_NAMES.index(match["c1"]) if second else 0]
    shape = [SHAPES.index(match["s0"]), SHAPES.index(match["s1"]) if second else 0]
    ground = _BACKGROUND.search(words)
    background = COLOUR_NAMES.index(ground["a"] or ground["b"]) if ground else -1
    return Compositions(
        torch.tensor([count]),
        torch.tensor([colour]),
        torch.tensor([shape]),
        torch.tensor([_WORDING[match["rel"]] if second else 0]),
        torch.tensor([background]),
    )


# Two prompts that the base model often gets wrong. There are so few because each then recurs often enough to
# be learned within minutes.
DEMO_PROMPTS = ("four red circles", "five blue diamonds")
PROMPT_SETS = ("train", "heldout", "demo")
NUM_PROMPTS = 2000
"""Number of prompts of "train" and of "heldout". Sets of this size are files of the package
(assets/prompts/NAME.txt, the lines of `generated_prompts(NAME, NUM_PROMPTS)`): they are read within
milliseconds, and do not depend on the random numbers of a version of torch."""


def prompt_set(name: str, num: int = NUM_PROMPTS) -> list[tuple[str, dict]]:
    """Returns the prompts of a set with their metadata.

    Args:
        name: "demo", or "train" and "heldout", which are disjoint and have one group in half of their scenes.
        num: largest number of prompts of "train" and "heldout". Sets of different sizes are drawn separately,
            so a small one is not the beginning of a large one.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in PROMPT_SETS:
        raise ValueError(f"no prompt set {name!r} in the embedded world; there are {', '.join(PROMPT_SETS)}")
    return [(text, {"groups": groups}) for text, groups in _prompts_with_groups(name, num)]


def generated_prompts(name: str, num: int) -> list[str]:
    """Generates at most `num` different captions for the set "train" or "heldout"."""
    generator = torch.Generator().manual_seed(20251002 + PROMPT_SETS.index(name))
    scenes = sample_compositions(2 * num, generator, held_out=name == "heldout", two_groups=0.5)
    return list(dict.fromkeys(captions(scenes, generator)))[:num]


@cache
def _prompts_with_groups(name: str, num: int) -> tuple[tuple[str, int], ...]:
    """The prompts of a set and the number of groups in each; a run reads its sets several times."""
    texts: Sequence[str]
    if name == "demo":
        texts = DEMO_PROMPTS
    elif num == NUM_PROMPTS:
        texts = (files("g2rpo") / "assets" / "prompts" / f"{name}.txt").read_text("utf-8").splitlines()
    else:
        texts = generated_prompts(name, num)
    return tuple((text, _num_groups(text)) for text in texts)


def _num_groups(caption: str) -> int:
    match = _groups_in(caption)
    return 0 if match is None else 1 + (match["n1"] is not None)
