# SPDX-License-Identifier: Apache-2.0
"""Models of several KV groups in the vLLM connector: which blocks are named, and that a hit counts as a whole only.

A group of full attention, one with windows of one block, and one of states with blocks twice as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvgrpc.api import CudaIpcMemory, GroupKind, Hashes, SharedMemory, Tokens
from kvgrpc.client import NotShareableError
from kvgrpc.core.types import NULL_BLOCK, ChunkOutcome, ChunkResult, Part, Piece, TokenRange
from kvgrpc.engines.vllm.memory import Form, share
from kvgrpc.engines.vllm.metadata import Load, Report
from kvgrpc.engines.vllm.ports import Groups
from kvgrpc.engines.vllm.worker import Worker
from kvgrpc.transfer import device
from kvgrpc.transfer.layout import check_layout
from kvgrpc.transfer.runs import piece_runs
from tests.engines.fakes import BLOCK, Desk, FakeClient, FakeCopier, OnACard, desk, keys_of

GROUPS = Groups((BLOCK, BLOCK, 2 * BLOCK), frozenset({2}), whole=True, again=False)
LOADED, FAILED = ChunkOutcome.LOADED, ChunkOutcome.FAILED
LOAD = Load("r", (b"job",), 0, 64, ((1, 2, 3, 4), (NULL_BLOCK, NULL_BLOCK, NULL_BLOCK, 5), (NULL_BLOCK, 6)))


def with_tables(d: Desk, window: list[int], states: list[int]) -> None:
    d.blocks.others["r"] = [window, states]


def test_a_load_names_the_blocks_of_every_group_and_no_null_block():
    d = desk(groups=GROUPS)
    d.client.hit = 96
    request = d.arrive("r", 100)
    with_tables(d, [0, 0, 0, 0, 0, 206], [0, 0, 303])
    assert d.scheduler.matched(request, 32) == (64, True)
    d.scheduler.allocated(request, 64)
    (load,) = d.scheduler.step([]).loads
    assert (load.start, load.end) == (32, 96)
    assert load.blocks == (
        tuple(d.blocks.tables["r"][2:6]),
        (NULL_BLOCK, NULL_BLOCK, NULL_BLOCK, 206),
        (NULL_BLOCK, 303),
    )


@pytest.mark.parametrize(("tokens", "asked"), [(100, 3), (97, 3), (96, 2), (33, 1), (32, 0)])
def test_what_may_not_be_loaded_is_not_looked_up(tokens: int, asked: int):
    """Where the last token cannot be computed again; of a longer hit a part would be of no use."""
    d = desk(groups=GROUPS)
    request = d.arrive("r", tokens)
    (content,) = d.client.contents
    assert isinstance(content, Hashes)
    assert (len(keys_of(content)), content.num_tokens) == (asked, request.num_tokens - 1)


def test_a_wish_for_less_is_looked_up_as_such():
    d = desk(groups=GROUPS)
    d.arrive("r", 100, params={"kvgrpc.max_load_tokens": 70})
    own = desk(groups=GROUPS, own_hashes=True)
    own.arrive("r", 100, params={"kvgrpc.max_load_tokens": 70})
    (content,), (tokens,) = d.client.contents, own.client.contents
    assert isinstance(tokens, Tokens)
    assert (len(keys_of(content)), tokens.num_tokens) == (2, 70)


def test_a_part_of_a_hit_is_never_loaded():
    """Should vLLM ask for less than it was offered."""
    d = desk(groups=GROUPS)
    d.client.hit = 96
    request = d.arrive("r", 100)
    with_tables(d, [0] * 6, [0] * 3)
    d.scheduler.matched(request, 0)
    d.scheduler.allocated(request, 64)
    (load,) = d.scheduler.step([]).loads
    assert load.job_ids == ()


def test_servers_of_several_nodes_must_have_the_same_hit():
    other = FakeClient(hit=64)
    d = desk(others=[other], groups=GROUPS)
    d.client.hit = 96
    request = d.arrive("r", 100)
    assert d.scheduler.matched(request, 0) == (0, False)
    d.scheduler.allocated(request, 0)
    assert "pins of r" in d.client.given_back
    other.hit = 96
    assert d.scheduler.matched(request, 0) == (96, True)


def test_a_save_names_what_is_there_and_holds_only_that():
    """Of states the one at the step's end: blocks of others are scratch, or hold what is no chunk's end."""
    d = desk(groups=GROUPS)
    d.arrive("r", 100)
    with_tables(d, [0, 0, 203, 204, 205, 206], [301, 302, 303])
    (save,) = d.scheduler.step([("r", 64)]).saves
    full = tuple(d.blocks.tables["r"][:4])
    assert (save.start, save.end) == (0, 64)
    assert save.blocks == (full, (NULL_BLOCK, NULL_BLOCK, 203, 204), (NULL_BLOCK, 302))
    assert sorted(d.blocks.held) == sorted([*full, 203, 204, 302])
    (later,) = d.scheduler.step([("r", 100)]).saves
    assert later.blocks[2] == (NULL_BLOCK,)  # the state is that of 100 tokens
    for each in (save, later):
        d.scheduler.update(Report({each.save_id: 1}), (), ())
    assert (d.blocks.held.total(), d.scheduler.held_blocks) == (0, 0)


def test_a_state_is_saved_when_its_key_is_known():
    """vLLM plans a step before it knows what the last one has sampled: the step that ends with the chunk is over."""
    d = desk(groups=GROUPS)
    request = d.arrive("r", 95)
    with_tables(d, [0, 0, 203, 204, 205, 206, 207, 208], [0, 302, 303, 304])
    d.scheduler.step([("r", 95)])
    assert d.scheduler.step([("r", 96)]).saves == []
    request.all_token_ids.append(7)
    (save,) = d.scheduler.step([("r", 97)]).saves
    assert (save.start, save.end, save.blocks[2]) == (64, 96, (303,))
    request.all_token_ids.extend(range(40))
    (later,) = d.scheduler.step([("r", 130)]).saves
    assert (later.start, later.end, later.blocks[2]) == (96, 128, (NULL_BLOCK,))


@pytest.mark.parametrize("again", [False, True])
def test_a_step_of_an_earlier_round_says_nothing_of_the_blocks_there_are_now(again: bool):
    """After a preemption other blocks hold the same tokens, and other steps end elsewhere."""
    d = desk(groups=GROUPS)
    request = d.arrive("r", 95)
    with_tables(d, [0, 0, 203, 204, 205, 206, 207], [0, 302, 303, 304])
    d.scheduler.step([("r", 95)])
    assert d.scheduler.step([("r", 96)]).saves == []
    request.all_token_ids.append(7)
    if again:
        d.scheduler.matched(request, 0)
        d.scheduler.allocated(request, 0)
        with_tables(d, [0, 0, 0, 0, 405, 406, 407], [0, 402, 403, 404])
    (save,) = d.scheduler.step([("r", 97)]).saves
    assert save.blocks[2] == ((NULL_BLOCK,) if again else (303,))


def test_a_save_waits_for_the_blocks_of_all_groups():
    d = desk(groups=GROUPS)
    d.arrive("r", 100)
    with_tables(d, [201, 202, 203, 204], [301])
    assert d.scheduler.step([("r", 64)]).saves == []


def test_a_failed_request_is_not_looked_up_again():
    d = desk(groups=GROUPS)
    d.client.hit = 96
    request = d.arrive("r", 100)
    with_tables(d, [0] * 6, [0] * 3)
    d.scheduler.matched(request, 0)
    d.scheduler.allocated(request, 96)
    d.scheduler.step([])
    d.scheduler.update(None, ["r"], (), ["r"])
    assert d.scheduler.matched(request, 0) == (0, False)
    assert "pins of r" in d.client.given_back


def test_long_chunks_for_states_are_told_of(caplog: pytest.LogCaptureFixture):
    d = desk(groups=Groups((BLOCK, BLOCK), frozenset({1}), whole=True, again=False))
    d.arrive("r", 100)
    d.arrive("s", 100)
    assert len([each for each in caplog.records if f"--chunk-tokens {BLOCK} for more hits" in each.message]) == 1


# ---- the worker -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("results", "fails"),
    [
        ([(0, 2, LOADED)], False),
        ([(0, 1, LOADED), (1, 1, LOADED)], False),
        ([(0, 1, LOADED), (1, 1, FAILED)], True),
        ([(0, 1, LOADED)], True),
        ([(0, 2, ChunkOutcome.TORN)], True),
        ([], True),
    ],
)
def test_a_load_is_good_as_a_whole_or_not_at_all(results: list[tuple[int, int, ChunkOutcome]], fails: bool):
    """vLLM cannot be told of bad blocks where several groups have blocks of one number."""
    copier = FakeCopier()
    w = Worker(copier, GROUPS, writes=True)
    w.load([LOAD])
    assert copier.retrieves == [(b"job", TokenRange(0, 64), [list(ids) for ids in LOAD.blocks])]
    copier.futures[0].set_result(tuple(ChunkResult(*each, "") for each in results))
    assert w.poll() == {"r"}
    assert (w.take_failed(), w.take_invalid()) == ({"r"} if fails else set(), set())
    assert w.take_failed() == set()
    report = w.take_report()
    assert report is not None
    assert (report.loaded_tokens, report.failed_tokens) == ((0, 64) if fails else (64, 0))


def test_a_worker_without_memory_fails_whole_requests():
    w = Worker(None, GROUPS, writes=True)
    w.load([LOAD, Load("gone", (), 0, 0, ())])
    assert (w.poll(), w.take_failed(), w.take_invalid()) == ({"r", "gone"}, {"r"}, set())


# ---- memory ---------------------------------------------------------------------------------------------------------

BLOCKS, STATES, CONTENT = 8, 32, 16
FULL = Form(("full",), STATES, BLOCKS, "test", "a")
WINDOW = Form(("w0", "w1"), STATES, BLOCKS, "test", "a", GroupKind.SLIDING_WINDOW, 32)
RECURRENT = Form(("s",), 2 * STATES, BLOCKS, "test", "s", GroupKind.RECURRENT)
PAGE = 2 * STATES * CONTENT * 2


def aliased() -> dict[str, torch.Tensor]:
    """Two pages for each block: one layer of each group lies on the first, one with windows on the second. Kernels cut
    the blocks of full attention in two; a state is shorter than a page."""
    raw = torch.zeros(2, BLOCKS, PAGE, dtype=torch.int8)
    attention = raw.view(torch.bfloat16)
    return {
        "full": attention[0].view(2 * BLOCKS, 2, STATES // 2, CONTENT),
        "w0": attention[0].view(BLOCKS, 2, STATES, CONTENT),
        "w1": attention[1].view(BLOCKS, 2, STATES, CONTENT),
        "s": raw[0].view(BLOCKS, 1, 1, PAGE)[..., :100],
    }


def test_groups_that_lie_in_the_same_memory_are_where_the_layout_says():
    """Position-coded bytes of every block, read as the movers read them."""
    tensors = aliased()
    forms = [FULL, WINDOW, RECURRENT]
    layout = share(tensors, forms)
    (piece,) = layout.memory
    assert isinstance(piece, SharedMemory)
    memory = torch.tensor([], dtype=torch.uint8).set_(tensors["s"].untyped_storage())
    memory.copy_(torch.tensor([(7 * at + at // 251) % 256 for at in range(memory.numel())]))
    parts = check_layout(layout, 2 * STATES).parts(2 * STATES)
    for part, want in zip(parts, _expected(tensors, 3), strict=True):
        assert b"".join(_read(memory, layout, part, 3)) == want


def _read(memory: torch.Tensor, layout: Any, part: Part, block: int) -> Iterator[bytes]:
    """The object of a chunk whose last block, in each group, is ``block``, and its others ``block - 1``."""
    ids = tuple(tuple(range(block + 1 - count, block + 1)) for count in part.blocks)
    size = part.object_bytes
    piece = Piece(0, ((0, size),), (0, size), (0,) * len(ids), ids)
    for run in piece_runs(layout, 2 * STATES, piece, part):
        yield memory[run.offset : run.offset + run.length].numpy().tobytes()


def _expected(tensors: dict[str, torch.Tensor], block: int) -> Iterator[bytes]:
    def of(name: str, *blocks: int) -> bytes:
        grouped = tensors[name].reshape(BLOCKS, -1)
        return b"".join(grouped[at].contiguous().view(torch.uint8).numpy().tobytes() for at in blocks)

    yield of("full", block - 1, block)
    yield of("w0", block) + of("w1", block)
    yield of("s", block)


def test_groups_on_a_card_lie_as_those_of_a_cpu(monkeypatch: pytest.MonkeyPatch):
    """One piece of memory for all of them, and the same runs in it."""
    begin = 0x7F0000000000
    monkeypatch.setattr(device, "export_memory", lambda at: (b"h" * 64, "uuid", at - begin, 1 << 30))
    forms = [FULL, WINDOW, RECURRENT]
    tensors: dict[str, Any] = {name: OnACard(begin + 512, tensor) for name, tensor in aliased().items()}
    layout = share(tensors, forms)
    check_layout(layout, 2 * STATES)
    (piece,) = layout.memory
    assert (type(piece), piece.offset_bytes, piece.size_bytes) == (CudaIpcMemory, 512, 2 * BLOCKS * PAGE)
    assert layout.groups == share(aliased(), forms).groups


def test_a_tensor_that_is_not_made_of_the_groups_blocks_is_refused_by_name():
    tensors = aliased() | {"s": torch.zeros(BLOCKS + 3, 1, 1, 100, dtype=torch.int8)}
    on_card: dict[str, Any] = {name: OnACard(0x7F0000000000, tensor) for name, tensor in tensors.items()}
    with pytest.raises(NotShareableError, match=r"layer s has shape .*does not begin with 8 blocks"):
        share(on_card, [FULL, RECURRENT])
    with pytest.raises(NotShareableError, match=r"layer s has shape .*does not begin with 8 blocks"):
        share(tensors, [FULL, RECURRENT])
