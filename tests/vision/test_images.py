"""Images as data: what users write, what transformers' processors make of it, and what is refused."""

import base64
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLForConditionalGeneration

from surefoot.data import images
from surefoot.data.conversation import BadRow
from surefoot.data.image_processor import PixelReader
from surefoot.data.images import Image, ImageSettings, find_image, open_image
from surefoot.data.model_processor import GRID
from surefoot.data.render import Renderer
from surefoot.data.renderer_source import RendererSource
from surefoot.data.row_formats import FormatSpec, Reader, format_of
from surefoot.errors import DataError
from tests.support.vision import draw, image_processor, make_processor, vision_tokenizer

PIXELS = "pixel_values"
SETTINGS = ImageSettings("<|image_pad|>", 5, 14, 2, 28 * 28, 16 * 28 * 28)


@pytest.mark.parametrize("size", [(84, 56), (640, 480), (13, 300), (1, 40), (2000, 30), (28, 28), (29, 57), (5, 5)])
def test_an_image_gets_the_cells_and_pixels_of_transformers_own_processor(
    size: tuple[int, int], tmp_path: Path
) -> None:
    pixels = np.random.default_rng(3).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    path = tmp_path / "noise.png"
    Pillow.fromarray(pixels).save(path)
    theirs = make_processor()(images=Pillow.open(path), return_tensors="pt")
    image = find_image(str(path), tmp_path, SETTINGS)
    ours = PixelReader(image_processor(), SETTINGS).read([("here", [image])])
    assert ours.tensors[GRID].tolist() == theirs["image_grid_thw"].tolist()
    assert image.num_tokens * 4 == len(theirs["pixel_values"])
    torch.testing.assert_close(ours.tensors[PIXELS], theirs["pixel_values"], rtol=0, atol=0)


def test_an_image_that_was_scaled_is_scaled_no_further(tmp_path: Path) -> None:
    # Who is given the scaled pixels, such as an engine, must see just these.
    image = find_image(str(draw(tmp_path / "wide.png", "red", size=(700, 130))), tmp_path, SETTINGS)
    with open_image(image, SETTINGS) as picture:
        assert SETTINGS.cells(*picture.size) == (image.rows, image.columns)
        assert (picture.height, picture.width) == (image.rows * 28, image.columns * 28)


def test_positions_are_those_of_transformers(vision_folder: Callable[[str], Path]) -> None:
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(vision_folder("qwen2_5_vl"))
    token = model.config.image_token_id
    images = [Image("", "", (0, 0), 2, 3), Image("", "", (0, 0), 4, 1), Image("", "", (0, 0), 1, 1)]
    ids = [7, 8, *[token] * 6, 9, *[token] * 4, 10, *[token], 11, 12]
    theirs, _ = model.model.get_rope_index(
        torch.tensor([ids]),
        mm_token_type_ids=torch.tensor([[int(one == token) for one in ids]]),
        image_grid_thw=torch.tensor([[1, 4, 6], [1, 8, 2], [1, 2, 2]]),
    )
    settings = replace(SETTINGS, token_id=token)
    reader = PixelReader(image_processor(), settings)
    assert reader.positions(np.array(ids, np.int32), images, "").tolist() == theirs[:, 0].tolist()
    assert reader.positions(np.array([7, 8, 9], np.int32), [], "").tolist() == [[0, 1, 2]] * 3


