"""Flights by themselves: who leads, who follows, who may leave."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cache.errors import FlightAborted, StreamGone
from cache.flight import Flight, Flights, LogEvent, Seat, seated

from .conftest import until

KEY, OTHER = b"k", b"o"
ANN, BOB = b"ann", b"bob"


class Work:
    """Says what it is told to; counts how often it was begun, ended, and cancelled."""

    def __init__(self) -> None:
        self.begun = self.cancelled = 0
        self.steps: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()

    async def __call__(self, flight: Flight[str]) -> str:
        self.begun += 1
        try:
            while (step := await self.steps.get()) is not None:
                if isinstance(step, Exception):
                    raise step
                flight.append(step)
                flight.tell()
            return "result"
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def say(self, *steps: bytes | Exception | None) -> None:
        for step in steps:
            self.steps.put_nowait(step)


@asynccontextmanager
async def flying(**options: float) -> AsyncIterator[tuple[Flights[str], Work]]:
    flights = Flights[str](**{"resume_s": 60.0, **options})
    task = asyncio.create_task(flights.run())
    await asyncio.sleep(0)
    try:
        yield flights, Work()
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert flights.stats().in_flight == 0


async def next_events(seat: Seat[str]) -> list[LogEvent]:
    taken: list[LogEvent] = []

    def take(events: list[LogEvent]) -> bool:
        taken.extend(events)
        return False

    await seat.feed(take)
    return taken


async def read(seat: Seat[str]) -> list[bytes]:
    data: list[bytes] = []

    def take(events: list[LogEvent]) -> bool:
        data.extend(event.data for event in events)
        return True

    with seated(seat):
        await seat.feed(take)
    return data


async def test_those_who_come_meanwhile_follow_and_get_all_from_the_first() -> None:
    async with flying() as (flights, work):
        leader = flights.join(KEY, work, True)
        work.say(b"1", b"2")
        await until(lambda: len(leader.flight.log) == 2)
        followers = [flights.join(KEY, work, True) for _ in range(99)]
        readers = [asyncio.create_task(read(seat)) for seat in (leader, *followers)]
        await asyncio.sleep(0.01)
        work.say(b"3", None)
        assert await asyncio.gather(*readers) == [[b"1", b"2", b"3"]] * 100
        assert work.begun == 1
        assert [seat.leads for seat in (leader, *followers)] == [True] + [False] * 99
        assert await leader.result() == await followers[0].result() == "result"
        flights.join(KEY, work, True).leave()
        await asyncio.sleep(0)
        assert flights.stats().flights == 2  # a finished one is not joined


async def test_others_do_not_share() -> None:
    async with flying() as (flights, work):
        seats = [
            flights.join(KEY, work, True),
            flights.join(OTHER, work, True),
            flights.join(KEY, work, False),
            flights.join(KEY, work, True, anew=True),
        ]
        assert all(seat.leads for seat in seats)
        assert not flights.join(KEY, work, True).leads
        assert len({seat.flight for seat in seats}) == 4


async def test_flight_goes_on_until_the_last_one_leaves() -> None:
    async with flying() as (flights, work):
        seats = [flights.join(KEY, work, True) for _ in range(3)]
        work.say(b"1")
        await next_events(seats[0])
        for seat in seats[:2]:  # the leader too
            seat.leave()
            seat.leave()
        await asyncio.sleep(0.01)
        assert (work.begun, work.cancelled) == (1, 0)
        seats[2].leave()
        assert not flights.is_open(KEY)  # who comes now leads anew
        await until(lambda: work.cancelled == 1)


async def test_failure_is_everybodys_and_the_next_starts_anew() -> None:
    async with flying() as (flights, work):
        seats = [flights.join(KEY, work, True) for _ in range(5)]
        work.say(b"1", ValueError("broken"))
        for seat in seats:
            with pytest.raises(ValueError, match="broken"):
                await read(seat)
            with pytest.raises(ValueError, match="broken"):
                await seat.result()
        again = flights.join(KEY, work, True)
        work.say(b"2", None)
        assert (again.leads, await read(again)) == (True, [b"2"])


async def test_reader_cancelled_at_any_step_leaves_its_seat() -> None:
    async with flying() as (flights, work):
        stays = flights.join(KEY, work, True)
        for _ in range(3):
            reader = asyncio.create_task(read(flights.join(KEY, work, True)))
            await asyncio.sleep(0)
            work.say(b"x")
            await asyncio.sleep(0.01)
            reader.cancel()
            await asyncio.wait([reader])
        assert list(stays.flight.seats) == [stays]
        work.say(None)
        assert await read(stays) == [b"x"] * 3


async def test_end_of_the_gateway_ends_every_flight() -> None:
    async with flying() as (flights, work):
        seat = flights.join(KEY, work, True)
        reader = asyncio.create_task(read(seat))
        await asyncio.sleep(0.01)
    with pytest.raises(FlightAborted):
        await reader
    assert work.cancelled == 1


async def test_bill_is_paid_by_the_longest_waiting_once() -> None:
    async with flying() as (flights, work):
        first, second, third = (flights.join(KEY, work, True) for _ in range(3))
        work.say(b"1")
        await next_events(first)
        spent = 10
        first.flight.cost = lambda: spent
        assert [seat.pays for seat in (first, second, third)] == [True, False, False]
        assert first.flight.bill() == 10
        first.leave()
        spent = 25
        assert [seat.pays for seat in (second, third)] == [True, False]
        assert second.flight.bill() == 15
        work.say(None)
        assert await third.result() == "result"
        assert third.flight.bill() == 0


# Reading on


def after(events: list[LogEvent], number: int) -> bytes:
    return events[number].id


async def test_owner_reads_on_live_or_when_it_is_over() -> None:
    async with flying() as (flights, work):
        seat = flights.join(KEY, work, True)
        other = flights.join(KEY, work, True)
        flights.admit(seat, ANN)
        work.say(b"1", b"2")
        await until(lambda: len(seat.flight.log) == 2)
        events = await next_events(seat)
        seat.leave()
        resumed = await flights.resume(KEY, events[0].id, ANN, None)
        reader = asyncio.create_task(read(resumed))
        work.say(b"3", None)
        assert await reader == [b"2", b"3"]
        other.leave()
        late = await flights.resume(KEY, events[1].id, ANN, None)
        assert await read(late) == [b"3"]
        assert work.begun == 1


async def test_nobody_else_reads_on() -> None:
    async with flying() as (flights, work):
        seat = flights.join(KEY, work, True)
        flights.admit(seat, ANN)
        work.say(b"1", None)
        events = await next_events(seat)
        for key, event_id, owner in (
            (KEY, events[0].id, BOB),
            (OTHER, events[0].id, ANN),
            (KEY, b"rubbish", ANN),
            (KEY, b"", ANN),
            (KEY, events[0].id.partition(b".")[0] + b".99", ANN),
        ):
            with pytest.raises(StreamGone):
                await flights.resume(key, event_id, owner, None)


async def test_old_streams_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache.flight.SWEEP_S", 0.02)
    async with flying(resume_s=0.1) as (flights, work):
        seat = flights.join(KEY, work, True)
        flights.admit(seat, ANN)
        work.say(b"1", None)
        events = await next_events(seat)
        await seat.result()
        (await flights.resume(KEY, events[0].id, ANN, None)).leave()
        await until(lambda: flights.stats().kept == 0)
        with pytest.raises(StreamGone):
            await flights.resume(KEY, events[0].id, ANN, None)


async def test_kept_logs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache.flight.KEPT_BYTES", 100_000)
    async with flying() as (flights, work):
        for number in range(100):
            seat = flights.join(b"%d" % number, work, True)
            flights.admit(seat, ANN)
            work.say(b"x" * 5000, None)
            await read(seat)
        await until(lambda: flights.stats().in_flight == 0)
        assert 10 <= flights.stats().kept <= 20


async def test_aborted_flight_goes_on_where_the_same_answer_can_be_had_again() -> None:
    async with flying() as (flights, work):
        seat = flights.join(KEY, work, True)
        flights.admit(seat, ANN)
        work.say(b"1", b"2")
        await until(lambda: len(seat.flight.log) == 2)
        events = await next_events(seat)
        seat.leave()
        await until(lambda: work.cancelled == 1)
        again = Work()
        resumed = await flights.resume(KEY, events[0].id, ANN, again)
        again.say(b"2", b"3", None)  # the log begins with what was read: `1`
        assert await read(resumed) == [b"2", b"3"]
        assert (again.begun, [event.data for event in resumed.flight.log]) == (1, [b"1", b"2", b"3"])


async def test_flight_lingers_for_one_who_lost_the_connection() -> None:
    async with flying(linger_s=0.2) as (flights, work):
        seat = flights.join(KEY, work, True)
        flights.admit(seat, ANN)
        work.say(b"1")
        events = await next_events(seat)
        seat.leave()
        await asyncio.sleep(0.05)
        resumed = await flights.resume(KEY, events[0].id, ANN, None)
        await asyncio.sleep(0.3)
        assert work.cancelled == 0
        work.say(b"2", None)
        assert await read(resumed) == [b"2"]
        lonely = flights.join(KEY, work, True)
        await asyncio.sleep(0.01)
        lonely.leave()
        await until(lambda: work.cancelled == 1)
