"""The topic exchange: patterns of words, with ``*`` for one word and ``#`` for any number.

Patterns form a trie, one level per word. Matching walks the key once with the set of nodes
that the words so far can lead to, so its cost is bounded by words times nodes, however many
``#`` a pattern has; a pattern is never tried twice.

Words lie between dots: ``a..b`` has an empty one in the middle, ``.`` two. The empty key
has no words at all. Wildcards count as whole words of a pattern only: ``*`` in a
routing key is a letter like any other, so they are kept apart from the literal words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from leveret.broker.exchanges.base import Binding, Destinations, ExchangeType, Headers
from leveret.broker.resource import Resource


class _Node:
    """What may follow one beginning of a pattern."""

    __slots__ = ("destinations", "is_hash", "literals", "many", "one")

    def __init__(self, *, is_hash: bool = False) -> None:
        # This node was reached through '#': further words may lead back to it.
        self.is_hash = is_hash
        self.literals: dict[str, _Node] = {}
        self.one: _Node | None = None  # behind '*'
        self.many: _Node | None = None  # behind '#'
        # Bound to the pattern that ends here.
        self.destinations = Destinations()

    def is_empty(self) -> bool:
        return not (self.destinations or self.literals or self.one or self.many)

    def child(self, word: str) -> _Node | None:
        if word == "*":
            return self.one
        if word == "#":
            return self.many
        return self.literals.get(word)

    def make_child(self, word: str) -> _Node:
        if word == "*":
            self.one = node = _Node()
        elif word == "#":
            self.many = node = _Node(is_hash=True)
        else:
            self.literals[word] = node = _Node()
        return node

    def drop_child(self, word: str) -> None:
        if word == "*":
            self.one = None
        elif word == "#":
            self.many = None
        else:
            del self.literals[word]


class TopicExchange(ExchangeType):
    def __init__(self) -> None:
        # No node below the root is empty.
        self._root = _Node()

    def add_binding(self, binding: Binding) -> None:
        node = self._root
        for word in words_of(binding.key):
            node = node.child(word) or node.make_child(word)
        node.destinations.add(binding.destination)

    def remove_binding(self, binding: Binding) -> None:
        words = words_of(binding.key)
        path = [self._root]
        for word in words:
            node = path[-1].child(word)
            if node is None:
                raise KeyError(binding.key)
            path.append(node)
        path[-1].destinations.remove(binding.destination)
        for parent, word in zip(reversed(path[:-1]), reversed(words), strict=True):
            child = parent.child(word)
            if child is None or not child.is_empty():
                break
            parent.drop_child(word)

    def route(self, keys: Sequence[str], headers: Headers) -> Iterable[Resource]:
        return [
            where
            for key in keys
            for node in self._match(words_of(key))
            for where in node.destinations
        ]

    def info(self) -> dict[str, object]:
        nodes = 0
        waiting = [self._root]
        while waiting:
            node = waiting.pop()
            nodes += 1
            waiting += node.literals.values()
            waiting += [child for child in (node.one, node.many) if child is not None]
        return {"trie_nodes": nodes}

    def _match(self, words: Sequence[str]) -> Iterable[_Node]:
        """The nodes whose whole pattern matches all the words."""
        active: dict[_Node, None] = {}
        _enter(self._root, active)
        for word in words:
            after: dict[_Node, None] = {}
            for node in active:
                if node.is_hash:
                    _enter(node, after)
                literal = node.literals.get(word)
                if literal is not None:
                    _enter(literal, after)
                if node.one is not None:
                    _enter(node.one, after)
            if not after:
                return ()
            active = after
        return active


def words_of(key: str) -> list[str]:
    return key.split(".") if key else []


def _enter(node: _Node, active: dict[_Node, None]) -> None:
    """Add a node and what follows it through '#', which may stand for no word at all."""
    while node not in active:
        active[node] = None
        if node.many is None:
            return
        node = node.many
