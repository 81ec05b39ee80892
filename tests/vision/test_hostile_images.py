"""Images and addresses that somebody wrote to do harm: refused with their place, and nothing else happens."""

import hashlib
import json
import os
import random
import shutil
import socket
import ssl
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from surefoot.data import download, images
from surefoot.data.conversation import BadRow
from surefoot.data.images import Image, ImageSettings, find_image, open_image
from surefoot.errors import DataError
from tests.support.data import write_jsonl
from tests.support.vision import draw, picture_rows

SETTINGS = ImageSettings("<|image_pad|>", 5, 14, 2, 28 * 28, 16 * 28 * 28)
ONLINE = replace(SETTINGS, allow_urls=True)
Serve = Callable[[Callable[[socket.socket, str], None]], str]


def png_of(width: int, height: int) -> bytes:
    """A PNG whose header promises a size, and which has no pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_no_program_is_started_for_a_file_of_another_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ghostscript, trace = tmp_path / "bin" / "gs", tmp_path / "started"
    ghostscript.parent.mkdir()
    ghostscript.write_text(f"#!/bin/sh\ntouch {trace}\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ghostscript.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)  # what it found before is not used
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 60 60\n%%EndComments\nshowpage\n%%EOF\n"
    (tmp_path / "picture.png").write_bytes(eps)
    with pytest.raises(BadRow, match=r"picture\.png is broken"):
        find_image("picture.png", tmp_path, SETTINGS)
    assert not trace.exists()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_the_formats_that_users_have_are_read(kind: str, tmp_path: Path) -> None:
    Pillow.new("RGB", (84, 56), "red").save(tmp_path / "picture", kind)
    image = find_image("picture", tmp_path, SETTINGS)
    assert (image.rows, image.columns) == (2, 3)
    with open_image(image, SETTINGS) as picture:
        red, green, blue = np.asarray(picture).reshape(-1, 3).mean(0)
    assert red > 250
    assert max(green, blue) < 5


@pytest.mark.parametrize(
    ("size", "pixels"), [((10_000, 9_000), "90000000|10000 x 9000"), ((100_000, 80_000), "8000000000")]
)
def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(
    size: tuple[int, int], pixels: str, tmp_path: Path
) -> None:
    (tmp_path / "bomb.png").write_bytes(png_of(*size))
    with pytest.raises(images.BadImage, match=rf"bomb\.png has ({pixels}) pixels.* 89478485 "):
        find_image("bomb.png", tmp_path, SETTINGS)


@pytest.mark.long
def test_an_image_of_too_many_pixels_is_named_with_its_row(vision: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data" / "bad.jsonl", picture_rows(tmp_path / "data"))
    (tmp_path / "data" / "4.png").write_bytes(png_of(100_000, 80_000))
    (tmp_path / "run.yaml").write_text(json.dumps(vision(dataset=str(path))))
    done = subprocess.run(
        [sys.executable, "-m", "surefoot", "train", str(tmp_path / "run.yaml")], capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert "bad.jsonl:5" in done.stderr
    assert "8000000000 pixels" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_the_first_frame_of_an_animation_is_the_image(kind: str, tmp_path: Path) -> None:
    frames = [Pillow.new("RGB", (56, 56), colour) for colour in ("red", "blue", "lime")]
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    frames[0].save(tmp_path / "moving", kind, save_all=True, append_images=frames[1:], **options)
    with open_image(find_image("moving", tmp_path, SETTINGS), SETTINGS) as picture:
        assert np.asarray(picture).reshape(-1, 3).mean(0).tolist() == [255, 0, 0]


def seeds() -> dict[str, bytes]:
    pixels = np.random.default_rng(0).integers(0, 255, (60, 40, 3), dtype=np.uint8)
    picture = Pillow.fromarray(pixels)
    exif = picture.getexif()
    exif[0x0112] = 6
    moving = {"save_all": True, "append_images": [picture.rotate(180)]}
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("PNG", {"exif": exif}), ("PNG", moving), ("JPEG", {"exif": exif}), ("JPEG", {"progressive": True}),
        ("WEBP", {"exif": exif}), ("WEBP", {"lossless": True}), ("GIF", moving), ("BMP", {}),
        ("TIFF", {}), ("TIFF", {"compression": "tiff_lzw"}), ("TIFF", {"compression": "tiff_adobe_deflate"}),
        ("TIFF", {"compression": "jpeg"}),
    ]  # fmt: skip
    found = {}
    for number, (kind, options) in enumerate(kinds):
        file = BytesIO()
        picture.save(file, kind, **options)
        found[f"{kind}-{number}"] = file.getvalue()
    return found


def mutated(content: bytes, random_numbers: random.Random) -> bytes:
    """A file with some bytes changed, left out or put in, most of them in its header."""
    changed = bytearray(content)
    for _ in range(random_numbers.choice((1, 1, 2, 4, 16))):
        at = random_numbers.randrange(min(len(changed), random_numbers.choice((40, 200, len(changed)))))
        kind = random_numbers.randrange(4)
        if kind == 0:
            changed[at] = random_numbers.choice((0, 1, 127, 128, 255))
        elif kind == 1:
            changed[at : at + 4] = random_numbers.choice((b"\xff\xff\xff\xff", bytes(4), b"\x7f\xff\xff\xff"))
        elif kind == 2:
            del changed[at : at + random_numbers.randrange(1, min(40, len(changed)))]
        else:
            changed[at:at] = random_numbers.randbytes(random_numbers.randrange(1, 9))
    return bytes(changed[: random_numbers.randrange(1, len(changed) + 1)] if random_numbers.random() < 0.2 else changed)


@pytest.mark.parametrize("name", seeds())
def test_a_hostile_file_is_an_image_or_a_bad_row(name: str, tmp_path: Path) -> None:
    content, random_numbers = seeds()[name], random.Random(name)
    find_image(content, tmp_path, SETTINGS)
    refused = 0
    for _ in range(150):
        changed = mutated(content, random_numbers)
        (tmp_path / "hostile").write_bytes(changed)
        try:
            image = find_image("hostile", tmp_path, SETTINGS)
        except BadRow:
            refused += 1
            prepared = Image(str(tmp_path / "hostile"), hashlib.sha256(changed).hexdigest(), (0, 0), 1, 1)
            with suppress(DataError):  # as training would open it
                open_image(prepared, SETTINGS).close()
        else:
            open_image(image, SETTINGS).close()
    assert refused > 20


@pytest.mark.parametrize("source", ["/dev/zero", "file:///dev/zero", "pipe", "link", "file://{folder}/link"])
def test_only_regular_files_are_opened(source: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    with pytest.raises(BadRow, match="is not a regular file"):
        find_image(source.replace("{folder}", str(tmp_path)), tmp_path, SETTINGS)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_file_that_becomes_a_device_or_a_pipe_is_not_read(kind: str, tmp_path: Path) -> None:
    path = draw(tmp_path / "1.png", "red")
    image = find_image("1.png", tmp_path, SETTINGS)
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(DataError, match="is not a regular file"):
        open_image(image, SETTINGS)


def test_a_link_to_an_image_is_read(tmp_path: Path) -> None:
    path = draw(tmp_path / "1.png", "red")
    (tmp_path / "link").symlink_to(path)
    assert find_image("link", tmp_path, SETTINGS).path == str(path)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server that hands each connection and its request to a function; returns its address."""
    listeners: list[socket.socket] = []

    def start(answer: Callable[[socket.socket, str], None]) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def run() -> None:
            while True:
                try:
                    channel, _ = listener.accept()
                except OSError:
                    return
                with channel:
                    try:
                        answer(channel, channel.recv(65536).decode().partition("\r\n")[0])
                    except OSError:
                        continue

        Thread(target=run, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@pytest.mark.parametrize(
    "target",
    [
        "/1.png",
        "http://127.0.0.1:{port}/1.png",
        "http://localhost:{port}/1.png",
        "http://2130706433:{port}/1.png",
        "http://[::ffff:127.0.0.1]:{port}/1.png",
        "http://[64:ff9b::7f00:1]:{port}/1.png",
        "http://[2002:7f00:1::]:{port}/1.png",
        "http://0.0.0.0:{port}/1.png",
        "http://10.0.0.1/1.png",
        "http://192.168.1.1/1.png",
        "http://100.100.100.200/1.png",
        "http://169.254.169.254/latest/meta-data",
        "http://[fe80::1%25lo]/1.png",
        "http://[fd00:ec2::254]/1.png",
        "http://224.0.0.1/1.png",
        "file://{folder}/1.png",
        "ftp://127.0.0.1:{port}/1.png",
        "gopher://127.0.0.1:{port}/1.png",
        "http://[::1/1.png",
        "http://127.0.0.1:99999/1.png",
    ],
)
def test_a_redirect_leads_to_public_addresses_alone(target: str, serve: Serve, tmp_path: Path) -> None:
    content = draw(tmp_path / "1.png", "red").read_bytes()
    requests: list[str] = []

    def answer(channel: socket.socket, request: str) -> None:
        requests.append(request.split()[1])
        if request.split()[1] == "/1.png":
            channel.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content) + content)
            return
        port = channel.getsockname()[1]
        location = target.replace("{port}", str(port)).replace("{folder}", str(tmp_path))
        channel.sendall(f"HTTP/1.1 302 Found\r\nLocation: {location}\r\n\r\n".encode())

    address = serve(answer)
    with pytest.raises(images.BadImage, match="could not be fetched"):
        find_image(f"{address}/redirect", tmp_path, ONLINE)
    assert requests == ["/redirect"]
    assert find_image(f"{address}/1.png", tmp_path, ONLINE).rows > 0  # a row itself may name it


