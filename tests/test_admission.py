"""Admission by itself: who gets in, who waits, who is next, who is refused."""

import asyncio
import random
from collections import Counter

import pytest

from routing.admission import Admission, Overloaded

ANN, BOB, CAT = "ann", "bob", "cat"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Request:
    """One request that holds its slot until it is told to leave."""

    def __init__(self, crowd: "Crowd", name: str, priority: int, tenant: str, size_bytes: int) -> None:
        self.name = name
        self.tenant = tenant
        self.is_in = False
        self._done = asyncio.Event()
        self.task = asyncio.create_task(self._run(crowd, priority, size_bytes))

    async def _run(self, crowd: "Crowd", priority: int, size_bytes: int) -> None:
        async with crowd.admission.slot(priority, self.tenant, size_bytes):
            crowd.entered.append(self)
            self.is_in = True
            try:
                await self._done.wait()
            finally:
                self.is_in = False

    async def leave(self) -> None:
        self._done.set()
        await self.task
        await settle()

    async def cancel(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])

    async def refusal(self) -> Overloaded:
        with pytest.raises(Overloaded) as caught:
            await asyncio.wait_for(self.task, 1)
        return caught.value


class Crowd:
    """Requests before one admission; `entered` has them in the order in which they got in."""

    def __init__(
        self,
        max_in_flight: int | None = 1,
        max_queue: int = 100_000,
        max_queue_bytes: int = 1_000_000,
        queue_timeout_s: float = 60.0,
    ) -> None:
        self.clock = Clock()
        self.admission = Admission(max_in_flight, max_queue, max_queue_bytes, queue_timeout_s, self.clock)
        self.entered: list[Request] = []

    async def come(
        self, name: str = "", priority: int = 0, tenant: str = ANN, size_bytes: int = 1, count: int = 1
    ) -> Request:
        """Let requests come, one after the other, as far as they get; the last one is returned."""
        for _ in range(count):
            request = Request(self, name, priority, tenant, size_bytes)
        await settle()
        return request

    async def serve_all(self) -> list[str]:
        """Let each leave that gets in; the names of those who got in, in their order."""
        for request in self.entered:  # which grows meanwhile
            if request.is_in:
                await request.leave()
        return [request.name for request in self.entered]

    def is_empty(self) -> bool:
        stats = self.admission.stats()
        counts = (stats.in_flight, stats.waiting, stats.waiting_bytes)
        return counts == (0, 0, 0) and not self.admission._held and not self.admission._levels


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


# Slots


async def test_no_more_than_the_bound_are_in_flight() -> None:
    crowd = Crowd(max_in_flight=3)
    await crowd.come(count=10)
    assert (crowd.admission.stats().in_flight, crowd.admission.stats().waiting) == (3, 7)
    assert len(crowd.entered) == 3
    await crowd.entered[1].leave()
    assert (crowd.admission.stats().in_flight, crowd.admission.stats().waiting) == (3, 6)
    await crowd.serve_all()
    assert crowd.admission.stats().admitted == len(crowd.entered) == 10
    assert crowd.is_empty()


async def test_free_slot_is_taken_without_waiting() -> None:
    admission = Crowd(max_in_flight=2).admission
    assert admission.try_enter(ANN)
    with pytest.raises(StopIteration):  # to its end in one step
        admission.enter(0, BOB, 1).send(None)
    assert not admission.try_enter(ANN)
    admission.leave(BOB)
    assert admission.try_enter(CAT)


async def test_without_a_bound_nobody_waits() -> None:
    crowd = Crowd(max_in_flight=None, max_queue=0)
    await crowd.come(count=1000)
    assert crowd.admission.stats().in_flight == 1000
    await crowd.serve_all()
    assert crowd.is_empty()


async def test_nobody_overtakes_those_who_were_given_the_slot_but_are_not_awake_yet() -> None:
    crowd = Crowd()
    assert crowd.admission.try_enter(ANN)
    await crowd.come("waits")
    crowd.admission.leave(ANN)
    assert not crowd.admission.try_enter(BOB)
    await settle()
    assert await crowd.serve_all() == ["waits"]


async def test_slot_is_given_back_when_its_block_fails() -> None:
    admission = Admission(1, 0, 0, 1.0)
    with pytest.raises(ValueError, match="broken"):
        async with admission.slot(0, ANN, 1):
            raise ValueError("broken")
    assert admission.stats().in_flight == 0


