"""Routing through one and several exchanges, and the keys a sender adds in headers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leveret.broker.exchanges.base import Binding, Exchange, ExchangeType
from leveret.broker.exchanges.direct import DirectExchange
from leveret.broker.exchanges.fanout import FanoutExchange
from leveret.broker.exchanges.router import Hop, route, sender_selected_keys, without_bcc
from leveret.broker.resource import Resource
from leveret.protocol.errors import ChannelException
from leveret.protocol.field_table import Field, Table


@dataclass
class Record:
    name: Resource
    durable: bool = False


@dataclass
class Net:
    """A topology put together by hand: routing needs nothing else."""

    exchanges: dict[str, Exchange] = field(default_factory=dict)
    queues: dict[str, Record] = field(default_factory=dict)

    def exchange(
        self, name: str, matcher: ExchangeType | None = None, alternate: str | None = None
    ) -> Exchange:
        made = Exchange(Resource("/", "exchange", name), "direct", matcher or DirectExchange())
        made.alternate = alternate
        self.exchanges[name] = made
        return made

    def queue(self, name: str) -> None:
        self.queues[name] = Record(Resource("/", "queue", name))

    def bind(self, source: str, destination: Resource, key: str = "k") -> None:
        self.exchanges[source].matcher.add_binding(Binding.of(source, destination, key, {}))

    def routed(self, exchange: str, *keys: str) -> list[str]:
        found = route(self, self.exchanges[exchange], keys or ("k",), dict)
        return [record.name.name for record in found]


def queue(name: str) -> Resource:
    return Resource("/", "queue", name)


def exchange(name: str) -> Resource:
    return Resource("/", "exchange", name)


@pytest.fixture
def net() -> Net:
    made = Net()
    made.exchange("")
    for name in ("p", "q", "r"):
        made.queue(name)
    return made


def test_default_exchange_takes_keys_for_queue_names(net: Net) -> None:
    assert net.routed("", "q", "missing", "p", "q") == ["q", "p"]


def test_queue_comes_up_once(net: Net) -> None:
    net.exchange("x")
    net.bind("x", queue("q"), "a")
    net.bind("x", queue("q"), "b")
    assert net.routed("x", "a", "b") == ["q"]


def test_bindings_to_missing_things_are_passed_over(net: Net) -> None:
    net.exchange("x")
    net.bind("x", queue("gone"))
    net.bind("x", exchange("gone"))
    net.bind("x", queue("q"))
    assert net.routed("x") == ["q"]


def test_exchange_to_exchange(net: Net) -> None:
    net.exchange("x")
    net.exchange("y")
    net.bind("x", exchange("y"))
    net.bind("y", queue("q"))
    assert net.routed("x") == ["q"]
    assert net.routed("x", "other") == []


def test_several_paths_to_one_queue_make_one_copy(net: Net) -> None:
    net.exchange("x")
    for name in ("left", "right"):
        net.exchange(name)
        net.bind("x", exchange(name))
        net.bind(name, queue("q"))
    assert net.routed("x") == ["q"]


def test_cycle_ends(net: Net) -> None:
    net.exchange("x", FanoutExchange())
    net.exchange("y", FanoutExchange())
    net.bind("x", exchange("y"))
    net.bind("y", exchange("x"))
    net.bind("x", exchange("x"))
    net.bind("x", queue("p"))
    net.bind("y", queue("q"))
    assert net.routed("x") == ["p", "q"]


def test_alternate_gets_what_matched_nothing(net: Net) -> None:
    net.exchange("rest", FanoutExchange())
    net.bind("rest", queue("r"))
    net.exchange("x", alternate="rest")
    net.bind("x", queue("q"), "known")
    assert net.routed("x", "known") == ["q"]
    assert net.routed("x", "unknown") == ["r"]


def test_alternates_chain(net: Net) -> None:
    net.exchange("last", FanoutExchange())
    net.bind("last", queue("r"))
    net.exchange("middle", alternate="last")
    net.exchange("x", alternate="middle")
    assert net.routed("x") == ["r"]


def test_cycle_of_alternates_ends(net: Net) -> None:
    net.exchange("x", alternate="y")
    net.exchange("y", alternate="x")
    assert net.routed("x") == []


def test_missing_alternate_is_as_none(net: Net) -> None:
    net.exchange("x", alternate="nowhere")
    assert net.routed("x") == []


def test_default_exchange_as_alternate_leads_nowhere(net: Net) -> None:
    """RabbitMQ looks for bindings there, and the default exchange has none."""
    net.exchange("x", alternate="")
    assert net.routed("x", "q") == []


def test_match_that_leads_nowhere_is_a_match(net: Net) -> None:
    net.exchange("rest", FanoutExchange())
    net.bind("rest", queue("r"))
    net.exchange("x", alternate="rest")
    net.exchange("empty")
    net.bind("x", exchange("empty"))
    assert net.routed("x") == []


def test_alternate_of_an_exchange_on_the_way(net: Net) -> None:
    net.exchange("rest", FanoutExchange())
    net.bind("rest", queue("r"))
    net.exchange("x")
    net.exchange("y", alternate="rest")
    net.bind("x", exchange("y"))
    net.bind("x", queue("q"))
    assert net.routed("x") == ["q", "r"]


def test_trace_tells_every_hop(net: Net) -> None:
    net.exchange("rest", FanoutExchange())
    net.bind("rest", queue("r"))
    net.exchange("y", alternate="rest")
    net.exchange("x")
    net.bind("x", exchange("y"))
    hops: list[Hop] = []
    route(net, net.exchanges["x"], ("k",), dict, hops.append)
    told = [(hop.exchange.name.name, list(hop.matched), hop.alternate) for hop in hops]
    assert told == [
        ("x", [exchange("y")], None),
        ("y", [], "rest"),
        ("rest", [queue("r")], None),
    ]


def test_trace_of_the_default_exchange(net: Net) -> None:
    hops: list[Hop] = []
    route(net, net.exchanges[""], ("q", "missing"), dict, hops.append)
    assert [list(hop.matched) for hop in hops] == [[queue("q")]]


names_st = st.sampled_from("abcde")
edges_st = st.lists(st.tuples(names_st, st.booleans(), names_st), max_size=14, unique=True)


def reachable(
    start: str, edges: Sequence[tuple[str, bool, str]], alternates: dict[str, str]
) -> set[str]:
    """The same answer by search: queues seen from ``start`` over bindings and alternates."""
    seen, queues, waiting = set(), set(), [start]
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        ahead = [(to_queue, end) for source, to_queue, end in edges if source == at]
        queues |= {end for to_queue, end in ahead if to_queue}
        waiting += [end for to_queue, end in ahead if not to_queue]
        if not ahead and at in alternates:
            waiting.append(alternates[at])
    return queues


@given(edges_st, st.dictionaries(names_st, names_st))
def test_any_graph_is_walked_once(
    edges: list[tuple[str, bool, str]], alternates: dict[str, str]
) -> None:
    graph = Net()
    for name in "abcde":
        graph.exchange(name, FanoutExchange(), alternates.get(name))
        graph.queue(name)
    for source, to_queue, end in edges:
        graph.bind(source, queue(end) if to_queue else exchange(end))
    found = graph.routed("a")
    assert len(found) == len(set(found))
    assert set(found) == reachable("a", edges, alternates)


# --- CC and BCC ----------------------------------------------------------------------------------


def array(*items: Field) -> Field:
    return Field("A", list(items))


def test_no_further_keys() -> None:
    assert sender_selected_keys({"other": Field("I", 1)}) == ((), ())


def test_cc_and_bcc() -> None:
    headers: Table = {
        "BCC": array(Field("S", "hidden")),
        "CC": array(Field("S", "b"), Field("S", "c")),
    }
    assert sender_selected_keys(headers) == (("b", "c"), ("hidden",))


def test_items_that_are_not_strings_are_passed_over() -> None:
    headers = {"CC": array(Field("S", "b"), Field("I", 5), Field("x", b"c"))}
    assert sender_selected_keys(headers) == (("b",), ())


@pytest.mark.parametrize(
    ("name", "value", "type_name"),
    [
        pytest.param("CC", Field("S", "b"), "longstr", id="string"),
        pytest.param("BCC", Field("I", 3), "signedint", id="number"),
        pytest.param("CC", Field("V", None), "void", id="void"),
    ],
)
def test_anything_but_an_array_is_refused(name: str, value: Field, type_name: str) -> None:
    with pytest.raises(ChannelException) as raised:
        sender_selected_keys({name: value})
    assert raised.value.code == 406
    expected = f'invalid message: {{unacceptable_type_in_header,"{name}",{type_name}}}'
    assert raised.value.text == expected


def test_bcc_is_removed_and_the_rest_stays() -> None:
    headers: Table = {"BCC": array(Field("S", "b")), "CC": array(), "kept": Field("I", 1)}
    assert without_bcc(headers) == {"CC": array(), "kept": Field("I", 1)}
    assert "BCC" in headers


def test_emptied_header_table_stays() -> None:
    assert without_bcc({"BCC": array(Field("S", "b"))}) == {}