def rendered(row: dict[str, Any], folder: Path, settings: ImageSettings | None = SETTINGS) -> Any:
    tokenizer = vision_tokenizer()
    if settings is not None:
        settings = replace(settings, token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"))
    source = RendererSource.of(tokenizer, {}, parse_special_tokens=False, images=settings)
    spec = FormatSpec()
    renderer = Renderer(source)
    text = renderer.render(Reader(spec, format_of(spec, row)).read(row), folder)
    (found,) = renderer.tokenize([text])
    if isinstance(found, BadRow):
        raise found
    return found


def talk(question: Any, answer: str = "red") -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def as_base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def forms(one: Path, two: Path) -> dict[str, dict[str, Any]]:
    """Two images, then a question, as users write it."""
    data = [f"data:image/png;base64,{as_base64(path)}" for path in (one, two)]
    urls = [{"type": "image_url", "image_url": {"url": url}} for url in data]
    text = {"type": "text", "text": "Which?"}
    empty = {"type": "image"}
    return {
        "OpenAI, base64": {"messages": talk([*urls, text])},
        "OpenAI, paths": {
            "messages": talk([{"type": "image_url", "image_url": name.name} for name in (one, two)] + [text])
        },
        "transformers": {
            "messages": talk([{"type": "image", "path": str(one)}, {"type": "image", "image": two.name}, text])
        },
        "base64 parts": {
            "messages": talk([{"type": "image", "base64": as_base64(path)} for path in (one, two)] + [text])
        },
        "TRL, empty parts": {"messages": talk([empty, empty, text]), "images": [one.name, str(two)]},
        "Parquet, parts filled up with nulls": {
            "messages": talk(
                [
                    *[{"index": i, "text": None, "type": "image"} for i in (0, 1)],
                    {"index": None, "text": "Which?", "type": "text"},
                ]
            ),
            "images": [{"bytes": None, "path": one.name}, {"bytes": None, "path": two.name}],
        },
        "TRL, prompt and completion": {
            "prompt": [{"role": "user", "content": "Which?"}],
            "completion": [{"role": "assistant", "content": "red"}],
            "images": [one.name, two.name],
        },
        "ms-swift": {"messages": talk("<image><image>Which?"), "images": [{"path": one.name}, {"path": two.name}]},
        "bytes of a hub dataset": {
            "messages": talk("<image><image>Which?"),
            "images": [{"bytes": path.read_bytes(), "path": None} for path in (one, two)],
        },
        "LLaMA-Factory, sharegpt": {
            "conversations": [{"from": "human", "value": "<image><image>Which?"}, {"from": "gpt", "value": "red"}],
            "images": [one.name, two.name],
        },
        "LLaMA-Factory, alpaca": {
            "instruction": "<image><image>Which?", "output": "red", "images": json.dumps([one.name, two.name])
        },
        "query and response": {"query": "<image><image>Which?", "response": "red", "images": [one.name, two.name]},
        "no places": {"query": "Which?", "response": "red", "images": [one.name, two.name]},
        "mixed": {
            "messages": talk([{"type": "image", "image": one.name}, {"type": "text", "text": "<image>Which?"}]),
            "images": [two.name],
        },
    }  # fmt: skip


NAMES = tuple(forms(Path(__file__), Path(__file__)))


@pytest.mark.parametrize("name", NAMES)
def test_every_form_gives_the_same_sample(name: str, tmp_path: Path) -> None:
    one, two = draw(tmp_path / "1.png", "red"), draw(tmp_path / "2.png", "blue", size=(56, 112))
    expected = rendered(forms(one, two)["ms-swift"], tmp_path)
    found = rendered(forms(one, two)[name], tmp_path)
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.spans == expected.spans
    assert [image.sha256 for image in found.images] == [image.sha256 for image in expected.images]
    assert [(image.rows, image.columns) for image in found.images] == [(2, 3), (4, 2)]
    token = vision_tokenizer().convert_tokens_to_ids("<|image_pad|>")
    assert (found.ids == token).sum() == 2 * 3 + 4 * 2
    assert vision_tokenizer().decode(found.ids[found.spans[0].begin :]).startswith("red")


def test_a_rendered_text_is_the_templates_own(tmp_path: Path) -> None:
    tokenizer = vision_tokenizer()
    path = draw(tmp_path / "1.png", "red")
    asked = [
        {"type": "text", "text": "Look: "},
        {"type": "image", "image": str(path)},
        {"type": "text", "text": " which?"},
    ]
    theirs = tokenizer.apply_chat_template(talk(asked), tokenize=False)
    row = rendered({"messages": talk(asked)}, tmp_path)
    assert tokenizer.decode(row.ids) == theirs.replace("<|image_pad|>", "<|image_pad|>" * 6)


def refused(rows: Path) -> dict[str, tuple[dict[str, Any], str]]:
    good = str(rows / "1.png")

    def asking(*images: object, question: str = "<image>?") -> dict[str, Any]:
        return {"query": question, "response": "a", "images": list(images)}

    return {
        "missing": (asking("no.png"), r"image no\.png is missing"),
        "broken": (asking("broken.png"), r"broken\.png is broken: "),
        "cut short": (asking("short.png"), r"short\.png is broken: "),
        "no image": (asking("notes.txt"), r"notes\.txt is broken: "),
        "address": (
            {"messages": talk([{"type": "image_url", "image_url": {"url": "https://x.org/1.png"}}])},
            "https://x.org/1.png .*allow_image_urls",
        ),
        "too few": (asking(good, question="<image><image>?"), "1 images, .*2 x <image>"),
        "too many": (asking(good, good), "2 images, .*1 x <image>"),
        "none": ({"messages": talk([{"type": "image"}])}, "0 images, .*1 x <image>"),
        "empty": (asking(), "0 images, .*1 x <image>"),
        "in an answer": ({"messages": talk("?", "<image>"), "images": [good]}, "assistant's turn .*image"),
        "a number": (asking(3, question="?"), r"images\[0\] is 3;"),
        "no base64": (asking("data:image/png;base64,###", question="?"), "no base64"),
        "bare text": ({"prompt": "?", "completion": "a", "images": [good]}, "bare texts"),
        "twice": ({**asking(good), "image": good}, "`images` and `image`"),
        "another column": ({"query": "<image>?", "response": "a", "picture": good}, r"columns: \{images: picture\}"),
        "another name": ({"query": "<image>?", "response": "a", "file": "a.JPG"}, r"Set columns: \{images: file\}"),
        "video": ({"query": "?", "response": "a", "videos": ["a.mp4"]}, "this version trains on text and images"),
        "narrow": (asking("narrow.png", question="?"), "2 x 500 .*200 times"),
    }  # fmt: skip


@pytest.mark.parametrize("name", tuple(refused(Path())))
def test_what_cannot_be_seen_is_refused(name: str, tmp_path: Path) -> None:
    good = draw(tmp_path / "1.png", "red")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 40)
    (tmp_path / "short.png").write_bytes(good.read_bytes()[:-60])
    (tmp_path / "notes.txt").write_text("nothing to see")
    Pillow.new("L", (2, 500)).save(tmp_path / "narrow.png")
    row, reason = refused(tmp_path)[name]
    with pytest.raises(BadRow, match=reason):
        rendered(row, tmp_path)