@pytest.mark.parametrize(
    "host", ["169.254.169.254", "[fe80::1]", "0.0.0.0", "[::]", "100.100.100.200", "[fd00:ec2::254]", "224.0.0.1"]
)
def test_addresses_that_no_image_server_has_are_not_connected_to(host: str, tmp_path: Path) -> None:
    with pytest.raises(images.BadImage, match="neither a public nor a private"):
        find_image(f"http://{host}/1.png", tmp_path, ONLINE)


def drip(channel: socket.socket, _: str) -> None:
    """Send headers for ever, each byte long before a timeout."""
    while True:
        channel.sendall(b"X")
        time.sleep(0.02)


def drip_body(channel: socket.socket, _: str) -> None:
    channel.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    drip(channel, _)


def say_nothing(channel: socket.socket, _: str) -> None:
    channel.recv(1)


def send_endless_redirect(channel: socket.socket, _: str) -> None:
    channel.sendall(b"HTTP/1.1 302 Found\r\n")
    while True:
        channel.sendall(b"X-Header: 100\r\n")
        time.sleep(0.02)


@pytest.mark.parametrize("answer", [drip, drip_body, say_nothing, send_endless_redirect])
def test_a_download_takes_no_longer_than_its_deadline(
    answer: Callable[[socket.socket, str], None], serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "DOWNLOAD_S", 1.0)
    began = time.monotonic()
    with pytest.raises(images.BadImage, match="could not be fetched"):
        find_image(f"{serve(answer)}/1.png", tmp_path, ONLINE)
    assert time.monotonic() - began < 10


