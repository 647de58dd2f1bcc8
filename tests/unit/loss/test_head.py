"""How tokens are shared out over chunks; the products of `head.py` are tested with the losses that use them."""

import pytest
import torch

from composer_core.loss.head import chunk_size, split


@pytest.mark.parametrize(
    ("tokens", "parts"),
    [(0, [0]), (3, [3]), (10, [10]), (11, [6, 5]), (16, [8, 8]), (26, [9, 9, 8])],
    ids=["none", "few", "a-quarter-more", "two", "exact", "three"],
)
def test_tokens_are_shared_out_evenly_so_that_no_small_part_is_left(tokens, parts):
    found = split(torch.arange(tokens), 8)
    assert [len(part) for part in found] == parts
    assert torch.cat(found).tolist() == list(range(tokens))


@pytest.mark.parametrize(("vocab", "tokens"), [(1000, 256), (32000, 256), (151936, 110), (10**6, 64)])
def test_two_chunk_buffers_stay_within_128_mb_between_64_and_256_tokens(vocab, tokens):
    assert chunk_size(vocab) == tokens
