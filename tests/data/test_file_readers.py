"""Rows from files, the same in every container; and what is said of files that are broken."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard

from surefoot.data import file_readers, json_rows, rows
from surefoot.data.file_readers import ChunkReader, ZstandardFile, kind_of, scan, stream_chunks
from surefoot.data.rows import MAX_ROW_BYTES, Row
from surefoot.errors import DataError
from surefoot.system.compute_limits import memory_limit

ROWS = [{"prompt": "a\nb", "completion": "b"}, {"prompt": "ü,\"'", "completion": "中文"}]


def damaged(content: bytes) -> bytes:
    return content[:40] + b"\xff" * 20 + content[60:]


def rows_of(path: Path) -> list[Row]:
    reader = ChunkReader()
    return [row for chunk in scan(path).chunks for row in reader.rows(path, chunk)]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    kind, compression = kind_of(path) or ("", "")
    content = {
        "jsonl": lines,
        "json": json.dumps(rows, indent=1).encode(),
        "csv": ("prompt,completion\n" + "".join(
            ",".join('"' + str(v).replace('"', '""') + '"' for v in row.values()) + "\n" for row in rows)).encode(),
    }.get(kind)  # fmt: skip
    if content is not None:
        pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[compression]
        path.write_bytes(pack(content))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        table = pyarrow.Table.from_pylist(rows)
        new = pyarrow.ipc.new_stream if "stream" in path.name else pyarrow.ipc.new_file
        with new(path, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("a.jsonl", [1, 2]), ("a.ndjson", [1, 2]), ("a.jsonl.gz", [1, 2]), ("a.jsonl.zst", [1, 2]), ("a.json", [2, 6]),
        ("a.json.gz", [2, 6]), ("a.csv", [2, 4]), ("a.csv.zst", [2, 4]), ("a.parquet", [1, 2]), ("a.arrow", [1, 2]),
        ("a.stream.arrow", [1, 2]),
    ],
)  # fmt: skip
def test_every_container_holds_the_same_rows(tmp_path: Path, name: str, lines: list[int]) -> None:
    found = rows_of(write(tmp_path / name, ROWS))
    assert [row.columns for row in found] == ROWS
    assert [row.line for row in found] == lines


def test_json_lines_under_the_name_of_json(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("\n" + "\n".join(json.dumps(row) for row in ROWS))
    found = rows_of(tmp_path / "a.json")
    assert [row.columns for row in found] == ROWS
    assert [row.line for row in found] == [2, 3]


def test_frames_of_zstandard_follow_each_other(tmp_path: Path) -> None:
    lines = [json.dumps(row).encode() + b"\n" for row in ROWS]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(map(zstandard.compress, lines)))
    assert [row.columns for row in rows_of(tmp_path / "a.jsonl.zst")] == ROWS


@pytest.mark.parametrize("size", [99, 100, 101, 200, 250])
@pytest.mark.parametrize("ends", [b"\n", b""])
def test_rows_around_a_long_line_are_found(
    tmp_path: Path, size: int, ends: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MAX_ROW_BYTES", 100)
    monkeypatch.setattr(file_readers, "CHUNK_BYTES", 100)
    good = b"".join(b'{"n": %d}\n' % n for n in range(10))
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * size + b"\n" + good + b"y" * size + ends)
    found = rows_of(path)
    assert [row.columns["n"] for row in found if row.columns] == list(range(10))
    assert [row.line for row in found] == list(range(1, 13))
    chunks = scan(path).chunks or ()
    assert sum(chunk.num_rows for chunk in chunks) == 12
    assert [len(ChunkReader().rows(path, chunk)) for chunk in chunks] == [chunk.num_rows for chunk in chunks]


def test_objects_that_share_a_line_are_numbered(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([*ROWS, *ROWS]))
    assert [row.line for row in rows_of(tmp_path / "a.json")] == [1, 2, 3, 4]


@pytest.mark.parametrize("read_bytes", [3, 7, 64])
def test_a_json_array_is_read_in_pieces_of_any_size(
    tmp_path: Path, read_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_rows, "READ_BYTES", read_bytes)
    rows = [{"prompt": "x" * n, "completion": 'é\n"[{', "n": [n, {"a": None}]} for n in range(40)]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n\n")
    found = rows_of(path)
    assert [row.columns for row in found] == rows
    text = path.read_text().splitlines()
    assert all(text[row.line - 1].strip() == "{" for row in found)


def test_chunks_cut_a_file_at_rows_and_keep_line_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_readers, "CHUNK_ROWS", 3)
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n".join(json.dumps({"n": n}) for n in range(8)) + "\n\n\n")
    chunks = scan(path).chunks
    assert chunks is not None
    assert [(chunk.first_row, chunk.num_rows) for chunk in chunks] == [(0, 3), (3, 3), (6, 2)]
    found = [[(row.line, row.columns["n"]) for row in ChunkReader().rows(path, chunk)] for chunk in chunks]
    assert found == [[(1, 0), (3, 1), (5, 2)], [(7, 3), (9, 4), (11, 5)], [(13, 6), (15, 7)]]
    same = write(tmp_path / "b.jsonl.gz", [{"n": n} for n in range(8)])
    assert [(chunk.first_row, chunk.num_rows) for chunk, _ in stream_chunks(same)] == [(0, 3), (3, 3), (6, 2)]


def test_columnar_files_do_not_invent_null_keys(tmp_path: Path) -> None:
    rows = [{"m": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [{"x": 1}]}]}]
    for name in ("a.parquet", "a.arrow"):
        assert rows_of(write(tmp_path / name, rows))[0].columns == rows[0]


@pytest.mark.parametrize(
    ("content", "line", "problem"),
    [
        (b'{"a": 1}\n{"a": \n', 2, r"JSON: Expecting value"),
        (b'{"a": 1}\n[1]\n', 2, r"JSON object .*list"),
        (b'{"a": 1}\n{"a": "\xe9"}\n', 2, r"UTF-8: .* 0xe9 .*byte 8\b"),
        (b'[{"a": 1}, {"a": 2}]\n', 1, r"JSON array.* \.json$"),
        (b'[\n{"a": 1},\n{"a": 2}\n]\n', 1, r"JSON array.* \.json$"),
        ('{"a": 1}\n'.encode("utf-16"), 1, r"UTF-8: .*UTF-16"),
        ('{"a": "你好，请问这是什么？"}\n'.encode("gb18030"), 1, r"UTF-8: .*iconv -f GB18030 "),
        ('{"a": "été à Paris, déjà vu"}\n'.encode("latin-1"), 1, r"UTF-8: .*iconv -f ENCODING "),
        ('{"a": "привет, как дела"}\n'.encode("cp1251"), 1, r"UTF-8: .*iconv -f ENCODING "),
        ('{"a": "привет, как дела"}\n'.encode("koi8-r"), 1, r"UTF-8: .*iconv -f ENCODING "),
        ('{"a": "안녕하세요 반갑습니다 오늘은"}\n'.encode("euc-kr"), 1, r"UTF-8: .*iconv -f ENCODING "),
        (b'{"a": "x\0y"}\n', 1, r"JSON: .*NUL"),
        (b"[" * 100_000, 1, r"valid JSON|100 JSON values"),
        (b'{"a": 1}\n' + b'{"a":' * 600 + b"1" + b"}" * 600, 2, r"100 JSON values"),
    ],
)
def test_a_line_that_is_no_row_says_why(tmp_path: Path, content: bytes, line: int, problem: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    bad = [row for row in rows_of(path) if row.problem]
    assert bad[0].line == line
    assert re.search(problem, str(bad[0].problem))


def test_a_row_of_fifty_megabytes_is_refused_without_reading_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with open(path, "wb") as file:
        file.write(b'{"text": "' + b"x" * 50_000_000 + b'"}\n{"text": "after"}\n')
    first, second = rows_of(path)
    assert first.problem is not None
    assert all(f" {size} MiB" in first.problem for size in (47.7, MAX_ROW_BYTES >> 20))
    assert (second.columns, second.line) == ({"text": "after"}, 2)
    (tmp_path / "b.json").write_text(json.dumps([{"text": "x" * 10_000_000}, {"text": "after"}]))
    first, second = rows_of(tmp_path / "b.json")
    assert f" {MAX_ROW_BYTES >> 20} MiB" in str(first.problem)
    assert second.columns == {"text": "after"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"a": 1},\n{"a": }]', r"a\.json:2: .*Expecting value"),
        ("a.json", b'[\n{"a": 1},\n{"a": "cut', r"a\.json:3: .*cut short"),
        ("a.json", b'[\n{"a": 1}\n', r"a\.json:\d: .*cut short"),
        ("a.json", b'[\n{"a": 1},\n]', r"a\.json:3: .*a comma stands behind the last entry"),
        ("a.json", b'[{"a": 1}]\n{"a": 2}', r"a\.json:2: '\{' .*end"),
        ("a.json", b'"text"', r"a\.json:1: expected .*JSON array"),
        ("a.json", b'[{"a": ' + b"9" * 5000 + b"}]", r"a\.json:1: .*digits"),
        (
            "a.json",
            b'[{"a": "x" "b": 1},' + b'{"a": "y"},' * 4_000_000,
            r"a\.json:1: .*Expecting ',' delimiter",
        ),
        ("a.csv", b'a,b\n1,"2\n3,4\n5,6\n', r"a\.csv:2: .*CSV.*unexpected end of data"),
        ("a.jsonl.zst", zstandard.compress(b'{"a": 1}\n' * 9999)[:-8], r"a\.jsonl\.zst: .*ends before"),
        ("a.jsonl.gz", damaged(gzip.compress(b'{"a": 1}\n' * 9999, mtime=0)), r"a\.jsonl\.gz: .*read"),
        ("a.json", b'[{"a": "\xe9"}]', r"a\.json: .*UTF-8"),
        ("a.json", '[{"a": "你好，请问这是什么？"}]'.encode("gbk"), r"a\.json: .*GB18030"),
        ("a.csv", "a,b\n1,你好，请问这是什么\n".encode("gbk"), r"a\.csv:\d: .*GB18030"),
        ("a.csv", b"a,a\n1,2\n", r"a\.csv:1: .*column.*: a, a"),
        ("a.csv", b"a,b\n1,\0\n", r"a\.csv:2: .*NUL"),
        ("a.csv", b"a,b\n1,\xe9\n", r"a\.csv:\d: .*UTF-8"),
        ("a.csv", b"a,b\n1,2\n1," + b"x" * 9_000_000 + b"\n", r"a\.csv:3: .* 8 MiB"),
        ("a.csv", b"a,b\n1,2\n" + b"1,x," * 2_500_000 + b"\n", r"a\.csv:3: .* 8 MiB"),
        ("a.csv", b'a,b\n1,"2\n' + b"3,4\n" * 2_500_000, r"a\.csv:2: .* 8 MiB.*quote"),
        ("a.parquet", b"PAR1 nonsense", r"a\.parquet: .*Parquet"),
        ("a.arrow", b"ARROW1 nonsense", r"a\.arrow: .*Arrow"),
        ("a.jsonl.gz", b'{"a": 1}\n', r"a\.jsonl\.gz: .*not gzip.* a\.jsonl$"),
        ("a.jsonl.zst", b'{"a": 1}\n', r"a\.jsonl\.zst: .*Zstandard.* a\.jsonl$"),
        ("a.jsonl", gzip.compress(b'{"a": 1}\n', mtime=0), r"a\.jsonl: .*is gzip.* a\.jsonl\.gz$"),
        ("a.csv", zstandard.compress(b"a,b\n1,2\n"), r"a\.csv: .*is Zstandard.* a\.csv\.zst$"),
        ("a.jsonl.gz", zstandard.compress(b'{"a": 1}\n'), r"a\.jsonl\.gz: .*is Zstandard.* a\.jsonl\.zst$"),
        ("a.jsonl", b"PAR1 nonsense", r"a\.jsonl: .*is Parquet.* a\.parquet$"),
        ("a.parquet", b"ARROW1 nonsense", r"a\.parquet: .*is Arrow.* a\.arrow$"),
        ("a.csv", b"a;b\n1;2\n", r"a\.csv:1: .*';'.*commas"),
        ("a.csv", b"a\tb\n1\t2\n", r"a\.csv:1: .*'\\t'.*commas"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 999, mtime=0)[:-12], r"a\.jsonl\.gz: .*ends before.*again$"),
        ("a.jsonl.zst", b"nonsense", r"a\.jsonl\.zst: .*Zstandard"),
    ],
)
def test_a_file_that_is_broken_as_a_whole_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        rows_of(tmp_path / name)


def test_a_csv_row_with_too_few_values_is_a_bad_row(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3\n")
    good, bad = rows_of(tmp_path / "a.csv")
    assert good.columns == {"a": "1", "b": "2"}
    assert bad.line == 3
    assert re.match(r"1 .* 2 columns", str(bad.problem))
    assert str(bad.problem)[-1].isalpha(), "the message that holds it ends with a full stop"


def test_a_json_file_with_a_row_that_is_nested_deeply_keeps_the_others(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[" + '{"a":' * 600 + "1" + "}" * 600 + ', {"a": 2}]')
    deep, sound = rows_of(path)
    assert "100 JSON values" in str(deep.problem)
    assert sound.columns == {"a": 2}


def test_a_small_zstandard_file_takes_little_memory(tmp_path: Path) -> None:
    """2 GiB of zeros in 64 KiB: refused as a row that is too long, and never in memory whole."""
    path = tmp_path / "a.jsonl.zst"
    compressor = zstandard.ZstdCompressor().compressobj()
    zeros = bytes(1 << 20)
    path.write_bytes(b"".join(compressor.compress(zeros) for _ in range(1 << 11)) + compressor.flush())
    with ZstandardFile(path) as file, memory_limit(200 << 20):
        assert len(file.read(100)) == 100
        assert sum(len(piece) for piece in iter(lambda: file.read(1 << 20), b"")) == (2 << 30) - 100


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_date_that_python_has_none_for_is_named_with_its_row(tmp_path: Path, name: str) -> None:
    table = pyarrow.table({"day": pyarrow.array([0, 10**8], pyarrow.date32())})
    if name == "a.parquet":
        pyarrow.parquet.write_table(table, tmp_path / name)
    else:
        with pyarrow.ipc.new_file(tmp_path / name, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(DataError, match=rf"{name}:1: .*value"):
        rows_of(tmp_path / name)


def test_offsets_of_an_arrow_file_that_lead_out_of_it_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    table = pyarrow.table({"text": ["first", "second"]})
    with pyarrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    content = path.read_bytes()
    offsets = b"".join(number.to_bytes(4, "little") for number in (0, 5, 11))
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, b"".join(n.to_bytes(4, "little") for n in (0, 5, 1_900_000_000))))
    with pytest.raises(DataError, match=r"a\.arrow:1\b.*damaged"):
        rows_of(path)