async def test_giving_back_what_was_not_taken_is_an_error_and_changes_nothing() -> None:
    admission = Admission(1, 0, 0, 1.0)
    assert admission.try_enter(ANN)
    with pytest.raises(KeyError):
        admission.leave(BOB)
    assert admission.stats().in_flight == 1


# Who is next


async def test_higher_priority_goes_first_and_the_first_come_first_within_it() -> None:
    crowd = Crowd()
    await crowd.come("holds")
    for name, priority in (("b1", 0), ("c", -5), ("b2", 0), ("a1", 7), ("a2", 7)):
        await crowd.come(name, priority)
    await crowd.entered[0].leave()
    await crowd.come("late", 9)
    assert await crowd.serve_all() == ["holds", "a1", "late", "a2", "b1", "b2", "c"]


async def test_one_waiting_is_not_starved_by_a_thousand_of_another_tenant() -> None:
    crowd = Crowd()
    await crowd.come("holds", tenant=CAT)
    await crowd.come("ann", tenant=ANN, count=1000)
    await crowd.come("bob", tenant=BOB)
    for _ in range(2):
        await crowd.entered[-1].leave()
    assert [request.name for request in crowd.entered] == ["holds", "ann", "bob"]


async def test_tenants_take_turns_whatever_they_have_waiting() -> None:
    crowd = Crowd()
    await crowd.come("holds", tenant="dan")
    for tenant, count in ((ANN, 5), (BOB, 3), (CAT, 1)):
        await crowd.come(tenant, tenant=tenant, count=count)
    names = await crowd.serve_all()
    assert names == ["holds", ANN, BOB, CAT, ANN, BOB, ANN, BOB, ANN, ANN]


async def test_next_slot_goes_to_the_tenant_that_holds_the_fewest() -> None:
    crowd = Crowd(max_in_flight=4)
    await crowd.come(ANN, tenant=ANN, count=3)
    await crowd.come(BOB, tenant=BOB)
    await crowd.come(ANN, tenant=ANN, count=5)
    await crowd.come(BOB, tenant=BOB, count=5)
    await crowd.entered[0].leave()  # Ann holds two, Bob one
    assert crowd.entered[-1].tenant == BOB
    await crowd.come(CAT, tenant=CAT)
    await crowd.entered[3].leave()  # Ann holds two, Bob one, Cat none
    assert crowd.entered[-1].tenant == CAT
    await crowd.serve_all()
    assert crowd.is_empty()


async def test_higher_priority_counts_more_than_a_fair_share() -> None:
    crowd = Crowd(max_in_flight=2)
    await crowd.come(tenant=ANN, count=2)
    await crowd.come("low", 0, tenant=BOB)
    await crowd.come("high", 1, tenant=ANN)
    await crowd.entered[0].leave()
    assert crowd.entered[-1].name == "high"


async def test_cancelled_waiter_does_not_cost_its_tenant_the_turn() -> None:
    crowd = Crowd()
    await crowd.come("holds", tenant=CAT)
    cancelled = await crowd.come("cancelled", tenant=ANN)
    await crowd.come("ann", tenant=ANN)
    await crowd.come("bob", tenant=BOB)
    cancelled.task.cancel()
    assert await crowd.serve_all() == ["holds", "ann", "bob"]


# Refusals


async def test_full_queue_refuses_at_once() -> None:
    crowd = Crowd(max_queue=2)
    await crowd.come(count=3)
    with pytest.raises(Overloaded) as caught:
        crowd.admission.enter(0, ANN, 1).send(None)
    assert caught.value.cause == "queue_full"
    assert crowd.admission.stats().refused == Counter(queue_full=1)
    await crowd.serve_all()
    assert len(crowd.entered) == 3
    assert crowd.is_empty()


async def test_without_a_queue_nobody_waits() -> None:
    crowd = Crowd(max_queue=0)
    await crowd.come()
    assert (await (await crowd.come(priority=9)).refusal()).cause == "queue_full"


async def test_queue_is_bounded_in_bytes() -> None:
    crowd = Crowd(max_queue_bytes=100)
    await crowd.come()
    await crowd.come(size_bytes=60)
    assert (await (await crowd.come(size_bytes=41)).refusal()).cause == "queue_full"
    await crowd.come(size_bytes=40)
    assert crowd.admission.stats().waiting_bytes == 100
    await crowd.entered[0].leave()
    assert crowd.admission.stats().waiting_bytes == 40


