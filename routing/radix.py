"""Which replica has seen which beginning of a prompt: a radix tree over bytes.

As the tree of RadixAttention (Zheng et al., SGLang: Efficient Execution of Structured Language Model Programs, 2023),
which an engine keeps over its KV cache; this one, in front of several, is a guess of what each has there. It compares
by blocks, as that does by pages: an engine shares no less, and no path has more nodes than a prompt has blocks.
"""

from collections import OrderedDict
from dataclasses import dataclass

LOOKED_AT_BYTES = 16 * 1024  # of a prompt; where two agree that far, the rest does not matter for the choice
BLOCK_BYTES = 64  # about a block of 16 tokens, the least that vLLM shares
NODE_BYTES = 800  # what a node costs besides its edge: itself, its two collections, its places in two others


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """Since the start: `prefix_matches` (lookups that found something), `sharing_hits` (prompts that were sent where
    their beginning had been), `matched_bytes` (of these beginnings), `evictions` (of nodes). Now: `active_prefixes`,
    their average length in bytes, and what the tree takes of its bound."""

    prefix_matches: int
    sharing_hits: int
    active_prefixes: int
    avg_prefix_length: float
    matched_bytes: int
    evictions: int
    size_bytes: int


class _Node:
    """`edge` leads here from the parent, and ends `depth` bytes from the root. `replicas` were sent all that; those of
    a child are among them."""

    __slots__ = ("children", "depth", "edge", "parent", "replicas")

    def __init__(self, edge: bytes, depth: int, parent: "_Node | None", replicas: set[str]) -> None:
        self.edge = edge
        self.depth = depth
        self.parent = parent
        self.replicas = replicas
        self.children: dict[bytes, _Node] = {}  # by the first blocks of their edges


class PrefixTree:
    """Never takes more than about `max_bytes`: the prompts that were sent longest ago are forgotten. Only whole blocks
    of prompts count."""

    def __init__(self, max_bytes: int = 16 * 1024 * 1024, block_bytes: int = BLOCK_BYTES) -> None:
        self._max_bytes = max_bytes
        self._block = block_bytes
        self._root = _Node(b"", 0, None, set())
        # Mutable state. Nodes stand in the order of their last use, each after all of its children: the first one is
        # a leaf, and the one to evict.
        self._nodes: OrderedDict[_Node, None] = OrderedDict()
        self._size_bytes = 0
        self._prefix_matches = 0
        self._sharing_hits = 0
        self._matched_bytes = 0
        self._evictions = 0

    def match(self, prefix: bytes) -> dict[str, int]:
        """How many bytes of it, in whole blocks, each replica was sent before; those with none are left out."""
        prefix = self._whole_blocks(prefix)
        matched: dict[str, int] = {}
        node, depth = self._root, 0
        while depth == node.depth and depth < len(prefix):
            child = node.children.get(prefix[depth : depth + self._block])
            if child is None:
                break
            node, depth = child, depth + self._common(child.edge, prefix, depth)
            for replica in node.replicas:
                matched[replica] = depth
        self._prefix_matches += bool(matched)
        return matched

    def insert(self, prefix: bytes, replica: str) -> None:
        """Note that it is sent there."""
        prefix = self._whole_blocks(prefix)
        node, depth, known = self._root, 0, 0
        while depth < len(prefix):
            child = node.children.get(prefix[depth : depth + self._block])
            if child is None:
                child = self._add(node, prefix[depth:], replica)
                depth = child.depth
            else:
                common = self._common(child.edge, prefix, depth)
                depth += common
                if replica in child.replicas:
                    known = depth
                if common < len(child.edge) and not (depth == len(prefix) == known):
                    child = self._split(child, common)
                child.replicas.add(replica)
            node = child
        self._touch(node)
        self._sharing_hits += known > 0
        self._matched_bytes += known
        self._evict()

    def forget(self, replica: str) -> None:
        """It is gone, or has lost its cache."""
        for node in list(self._nodes):  # children first
            node.replicas.discard(replica)
            if not node.replicas:
                self._remove(node)

    def stats(self) -> PrefixStats:
        lengths = [node.depth for node in self._nodes if not node.children]
        return PrefixStats(
            prefix_matches=self._prefix_matches,
            sharing_hits=self._sharing_hits,
            active_prefixes=len(lengths),
            avg_prefix_length=sum(lengths) / len(lengths) if lengths else 0.0,
            matched_bytes=self._matched_bytes,
            evictions=self._evictions,
            size_bytes=self._size_bytes,
        )

    def _add(self, parent: _Node, edge: bytes, replica: str) -> _Node:
        node = _Node(edge, parent.depth + len(edge), parent, {replica})
        parent.children[edge[: self._block]] = node
        self._nodes[node] = None
        self._size_bytes += NODE_BYTES + len(edge)
        return node

    def _split(self, node: _Node, length: int) -> _Node:
        """Put a new node after so many bytes of the node's edge. It is to be touched next, its child need not be."""
        parent = node.parent
        assert parent is not None  # the root has no edge
        upper = _Node(node.edge[:length], parent.depth + length, parent, set(node.replicas))
        parent.children[upper.edge[: self._block]] = upper
        node.edge, node.parent = node.edge[length:], upper
        upper.children[node.edge[: self._block]] = node
        self._nodes[upper] = None
        self._size_bytes += NODE_BYTES
        return upper

    def _touch(self, node: _Node) -> None:
        while node.parent is not None:
            self._nodes.move_to_end(node)
            node = node.parent

    def _evict(self) -> None:
        while self._size_bytes > self._max_bytes:
            self._remove(next(iter(self._nodes)))
            self._evictions += 1

    def _remove(self, leaf: _Node) -> None:
        assert leaf.parent is not None
        assert not leaf.children
        del leaf.parent.children[leaf.edge[: self._block]]
        del self._nodes[leaf]
        self._size_bytes -= NODE_BYTES + len(leaf.edge)

    def _whole_blocks(self, prefix: bytes) -> bytes:
        return prefix[: min(len(prefix), LOOKED_AT_BYTES) // self._block * self._block]

    def _common(self, edge: bytes, prefix: bytes, start: int) -> int:
        """How many bytes of the edge the prefix goes on with at `start`. By halves: few comparisons, each of which
        runs in C."""
        if prefix.startswith(edge, start):
            return len(edge)
        block = self._block
        low, high = 1, min(len(edge), len(prefix) - start) // block  # the first block has led here
        while low < high:
            middle = (low + high + 1) // 2
            if prefix.startswith(edge[low * block : middle * block], start + low * block):
                low = middle
            else:
                high = middle - 1
        return low * block
