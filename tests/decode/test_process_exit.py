import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from decode.process_exit import has_exited


def test_a_workers_end_is_seen_from_the_loop_and_from_the_engines_thread_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        is_gone = has_exited(os.pidfd_open(process.pid))

        def ask() -> bool:
            return any(is_gone() for _ in range(20_000))

        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(lambda _: ask(), range(2))) == [False, False]
        process.kill()
        process.wait()
        assert is_gone()


def test_across_hosts_nobody_knows_of_an_end() -> None:
    assert not has_exited(None)()
