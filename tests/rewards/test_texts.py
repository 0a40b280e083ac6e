"""Captions to ids: those of the originals' tokenizers, exactly."""

import json

import pytest
import torch
from support.reward_files import bert_tokenizer, clip_tokenizer, golden_json

from g2rpo.rewards.clip.texts import BertTokenizer, ClipTokenizer, openclip_clean

ENTRIES = golden_json("tokenizers")["captions"]
TEXTS = [entry["text"] for entry in ENTRIES]
VOCABULARY = 49408


def wanted(kind, pad, length):
    return torch.tensor([entry[kind] + [pad] * (length - len(entry[kind])) for entry in ENTRIES])


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return clip_tokenizer(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return bert_tokenizer(tmp_path_factory.mktemp("bert"))


def test_openclip(clip):
    ids = ClipTokenizer(clip, 77, VOCABULARY, openclip=True)(TEXTS)
    assert torch.equal(ids, wanted("openclip", 0, 77))


def test_transformers(clip):
    ids = ClipTokenizer(clip, 77, VOCABULARY, openclip=False)(TEXTS)
    assert torch.equal(ids, wanted("hf_clip", 49407, 77))
    # The two are not the same, so that one in the other's place is found out.
    same = (ids * (ids != 49407) == wanted("openclip", 0, 77) * (wanted("openclip", 0, 77) != 49407)).all(1)
    assert same.tolist() == [entry["hf_clip_same_as_openclip"] for entry in ENTRIES]


def test_bert(bert):
    tokenizer = BertTokenizer(bert, 30524)
    assert torch.equal(tokenizer(TEXTS), wanted("bert", 0, 35))
    assert tokenizer(["[DEC] and [ENC]"])[0, :5].tolist() == [101, 30522, 1998, 30523, 102]


def test_cleaning_is_what_sets_openclip_apart(clip):
    """transformers' ids of a cleaned caption are OpenCLIP's of the caption as it was."""
    plain = ClipTokenizer(clip, 77, VOCABULARY, openclip=False)
    cleaned = plain([openclip_clean(text) for text in TEXTS])
    openclip = wanted("openclip", 49407, 77)
    assert torch.equal(cleaned, openclip)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("Salt &amp;amp; “Pepper”", 'salt & "pepper"'),
        ("donâ€™t paint the cafÃ© wall", "don't paint the café wall"),
        ("<b> caf&amp;eacute;", "<b> café"),  # where there is a tag, ftfy leaves HTML as it is
        (" ｆｕｌｌ\u3000ｗｉｄｔｈ \n\t", "full width"),
        ("", ""),
    ],
)
def test_cleaning(text, clean):
    assert openclip_clean(text) == clean


def test_a_caption_that_spells_the_end_does_not_end(clip):
    text = ["<|endoftext|> and <|startoftext|>"]
    openclip = ClipTokenizer(clip, 77, VOCABULARY, openclip=True)(text)[0]
    assert (openclip == 49407).nonzero().flatten().tolist() == [openclip.argmin().item() - 1] != [1]
    assert ClipTokenizer(clip, 77, VOCABULARY, openclip=False)(text)[0, 1] == 49407  # it does in transformers
    # Nor is it a word: what follows is one with its last characters (open_clip 3.3's ids).
    followed = ClipTokenizer(clip, 77, VOCABULARY, openclip=True)(["<|endoftext|>*"])[0]
    assert followed[:9].tolist() == [49406, 27, 347, 40786, 4160, 91, 29, 265, 49407]


def test_composed_letters_are_left_after_cleaning(clip):
    """OpenCLIP composes before it undoes HTML, not after: e and an accent from `&#769;` may stay two."""
    ids = ClipTokenizer(clip, 77, VOCABULARY, openclip=True)
    assert not torch.equal(ids(["<b> e&#769;"]), ids(["<b> é"]))


def test_folders_that_do_not_do(clip, bert, tmp_path):
    with pytest.raises(
        ValueError, match=r"contains no tokenizer \(tokenizer.json or vocab.json with merges.txt"
    ):
        ClipTokenizer(bert, 77, VOCABULARY, openclip=True)
    with pytest.raises(ValueError, match=r"contains no tokenizer \(tokenizer.json or vocab.txt\)"):
        BertTokenizer(clip, 30524)
    with pytest.raises(ValueError, match="has 49,408 tokens, the network 1,000"):
        ClipTokenizer(clip, 77, 1000, openclip=True)
    with pytest.raises(ValueError, match=r"has 30,524 tokens .* network 1,200"):
        BertTokenizer(bert, 1200)


def test_the_fast_file_alone_is_enough(clip, tmp_path):
    """tokenizer.json, as hub folders carry it, gives the same."""
    from transformers import CLIPTokenizer

    CLIPTokenizer.from_pretrained(clip).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["type"] == "BPE"
    for openclip, kind, pad in ((True, "openclip", 0), (False, "hf_clip", 49407)):
        assert torch.equal(
            ClipTokenizer(tmp_path, 77, VOCABULARY, openclip=openclip)(TEXTS), wanted(kind, pad, 77)
        )