def test_a_download_has_no_more_bytes_than_an_image_may_have(serve: Serve, tmp_path: Path) -> None:
    sent = [0]

    def answer(channel: socket.socket, _: str) -> None:
        channel.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            sent[0] += channel.send(bytes(1 << 20))

    with pytest.raises(BadRow, match="over 64 MiB"):
        find_image(f"{serve(answer)}/1.png", tmp_path, ONLINE)
    assert sent[0] < images.MAX_BYTES + (16 << 20)  # and what sockets hold


def test_a_download_that_breaks_off_is_told_from_a_broken_image(serve: Serve, tmp_path: Path) -> None:
    address = serve(lambda channel, _: channel.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n1234"))
    with pytest.raises(images.BadImage, match="4 bytes; 996 "):
        find_image(f"{address}/1.png", tmp_path, ONLINE)


def test_a_proxy_is_used_where_the_environment_names_it(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = draw(tmp_path / "1.png", "red").read_bytes()
    requests: list[str] = []

    def answer(channel: socket.socket, request: str) -> None:
        requests.append(request)
        if "/away" in request:
            channel.sendall(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/1.png\r\n\r\n")
        elif request.startswith("CONNECT"):
            channel.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")
        else:
            channel.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + content)

    proxy = serve(answer)
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, proxy)
    monkeypatch.delenv("no_proxy", raising=False)
    assert find_image("http://images.example/1.png?a=b c", tmp_path, ONLINE).rows > 0
    with pytest.raises(images.BadImage, match="redirect .*127"):
        find_image("http://images.example/away", tmp_path, ONLINE)
    with pytest.raises(images.BadImage, match="proxy .*403"):
        find_image("https://images.example/1.png", tmp_path, ONLINE)
    assert requests == [
        "GET http://images.example/1.png?a=b%20c HTTP/1.1",
        "GET http://images.example/away HTTP/1.1",
        "CONNECT images.example:443 HTTP/1.1",
    ]


def test_an_address_that_gives_no_image_is_asked_once(serve: Serve, tmp_path: Path) -> None:
    requests: list[str] = []

    def answer(channel: socket.socket, request: str) -> None:
        requests.append(request)
        channel.sendall(b"HTTP/1.1 200 OK\r\n\r\n<html>")

    address = f"{serve(answer)}/1.png"
    for _ in range(3):
        with pytest.raises(images.BadImage):
            find_image(address, tmp_path, ONLINE)
    assert len(requests) == 1


def test_an_https_server_is_known_by_its_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = draw(tmp_path / "1.png", "red").read_bytes()
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate]
    made += ["-subj", "/CN=images", "-addext", "subjectAltName=IP:127.0.0.1"]
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    subprocess.run(made, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        for _ in range(2):
            with suppress(OSError), context.wrap_socket(listener.accept()[0], server_side=True) as channel:
                channel.recv(65536)
                channel.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + content)

    thread = Thread(target=answer, daemon=True)
    thread.start()
    address = f"https://127.0.0.1:{listener.getsockname()[1]}/1.png"
    with pytest.raises(images.BadImage, match="CERTIFICATE_VERIFY_FAILED"):
        find_image(address, tmp_path, ONLINE)
    images.NOT_FETCHED.clear()
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert find_image(address, tmp_path, ONLINE).rows > 0
    thread.join(10)
    listener.close()


