"""Calls from other threads arrive on the loop, all of them, in order, and few wake-ups carry many."""

from __future__ import annotations

import asyncio
import logging
import threading

from adaserve_jax.server.state import Mailbox


def test_many_threads_lose_nothing_and_keep_their_order():
    got: dict[int, list[int]] = {name: [] for name in range(4)}

    async def main() -> None:
        loop, mailbox = asyncio.get_running_loop(), Mailbox()

        def send(name: int) -> None:
            for i in range(2000):
                mailbox.post(loop, got[name].append, i)

        threads = [threading.Thread(target=send, args=(name,)) for name in got]
        for thread in threads:
            thread.start()
        while sum(map(len, got.values())) < 8000:
            await asyncio.sleep(0.001)
        for thread in threads:
            thread.join()

    asyncio.run(asyncio.wait_for(main(), 10))
    assert all(values == list(range(2000)) for values in got.values())


def test_what_comes_together_is_one_wake_up():
    async def main() -> tuple[int, list[int]]:
        loop, mailbox, got, wakes = asyncio.get_running_loop(), Mailbox(), [], 0
        soon = loop.call_soon_threadsafe

        def counted(*arguments):
            nonlocal wakes
            wakes += 1
            return soon(*arguments)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        for i in range(64):
            mailbox.post(loop, got.append, i)
        await asyncio.sleep(0)
        mailbox.post(loop, got.append, 64)
        await asyncio.sleep(0)
        return wakes, got

    assert asyncio.run(main()) == (2, list(range(65)))


def test_a_call_that_fails_costs_the_others_nothing(caplog):
    async def main() -> list[int]:
        loop, mailbox, got = asyncio.get_running_loop(), Mailbox(), []
        mailbox.post(loop, lambda: 1 / 0)
        mailbox.post(loop, got.append, 1)
        await asyncio.sleep(0)
        return got

    with caplog.at_level(logging.ERROR):
        assert asyncio.run(main()) == [1]
    assert "ZeroDivisionError" in caplog.text


def test_a_closed_loop_is_left_alone():
    loop = asyncio.new_event_loop()
    loop.close()
    Mailbox().post(loop, print, "nobody hears this")
