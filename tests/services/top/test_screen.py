"""What ``lamella top`` makes of a mesh."""

from dataclasses import replace

import msgspec
from rich.console import Console

from services.top.screen import screen
from tests.ui.recorded_gateway import Shown
from tests.ui.recorded_mesh import small_mesh


def lines_of(shown: Shown, width: int = 80) -> list[str]:
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(screen(shown.mesh, shown.latency), highlight=False)
    return capture.get().splitlines()


def line_of(shown: Shown, begin: str) -> list[str]:
    """Its words; the first one's, of instances and their links."""
    return next(line for line in lines_of(shown) if line.strip().startswith(begin)).split()


def test_every_instance_has_a_line_with_its_load() -> None:
    shown = small_mesh()
    decode = line_of(shown, "decode-1")
    assert decode[:6] == ["decode-1", "decode", "ready", "0", "11", "2"]
    assert decode[-4:] == ["━━━━━╸", "94%", "-", "24.1"]
    prefill = line_of(shown, "prefill-1")
    assert prefill[:4] == ["prefill-1", "prefill", "draining", "640"]
    assert line_of(shown, "mixed-0")[1:4] == ["decode", "→", "mixed"]


def test_all_of_it_fits_into_eighty_characters() -> None:
    wide, narrow = (" ".join(lines_of(small_mesh(), width)).split() for width in (160, 80))
    assert narrow == wide


def test_an_attention_worker_has_a_line_with_what_it_holds() -> None:
    shown = small_mesh()
    assert line_of(shown, "attention-0")[:5] == ["attention-0", "attention", "ready", "-", "9"]
    draining = line_of(shown, "attention-1")
    assert (draining[2], draining[4], draining[-1]) == ("draining", "2", "11%")
    assert "attention: attention-0, attention-1 (draining)" in "\n".join(lines_of(shown))


def test_latencies_are_of_all_classes_and_of_those_that_were_asked() -> None:
    shown = small_mesh()
    everybody = line_of(shown, "all")
    assert everybody[1:5] == ["123", "92%", "1.88", "381.3"]
    assert line_of(shown, "interactive")[1:5] == ["31", "77%", "0.40", "96.1"]
    assert not [line for line in lines_of(shown) if line.strip().startswith("batch")]


def test_tokens_a_second_are_told_apart() -> None:
    """Those of requests that ended, by class; what goes to clients now; and of prompts what is computed."""
    text = " ".join(" ".join(lines_of(small_mesh())).split())
    assert "ended in the last 60 s; 5 requests open now, 412.6 output tokens/s now" in text
    assert "output class ended kept kept/s tokens/s" in text
    assert "prompt instance role state queue run wait KV tokens/s" in text


def test_who_leads_what_is_wanted_and_where_kv_goes_is_said() -> None:
    text = "\n".join(lines_of(small_mesh(), 160))
    assert "scheduler: scheduler-0 (leads), scheduler-1" in text
    assert "the scheduler wants 3 decode, not 2: at 31 requests/s" in text
    assert text.index("prefill-0 → decode-0") < text.index("prefill-0 → decode-1")
    assert "48.20" in text


def test_what_is_old_is_called_old() -> None:
    shown = small_mesh()
    assert not [line for line in lines_of(shown) if "old" in line]
    away = msgspec.structs.replace(shown.mesh, is_bus_connected=False, is_store_answering=False)
    assert [line.strip() for line in lines_of(replace(shown, mesh=away)) if "old" in line] == [
        "NATS does not answer: loads are old",
        "Redis does not answer: members are old",
    ]
