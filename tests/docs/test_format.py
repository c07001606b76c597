"""The hexdump in docs/format.md is what the writer writes."""

from __future__ import annotations

import mmap
import re
import tempfile
from pathlib import Path

import pytest

from tpucache.store.writer import ShardWriter

PAGE = Path(__file__).parents[2] / "docs" / "format.md"


def hexdump(data: bytes) -> str:
    """Return offset, bytes and text of every line of 16 bytes that is not zero, a repeated line once."""
    lines, last, cut = [], b"", False
    for at in range(0, len(data), 16):
        part = data[at : at + 16]
        if part == last and any(part):
            if not cut:
                lines.append("*")
            cut = True
        elif any(part):
            text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
            lines.append(f"{at:08x}  {part.hex(' ')}  {text}")
            cut = False
        last = part
    return "\n".join(lines)


def write_example(folder: Path):
    """Return the bytes and the index rows of the shard that the page describes."""
    with ShardWriter(folder / "aside") as writer:
        writer.append(1, b"abc")
        writer.append(258, b"Z" * 2100)
        sealed = writer.seal(folder / "v00-00000.lmdb")
    return (folder / "v00-00000.lmdb").read_bytes(), sealed.rows


def section(text: str, name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n```text\n(.*?)\n```\n<!-- /{name} -->", text, re.DOTALL)
    return "" if found is None else found[1]


def regenerated(text: str, data: bytes, rows) -> str:
    lines = "\n".join(
        f"offset {row['offset']}  length {row['length']}  crc32 {row['crc32']:#010x}  shard {row['shard']}"
        for row in rows
    )
    for name, body in (("hexdump", hexdump(data)), ("rows", lines)):
        block = f"<!-- {name} -->\n```text\n{body}\n```\n<!-- /{name} -->"
        text = re.sub(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, block=block: block, text, flags=re.DOTALL)
    return text


@pytest.mark.skipif(mmap.PAGESIZE != 4096, reason="the page shows a file of 4 KiB pages")
def test_the_hexdump_is_what_the_writer_writes(tmp_path):
    text = PAGE.read_text()
    assert section(text, "hexdump")
    assert text == regenerated(text, *write_example(tmp_path))


def test_the_rows_of_the_example_point_at_its_records(tmp_path):
    data, rows = write_example(tmp_path)
    values = [data[offset : offset + length] for offset, length, _, _ in rows.tolist()]
    assert values == [b"abc", b"Z" * 2100]


if __name__ == "__main__":  # python tests/docs/test_format.py: write the page's example anew
    with tempfile.TemporaryDirectory() as temporary:
        PAGE.write_text(regenerated(PAGE.read_text(), *write_example(Path(temporary))))
