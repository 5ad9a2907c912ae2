import asyncio
import threading
from pathlib import Path

from common.engine_thread import IDLE_AFTER_S, EngineThread
from common.host_cores import HostCores
from tests.common.test_host_cores import claiming_process


def test_work_runs_on_one_thread_in_order_with_the_cores_that_others_leave(tmp_path: Path) -> None:
    async def scenario() -> None:
        used: list[int] = []
        thread = EngineThread(HostCores(4, tmp_path / "cores"), used.append)
        first, second = await asyncio.gather(thread.run(threading.get_ident), thread.run(threading.get_ident))
        assert first == second != threading.get_ident()
        assert used == [4, 4]
        neighbour = claiming_process(tmp_path / "cores")
        try:
            await thread.run(thread.share_cores)
            assert used == [4, 4, 2, 2]
        finally:
            neighbour.kill()
            neighbour.communicate()
        thread.close()

    asyncio.run(scenario())


def test_a_neighbour_sees_the_claim_from_the_first_call_until_a_pause(tmp_path: Path) -> None:
    async def scenario() -> None:
        thread = EngineThread(HostCores(4, tmp_path / "cores"))
        begun, go_on = threading.Event(), threading.Event()

        def work() -> None:
            begun.set()
            go_on.wait()

        running = asyncio.create_task(thread.run(work))
        await asyncio.to_thread(begun.wait)
        assert await asyncio.to_thread(share_of_a_neighbour, tmp_path / "cores") == 2
        go_on.set()
        await running
        async with asyncio.timeout(10):
            await wait_until_alone(tmp_path / "cores")
        thread.close()

    asyncio.run(scenario())


async def wait_until_alone(path: Path) -> None:
    loop = asyncio.get_running_loop()
    alone = asyncio.Event()

    def look() -> None:
        if share_of_a_neighbour(path) == 4:
            alone.set()
        else:
            loop.call_later(IDLE_AFTER_S, look)

    look()
    await alone.wait()


def share_of_a_neighbour(path: Path) -> int:
    """As another open file of the same cores sees it."""
    neighbour = HostCores(4, path)
    share = neighbour.share()
    neighbour.close()
    return share