async def test_request_larger_than_the_queue_is_refused_only_when_it_would_wait() -> None:
    crowd = Crowd(max_queue_bytes=100)
    large = await crowd.come(size_bytes=101)
    assert large.is_in
    small = await crowd.come(priority=0)
    assert (await (await crowd.come(priority=9, size_bytes=101)).refusal()).cause == "queue_full"
    assert not small.task.done()  # nobody is shed in vain


async def test_newcomer_of_higher_priority_sheds_the_newest_of_the_longest_queue_at_the_lowest() -> None:
    crowd = Crowd(max_queue=5)
    await crowd.come(priority=9)
    requests = {}
    for name, priority, tenant in (
        ("low ann 1", 0, ANN),
        ("low ann 2", 0, ANN),
        ("low bob", 0, BOB),
        ("middle 1", 1, ANN),
        ("middle 2", 1, ANN),
    ):
        requests[name] = await crowd.come(name, priority, tenant)
    await crowd.come("high 1", 2)
    assert (await requests.pop("low ann 2").refusal()).cause == "shed"
    await crowd.come("high 2", 2)
    assert (await requests.pop("low bob").refusal()).cause == "shed"  # of two with one each that whose turn is last
    await crowd.come("middle 3", 1)
    assert (await requests.pop("low ann 1").refusal()).cause == "shed"
    assert (await (await crowd.come("middle 4", 1)).refusal()).cause == "queue_full"  # none that is lower is left
    assert crowd.admission.stats().refused == Counter(shed=3, queue_full=1)
    assert await crowd.serve_all() == ["", "high 1", "high 2", "middle 1", "middle 2", "middle 3"]


async def test_large_newcomer_sheds_as_many_as_it_needs_and_none_if_that_would_not_do() -> None:
    crowd = Crowd(max_queue_bytes=100)
    await crowd.come()
    low = [await crowd.come(priority=0, size_bytes=20) for _ in range(4)]
    await crowd.come(priority=1, size_bytes=20)
    assert (await (await crowd.come(priority=1, size_bytes=81)).refusal()).cause == "queue_full"
    await crowd.come(priority=1, size_bytes=50)
    assert [request.task.done() for request in low] == [False, True, True, True]
    assert crowd.admission.stats().waiting_bytes == 90
    for request in low[1:]:
        assert (await request.refusal()).cause == "shed"


async def test_wait_has_an_end() -> None:
    crowd = Crowd(queue_timeout_s=0.01)
    await crowd.come()
    assert (await (await crowd.come()).refusal()).cause == "queue_timeout"
    assert crowd.admission.stats().refused == Counter(queue_timeout=1)
    await crowd.entered[0].leave()
    assert crowd.is_empty()


async def test_slot_in_time_ends_the_timeout() -> None:
    crowd = Crowd(queue_timeout_s=0.1)
    await crowd.come()
    waits = await crowd.come()
    await crowd.entered[0].leave()
    await asyncio.sleep(0.15)
    assert waits.is_in


# Retry-After


async def retry_after_s(crowd: Crowd, priority: int = 0) -> float:
    return (await (await crowd.come(priority=priority)).refusal()).retry_after_s


async def drain(crowd: Crowd, every_s: float, count: int) -> None:
    """Let so many of those in flight leave, and as many come."""
    for _ in range(count):
        crowd.clock.now += every_s
        leaves = next(request for request in crowd.entered if request.is_in)
        await leaves.leave()
        await crowd.come()


async def test_unmeasured_drain_is_guessed() -> None:
    crowd = Crowd(max_queue=0)
    await crowd.come()
    crowd.clock.now += 10
    assert await retry_after_s(crowd) == 1.0
    assert crowd.admission.stats().drain_per_s is None


async def test_retry_after_is_what_waits_ahead_by_the_drain_rate() -> None:
    crowd = Crowd(max_in_flight=2, max_queue=9)
    await crowd.come(count=11)
    await drain(crowd, every_s=0.5, count=1)
    assert crowd.admission.stats().drain_per_s == pytest.approx(2)  # right from the first
    await drain(crowd, every_s=0.5, count=200)
    assert crowd.admission.stats().drain_per_s == pytest.approx(2)
    assert await retry_after_s(crowd) == pytest.approx(5)
    await drain(crowd, every_s=3.0, count=100)  # a rate of the past is forgotten
    assert await retry_after_s(crowd) == pytest.approx(30, rel=0.01)


