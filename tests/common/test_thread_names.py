"""Threads are called by their names."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.thread_names import LONGEST, name_thread


def test_a_thread_has_its_name_in_python_and_in_the_kernel() -> None:
    def names() -> tuple[str, str]:
        name_thread("a name that is too long")
        path = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        return threading.current_thread().name, path.read_text().rstrip("\n")

    with ThreadPoolExecutor(max_workers=1) as executor:
        in_python, in_kernel = executor.submit(names).result()
    assert in_python == "a name that is too long"
    assert in_kernel == in_python[:LONGEST]