def test_a_model_that_reads_text_only_refuses_images(tmp_path: Path) -> None:
    draw(tmp_path / "1.png", "red")
    with pytest.raises(BadRow, match="image, .*reads text only"):
        rendered({"query": "?", "response": "a", "images": ["1.png"]}, tmp_path, None)


def test_text_about_images_stays_text(tmp_path: Path) -> None:
    row = rendered({"query": "What does <image> mean in XML, and <|image_pad|>?", "response": "a tag"}, tmp_path)
    token = vision_tokenizer().convert_tokens_to_ids("<|image_pad|>")
    assert "<image>" in vision_tokenizer().decode(row.ids)
    assert not (row.ids == token).any()


def test_an_image_that_changed_after_it_was_prepared_is_refused(tmp_path: Path) -> None:
    path = draw(tmp_path / "1.png", "red")
    image = find_image("1.png", tmp_path, SETTINGS)
    draw(path, "blue")
    with pytest.raises(DataError, match=r"data:7: image .*1\.png was changed since"):
        PixelReader(image_processor(), SETTINGS).read([("data:7", [image])])
    path.unlink()
    with pytest.raises(DataError, match=r"data:7: image .*1\.png .*No such file"):
        PixelReader(image_processor(), SETTINGS).read([("data:7", [image])])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """(address, what was asked for) of a server of pictures."""
    asked: list[str] = []

    class Pictures(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            found = tmp_path / self.path.strip("/")
            self.send_response(200 if found.is_file() else 404)
            self.end_headers()
            if found.is_file():
                self.wfile.write(found.read_bytes())

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Pictures) as pictures:
        Thread(target=pictures.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{pictures.server_port}", asked
        pictures.shutdown()


def test_addresses_are_fetched_once_where_that_is_allowed(
    server: tuple[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, asked = server
    allowed = replace(SETTINGS, allow_urls=True)
    local = find_image(str(draw(tmp_path / "1.png", "red")), tmp_path, SETTINGS)
    first, again = (find_image(f"{address}/1.png", tmp_path, allowed) for _ in range(2))
    assert first == again
    assert first.sha256 == local.sha256
    assert asked == ["/1.png"]
    with pytest.raises(BadRow, match="no.png could not be fetched: .*404"):
        find_image(f"{address}/no.png", tmp_path, allowed)
    (tmp_path / "page.html").write_text("<html>")
    with pytest.raises(BadRow, match=r"page\.html is broken"):
        find_image(f"{address}/page.html", tmp_path, allowed)
    draw(tmp_path / "right.png", "red").rename(tmp_path / "page.html")  # what was wrong there is not in the cache
    monkeypatch.setattr(images, "NOT_FETCHED", {})  # as in the next process
    assert find_image(f"{address}/page.html", tmp_path, allowed).sha256 == local.sha256


def test_pictures_are_upright_and_in_colour(tmp_path: Path) -> None:
    upright = Pillow.fromarray(np.random.default_rng(1).integers(0, 255, (56, 84, 3), dtype=np.uint8))
    upright.save(tmp_path / "upright.png")
    exif = upright.getexif()
    exif[0x0112] = 8  # the camera was turned
    upright.transpose(Pillow.Transpose.ROTATE_270).save(tmp_path / "turned.png", exif=exif)
    reader = PixelReader(image_processor(), SETTINGS)
    one, other = (find_image(name, tmp_path, SETTINGS) for name in ("upright.png", "turned.png"))
    torch.testing.assert_close(
        reader.read([("", [other])]).tensors[PIXELS], reader.read([("", [one])]).tensors[PIXELS], rtol=0, atol=0
    )
    for mode in ("P", "L", "RGBA", "CMYK", "1"):
        name = tmp_path / f"{mode.replace(';', '')}.tiff"
        Pillow.new(mode, (60, 60)).save(name)
        assert reader.read([("", [find_image(str(name), tmp_path, SETTINGS)])]).tensors[GRID].tolist() == [[1, 4, 4]]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_lies_on_white_as_in_transformers_own_processor(tmp_path: Path, mode: str) -> None:
    shapes = np.zeros((56, 84, 4), np.uint8)  # black lines on nothing
    shapes[20:24, :, 3], shapes[:, 40, 3] = 255, 128
    picture = Pillow.fromarray(shapes)
    (picture.quantize(8) if mode == "P" else picture.convert(mode)).save(tmp_path / "lines.png")
    with Pillow.open(tmp_path / "lines.png") as saved:
        assert (saved.mode, saved.has_transparency_data) == (mode, True)
        theirs = make_processor()(images=saved, return_tensors="pt")["pixel_values"]
    ours = (
        PixelReader(image_processor(), SETTINGS)
        .read([("", [find_image("lines.png", tmp_path, SETTINGS)])])
        .tensors[PIXELS]
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert ours.std() > 0.1


def test_rows_that_differ_in_their_image_alone_are_two_samples(tmp_path: Path) -> None:
    draw(tmp_path / "1.png", "red")
    draw(tmp_path / "2.png", "blue")
    one, two, again = (rendered({"query": "?", "response": "a", "images": [f"{n}.png"]}, tmp_path) for n in (1, 2, 1))
    assert one.ids.tolist() == two.ids.tolist()
    assert one.digest != two.digest
    assert one.digest == again.digest


def deep_png() -> bytes:
    """16 bits a channel, in colour: Pillow cannot write one, and reads it as one of 8."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 60, 60, 16, 2, 0, 0, 0)
    pixels = zlib.compress((b"\0" + bytes(6 * 60)) * 60)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def test_colours_of_more_than_eight_bits_would_be_cut_off_too(tmp_path: Path) -> None:
    (tmp_path / "deep.png").write_bytes(deep_png())
    with pytest.raises(BadRow, match=r"deep\.png .*8 bits .*\(RGB;16B\)"):
        rendered({"query": "?", "response": "a", "images": ["deep.png"]}, tmp_path)


def test_more_than_eight_bits_would_be_cut_off(tmp_path: Path) -> None:
    for mode in ("I;16", "F"):
        Pillow.new(mode, (60, 60)).save(tmp_path / "deep.tiff")
        with pytest.raises(BadRow, match=r"deep\.tiff .*8 bits"):
            find_image("deep.tiff", tmp_path, SETTINGS)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("~nobody-of-this-name/a.png", "is no path"),
        ("iVBORw0KGgo" * 500, "`data:image/png;base64,`"),
        ("s3://bucket/1.png", "s3://bucket/1.png .*https"),
        ("folder", "image folder is a folder"),
        ("empty.png", "empty.png .*file is empty"),
        ("thin.png", r"thin\.png: an image of 2000 x 3 pixels is more than 200 times as long as wide"),
    ],
)
def test_odd_sources_are_named(source: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.png").touch()
    draw(tmp_path / "thin.png", "red", size=(2000, 3))
    with pytest.raises(BadRow, match=reason):
        find_image(source, tmp_path, SETTINGS)


def test_files_may_be_named_by_address(tmp_path: Path) -> None:
    path = draw(tmp_path / "a b.png", "red")
    for source in (path.as_uri(), f"file://localhost{path.as_posix().replace(' ', '%20')}"):
        assert find_image(source, tmp_path, SETTINGS).path == str(path)