async def test_retry_after_counts_only_those_who_go_first() -> None:
    crowd = Crowd(max_queue=6)
    await crowd.come(count=2)
    await drain(crowd, every_s=2.0, count=3)
    lowest = await crowd.come(priority=-1)
    await crowd.come(priority=1, count=3)
    last = await crowd.come(priority=-2)
    await crowd.come(priority=1)
    assert (await last.refusal()).retry_after_s == pytest.approx((5 + 1) * 2)
    await crowd.come(priority=1)
    assert (await lowest.refusal()).retry_after_s == pytest.approx((5 + 1) * 2)
    assert await retry_after_s(crowd, priority=0) == pytest.approx((6 + 1) * 2)


async def test_retry_after_a_timeout_counts_only_those_who_go_first() -> None:
    crowd = Crowd()
    await crowd.come(count=2)
    await drain(crowd, every_s=2.0, count=3)
    high = await crowd.come(priority=2)
    crowd.clock.now += 2
    await crowd.come(priority=1, count=3)
    await crowd.come(priority=3)
    crowd.admission.resize(1, 10, 100, 1.0)  # the time of those who came before is over
    refusal = await high.refusal()
    assert refusal.cause == "queue_timeout"
    assert refusal.retry_after_s == pytest.approx((1 + 1) * 2)


async def test_retry_after_is_between_a_second_and_a_minute() -> None:
    fast, slow = Crowd(max_queue=1), Crowd(max_queue=1)
    for crowd, every_s, expected_s in ((fast, 0.001, 1.0), (slow, 100.0, 60.0)):
        await crowd.come(count=2)
        await drain(crowd, every_s, count=5)
        assert await retry_after_s(crowd) == expected_s


async def test_time_in_which_the_pool_is_not_full_does_not_slow_the_drain() -> None:
    crowd = Crowd(max_in_flight=2, max_queue=0)
    for _ in range(5):
        await crowd.come(count=2)
        crowd.clock.now += 0.25
        await crowd.entered[-1].leave()
        crowd.clock.now += 1000
        await crowd.entered[-2].leave()
    assert crowd.admission.stats().drain_per_s == pytest.approx(4)


async def test_stalled_pool_drains_ever_slower() -> None:
    crowd = Crowd(max_queue=1)
    await crowd.come(count=2)
    await drain(crowd, every_s=1.0, count=5)
    rates = []
    for _ in range(3):
        crowd.clock.now += 20
        rates.append(crowd.admission.stats().drain_per_s or 0)
    assert 1 > rates[0] > rates[1] > rates[2] > 0
    assert await retry_after_s(crowd) > 10


# Another size


async def test_larger_size_lets_those_in_who_fit_now() -> None:
    crowd = Crowd(max_in_flight=1)
    await crowd.come(count=6)
    crowd.admission.resize(4, 10, 100, 60.0)
    await settle()
    assert len(crowd.entered) == 4
    crowd.admission.resize(None, 0, 0, 60.0)
    await settle()
    assert len(crowd.entered) == 6
    assert not crowd.admission.stats().refused


async def test_smaller_size_ends_nobody_in_flight() -> None:
    crowd = Crowd(max_in_flight=4)
    await crowd.come(count=6)
    crowd.admission.resize(2, 10, 100, 60.0)
    for in_flight in (3, 2, 2, 2, 1, 0):
        await next(request for request in crowd.entered if request.is_in).leave()
        assert crowd.admission.stats().in_flight == in_flight
    assert len(crowd.entered) == 6
    assert crowd.is_empty()


@pytest.mark.parametrize(("max_queue", "max_queue_bytes"), [(2, 1000), (1000, 20)])
async def test_smaller_queue_sheds_who_no_longer_fits(max_queue: int, max_queue_bytes: int) -> None:
    crowd = Crowd()
    await crowd.come("holds")
    requests = [await crowd.come(str(priority), priority, size_bytes=10) for priority in (2, 0, 3, 1)]
    crowd.admission.resize(1, max_queue, max_queue_bytes, 60.0)
    for request in (requests[1], requests[3]):
        assert (await request.refusal()).cause == "shed"
    assert await crowd.serve_all() == ["holds", "3", "2"]