IN_A_NETWORK_OF_ITS_OWN = """
import socket, sys
from dataclasses import replace
from pathlib import Path
from threading import Thread
from surefoot.data import download

content, requests = Path(sys.argv[1]).read_bytes(), []

def serve(host):
    listener = socket.create_server((host, 8000))
    def run():
        while True:
            channel, _ = listener.accept()
            with channel:
                path = channel.recv(65536).decode().split()[1]
                requests.append((host, path))
                where = {"/again": "http://93.184.215.14:8000/1.png", "/in": "http://127.0.0.1:8000/1.png",
                         "/name": "http://rebinds.example:8000/1.png", "/round": "/round"}.get(path)
                if where:
                    channel.sendall(f"HTTP/1.1 301 Moved\\r\\nLocation: {where}\\r\\n\\r\\n".encode())
                else:
                    channel.sendall(b"HTTP/1.1 200 OK\\r\\n\\r\\n" + content)
    Thread(target=run, daemon=True).start()

serve("93.184.215.14")
serve("127.0.0.1")
base, resolved = "http://93.184.215.14:8000", []
assert download.download(f"{base}/again", most_bytes=1 << 20) == content

def fails(path, reason):
    try:
        download.download(f"{base}{path}", most_bytes=1 << 20)
    except OSError as error:
        assert reason in str(error), error
    else:
        raise AssertionError(path)

fails("/in", "no public address")
fails("/round", "more than 5 redirects")
# A name that is public when it is looked up first, and loopback from then on.
true = socket.getaddrinfo
def rebinding(host, *arguments, **options):
    if host != "rebinds.example":
        return true(host, *arguments, **options)
    resolved.append(host)
    return true("93.184.215.14" if len(resolved) == 1 else "127.0.0.1", *arguments, **options)
socket.getaddrinfo = rebinding
assert download.download(f"{base}/name", most_bytes=1 << 20) == content
fails("/name", "no public address")
assert not [path for host, path in requests if host == "127.0.0.1"], requests
print("all as it should be")
"""


def test_redirects_are_followed_and_names_are_resolved_once(tmp_path: Path) -> None:
    """With a public address of its own, in a network namespace."""
    network = ["unshare", "--map-root-user", "--net", "sh", "-c"]
    setup = "ip link set lo up && ip address add 93.184.215.14/32 dev lo"
    if not (shutil.which("unshare") and shutil.which("ip")) or subprocess.run([*network, setup]).returncode:
        pytest.skip("network namespaces cannot be made here")
    picture = draw(tmp_path / "1.png", "red")
    (tmp_path / "probe.py").write_text(IN_A_NETWORK_OF_ITS_OWN)
    done = subprocess.run(
        [*network, f"{setup} && exec {sys.executable} {tmp_path}/probe.py {picture}"],
        capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.stdout == "all as it should be\n", done.stderr
