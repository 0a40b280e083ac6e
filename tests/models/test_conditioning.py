"""Conditioning: rows of named tensors, ragged ones with lengths on the CPU."""

import pytest
import torch

from g2rpo.models.policy import Conditioning


def ragged(*lengths: int) -> Conditioning:
    """Row i has the value 10 i + position at its valid positions, and zeros after them."""
    text = torch.zeros(len(lengths), max(lengths), 2)
    for row, length in enumerate(lengths):
        text[row, :length] = 10.0 * row + torch.arange(length)[:, None]
    return Conditioning(
        {"text": text, "pooled": torch.arange(len(lengths))[:, None]}, {"text": torch.tensor(lengths)}
    )


def test_rows_are_selected_by_slice_numbers_and_mask():
    cond = Conditioning({"text": torch.arange(12.0).reshape(3, 2, 2), "pooled": torch.arange(3.0)[:, None]})
    picked = cond[torch.tensor([2, 0, 2])]
    assert len(picked) == 3 and picked.tensors["pooled"].flatten().tolist() == [2, 0, 2]
    assert torch.equal(cond[torch.tensor([True, False, True])].tensors["text"], cond.tensors["text"][[0, 2]])
    joined = Conditioning.cat([cond[0:1], cond[1:]])
    assert torch.equal(joined.tensors["text"], cond.tensors["text"])
    assert len(cond[:0]) == 0


def test_only_floating_tensors_are_cast():
    cond = ragged(1, 2).to(dtype=torch.float64)
    assert cond.tensors["text"].dtype == torch.float64 and cond.tensors["pooled"].dtype == torch.int64
    assert cond.lengths["text"].dtype == torch.int64


def test_ragged_rows_are_trimmed_to_the_longest_selected():
    cond = ragged(2, 5, 3)
    picked = cond[torch.tensor([2, 0])]
    assert picked.tensors["text"].shape == (2, 3, 2) and picked.lengths["text"].tolist() == [3, 2]
    # Row 2 holds 20, 21, 22; row 0 holds 0, 1 and then padding.
    assert picked.tensors["text"][:, :, 0].tolist() == [[20, 21, 22], [0, 1, 0]]
    assert cond[1:2].tensors["text"].shape[1] == 5
    assert cond[torch.tensor([False, False, True])].lengths["text"].tolist() == [3]


def test_ragged_rows_are_padded_to_the_longest_when_joined():
    cond = ragged(2, 5, 3)
    rows = [cond[i : i + 1] for i in range(3)]
    joined = Conditioning.cat([rows[2], rows[0]])
    assert torch.equal(joined.tensors["text"], cond[torch.tensor([2, 0])].tensors["text"])
    whole = Conditioning.cat(rows)
    assert torch.equal(whole.tensors["text"], cond.tensors["text"])
    assert torch.equal(whole.lengths["text"], cond.lengths["text"])


@pytest.mark.gpu
def test_an_index_may_be_on_any_device():
    cond = ragged(2, 5, 3).to("cuda")
    index = torch.tensor([2, 0])
    for own in (index, index.cuda()):
        picked = cond[own]
        assert picked.tensors["text"].device.type == "cuda" and picked.lengths["text"].device.type == "cpu"
        assert torch.equal(picked.tensors["text"].cpu(), ragged(2, 5, 3)[index].tensors["text"])
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert len(cond[index]) == 2  # with an index on the CPU, nothing waits for the device
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_does_not_fit_together_is_refused():
    text = torch.zeros(3, 2, 2)
    with pytest.raises(ValueError, match="same N"):
        Conditioning({"text": text, "pooled": torch.zeros(2, 1)})
    with pytest.raises(ValueError, match="same N"):
        Conditioning({"text": text}, {"text": torch.tensor([1, 2])})
    with pytest.raises(ValueError, match="got none"):
        Conditioning({})
    with pytest.raises(ValueError, match="must be int64"):
        Conditioning({"text": text}, {"text": torch.ones(3)})
    with pytest.raises(ValueError, match="'other', which is not a tensor"):
        Conditioning({"text": text}, {"other": torch.tensor([1, 2, 2])})
    with pytest.raises(ValueError, match="at least one"):
        Conditioning.cat([])
    with pytest.raises(ValueError, match="different names: pooled, text and text"):
        Conditioning.cat([Conditioning({"text": text}), Conditioning({"pooled": text, "text": text})])