async def test_another_timeout_holds_for_those_who_wait_already() -> None:
    crowd = Crowd(queue_timeout_s=60.0)
    await crowd.come()
    old = await crowd.come()
    crowd.clock.now += 30
    new = await crowd.come()
    crowd.admission.resize(1, 10, 100, 20.0)
    assert (await old.refusal()).cause == "queue_timeout"
    assert not new.task.done()
    crowd.clock.now += 21
    crowd.admission.resize(1, 10, 100, 60.0)
    await settle()
    assert not new.task.done()


async def test_tenants_in_flight_without_a_bound_count_once_there_is_one() -> None:
    crowd = Crowd(max_in_flight=None)
    await crowd.come(tenant=ANN, count=3)
    await crowd.come(tenant=BOB)
    crowd.admission.resize(3, 10, 100, 60.0)
    await crowd.come(tenant=ANN)
    await crowd.come(tenant=BOB)
    await crowd.entered[0].leave()
    await crowd.entered[1].leave()
    assert [request.tenant for request in crowd.entered[4:]] == [ANN]  # both held one, and Ann came first
    await crowd.serve_all()
    assert crowd.is_empty()


# Cancellation


async def test_waiter_cancelled_at_any_step_leaves_nothing() -> None:
    for steps in range(6):
        crowd = Crowd()
        holds = await crowd.come()
        request = Request(crowd, "", 0, BOB, 10)
        for step in range(steps):
            await asyncio.sleep(0)
            if step == 2:
                holds._done.set()  # from the next step on it is in flight
        await request.cancel()
        await holds.leave()
        assert crowd.is_empty(), steps
        assert crowd.admission.try_enter(CAT)


async def test_slot_granted_to_one_who_is_cancelled_in_the_same_step_is_passed_on() -> None:
    crowd = Crowd()
    assert crowd.admission.try_enter(CAT)
    cancelled = await crowd.come("cancelled", tenant=ANN)
    await crowd.come("next", tenant=BOB)
    crowd.admission.leave(CAT)
    cancelled.task.cancel()
    await settle()
    assert [request.name for request in crowd.entered] == ["next"]
    stats = crowd.admission.stats()
    assert (stats.admitted, stats.waited, stats.in_flight, stats.waiting) == (2, 1, 1, 0)
    await crowd.serve_all()
    assert crowd.is_empty()


async def test_slot_is_not_granted_to_one_who_was_cancelled_earlier_in_the_step() -> None:
    crowd = Crowd()
    assert crowd.admission.try_enter(CAT)
    cancelled = await crowd.come("cancelled", tenant=ANN)
    await crowd.come("next", tenant=BOB)
    cancelled.task.cancel()
    crowd.admission.leave(CAT)
    assert crowd.admission.stats().waiting == 0
    assert await crowd.serve_all() == []
    await settle()
    assert await crowd.serve_all() == ["next"]
    assert cancelled.task.cancelled()
    assert crowd.is_empty()


async def test_last_one_waiting_cancelled_with_its_slot_frees_it() -> None:
    crowd = Crowd()
    assert crowd.admission.try_enter(CAT)
    waits = await crowd.come()
    crowd.admission.leave(CAT)
    await waits.cancel()
    assert crowd.is_empty()
    assert crowd.admission.try_enter(ANN)


@pytest.mark.parametrize("cancelled_first", [True, False])
async def test_one_shed_and_cancelled_in_one_step_is_gone_once(cancelled_first: bool) -> None:
    crowd = Crowd(max_queue=1)
    await crowd.come()
    low = await crowd.come()
    high = Request(crowd, "high", 1, BOB, 1)
    if cancelled_first:
        low.task.cancel()
    else:
        await asyncio.sleep(0)
        low.task.cancel()
    await asyncio.wait([low.task])
    await settle()
    assert low.task.cancelled()
    assert not crowd.admission.stats().refused
    assert crowd.admission.stats().waiting == 1
    await crowd.serve_all()
    assert high.task.done()
    assert crowd.is_empty()


async def test_callers_own_timeout_frees_its_place() -> None:
    crowd = Crowd()
    await crowd.come()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01), crowd.admission.slot(0, BOB, 10):
            pass
    assert crowd.admission.stats().waiting == 0


async def test_waiter_that_is_thrown_away_leaves_nothing() -> None:
    crowd = Crowd()
    assert crowd.admission.try_enter(ANN)
    waits = crowd.admission.enter(0, BOB, 10)
    waits.send(None)
    waits.close()
    crowd.admission.leave(ANN)
    assert crowd.is_empty()


