"""Pools of several servers behind a gateway: each balancer spreads or sticks as it says, and counts stay exact."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from math import ceil
from typing import Any

import pytest

from routing.balance import FEW

from .conftest import CHAT, Client, Connection, serving, until
from .fault_answers import GOOD, Behaviour
from .fault_server import FaultServer, fault_server
from .tokens import JWT_SETTINGS, bearer, token

JWT = {"mode": "jwt", "jwt": JWT_SETTINGS}
PROBES = {"probe_every_s": 0.05, "probe_failures": 1}
STALLED = Behaviour(stalls_before_headers=True)


class Fleet:
    def __init__(self, client: Client, servers: Sequence[FaultServer]) -> None:
        self.client = client
        self.servers = servers

    @property
    def counts(self) -> list[int]:
        """Requests that each server has got."""
        return [len(server.requests) for server in self.servers]

    def take(self) -> list[int]:
        """The same, and begin to count anew."""
        counts = self.counts
        for server in self.servers:
            server.requests.clear()
        return counts

    async def place_of(self, body: dict[str, Any] | None = None, **headers: str) -> int:
        """Which server answers this."""
        self.take()
        options = {"headers": {name.replace("_", "-"): value for name, value in headers.items()}}
        assert (await self.client.post(body or CHAT, **options)).status_code == 200
        return self.take().index(1)

    async def hold(self, count: int, body: dict[str, Any] | None = None, **headers: str) -> list[Connection]:
        """Send requests one after the other that are not answered yet."""
        before = sum(self.counts)
        connections = []
        for number in range(1, count + 1):
            connections.append(await self.client.open(body or CHAT, headers=headers))
            await until(lambda number=number: sum(self.counts) == before + number)  # type: ignore[misc]
        return connections

    async def in_flight(self) -> list[int]:
        """As the page for operators tells."""
        page = await self.client.http.get("/v1/routing", headers=bearer(token(scope="routing:read")))
        (pool,) = page.json()["pools"]
        assert pool["admission"]["in_flight"] == sum(replica["in_flight"] for replica in pool["replicas"])
        in_flight = {replica["name"]: replica["in_flight"] for replica in pool["replicas"]}
        return [in_flight[server.url] for server in self.servers]


@asynccontextmanager
async def fleet(
    count: int, balance: str, behaviour: Behaviour = GOOD, auth: dict[str, Any] | None = None, **pool: Any
) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(fault_server(behaviour)) for _ in range(count)]
        settings = {
            "name": "fleet",
            "engine": "remote",
            "balance": balance,
            "remote": {"urls": [server.url for server in servers], **PROBES},
            **pool,
        }
        models = [{"name": "demo", "pool": "fleet"}]
        async with serving(pools=[settings], models=models, auth=auth or {"mode": "off"}) as client:
            yield Fleet(client, servers)


def chat(system: str, text: str) -> dict[str, Any]:
    return {**CHAT, "messages": [{"role": "system", "content": system}, {"role": "user", "content": text}]}


async def test_round_robin_asks_each_in_turn() -> None:
    async with fleet(3, "round_robin") as few:
        order = [await few.place_of({**CHAT, "stream": number % 2 == 0}) for number in range(12)]
        assert order[:3] * 4 == order
        assert set(order) == {0, 1, 2}


async def test_least_in_flight_goes_where_there_is_least_to_do() -> None:
    async with fleet(3, "least_in_flight", STALLED) as few:
        await few.hold(9)
        assert few.counts == [3, 3, 3]
        assert await few.in_flight() == [3, 3, 3]
        few.servers[1].gate.release(2)
        async with asyncio.timeout(5):
            while await few.in_flight() != [3, 1, 3]:
                await asyncio.sleep(0.01)
        await few.hold(2)
        assert few.counts == [3, 5, 3]


async def test_power_of_two_choices_leaves_a_slow_server_nearly_alone() -> None:
    async with fleet(3, "p2c_peak_ewma") as few:
        few.servers[2].behave(Behaviour(stall_before_headers_s=0.1))
        for _ in range(15):
            await asyncio.gather(*(few.client.post() for _ in range(6)))
        quick, other_quick, slow = few.counts
        assert quick + other_quick + slow == 90
        assert slow <= 15
        assert min(quick, other_quick) >= 15


CALLERS: dict[str, Any] = {
    "session": lambda number, other: {**bearer(token(sub=f"s{other}", tenant="t")), "x-session-id": f"c{number}"},
    "tenant": lambda number, other: {**bearer(token(sub=f"s{other}", tenant=f"t{number}")), "x-session-id": f"{other}"},
    "X-Group": lambda number, other: {**bearer(token(sub=f"s{other}")), "x-group": f"g{number}"},
}


@pytest.mark.parametrize("hash_by", CALLERS)
async def test_consistent_hash_keeps_together_what_it_goes_by(hash_by: str) -> None:
    async with fleet(3, "consistent_hash", auth=JWT, hash_by=hash_by) as few:
        places = [await few.place_of(**CALLERS[hash_by](number, 0)) for number in range(45)]
        assert places == [await few.place_of(**CALLERS[hash_by](number, 1)) for number in range(45)]
        assert min(Counter(places)[place] for place in range(3)) >= 3  # the servers have other names each time


async def test_consistent_hash_goes_by_the_subject_where_there_is_no_session() -> None:
    async with fleet(3, "consistent_hash", auth=JWT) as few:
        places = [await few.place_of(**bearer(token(sub=f"s{number % 15}"))) for number in range(30)]
        assert places[:15] == places[15:]
        assert len(set(places)) > 1


async def test_consistent_hash_spreads_those_without_the_header_that_it_goes_by() -> None:
    async with fleet(3, "consistent_hash", hash_by="X-Group") as few:
        for _ in range(12):
            await few.client.post()
        assert few.counts == [4, 4, 4]


async def test_session_is_not_moved_by_few_requests_in_flight() -> None:
    async with fleet(3, "consistent_hash", STALLED) as few:
        await few.hold(FEW, **{"x-session-id": "busy"})
        assert sorted(few.counts) == [0, 0, FEW]
        await few.hold(8, **{"x-session-id": "busy"})
        assert max(few.counts) <= max(FEW, ceil(1.25 * 12 / 3))


async def test_only_the_sessions_of_a_server_that_is_gone_move() -> None:
    async with fleet(3, "consistent_hash") as few:
        sessions = [{"x_session_id": f"s{number}"} for number in range(60)]
        before = [await few.place_of(**session) for session in sessions]
        await few.servers[0].stop()
        pool = few.client.gateway.routes.pools["fleet"].pool
        await until(lambda: sum(replica.is_available for replica in pool.replicas) == 2)
        after = [await few.place_of(**session) for session in sessions]
        assert 0 not in after
        assert {place for was, place in zip(before, after, strict=True) if was == 0} == {1, 2}
        assert all(place == was for was, place in zip(before, after, strict=True) if was != 0)


SYSTEMS = [f"You are number {number}. " * 60 for number in range(6)]


async def test_prefix_sends_what_begins_alike_to_one_server_and_its_figures_tell() -> None:
    async with fleet(3, "prefix") as few:
        homes = [await few.place_of(chat(system, "Hello")) for system in SYSTEMS]
        assert sorted(homes) == [0, 0, 1, 1, 2, 2]
        for number in range(4):
            for home, system in zip(homes, SYSTEMS, strict=True):
                assert await few.place_of(chat(system, f"And question {number}?") | {"stream": number % 2 == 0}) == home
        report = (await few.client.http.get("/v1/cache/stats")).json()["cache_manager"]["radix_tree"]
        assert report["prefix_matches"] == report["sharing_hits"] == 4 * len(SYSTEMS)
        assert report["active_prefixes"] >= len(SYSTEMS)
        assert report["avg_prefix_length"] > 1000
        assert report["memory_saved"] is None


async def test_prefix_that_all_share_does_not_overload_its_server() -> None:
    async with fleet(3, "prefix", STALLED) as few:
        together = [asyncio.create_task(few.client.post(chat(SYSTEMS[0], f"I am {number}."))) for number in range(60)]
        await until(lambda: sum(few.counts) == 60)
        assert max(few.counts) <= ceil(1.25 * 60 / 3)
        assert min(few.counts) > 0
        for server in few.servers:
            server.gate.open()
        assert {(await task).status_code for task in together} == {200}
        assert await few.in_flight() == [0, 0, 0]


async def test_pools_without_prefixes_have_no_figures_of_them() -> None:
    async with fleet(1, "round_robin") as few:
        report = (await few.client.http.get("/v1/cache/stats")).json()["cache_manager"]["radix_tree"]
        assert set(report.values()) == {None}


@pytest.mark.parametrize("balance", ["round_robin", "least_in_flight", "p2c_peak_ewma", "consistent_hash", "prefix"])
async def test_counts_in_flight_are_exact_when_callers_leave_and_servers_fail(balance: str) -> None:
    breaker = {"failures": 1000, "min_requests": 1000}  # not what this is about
    async with fleet(3, balance, STALLED, breaker=breaker) as few:
        waiting = [
            (await few.hold(1, {**CHAT, "stream": number % 2 == 0}, **{"x-session-id": f"s{number}"}))[0]
            for number in range(12)
        ]
        assert await few.in_flight() == few.counts
        for connection in waiting:
            connection.abort()
        await few.client.until_idle()
        assert await few.in_flight() == [0, 0, 0]
        await until(lambda: sum(len(server.aborted) for server in few.servers) == 12)
        # Some in the middle of their streams, some that are answered, some whose server fails.
        for server in few.servers:
            server.behave(Behaviour(stall_after_events=2))
        streams = await few.hold(6, {**CHAT, "stream": True})
        for connection in streams:
            await connection.reader.readuntil(b'"One"')
            connection.abort()
        await few.client.until_idle()
        for behaviour in (GOOD, Behaviour(status=500), Behaviour(cut_at_byte=20), Behaviour(error_at=2)):
            for server in few.servers:
                server.behave(behaviour)
            for stream in (False, True):
                await asyncio.gather(*(few.client.post({**CHAT, "stream": stream}) for _ in range(4)))
        await few.client.until_idle()
        assert await few.in_flight() == [0, 0, 0]
        metrics = (await few.client.http.get("/metrics")).text
        for server in few.servers:
            assert f'headrace_replica_in_flight{{pool="fleet",replica="{server.url}"}} 0.0' in metrics
        assert 'headrace_admission_in_flight{pool="fleet"} 0.0' in metrics
