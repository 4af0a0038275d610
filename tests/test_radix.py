"""The prefix tree by itself, against a model that keeps every prompt as it is."""

import random
from collections.abc import Iterator

import pytest

from routing.radix import BLOCK_BYTES, LOOKED_AT_BYTES, NODE_BYTES, PrefixTree, _Node

LARGE = 1 << 30


class Model:
    """What each replica was sent, compared byte by byte."""

    def __init__(self, block: int) -> None:
        self.sent: list[tuple[bytes, str]] = []
        self.block = block

    def insert(self, prefix: bytes, replica: str) -> None:
        self.sent.append((prefix[:LOOKED_AT_BYTES], replica))

    def match(self, prefix: bytes) -> dict[str, int]:
        matched: dict[str, int] = {}
        for other, replica in self.sent:
            length = next((i for i, (a, b) in enumerate(zip(prefix, other, strict=False)) if a != b), None)
            length = min(len(prefix), len(other)) if length is None else length
            length -= length % self.block
            if length > matched.get(replica, 0):
                matched[replica] = length
        return matched

    def forget(self, replica: str) -> None:
        self.sent = [(prefix, other) for prefix, other in self.sent if other != replica]


def prompts(chance: random.Random) -> Iterator[bytes]:
    """Of few letters, so that they share a lot; many go on where an earlier one ended, or end amid one."""
    seen = [b""]
    while True:
        start = chance.choice(seen)
        prompt = start[: chance.randrange(len(start) + 1)] if chance.random() < 0.5 else start
        prompt += bytes(chance.choices(b"ab", k=chance.randrange(12)))
        seen.append(prompt)
        yield prompt


def check(tree: PrefixTree) -> None:
    """What must be so of every tree, at any time."""
    nodes: list[_Node] = []
    waiting = [tree._root]
    while waiting:
        node = waiting.pop()
        for first, child in node.children.items():
            assert child.edge[: tree._block] == first
            assert len(child.edge) % tree._block == 0
            assert (child.parent, child.depth) == (node, node.depth + len(child.edge))
            assert child.replicas
            assert node is tree._root or child.replicas <= node.replicas
            nodes.append(child)
            waiting.append(child)
    assert set(nodes) == set(tree._nodes)
    place = {node: number for number, node in enumerate(tree._nodes)}
    assert all(place[node] < place[node.parent] for node in nodes if node.parent is not tree._root and node.parent)
    assert tree.stats().size_bytes == sum(NODE_BYTES + len(node.edge) for node in nodes) <= tree._max_bytes


@pytest.mark.parametrize("seed", range(20))
def test_tree_finds_what_the_model_finds(seed: int) -> None:
    chance = random.Random(seed)
    block = chance.choice([1, 3])
    tree, model = PrefixTree(LARGE, block), Model(block)
    source = prompts(chance)
    for _ in range(120):
        prompt, replica = next(source), chance.choice("xyz")
        assert tree.match(prompt) == model.match(prompt)
        tree.insert(prompt, replica)
        model.insert(prompt, replica)
        assert tree.match(prompt).get(replica, 0) == len(prompt) // block * block
        if chance.random() < 0.02:
            gone = chance.choice("xyz")
            tree.forget(gone)
            model.forget(gone)
        check(tree)
    for gone in "xyz":
        tree.forget(gone)
    assert (tree.stats().size_bytes, tree.stats().active_prefixes) == (0, 0)


@pytest.mark.parametrize("seed", range(10))
def test_bounded_tree_never_finds_more_than_was_sent(seed: int) -> None:
    chance = random.Random(seed)
    tree, model = PrefixTree(12 * NODE_BYTES, 1), Model(1)
    source = prompts(chance)
    for _ in range(150):
        prompt, replica = next(source), chance.choice("xyz")
        true = model.match(prompt)
        assert all(length <= true[name] for name, length in tree.match(prompt).items())
        tree.insert(prompt, replica)
        model.insert(prompt, replica)
        check(tree)
    assert tree.stats().evictions > 0


SPLITS = {
    "ends amid an edge": ([b"abcdef", b"abc"], b"abcdef", {"x": 6, "y": 3}),
    "goes on after an edge": ([b"abc", b"abcdef"], b"abcdef", {"x": 3, "y": 6}),
    "turns off amid an edge": ([b"abcdef", b"abcxyz"], b"abcdef", {"x": 6, "y": 3}),
    "turns off at the first byte": ([b"abc", b"bbc"], b"abc", {"x": 3}),
    "turns off at the last byte": ([b"abcd", b"abce"], b"abcd", {"x": 4, "y": 3}),
    "is the same": ([b"abc", b"abc"], b"abc", {"x": 3, "y": 3}),
    "is empty": ([b"abc", b""], b"abc", {"x": 3}),
    "is asked for in part": ([b"abcdef", b"abcxyz"], b"ab", {"x": 2, "y": 2}),
    "is not there": ([b"abc", b"abd"], b"xyz", {}),
    "has zeros and high bytes": ([b"\0\xff\0\xff", b"\0\xff\0\0"], b"\0\xff\0\xff\0", {"x": 4, "y": 3}),
}