async def test_ten_thousand_aborts_leave_nothing() -> None:
    crowd = Crowd(max_in_flight=10)
    requests = [Request(crowd, "", number % 3, f"tenant {number % 1000}", number) for number in range(10)]
    requests += [Request(crowd, "", number % 3, f"tenant {number % 1000}", number % 100) for number in range(10_000)]
    await settle()
    assert crowd.admission.stats().waiting == 10_000
    random.Random(1).shuffle(requests)
    for request in requests:  # those in flight too: their slots are granted to others that go in the same step
        request.task.cancel()
    await asyncio.wait([request.task for request in requests])
    assert all(request.task.cancelled() for request in requests)
    assert crowd.is_empty()


async def test_those_who_waited_are_counted() -> None:
    crowd = Crowd()
    await crowd.come(count=3)
    crowd.clock.now += 5
    await crowd.entered[0].leave()
    crowd.clock.now += 1
    await crowd.serve_all()
    stats = crowd.admission.stats()
    assert (stats.admitted, stats.waited, stats.waited_s) == (3, 2, 11)


async def test_snapshot_does_not_change() -> None:
    crowd = Crowd(max_queue=0)
    await crowd.come()
    before = crowd.admission.stats()
    await (await crowd.come()).refusal()
    assert not before.refused


# All at once


@pytest.mark.parametrize("seed", range(15))
async def test_whatever_happens_everybody_is_served_refused_or_cancelled(seed: int) -> None:
    rng = random.Random(seed)
    crowd = Crowd(2, 8, 300, 60.0)
    bound = 2
    requests: list[Request] = []
    for _ in range(300):
        action = rng.random()
        living = [request for request in requests if not request.task.done()]
        if action < 0.55 or not living:
            tenant, size_bytes = rng.choice((ANN, BOB, CAT)), rng.randrange(100)
            requests.append(Request(crowd, "", rng.randrange(3), tenant, size_bytes))
        elif action < 0.75:
            rng.choice(living)._done.set()
        elif action < 0.95:
            rng.choice(living).task.cancel()
        else:
            bound = rng.randrange(1, 5)
            crowd.admission.resize(bound, rng.randrange(10), rng.randrange(400), rng.choice((0.0, 60.0)))
        if rng.random() < 0.6:
            await asyncio.sleep(0)
        check_invariants(crowd, bound, requests)
    for request in requests:
        request._done.set()
    crowd.admission.resize(bound, 1000, 100_000, 60.0)
    outcomes = await asyncio.wait_for(asyncio.gather(*(r.task for r in requests), return_exceptions=True), 5)
    assert crowd.is_empty()
    stats = crowd.admission.stats()
    refused = [outcome for outcome in outcomes if isinstance(outcome, Overloaded)]
    assert Counter(outcome.cause for outcome in refused) == stats.refused
    assert all(1 <= outcome.retry_after_s <= 60 for outcome in refused)
    assert len(crowd.entered) == stats.admitted
    assert all(outcome is None or isinstance(outcome, (Overloaded, asyncio.CancelledError)) for outcome in outcomes)


def check_invariants(crowd: Crowd, bound: int, requests: list[Request]) -> None:
    admission = crowd.admission
    stats = admission.stats()
    in_flight = sum(request.is_in for request in requests)
    assert 0 <= in_flight <= stats.in_flight
    assert stats.in_flight == sum(admission._held.values())
    assert all(count > 0 for count in admission._held.values())
    assert stats.waiting == 0 or stats.in_flight >= bound
    assert stats.waiting <= admission._max_queue
    assert stats.waiting_bytes <= admission._max_queue_bytes
    waiters = [w for level in admission._levels.values() for queue in level.queues.values() for w in queue]
    assert (len(waiters), sum(waiter.size_bytes for waiter in waiters)) == (stats.waiting, stats.waiting_bytes)


async def test_timeouts_and_slots_that_come_together_serve_or_refuse_each_once() -> None:
    crowd = Crowd(max_in_flight=5, queue_timeout_s=0.005)
    requests = [Request(crowd, "", 0, f"tenant {number % 7}", 1) for number in range(500)]
    while not all(request.task.done() for request in requests):
        for request in crowd.entered:
            request._done.set()
        await asyncio.sleep(0.0002)
    assert crowd.is_empty()
    stats = crowd.admission.stats()
    assert stats.admitted + stats.refused.get("queue_timeout", 0) == 500
    for request in requests:
        request.task.exception()
