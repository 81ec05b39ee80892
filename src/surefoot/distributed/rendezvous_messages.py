"""The protocol between launchers at `rdzv_endpoint`: a proof that each knows the run's secret, then lines of JSON.

    server -> client   {"surefoot": 1, "challenge": C, "secret": "file" | "environment"}
    client -> server   {"challenge": D, "proof": HMAC-SHA256(secret, "client" C D)}
    server -> client   {"proof": HMAC-SHA256(secret, "server" C D)}
    client -> server   {"request": "join" | "attach" | "count_waiting" | "close" | "store", ...}, answered one by one

After a request for the store the connection carries the store's own bytes. Lines and times are bounded. Nothing is
unpickled. What follows the proofs is neither encrypted nor signed.
"""

import asyncio
import hashlib
import hmac
import json
import os
import re
import secrets
from contextlib import suppress
from typing import Any

VERSION = 1
LINE_BYTES = 1 << 14
ANSWER_WITHIN_S = 5.0
"""Seconds within which each side of a handshake must send its next line."""
CHALLENGE_BYTES = 32
CHALLENGE = re.compile(f"[0-9a-f]{{{2 * CHALLENGE_BYTES}}}")


class ProtocolError(Exception):
    """Peer that does not speak this protocol."""


class WrongSecret(Exception):
    """Peer that does not know the secret."""


async def send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    """Send one message. Raises: OSError if the connection is lost."""
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()


async def receive(reader: asyncio.StreamReader, *, may_take_long: bool = False) -> dict[str, Any]:
    """Return the next message. Raises: ProtocolError, EOFError, TimeoutError, OSError."""
    async with asyncio.timeout(None if may_take_long else ANSWER_WITHIN_S):
        try:
            line = await reader.readline()
        except ValueError as error:
            raise ProtocolError(f"a line is longer than {LINE_BYTES} bytes") from error
    if not line.endswith(b"\n"):
        raise EOFError("the connection was closed")
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a line is not JSON") from error
    if not isinstance(message, dict):
        raise ProtocolError("a line is not a JSON object")
    return message


def prove(secret: str, side: str, server_challenge: str, client_challenge: str) -> str:
    """Return the proof that a side ("server" or "client") knows the secret."""
    text = f"surefoot {VERSION} {side} {server_challenge} {client_challenge}"
    return hmac.new(os.fsencode(secret), text.encode(), hashlib.sha256).hexdigest()


def new_challenge() -> str:
    """Return a text that no other process can have received before."""
    return secrets.token_hex(CHALLENGE_BYTES)


def challenge_of(message: dict[str, Any]) -> str:
    """Return the challenge that the other side sent. Raises: ProtocolError."""
    challenge = message.get("challenge")
    if not isinstance(challenge, str) or CHALLENGE.fullmatch(challenge) is None:
        raise ProtocolError("there is no challenge")
    return challenge


def is_proof(value: Any, expected: str) -> bool:
    """Return whether the value is the expected proof, compared in constant time."""
    return isinstance(value, str) and value.isascii() and hmac.compare_digest(value, expected)


async def greet_client(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str, secret_source: str
) -> None:
    """Run the server's side of the handshake. Raises: WrongSecret, and the errors of `receive`."""
    challenge = new_challenge()
    await send(writer, {"surefoot": VERSION, "challenge": challenge, "secret": secret_source})
    message = await receive(reader)
    client_challenge = challenge_of(message)
    if not is_proof(message.get("proof"), prove(secret, "client", challenge, client_challenge)):
        await send(writer, {"error": "wrong secret"})
        raise WrongSecret
    await send(writer, {"proof": prove(secret, "server", challenge, client_challenge)})


async def receive_greeting(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Run the client's first step: return the server's greeting.

    Raises: ProtocolError if it is another service; EOFError or OSError (TimeoutError) if there is no answer.
    """
    greeting = await receive(reader)
    if greeting.get("surefoot") != VERSION:
        raise ProtocolError("another service, or another version of Surefoot")
    challenge_of(greeting)
    return greeting


async def greet_server(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, greeting: dict[str, Any], secret: str
) -> None:
    """Run the client's side of the handshake. Raises: WrongSecret if either side does not know the other's secret."""
    challenge = new_challenge()
    proof = prove(secret, "client", greeting["challenge"], challenge)
    await send(writer, {"challenge": challenge, "proof": proof})
    answer = await receive(reader)
    if not is_proof(answer.get("proof"), prove(secret, "server", greeting["challenge"], challenge)):
        raise WrongSecret


async def relay(
    first: tuple[asyncio.StreamReader, asyncio.StreamWriter], second: tuple[asyncio.StreamReader, asyncio.StreamWriter]
) -> None:
    """Carry bytes between two connections until one of them ends. The caller closes both."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(LINE_BYTES):
            writer.write(data)
            await writer.drain()

    copies = [asyncio.create_task(copy(first[0], second[1])), asyncio.create_task(copy(second[0], first[1]))]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in copies:
            task.cancel()
        await asyncio.gather(*copies, return_exceptions=True)


async def close(writer: asyncio.StreamWriter) -> None:
    """Close a connection, whatever state it is in, once all is sent; at once if this is cancelled."""
    writer.close()
    try:
        with suppress(OSError):
            await writer.wait_closed()
    except asyncio.CancelledError:
        writer.transport.abort()
        raise