@pytest.mark.parametrize(("sent", "asked", "matched"), SPLITS.values(), ids=SPLITS.keys())
def test_second_prompt(sent: list[bytes], asked: bytes, matched: dict[str, int]) -> None:
    tree = PrefixTree(LARGE, 1)
    for prompt, replica in zip(sent, "xy", strict=True):
        tree.insert(prompt, replica)
    assert tree.match(asked) == matched
    check(tree)


def test_common_length_is_that_of_a_comparison_byte_by_byte() -> None:
    for length in range(1, 40):
        edge = bytes(range(1, length + 1))
        for differs_at in range(1, length + 1):
            tree = PrefixTree(LARGE, 1)
            tree.insert(b"--" + edge, "x")
            assert tree.match(b"--" + edge[:differs_at] + b"\0" * (length - differs_at)) == {"x": 2 + differs_at}
            assert tree.match(b"--" + edge[:differs_at]) == {"x": 2 + differs_at}


def test_repeated_part_of_a_known_prompt_takes_no_room() -> None:
    tree = PrefixTree(LARGE, 1)
    tree.insert(b"abcdef", "x")
    size = tree.stats().size_bytes
    tree.insert(b"abcdef", "x")
    tree.insert(b"abc", "x")
    assert tree.stats().size_bytes == size


def test_what_was_used_longest_ago_is_evicted_first() -> None:
    tree = PrefixTree(3 * (NODE_BYTES + 64))
    old, used, new, newest = (bytes([letter]) * 100 for letter in b"ouna")
    for prompt in (old, used, new):
        tree.insert(prompt, "x")
    tree.insert(used, "x")
    tree.insert(newest, "x")
    assert [bool(tree.match(prompt)) for prompt in (old, used, new, newest)] == [False, True, True, True]
    assert tree.stats().evictions == 1
    tree.insert(old, "x")
    assert [bool(tree.match(prompt)) for prompt in (old, used, new, newest)] == [True, True, False, True]


def test_shared_beginning_outlives_its_ends() -> None:
    tree = PrefixTree(20 * NODE_BYTES)
    system = b"s" * 1024
    for number in range(1000):
        tree.insert(system + b"%04d" % number * 16, "x")
    assert tree.stats().evictions > 900
    assert tree.match(system) == {"x": 1024}


def test_prompt_larger_than_the_bound_leaves_a_tree_within_it() -> None:
    tree = PrefixTree(NODE_BYTES, 1)
    tree.insert(b"a" * 100, "x")
    assert tree.match(b"a" * 100) == {}
    check(tree)


def test_parts_of_a_block_count_as_nothing() -> None:
    tree = PrefixTree(LARGE)
    tree.insert(b"a" * 63 + b"b" * 60, "x")
    assert tree.match(b"a" * 63 + b"c") == {}
    assert tree.match(b"a" * 63) == {}
    assert tree.match(b"a" * 63 + b"b" * 60) == {"x": 64}


def test_only_the_beginning_of_a_long_prompt_is_looked_at() -> None:
    tree = PrefixTree(LARGE)
    prompt = b"long " * 20_000
    tree.insert(prompt + b"one", "x")
    assert tree.match(prompt + b"other") == {"x": LOOKED_AT_BYTES}
    assert tree.stats().size_bytes <= LOOKED_AT_BYTES + NODE_BYTES


def test_no_path_has_more_nodes_than_a_prompt_has_blocks() -> None:
    """Else prompts that each turn off a byte later than the last would make every lookup of such a prompt slow."""
    tree = PrefixTree(LARGE)
    prompt = random.Random(1).randbytes(LOOKED_AT_BYTES)
    for length in range(0, LOOKED_AT_BYTES, 7):
        tree.insert(prompt[:length] + b"-" * 100, "x")
    depth, node = 0, tree._root
    while node.children:
        node, depth = max(node.children.values(), key=lambda child: len(child.children)), depth + 1
    assert 200 < depth <= LOOKED_AT_BYTES // BLOCK_BYTES
    tree.forget("x")
    assert tree.stats().size_bytes == 0


def test_forgotten_replica_leaves_the_others_theirs() -> None:
    tree = PrefixTree(LARGE, 1)
    tree.insert(b"abcdef", "x")
    tree.insert(b"abcxyz", "y")
    tree.forget("x")
    assert (tree.match(b"abcdef"), tree.match(b"abcxyz")) == ({"y": 3}, {"y": 6})
    check(tree)


def test_stats_count_what_was_found_and_what_was_sent_where_it_had_been() -> None:
    tree = PrefixTree(LARGE)
    system = b"s" * 128
    for number, replica in enumerate("xxyx"):
        prompt = system + b"%d" % number * 64
        tree.match(prompt)
        tree.insert(prompt, replica)
    stats = tree.stats()
    assert (stats.prefix_matches, stats.sharing_hits, stats.matched_bytes) == (3, 2, 256)
    assert (stats.active_prefixes, stats.avg_prefix_length) == (4, 192.0)
    assert (stats.evictions, stats.size_bytes) == (0, 5 * NODE_BYTES + 128 + 4 * 64)
