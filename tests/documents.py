"""README.md and docs/ as what they tell the reader to type: fenced blocks and code between backquotes.

A block without a language is commands, ``python`` a script, ``toml`` a settings file; ``text`` is nothing to
type. A comment on the line before says what a block needs that not every machine has
(``<!-- needs: a cluster -->``), or that its command stays in its terminal (``<!-- stays: until Ctrl-C -->``).
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "docs/quickstart.md", "docs/operating.md", "docs/private-port.md")
"""Those with commands that this machine can run, in the order in which a newcomer reads them."""
ALL_DOCUMENTS = ("README.md", *(str(each.relative_to(ROOT)) for each in sorted(ROOT.glob("docs/*.md"))))
LANGUAGES = ("", "python", "toml", "text")

BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>needs|stays): (?P<what>[^\n]+) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """``needs``: what not every machine has. ``stays``: its command ends when it is told to."""

    place: str
    language: str
    text: str
    needs: str | None
    stays: bool


def blocks_of(document: str) -> list[Block]:
    text = (ROOT / document).read_text()
    found = [
        Block(
            place=f"{document}:{text.count(chr(10), 0, match.start('text'))}",
            language=match["language"],
            text=match["text"],
            needs=match["what"] if match["mark"] == "needs" else None,
            stays=match["mark"] == "stays",
        )
        for match in BLOCK.finditer(text)
    ]
    fences = len(re.findall(r"^\s*```", text, re.MULTILINE))
    assert fences == 2 * len(found), f"{document}: a block is not seen"
    return found


def code_in(document: str) -> list[str]:
    """Every piece of code between backquotes in the text, and every line of the command blocks."""
    text = (ROOT / document).read_text()
    spans = [" ".join(each.split()) for each in re.findall(r"`([^`]+)`", BLOCK.sub("", text))]
    lines = [
        line
        for block in blocks_of(document)
        if block.language == ""
        for line in block.text.replace("\\\n", " ").splitlines()
    ]
    return spans + lines
